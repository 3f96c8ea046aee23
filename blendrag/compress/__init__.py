"""The choice of the KV that an answer is decoded from (Ada-KV): scorers and allocators, one interface and one
registry each. Plain torch, no engine."""

from blendrag.compress.allocator import ALLOCATORS
from blendrag.compress.budget import Budget, check_budget, make_budget
from blendrag.compress.pages import kept_tokens, page_gains
from blendrag.compress.scorer import SCORERS, Observed, Scorer

__all__ = [
    "ALLOCATORS",
    "SCORERS",
    "Budget",
    "Observed",
    "Scorer",
    "check_budget",
    "kept_tokens",
    "make_budget",
    "page_gains",
]
