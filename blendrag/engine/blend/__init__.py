"""The blend of one prompt: stored KV is loaded, the question read, and chosen tokens are recomputed."""
