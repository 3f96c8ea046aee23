"""``blendrag evictor``: the predictor that tells eviction which conversations go on."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.console import err, group, interruptible, out, print_json, say
from blendrag.cli.measured import measured
from blendrag.tables import table_with

if TYPE_CHECKING:
    from blendrag.forecast.classifier import Metrics
    from blendrag.forecast.features import Features
    from blendrag.lab.eviction.learn_hazard import HazardComparison
    from blendrag.lab.eviction.learn_predictor import Judged, Trained

app = group(help="Train and check the predictor that tells eviction which conversations go on.")

_CONVERSATIONS = typer.Option(
    "--data",
    help='Conversations, a JSON object per line: {"id", "turns": [{"role", "text"}, ...]}; gzipped or not.',
    metavar="FILE",
)
_LABELS = {"policy": "lpc goes by", "lpc_plus": "lpc+ goes by"}  # of the status, where a name is not enough
_TOO_GOOD = 0.8  # chats of people are not as predictable
_LEFT = "interrupted: the same command goes on where it was"
_AS_IT_WAS = "interrupted: what was not finished stays as it was"


@app.command()
def train(
    data: Annotated[Path | None, _CONVERSATIONS] = None,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="Learn from the logs of your traffic; what is better is kept.")
    ] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Learn lpc+ from a block trace (Mooncake) or a store's log; what is better is kept.",
            metavar="FILE",
        ),
    ] = None,
    embedder: Annotated[
        str | None,
        typer.Option(
            help="Packaged default or a sentence-transformers model; words:NAME: its word vectors alone.",
            metavar="NAME",
        ),
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the conversations that is only measured on.")
    ] = 0.2,
    folder: Annotated[
        Path | None,
        typer.Option("--out", help="Where it is put; by default, where it is looked for.", metavar="FOLDER"),
    ] = None,
    seed: options.Seed = 0,
    json: options.Json = False,
) -> None:
    """Learn from conversations which of them go on, or from traffic; --data goes on where it was stopped."""
    from blendrag.forecast.folder import default_folder
    from blendrag.lab.eviction.learn_predictor import one_at_a_time

    folder = folder or default_folder()
    if [data is not None, from_log, trace is not None].count(True) != 1:
        raise typer.BadParameter("give one of --data FILE, --trace FILE and --from-log")
    console = err() if json else out()
    if trace:
        with one_at_a_time(folder), interruptible(_AS_IT_WAS):
            learned = {"lpc_plus": _hazard_from(trace, folder)}
    elif data:
        learned = {"lpc": _from_conversations(data, folder, embedder, held_out, seed, console)}
    else:
        learned = _from_log(folder, embedder, seed, console)
    if json:
        print_json(learned)


@app.command("eval")
def evaluate(
    data: Annotated[Path, _CONVERSATIONS],
    json: options.Json = False,
) -> None:
    """Measure the predictor on conversations."""
    from blendrag.forecast.classifier import load_manifest
    from blendrag.forecast.folder import default_folder
    from blendrag.forecast.predictor import Predictor
    from blendrag.lab.eviction.learn_predictor import evaluate_on_file
    from blendrag.lab.eviction.vectors import DiskCache

    folder = default_folder()
    predictor = Predictor.load(folder, cache=DiskCache(folder, load_manifest(folder).embedder))
    measured(lambda bar: evaluate_on_file(data, predictor, bar), _print_evaluation, json, interrupted=_LEFT)


@app.command()
def status(json: options.Json = False) -> None:
    """Say which predictor there is, what it was trained on, and what its log holds. Loads no model."""
    from blendrag.forecast.folder import FolderStatus, default_folder

    found = FolderStatus.of(default_folder())
    if json:
        print_json(found.to_dict())
        return
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in found.to_dict().items():
        if name not in ("metrics", "traffic_logs"):
            table.add_row(Text(_LABELS.get(name, name.replace("_", " "))), Text(str(value)))
    for log in found.traffic_logs:
        table.add_row(Text("traffic log"), Text(log))
    out().print(table)
    if found.manifest and found.manifest.metrics:
        _print_quality(found.manifest.metrics, out())


def _from_conversations(
    data: Path, folder: Path, embedder: str | None, held_out: float, seed: int, console: Console
) -> dict[str, Any]:
    from blendrag.forecast.classifier import save_weights
    from blendrag.lab.eviction.learn_predictor import one_at_a_time, train_on_file
    from blendrag.progress import progress_bar

    features = _features(embedder)
    with one_at_a_time(folder):
        with interruptible(_LEFT), progress_bar() as bar:
            bar.note("reading conversations")
            trained = train_on_file(data, features, held_out=held_out, seed=seed, progress=bar)
        save_weights(folder, trained.classifier, trained.manifest)
    _print_trained(trained, console)
    say(f"written to {folder}")
    return trained.to_dict()


def _from_log(folder: Path, embedder: str | None, seed: int, console: Console) -> dict[str, dict[str, Any]]:
    """Both models, each from its log. Raises PredictorError where neither has learned anything."""
    from blendrag.errors import PredictorError, SourceError
    from blendrag.lab.eviction.learn_predictor import one_at_a_time

    ways = {
        "lpc": partial(_predictor_from_log, folder, embedder, seed, console),
        "lpc_plus": partial(_hazard_from_log, folder),
    }
    learned, problems = {}, []
    with one_at_a_time(folder), interruptible(_AS_IT_WAS):
        for name, learn in ways.items():
            try:
                learned[name] = learn()
            except (PredictorError, SourceError) as error:
                problems.append(str(error))
    if not learned:
        raise PredictorError("; ".join(problems))
    for problem in problems:
        say(problem)
    return learned


def _predictor_from_log(folder: Path, embedder: str | None, seed: int, console: Console) -> dict[str, Any]:
    from contextlib import closing

    from blendrag.forecast.outcome_log import OutcomeLog
    from blendrag.forecast.predictor import Predictor
    from blendrag.lab.eviction.learn_predictor import relearn

    predictor = Predictor.or_untrained(folder, _features(embedder))
    with closing(OutcomeLog(folder, predictor.features.embedder.name)) as log:
        compared = relearn(log, predictor, folder, seed)
    _print_trained(compared.trained, console)
    losses = f"{compared.new_loss:.4f} nats on the latest part of the log, before {compared.old_loss:.4f}"
    _say_what_became("lpc", compared.live, folder, losses)
    return compared.to_dict()


def _hazard_from_log(folder: Path) -> dict[str, Any]:
    from blendrag.lab.eviction.learn_hazard import largest_log

    return _hazard_from(largest_log(folder), folder)


def _hazard_from(trace: Path, folder: Path) -> dict[str, Any]:
    from blendrag.lab.eviction.learn_hazard import learn_from_trace
    from blendrag.progress import progress_bar

    with progress_bar() as bar:
        compared = learn_from_trace(trace, folder, bar)
    _say_what_was_found(compared, folder)
    if compared.live and compared.prefix:
        say("a model of prefixes: stores, whose chunks are found one by one, do not go by it")
    return asdict(compared)


def _say_what_was_found(compared: HazardComparison, folder: Path) -> None:
    before = "" if compared.old is None else f", before {compared.old:.1%}"
    found = f"{compared.new:.1%} found in the latest part of {compared.prompts:,} prompts{before}"
    others = f"LRU {compared.lru:.1%}, GDSF {compared.gdsf:.1%}"
    _say_what_became("lpc+", compared.live, folder, f"{found}, {others}")
    if compared.kept is not None and not compared.prefix:
        better = compared.kept > compared.gdsf
        say(
            "lpc+ finds more here than GDSF, the default: tiers with policy: lpc+ go by it"
            if better
            else "lpc+ finds no more here than GDSF, the default: there is no reason to change from that"
        )


def _say_what_became(policy: str, live: bool, folder: Path, how_good: str) -> None:
    what = f"written to {folder}" if live else "not better, nothing changed"
    say(f"{policy}: {what}: {how_good}")


def _features(embedder: str | None) -> Features:
    from blendrag.forecast.features import Features
    from blendrag.forecast.folder import default_folder
    from blendrag.forecast.words import open_embedder
    from blendrag.lab.eviction.vectors import DiskCache
    from blendrag.settings import Settings

    name = embedder or Settings.load().embedder
    return Features(open_embedder(name), DiskCache(default_folder(), name))


def _print_trained(trained: Trained, console: Console) -> None:
    manifest = trained.manifest
    console.print(
        Text(
            f"{manifest.examples:,} prompts of {manifest.conversations:,} conversations, {manifest.embedder},"
            f" with {', '.join(manifest.scalars)}"
        )
    )
    if manifest.metrics:
        _print_quality(manifest.metrics, console)
    else:
        console.print("Nothing was held out to measure on.")


def _print_evaluation(results: Judged, console: Console) -> None:
    if results.held_out_only:
        console.print("Trained on this file: measured on what was held out.")
    _print_quality(results.metrics, console)


def _print_quality(metrics: Metrics, console: Console) -> None:
    what = f"{metrics.examples:,} prompts of {metrics.conversations:,} conversations"
    title = f"{what}, {metrics.goes_on:.0%} go on"
    table = table_with("predictor", "AUC", "Brier", "log loss", "calibration error", title=title)
    found = metrics.lpc
    numbers = (found.auc, found.brier, found.log_loss, found.calibration_error)
    table.add_row("lpc", *(f"{number:.3f}" for number in numbers))
    console.print(table)
    if found.auc > _TOO_GOOD:
        console.print(
            f"AUC above {_TOO_GOOD}: where chats do not close explicitly, look for what gives their end away."
        )
