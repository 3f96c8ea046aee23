"""``blendrag serve`` as its clients see it: one server for all, stock vLLM with the plugin in it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from blendrag.lab.eviction.trace import read_log
from blendrag.models import DEFAULT_MODEL
from served import (
    CHAT,
    COMPLETIONS,
    FILLER,
    KB,
    MESSAGES,
    RESPONSES,
    TEXTS,
    Server,
    counted,
    events_of,
    text_of,
    through,
)  # fmt: skip
from waiting import until

pytestmark = [pytest.mark.own_engine, pytest.mark.xdist_group("server")]


def test_openai_client_gets_its_documents_prefilled(server: Server) -> None:
    evidence = server.ask().json()["blendrag"]
    assert evidence["plain"] is None
    assert evidence["reused"] > evidence["recomputed"] > 0
    assert sum(evidence[part] for part in ("reused", "recomputed", "fresh", "prefix")) == evidence["prompt"]


def test_everything_recomputed_is_plain_prefills_answer(server: Server) -> None:
    plain = server.ask(blendrag={"blend": False})
    whole = server.ask(blendrag={"recompute_ratio": 1.0})
    assert whole.json()["blendrag"]["reused"] == 0
    assert plain.json()["blendrag"]["plain"] == "blending is switched off"
    assert text_of(whole) == text_of(plain)
    assert whole.json()["usage"]["prompt_tokens"] == plain.json()["usage"]["prompt_tokens"]


def test_evidence_is_the_same_in_header_body_and_stream(server: Server) -> None:
    question = "Who founded Alpha3?"
    answer = server.ask(question, blendrag={"evidence": True})
    counts = json.loads(answer.headers["x-blendrag"])
    assert {name: answer.json()["blendrag"][name] for name in counts} == counts
    rows = [row for row in answer.json()["blendrag"]["documents"] if row["kind"] == "cached"]
    assert [row["source"] for row in rows] == list(TEXTS)
    assert "kv_transfer_params" not in answer.json()

    stream = server.ask(question, blendrag={"evidence": True, "recompute_ratio": 0.3}, stream=True)
    assert json.loads(stream.headers["x-blendrag"])["cached"] == counts["reused"] + counts["recomputed"]
    assert stream.text.rstrip().endswith("data: [DONE]")
    assert events_of(stream)[-1]["blendrag"]["recomputed"] > counts["recomputed"]


def test_stream_that_did_not_ask_gets_no_chunk_of_ours(server: Server) -> None:
    assert "blendrag" not in server.ask(stream=True).text


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_documents_are_blended_through_every_door(server: Server, path: str) -> None:
    content = "\n\n".join([*TEXTS.values(), f"Who founded Alpha1? ({path})"])
    whole = through(server, path, content)
    evidence = json.loads(whole.headers["x-blendrag"])
    assert evidence["plain"] is None and evidence["reused"] > evidence["recomputed"] > 0
    assert evidence == whole.json()["blendrag"]
    assert counted(whole.json()["usage"]) == (evidence["prompt"], evidence["reused"] + evidence["prefix"])
    assert not whole.json().get("kv_transfer_params")

    more = {"stream_options": {"include_usage": True}} if path == CHAT else {}
    ours = {"blendrag": {"evidence": True}}
    stream = through(server, path, f"{content} At once.", stream=True, **ours, **more)
    assert json.loads(stream.headers["x-blendrag"])["cached"] == evidence["reused"] + evidence["recomputed"]
    ends = [event.get("response", event) for event in events_of(stream)]
    (facts,) = [end["blendrag"] for end in ends if "blendrag" in end]
    named = [row["source"] for row in facts["documents"] if row["source"]]
    assert facts["recomputed"] > 0 and named == list(TEXTS)
    usage = [end["usage"] for end in ends if end.get("usage")][-1]
    assert counted(usage) == (facts["prompt"], facts["reused"] + facts["prefix"])


def test_response_goes_on_from_a_stored_one(server: Server) -> None:
    first = through(server, RESPONSES, "\n\n".join([*TEXTS.values(), "Who founded Alpha3?"])).json()
    more = {"previous_response_id": first["id"]}
    second = through(server, RESPONSES, [{"type": "input_text", "text": "And Alpha0?"}], **more).json()
    assert second["blendrag"]["plain"] is None
    assert second["blendrag"]["reused"] + second["blendrag"]["prefix"] > 500
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    body = {"model": DEFAULT_MODEL, "input": "And?", "previous_response_id": "resp_of_nobody"}
    answer = server.client.post(RESPONSES, json=body)
    assert (answer.status_code, "resp_of_nobody" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"input": 3}),
        (RESPONSES, {"input": []}),
        (RESPONSES, {"n": "2", "temperature": 7}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": [], "text": "x"}]}]}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text"}]}]}),
        (RESPONSES, {"input": "long " * 50_000}),
        (RESPONSES, {"kv_transfer_params": {"prompt_token_ids": [1]}}),
        (RESPONSES, {"blendrag": {"recompute_ratio": 7}}),
        (MESSAGES, {"messages": 3}),
        (MESSAGES, {"messages": [{"role": "user", "content": "long " * 50_000}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "text", "text": 3}]}]}),
        (MESSAGES, {"kv_transfer_params": {"prompt_token_ids": [1]}}),
        (MESSAGES, {"blendrag": {"recompute_ratio": 7}}),
    ],
)
def test_wrong_request_through_another_door_is_a_400(server: Server, path: str, body: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "Hm?"}]
    right = {"model": DEFAULT_MODEL, "max_tokens": 4, "input": said, "messages": said}
    answer = server.client.post(path, json=right | body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_page_tells_of_the_servers_own_collections_and_prompts(server: Server) -> None:
    counts = server.ask("Who founded Alpha1?").json()["blendrag"]
    found = server.client.get("/v1/kb/prompts")
    latest = found.json()["prompts"][0]
    assert {name: latest[name] for name in counts} == counts
    assert [row["source"] for row in latest["documents"]] == list(TEXTS)
    assert "founded" not in found.text
    (cities,) = server.client.get("/v1/kb/collections").json()["collections"]
    assert (cities["documents"], cities["ready"]) == (len(TEXTS), len(TEXTS)) and cities["bytes"] > 0
    strip = server.client.get("/v1/kb/prompts", headers={"Accept": "text/html"}).text
    assert f"{counts['recomputed']} repaired" in strip and "<path" in strip
    page = server.client.get("/v1/kb/ui")
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]


def tool(name: str, at: dict[str, Any]) -> dict[str, Any]:
    place = {"$ref": "#/$defs/Place"}
    parameters = {"type": "object", "properties": {"at": place}, "required": ["at"], "$defs": {"Place": at}}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


GO, STAY = tool("go", {"enum": ["north", "south"]}), tool("stay", {"enum": [1, 2]})


def test_forced_call_is_made_and_fits_its_tool(server: Server) -> None:
    whole = server.ask(tools=[GO, STAY], tool_choice="required", max_tokens=60).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    place = json.loads(call["function"]["arguments"])["at"]
    assert place in {"go": ["north", "south"], "stay": [1, 2]}[call["function"]["name"]]
    named = {"type": "function", "function": {"name": "stay"}}
    stream = server.ask(tools=[GO, STAY], tool_choice=named, max_tokens=60, stream=True)
    deltas = [event["choices"][0]["delta"] for event in events_of(stream)]
    parts = [part for delta in deltas for part in delta.get("tool_calls") or ()]
    assert [part["function"]["name"] for part in parts if part["function"].get("name")] == ["stay"]
    assert json.loads("".join(part["function"].get("arguments") or "" for part in parts))["at"] in (1, 2)


def test_several_equal_answers_are_given(server: Server) -> None:
    answer = server.ask(n=2).json()
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == [text_of(server.ask())] * 2 and answer["blendrag"]["plain"] is None
    said = ["", ""]
    stream = server.ask(n=2, stream=True)
    for choice in (choice for event in events_of(stream) for choice in event["choices"]):
        said[choice["index"]] += choice["delta"].get("content") or ""
    assert said == texts


@pytest.mark.parametrize("parts", [False, True])
def test_document_in_a_tools_result_is_reused(parts: bool, server: Server) -> None:
    found = TEXTS["city-1"]
    content = [{"type": "text", "text": "Found:"}, {"type": "text", "text": found}] if parts else found
    call = {"id": "c", "type": "function", "function": {"name": "go", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": content},
    ]
    body = {"model": DEFAULT_MODEL, "messages": messages, "max_tokens": 2, "tools": [GO]}
    evidence = server.client.post(CHAT, json=body).json()["blendrag"]
    assert evidence["plain"] is None and evidence["reused"] + evidence["prefix"] > 100, evidence


def test_completions_of_a_text_are_blended(server: Server) -> None:
    body = {"model": DEFAULT_MODEL, "prompt": TEXTS["city-1"] + "\n\nAlpha1 was founded in", "max_tokens": 4}
    answer = server.client.post(COMPLETIONS, json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["blendrag"]["reused"] > 0
    echoed = server.client.post(COMPLETIONS, json=body | {"echo": True}).json()
    assert echoed["choices"][0]["text"].startswith(body["prompt"])
    assert "echo" in echoed["blendrag"]["plain"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2, "temperature": 0.5}, "several answers"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"truncate_prompt_tokens": 64}, "truncate_prompt_tokens"),
    ],
)
def test_what_cannot_be_blended_is_answered_plainly_and_says_why(
    server: Server, body: dict[str, Any], reason: str
) -> None:
    answer = server.ask(**body)
    assert answer.status_code == 200, answer.text
    assert reason in answer.json()["blendrag"]["plain"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"blendrag": {"recompte_ratio": 0.5}}, "did you mean recompute_ratio"),
        ({"blendrag": {"recompute_ratio": 7}}, "recompute_ratio must be between 0 and 1"),
        ({"blendrag": {"selector": "qurey"}}, "qurey"),
        ({"blendrag": {"kv_budget": 512}}, "started with the setting kv_budget"),
        ({"blendrag": {"selector": "hkvd:metric=q"}}, "metric must be"),
        ({"blendrag": []}, "blendrag"),
        ({"kv_transfer_params": {"blendrag": {"store": "s"}}}, "kv_transfer_params"),
        ({"kv_transfer_params": {"prompt_token_ids": [1]}}, "kv_transfer_params"),
        ({"messages": []}, ""),
        ({"max_tokens": 5000}, "5000"),
    ],
)
def test_wrong_request_is_a_400(server: Server, body: dict[str, Any], said: str) -> None:
    answer = server.ask(**body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "forged",
    [
        {"blendrag": {"store": "s", "spans": [["key", 0, 8]], "options": {}}},
        {"blendrag": "x"},
        {"blendrag": {"spans": [["key", 1e999, 8]]}, "seal": "é"},
    ],
    ids=["unsealed", "broken", "not even text"],
)
def test_forged_recipe_leaves_the_engine_alive(server: Server, forged: dict[str, Any]) -> None:
    """Routes that are vLLM's own take ``kv_transfer_params`` from anyone."""
    body = {"model": DEFAULT_MODEL, "input": "Hello there, who are you?", "max_output_tokens": 4}
    content = json.dumps(body | {"kv_transfer_params": forged, "cache_salt": "x"})
    headers = {"content-type": "application/json"}
    answer = server.client.post("/v1/responses", content=content, headers=headers)
    assert answer.status_code in (200, 400), answer.text
    assert server.ask(vllm_xargs={"kv_transfer_params": "x"}).status_code == 400
    assert text_of(server.ask())


