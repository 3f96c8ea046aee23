"""Positions, slots and numbers of rows: the host computes with them, the device reads them.

Reading a number back from a device waits for all that was launched on it. So whatever follows from a prompt's
positions is computed on the host, and uploaded once for all layers that read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Indices:
    """[n] int64 numbers, the same on the host and on the device."""

    host: Ints
    device: torch.Tensor

    @classmethod
    def of(cls, host: Ints, device: torch.device) -> Self:
        return cls(host, upload(host, device))

    def __len__(self) -> int:
        return len(self.host)

    def __getitem__(self, which: slice | Indices) -> Indices:
        if isinstance(which, slice):
            return Indices(self.host[which], self.device[which])
        return Indices(self.host[which.host], self.device[which.device])


def upload(host: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the numbers on the device; on a CPU, in the same memory. Returns at once, while earlier launches
    go on."""
    numbers = torch.from_numpy(host)
    if device.type == "cpu":
        return numbers
    return numbers.pin_memory().to(device, non_blocking=True)  # otherwise this waits


def download(numbers: torch.Tensor) -> torch.Tensor:
    """Return the numbers on the host, without waiting for them: they are right behind the next wait for what
    the device was given since. On a CPU, they are there."""
    if numbers.device.type == "cpu":
        return numbers
    there = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    return there.copy_(numbers, non_blocking=True)


def await_former(launched: list[torch.Event], device: torch.device) -> None:
    """Wait until a device has computed what had been launched when this was called the time before: else only
    launching would be timed. What has been launched since keeps it busy meanwhile."""
    if device.type != "cpu":
        launched.append(torch.Event(device))
        launched[-1].record()
        if len(launched) > 1:
            launched.pop(0).synchronize()
