"""What LlamaIndex expects of an LLM: nine methods that agree, count, stream, and block no event loop."""

from __future__ import annotations

import asyncio
import json
import pickle
import time
from collections.abc import Callable
from typing import Any

import pytest
from llama_index.core import Settings as LlamaSettings
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.instrumentation.events.llm import LLMChatEndEvent, LLMChatStartEvent
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode

from blendrag.errors import ConfigError
from blendrag.options import STEPS
from llama_index.llms.blendrag import BlendLLM
from llama_index.llms.blendrag.events import BlendCacheEvent
from llamaindex_ways import every_way, text_of

ANSWER = "The battery warranty lasts eight years."
HELLO = [ChatMessage("You are kind.", role="system"), ChatMessage("Hello?")]


def test_class_is_an_llm_by_the_name_that_tools_look_for() -> None:
    names = [base.__name__ for base in BlendLLM.__mro__]
    assert "BaseLLM" in names and "FunctionCallingLLM" in names
    assert BlendLLM.class_name() == "BlendLLM"


def test_metadata_is_the_models_own_and_starts_no_engine(
    make_llm: Callable[..., BlendLLM], scripted: Any
) -> None:
    about = make_llm(max_tokens=77).metadata
    assert (about.context_window, about.num_output) == (8192, 77)
    assert about.is_chat_model and about.is_function_calling_model
    assert about.system_role is MessageRole.SYSTEM
    assert BlendLLM(context_window=1024).metadata.context_window == 1024
    assert scripted.starts == 0


# -- text ----------------------------------------------------------------------------------------------------


async def test_all_methods_ask_and_answer_the_same(llm: BlendLLM, scripted: Any) -> None:
    ways = await every_way(llm, "How long is the warranty?")
    assert {name: text_of(responses[-1]) for name, responses in ways.items()} == dict.fromkeys(ways, ANSWER)
    assert len(set(scripted.prompts())) == 1, "a completion is what a user says"
    assert "<|im_start|>user\nHow long is the warranty?<|im_end|>" in scripted.prompts()[0]
    assert len({str(asked.sampling) for asked in scripted.asked}) == 1


async def test_deltas_add_up_to_the_text_so_far(llm: BlendLLM) -> None:
    ways = await every_way(llm, "Hello?")
    for name in ("stream_chat", "stream_complete", "astream_chat", "astream_complete"):
        so_far = ""
        assert len(ways[name]) > 3, f"{name} gives everything at once"
        for response in ways[name]:
            so_far += response.delta
            assert text_of(response) == so_far
        assert so_far == ANSWER


def test_formatted_completion_is_sent_as_it_is(llm: BlendLLM, scripted: Any) -> None:
    llm.complete("Q: Hello?\nA:", formatted=True)
    assert scripted.prompts() == ["Q: Hello?\nA:"]


def test_options_of_a_call_win_over_the_fields(make_llm: Callable[..., BlendLLM], scripted: Any) -> None:
    llm = make_llm(temperature=0.5, max_tokens=3, stop=["."], seed=1, timeout=9.0)
    llm.chat(HELLO)
    llm.chat(HELLO, temperature=0.0, max_tokens=4, stop=["!"], seed=2, timeout=8.0, top_k=5)
    fields, call = (asked.sampling for asked in scripted.asked)
    assert (fields.temperature, fields.max_tokens, fields.stop, fields.seed) == (0.5, 3, (".",), 1)
    assert fields.timeout_s == 9.0
    assert (call.temperature, call.max_tokens, call.stop, call.seed) == (0.0, 4, ("!",), 2)
    assert (call.timeout_s, call.other) == (8.0, {"top_k": 5})


def test_fields_that_are_changed_later_count(llm: BlendLLM, scripted: Any) -> None:
    llm.temperature, llm.max_tokens = 0.7, 5
    llm.complete("Hello?")
    assert (scripted.asked[0].sampling.temperature, scripted.asked[0].sampling.max_tokens) == (0.7, 5)
    with pytest.raises(ValueError, match="frozen"):
        llm.model = "another"


@pytest.mark.parametrize("wrong", [{"kv_cache_gib": "four"}, {"context_window": 3}])
def test_wrong_option_is_said_when_the_llm_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_gib|max_model_len"):
        BlendLLM(**wrong)


def test_wrong_option_of_a_call_is_said(llm: BlendLLM) -> None:
    with pytest.raises(ConfigError, match="mode is called blend now: blend=False"):
        llm.chat(HELLO, mode="off")
    with pytest.raises(ConfigError, match="hkvdd"):
        llm.chat(HELLO, selector="hkvdd")


