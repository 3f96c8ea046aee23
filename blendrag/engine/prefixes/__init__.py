"""Exact prefixes in an engine: nodes of a tree go into requests' blocks, and out of them."""
