"""Time to the first token: full prefill, prefix caching, full reuse and blending on the same prompts, at the
values of one parameter (CacheBlend figures 12, 15, 16 and 17)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from blendrag.lab import canvas
from blendrag.lab.arms import PARTS, Arm, blended_prefill, exact_prefix, prefix_caching, recipe_of
from blendrag.lab.bench.axes import AXES, Axis, Point, Value, tiers_of
from blendrag.lab.canvas import ARM_COLOURS, ARM_LABELS, INK
from blendrag.lab.experiment import measure
from blendrag.lab.options import TtftOptions
from blendrag.lab.prompts import Prompt, PromptMaker, Trial, check_prompts
from blendrag.lab.results import Results, Setup, where
from blendrag.lab.running import blending_engine
from blendrag.lab.scratch import ScratchStore, ScratchTree, scratch_store, scratch_tree
from blendrag.lab.statistics import Summary, summarise
from blendrag.lab.texts import text_pieces
from blendrag.progress import Progress
from blendrag.select import make_selector
from blendrag.settings import Settings
from blendrag.store.codec import Codec
from blendrag.store.record import Layout
from blendrag.tables import table_with

ArmKey = tuple[Any, ...]  # an arm's name, and what its prompts and its store depend on
ARMS = ("full", "prefix", "reuse", "blended")
_POOL = 4  # chunks in a store, per chunk of the largest prompt
EXACT = "raw"
_READ_BACK = 6  # chunks whose KV every codec is measured on


@dataclass(frozen=True, slots=True)
class CodecCost:
    """The cost of a codec. k_error, v_error: norm of the difference by norm, mean over chunks and layers."""

    bytes_per_token: float
    k_error: float
    v_error: float


def measure_codec(codec: Codec, records: Sequence[torch.Tensor]) -> CodecCost:
    """Measure a codec on KV as the model made it, each [layers, 2, tokens, heads, size]."""
    layers, _, tokens = records[0].shape[:3]
    key, value = np.mean([_errors(codec, each) for each in records], axis=0)
    return CodecCost(layers * codec.row_bytes(tokens) / tokens, float(key), float(value))


def _errors(codec: Codec, kv: torch.Tensor) -> list[float]:
    """Return the relative error of K and of V, mean over layers."""
    found = torch.empty_like(kv)
    for row, (key, value) in zip(codec.encode(kv), found, strict=True):
        codec.decode(row, kv.shape[2], key, value)
    exact = kv.float().flatten(2)
    return ((found.float().flatten(2) - exact).norm(dim=2) / exact.norm(dim=2)).mean(0).tolist()


@dataclass(frozen=True, slots=True)
class TtftResults(Results):
    """Results of ``bench ttft``. arms: every arm once, ``full`` first. points: per value of the axis the arms
    full, prefix, reuse and blended, and exact ones. codecs: by value of that axis."""

    arms: dict[str, Summary]
    points: dict[Value, dict[str, Summary]]
    codecs: dict[str, CodecCost]
    setup: Setup[TtftOptions]

    def parts(self) -> Iterator[Table | str]:
        return (_ttft_parts if self.setup.options.exact else _sweep_parts)(self)

    def draw(self, path: Path) -> None:
        (_draw_ttft if self.setup.options.exact else _draw_sweep)(self, path)

    @property
    def axis(self) -> Axis:
        return AXES[self.setup.options.axis]

    def to_dict(self) -> dict[str, Any]:
        points = [
            {"value": value, "arms": {name: arm.to_dict() for name, arm in point.items()}}
            for value, point in self.points.items()
        ]
        found = {
            "arms": {name: arm.to_dict() for name, arm in self.arms.items()},
            "axis": self.axis.name,
            "label": self.axis.label,
            "points": points,
            "codecs": {name: asdict(cost) for name, cost in self.codecs.items()},
        }
        return found | self.setup.to_dict()


def run_ttft(settings: Settings, options: TtftOptions, progress: Progress) -> TtftResults:
    """Measure times to the first token.

    Raises ConfigError, SourceError, ModelError, PromptTooLongError, StoreError, EngineError.
    """
    make_selector(settings.blending)  # what is wrong is told before the long start
    start = Point(options.chunks, options.chunk_tokens, settings.blending.recompute_ratio, settings.new_codec)
    axis = AXES[options.axis]
    points = {value: axis.at(start, value) for value in options.values}
    with blending_engine(settings, progress, exact=options.exact) as engine, ExitStack() as opened:
        maker = PromptMaker.of(engine, settings)
        progress.note("cutting text into chunks")
        most = max(point.chunks for point in points.values())
        pieces = [
            piece
            for tokens in sorted({point.chunk_tokens for point in points.values()})
            for piece in text_pieces(maker.tokenizer, _POOL * most, tokens, least=most)
        ]
        stores: dict[tuple[str, str], ScratchStore] = {}
        for point in points.values():
            if point.store not in stores:
                progress.note(f"ingest: {point.codec} in {point.tier}")
                own = settings.model_copy(update={"codec": point.codec})
                spec = tiers_of(settings)[point.tier]
                stores[point.store] = opened.enter_context(
                    scratch_store(engine, own, pieces, spec, filled=engine.blends)
                )
        tree = None
        if options.exact and engine.facts.blocks:
            tree = opened.enter_context(scratch_tree(engine, settings, disk=True))
        arms, cases = _arms(settings, options, maker, points, stores, tree, blended=engine.blends)
        prompts = [trial.prompt for arm in arms.values() for trial in arm.trials]
        check_prompts(prompts, engine.max_model_len)
        samples = measure(engine, arms, progress)
        codecs = {}
        if axis.name == "codec" and EXACT in points:
            exact, dtype = stores[points[EXACT].store], engine.facts.dtype
            records = exact.read_back(exact.chunks[:_READ_BACK], dtype)
            for name in map(str, points):
                layout = Layout(replace(exact.identity, codec=name), dtype)
                codecs[name] = measure_codec(layout.codec, records)
        setup = Setup.of(engine, settings, options, prompts)
    found = {
        value: summarise({name: samples[key] for name, key in case.items()}, ("full", "prefix"))
        for value, case in cases.items()
    }
    return TtftResults(
        {arms[key].name: found[value][name] for value, case in cases.items() for name, key in case.items()},
        found,
        codecs,
        setup,
    )


def _arms(
    settings: Settings,
    options: TtftOptions,
    maker: PromptMaker,
    points: Mapping[Value, Point],
    stores: Mapping[tuple[str, str], ScratchStore],
    tree: ScratchTree | None = None,
    *,
    blended: bool = True,
) -> tuple[dict[ArmKey, Arm], dict[Value, dict[str, ArmKey]]]:
    """Return the arms, and per value which are its own. Points share those that do not depend on what is
    varied, as full prefill does not depend on the ratio: they are measured once. blended: whether there are
    those that blend. Where there are none, prefix caching has seen the documents in this very order."""
    arms: dict[ArmKey, Arm] = {}
    cases: dict[Value, dict[str, ArmKey]] = {}
    for value, point in points.items():
        store = stores[point.store]
        trials = _trials(maker, store, point, options)
        cold = None if point.tier == "ram" else store
        recipe = recipe_of(settings, store.id, point.ratio)
        if point.quality:
            recipe = replace(recipe, options=replace(recipe.options, **point.step._asdict()))
        own: dict[str, Arm] = {"full": Arm("full", trials)}
        own["prefix"] = prefix_caching(trials if blended else [_in_order(trial) for trial in trials])
        if tree is not None:
            own["exact"] = exact_prefix(trials, tree)
            own["exact cold"] = exact_prefix(trials, tree, cold=True)
        if blended:
            own["reuse"] = blended_prefill(trials, recipe_of(settings, store.id, 0.0), cold)
            own["blended"] = blended_prefill(trials, recipe, cold, point.quality)
        cases[value] = {}
        for kind, arm in own.items():
            on_store = point.store if kind in ("reuse", "blended") else ()
            key = cases[value][kind] = (arm.name, *point.prompts, *on_store)
            arms.setdefault(key, arm)
    return arms, cases


def _in_order(trial: Trial) -> Trial:
    """Return the trial with its own prompt, without most of its question, before it."""
    _, start, length = trial.prompt.spans[-1]
    return replace(trial, before=Prompt(trial.prompt.token_ids[: start + length + 1], ()))


def _trials(maker: PromptMaker, store: ScratchStore, point: Point, options: TtftOptions) -> list[Trial]:
    """Return the trials, the same whichever store they are from; the first one is the warm-up."""
    own = [chunk for chunk in store.chunks if len(chunk.token_ids) == point.chunk_tokens]
    return maker.trials(own, point.chunks, options.repeats + 1, f"{options.seed} {point.prompts}")


# -- tables and pictures ----------------------------------------------------------------------------------

_PART_COLOURS = {"load": "#e9a23b", "select": "#8e6cc0", "recompute": "#2f81c7", "engine": "#9ecae1"}
_PLAIN = "#a8b0b8"


def _ttft_parts(results: TtftResults) -> Iterator[Table | str]:
    """Yield a row per arm: how fast, and how close to full prefill; then where the time went."""
    speed = table_with("arm", "TTFT ms", "p10-p90", "speed-up", "p10-p90", "KL", "top-1")
    for name, arm in results.arms.items():
        agreement = f"{arm.kl_first_token:.4f}", f"{arm.top1_agreement:.0%}"
        speed.add_row(name, *arm.ttft_ms.shown(), *_times(arm, "full"), *agreement)
    yield speed
    yield (
        "TTFT: time to first token, median. prefix: vLLM's prefix caching, the same chunks seen before in"
        " another order (of a hybrid model, in this order). exact: the prompt's own KV from a tree, in RAM or"
        " (cold) on disk. speed-up: full / arm, repeat by repeat. KL, top-1: the first token against full's."
        " Below: chunk tokens computed again; load to engine: where the TTFT went, ms.\n"
    )
    yield from (_split("arm", results.arms.items()), _facts(results))


def _sweep_parts(results: TtftResults) -> Iterator[Table | str]:
    """Yield a row per value: TTFT of the arms, what blending saves, where its time goes, codecs."""
    axis = results.axis.name
    ttft = table_with(axis, "full ms", "prefix ms", "reuse ms", "blended ms", "p10-p90")
    gain = table_with(axis, "full / blended", "p10-p90", "prefix / blended", "p10-p90", "KL")
    for value, arms in results.points.items():
        blended = arms["blended"]
        medians = (f"{arms[name].ttft_ms.median:,.0f}" for name in ARMS)
        ttft.add_row(str(value), *medians, blended.ttft_ms.shown()[1])
        gains = (*_times(blended, "full"), *_times(blended, "prefix"))
        gain.add_row(str(value), *gains, f"{blended.kl_first_token:.4f}")
    yield from (ttft, gain)
    yield _split(axis, ((str(value), arms["blended"]) for value, arms in results.points.items()))
    if results.codecs:
        yield _codecs(results)
    yield _facts(results)


def _times(arm: Summary, rival: str) -> tuple[str, str]:
    median, spread = arm.speedup[rival].shown(".2f")
    return f"{median}x", spread


def _split(first: str, arms: Iterable[tuple[str, Summary]]) -> Table:
    table = table_with(first, "recomputed", *PARTS, "engine")
    for name, arm in arms:
        parts = (f"{arm.split_ms[part]:,.0f}" if arm.blended else "" for part in PARTS)
        table.add_row(name, f"{arm.tokens_recomputed:,}", *parts, f"{arm.split_ms['engine']:,.0f}")
    return table


def _codecs(results: TtftResults) -> Table:
    table = table_with("codec", "B/token", "smaller", "K error", "V error")
    most = max(cost.bytes_per_token for cost in results.codecs.values())
    for name, cost in results.codecs.items():
        smaller = f"{most / cost.bytes_per_token:.2f}x"
        errors = f"{cost.k_error:.2%}", f"{cost.v_error:.2%}"
        table.add_row(name, f"{cost.bytes_per_token:,.0f}", smaller, *errors)
    return table


def _facts(results: TtftResults) -> str:
    setup, options, axis = results.setup, results.setup.options, results.axis.name
    settings = setup.settings
    fixed = {
        "chunks": f"{options.chunks} chunks",
        "chunk_tokens": f"{options.chunk_tokens} tokens a chunk",
        "codec": f"codec {settings.new_codec}",
    }
    if axis != "quality":
        fixed |= {
            "ratio": f"{settings.blending.recompute_ratio:.0%} recomputed",
            "selector": f"selector {settings.blending.selector}",
        }
    same = ", ".join(text for name, text in fixed.items() if name != axis)
    accelerator = "" if setup.machine.device == "cpu" else f", {setup.machine.device}"
    return (
        f"TTFT: time to first token, medians of {options.repeats} repeats; {same},"
        f" prompts of {setup.prompt_tokens[0]:,} to {setup.prompt_tokens[-1]:,} tokens. KL: the first token"
        f" against full's. {where(setup.machine)}{accelerator}."
    )


def _draw_ttft(results: TtftResults, path: Path) -> None:
    """Write the picture: a bar per arm, those of blends split into where the time goes."""
    from matplotlib.patches import Patch

    arms, options = results.arms, results.setup.options
    figure = canvas.new_figure(8, 1.9 + 0.48 * len(arms))
    axes = figure.add_subplot()
    for row, arm in enumerate(arms.values()):
        _bar(axes, row, arm)
    axes.set_yticks(range(len(arms)), [_label(name) for name in arms])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.16 * max(arm.ttft_ms.p90 for arm in arms.values()))
    title = f"{options.chunks} chunks of {options.chunk_tokens} tokens"
    canvas.finish_axes(axes, title, "time to first token, ms (median; whiskers: p10 to p90)", "")
    figure.legend(
        handles=[
            Patch(color=_PLAIN, label="plain prefill"),
            *(Patch(color=colour, label=part) for part, colour in _PART_COLOURS.items()),
        ],
        loc="outside upper center", ncols=5, labelcolor=INK, frameon=False, fontsize=9,
    )  # fmt: skip
    canvas.save(figure, path, results.setup.machine)


def _bar(axes: Any, row: int, arm: Summary) -> None:
    ttft, left = arm.ttft_ms, 0.0
    parts = _PART_COLOURS.items() if arm.blended else [("engine", _PLAIN)]
    for part, colour in parts:
        axes.barh(row, arm.split_ms[part], left=left, height=0.62, color=colour)
        left += arm.split_ms[part]
    whiskers = [[ttft.median - ttft.p10], [ttft.p90 - ttft.median]]
    axes.errorbar(ttft.median, row, xerr=whiskers, color=INK, capsize=3, linewidth=1)
    axes.annotate(
        f"{arm.speedup['full'].median:.1f}×", (max(ttft.p90, ttft.median), row), (6, 0),
        textcoords="offset points", va="center", color=INK, fontsize=10, fontweight="bold",
    )  # fmt: skip


def _label(name: str) -> str:
    kind, _, ratio = name.partition("@")
    return f"blended, {100 * float(ratio):g} %" if ratio else ARM_LABELS.get(kind, kind)


def _draw_sweep(results: TtftResults, path: Path) -> None:
    """Write the picture: TTFT to the left, full prefill / arm to the right; a line and a band per arm."""
    values, points = list(results.points), results.points.values()
    numbers = [value for value in values if not isinstance(value, str)]
    at: Sequence[float] = numbers or range(len(values))
    figure = canvas.new_figure(9, 3.8)
    panels = figure.subplots(1, 2)
    for name, colour in ARM_COLOURS.items():
        for axes, spreads, scale in (
            (panels[0], [arms[name].ttft_ms for arms in points], 1e-3),
            (panels[1], [arms[name].speedup["full"] for arms in points], 1.0),
        ):
            if name == "full" and axes is panels[1]:
                continue
            low, middle, high = (
                [scale * getattr(each, key) for each in spreads] for key in ("p10", "median", "p90")
            )
            axes.plot(at, middle, color=colour, marker="o", markersize=4, label=ARM_LABELS[name])
            axes.fill_between(at, low, high, color=colour, alpha=0.2, linewidth=0)
    for axes in panels:
        axes.set_ylim(bottom=0)
        if not numbers:
            axes.set_xticks(at, values)
    canvas.finish_axes(panels[0], "Time to first token", results.axis.label, "s (median, p10 to p90)")
    canvas.finish_axes(panels[1], "Full prefill / arm", results.axis.label, "times")
    canvas.add_legend(figure, panels[0])
    canvas.save(figure, path, results.setup.machine)
