"""The rest of an answer whose engine died. What vLLM would have given out is made by its own detokenizer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from blendrag.engine.client.continuation import Continuation, can_go_on
from blendrag.engine.client.generation import Delta, Grammar, Sampling
from blendrag.engine.client.running import RunningEngine
from blendrag.engine.compat.requests import SamplingParams, incremental_detokenizer
from blendrag.settings import Settings

PROMPT = "Say it, é 🙂"


def pieces(tokenizer: Any, tokens: list[int], sampling: Sampling) -> list[Delta]:
    """Of an engine that generates these tokens, one at a time, the last of which is in ``stop_token_ids``."""
    params = SamplingParams(stop=list(sampling.stop), max_tokens=None, **sampling.other)
    text = incremental_detokenizer(tokenizer, tokenizer.encode(PROMPT), params)
    given: list[Delta] = []
    for at, token in enumerate(tokens, 1):
        last = at == len(tokens)
        ended = "stop" if text.update([token], last) is not None or last else None
        given.append(Delta(text.get_next_output_text(ended is not None, True), [token], 0.1, ended))
        if ended:
            break
    return given


def joined(deltas: list[Delta], name: str) -> list[Any]:
    return [one for delta in deltas for one in getattr(delta, name)]


@given(
    said=st.text(st.sampled_from("ab é🙂👩‍🔬\n日"), min_size=1, max_size=24),
    stop=st.lists(st.text(st.sampled_from("ab é🙂"), min_size=1, max_size=4), max_size=2),
    other=st.sampled_from([{}, {"min_tokens": 5}, {"include_stop_str_in_output": True}]),
    cuts=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    at_once=st.integers(1, 4),
)
@settings(deadline=None)
def test_seam_keeps_every_text_and_finds_a_stop_across_it(
    tokenizer: Any, said: str, stop: list[str], other: dict[str, Any], cuts: list[int], at_once: int
) -> None:
    """Wherever engines die, in the middle of a character or of a stop, how many tokens they give at once."""
    tokens = tokenizer.encode(f"{said}a")
    sampling, prompt = Sampling(stop=tuple(stop), other=other), tokenizer.encode(PROMPT)
    whole = pieces(tokenizer, tokens, sampling)
    given = whole[: min(cuts[0], len(whole) - 1)]
    for cut in (*cuts[1:], len(tokens)):
        ids = [token for delta in given for token in delta.token_ids]
        if not ids or given[-1].finish_reason:
            break
        rest = Continuation(tokenizer, prompt, replace(sampling, given=tuple(ids)))
        assert rest.token_ids == [*prompt, *ids] and rest.sampling.stop == () == rest.sampling.given
        for at in range(len(ids), min(len(tokens), len(ids) + cut), at_once):
            some = tokens[at : at + at_once]
            end = "stop" if at + at_once >= len(tokens) else None
            given.append(rest.read(Delta("", some, 0.1, end, logprobs=[{token: 0.0} for token in some])))
            assert len(given[-1].logprobs) == len(given[-1].token_ids)
            if given[-1].finish_reason:
                break
    if given:
        for name in ("text", "token_ids"):
            assert joined(given, name) == joined(whole, name)
        assert given[-1].finish_reason == "stop"


def test_rest_is_as_long_as_asked_for(tokenizer: Any) -> None:
    for least, left in ((8, 5), (2, 0)):
        asked = Sampling(max_tokens=20, other={"min_tokens": least, "top_k": 3}, given=(11, 12, 13))
        rest = Continuation(tokenizer, [1], asked)
        assert rest.sampling.other == {"min_tokens": left, "top_k": 3} and rest.sampling.max_tokens == 17


@pytest.mark.parametrize(
    ("sampling", "goes_on"),
    [
        (Sampling(temperature=1.0, stop=("a",), logprobs=3, other={"top_k": 5, "min_tokens": 2}), True),
        (Sampling(seed=1), True),
        (Sampling(seed=1, temperature=0.5), False),
        (Sampling(grammar=Grammar("regex", "a+")), False),
        (Sampling(forced=(1, 2)), False),
        (Sampling(other={"presence_penalty": 1.0}), False),
        (Sampling(other={"prompt_logprobs": 1}), False),
    ],
)
def test_answer_goes_on_only_where_its_rest_would_be_the_same(sampling: Sampling, goes_on: bool) -> None:
    assert can_go_on(sampling) == goes_on


class Saying(RunningEngine):
    """An engine over a model that says ``said``, token by token, whatever was said of it already."""

    def __init__(self, tokenizer: Any, prompt: list[int], said: list[int]) -> None:
        super().__init__(Settings.load())
        self._prompt, self._said, self.asked = prompt, said, list[SamplingParams]()
        self.given_up = False
        self._llm = SimpleNamespace(
            generate=self._generate,
            model_config=SimpleNamespace(max_model_len=512),
            output_processor=SimpleNamespace(tokenizer=tokenizer),
        )

    async def _generate(
        self, prompt: Any, params: SamplingParams, ticket: str, **_: Any
    ) -> AsyncGenerator[Any]:
        ids, whole = prompt["prompt_token_ids"], [*self._prompt, *self._said]
        assert ids == whole[: len(ids)]
        self.asked.append(params)
        try:
            for at, token in enumerate(whole[len(ids) :][: params.max_tokens], 1):
                ended = "length" if at == params.max_tokens else None
                piece = SimpleNamespace(text="?", token_ids=[token], finish_reason=ended, logprobs=None)
                yield SimpleNamespace(
                    outputs=[piece], finished=bool(ended), kv_transfer_params=None, num_cached_tokens=0
                )
        except GeneratorExit:
            self.given_up = True
            raise

    def go_on(self, sampling: Sampling) -> list[Delta]:
        async def all_of_them() -> list[Delta]:
            return [delta async for delta in self._deltas(self._prompt, sampling, None, "")]

        return asyncio.run(all_of_them())


def test_engine_ends_at_a_stop_that_it_does_not_know_of_and_no_earlier(tokenizer: Any) -> None:
    prompt, said = tokenizer.encode(PROMPT), tokenizer.encode("one two three STOP four")
    cut = len(tokenizer.encode("one two three S"))
    for stop, text in ((("STOP",), "one two three "), ((), "one two three STOP four")):
        sampling = Sampling(max_tokens=len(said), stop=stop)
        before = "".join(delta.text for delta in pieces(tokenizer, said, sampling)[:cut])
        engine = Saying(tokenizer, prompt, said)
        rest = engine.go_on(replace(sampling, given=tuple(said[:cut])))
        assert before + "".join(delta.text for delta in rest) == text
        assert rest[-1].finish_reason == ("stop" if stop else "length") and engine.given_up == bool(stop)
        assert engine.asked[0].max_tokens == len(said) - cut and not engine.asked[0].stop
