"""Exact attention of scattered tokens: plain torch, no engine, no storage."""
