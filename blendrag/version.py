"""The version, once for the package and everything that records it."""

__version__ = "0.1.0"
