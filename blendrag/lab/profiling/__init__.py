"""Measures this machine for the loading controller."""
