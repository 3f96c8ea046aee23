"""Exact attention of scattered tokens: plain torch and one Triton kernel, no engine, no storage."""
