"""Fit the predictor of ``lpc`` to conversations whose outcome is known (LPC, section 3.3)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import nn

from blendrag.errors import PredictorError
from blendrag.eviction.classifier import Classifier
from blendrag.eviction.hazard import Floats
from blendrag.forecast.conversation import Window
from blendrag.forecast.features import Features
from blendrag.forecast.log import Outcomes, PromptLog
from blendrag.lab.eviction.fit_hazard import LATEST_SHARE
from blendrag.lab.eviction.trace import Dialog, read_dialogs
from blendrag.progress import SILENT, Progress

Labels = npt.NDArray[np.bool_]

UNITS = 128  # of a layer, of which there are three (LPC section 3.2)
LEARNING_RATE = 5e-4
EPOCHS = 20
HELD_OUT = 0.2
VALIDATION_SHARE = 0.2  # share of what is fitted to that chooses the epoch
_BATCH = 64  # the paper does not say
_LEAST = 1e-3  # a count that is always the same is not blown up


@dataclass(frozen=True, slots=True)
class Quality:
    """The quality of a predictor on conversations that it was not fitted to.

    examples: their prompts. goes_on: share of these after which there was another. log_loss: mean surprise,
    in nats; base: that of always saying ``goes_on``.
    """

    conversations: int
    examples: int
    goes_on: float
    log_loss: float
    base: float

    @classmethod
    def of(cls, test: Outcomes, probability: Floats) -> Quality:
        truth = test.continues
        goes_on = float(truth.mean())
        base = log_loss(truth, np.full(len(truth), goes_on))
        return cls(len(set(test.conversations)), len(truth), goes_on, log_loss(truth, probability), base)


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A trained predictor. facts: what it was fitted to. quality: None if nothing was held out."""

    classifier: Classifier
    embedder: str
    facts: Mapping[str, Any]
    quality: Quality | None

    @property
    def helps(self) -> bool:
        """Return whether it says more of what it was measured on than the share of those that go on."""
        return self.quality is not None and self.quality.log_loss < self.quality.base

    def to_dict(self) -> dict[str, Any]:
        return {"embedder": self.embedder, **self.facts} | {"quality": self.quality and asdict(self.quality)}


def train_on_file(
    path: Path, features: Features, *, held_out: float = HELD_OUT, progress: Progress = SILENT
) -> Trained:
    """Fit a predictor to all conversations of a file but the share ``held_out``, which is measured on.

    Raises SourceError; PredictorError where there is nothing to learn.
    """
    dialogs = read_dialogs(path)
    windows, continues, names = zip(*examples(dialogs), strict=True)
    found = Outcomes(features.rows(windows, progress), np.array(continues, dtype=bool), list(names))
    facts = {"source": str(path), "digest": _digest(dialogs), "held_out": held_out}
    return _train(*split(found, held_out, "held out"), features.embedder.name, facts)


def train_on_log(log: PromptLog, embedder: str) -> Trained:
    """Fit a predictor to the older part of the log, and measure on the latest, whose conversations are wholly
    there. Raises PredictorError where the log teaches nothing yet."""
    found = log.outcomes(embedder)
    last = {dialog: number for number, dialog in enumerate(found.conversations)}
    ends = np.array([last[dialog] for dialog in found.conversations])
    border = np.quantile(ends, 1 - LATEST_SHARE)
    return _train(_where(found, ends < border), _where(found, ends >= border), embedder, {"source": "log"})


def split(known: Outcomes, share: float, salt: str) -> tuple[Outcomes, Outcomes]:
    """Return (the others, about ``share`` of the conversations). A conversation is wholly in one of them."""
    taken = np.array([_belongs(dialog, share, salt) for dialog in known.conversations], dtype=bool)
    return _where(known, ~taken), _where(known, taken)


def _where(known: Outcomes, chosen: Labels) -> Outcomes:
    names = [dialog for dialog, wanted in zip(known.conversations, chosen, strict=True) if wanted]
    return Outcomes(known.rows[chosen], known.continues[chosen], names)


def unseen(dialogs: Sequence[Dialog], facts: Mapping[str, Any]) -> list[Dialog]:
    """Return the conversations that a predictor was not fitted to: of its own file the held-out."""
    if _digest(dialogs) != facts.get("digest"):
        return list(dialogs)
    return [dialog for dialog in dialogs if _belongs(dialog.id, facts["held_out"], "held out")]


