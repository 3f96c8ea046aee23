"""``blendrag evictor``: the predictor that tells eviction which conversations go on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from blendrag.cli import options
from blendrag.cli.bench.shared import Json, Plot, measured
from blendrag.cli.console import Commands, interruptible, out, print_json, say

if TYPE_CHECKING:
    from blendrag.forecast.features import Features, Progress
    from blendrag.lab.progress import BenchProgress
    from blendrag.lab.training.relearn_hazard import HazardComparison
    from blendrag.lab.training.study import Trained

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Embedder = Annotated[
    str | None,
    typer.Option(
        help="Packaged default or a sentence-transformers model; words:NAME takes its word vectors alone.",
        metavar="NAME",
    ),
]
_CONVERSATIONS = typer.Option(
    "--data",
    help='Conversations, a JSON object per line: {"id", "turns": [{"role", "text"}, ...]}; gzipped or not.',
    metavar="FILE",
)
_LABELS = {"policy": "lpc goes by", "lpc_plus": "lpc+ goes by"}  # of the status, where a name is not enough
_TOO_GOOD = 0.8  # chats of people are not as predictable
_LEFT = "interrupted: the same command goes on where it was"
_AS_IT_WAS = "interrupted: what was not finished stays as it was"


@app.callback()
def evictor() -> None:
    """Train and check the predictor that tells eviction which conversations go on."""


@app.command()
def train(
    data: Annotated[Path | None, _CONVERSATIONS] = None,
    from_log: Annotated[
        bool, typer.Option("--from-log", help="Learn from the logs of your traffic; what is better is kept.")
    ] = False,
    trace: Annotated[
        list[Path] | None,
        typer.Option(
            help="Learn lpc+ from a block trace (Mooncake) or a store's log; what is better is kept. Several"
            " are played in turn.",
            metavar="FILE",
        ),
    ] = None,
    embedder: Embedder = None,
    layout: Annotated[
        str | None,
        typer.Option(help="joined: one vector of all prompts; apart: of the latest, and of those before it."),
    ] = None,
    held_out: Annotated[
        float, typer.Option(min=0.0, max=0.9, help="Share of the conversations that is only measured on.")
    ] = 0.2,
    out: Annotated[
        Path | None,
        typer.Option(help="Where it is put; by default, where it is looked for.", metavar="FOLDER"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split and of the first weights.")] = 0,
) -> None:
    """Learn from conversations which of them go on, or from traffic; --data goes on where it was stopped."""
    from blendrag.forecast.weights import default_folder

    folder = out or default_folder()
    if [data is not None, from_log, bool(trace)].count(True) != 1:
        raise typer.BadParameter("give one of --data FILE, --trace FILE and --from-log")
    if trace:
        _from_traces(trace, folder)
        return
    if data is None:
        _from_log(folder, embedder, layout, seed)
        return
    from blendrag.forecast.weights import save_weights
    from blendrag.lab.training.relearn import one_at_a_time
    from blendrag.lab.training.study import train_on_file

    features = _features(embedder, layout)
    with one_at_a_time(folder):
        with interruptible(_LEFT), _embedding() as progress:
            trained = train_on_file(data, features, held_out=held_out, seed=seed, progress=progress)
        save_weights(folder, trained.classifier, trained.manifest)
    _print_trained(trained)
    say(f"written to {folder}")


@app.command("eval")
def evaluate(
    data: Annotated[Path, _CONVERSATIONS],
    model: Annotated[
        Path | None, typer.Option("--predictor", help="Folder of the predictor.", metavar="FOLDER")
    ] = None,
    plot: Plot = None,
    json: Json = None,
) -> None:
    """Measure the predictor on conversations, against one that only counts turns."""
    from blendrag.forecast.predictor import Predictor
    from blendrag.forecast.vectors import DiskCache
    from blendrag.forecast.weights import default_folder, load_manifest
    from blendrag.lab.training.calibration_plot import draw_calibration
    from blendrag.lab.training.study import evaluate_on_file

    folder = model or default_folder()
    cache = DiskCache(default_folder(), load_manifest(folder).embedder)
    predictor = Predictor.load(folder, cache=cache)

    def work(bar: BenchProgress) -> dict[str, Any]:
        return evaluate_on_file(data, predictor, _on(bar))

    measured(work, _print_evaluation, json, plot, draw_calibration, _LEFT)


@app.command()
def status(
    model: Annotated[
        Path | None, typer.Option("--predictor", help="Folder of the predictor.", metavar="FOLDER")
    ] = None,
    json: options.Json = False,
) -> None:
    """Say which predictor there is, what it was trained on, and what its log holds. Loads no model."""
    from blendrag.forecast.status import describe
    from blendrag.forecast.weights import default_folder

    facts = describe(model or default_folder())
    if json:
        print_json(facts)
        return
    table = Table(show_header=False, box=None)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        if not isinstance(value, dict | list):
            table.add_row(Text(_LABELS.get(name, name.replace("_", " "))), Text(str(value)))
    for log in facts["traffic_logs"]:
        table.add_row(Text("traffic log"), Text(log))
    out().print(table)
    if facts["metrics"]:
        _print_quality(facts["metrics"], out())


def _from_log(folder: Path, embedder: str | None, layout: str | None, seed: int) -> None:
    """Both models, each from its log. Raises PredictorError where neither has learned anything."""
    from blendrag.errors import PredictorError
    from blendrag.lab.training.relearn import one_at_a_time

    predictor = partial(_predictor_from_log, folder, embedder, layout, seed)
    problems = []
    with one_at_a_time(folder), interruptible(_AS_IT_WAS):
        for learn in (predictor, partial(_hazard_from_log, folder)):
            try:
                learn()
            except PredictorError as error:
                problems.append(str(error))
    if len(problems) == 2:
        raise PredictorError("; ".join(problems))
    for problem in problems:
        say(problem)


def _predictor_from_log(folder: Path, embedder: str | None, layout: str | None, seed: int) -> None:
    from contextlib import closing

    from blendrag.forecast.log import OutcomeLog
    from blendrag.forecast.predictor import Predictor
    from blendrag.lab.training.relearn import relearn

    predictor = Predictor.or_untrained(folder, _features(embedder, layout))
    with closing(OutcomeLog(folder, predictor.features)) as log:
        compared = relearn(log, predictor, folder, seed)
    _print_trained(compared.trained)
    losses = f"{compared.new_loss:.4f} nats on the latest part of the log, before {compared.old_loss:.4f}"
    _say_what_became("lpc", compared.live, folder, losses)


def _hazard_from_log(folder: Path) -> None:
    from blendrag.lab.progress import bench_progress
    from blendrag.lab.training.relearn_hazard import largest_log, relearn_hazard

    with bench_progress() as bar:
        compared = relearn_hazard(largest_log(folder), folder, bar)
    _say_what_was_found(compared, folder)


def _from_traces(files: Sequence[Path], folder: Path) -> None:
    from blendrag.lab.progress import bench_progress
    from blendrag.lab.training.relearn import one_at_a_time
    from blendrag.lab.training.relearn_hazard import learn_from_traces

    with one_at_a_time(folder), interruptible(_AS_IT_WAS), bench_progress() as bar:
        compared = learn_from_traces(files, folder, bar)
    _say_what_was_found(compared, folder)
    if compared.live and compared.prefix:
        say("a model of prefixes: stores, whose chunks are found one by one, do not go by it")


def _say_what_was_found(compared: HazardComparison, folder: Path) -> None:
    before = "" if compared.old is None else f", before {compared.old:.1%}"
    found = f"{compared.new:.1%} found in the latest part of {compared.prompts:,} prompts{before}"
    others = f"LRU {compared.lru:.1%}, GDSF {compared.gdsf:.1%}"
    _say_what_became("lpc+", compared.live, folder, f"{found}, {others}")
    if compared.kept is not None and not compared.prefix:
        better = compared.kept > compared.gdsf
        say(
            "lpc+ finds more here than GDSF, the default: eviction='lpc+' goes by it"
            if better
            else "lpc+ finds no more here than GDSF, the default: there is no reason to change from that"
        )


def _say_what_became(policy: str, live: bool, folder: Path, how_good: str) -> None:
    what = f"written to {folder}" if live else "not better, nothing changed"
    say(f"{policy}: {what}: {how_good}")


def _features(embedder: str | None, layout: str | None) -> Features:
    from blendrag.errors import ConfigError
    from blendrag.forecast.features import DEFAULT_LAYOUT, LAYOUTS
    from blendrag.forecast.predictor import make_features
    from blendrag.forecast.vectors import DiskCache
    from blendrag.forecast.weights import default_folder
    from blendrag.settings import Settings

    name = embedder or Settings.load().embedder
    chosen = next((each for each in LAYOUTS if each == (layout or DEFAULT_LAYOUT)), None)
    if chosen is None:
        raise ConfigError(f"--layout {layout}: there are {', '.join(LAYOUTS)}")
    return make_features(name, chosen, DiskCache(default_folder(), name))


@contextmanager
def _embedding() -> Iterator[Progress]:
    """A bar for texts that are embedded."""
    from blendrag.lab.progress import bench_progress

    with bench_progress() as bar:
        bar.note("reading conversations")
        yield _on(bar)


def _on(bar: BenchProgress) -> Progress:
    steps = 0

    def show(done: int, total: int) -> None:
        nonlocal steps
        bar.note("embedding prompts")
        bar.total(total)
        while steps < done:
            bar.step()
            steps += 1

    return show


def _print_trained(trained: Trained) -> None:
    manifest = trained.manifest
    console = out()
    console.print(
        Text(
            f"{manifest.examples:,} prompts of {manifest.conversations:,} conversations, {manifest.embedder},"
            f" {manifest.layout}, with {', '.join(manifest.scalars)}"
        )
    )
    if manifest.metrics:
        _print_quality(manifest.metrics, console)
    else:
        console.print("Nothing was held out to measure on.")


def _print_evaluation(results: Mapping[str, Any], console: Console) -> None:
    if results["held_out_only"]:
        console.print("Trained on this file: measured on what was held out.")
    _print_quality(results, console)


def _print_quality(results: Mapping[str, Any], console: Console) -> None:
    table = Table(
        title=f"{results['examples']:,} prompts of {results['conversations']:,} conversations,"
        f" {results['goes_on']:.0%} go on",
        title_justify="left",
    )
    table.add_column("predictor")
    columns = ("mcc", "f1_macro", "auc", "brier", "log_loss", "calibration_error")
    for name in ("MCC", "macro-F1", "AUC", "Brier", "log loss", "calibration error"):
        table.add_column(name, justify="right")
    for name, label in (("lpc", "LPC"), ("turns_only", "turns only")):
        table.add_row(label, *(f"{results[name][column]:.3f}" for column in columns))
    console.print(table)
    if results["lpc"]["auc"] > _TOO_GOOD:
        console.print(
            f"AUC above {_TOO_GOOD}: where chats do not close explicitly, look for what gives their end away."
        )
