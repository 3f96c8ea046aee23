"""Where chunk KV lives: identity, catalogue, tiers, codecs. Knows nothing of engines and prompts."""
