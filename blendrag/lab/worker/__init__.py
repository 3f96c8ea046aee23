"""Additions of the laboratory to the engine's worker."""
