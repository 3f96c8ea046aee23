"""Two ranks in processes of their own, over gloo.

``python several_ranks.py OUT MEETING RANK NAME...`` does what functions of these names do, on one of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed

from blendrag.engine.blend.blending import RequestBlend
from blendrag.engine.forward.ranks import Ranks, SeveralRanks
from blendrag.engine.forward.slices import BlendQueue, Pace, Sliced, StepClock
from blendrag.engine.jobs import Jobs
from blendrag.engine.wire.recipe import BlendOrder, Recipe
from blendrag.engine.wire.report import BlendReport
from blendrag.errors import EngineError, StoreFullError
from blendrag.store.identity import KVIdentity
from blendrag.store.kv_reader import KVReader
from blendrag.store.record import NO_DRAFTS

HEADS = 4
_LIMIT_S = 120.0
_ENDING = {"fails_alone", "checks_alone"}


def on_two_ranks(folder: Path, *names: str) -> list[dict[str, Any]]:
    """By rank, what the functions of these names give there; of one that ended the rank, its exit code."""
    outs = [folder / f"answers {rank}" for rank in (0, 1)]
    words = [[__file__, str(out), str(folder / "meeting"), str(at), *names] for at, out in enumerate(outs)]
    ranks = [subprocess.Popen([sys.executable, *each]) for each in words]
    try:
        assert [rank.wait(_LIMIT_S) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return [json.loads(out.read_text()) for out in outs]


class Group:
    """What is used of vLLM's."""

    def __init__(self, meeting: str, rank: int) -> None:
        torch.distributed.init_process_group("gloo", f"file://{meeting}", world_size=2, rank=rank)
        self.rank_in_group, self.world_size, self.ranks = rank, 2, [0, 1]
        self.cpu_group = torch.distributed.group.WORLD

    def all_reduce(self, numbers: torch.Tensor) -> torch.Tensor:
        torch.distributed.all_reduce(numbers)
        return numbers

    def broadcast_object(self, value: Any) -> Any:
        values = [value]
        torch.distributed.broadcast_object_list(values, 0)
        return values[0]


def kv_of(heads: range) -> torch.Tensor:
    """[layers, 2, tokens, heads, size]: a head's numbers are its own."""
    kv = torch.arange(2 * 2 * 3 * HEADS * 5).view(2, 2, 3, HEADS, 5).bfloat16()
    return kv[:, :, :, heads.start : heads.stop]


def agreements(ranks: Ranks) -> dict[str, Any]:
    """What is left of what differs from rank to rank."""
    shared = ranks.whole(kv_of(range(1)), 1)  # of more ranks than heads
    whole = ranks.whole(kv_of(ranks.heads(HEADS)), HEADS)
    if whole is not None and shared is not None:
        assert ranks.first and whole.equal(kv_of(range(HEADS))) and shared.equal(kv_of(range(1)))
    return {
        "sum": ranks.sum(torch.full((3,), float(ranks.rank + 1))).tolist(),
        "choose": ranks.choose({"rank": ranks.rank}),
        "everyone": ranks.everyone(ranks.rank),
        "all": (ranks.all(True), ranks.all(ranks.rank == 0)),
        "outcome": ranks.outcome(lambda: ranks.rank),
        "whole": whole is not None,
        "full": _raised(ranks, StoreFullError("full")),
        "gone": _raised(ranks, OSError("gone")),
    }


