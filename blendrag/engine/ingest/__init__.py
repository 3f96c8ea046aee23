"""KV of chunks, computed apart from requests, and long operations in slices."""
