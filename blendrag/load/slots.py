"""The layers in flight: a ring of buffers that the loader fills and the fused prefill empties."""

from __future__ import annotations

import torch


class Slots:
    """``count`` slots of ``numbers`` numbers. On the CPU a slot is used where it was filled."""

    def __init__(self, count: int, numbers: int, dtype: torch.dtype) -> None:
        self.numbers = numbers
        self._host = torch.empty(count, numbers, dtype=dtype)

    def host(self, slot: int) -> torch.Tensor:
        """Where a layer is decoded to; waits until the former content has left."""
        return self._host[slot]

    def send(self, slot: int, numbers: int) -> None:
        """Begin to move what was decoded, the first ``numbers``, to the device."""

    def receive(self, slot: int) -> torch.Tensor:
        """The slot on the device, for the computation that is put in next."""
        return self._host[slot]

    def done(self, slot: int) -> None:
        """The computation that was put in so far is the last to use this slot."""


class CudaSlots(Slots):
    """Pinned buffers, each with a twin on the device, and a stream of its own for the copies between them."""

    def __init__(self, count: int, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.numbers = numbers
        self._host = torch.empty(count, numbers, dtype=dtype, pin_memory=True)
        self._device = torch.empty(count, numbers, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device)
        self._sent = [torch.cuda.Event() for _ in range(count)]
        self._done = [torch.cuda.Event() for _ in range(count)]
        self._device.record_stream(self._stream)  # what is sent may be under way when this object goes
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the memory may have been another's

    def host(self, slot: int) -> torch.Tensor:
        self._sent[slot].synchronize()
        return self._host[slot]

    def send(self, slot: int, numbers: int) -> None:
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._done[slot])
            self._device[slot, :numbers].copy_(self._host[slot, :numbers], non_blocking=True)
            self._sent[slot].record(self._stream)

    def receive(self, slot: int) -> torch.Tensor:
        torch.cuda.current_stream(self._device.device).wait_event(self._sent[slot])
        return self._device[slot]

    def done(self, slot: int) -> None:
        self._done[slot].record(torch.cuda.current_stream(self._device.device))


def make_slots(count: int, numbers: int, dtype: torch.dtype, device: torch.device) -> Slots:
    if device.type == "cuda":
        return CudaSlots(count, numbers, dtype, device)
    return Slots(count, numbers, dtype)