def test_option_of_a_call_is_taken_whatever_the_tiers(
    make_llm: Callable[..., BlendLLM], scripted: Any
) -> None:
    tiers = [{"kind": "ram"}, {"kind": "disk"}]
    llm = make_llm(tiers=tiers, min_cached_tokens=1)
    know(llm, LONG)
    llm.complete(LONG, recompute_ratio=0.3, selector="hkvd")
    llm.complete(LONG, blend=False)
    llm.complete(LONG, quality="fast")
    blended, plain, fast = (asked.recipe for asked in scripted.asked)
    assert (fast.options.selector, fast.options.recompute_ratio) == STEPS["fast"]
    assert (blended.options.recompute_ratio, blended.options.selector) == (0.3, "hkvd")
    assert plain is None and len(llm.settings.tiers) == 2


def test_settings_are_given_as_arguments_or_under_their_former_name() -> None:
    for llm in (BlendLLM(kv_cache_gib=3), BlendLLM(engine_options={"kv_cache_gib": 3})):
        assert llm.settings.kv_cache_gib == 3
        assert BlendLLM.from_dict(llm.to_dict()).settings == llm.settings
    assert BlendLLM(recompute_ratio=0.3).settings.recompute_ratio == 0.3


# -- messages ------------------------------------------------------------------------------------------------


def test_roles_of_other_providers_are_understood(llm: BlendLLM, scripted: Any) -> None:
    llm.chat([ChatMessage("Be kind.", role="developer"), ChatMessage("Hi", role="user"),
              ChatMessage("Hello!", role="chatbot"), ChatMessage("Who?", role="user")])  # fmt: skip
    assert "system\nBe kind." in scripted.prompts()[0]
    assert "assistant\nHello!" in scripted.prompts()[0]


# -- usage and evidence --------------------------------------------------------------------------------------

LONG = "Warranty terms: the battery is covered for eight years or 160,000 km, whichever comes first."


def retrieved(*texts: str) -> BaseRetriever:
    class Fixed(BaseRetriever):
        def _retrieve(self, query: Any) -> list[NodeWithScore]:
            return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in texts]

    return Fixed()


def know(llm: BlendLLM, *texts: str) -> None:
    llm.collection("test").add({text: [text] for text in texts})


async def test_usage_counts_the_prompt_and_the_answer(llm: BlendLLM, scripted: Any) -> None:
    know(llm, LONG)
    for name, responses in (await every_way(llm, f"{LONG}\n\nHow long?")).items():
        last = responses[-1]
        usage = last.raw["usage"]
        assert usage["prompt_tokens"] == len(scripted.asked[-1].token_ids), name
        assert usage["completion_tokens"] == len(scripted.tokenizer.encode(ANSWER))
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        cached = len(llm.token_ids(LONG))
        assert last.additional_kwargs["recomputed_tokens"] == cached // 10
        assert last.additional_kwargs["cache_read_tokens"] == cached - cached // 10
        (row,) = last.raw["blendrag"]["documents"]
        assert (row["source"], row["reused"]) == (LONG, cached)


def test_plain_prefill_reuses_nothing(llm: BlendLLM, scripted: Any) -> None:
    know(llm, LONG)
    response = llm.complete(LONG, blend=False)
    assert response.raw["blendrag"]["plain"] == "blending is switched off"
    assert response.additional_kwargs["cache_read_tokens"] == 0
    llm.complete(LONG, recompute_ratio=0.5, selector="first_k")
    off, on = scripted.asked
    assert off.recipe is None
    assert (on.recipe.options.recompute_ratio, on.recipe.options.selector) == (0.5, "first_k")


def test_document_alone_is_one_and_what_is_none_is_named(llm: BlendLLM) -> None:
    node = TextNode(text="The sea is salt.")
    for given in ("The sea is salt.", node, NodeWithScore(node=node), [node]):
        assert llm._call("?", {"documents": given}).request.documents == ("The sea is salt.",)
    for wrong in (3, [None], [["sea"]]):
        with pytest.raises(ConfigError, match="documents has to be texts or nodes"):
            llm._call("?", {"documents": wrong})


def test_hint_that_is_not_in_the_prompt_is_reported(llm: BlendLLM) -> None:
    know(llm, LONG)
    response = llm.complete("Hello?", documents=[TextNode(text=LONG)])
    assert [row["reason"] for row in response.raw["blendrag"]["documents"]] == [
        "its text is not in the prompt"
    ]


def test_log_probabilities_are_given_when_asked_for(llm: BlendLLM) -> None:
    assert llm.chat(HELLO).logprobs is None
    logprobs = llm.chat(HELLO, logprobs=2).logprobs
    assert logprobs is not None
    assert "".join(top[0].token for top in logprobs) == ANSWER
    assert [one.logprob for one in logprobs[0]] == [-0.5, -1.0]


@pytest.mark.parametrize("streaming", [False, True])
def test_token_counter_counts_what_the_engine_counted(llm: BlendLLM, scripted: Any, streaming: bool) -> None:
    counter = TokenCountingHandler(tokenizer=lambda text: [0] * 100_000)  # nothing may be left to guessing
    manager = CallbackManager([counter])
    LlamaSettings.callback_manager = manager
    llm.callback_manager = manager
    synthesizer = get_response_synthesizer(llm=llm, streaming=streaming, callback_manager=manager)
    query = RetrieverQueryEngine(retrieved(LONG), synthesizer, callback_manager=manager)
    assert str(query.query("How long?")) == ANSWER
    LlamaSettings.callback_manager = CallbackManager([])
    assert counter.prompt_llm_token_count == len(scripted.asked[0].token_ids)
    assert counter.completion_llm_token_count == len(scripted.tokenizer.encode(ANSWER))


