"""Losses of decoding from a budget of KV: arms with one against the same arms without."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from blendrag.lab.bootstrap import Interval, difference, mean
from blendrag.lab.evaluate.arms import ArmSpec
from blendrag.lab.evaluate.samples import AnswerSample, by_arm
from blendrag.tables import table_with

_BASE = "uniform"  # what allocators are compared with
_DEFAULT = "default"  # the allocator of a budget that says its size only


@dataclass(frozen=True, slots=True)
class DecodedSummary:
    """Losses of an arm with a budget, over the ``n`` questions whose prompts are longer than it; the first
    token, which is computed over all KV, counts nowhere.

    kept: share of a prompt's tokens that a head kept, on average. nll_loss: nats per token of the right
    answer, against all KV; None if all answers are one token. kl: mean over 31 tokens, from all KV.
    kl_to_uniform: this arm's - that of ``uniform`` with the same budget, question by question.
    """

    budget: int
    by: str
    n: int
    kept: Interval
    nll_loss: Interval | None
    kl: Interval
    kl_to_uniform: Interval | None


def summarise_decoding(
    samples: Iterable[AnswerSample], arms: Sequence[ArmSpec], tokens: Mapping[str, int]
) -> dict[str, DecodedSummary]:
    """Summarise losses by arm. tokens: of each question's prompt."""
    answered, found = by_arm(samples), {}
    for arm in arms:
        answers = answered.get(arm.name, {})
        own = {id: each for id, each in answers.items() if each.evicted and each.evicted.kept}
        if arm.budget is not None and own:
            uniform = f"{arm.budget.partition(':')[0]}:{_BASE}"
            base = answered.get(f"{arm.whole.name}:{uniform}", {}) if arm.budget != uniform else {}
            found[arm.name] = _summary(arm.budget, own, answered.get(arm.whole.name, {}), base, tokens)
    return found


def _summary(
    budget: str,
    own: Mapping[str, AnswerSample],
    whole: Mapping[str, AnswerSample],
    uniform: Mapping[str, AnswerSample],
    tokens: Mapping[str, int],
) -> DecodedSummary:
    nll, reference = _nll(own), _nll(whole)
    told = [id for id in nll if id in reference]
    kl, base = _kl(own), _kl(uniform)
    shared = [id for id in kl if id in base]
    size, _, by = budget.partition(":")
    return DecodedSummary(
        int(size),
        by or _DEFAULT,
        len(own),
        mean([each.evicted.kept / tokens[id] for id, each in own.items() if each.evicted]),
        difference([nll[id] for id in told], [reference[id] for id in told]) if told else None,
        mean(list(kl.values())),
        difference([kl[id] for id in shared], [base[id] for id in shared]) if shared else None,
    )


def _nll(samples: Mapping[str, AnswerSample]) -> dict[str, float]:
    return {id: each.nll_later for id, each in samples.items() if each.nll_later is not None}


def _kl(samples: Mapping[str, AnswerSample]) -> dict[str, float]:
    return {id: each.evicted.kl for id, each in samples.items() if each.evicted}


def decoding_table(arms: Mapping[str, DecodedSummary]) -> Table:
    table = table_with("arm", "n", "KV kept", "NLL lost", "95 %", "KL", "95 %", "- uniform's", "95 %")
    for name, arm in arms.items():
        nll, kl, more = (
            shown(interval, form)
            for interval, form in ((arm.nll_loss, "+z.3f"), (arm.kl, ".4f"), (arm.kl_to_uniform, "+z.4f"))
        )
        table.add_row(name, str(arm.n), f"{arm.kept.mean:.1%}", *nll, *kl, *more)
    return table


DECODING_LEGEND = (
    "Decoded from a budget of KV, against the same arm from all KV, over the prompts longer than the budget"
    " and from the second token on, as the first is computed over all: NLL lost of the right answer; KL over"
    " 31 tokens of the unevicted answer, and how much more that is than uniform's.\n"
)


def shown(interval: Interval | None, form: str) -> tuple[str, str]:
    """Return two cells: the number, and where it lies; a dash where there is none."""
    return "-" if interval is None else format(interval.mean, form), shown_range(interval, form)


def shown_range(interval: Interval | None, form: str) -> str:
    if interval is None or interval.low == interval.high:
        return ""
    return f"{format(interval.low, form)} to {format(interval.high, form)}"
