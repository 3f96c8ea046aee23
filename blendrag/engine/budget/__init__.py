"""Eviction of a prompt's KV by a budget: what heads keep, how it is read, and what becomes free."""
