"""Trains what the learned eviction policies go by."""
