"""The loading of KV from tiers to the engine, by layers, ahead of what hides it (CacheBlend section 5)."""
