"""A device that is none: its tensors lie in the CPU's memory, and say that they do not.

Whatever would launch a kernel there is noted, and whatever would have the host wait for a real one: numbers
that are read back, or sent and waited for, and operations whose result is as large as only the device knows.
Its type is "meta", which every build of torch has. What evades it (as ``tolist`` and ``torch.tensor(...,
device=...)`` do) fails, since meta tensors have no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

DEVICE = torch.device("meta")

# By their names in ATen.
_WAITING = {
    "_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "repeat_interleave", "_unique",
    "_unique2", "unique_dim", "unique_consecutive",
}  # fmt: skip


_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"}
_SOME_OF = {"index", "index_select", "embedding", "gather"}  # they read as much as they write


class DeviceTensor(torch.Tensor):
    """held: its numbers, on the CPU."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made

    def record_stream(self, stream: object) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})  # by a thread that does not count


class Crossings(TorchDispatchMode):
    """Counts those of the thread that uses it. waits: what it waited for; uploads, downloads: what it
    sent, and had sent to it; launches: what else runs there, by name; nbytes: what those read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.waits: list[str] = []
        self.uploads: list[str] = []
        self.downloads: list[str] = []
        self.launches: list[str] = []
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.split("::")[1]
        if name == "is_pinned":
            return False
        if name in ("pin_memory", "_pin_memory"):
            return args[0]
        with self:  # in inference mode, operations that are made of others come as they are
            if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                return made
        self._note(name, args, kwargs)
        out = _computed(func, args, kwargs)
        if not func.is_view and name not in _NO_KERNEL:
            self._note_launch(name, args, out)
        return out

    def _note_launch(self, name: str, args: Any, out: Any) -> None:
        written, read = (
            [leaf for leaf in tree_leaves(each) if isinstance(leaf, DeviceTensor)] for each in (out, args)
        )
        if written or (read and out is None):  # kernels of vLLM's write to what they are given
            self.note(name, written if name in _SOME_OF else read, written)

    def note(self, name: str, read: Sequence[torch.Tensor], written: Sequence[torch.Tensor]) -> None:
        """Note a kernel that is launched."""
        self.launches.append(name)
        self.nbytes += sum(each.nbytes for each in (*read, *written))

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        here = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        if name in ("copy_", "_to_copy"):
            source, target = (args[1], args[0].device) if name == "copy_" else (args[0], kwargs.get("device"))
            if target is not None and target.type != source.device.type:
                there = self.uploads if target.type == DEVICE.type else self.downloads
                (there if kwargs.get("non_blocking") or True in args[2:] else self.waits).append(name)
        elif len(here) < len(tensors):
            mixed = any(each.dim() for each in here)
            by_mask = "index" in name and any(each.dtype == torch.bool for each in tensors)
            if name in _WAITING or by_mask or mixed:
                self.waits.append(name)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    there = any(isinstance(leaf, DeviceTensor) for leaf in tree_leaves((args, kwargs)))
    on_cpu = {
        name: torch.device("cpu") if name == "device" and device else value for name, value in kwargs.items()
    }
    on_cpu.pop("pin_memory", None)
    held_args, held_kwargs = tree_map_only(DeviceTensor, lambda tensor: tensor.held, (args, on_cpu))
    out = func(*held_args, **held_kwargs)
    stays = device.type == "cpu" if device else not there
    if stays or (func is torch.ops.aten.copy_.default and not isinstance(args[0], DeviceTensor)):
        return out
    out = tree_map_only(torch.Tensor, DeviceTensor, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if there else out


class _Event:
    """Of work that is done as soon as it is launched."""

    def __init__(self, *_: object) -> None: ...

    def record(self, stream: object = None) -> None: ...

    def synchronize(self) -> None: ...


@contextmanager
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Crossings]:
    """Within, tensors can be sent to ``DEVICE``, and it has streams and events as CUDA does."""
    stream = SimpleNamespace(wait_event=lambda event: None, wait_stream=lambda other: None)
    for name, made in {"Stream": lambda device: stream, "Event": _Event, "stream": nullcontext}.items():
        monkeypatch.setattr(torch.cuda, name, made)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch, "Event", _Event)
    with Crossings() as crossings:
        yield crossings