def _raised(ranks: Ranks, error: Exception) -> str:
    def fail() -> None:
        raise error

    try:
        ranks.outcome(fail)
    except (StoreFullError, EngineError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return "nothing"


def slices(ranks: Ranks) -> list[tuple[str, int, int]]:
    """Blends by clocks that differ: which one, with how many rows, in which slice."""
    count, log = 0, list[tuple[str, int, int]]()

    def start(order: BlendOrder, pace: Pace) -> Sliced:
        for _ in range(10):
            time.sleep(0.001 + 0.004 * ranks.rank)
            log.append((order.request_id, pace.rows, count))
            if pace.pause(pace.rows):
                yield
        return {"done": order.request_id}  # type: ignore[return-value]

    queue = BlendQueue(start, ranks)
    recipe = Recipe("store", (("key", 0, 2),))
    queue.add(BlendOrder(name, name, [1, 2], [0], 0, recipe) for name in "ab")
    while queue:
        queue.run((0.006, 0.5)[ranks.rank])
        count += 1
    return log


def job(ranks: Ranks) -> list[bool]:
    """A job whose pieces take too long for a slice on one rank, not on the other."""
    jobs = Jobs(StepClock(), 1.0, ranks)

    def work() -> Generator[bool | None, None, str]:
        for _ in range(4):
            time.sleep(0.01 + 0.3 * ranks.rank)
            yield None
        return "done"

    name, ended = ("client", 1), list[bool]()
    jobs.begin(name, work())
    while not (ended and ended[-1]):
        ended.append(jobs.go_on(name)[0])
    return ended


def fails_alone(ranks: Ranks) -> bool:
    with ranks.together():
        if not ranks.first:
            raise MemoryError("on this rank alone")
    return ranks.first


def has_no_room(ranks: Ranks) -> list[str]:
    """One rank has too little memory for a prompt's stored KV: what all of them raise, and what is closed."""
    closed: list[str] = []

    def load(*_: Any) -> Any:
        if ranks.rank == 1:
            raise MemoryError("ring of 2 GiB")
        return SimpleNamespace(close=lambda: closed.append("layers"), num_layers=1)

    kv = SimpleNamespace(
        replicas=SimpleNamespace(promote_behind=None),
        layout=None,
        close_records=lambda _: closed.append("records"),
    )
    cache = SimpleNamespace(device=None)
    model, loader = SimpleNamespace(cache=cache, stored_drafts=NO_DRAFTS), SimpleNamespace(load=load)
    blend: Any = SimpleNamespace(_kv=kv, _ranks=ranks, _loader=loader, _model=model, _trace=None)
    try:
        RequestBlend._load(blend, [], [])
    except MemoryError as error:
        return [BlendReport.failed(error).cause or "", str(error), *closed]
    return []


def opens_alone(ranks: Ranks) -> list[str]:
    """What a store's opening gives that fails on one rank first."""
    from blendrag.engine.worker.data_plane import DataPlane  # imports vLLM, which the other tests do without

    root, opened, open_reader = tempfile.mkdtemp(), list[str](), KVReader.open
    root = ranks.choose(root)
    identity = KVIdentity("tiny", "weights-1", "bfloat16", num_layers=2, num_kv_heads=HEADS, head_size=4)
    decoder, cache = SimpleNamespace(dtype=torch.bfloat16), SimpleNamespace(with_drafts=None)
    model = SimpleNamespace(ranks=ranks, decoder=decoder, cache=cache)
    plane = DataPlane(model)  # type: ignore[arg-type]
    for fails in (True, False):
        KVReader.open = _out_of_files if fails else open_reader  # type: ignore[method-assign, assignment]
        try:
            plane.stores.open(root, asdict(identity), [{"kind": "disk"}])
            opened.append("open")
        except EngineError as error:
            opened.append(str(error))
    plane.close()
    return opened


def _out_of_files(*_: Any) -> KVReader:
    raise OSError("too many open files")


def checks_alone(ranks: Ranks) -> str | None:
    """A self-check during which one rank has no memory left."""
    return _unfit(ranks, None if ranks.first else torch.OutOfMemoryError("on this rank alone"))


def checks_unknown_structure(ranks: Ranks) -> str | None:
    return _unfit(ranks, AttributeError("no such norm"))


def _unfit(ranks: Ranks, error: Exception | None) -> str | None:
    """What a self-check says that ends with an error."""
    from blendrag.engine.worker import selfcheck

    def forward_errors(*_: Any) -> tuple[float, float]:
        if error is not None:
            raise error
        return 0.0, 0.0

    selfcheck.forward_errors = forward_errors
    return selfcheck.unfit_reason(None, SimpleNamespace(has_kernel=False, rounds=False), ranks)  # type: ignore[arg-type]


def _in_a_fork(out: str, meeting: str, rank: int, name: str) -> int:
    """What a rank does that may end it, in a process of its own: its exit code."""
    if not (child := os.fork()):
        _answer(f"{out} {name}", f"{meeting} {name}", rank, [name])
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _answer(out: str, meeting: str, rank: int, names: Sequence[str]) -> None:
    ranks = SeveralRanks(Group(meeting, rank))
    Path(out).write_text(json.dumps({name: globals()[name](ranks) for name in names}))


if __name__ == "__main__":
    out, meeting, rank, *names = sys.argv[1:]
    torch.set_num_threads(1)
    codes = {name: _in_a_fork(out, meeting, int(rank), name) for name in names if name in _ENDING}
    _answer(out, meeting, int(rank), [name for name in names if name not in _ENDING])
    left = {name: code or json.loads(Path(f"{out} {name}").read_text())[name] for name, code in codes.items()}
    Path(out).write_text(json.dumps(json.loads(Path(out).read_text()) | left))