def test_salt_of_a_client_shares_no_kv_with_another(server: Server) -> None:
    texts = {text_of(server.ask(cache_salt=salt)) for salt in ("ours", "theirs", "ours")}
    assert len(texts) == 1
    assert server.ask(cache_salt="another").json()["blendrag"]["prefix"] == 0


def test_several_clients_get_the_answers_that_each_gets_alone(server: Server) -> None:
    questions = [f"When was Alpha{n % 4} founded, and by whom? ({n})" for n in range(8)]
    first = [server.ask(question) for question in questions]
    alone = [server.ask(question) for question in questions]  # behind what the prefix cache holds now
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(server.ask, questions))
    assert all(answer.status_code == 200 for answer in together)
    assert [text_of(answer) for answer in together] == [text_of(answer) for answer in alone]
    assert {answer.json()["blendrag"]["plain"] for answer in (*first, *alone, *together)} == {None}


def test_conversation_of_a_request_reaches_the_predictor_and_no_log(server: Server, cache: Path) -> None:
    def forecasts() -> tuple[int, int, int]:
        """Prompts asked for, those that something became of, and what the policies were told."""
        stats: dict[str, Any] = {}

        def all_ended() -> bool:
            stats.update(server.client.get("/v1/kb/stats").json())
            counts = stats["eviction"]["forecasts"]
            return counts["asked"] == counts["answered"] + counts["dropped"] + counts["unanswered"]

        until(all_ended, every_s=0.1)
        counts, told = stats["eviction"]["forecasts"], stats["policy_calls"]["forecast"]["calls"]
        assert counts["reason"] == "", counts
        return counts["asked"], counts["answered"], told

    asked, answered, told = forecasts()
    assert server.ask("Where is the hotel?", blendrag={"conversation": "ada of acme"}).status_code == 200
    more = {"stream": True, "stream_options": {"include_usage": True}}
    assert "[DONE]" in server.ask("Thanks bye", blendrag={"conversation": "ada of acme"}, **more).text
    assert server.ask("Thanks bye", blendrag={"conversation": "eve of globex"}).status_code == 200
    after = forecasts()
    assert after[:2] == (asked + 3, answered + 3)
    assert after[2] > told
    log = cache / "evictor" / "prompts.sqlite"
    one, same, other = (request.conversation for request in read_log(log).requests[-3:])
    assert one == same != other
    written = b"".join(path.read_bytes() for path in log.parent.glob("prompts.sqlite*"))
    assert "ada of acme" not in server.log.read_text() and b"ada of acme" not in written


