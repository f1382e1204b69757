"""A small random decoder with a tokenizer and a chat template that transformers and Headway load from one folder."""

from __future__ import annotations

import json
from pathlib import Path

from support.hf import random_hf, save_hf
from support.speaker import SPECIAL, TEMPLATES, V, backend

BOS, EOS = 256 + SPECIAL.index("<s>"), 256 + SPECIAL.index("</s>")


def decoder_folder(folder: Path) -> Path:
    """Two layers, one token a byte; its end token is the same in every file."""
    _, model = random_hf(
        "llama", 0, vocab_size=V, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, intermediate_size=16, max_position_embeddings=512, bos_token_id=BOS, eos_token_id=EOS,
    )  # fmt: skip
    made = save_hf(folder, model)
    backend().save(str(made / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(names))
    (made / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS, "pad_token_id": EOS}))
    (made / "chat_template.jinja").write_text((TEMPLATES / "hermes.jinja").read_text())
    return made
