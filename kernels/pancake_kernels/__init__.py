"""Numeric kernels of Pancake, one subpackage per operation.

- `kv_codec`: KV cache in 8 or 4 bits, or exactly, as one self-describing frame.

Importing this package is cheap; a subpackage needs torch, and Triton only where its kernels run.  Nothing in here
imports `pancake_langgraph`, an engine or a cache server.
"""
