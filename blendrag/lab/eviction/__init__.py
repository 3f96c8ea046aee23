"""What eviction would have found: traces through the real policies, and training of what these go by."""
