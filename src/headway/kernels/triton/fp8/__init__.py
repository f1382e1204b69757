"""Matmuls of weights and activations in fp8."""
