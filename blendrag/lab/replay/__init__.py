"""What a cache would have done: traces, replayed through the real eviction policies."""
