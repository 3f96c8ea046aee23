"""Which of a prompt's KV an answer is decoded from (Ada-KV): scorers and allocators, one interface and
one registry each. Plain torch, no engine."""

from blendrag.compress.allocator import ALLOCATORS, Allocator, register_allocator
from blendrag.compress.pages import kept_tokens, page_gains
from blendrag.compress.registry import check_budget, least_budget, make_allocator, make_scorer
from blendrag.compress.scorer import SCORERS, Observed, Scorer, register_scorer

__all__ = [
    "ALLOCATORS",
    "SCORERS",
    "Allocator",
    "Observed",
    "Scorer",
    "check_budget",
    "kept_tokens",
    "least_budget",
    "make_allocator",
    "make_scorer",
    "page_gains",
    "register_allocator",
    "register_scorer",
]
