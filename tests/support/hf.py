"""Small random Hugging Face models, one for each way a config.json of a served family can differ.

The models are transformers' own classes, so they are the reference; nothing here knows the package under test.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

# Sizes are odd on purpose: vocabularies that no kernel's tile divides, heads that are not a power of two.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "llama": [
        {"name": "llama-gqa-tied", "tie_word_embeddings": True},
        {"name": "llama-mha", "hidden_size": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-3, "vocab_size": 131},
        {
            "name": "llama3-rope",
            "num_hidden_layers": 3,
            "hidden_size": 96,
            "num_key_value_heads": 1,
            # All three bands occur: wavelengths below 16, between 16 and 64, and above.
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "name": "llama-linear-headdim10",
            "hidden_size": 32,
            "head_dim": 10,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
        },
        {
            "name": "llama-yarn",
            "hidden_size": 96,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 128,
            },
        },
        {
            "name": "llama-yarn-mscale",
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            },
        },
        {"name": "llama-biases", "attention_bias": True, "mlp_bias": True, "hidden_size": 40, "vocab_size": 131},
    ],
    "mistral": [
        {"name": "mistral-window", "sliding_window": 5, "num_hidden_layers": 3},
        {"name": "mistral-no-window-headdim24", "sliding_window": None, "head_dim": 24, "vocab_size": 131},
        {"name": "mistral-window-1", "sliding_window": 1, "num_key_value_heads": 1},
        {"name": "mistral-wide-window-tied", "sliding_window": 4096, "tie_word_embeddings": True, "head_dim": 12},
        {
            "name": "mistral-window-yarn-gain",
            "sliding_window": 7,
            "hidden_size": 72,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "original_max_position_embeddings": 512,
                "attention_factor": 0.9,
            },
        },
    ],
    "qwen2": [
        {"name": "qwen2-gqa-tied", "tie_word_embeddings": True},
        {"name": "qwen2-mqa", "num_key_value_heads": 1, "hidden_size": 48, "vocab_size": 131},
        {
            "name": "qwen2-window-layers",
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
        },
        {
            "name": "qwen2-layer-types",
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        {
            "name": "qwen2-yarn",
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "hidden_size": 60,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ],
    "qwen3": [
        {"name": "qwen3-headdim24", "head_dim": 24},
        {"name": "qwen3-tied-headdim10", "head_dim": 10, "tie_word_embeddings": True, "vocab_size": 131},
        {
            "name": "qwen3-window-layers",
            "head_dim": 12,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 2,
        },
        {"name": "qwen3-biases-mha", "head_dim": 16, "attention_bias": True, "num_key_value_heads": 4},
        {
            "name": "qwen3-linear-3heads",
            "head_dim": 24,
            "hidden_size": 56,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 4.0},
        },
    ],
}

NAMES: list[str] = [overrides["name"] for group in VARIANTS.values() for overrides in group]

_CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 84,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def variant(name: str, seed: int = 0) -> tuple[dict[str, Any], PreTrainedModel]:
    """The config and model that `VARIANTS` lists under `name`."""
    for family, group in VARIANTS.items():
        for overrides in group:
            if overrides["name"] == name:
                return random_hf(family, seed, **overrides)
    raise KeyError(f"no variant {name!r}; there are {', '.join(NAMES)}")


def random_hf(family: str, seed: int, *, name: str = "", **overrides: Any) -> tuple[dict[str, Any], PreTrainedModel]:
    """A small model with random weights, in eval mode and float32, and its config.json as a dict.

    `overrides` are config keys in transformers' spelling; `name` only lets an entry of `VARIANTS` be passed whole.
    """
    return build_hf(f"{_CLASSES[family]}Config", f"{_CLASSES[family]}ForCausalLM", overrides, seed)


def build_hf(
    config_class: str, model_class: str, overrides: dict[str, Any], seed: int
) -> tuple[dict[str, Any], PreTrainedModel]:
    """The same for any of transformers' classes."""
    settings = json.loads(json.dumps({**_SMALL, **overrides}))  # transformers edits the nested dicts it is given
    config = getattr(transformers, config_class)(**settings)
    config.architectures = [model_class]
    config.dtype = "float32"
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        model: PreTrainedModel = getattr(transformers, model_class)(config).float().eval()
    randomize(model, seed)
    return json.loads(model.config.to_json_string(use_diff=False)), model


@torch.no_grad()
def randomize(model: PreTrainedModel, seed: int) -> None:
    """Weights that make every part count: peaked attention, lively logits, norms away from 1, biases away from 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(model.named_parameters()):
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith("norm.weight"):
            tensor.copy_(1.0 + 0.3 * noise)
        elif name.endswith(".bias"):
            tensor.copy_(0.3 * noise)
        else:
            tensor.copy_(1.5 / math.sqrt(tensor.shape[-1]) * noise)
    for name, tensor in sorted(model.named_buffers()):
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        elif name.endswith("layer_scalar"):
            tensor.copy_(1.0 + 0.3 * torch.randn(tensor.shape, generator=generator))


def weights_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint of `model` holds, by name: a tied head is not among them."""
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def save_hf(tmp_path: Path, model: PreTrainedModel, shards: bool = False, *, old: bool = False) -> Path:
    """A model folder under `tmp_path`: config.json and safetensors, no tokenizer.

    `shards` splits the weights over several files with an index; `old` writes config.json in the old spelling.
    """
    folder = tmp_path / "model"
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    if old:
        path = folder / "config.json"
        path.write_text(json.dumps(old_style(json.loads(path.read_text())), indent=2))
    return folder


def old_style(config: dict[str, Any]) -> dict[str, Any]:
    """The same model as published config.json files spell it: rope_theta and rope_scaling at the top, torch_dtype."""
    old = json.loads(json.dumps(config))
    if "dtype" in old:
        old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters")
    old["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    # llama3 came after "type" had become "rope_type"; the others are mostly published under the older key.
    key = "rope_type" if kind == "llama3" else "type"
    old["rope_scaling"] = None if kind == "default" else {key: kind, **rope}
    old["transformers_version"] = "4.43.1"
    _drop_what_was_implied(old)
    return old


def _drop_what_was_implied(old: dict[str, Any]) -> None:
    """Remove keys that old files leave to their defaults, and restore one that they carry without use."""
    family, heads = old["model_type"], old["num_attention_heads"]
    if family != "qwen3" and old.get("head_dim") == old["hidden_size"] // heads:
        del old["head_dim"]
    if family == "llama" and old["num_key_value_heads"] == heads:
        del old["num_key_value_heads"]
    if family.startswith("qwen"):
        if not old["use_sliding_window"]:
            old["sliding_window"] = 3  # published files keep a window here and switch it off beside it
        first = old["max_window_layers"] if old["use_sliding_window"] else old["num_hidden_layers"]
        types = ["sliding_attention" if i >= first else "full_attention" for i in range(old["num_hidden_layers"])]
        if old["layer_types"] == types:
            del old["layer_types"]
