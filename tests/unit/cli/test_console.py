"""How an interrupt and an error end a command."""

from __future__ import annotations

import pytest
import typer
from typer.testing import CliRunner

from blendrag.cli.console import INTERRUPTED, Commands, interruptible
from blendrag.errors import BlendragError, EngineError


def _ending_with(error: BaseException) -> typer.Typer:
    app = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @app.command()
    def fail() -> None:
        raise error

    app.callback()(lambda: None)
    return app


def test_interrupt_ends_with_one_line_and_130() -> None:
    result = CliRunner().invoke(_ending_with(KeyboardInterrupt()), ["fail"])
    assert result.exit_code == INTERRUPTED
    assert result.stderr == "interrupted\n" and not result.stdout


def test_own_error_ends_with_one_line_and_1() -> None:
    result = CliRunner().invoke(_ending_with(BlendragError("no such thing [x]")), ["fail"])
    assert result.exit_code == 1
    assert result.stderr == "error: no such thing [x]\n" and not result.stdout


def test_bug_is_not_hidden() -> None:
    result = CliRunner().invoke(_ending_with(ZeroDivisionError()), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_engine_that_fails_because_of_the_interrupt_is_not_reported_as_an_error(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(typer.Exit) as ended, interruptible("go on later"):
        try:
            raise KeyboardInterrupt
        finally:
            raise EngineError("the engine failed at flush")
    assert ended.value.exit_code == INTERRUPTED
    assert capsys.readouterr().err == "go on later\n"


def test_engine_error_of_its_own_passes() -> None:
    with pytest.raises(EngineError), interruptible("go on later"):
        raise EngineError("died")
