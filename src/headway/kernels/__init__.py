"""Tensor functions: one torch reference each. Fast paths keep the reference's signature and are compared with it."""
