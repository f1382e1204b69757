"""The model of an engine: its weights as they are computed, its tokenizer and chat template, new weights."""
