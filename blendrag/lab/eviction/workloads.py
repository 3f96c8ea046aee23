"""Traces made of files without times or blocks: of dialogues by LPC's workload generator (section 4.1), of
question sets by popularity (:mod:`blendrag.lab.questions`)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from blendrag.lab.eviction.readers import Dialog
from blendrag.lab.eviction.trace import Request, RequestTrace
from blendrag.lab.questions import Embedded, Popularity, four_characters, retrieved

BLOCK = 16  # tokens, as in vLLM


@dataclass(frozen=True, slots=True)
class DialogLoad:
    """The load of dialogues: how they are spread over time.

    gap_s: mean of the exponential pause between an answer and the user's next prompt (lambda_chat).
    active: conversations at a time, at most (N_conv). seconds: length of the trace.
    system_tokens: of the prompt that all conversations begin with.
    prefill_s, decode_s: a request takes prefill_s and decode_s for each token of its answer. Fixed, so that
        every policy is asked for the same at the same time.
    """

    gap_s: float = 100.0
    active: int = 200
    seconds: float = 1200.0
    system_tokens: int = 64
    prefill_s: float = 0.2
    decode_s: float = 0.02


def dialog_trace(
    dialogs: Sequence[Dialog],
    load: DialogLoad | None = None,
    *,
    seed: int = 0,
    tokens: Callable[[str], int] = four_characters,
    name: str = "dialogs",
) -> RequestTrace:
    """Return requests of conversations that come and go.

    Each of ``load.active`` seats takes the next dialogue in an order drawn by ``seed``; the first ones begin
    spread over one mean gap, and a seat that becomes free is taken again after one more gap. No dialogue
    comes twice: when all are used up, the trace ends early. Those without a user are left out.
    Blocks are of 16 tokens of the system prompt and the growing history; blocks that are not yet full are not
    cached. Apart from the system prompt, no two conversations share any.
    """
    load = load or DialogLoad()
    dialogs = [dialog for dialog in dialogs if dialog.prompts]
    rng = np.random.default_rng(seed)
    order = iter(rng.permutation(len(dialogs)))
    waiting: list[tuple[float, int, _Conversation]] = []
    numbers = itertools.count()

    def seat(at: float) -> None:
        place = next(order, None)
        if place is not None:
            heapq.heappush(waiting, (at, next(numbers), _Conversation(dialogs[place], load, tokens)))

    for start in np.sort(rng.uniform(0.0, load.gap_s, min(load.active, len(dialogs)))):
        seat(float(start))
    requests: list[Request] = []
    while waiting and waiting[0][0] < load.seconds:
        at, number, conversation = heapq.heappop(waiting)
        request = conversation.ask(at)
        requests.append(request)
        after = conversation.finished + float(rng.exponential(load.gap_s))
        if request.continues:
            heapq.heappush(waiting, (after, number, conversation))
        else:
            seat(after)
    return RequestTrace(name, requests, prefix=True, unit="tokens")


class _Conversation:
    """One dialogue under way: how much was said, and what comes next."""

    def __init__(self, dialog: Dialog, load: DialogLoad, tokens: Callable[[str], int]) -> None:
        self._dialog, self._load, self._tokens = dialog, load, tokens
        self._asked = [place for place, turn in enumerate(dialog.turns) if turn.role == "user"]
        self._turn = 0
        self._said = load.system_tokens
        self._upto = 0  # turns of the dialogue that are counted in _said
        self.finished = 0.0

    def ask(self, at: float) -> Request:
        turns, place = self._dialog.turns, self._asked[self._turn]
        self._turn += 1
        following = self._asked[self._turn] if self._turn < len(self._asked) else len(turns)
        self._said += sum(self._tokens(turn.text) for turn in turns[self._upto : place + 1])
        answered = sum(self._tokens(turn.text) for turn in turns[place + 1 : following])
        prompt = self._said // BLOCK
        self._said += answered
        self._upto = following
        self.finished = at + self._load.prefill_s + self._load.decode_s * answered
        shared, count = self._load.system_tokens // BLOCK, self._said // BLOCK
        keys = tuple(f"system:{i}" if i < shared else f"{self._dialog.id}:{i}" for i in range(count))
        return Request(
            at,
            keys,
            (BLOCK,) * count,
            answer=count - prompt,
            finished=self.finished,
            conversation=self._dialog.id,
            prompts=self._dialog.prompts[: self._turn],
            continues=self._turn < len(self._asked),
        )


@dataclass(frozen=True, slots=True)
class RetrievalLoad:
    """The load of questions: who asks what, when.

    rate: questions a second, Poisson, unless arrivals are given. seconds: length of the trace.
    top_k: chunks of a prompt, closest first. zipf: the exponent s of the popularity rank**-s of articles, and
        of questions within each.
    paths: whether chunks are looked for behind the same ones only, as nodes of a tree of exact prefixes.
    turnovers: how often, at equal times, other questions become the popular ones.
    """

    rate: float = 2.0
    seconds: float = 1200.0
    top_k: int = 5
    zipf: float = 1.0
    paths: bool = False
    turnovers: int = 0


def retrieval_trace(
    corpus: Embedded,
    load: RetrievalLoad | None = None,
    *,
    seed: int = 0,
    arrivals: Sequence[float] | None = None,
    name: str = "retrieval",
) -> RequestTrace:
    """Return requests for the ``top_k`` chunks closest (cosine) to questions drawn by popularity.

    ``arrivals``: seconds, ascending; instead of Poisson ones. Which articles and questions are the popular
    ones is drawn by ``seed``.
    """
    load = load or RetrievalLoad()
    rng = np.random.default_rng(seed)
    if arrivals is None:
        gaps = rng.exponential(1.0 / load.rate, int(load.rate * load.seconds * 1.5) + 100)
        arrivals = np.cumsum(gaps).tolist()
    times = [at for at in arrivals if at < load.seconds]
    popularity = [Popularity(corpus.article, load.zipf, rng) for _ in range(load.turnovers + 1)]
    found = retrieved(corpus, load.top_k)
    requests = []
    for at in times:
        chunks = found[popularity[int(at / load.seconds * len(popularity))].draw()]
        keys = tuple(f"chunk:{chunk}" for chunk in chunks)
        if load.paths:
            keys = tuple(accumulate(keys, "{} {}".format))
        requests.append(Request(at, keys, tuple(corpus.sizes[chunk] for chunk in chunks)))
    return RequestTrace(name, requests, prefix=load.paths, unit="tokens", tree=load.paths)
