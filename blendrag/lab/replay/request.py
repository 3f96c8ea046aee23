"""What every trace and every generated workload is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt, as the cache sees it.

    at: seconds since the trace began. keys: of its blocks or chunks, in the prompt's order. sizes: in
        tokens.
    answer: so many of the last keys are not looked up: they are the answer's, kept when it is finished.
    answered: tokens of the answer, with or without blocks; 0 where it is unknown.
    finished: seconds, when that is; ``at`` where it is unknown.
    similarities: of each chunk to the questions asked before this one; empty where there is no text.
    conversation, prompts, continues: whose turn this is, the user's prompts so far with this one last, and
        whether another turn follows. The last is for the oracle alone.
    """

    at: float
    keys: tuple[str, ...]
    sizes: tuple[int, ...]
    answer: int = 0
    answered: int = 0
    finished: float | None = None
    similarities: tuple[float, ...] = ()
    conversation: str | None = None
    prompts: tuple[str, ...] = ()
    continues: bool | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    prefix: whether a key is of use only if all keys before it in the prompt are found too (a prefix cache),
        or by itself (retrieved chunks, whose KV is blended).
    unit: what capacities are counted in: "blocks" or "tokens".
    starts: numbers of the requests with which other workloads begin, the first one included.
    popularity: of each chunk, the chance that a request asks for it, and its size; only of requests that are
        drawn independently of each other, and from the same popularity all the time.
    """

    name: str
    requests: Sequence[Request]
    prefix: bool
    unit: str
    starts: tuple[int, ...] = (0,)
    popularity: Mapping[str, tuple[float, int]] = field(default_factory=dict)
