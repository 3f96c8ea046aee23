"""The self-check of one model on one machine (design decision D12): can its blended answers be trusted?"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from blendrag.engine.client.engine import Engine
from blendrag.engine.client.generation import Delta, Sampling
from blendrag.engine.client.tool_parser import tool_parser_name
from blendrag.lab.arms import recipe_of, reset
from blendrag.lab.prompts import Prompt
from blendrag.lab.running import lab_engine
from blendrag.lab.scratch import ScratchStore, scratch_store, scratch_tree
from blendrag.lab.statistics import next_token_kl
from blendrag.lab.worker.operations import ModelCheck
from blendrag.models import load_tokenizer
from blendrag.serving.identity import prefix_ids
from blendrag.settings import Settings

# The standard library's own help: real text that is on every machine.
_PROMPTS = (
    (("exceptions", "customization", "calls"), "\n\nIn one word, the text above is about the language"),
    (("comparisons", "assignment", "execmodel", "class"), "\n\nAn assignment statement is used to"),
)
_OPENING = "Some pages from a manual.\n\n"
_CHUNK_TOKENS = 160
_QUESTION = 20  # tokens behind a block
_TRIES = 3  # a machine that has stalled for a moment may have blended in one slice
_ONE = Sampling(max_tokens=1, temperature=0.0, logprobs=20)

_COPY = "uv pip install --link-mode copy --reinstall-package llama-index-core llama-index-core"

REUSE = "ratio 0 against full prefill, KL (what blending repairs)"
"""The row of a :class:`DoctorReport` that says what the other ones can tell apart."""

# What two orders of the same bfloat16 sums may differ by; a wrong position or mask is off by far more.
_MAX_KL = 0.02
_MAX_GAP = 0.1
_MAX_MASK_ERROR = 0.01


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what was measured, what it has to be, and whether it is."""

    check: str
    value: str
    limit: str
    ok: bool


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The doctor's report. unsupported: why the model cannot be blended at all; it is then served without.
    exact: of a model that is not blended, whether its exact prefixes are kept, with states behind them.
    layers, attention, scattered: as :class:`ModelCheck` has them. notes: what is amiss on this machine,
    whatever the model. tool_parser: vLLM's name of the one that reads calls; empty if blendrag does. stored:
    how and where KV of a new index is kept."""

    model: str
    architecture: str
    rows: tuple[Check, ...]
    unsupported: str | None = None
    exact: bool = False
    layers: str = ""
    attention: tuple[str, ...] = ()
    scattered: str = ""
    notes: tuple[str, ...] = ()
    tool_parser: str = ""
    stored: str = ""

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self) | {"passed": self.passed}


def run_doctor(settings: Settings, note: Callable[[str], None] | None = None) -> DoctorReport:
    """Check blending with ``settings.model``: starts its engine, takes seconds after that.

    Raises ModelNotFoundError or EngineError if there is nothing to check.
    """
    tell, notes = note or (lambda _: None), tuple(filter(None, [linked_data()]))
    engine = lab_engine(settings, tell)
    try:
        facts = engine.facts
        parser = tool_parser_name(settings.tool_parser, load_tokenizer(engine.model_path))
        report = DoctorReport(
            settings.model,
            facts.architecture,
            (),
            facts.reason or None,
            notes=notes,
            tool_parser=parser,
            stored=stored_as(settings),
        )
        if facts.reason:
            row = Check("the model can be blended", facts.reason, "supported", False)
            states = _states(engine, settings) if facts.states else []
            return replace(report, rows=(row, *states), exact=facts.states)
        tell("checking")
        rows, found = _Check(engine, settings).run()
        report = replace(report, layers=found.layers, attention=tuple(found.attention))
        return replace(report, rows=tuple(rows), scattered=found.scattered)
    finally:
        engine.release()


def stored_as(settings: Settings) -> str:
    """Return how and where KV of a new index is kept."""
    tiers = (
        spec.label + ("" if spec.bytes is None else f" of {spec.bytes / 2**30:,.1f} GiB")
        for spec in settings.stack
    )
    return f"{settings.new_codec}, in {', '.join(tiers)}"


def linked_data() -> str | None:
    """Return what to do if LlamaIndex's splitter, where it is installed, would refuse its own data: they are
    hard links, as uv installs files by default. None: nothing."""
    if find_spec("llama_index") is None or (core := find_spec("llama_index.core")) is None:
        return None
    own = Path(core.origin or "").parent / "_static" / "nltk_cache"
    folder = Path(os.environ.get("NLTK_DATA") or own)
    linked = any(file.is_file() and file.stat().st_nlink > 1 for file in folder.rglob("*"))
    if not linked or find_spec("nltk.pathsec") is None:  # that of a version which looks
        return None
    return f"LlamaIndex's splitter will refuse {folder}, since its files are hard links: run `{_COPY}`"


def _states(engine: Engine, settings: Settings) -> list[Check]:
    """Check a state of a hybrid model: put back at the end of a block, it has to say to the last digit what
    vLLM's own prefix cache does there, which has states at no other places."""
    block, tokenizer = engine.facts.block_size, load_tokenizer(engine.model_path)
    ids = tuple(tokenizer("\n\n".join(topics[name] for name in _PROMPTS[1][0])).input_ids)
    if not engine.facts.prefix_caching or min(len(ids), engine.max_model_len - 1) < block + _QUESTION:
        return []
    prompt = Prompt(ids[: block + _QUESTION], (("", 0, block),))
    reset(engine)
    engine.generate(prompt.token_ids, _ONE)
    own = engine.generate(prompt.token_ids, _ONE)
    restored, exact, _ = _put_back(engine, settings, prompt)
    row = _at_most(
        "exact prefix with its state, stored and put back", _largest_change([own], [restored]), 0.0
    )
    return [_if(own.prefix_tokens == exact == block, row)]


