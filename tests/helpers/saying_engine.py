"""Engines without a model: they say what they are told to."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from blendrag.engine.client.generation import Delta, Sampling
from blendrag.errors import EngineError
from blendrag.prompt import decode
from engine_facts import FACTS


class StandIn:
    """What every engine has that blends, and whose ``stream`` is another's."""

    blends, max_model_len, facts = True, 8192, FACTS

    def stream(self, *request: Any) -> Generator[Delta]:
        raise NotImplementedError

    async def astream(self, *request: Any) -> AsyncGenerator[Delta]:
        for delta in self.stream(*request):
            yield delta


@dataclass
class Saying(StandIn):
    """Says ``says``, a token at a time, in as many tokens as it is asked for, and dies so many times, behind
    three tokens each."""

    tokenizer: Any
    says: str = "Good day."
    deaths: int = 0
    prompts: list[str] = field(default_factory=list)
    asked: list[Sampling] = field(default_factory=list)

    def stream(self, token_ids: Sequence[int], sampling: Sampling, *_: Any) -> Generator[Delta]:
        self.prompts.append(decode(self.tokenizer, token_ids))
        self.asked.append(sampling)
        whole = self.tokenizer.encode(self.says, add_special_tokens=False)
        said = whole[: sampling.max_tokens]
        first = len(sampling.given)
        for at, token in enumerate(said[first:], first + 1):
            if at == first + 4 and self.deaths:
                self.deaths -= 1
                raise EngineError("it died")
            ended = ("stop" if said == whole else "length") if at == len(said) else None
            likely = [{token: -0.5}] if sampling.logprobs else []
            yield Delta(self.tokenizer.decode([token]), [token], 0.1, ended, logprobs=likely)
