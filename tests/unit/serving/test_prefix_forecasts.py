"""Conversations have one name, in their requests and in the forecasts. No engine is started here."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blendrag.chat.request import ChatRequest
from blendrag.chat.turn import Turn
from blendrag.engine.client.generation import Delta
from blendrag.serving import forecaster
from blendrag.serving.library import Library
from blendrag.serving.session import EngineSession
from blendrag.settings import Settings

END = Delta(" Eight years.", [1, 2, 3], 0.01, finish_reason="stop")
KEYS = st.lists(st.text("abc", max_size=3), max_size=80)


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("given", ["mine", None])
def test_conversation_of_a_plain_chat_has_another_name_in_its_forecast(
    tmp_path: Path, model_dir: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool, given: str | None
) -> None:
    monkeypatch.setenv("BLENDRAG_CACHE_DIR", str(tmp_path / "cache"))
    settings = Settings.load(max_model_len=512, model=str(model_dir), prefix_forecasts=wanted)
    library = Library(tmp_path / "kv", settings)
    engine = SimpleNamespace(blends=True, facts={"reason": None}, max_model_len=512)
    store = Mock(id="opened")
    monkeypatch.setattr(library.session, "start", lambda progress=None: engine)
    monkeypatch.setattr(EngineSession, "store", store)
    monkeypatch.setattr(library.session, "open", lambda progress=None: store)
    said = [{"role": "user", "content": "How long does it last?"}]
    names = set()
    for answer in ("Eight years.", "Longer."):
        turn = Turn(library, settings, ChatRequest(said, conversation=given))
        names.add(turn.sampling.conversation)
        turn.feed(END)
        said = [*said, {"role": "assistant", "content": answer}, {"role": "user", "content": "Really?"}]
    (name,) = names
    if not wanted:
        assert name is None and library.forecaster is None
        library.close()
        return
    assert library.forecaster is not None and name is not None
    library.forecaster._tell({name: 0.1})
    library.close()
    assert store.forecast.call_args_list == [call([(name, 0.1, [])])]


@given(st.lists(st.tuples(st.text(max_size=2), st.floats(0, 1), KEYS), max_size=6))
def test_forecast_is_lost_on_its_way_to_the_worker(forecasts: list[tuple[str, float, list[str]]]) -> None:
    parts = list(forecaster._parts(forecasts))
    assert all(0 <= sum(len(keys) for *_, keys in part) <= forecaster.AT_ONCE for part in parts)
    told = [(whose, chance, key) for part in parts for whose, chance, keys in part for key in keys]
    assert told == [(whose, chance, key) for whose, chance, keys in forecasts for key in keys]
    assert {whose for part in parts for whose, *_ in part} == {whose for whose, *_ in forecasts}