def test_collection_forgets_only_what_it_has_been_told_to(server: Server) -> None:
    more = {"extra": f"Gamma is a village of nine houses. {FILLER}"}
    assert server.put(more)["chunks"] == 1
    assert server.put(more)["chunks"] == 0
    assert server.client.get(KB).json()["ids"] == sorted([*TEXTS, "extra"])
    assert server.put(TEXTS, sync=True)["removed"] == 1
    server.put(more)
    assert server.client.delete(KB, params={"id": ["extra", "nobody"]}).json() == {"removed": 1}
    assert server.client.get(KB).json()["ids"] == sorted(TEXTS)
    assert server.chunks()["ready"] == len(TEXTS)


def test_routes_are_described(server: Server) -> None:
    described = server.client.get("/openapi.json").json()
    assert {"/v1/kb/collections/{name}", "/v1/kb/stats", "/v1/kb/explain", CHAT} <= set(described["paths"])
    assert "BlendFields" in described["components"]["schemas"]


SAID = [{"role": "user", "content": "x"}]
LONG = {
    "messages": (CHAT, {"messages": SAID * 400_000}, "--max-items"),
    "messages that can be read": (CHAT, {"messages": SAID * 5_000}, "--max-items"),
    "documents": (CHAT, {"messages": SAID, "blendrag": {"documents": ["text"] * 100_000}}, "--max-items"),
    "tokens": ("/v1/kb/tokens", {"texts": ["It has many streets. " * 1_000_000]}, "--max-text-mib"),
    "bytes": (KB, {"documents": {"one": "It has many streets. " * 4_000_000}}, "--max-body-mib"),
}


