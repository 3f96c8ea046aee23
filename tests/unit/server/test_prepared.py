"""What becomes of a request between vLLM's route and its engine. No engine is started here."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.completion.api_router import create_completion

from blendrag.engine.prefixes import PrefixPath, read_path
from blendrag.engine.recipe import CONVERSATION, is_sealed
from blendrag.errors import ConfigError
from blendrag.lab.eviction.readers import read_mooncake
from blendrag.server.blending import Blending
from blendrag.server.completions import body_of
from blendrag.serving.library import Library
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings
from engine_facts import FACTS

CHAT, COMPLETION = body_of(create_chat_completion), body_of(create_completion)
TEXT = "The warranty of the battery lasts for eight years or 160,000 kilometres. " * 4
USAGE = {"usage": {"prompt_tokens": 99, "completion_tokens": 7}}

Open = Callable[..., Blending]


@pytest.fixture
def begin(tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Tenants of a server that knows one text."""
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(EngineSession, "store", Mock(id="opened"))
    begun: list[Blending] = []

    def one(**options: Any) -> Blending:
        settings = Settings.load(max_model_len=512, model=str(model_dir), embedder="./none", **options)
        library = Library(tmp_path / f"kv{len(begun)}", settings, shared=True)
        library.register({"a": [TEXT]})
        engine: Any = SimpleNamespace(blends=True, facts=FACTS, max_model_len=512)
        monkeypatch.setattr(library.session, "start", lambda progress=None: engine)
        monkeypatch.setattr(library.session, "open", lambda progress=None: library.session.store)
        library.start()
        begun.append(Blending(library, settings, engine, "model", "seal"))
        return begun[-1]

    yield one
    for each in begun:
        each.library.close()


class Renderer:
    """What vLLM's makes of a request."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    async def render_chat(self, request: Any, **_: Any) -> Any:
        ids = self._tokenizer.apply_chat_template(
            request.messages, add_generation_prompt=True, return_dict=False
        )
        return None, [{"prompt_token_ids": ids}]

    async def render_completion(self, request: Any, **_: Any) -> Any:
        return [{"prompt_token_ids": self._tokenizer(request.prompt).input_ids}]


def asked(blending: Blending, kind: Any = CHAT, question: str = "How long?", **more: Any) -> Any:
    """vLLM's request, answered."""
    content = f"{TEXT}\n\n{question}"
    request = kind.model_validate(
        {"messages": [{"role": "user", "content": content}], "prompt": content, "max_tokens": 8, **more}
    )

    async def answered() -> None:
        renderer = Renderer(blending.library.tokenizer)
        about = await blending.prepare(request, request.blendrag, renderer)
        await blending.evidence(about, USAGE)

    asyncio.run(answered())
    return request


def extra(request: Any) -> dict[str, Any]:
    """What reaches vLLM's engine beside the usual."""
    return request.to_sampling_params(8, {}).extra_args or {}


@pytest.mark.parametrize("kind", [CHAT, COMPLETION], ids=["chat", "completion"])
def test_conversation_of_a_request_is_told_to_nobody(begin: Open, tmp_path: Path, kind: Any) -> None:
    blending = begin(outcome_log=True)
    asked(blending, kind, blendrag={"conversation": "ada"})
    asked(blending, kind, "How far?", blendrag={"conversation": "ada"})
    asked(blending, kind, "How far?", blendrag={"conversation": "eve"})
    forecaster = blending.library.forecaster
    assert forecaster is not None and forecaster.counts.asked == 3
    blending.close()
    (log,) = (tmp_path / "cache" / "evictor").glob("trace-*.jsonl")
    first, second, other = read_mooncake(log).requests
    assert first.conversation == second.conversation != other.conversation
    assert [json.loads(line)["output_length"] for line in log.read_text().splitlines()] == [7, 7, 7]


def test_clients_name_of_a_conversation_reaches_the_engine(begin: Open) -> None:
    assert CONVERSATION not in extra(asked(begin(outcome_log=True), blendrag={"conversation": "ada"}))
    blending = begin(prefix_forecasts=True)
    requests = [asked(blending, blendrag={"conversation": name}) for name in ("ada", "ada", "eve")]
    one, same, other = (extra(request)[CONVERSATION] for request in requests)
    assert one == same != other
    assert "ada" not in json.dumps(extra(requests[0]))
    assert extra(asked(blending, blendrag={}))[CONVERSATION], "it is known by its opening"


def test_tenants_share_a_conversation(begin: Open) -> None:
    names = {
        extra(asked(begin(prefix_forecasts=True, namespace=tenant), blendrag={"conversation": "1"}))[
            CONVERSATION
        ]
        for tenant in ("acme", "globex")
    }
    assert len(names) == 2


def test_client_says_whose_blocks_leave_the_prefix_cache(begin: Open) -> None:
    with pytest.raises(ConfigError, match="see `conversation`"):
        asked(begin(), blendrag={}, vllm_xargs={CONVERSATION: "theirs"})


def test_server_without_use_for_forecasts_makes_some(begin: Open) -> None:
    blending = begin()
    asked(blending, blendrag={"conversation": "ada"})
    assert blending.library.forecaster is None


PATH = PrefixPath("tree", (("root", 4), ("document", 60)), held=1, kept=2)


@pytest.mark.parametrize(("namespace", "salt"), [("", None), ("acme", "acme:")])
def test_scheduler_refuses_a_path_of_its_own_server(
    begin: Open, monkeypatch: pytest.MonkeyPatch, namespace: str, salt: str | None
) -> None:
    blending = begin(namespace=namespace)
    monkeypatch.setattr(blending.library, "path", lambda plan, recipe: (PATH, None))
    blending._engine.acall = AsyncMock(return_value=None)  # type: ignore[method-assign]
    request = asked(blending, COMPLETION, blendrag={})
    params = extra(request)["kv_transfer_params"]
    assert request.cache_salt == salt
    assert is_sealed(params, salt, "seal") and not is_sealed(params, "other:", "seal")
    assert read_path(params, 99) == PATH


def test_client_with_a_salt_takes_exact_prefixes_of_others(
    begin: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    blending = begin()
    monkeypatch.setattr(blending.library, "path", lambda plan, recipe: pytest.fail("it is shared"))
    request = asked(blending, COMPLETION, blendrag={}, cache_salt="mine")
    assert request.cache_salt.startswith("~") and extra(request) == {}


def test_budget_that_nothing_came_of_is_passed_over_in_silence(begin: Open) -> None:
    blending = begin(kv_budget=256)
    body = {"messages": [{"role": "user", "content": f"{TEXT}\n\nHow long?"}], "blendrag": {"blend": False}}
    request = CHAT.model_validate(body)

    async def rows() -> dict[str, Any]:
        about = await blending.prepare(request, request.blendrag, Renderer(blending.library.tokenizer))
        return (await blending.evidence(about, USAGE))[1]

    assert asyncio.run(rows())["kv_whole"] == "it was not blended"