def examples(dialogs: Iterable[Dialog]) -> Iterator[tuple[Window, bool, str]]:
    """Yield an example per prompt: the prompts so far, and whether the user says anything after it (LPC
    section 3.2).

    Answers are left out, as are all facts that are only known when the conversation is over.
    """
    for dialog in dialogs:
        prompts = dialog.prompts
        for turns in range(1, len(prompts) + 1):
            yield Window.of(prompts[:turns]), turns < len(prompts), dialog.id


def _train(known: Outcomes, test: Outcomes, embedder: str, facts: Mapping[str, Any]) -> Trained:
    part, valid = split(known, VALIDATION_SHARE, "validation")
    for some, what in ((part, "learn from"), (valid, "choose by")):
        if not some.continues.any() or some.continues.all():
            raise PredictorError(
                f"{facts['source']} is too little to {what}: {len(set(some.conversations)):,} conversations,"
                " and both outcomes have to occur"
            )
    classifier, _ = fit(part, valid)
    quality = Quality.of(test, classifier.probability(test.rows)) if len(test.continues) else None
    counts = {"conversations": len(set(known.conversations)), "prompts": len(known.continues)}
    return Trained(classifier, embedder, {**facts, **counts}, quality)


def fit(train: Outcomes, valid: Outcomes, seed: int = 0) -> tuple[Classifier, list[float]]:
    """Fit by Adam on the weighted loss. Returns the classifier of the epoch that is best on ``valid``, and
    every epoch's loss there, in nats. Both parts have both outcomes.

    The rarer outcome counts as much as the other in the loss, which shifts the odds that are learned by the
    ratio of the weights. Eviction compares log odds across conversations and with time, so they have to be
    right: the logarithm of that ratio is taken off again, and epochs are compared by the plain loss.
    """
    rows = train.rows
    # Vectors have length 1 and keep it: with all their numbers scaled up to 1, an epoch already overfits.
    mean, scale = rows.mean(axis=0), np.ones(rows.shape[1], np.float32)
    scale[-1] = rows[:, -1].std() + _LEAST
    inputs = torch.from_numpy((rows - mean) / scale)
    targets = torch.from_numpy(train.continues.astype(np.float32))
    went_on = float(train.continues.mean())
    weight_on, weight_off = max(1.0, (1 - went_on) / went_on), max(1.0, went_on / (1 - went_on))
    weights = torch.where(targets > 0.5, weight_on, weight_off)
    shift = float(np.log(weight_on / weight_off))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(rows.shape[1], UNITS),
            nn.ReLU(),
            nn.Linear(UNITS, UNITS),
            nn.ReLU(),
            nn.Linear(UNITS, 1),
        )
        adam = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
        best: Classifier | None = None
        losses: list[float] = []
        for _ in range(EPOCHS):
            for batch in torch.randperm(len(inputs)).split(_BATCH):
                adam.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(
                    model(inputs[batch])[:, 0], targets[batch], weights[batch]
                )
                loss.backward()
                adam.step()
            weights_and_biases = [each.detach().numpy().copy() for each in model.parameters()]
            weights_and_biases[-1] -= np.float32(shift)
            layers = tuple(zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True))
            classifier = Classifier(mean, scale, layers)
            losses.append(log_loss(valid.continues, classifier.probability(valid.rows)))
            if best is None or losses[-1] == min(losses):
                best = classifier
    assert best is not None
    return best, losses


def log_loss(truth: Labels, probability: Floats) -> float:
    """Return the mean surprise, in nats."""
    with np.errstate(divide="ignore"):
        return float(-np.mean(np.log(np.where(truth, probability, 1.0 - probability))))


def _belongs(dialog: str, share: float, salt: str) -> bool:
    """Return whether a conversation is in the part that ``salt`` names, whatever the file's order."""
    return xxhash.xxh3_64_intdigest(f"{salt}\0{dialog}".encode()) < share * 2**64


def _digest(dialogs: Sequence[Dialog]) -> str:
    """Return a digest of the conversations as they are, however the file is packed."""
    digest = xxhash.xxh3_128()
    for dialog in dialogs:
        digest.update(dialog.model_dump_json().encode())
    return digest.hexdigest()