@pytest.mark.parametrize("long", LONG.values(), ids=LONG)
def test_request_that_holds_too_much_is_refused_while_others_are_answered(
    server: Server, long: tuple[str, dict[str, Any], str]
) -> None:
    path, body, option = long
    content = json.dumps({"model": DEFAULT_MODEL, **body} if path == CHAT else body).encode()
    method, headers = "PUT" if path == KB else "POST", {"content-type": "application/json"}
    with ThreadPoolExecutor(1) as pool, server.connect() as beside:
        asked = pool.submit(server.client.request, method, path, content=content, headers=headers)
        slowest = 0.0
        while not asked.done():
            begun = time.monotonic()
            assert beside.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - begun)
        assert asked.result().status_code in (400, 413)
        assert option in asked.result().text
    assert slowest < 1.0  # 0.25, and the machine may be busy


@pytest.mark.nightly
def test_server_reuses_what_another_has_stored_in_a_tier_of_both(model_dir: Path, tmp_path: Path) -> None:
    shared = {"kind": "object", "url": f"file://{tmp_path}/shared", "write": "through"}
    tiers = json.dumps([{"kind": "ram"}, {"kind": "disk"}, shared])
    told, answers = [], []
    for name in ("one", "other"):
        running = Server(tmp_path / name, "--tiers", tiers).wait()
        told.append(running.put(TEXTS))
        answers.append(running.ask())
        assert running.end() == []
    one, other = told
    assert one["chunks"] == other["chunks"] == len(TEXTS)
    assert one["tokens"] > other["tokens"] == 0
    assert all(answer.json()["blendrag"]["reused"] > 0 for answer in answers)
    assert text_of(answers[0]) == text_of(answers[1])
