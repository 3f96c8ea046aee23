"""Prompts as they come: chunks in any order, twice, absent, damaged; no question to speak of; too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from blendrag.engine.client.generation import Sampling
from blendrag.engine.wire.operations import Deleted
from blendrag.engine.wire.recipe import Recipe
from blendrag.errors import PromptTooLongError
from blendrag.options import BlendOptions
from workbench import Bench, Prompt, distance

pytestmark = pytest.mark.engine

CLOSE = 2e-3
TEXT = Sampling(max_tokens=16, logprobs=20)


def check_against_full(bench: Bench, prompt: Prompt) -> None:
    """At ratio 1 the answer is full prefill's; at a usual ratio the request is blended as well."""
    full, exact = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0)
    assert distance(full, exact) < CLOSE
    assert exact.token_ids == full.token_ids
    usual = bench.blended(prompt, TEXT)
    assert usual.report and usual.report.missing == {}
    assert 0 < usual.report.recomputed < usual.report.cached


def test_reordered_chunks_are_moved_to_their_new_positions(bench: Bench) -> None:
    check_against_full(bench, bench.prompt(reversed(bench.pieces[:5])))


def test_a_repeated_chunk_is_there_twice(bench: Bench) -> None:
    a, b = bench.pieces[:2]
    check_against_full(bench, bench.prompt([a, b, a, a]))


def test_neighbouring_chunks_need_no_separator(bench: Bench) -> None:
    prompt = Prompt().cached(bench.pieces[0]).cached(bench.pieces[1]).cached(bench.pieces[2])
    check_against_full(bench, prompt.fresh(bench.encode("\n\nIt")))


def test_a_prompt_of_chunks_and_one_token(bench: Bench) -> None:
    prompt = Prompt()
    for piece in bench.pieces[:3]:
        prompt = prompt.cached(piece)
    check_against_full(bench, prompt.fresh(bench.encode("?")[:1]))


def test_a_prompt_of_chunks_only_leaves_the_engine_its_last_tokens(bench: Bench) -> None:
    prompt = Prompt().cached(bench.pieces[0]).cached(bench.pieces[1])
    full, exact = bench.plain(prompt, TEXT), bench.blended(prompt, TEXT, ratio=1.0)
    assert distance(full, exact) < CLOSE
    assert exact.token_ids == full.token_ids


def test_the_first_tokens_of_a_chunk_are_reused_alone(bench: Bench) -> None:
    key, ids = bench.pieces[4].key, bench.pieces[4].token_ids
    head = Prompt().fresh(bench.encode("Part:\n"))
    prompt = Prompt((*head.token_ids, *ids[:50]), ((key, len(head.token_ids), 50),))
    check_against_full(bench, prompt.fresh(bench.encode("\n\nThe package")))


def test_a_fresh_tail_longer_than_one_fused_prefill_is_left_to_the_engine(bench: Bench) -> None:
    tail = [token for piece in bench.pieces[10:14] for token in piece.token_ids]
    prompt = bench.prompt(bench.pieces[:2]).fresh(tail)
    check_against_full(bench, prompt)


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
