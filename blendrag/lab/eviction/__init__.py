"""Eviction in the laboratory: traces through the real policies, and training of what these go by."""
