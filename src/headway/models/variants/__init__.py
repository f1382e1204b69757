"""Decoders of families whose layers compute otherwise: small classes over `DescribedDecoder` and `DescribedLayer`.

latent      one key head in the KV cache, of which all heads read (DeepSeek)
tempered    queries that grow with their position in layers without a rope (Llama 4)
hybrid      recurrences in place of attention, or beside it (LFM2, Qwen3-Next, Mamba-2, Granite hybrid)
per_layer   layers that differ from each other: heads, widths, whose keys and values they attend to (Gemma 4)
altup       residuals side by side (Gemma 3n)
"""
