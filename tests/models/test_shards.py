"""Shares of a model: computed together they give the whole model's logits; what does not divide is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headway.base.errors import Unsupported
from headway.models.capabilities import check_split
from headway.models.config import read_config
from headway.models.decoder import Decoder
from headway.models.layers import tensors_of
from headway.models.shards import Split
from headway.models.weights.load_tensors import load_model
from headway.runtime.runners.parallel.messages import config_values, read_config_values
from headway.testing import random_model
from support.checks import assert_close, random_tokens, reference_logits
from support.hf import build_hf, save_hf, variant
from support.hf_families import CASES, MODELS
from support.thread_ranks import ThreadLink, logits_of, on_threads

N = 19
CPU = torch.device("cpu")
EVEN = {"num_experts": 6, "num_local_experts": 6}  # of two and of three ranks
QUICK = (
    "gemma3",
    "olmo2",
    "cohere2",
    "gpt2",
    "falcon-new",
    "qwen2-moe-dense-layer",
    "gpt-oss",
    "phi",
    "olmoe-clip",
)
LLAMAS = ("llama-biases", "qwen2-gqa-tied", "qwen3-tied-headdim10", "mistral-window")


def model_of(name: str) -> Any:
    """A random model, with experts that divide."""
    for kind, group in CASES.items():
        if name in group:
            given = {key: EVEN.get(key, value) for key, value in group[name].items()}
            return build_hf(f"{kind}Config", MODELS.get(kind, f"{kind}ForCausalLM"), given, 0)[1]
    return variant(name)[1]


def split_bytes(decoder: Decoder) -> int:
    """Bytes of the weights; learned positions, which every rank has, are left out."""
    positions = getattr(decoder, "positions", None)
    return sum(tensor.nbytes for tensor in tensors_of(decoder)) - (0 if positions is None else positions.nbytes)


def shares(folder: Path, size: int, tokens: list[int]) -> tuple[np.ndarray, list[int]]:
    """The logits of a model that is split over ranks, and the bytes of each one's weights."""
    config = read_config(folder)

    def rank(link: ThreadLink) -> tuple[np.ndarray, int]:
        own = load_model(folder, dtype=torch.float32, device=CPU, split=Split(link, config, CPU))
        return logits_of(own, tokens), split_bytes(own)

    found = on_threads(size, rank)
    return found[0][0], [nbytes for _, nbytes in found]


@pytest.mark.parametrize(
    "name",
    [
        *LLAMAS,
        *QUICK,
        *(pytest.param(n, marks=pytest.mark.slow) for group in CASES.values() for n in group if n not in QUICK),
    ],
)
def test_two_shares_compute_the_whole_model(name: str, tmp_path: Path) -> None:
    model = model_of(name)
    folder = save_hf(tmp_path, model)
    config = read_config(folder)
    if config.heads % 2 or config.kv_heads % 2:
        with pytest.raises(Unsupported, match="key-value heads"):
            check_split(config, 2)
        return
    check_split(config, 2)
    tokens = random_tokens(config.vocab_size, N)
    logits, nbytes = shares(folder, 2, tokens)
    assert_close(logits, reference_logits(model, tokens))
    whole = split_bytes(load_model(folder, dtype=torch.float32, device=CPU))
    assert all(each < 0.6 * whole for each in nbytes)  # norms and routers are on every rank


@pytest.mark.parametrize("size", [3, 6])
def test_more_shares_and_a_vocabulary_that_does_not_divide(size: int, tmp_path: Path) -> None:
    given = {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 72, "intermediate_size": 60}
    model = build_hf("LlamaConfig", "LlamaForCausalLM", {**given, "vocab_size": 131}, 1)[1]
    folder, tokens = save_hf(tmp_path, model), random_tokens(131, N)
    assert_close(shares(folder, size, tokens)[0], reference_logits(model, tokens))


def test_a_vocabulary_smaller_than_its_ranks_leaves_some_without_rows(tmp_path: Path) -> None:
    given = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 5}
    model = build_hf("LlamaConfig", "LlamaForCausalLM", given, 1)[1]
    folder, tokens = save_hf(tmp_path, model), random_tokens(5, N)
    assert_close(shares(folder, 4, tokens)[0], reference_logits(model, tokens))


def test_a_model_in_memory_is_split_too() -> None:
    whole = random_model("qwen3", heads=4, kv_heads=2)
    tokens = random_tokens(whole.config.vocab_size, N)
    found = on_threads(2, lambda link: logits_of(Split(link, whole.config, CPU).decoder(whole), tokens))
    assert_close(found[0], logits_of(whole, tokens))


@pytest.mark.parametrize("name", ["llama3-rope", "gemma3", "qwen2-moe-dense-layer", "phi3-longrope"])
def test_a_config_is_the_same_after_its_way_to_a_rank(name: str, tmp_path: Path) -> None:
    config = read_config(save_hf(tmp_path, model_of(name)))
    assert read_config_values(json.loads(json.dumps(config_values(config)))) == config


@pytest.mark.parametrize(
    ("changes", "size", "what"),
    [
        ({"heads": 6, "kv_heads": 3}, 2, "key-value heads, 3, cannot be divided by 2; run it without"),
        ({"heads": 6, "kv_heads": 2}, 4, "attention heads, 6, cannot be divided by 4; 2 divides all of them"),
        ({"heads": 4, "kv_heads": 4, "intermediate_size": 62}, 4, "feed-forward width, 62, cannot be divided by 4"),
    ],
)
def test_what_does_not_divide_is_refused_by_name(changes: dict[str, Any], size: int, what: str) -> None:
    config = random_model("llama", **changes).config
    with pytest.raises(Unsupported, match=what):
        check_split(config, size)
