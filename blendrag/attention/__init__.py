"""Exact attention of scattered tokens: plain torch, and kernels in Triton and C++, no engine, no storage."""