def _put_back(engine: Engine, settings: Settings, prompt: Prompt) -> tuple[Delta, int, int]:
    """Restore a prompt from a tree of its own, into which it was stored before: return the answer, how many
    tokens came from there, and how many should."""
    with scratch_tree(engine, settings, disk=True) as scratch:
        scratch.hold(prompt)
        path = scratch.path(prompt)
        reset(engine)
        restored = engine.generate(prompt.token_ids, replace(_ONE, path=path))
    return restored, restored.report.exact if restored.report else 0, path.held_end


class _Check:
    store: ScratchStore  # open while ``run`` runs

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine, self.settings = engine, settings
        self.tokenizer: Any = load_tokenizer(engine.model_path)
        self.prefix = prefix_ids(settings, engine.model_path)

    def run(self) -> tuple[list[Check], ModelCheck]:
        texts = [[self._encode(topics[name])[:_CHUNK_TOKENS] for name in names] for names, _ in _PROMPTS]
        questions = [question for _, question in _PROMPTS]
        with scratch_store(self.engine, self.settings, chain(*texts)) as self.store:
            prompts = list(map(self._prompt, texts, questions))
            full, repaired, reused = (
                [self._first_token(prompt, ratio) for prompt in prompts] for ratio in (None, 1.0, 0.0)
            )
            self.store.make_cold()
            reread = [self._first_token(prompt, 0.0) for prompt in prompts]
            first = self._prompt(texts[0][:1], questions[0])
            alone = self._first_token(first), self._first_token(first, 0.0)
            special: list[Check] = []
            if self.engine.facts.blocks:
                special.append(self._restored(prompts[0], full[0]))
            if self.settings.prefix_caching and self.engine.facts.prefix_caching:
                special.append(self._behind_a_hit(prompts[0], texts[1][:2]))
            if self.settings.blend_share < 1.0:  # else a blend is one slice
                special.append(self._in_slices(prompts[0], full[0]))
        # two chunks' worth: the second stands alone once, and once behind the first
        text = list(prompts[0].token_ids)
        found = ModelCheck(**self.engine.call("selfcheck", text, len(text) // 2))
        in_a_block = self.engine.facts.block_size - 1  # of the one where documents end
        recomputed = sum(answer.report.recomputed for answer in reused if answer.report)
        gap = max(
            _gap(one.logprobs[0], other.token_ids[0]) for one, other in zip(full, repaired, strict=True)
        )
        rows = [
            _blended(repaired + reused + reread),
            _at_most("ratio 1: first token, log probability lost", gap, _MAX_GAP),
            _at_most("ratio 1 against full prefill, KL", _largest_kl(full, repaired), _MAX_KL),
            *special,
            _at_most("ratio 0: stored tokens recomputed", recomputed, len(reused) * in_a_block),
            _above_zero(REUSE, _largest_kl(full, reused)),
            _at_most("scattered rows against dense float32 attention", found.mask_error, _MAX_MASK_ERROR),
            _at_most("stored KV read back from disk", _largest_change(reused, reread), 0.0),
            _at_most("layer 0: a chunk alone against behind others", found.layer0_deviation, 0.0),
            _above_zero("last layer: the same", found.deeper_deviation),
        ]
        if self.prefix and self.settings.new_codec == "raw":  # right behind it, nothing has to be repaired
            kl = _largest_kl(alone[:1], alone[1:])
            rows.append(_at_most("chunk behind its shared prefix, reused whole, KL", kl, _MAX_KL))
        return rows, found

    def _behind_a_hit(self, prompt: Prompt, more: Sequence[tuple[int, ...]]) -> Check:
        """Check the next turn of a chat, with more chunks, behind a prefix hit. Of models with windows, the
        engine computes it alone where blending would compute as much."""
        turn = self._prompt(more, _PROMPTS[1][1], prompt)
        full = self._first_token(turn)
        self._first_token(prompt, 1.0)
        hit = self._ask(turn, 1.0)
        row = _at_most("the same behind a prefix hit, KL", _largest_kl([full], [hit]), _MAX_KL)
        return _if((hit.report.prefix if hit.report else hit.prefix_tokens) > 0, row)

    def _restored(self, prompt: Prompt, full: Delta) -> Check:
        restored, exact, wanted = _put_back(self.engine, self.settings, prompt)
        row = _at_most("exact prefix, stored and put back, KL", _largest_kl([full], [restored]), _MAX_KL)
        return _if(exact == wanted, row)

    def _in_slices(self, prompt: Prompt, full: Delta) -> Check:
        """Check a prompt that is blended in slices, while another answer is being generated."""
        opening = self._encode(_OPENING)
        until_closed = Sampling(self.engine.max_model_len - len(opening), 0.0, other={"ignore_eos": True})
        for _ in range(_TRIES):
            reset(self.engine)
            other = self.engine.stream(opening, until_closed)
            next(other)
            sliced = self._ask(prompt, 1.0)
            other.close()
            if sliced.report is not None and sliced.report.slices > 1:
                break
        row = _at_most("the same in slices, KL", _largest_kl([full], [sliced]), _MAX_KL)
        return _if(sliced.report is not None and sliced.report.slices > 1, row)

    def _prompt(
        self, chunks: Sequence[tuple[int, ...]], question: str, before: Prompt | None = None
    ) -> Prompt:
        """Make a prompt of the chunks with blank lines between them, behind another prompt, or what they were
        prefilled behind."""
        before = before or Prompt(self.prefix or tuple(self.tokenizer(_OPENING).input_ids), ())
        ids, spans = before.token_ids, before.spans
        keys = {chunk.token_ids: chunk.key for chunk in self.store.chunks}
        for chunk in chunks:
            spans = (*spans, (keys[chunk], len(ids), len(chunk)))
            ids = (*ids, *chunk, *self._encode("\n\n"))
        return Prompt((*ids, *self._encode(question)), spans)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _first_token(self, prompt: Prompt, ratio: float | None = None) -> Delta:
        reset(self.engine)
        return self._ask(prompt, ratio)

    def _ask(self, prompt: Prompt, ratio: float | None = None) -> Delta:
        """Generate a token, blended at this ratio; without one, after full prefill."""
        recipe = None
        if ratio is not None:
            recipe = replace(recipe_of(self.settings, self.store.id, ratio), spans=prompt.spans)
        return self.engine.generate(prompt.token_ids, _ONE, recipe)


def _blended(answers: Sequence[Delta]) -> Check:
    """Check that all prompts were blended: everything below means nothing if the engine quietly prefilled
    plainly, or missed chunks."""
    good = sum(answer.report is not None and not answer.report.problem for answer in answers)
    return Check(
        "prompts blended, no chunk missing", f"{good} of {len(answers)}", "all", good == len(answers)
    )


def _largest_kl(full: Sequence[Delta], others: Sequence[Delta]) -> float:
    pairs = zip(full, others, strict=True)
    return max(next_token_kl(one.logprobs[0], other.logprobs[0]) for one, other in pairs)


def _gap(logprobs: dict[int, float], token: int) -> float:
    """Return how much less likely ``token`` is than the likeliest. 0: the same token; tiny: a tie."""
    return max(logprobs.values()) - logprobs.get(token, min(logprobs.values()))


def _largest_change(before: Sequence[Delta], after: Sequence[Delta]) -> float:
    """Return the largest difference in log probability between two runs that should be the same."""
    changes = [
        abs(logp - other.logprobs[0].get(token, float("-inf")))
        for one, other in zip(before, after, strict=True)
        for token, logp in one.logprobs[0].items()
    ]
    return max(changes)


def _at_most(check: str, value: float, limit: float) -> Check:
    return Check(check, f"{value:.2g}", f"<= {limit:g}" if limit else "0", value <= limit)


def _if(happened: bool, row: Check) -> Check:
    """Return a check that fails unless its case has happened."""
    return row if happened else replace(row, value="did not happen", ok=False)


def _above_zero(check: str, value: float) -> Check:
    return Check(check, f"{value:.2g}", "> 0", value > 0)
