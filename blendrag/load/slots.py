"""The layers in flight: a ring of buffers that the loader fills and the fused prefill empties."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Decode = Callable[[Sequence[torch.Tensor], torch.Tensor], None]
"""A function that decodes some layers' rows of a record each, uint8 [layers, row bytes], to [layers, numbers]
on the same device."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The kind of slots: how many, the most layers that come at once, of which type, and where."""

    count: int
    group: int
    dtype: torch.dtype
    device: torch.device


class Slots:
    """A ring of slots of ``numbers`` numbers. On the CPU a slot is used where it was filled. nbytes: of a
    layer's rows, at most, where they have to be copied first."""

    def __init__(self, kind: Kind, numbers: int, nbytes: int) -> None:
        self.kind = kind
        self._numbers = torch.empty(kind.count, numbers, dtype=kind.dtype, device=kind.device)

    def fit(self, kind: Kind, numbers: int, nbytes: int) -> bool:
        """Return whether these are of this kind, with room for so many numbers, and bytes of rows."""
        return kind == self.kind and numbers <= self._numbers.shape[1]

    def fill(self, slot: int, rows: Sequence[torch.Tensor], decode: Decode) -> None:
        """Have the rows of some layers, [layers, row bytes] each, decoded into the slots that begin at
        ``slot``, once their former content has been used. Called in the loader's thread; rows that are not in
        pinned memory are free again when this returns."""
        decode(rows, self._numbers[slot : slot + len(rows[0])])

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

    def __init__(self, kind: Kind, numbers: int, nbytes: int) -> None:
        super().__init__(kind, numbers, nbytes)
        self._nbytes = nbytes
        count, device = kind.count, kind.device
        self._pinned = torch.empty(count * nbytes, dtype=torch.uint8, pin_memory=True)
        self._rows = torch.empty(kind.group * nbytes, dtype=torch.uint8, device=device)  # of one group
        self._stream = torch.cuda.Stream(device)
        self._filled = [torch.cuda.Event() for _ in range(count)]
        self._done = [torch.cuda.Event() for _ in range(count)]
        for memory in (self._numbers, self._rows):
            memory.record_stream(self._stream)  # what is sent may be under way when this object goes
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the memory may have been another's

    def fit(self, kind: Kind, numbers: int, nbytes: int) -> bool:
        return super().fit(kind, numbers, nbytes) and nbytes <= self._nbytes

    def fill(self, slot: int, rows: Sequence[torch.Tensor], decode: Decode) -> None:
        slots = range(slot, slot + len(rows[0]))
        for each in slots:
            self._filled[each].synchronize()
        staged, there, begin = self._pinned[slot * self._nbytes :], [], 0
        with torch.cuda.stream(self._stream):
            for row in rows:
                into = self._rows[begin : begin + row.numel()].view(row.shape)
                sent = row
                if not row.is_pinned():
                    sent = staged[begin : begin + row.numel()].view(row.shape).copy_(row)
                there.append(into.copy_(sent, non_blocking=True))
                begin += row.numel()
            for each in slots:
                self._stream.wait_event(self._done[each])
            decode(there, self._numbers[slot : slots.stop])
            for each in slots:
                self._filled[each].record(self._stream)

    def receive(self, slot: int) -> torch.Tensor:
        torch.cuda.current_stream(self._numbers.device).wait_event(self._filled[slot])
        return self._numbers[slot]

    def done(self, slot: int) -> None:
        self._done[slot].record(torch.cuda.current_stream(self._numbers.device))

    def settle(self) -> None:
        for event in self._filled:
            event.synchronize()


def make_slots(kind: Kind, numbers: int, nbytes: int) -> Slots:
    return (CudaSlots if kind.device.type == "cuda" else Slots)(kind, numbers, nbytes)


def sent_at_once(device: torch.device) -> int:
    """Return how many layers are best copied to a device together: Python takes 30 us for each copy of a
    record's rows, an H100 less for a layer's bytes (docs/gpu.md)."""
    return 4 if device.type == "cuda" else 1
