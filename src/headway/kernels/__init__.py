"""Tensor functions: matmul, paged attention, KV-cache writes, norms, sampling.

`reference` has one torch function for each. The fast paths, `native` (C++, CPU) and `triton` (CUDA), are tested
against it.
"""
