"""The layers in flight: a ring of buffers that the loader fills and the fused prefill empties."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Decode = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""A function that decodes rows of a record each, uint8, to numbers on the same device."""


class Slots:
    """A ring of ``count`` slots of ``numbers`` numbers. On the CPU a slot is used where it was filled."""

    def __init__(
        self, count: int, numbers: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._numbers = torch.empty(count, numbers, dtype=dtype, device=device)

    def fit(self, numbers: int, nbytes: int) -> bool:
        """Return whether a slot has room for so many numbers, in rows of so many bytes together."""
        return numbers <= self._numbers.shape[1]

    def fill(self, slot: int, rows: Sequence[torch.Tensor], decode: Decode) -> None:
        """Have a layer's rows decoded into a slot, once its former content has been used. Called in the
        loader's thread; rows that are not in pinned memory are free again when this returns."""
        decode(rows, self._numbers[slot])

    def receive(self, slot: int) -> torch.Tensor:
        """Return the slot on the device, for the computation that is launched next."""
        return self._numbers[slot]

    def done(self, slot: int) -> None:
        """Note that what was launched so far is the last computation to use this slot."""

    def settle(self) -> None:
        """Wait until all rows that were given are free."""


class CudaSlots(Slots):
    """Slots on the device. Rows go there as they are stored, from pinned memory, and are decoded there, since
    a processor decodes slower than it copies. All of that is on a stream of the loader's own. Rows that are
    not in pinned memory are copied there first."""

    def __init__(
        self, count: int, numbers: int, nbytes: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(count, numbers, dtype, device)
        self._pinned = torch.empty(count, nbytes, dtype=torch.uint8, pin_memory=True)
        self._rows = torch.empty(nbytes, dtype=torch.uint8, device=device)  # for one layer after the other
        self._stream = torch.cuda.Stream(device)
        self._filled = [torch.cuda.Event() for _ in range(count)]
        self._done = [torch.cuda.Event() for _ in range(count)]
        for memory in (self._numbers, self._rows):
            memory.record_stream(self._stream)  # what is sent may be under way when this object goes
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the memory may have been another's

    def fit(self, numbers: int, nbytes: int) -> bool:
        return super().fit(numbers, nbytes) and nbytes <= self._rows.numel()

    def fill(self, slot: int, rows: Sequence[torch.Tensor], decode: Decode) -> None:
        self._filled[slot].synchronize()
        lengths = [row.numel() for row in rows]
        nbytes = sum(lengths)
        staged, there = (memory[:nbytes].split(lengths) for memory in (self._pinned[slot], self._rows))
        with torch.cuda.stream(self._stream):
            for row, here, into in zip(rows, staged, there, strict=True):
                sent = row if row.is_pinned() else here.copy_(row.view(-1))
                into.copy_(sent.view(-1), non_blocking=True)
            self._stream.wait_event(self._done[slot])
            decode(there, self._numbers[slot])
            self._filled[slot].record(self._stream)

    def receive(self, slot: int) -> torch.Tensor:
        torch.cuda.current_stream(self._numbers.device).wait_event(self._filled[slot])
        return self._numbers[slot]

    def done(self, slot: int) -> None:
        self._done[slot].record(torch.cuda.current_stream(self._numbers.device))

    def settle(self) -> None:
        for event in self._filled:
            event.synchronize()


def make_slots(count: int, numbers: int, nbytes: int, dtype: torch.dtype, device: torch.device) -> Slots:
    if device.type == "cuda":
        return CudaSlots(count, numbers, nbytes, dtype, device)
    return Slots(count, numbers, dtype)
