"""``blendrag fit``: learned eviction, from your own log or from conversations."""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blendrag.cli.console import interruptible, print_json, say
from blendrag.cli.options import Json, path_option

if TYPE_CHECKING:
    from blendrag.lab.eviction.fit_hazard import Learned
    from blendrag.lab.eviction.fit_predictor import Trained


def fit(
    data: Annotated[
        Path | None,
        path_option(
            'Conversations, a JSON object per line: {"id", "turns": [{"role", "text"}, ...]}; gzipped or'
            " not. Else the log of your own traffic."
        ),
    ] = None,
    embedder: Annotated[
        str | None, typer.Option(help="Packaged default or a sentence-transformers model.", metavar="NAME")
    ] = None,
    held_out: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.9, help="Share of the conversations that is only measured on.", show_default="0.2"
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Fit the predictors of the eviction policies lpc and lpc+ to your traffic, or to conversations."""
    from blendrag.errors import ConfigError, PredictorError
    from blendrag.eviction.fitted import Fitted, fitted_file, load_fitted, save_fitted
    from blendrag.settings import Settings

    if held_out is not None and data is None:
        raise ConfigError("--held-out is of conversations: add --data FILE")
    settings = Settings.load()
    file = fitted_file(settings.cache_dir)
    fitted, facts = Fitted(), dict[str, dict[str, Any]]()
    with suppress(PredictorError):  # there is none, or one of another version
        fitted = load_fitted(file)
    name = embedder or ("" if data else fitted.embedder) or settings.embedder  # the log has the predictor's
    with interruptible("interrupted: what was fitted before stays"):
        trained, table = _on_file(data, name, held_out) if data else _on_log(settings.cache_dir, name)
    if trained:
        facts["lpc"] = trained.to_dict()
        fitted = replace(fitted, classifier=trained.classifier, embedder=trained.embedder)
    if table:
        facts["lpc+"] = table.to_dict()
        fitted = replace(fitted, hazard=table.hazard)
    if facts:
        save_fitted(file, replace(fitted, facts={**fitted.facts, **facts}))
        say(f"written to {file}, for engines that start from now on: {', '.join(facts)}")
    if json:
        print_json(facts)


def _on_file(data: Path, embedder: str, held_out: float | None) -> tuple[Trained, None]:
    from blendrag.forecast.features import features_of
    from blendrag.lab.eviction.fit_predictor import HELD_OUT, train_on_file
    from blendrag.progress import progress_bar

    with progress_bar() as bar:
        bar.note("reading conversations")
        share = HELD_OUT if held_out is None else held_out
        trained = train_on_file(data, features_of(embedder), held_out=share, progress=bar)
    _say_quality(trained)
    return trained, None


def _on_log(cache_dir: Path, embedder: str) -> tuple[Trained | None, Learned | None]:
    """Return of both what is better than nothing. Raises PredictorError where the log teaches neither."""
    from blendrag.errors import PredictorError, SourceError
    from blendrag.forecast.log import PromptLog, log_file
    from blendrag.lab.eviction.fit_hazard import learn_table
    from blendrag.lab.eviction.fit_predictor import train_on_log
    from blendrag.lab.eviction.trace import read_log

    path = log_file(cache_dir)
    if not path.exists():
        raise PredictorError(f"there is no log {str(path)!r} yet: outcome_log=true keeps one")
    trained, table, problems = None, None, list[str]()
    try:
        with closing(PromptLog(path, make=False)) as log:
            trained = train_on_log(log, embedder)
    except PredictorError as error:
        problems.append(f"lpc: {error}")
    try:
        table = learn_table(read_log(path))
    except (PredictorError, SourceError) as error:
        problems.append(f"lpc+: {error}")
    if trained is None and table is None:
        raise PredictorError("; ".join(problems))
    for problem in problems:
        say(problem)
    if trained:
        _say_quality(trained)
        if not trained.helps:
            say("lpc: no better than nothing, and not written")
            trained = None
    if table:
        found = f"lpc+ finds {table.found:.1%} in the latest of {table.prompts:,} prompts"
        say(f"{found}, LRU {table.lru:.1%}, GDSF, the default, {table.gdsf:.1%}")
        if table.found <= table.lru:
            say("lpc+: no better than LRU, and not written")
            table = None
    return trained, table


def _say_quality(trained: Trained) -> None:
    if (found := trained.quality) is None:
        say("lpc: nothing was held out to measure on")
        return
    text = f"{found.log_loss:.3f} nats where the share of those that go on says {found.base:.3f}"
    what = f"{found.examples:,} prompts of {found.conversations:,} conversations, {found.goes_on:.0%} go on"
    say(f"lpc: {what}: {text}")
