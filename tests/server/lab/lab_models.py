"""A random model of another vocabulary, some of whose tokens are made to break a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedModel

from support.hf import random_hf, save_hf
from support.speaker import backend

NASTY = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 2'>",
    "</textarea><b>bold</b>",
    "🙂",
    "👩‍👩‍👧",
    "مرحبا",
    "\u202eevil",
    "&lt;&amp;",
    "{{constructor}}",
    "a" * 300,
]


def nasty_folder(path: Path) -> tuple[Path, dict[str, Any], PreTrainedModel]:
    """The model's folder, its config.json as a dict, and the model for an oracle."""
    tokens = backend()
    tokens.add_tokens([AddedToken(text, special=False, normalized=False) for text in NASTY])
    size = tokens.get_vocab_size()
    config, model = random_hf("llama", 3, vocab_size=size, num_hidden_layers=2, max_position_embeddings=256)
    folder = save_hf(path, model)
    tokens.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder, config, model
