"""The loading of KV from tiers to the engine, by layers, hidden by the computation (CacheBlend section 5)."""
