"""A reader that tells a model's thinking from its answer, by vLLM's reasoning parsers."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blendrag.engine.client.generation import Delta
from blendrag.errors import ConfigError
from blendrag.models import load_tokenizer
from blendrag.names import closest
from blendrag.settings import AUTO_PARSER, NO_PARSER

HARMONY = ("<|start|>assistant", "<|channel|>")
"""Texts that are all in the chat templates of gpt-oss."""

HARMONY_PARSER = "openai_gptoss"
"""vLLM's name of its parser of all that gpt-oss says."""

# The tokens between which models think, and one more that the parser needs, by vLLM's names of the parsers.
_TAGS: dict[str, tuple[str, ...]] = {
    "deepseek_r1": ("<think>", "</think>"),
    "gemma4": ("<|channel>", "<channel|>"),
    "mistral": ("[THINK]", "[/THINK]", "[TOOL_CALLS]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
_THINKS = {"enable_thinking": True}  # which a parser is told that is asked only where tags are


def engine_parser(wanted: str, model: Path) -> str:
    """Return vLLM's name of the parser that an engine of the model in this folder is started with, or "" for
    none.

    Raises ConfigError for a name that vLLM does not know, and for a parser that needs tokens, or a fast
    tokenizer, which the model lacks.
    """
    if wanted == NO_PARSER:
        return ""
    from blendrag.engine.compat.requests import reasoning_parser, reasoning_parsers

    known = [AUTO_PARSER, NO_PARSER, *reasoning_parsers()]
    if wanted not in known:
        raise ConfigError(
            f"no reasoning_parser {wanted!r}; there are {', '.join(known)}{closest(wanted, known)}"
        )
    tokenizer = load_tokenizer(model)
    if not (name := thinking_parser(wanted, tokenizer)):
        return ""
    if not _is_fast(tokenizer):
        raise ConfigError(
            f"reasoning_parser {name!r} needs a fast tokenizer, which this model lacks: set {NO_PARSER}"
        )
    try:
        reasoning_parser(name, tokenizer, {})
    except Exception as error:  # each parser has its own ways to refuse a model
        raise ConfigError(f"reasoning_parser {name!r} cannot read this model: {error}") from error
    return name


def thinking_parser(wanted: str, tokenizer: Any) -> str:
    """Return vLLM's name of the parser that reads a model's thinking, or "" if its answers have none, or the
    setting says not to read it."""
    if wanted != AUTO_PARSER:
        return "" if wanted == NO_PARSER else wanted
    if not _is_fast(tokenizer):
        return ""
    if all(sign in str(getattr(tokenizer, "chat_template", None)) for sign in HARMONY):
        return HARMONY_PARSER
    known = tokenizer.added_tokens_encoder.keys()  # is made anew each time
    return next((name for name, tags in _TAGS.items() if {*tags} <= known), "")


def _is_fast(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "is_fast", False))


class Reasoning:
    """A reader of one answer, piece by piece.

    The parsers are made for one token at a time with the text of its own. An engine's pieces are not always
    like that: a busy engine gives several tokens at once, and text that may yet become a stop comes late. So
    tokens wait here for their text.

    A parser that is set by name decides as in vLLM's server, where most take all text for thinking until
    thinking ends. The automatic one waits for a tag that the prompt leaves open, or that the answer begins
    with: models that never think have the same tokens. All that gpt-oss says is between tags.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Any,
        prompt: Sequence[int],
        chat_template_kwargs: Mapping[str, Any],
        *,
        automatic: bool,
        skip_special_tokens: bool = True,
    ) -> None:
        """Make vLLM's parser of this name. automatic: whether nobody has set it. skip_special_tokens: what
        the request wants."""
        from blendrag.engine.compat.requests import detokenizer, reasoning_parser

        self._prompt: list[int] | None = list(prompt)
        self._opens: int | None = None  # the token with which thinking may begin
        tags = _TAGS.get(name) if automatic else None
        told = {**chat_template_kwargs, **_THINKS} if tags else chat_template_kwargs
        self._parser, self._request = reasoning_parser(name, tokenizer, told)
        self.skip_special_tokens: bool = bool(skip_special_tokens and self._request.skip_special_tokens)
        """True if the engine leaves special tokens out of the text. Some parsers need them."""
        self._decode = detokenizer(tokenizer, self._prompt, self.skip_special_tokens)
        self.comes_first: bool = not self._parser.is_reasoning_end(self._prompt)
        """True if the answer is known to begin with thinking."""
        if tags:
            ends = tokenizer.convert_tokens_to_ids([*tags[:2]])
            self.comes_first = next((one for one in reversed(prompt) if one in ends), None) == ends[0]
            if not self.comes_first:
                self._opens, self._prompt = ends[0], None
        self._waiting: deque[tuple[int, int]] = deque()  # tokens, and the lengths of their texts
        self._text = ""
        self._blanks = ""  # blanks that belong to the answer, unless a tag follows
        self._has_thought = self._answered = False

    def feed(self, delta: Delta) -> tuple[str, str]:
        """Return what is certain by now of the thinking, and of the answer."""
        self._text += delta.text
        self._waiting += [(token, len(self._decode(token))) for token in delta.token_ids]
        ended = delta.finish_reason is not None
        read: list[tuple[str, str]] = []
        while self._waiting and (ended or len(self._text) >= self._waiting[0][1]):
            token, length = self._waiting.popleft()
            text, self._text = self._text[:length], self._text[length:]
            read.append(self._read(text, [token]))
        if ended:
            read.append(self._read(self._text, [], finished=True))
        thoughts, contents = zip(*read, strict=True) if read else ((), ())
        return "".join(thoughts), "".join(contents)

    def _read(self, text: str, tokens: list[int], *, finished: bool = False) -> tuple[str, str]:
        if self._opens is not None:
            if tokens != [self._opens] or self._answered:
                self._blanks += text
                self._answered = self._answered or bool(text.strip())
                if not (self._answered or finished):
                    return "", ""
                content, self._blanks = self._blanks, ""
                return "", content
            self._opens = None
        message = self._parser.parse_delta(text, tokens, self._request, self._prompt, finished=finished)
        thought, content = (message.reasoning or "", message.content or "") if message else ("", "")
        # Blanks next to the tags are the template's.
        thought = thought if self._has_thought else thought.lstrip()
        content = content if self._answered else content.lstrip()
        self._has_thought |= bool(thought)
        self._answered |= bool(content)
        return thought, content
