"""The loading of KV from tiers to the engine: a layer at a time, ahead of the computation that hides it
(CacheBlend section 5)."""
