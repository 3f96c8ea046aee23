"""What forecasts are worth in vLLM's own prefix cache: a trace of dialogues through its cache manager.

    python benchmarks/prefix_order.py --trace dialogs.jsonl.gz --predictor folder --sizes 8000,16000,32000

The manager, its blocks and its hashes are vLLM's; only the model is missing. Forecasts come when a prompt
does, and are acted upon when it is answered.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from blendrag.bench.progress import bench_progress
from blendrag.bench.report import table_with, write_json
from blendrag.engine.compat import FreeBlocks
from blendrag.engine.prefix_order import PrefixOrder
from blendrag.replay.events import events, looked_up
from blendrag.replay.oracle import oracle_forecasts
from blendrag.replay.request import Trace
from blendrag.replay.source import Workload, open_source
from blendrag.replay.workload_dialogs import BLOCK

ARMS = ("vLLM's order", "forecasts", "oracle")
LONGEST = 1 << 20  # tokens of a prompt


class Cache:
    """vLLM's cache manager, with room for ``tokens`` tokens, and the order of its free blocks."""

    def __init__(self, tokens: int, ordered: bool) -> None:
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        config = KVCacheConfig(tokens // BLOCK + 1, [], [KVCacheGroupSpec(["layer"], spec)])
        self.manager = KVCacheManager(config, LONGEST, scheduler_block_size=BLOCK, hash_block_size=BLOCK)
        blocks = FreeBlocks.of(self.manager.block_pool)
        assert blocks is not None, "this vLLM has another pool of blocks"
        self.order = PrefixOrder(blocks) if ordered else None
        self._names: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        self._hasher = get_request_block_hasher(BLOCK, sha256)

    def tokens(self, keys: Sequence[str]) -> list[int]:
        """Of blocks: others for every key."""
        return [BLOCK * name + at for name in map(self._names.__getitem__, keys) for at in range(BLOCK)]

    def ask(self, name: str, whose: str, tokens: list[int]) -> Request | None:
        """The request, with ``num_cached_tokens``; None if there is no room for it beside the others."""
        request = Request(
            name, tokens, SamplingParams(max_tokens=1), None, block_hasher=self._hasher, session_id=whose
        )
        found, request.num_cached_tokens, _ = self.manager.get_computed_blocks(request)
        return request if self._hold(request, request.num_cached_tokens, found) else None

    def answer(self, request: Request, whose: str, tokens: list[int]) -> None:
        if tokens:
            request.append_output_token_ids(tokens)
            self._hold(request, request.num_computed_tokens)
        (blocks,) = self.manager.get_block_ids(request.request_id)
        if self.order:
            self.order.finished(whose, blocks)
        self.manager.free(request)
        if self.order:
            self.order.settle()

    def _hold(self, request: Request, there: int, found: object = None) -> bool:
        new = there if found is not None else 0
        held = self.manager.allocate_slots(request, request.num_tokens - there, new, found)
        request.num_computed_tokens = request.num_tokens if held is not None else there
        return held is not None


def hit_ratio(trace: Trace, size: int, forecasts: Sequence[float] | None) -> float:
    """Share of the prompts' tokens that were found."""
    cache = Cache(size, ordered=forecasts is not None)
    running: dict[int, Request] = {}
    asked = found = 0
    for number, over in events(trace):
        one = trace.requests[number]
        whose = one.conversation or str(number)
        # a prompt ends somewhere in a block, and vLLM always computes its last token
        tokens, prompt = cache.tokens(one.keys), BLOCK * looked_up(one) + 1
        if over:
            if request := running.pop(number, None):
                cache.answer(request, whose, tokens[prompt:])
            continue
        if cache.order and forecasts is not None:
            cache.order.began(whose)
            cache.order.forecast(whose, forecasts[number])
        request = cache.ask(str(number), whose, (tokens if len(tokens) >= prompt else [*tokens, 0])[:prompt])
        asked += prompt - 1
        if request is not None:
            running[number] = request
            found += request.num_cached_tokens
    return found / asked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="dialogues, an object per line")
    parser.add_argument("--predictor", type=Path, help="its folder; by default the user's")
    parser.add_argument("--sizes", default="8000,16000,32000", help="of the cache, in tokens")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sizes = [int(size) for size in options.sizes.split(",")]
    source = open_source(options.trace, Workload(predictor=options.predictor))
    init_none_hash(sha256)
    ratios: dict[str, list[list[float]]] = {arm: [[] for _ in sizes] for arm in ARMS}
    with bench_progress() as progress:
        progress.total(options.seeds * len(sizes) * len(ARMS))
        for seed in range(options.seeds):
            progress.note(f"trace {seed + 1}")
            trace = source.trace(seed)
            told = dict(zip(ARMS, (None, source.forecasts(trace), oracle_forecasts(trace)), strict=True))
            for arm, (place, size) in itertools.product(ARMS, enumerate(sizes)):
                ratios[arm][place].append(hit_ratio(trace, size, told[arm]))
                progress.step()
    table = table_with("token hit ratio", *(f"{size:,}" for size in sizes))
    for arm, by_size in ratios.items():
        table.add_row(arm, *(f"{sum(r) / len(r):.3f} ({min(r):.3f}-{max(r):.3f})" for r in by_size))
    console = Console()
    console.print(table, markup=False)
    console.print(f"{options.trace.name}, {options.seeds} traces. {' '.join(source.notes)}", markup=False)
    if options.json:
        write_json({"sizes": sizes, "ratios": ratios}, options.json)


if __name__ == "__main__":
    main()
