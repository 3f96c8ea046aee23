"""What a grammar holds, by the library that vLLM's engine asks."""

from __future__ import annotations

import llguidance

from blendrag.engine.client.generation import Grammar

BYTES = llguidance.LLTokenizer("byte")


def matcher_of(grammar: Grammar) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(BYTES, llguidance.LLMatcher.grammar_from_json_schema(grammar.value))


def held(grammar: Grammar, text: str) -> bool:
    """Whether the grammar has this text."""
    matcher = matcher_of(grammar)
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()
