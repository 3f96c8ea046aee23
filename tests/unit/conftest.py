"""What several packages' tests share: the command line, a predictor that learned a rule, a server, disks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from functools import cache
from typing import Any

import pytest
import typer.testing

from blendrag.lab.eviction.fit_predictor import Trained, train_on_file
from keeping_server import Keeping
from mounts import mounts
from scripted_server import scripted
from word_embedder import features, write_dialogs


@pytest.fixture(scope="session", autouse=True)
def command_line_built_once() -> Iterator[None]:
    """As in a shell. Typer's runner would build all commands from their signatures, for each one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.testing, "_get_command", cache(typer.testing._get_command))
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    path = write_dialogs(tmp_path_factory.mktemp("dialogs") / "dialogs.jsonl")
    return train_on_file(path, features(), held_out=0.3)


@pytest.fixture(scope="session")
def with_template(tokenizer: Any) -> Callable[[Any], Any]:
    """The default tokenizer under another chat template."""

    def change(template: Any) -> Any:
        changed = copy(tokenizer)
        changed.chat_template = template
        return changed

    return change


mount = pytest.fixture(mounts)


@pytest.fixture
def server() -> Iterator[Keeping]:
    with scripted() as script:
        yield Keeping(script)
