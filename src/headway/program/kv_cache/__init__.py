"""The KV cache as programs see it: raw pages, who holds which, the prefix cache, saved contexts, its size."""
