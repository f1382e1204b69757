"""Several sequences from one context: beams, or independent draws."""
