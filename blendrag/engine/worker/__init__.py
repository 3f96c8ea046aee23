"""The connector and the worker extension that vLLM loads, and what they hold together."""
