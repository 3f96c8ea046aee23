"""Measurement of this machine for the loading controller."""
