"""Matmuls of rows with the experts that a router has chosen for them."""
