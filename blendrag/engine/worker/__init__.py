"""The code that runs inside vLLM's processes."""
