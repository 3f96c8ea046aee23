"""Texts with stored KV, and prompts planned over them: what an index and the integrations stand on."""
