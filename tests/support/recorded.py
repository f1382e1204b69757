"""Decoding methods that transformers no longer has, recorded from its last release that did (4.46.3).

    python tests/support/recorded.py          # with transformers 4.46 installed; it writes recorded.json

The model is made of numpy's random numbers, so that both sides have the same weights whatever their libraries.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

FILE = Path(__file__).with_suffix(".json")
PROMPT = [5, 17, 3, 88, 41, 2, 9]
V, E, F, LAYERS, HEADS = 97, 64, 84, 4, 4
GROUPS: list[dict[str, Any]] = [
    {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7, "max_new_tokens": 8},
    {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 2.0, "max_new_tokens": 10, "eos_token_id": 11},
    {"num_beams": 3, "num_beam_groups": 3, "diversity_penalty": 5.0, "max_new_tokens": 12, "eos_token_id": [11, 40]},
    {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 0.3, "max_new_tokens": 12, "eos_token_id": [11, 40]},
    {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 1.0, "max_new_tokens": 9,
     "eos_token_id": [11, 40, 60, 80]},
]  # fmt: skip
CONTRASTIVE = [
    {"top_k": 4, "penalty_alpha": 0.6},
    {"top_k": 6, "penalty_alpha": 0.9},
    {"top_k": 2, "penalty_alpha": 0.3},
]


def write_model(folder: Path) -> Path:
    """A small random llama."""
    rng = np.random.default_rng(7)

    def matrix(rows: int, width: int) -> np.ndarray:
        return (rng.standard_normal((rows, width)) * 1.5 / np.sqrt(width)).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(V, E), "lm_head.weight": matrix(V, E)}
    tensors["model.norm.weight"] = np.ones(E, np.float32)
    shapes = {f"self_attn.{name}_proj": (E, E) for name in "qkvo"}
    shapes |= {"mlp.gate_proj": (F, E), "mlp.up_proj": (F, E), "mlp.down_proj": (E, F)}
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(E, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": V, "hidden_size": E,
        "intermediate_size": F, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "float32", "bos_token_id": None,
        "eos_token_id": None,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def dola_logits(case: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits [V] of a last layer and of an early one."""
    rng = np.random.default_rng([3, case])
    return rng.standard_normal(V).astype(np.float32) * 3, rng.standard_normal(V).astype(np.float32) * 2


def record() -> dict[str, Any]:
    """What transformers gives, for each case in order."""
    import torch
    from transformers import LlamaForCausalLM, __version__
    from transformers.generation.utils import _dola_select_contrast  # type: ignore[attr-defined]  # gone since

    with tempfile.TemporaryDirectory() as folder:
        model: Any = LlamaForCausalLM.from_pretrained(write_model(Path(folder))).eval()
    found: dict[str, Any] = {"transformers": __version__, "groups": [], "contrastive": [], "dola": []}
    prompt = torch.tensor([PROMPT])
    for case in GROUPS:
        options = {"num_return_sequences": case["num_beams"], "return_dict_in_generate": True, "output_scores": True}
        out = model.generate(prompt, **{"eos_token_id": None, "pad_token_id": V - 1, **options, **case})
        found["groups"].append(
            {"tokens": out.sequences[:, len(PROMPT) :].tolist(), "scores": out.sequences_scores.tolist()}
        )
    for case in CONTRASTIVE:
        out = model.generate(prompt, max_new_tokens=16, eos_token_id=None, pad_token_id=V - 1, **case)
        found["contrastive"].append(out[0, len(PROMPT) :].tolist())
    for case in range(4):  # one early layer each: it chooses by another divergence than the paper
        final, early = (torch.from_numpy(part)[None] for part in dola_logits(case))
        contrast = _dola_select_contrast([1], {1: early}, final)[0]
        found["dola"].append([None if value == -torch.inf else round(value, 5) for value in contrast.tolist()])
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(record()) + "\n")
    sys.exit(0)
