"""Prompts as they come: chunks in any order, twice, absent, damaged; no question to speak of; too long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from blendrag.engine.client.generation import Sampling
from blendrag.engine.wire.operations import Deleted
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import PromptTooLongError
from blendrag.options import BlendOptions
from blendrag.store.contexts import Chunk
from workbench import Bench, Prompt, distance

pytestmark = pytest.mark.engine

CLOSE = 2e-3
TEXT = Sampling(max_tokens=16, logprobs=20)


def cached(*pieces: Chunk) -> Prompt:
    """With nothing between."""
    prompt = Prompt()
    for piece in pieces:
        prompt = prompt.cached(piece)
    return prompt


def first_tokens(bench: Bench, piece: Chunk) -> Prompt:
    head = bench.encode("Part:\n")
    return Prompt((*head, *piece.token_ids[:50]), ((piece.key, len(head), 50),))


# What a prompt is made of, from the stored pieces.
SHAPES: dict[str, Callable[[Bench, list[Chunk]], Prompt]] = {
    "reordered": lambda bench, pieces: bench.prompt(reversed(pieces[:5])),
    "repeated": lambda bench, pieces: bench.prompt([*pieces[:2], pieces[0], pieces[0]]),
    "no separator": lambda bench, pieces: cached(*pieces[:3]).fresh(bench.encode("\n\nIt")),
    "and one token": lambda bench, pieces: cached(*pieces[:3]).fresh(bench.encode("?")[:1]),
    "and nothing": lambda bench, pieces: cached(*pieces[:2]),
    "the first tokens of a chunk": lambda bench, pieces: first_tokens(bench, pieces[4]).fresh(
        bench.encode("\n\nThe package")
    ),
    "a tail longer than one fused prefill": lambda bench, pieces: bench.prompt(pieces[:2]).fresh(
        [token for piece in pieces[10:14] for token in piece.token_ids]
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_prompt_of_any_shape_is_blended_and_at_ratio_1_full_prefills(bench: Bench, shape: str) -> None:
    prompt = SHAPES[shape](bench, bench.pieces)
    full, exact = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0)
    assert distance(full, exact) < CLOSE
    assert exact.token_ids == full.token_ids
    usual = bench.blended(prompt, TEXT)
    assert usual.report and usual.report.missing == {}
    assert 0 < usual.report.recomputed < usual.report.cached


def test_a_chunk_never_stored_is_computed_and_reported(bench: Bench) -> None:
    stranger = bench.piece("Nobody has ever prefilled this passage about the harbour of Trondheim. " * 4)
    prompt = bench.prompt([bench.pieces[0], stranger, bench.pieces[1]])
    full, exact = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0)
    assert exact.report and exact.report.missing == {stranger.key: "missing"}
    assert exact.report.cached == 2 * 96
    assert exact.token_ids == full.token_ids and distance(full, exact) < CLOSE


def test_without_any_stored_chunk_the_answer_is_exact_at_every_ratio(bench: Bench) -> None:
    strangers = [bench.piece(f"Passage {i} of a book that is not in the store. " * 6) for i in range(3)]
    prompt = bench.prompt(strangers)
    full, blended = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=0.15)
    assert blended.report and blended.report.cached == 0 and len(blended.report.missing) == 3
    assert blended.token_ids == full.token_ids and distance(full, blended) < CLOSE


def test_a_key_of_other_tokens_is_not_believed(bench: Bench) -> None:
    a, b = bench.pieces[:2]
    prompt = bench.prompt([a])
    lying = Prompt(prompt.token_ids, ((b.key, prompt.spans[0][1], prompt.spans[0][2]),))
    full, blended = bench.plain(prompt), bench.blended(lying, ratio=0.0)
    assert blended.report and blended.report.missing == {b.key: "mismatch"}
    assert distance(full, blended) < CLOSE


def test_a_deleted_chunk_is_computed_and_can_be_stored_again(own_bench: Bench) -> None:
    bench, gone = own_bench, own_bench.pieces[1]
    prompt = bench.prompt(bench.pieces[:3])
    assert bench.client.delete([gone.key]) == Deleted(1, ())
    full, exact = bench.plain(prompt), bench.blended(prompt, ratio=1.0)
    assert exact.report and exact.report.missing == {gone.key: "missing"}
    assert distance(full, exact) < CLOSE
    bench.ingest([gone])
    again = bench.blended(prompt)
    assert again.report and again.report.missing == {}


@pytest.mark.parametrize("harm", ["flip", "truncate", "empty"])
def test_a_damaged_file_is_recomputed_reported_and_replaced(own_bench: Bench, harm: str) -> None:
    bench, hurt = own_bench, own_bench.pieces[2]
    prompt = bench.prompt(bench.pieces[:4])
    whole = bench.blended(prompt, ratio=0.0)
    (file,) = Path(bench.root).rglob(f"{hurt.key}*")
    _harm(file, harm)
    reused = bench.blended(prompt, ratio=0.0)  # at ratio 1 the layers above the check are not even read
    assert reused.report and reused.report.missing == {hurt.key: "damaged"}
    full, exact = bench.plain(prompt), bench.blended(prompt, ratio=1.0)
    assert exact.report and exact.report.missing == {hurt.key: "missing"}
    assert distance(full, exact) < CLOSE
    assert bench.client.stats().tiers["disk"]["damaged"] == 1
    assert not file.exists()
    bench.ingest([hurt])
    again = bench.blended(prompt, ratio=0.0)
    assert again.report and again.report.missing == {}
    assert again.logprobs == whole.logprobs


def _harm(file: Path, harm: str) -> None:
    record = bytearray(file.read_bytes())
    if harm == "flip":
        record[len(record) // 2] ^= 1
    file.write_bytes({"flip": record, "truncate": record[: len(record) // 2], "empty": b""}[harm])


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"store": "/nowhere"}, "/nowhere"),
        ({"options": BlendOptions(selector="best")}, "best"),
        ({"options": BlendOptions(selector="hkvd:check_layers=x")}, "check_layers must be"),
        ({"head": (("a", "x"),)}, "unreadable"),
    ],
)
def test_whatever_fails_in_the_fused_prefill_ends_in_plain_prefills_answer(
    bench: Bench, change: dict[str, object], reason: str
) -> None:
    prompt = bench.prompt(bench.pieces[:3])
    full = bench.plain(prompt, TEXT)
    bench.reset()
    fields = {"store": bench.store, "spans": prompt.spans} | change
    answer = bench.engine.generate(prompt.token_ids, TEXT, Recipe(**fields))  # type: ignore[arg-type]
    assert answer.report and reason in answer.report.fallback
    assert answer.token_ids == full.token_ids
    assert distance(full, answer) < CLOSE


def test_a_prompt_longer_than_the_window_is_refused_before_the_engine_sees_it(bench: Bench) -> None:
    ids = [1] * bench.engine.max_model_len
    with pytest.raises(PromptTooLongError, match=str(bench.engine.max_model_len)):
        bench.engine.generate(ids, TEXT)
    longest = bench.engine.generate(ids[:-1], Sampling(max_tokens=5))
    assert len(longest.token_ids) == 1 and longest.finish_reason == "length"
