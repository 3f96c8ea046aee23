"""The store of chunks' KV: identity, catalogue, tiers, codecs. It knows nothing of engines and prompts."""