async def test_instrumentation_is_told_of_every_answer_and_its_evidence(llm: BlendLLM, events: Any) -> None:
    ways = await every_way(llm, "Hello?")
    told = events.of(BlendCacheEvent)
    assert len(told) == len(ways)
    assert {event.usage["total_tokens"] for event in told} == {ways["chat"][0].raw["usage"]["total_tokens"]}
    assert told[0].evidence == ways["chat"][0].raw["blendrag"]
    assert told[0].model_dump()["class_name"] == "BlendCacheEvent"


@pytest.mark.parametrize("streaming", [False, True])
def test_events_of_one_answer_share_its_span(llm: BlendLLM, events: Any, streaming: bool) -> None:
    _ = list(llm.stream_chat(HELLO)) if streaming else llm.chat(HELLO)
    kinds = (LLMChatStartEvent, BlendCacheEvent, LLMChatEndEvent)
    spans = {kind.__name__: [event.span_id for event in events.of(kind)] for kind in kinds}
    assert len({tuple(ids) for ids in spans.values()}) == 1, spans
    assert spans["BlendCacheEvent"][0]


def test_events_hold_no_path_and_can_be_written_as_json(llm: BlendLLM, events: Any) -> None:
    llm.chat(HELLO)
    payload = events.of(LLMChatStartEvent)[0].model_dict
    assert json.loads(json.dumps(payload))["class_name"] == "BlendLLM"
    assert not {"kv_dir", "more_settings"} & payload.keys()


def test_callbacks_see_a_failure(llm: BlendLLM) -> None:
    debug = LlamaDebugHandler(print_trace_on_end=False)
    llm.callback_manager = CallbackManager([debug])
    with pytest.raises(ConfigError):
        llm.chat(HELLO, blend="of")
    ((_, ended),) = debug.get_event_pairs(CBEventType.LLM)
    assert "exception" in ended.payload


# -- time ----------------------------------------------------------------------------------------------------


async def test_event_loop_ticks_while_answers_are_awaited(llm: BlendLLM, scripted: Any) -> None:
    llm.complete("Warm up: the library is open, and everything imported.")
    scripted.pace_s = 0.05
    tokens = len(scripted.tokenizer.encode(ANSWER))
    gaps = []

    async def tick() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.005)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = asyncio.create_task(tick())
    begin = time.perf_counter()
    answers = await asyncio.gather(*(llm.acomplete(f"Question {n}?") for n in range(4)))
    took = time.perf_counter() - begin
    ticking.cancel()
    assert [answer.text for answer in answers] == [ANSWER] * 4
    assert took < 4 * tokens * scripted.pace_s, "one after the other"
    assert max(gaps) < took / 2, "the loop stood still"


async def test_dropped_stream_stops_the_generation(llm: BlendLLM, scripted: Any) -> None:
    tokens = len(scripted.tokenizer.encode(ANSWER))
    stream = llm.stream_chat(HELLO)
    next(stream)
    stream.close()
    assert scripted.given < tokens
    scripted.given = 0
    astream = await llm.astream_chat(HELLO)
    await anext(astream)
    await astream.aclose()
    await asyncio.sleep(0.05)
    assert scripted.given < tokens


# -- structured output, copies -------------------------------------------------------------------------------


def test_llm_is_written_as_json_with_its_folder(llm: BlendLLM) -> None:
    assert json.loads(llm.to_json())["kv_dir"] == str(llm.kv_dir)
    assert BlendLLM.from_dict(llm.to_dict()).kv_dir == llm.kv_dir


def test_copy_and_pickle_share_the_configuration_and_not_the_handle(llm: BlendLLM) -> None:
    again = pickle.loads(pickle.dumps(llm))
    assert again.to_dict() == llm.to_dict()
    assert again._chat.library is llm._chat.library
    assert llm.model_copy().chat(HELLO).message.content == ANSWER


def test_closed_llm_starts_again_when_it_is_used(make_llm: Callable[..., BlendLLM], scripted: Any) -> None:
    with make_llm() as llm:
        llm.chat(HELLO)
    assert scripted.starts == 1
    llm.chat(HELLO)
    assert scripted.starts == 2


def test_prompt_can_be_shown_and_explained_without_an_engine(llm: BlendLLM, scripted: Any) -> None:
    assert llm.render(HELLO).startswith("<|im_start|>system\nYou are kind.<|im_end|>")
    know(llm, LONG)
    scripted.starts = 0
    rows = llm.explain([ChatMessage(LONG)])
    assert [row["kind"] for row in rows] == ["fresh", "cached", "fresh"]
    assert scripted.starts == 0
