"""What forecasts cost beside a running engine: the predictor's time and memory, and how long policies hold up
the engine's worker.

    blendrag evictor train --data dialogs.jsonl.gz
    python benchmarks/forecast_overhead.py --data others.jsonl.gz

Conversations of the file are answered in turns, each prompt with documents in front of it: first as many
without a predictor (lru), then with one (lpc). One prompt at a time, so that the engine is always busy. Its
time is processor time of its processes by its threads: what else runs on the machine is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import re
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console

from blendrag.bench.progress import BenchProgress, bench_progress
from blendrag.bench.report import table_with, write_json
from blendrag.bench.statistics import spread
from blendrag.bench.texts import text_pieces
from blendrag.chat.chat import Chat
from blendrag.chat.request import ChatRequest
from blendrag.engine.generation import Sampling
from blendrag.forecast.dialogs import Dialog, read_dialogs
from blendrag.machine import describe_machine
from blendrag.prompt.template import decode
from blendrag.serving.collection import Collection
from blendrag.settings import Settings

DOCUMENTS, TOKENS, EACH = 32, 256, 4  # in the index, of each, per prompt
AT_ONCE = 8  # conversations
ANSWER = Sampling(max_tokens=16)
WAIT_S = 120.0


def requests(dialogs: Sequence[Dialog], documents: Sequence[str]) -> Iterator[ChatRequest]:
    """Prompts of several conversations in turns; a conversation that ends makes room for the next."""
    rng = random.Random(0)
    waiting = (prompts(dialog, rng.sample(documents, EACH)) for dialog in itertools.cycle(dialogs))
    running = list(itertools.islice(waiting, AT_ONCE))
    while True:
        at = rng.randrange(AT_ONCE)
        request = next(running[at], None)
        if request is None:
            running[at] = next(waiting)
        else:
            yield request


def prompts(dialog: Dialog, documents: Sequence[str]) -> Iterator[ChatRequest]:
    """With the same documents for the whole conversation, in front of its latest prompt."""
    history: list[dict[str, Any]] = []
    for said in dialog.prompts:
        asked = {"role": "user", "content": "\n\n".join([*documents, said])}
        yield ChatRequest([*history, asked], ANSWER, conversation=dialog.id)
        history += [{"role": "user", "content": said}, {"role": "assistant", "content": "I see."}]


def answered(chat: Chat, some: Iterator[ChatRequest], count: int, progress: BenchProgress) -> dict[str, Any]:
    """So many of the requests: seconds in all, of the engine's processors, milliseconds to first token, and
    memory of this process after."""
    ttft, begin, spent = [], time.perf_counter(), engine_s()
    for request in itertools.islice(some, count):
        ttft.append(1e3 * chat.complete(request).ttft_s)
        progress.step()
    seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "engine_cpu_s": engine_s() - spent,
        "ttft_ms": spread(ttft),
        "rss_mb": rss_mb(),
    }


def engine_s() -> float:
    """Seconds of processor time of the processes that this one started, and those that they did."""
    parents, spent = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = re.sub(r"^.*\) ", "", stat.read_text(), flags=re.DOTALL).split()
            pid = int(stat.parent.name)
            parents[pid], spent[pid] = int(fields[1]), int(fields[11]) + int(fields[12])

    def ours(pid: int) -> bool:
        return (parent := parents.get(pid, 0)) == os.getpid() or (parent > 1 and ours(parent))

    return sum(ticks for pid, ticks in spent.items() if ours(pid)) / os.sysconf("SC_CLK_TCK")


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure(
    settings: Settings, dialogs: Sequence[Dialog], count: int, progress: BenchProgress
) -> dict[str, Any]:
    progress.total(2 * count)
    with tempfile.TemporaryDirectory() as folder:
        chat = Chat(settings, Path(folder))
        try:
            return _measured(chat, dialogs, count, progress)
        finally:
            chat.close()


def _measured(chat: Chat, dialogs: Sequence[Dialog], count: int, progress: BenchProgress) -> dict[str, Any]:
    library = chat.library
    progress.note("starting the engine")
    engine = library.start()
    documents = [decode(library.tokenizer, ids) for ids in text_pieces(library.tokenizer, DOCUMENTS, TOKENS)]
    Collection(library, "overhead").add({str(at): [text] for at, text in enumerate(documents)})
    some = requests(dialogs, documents)
    progress.note("without forecasts")
    without = answered(chat, some, count, progress)
    progress.note("with forecasts")
    library.use_policy("lpc")
    beside = answered(chat, some, count, progress)
    counts = library.eviction()["forecasts"]
    deadline = time.monotonic() + WAIT_S
    while counts["answered"] + counts["unanswered"] + counts["dropped"] < count:
        assert time.monotonic() < deadline, counts
        time.sleep(0.1)
        counts = library.eviction()["forecasts"]
    return {
        "machine": describe_machine(chat.settings.model, engine.facts),
        "prompts": count,
        "lru": without,
        "lpc": beside,
        "forecasts": counts,
        "predictor_share": counts["busy_s"] * engine.facts["threads"] / beside["engine_cpu_s"],
        "predictor_mb": beside["rss_mb"] - without["rss_mb"],
        "policy_calls": library.session.call("stats")["policy_calls"],
    }


def print_results(results: dict[str, Any], console: Console) -> None:
    calls = table_with("the worker tells policies of", "calls", "p50 ms", "p99 ms", "worst ms")
    for name, label in (("used", "a prompt"), ("forecast", "forecasts")):
        one = results["policy_calls"][name]
        milliseconds = (f"{one[column]:.3f}" for column in ("p50_ms", "p99_ms", "worst_ms"))
        calls.add_row(label, f"{one['calls']:,}", *milliseconds)
    console.print(calls)
    counts = results["forecasts"]
    console.print(
        f"{counts['answered']:,} of {counts['asked']:,} forecasts in {counts['busy_s']:.2f} s of processor:"
        f" {results['predictor_share']:.2%} of the engine's time for {results['prompts']:,} prompts."
        f" {results['predictor_mb']:.0f} MB more memory. {counts['reason']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="conversations, as for blendrag evictor")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tiers = [{"kind": "ram", "chunks": DOCUMENTS // 2}, {"kind": "disk", "chunks": DOCUMENTS}]
    with bench_progress() as progress:
        settings = Settings.load(tiers=tiers)
        results = measure(settings, list(read_dialogs(options.data)), options.prompts, progress)
    print_results(results, Console())
    if options.json:
        write_json(results, options.json)


if __name__ == "__main__":
    main()
