"""What an eviction policy's calls cost when a tier holds very many chunks.

    python benchmarks/eviction_operations.py --chunks 1000000

Times are of the processor, of one thread: what other programs take on a busy machine is not in them. Keys are
asked for at random, so that hardly any is in the processor's caches: a real workload is kinder.
"""

from __future__ import annotations

import argparse
import random
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console

from blendrag.bench.progress import BenchProgress, bench_progress
from blendrag.bench.report import table_with, write_json
from blendrag.eviction import POLICIES, EvictionPolicy, Use, make_policy
from blendrag.eviction.lpc_plus import LPCPlus
from blendrag.replay.learned import learned
from blendrag.replay.request import Request, Trace

STEP_S = 1e-3  # between two calls, by the policy's clock
CONVERSATIONS = 10_000
SIZE = 500  # of a chunk, tokens

Times = dict[str, dict[str, float]]


class Timed:
    """Calls of one kind: microseconds of each."""

    def __init__(self) -> None:
        self._spent = array("d")
        self._clock_us = median(self._empty() for _ in range(1000))

    def __call__(self, call: Callable[[], object]) -> None:
        began = time.thread_time()
        call()
        self._spent.append(1e6 * (time.thread_time() - began) - self._clock_us)

    def summary(self) -> dict[str, float]:
        spent = np.frombuffer(self._spent)
        p50, p99 = np.percentile(spent, (50, 99)).tolist()
        return {"p50": p50, "p99": p99, "mean": float(spent.mean()), "worst": float(spent.max())}

    @staticmethod
    def _empty() -> float:
        began = time.thread_time()
        return 1e6 * (time.thread_time() - began)


def made_up_trace(requests: int = 5000, chunks: int = 2000, each: int = 5) -> Trace:
    """Chunks by a Zipf popularity: something for ``lpc+`` to learn from."""
    rng = np.random.default_rng(0)
    ranks = 1.0 / np.arange(1, chunks + 1)
    drawn = rng.choice(chunks, (requests, each), p=ranks / ranks.sum())
    return Trace(
        "made up",
        [
            Request(0.5 * number, keys, (SIZE,) * len(keys))
            for number, row in enumerate(drawn)
            for keys in (tuple(dict.fromkeys(map(str, row))),)
        ],
        prefix=False,
        unit="tokens",
    )


def policies() -> Iterator[tuple[str, EvictionPolicy]]:
    """All of them by name; ``lpc+`` twice."""
    for name in POLICIES:
        yield name, make_policy(name)
    yield "lpc+, taught", LPCPlus(learned(made_up_trace(), share=0.95))


def measure(policy: EvictionPolicy, chunks: int, calls: int) -> Times:
    """Fill it with ``chunks`` chunks, then call each method ``calls`` times."""
    rng = random.Random(0)
    clock = 0.0
    keys = [f"{rng.getrandbits(128):032x}" for _ in range(chunks)]

    def use(cost: float | None = None) -> Use:
        nonlocal clock
        clock += STEP_S
        return Use(clock, cost, depth=rng.randrange(5), length=5, known=rng.randrange(6))

    for key in keys:
        policy.added(key, SIZE, use(rng.random()))
    used, told, evicted, added = Timed(), Timed(), Timed(), Timed()
    for _ in range(calls):
        key, one = rng.choice(keys), use()
        used(lambda: policy.used(key, one))  # noqa: B023  (called at once)
    for _ in range(calls):
        key, chance, whose = rng.choice(keys), rng.random(), str(rng.randrange(CONVERSATIONS))
        told(lambda: policy.forecast(key, chance, clock, whose))  # noqa: B023
    for _ in range(calls):
        key, one = f"{rng.getrandbits(128):032x}", use(rng.random())
        evicted(lambda: evict(policy))
        added(lambda: policy.added(key, SIZE, one))  # noqa: B023
    timed = {"used": used, "forecast": told, "victim, removed": evicted, "added": added}
    return {name: one.summary() for name, one in timed.items()}


def evict(policy: EvictionPolicy) -> None:
    key = policy.victim()
    assert key is not None, "there are as many as before"
    policy.removed(key)


def run(names: list[str], chunks: int, calls: int, progress: BenchProgress) -> dict[str, Times]:
    progress.total(len(names))
    results: dict[str, Times] = {}
    for name, policy in policies():
        if name in names:
            progress.note(name)
            results[name] = measure(policy, chunks, calls)
            progress.step()
    return results


def main() -> None:
    every = [*POLICIES, "lpc+, taught"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--chunks", type=int, default=1_000_000)
    parser.add_argument("--calls", type=int, default=100_000)
    parser.add_argument("--policy", action="append", choices=every, help="by default all; may be repeated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with bench_progress() as progress:
        results = run(options.policy or every, options.chunks, options.calls, progress)
    table = table_with("policy", "call", "p50 us", "p99 us", "mean us", "worst us")
    for name, times in results.items():
        for call, one in times.items():
            numbers = (f"{one[of]:,.1f}" for of in ("p50", "p99", "mean", "worst"))
            table.add_row(name, call, *numbers)
    console = Console()
    console.print(table, markup=False)
    console.print(f"{options.chunks:,} chunks, {options.calls:,} calls of each kind, one thread.")
    if options.json:
        write_json({"chunks": options.chunks, "calls": options.calls, "us": results}, options.json)


if __name__ == "__main__":
    main()
