"""The predictor of whether a conversation goes on, as in Learned Prefix Caching (LPC, section 3.2).

Its forecasts are for eviction policies, which know nothing of texts and models.
"""
