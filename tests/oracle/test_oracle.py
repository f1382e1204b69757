"""The oracle against transformers: every variant, under any mask and any position ids.

transformers is given the whole mask as an additive float [1, 1, n, n]. It takes such a mask as it is and then leaves
its own sliding window out, so the window is built into the mask here, by position id. That transformers' window and the
oracle's are the same rule is tested apart, with no mask given.
"""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.hf import NAMES, VARIANTS, old_style, random_hf, save_hf, variant, weights_of
from support.oracle import Oracle, Result, layer_windows

N = 19  # longer than every small window, and not a multiple of anything


@functools.cache
def judged(name: str) -> tuple[dict[str, Any], PreTrainedModel, Oracle]:
    config, model = variant(name)
    return config, model, Oracle(config, weights_of(model))


def causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


def random_tokens(vocab: int, seed: int, n: int = N) -> Tensor:
    return torch.randint(vocab, (n,), generator=torch.Generator().manual_seed(seed))


def random_mask(seed: int, n: int = N) -> Tensor:
    """About a third of all pairs, the future included, and every row itself."""
    return (torch.rand(n, n, generator=torch.Generator().manual_seed(seed)) < 0.35) | torch.eye(n, dtype=torch.bool)


def additive(attend: Tensor) -> Tensor:
    return torch.zeros(attend.shape).masked_fill(~attend, torch.finfo(torch.float32).min)[None, None]


def reference_mask(model: PreTrainedModel, positions: Tensor, attend: Tensor) -> Tensor | dict[str, Tensor]:
    """`attend` with the model's window ANDed in, in the form its family takes."""
    config = model.config
    window = getattr(config, "sliding_window", None)
    near = positions[:, None] - positions[None, :] < (window if window is not None else 1 << 30)
    match config.model_type:
        case "llama":
            return additive(attend)
        case "mistral":
            return additive(attend & near)
        case _:
            return {"full_attention": additive(attend), "sliding_attention": additive(attend & near)}


@torch.no_grad()
def reference(model: PreTrainedModel, tokens: Tensor, positions: Tensor, mask: Any) -> Any:
    return model(
        input_ids=tokens[None],
        position_ids=positions[None],
        attention_mask=mask,
        use_cache=False,
        output_hidden_states=True,
        output_attentions=True,
    )


def assert_close(ours: Tensor, theirs: Tensor, what: str) -> None:
    assert ours.shape == theirs.shape, what
    worst, limit = (ours - theirs).abs().max().item(), 1e-4 * max(1.0, theirs.abs().max().item())
    assert worst <= limit, f"{what}: {worst:.3g} apart, allowed {limit:.3g}"


def assert_agrees(result: Result, theirs: Any) -> None:
    assert_close(result.logits, theirs.logits[0], "logits")
    assert len(result.hidden) == len(theirs.hidden_states)
    assert len(result.attention) == len(theirs.attentions)
    for layer, (a, b) in enumerate(zip(result.hidden, theirs.hidden_states)):
        assert_close(a, b[0], f"hidden state {layer}")
    for layer, (a, b) in enumerate(zip(result.attention, theirs.attentions)):
        assert_close(a, b[0], f"attention of layer {layer}")
        assert torch.equal(a == 0, b[0] == 0), f"layer {layer} attends elsewhere"


ARRANGEMENTS: dict[str, tuple[list[int], Tensor]] = {
    "causal": (list(range(N)), causal(N)),
    "random_mask": (list(range(N)), random_mask(1) & causal(N)),
    "non_causal": (list(range(N)), random_mask(2)),
    "all_see_all": (list(range(N)), torch.ones(N, N, dtype=torch.bool)),
    "gaps": ([0, 1, 2, 7, 8, 9, 30, 31, 100, 101, 102, 103, 400, 401, 402, 403, 404, 900, 901], causal(N)),
    "repeats": ([0, 1, 2, 3, 3, 3, 4, 4, 5, 5, 6, 6, 6, 7, 8, 8, 9, 9, 9], random_mask(3) & causal(N)),
    "reorders": ([5, 4, 3, 2, 1, 0, 12, 11, 6, 7, 18, 17, 16, 8, 9, 10, 15, 14, 13], causal(N)),
    "reorders_non_causal": ([9, 0, 3, 3, 50, 2, 1, 8, 7, 6, 5, 4, 60, 61, 9, 9, 12, 11, 10], random_mask(4)),
}


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_transformers(name: str, arrangement: str) -> None:
    config, model, oracle = judged(name)
    at, attend = ARRANGEMENTS[arrangement]
    tokens, positions = random_tokens(config["vocab_size"], seed=len(arrangement)), torch.tensor(at)
    theirs = reference(model, tokens, positions, reference_mask(model, positions, attend))
    assert_agrees(oracle.run(tokens, positions, attend), theirs)


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_masks_and_windows_transformers_builds_itself(name: str) -> None:
    config, model, oracle = judged(name)
    tokens, positions = random_tokens(config["vocab_size"], seed=3), torch.arange(N)
    assert_agrees(oracle.run(tokens, positions, causal(N)), reference(model, tokens, positions, None))


@pytest.mark.parametrize("name", NAMES)
def test_float64_agrees_with_float32(name: str) -> None:
    config, model, oracle = judged(name)
    tokens, positions = random_tokens(config["vocab_size"], seed=4), torch.arange(N) * 40
    exact = Oracle(config, weights_of(model), dtype=torch.float64).run(tokens, positions, random_mask(5))
    assert exact.logits.dtype == torch.float64
    assert_close(oracle.run(tokens, positions, random_mask(5)).logits.double(), exact.logits, "logits")


@pytest.mark.parametrize("name", NAMES)
def test_old_spelling_is_the_same_model(name: str, tmp_path: Path) -> None:
    config, model, oracle = judged(name)
    old = old_style(config)
    assert "rope_parameters" not in old
    assert "dtype" not in old
    tokens, positions = random_tokens(config["vocab_size"], seed=6), torch.arange(N)
    ours = Oracle(old, weights_of(model)).run(tokens, positions, causal(N))
    assert torch.equal(ours.logits, oracle.run(tokens, positions, causal(N)).logits)
    (tmp_path / "config.json").write_text(json.dumps(old))
    reread = AutoConfig.from_pretrained(tmp_path)
    reread.rope_parameters.pop("type", None)  # transformers keeps the old key beside the new one
    for key in ("rope_parameters", "layer_types", "sliding_window", "head_dim", "num_key_value_heads"):
        assert getattr(reread, key, None) == getattr(model.config, key, None), key


@pytest.mark.parametrize("name", NAMES)
def test_every_weight_matters(name: str) -> None:
    """A variant whose biases, norms or head could be left out unnoticed would judge nothing."""
    config, model, oracle = judged(name)
    tokens, positions = torch.arange(config["vocab_size"]), torch.arange(config["vocab_size"])
    attend = torch.ones(len(tokens), len(tokens), dtype=torch.bool)  # so that a row within a window of one sees others
    logits = oracle.run(tokens, positions, attend).logits
    assert 0.5 < logits.std() < 20
    weights = weights_of(model)
    for key, tensor in weights.items():
        plain = torch.ones_like(tensor) if key.endswith("norm.weight") else torch.zeros_like(tensor)
        changed = Oracle(config, {**weights, key: plain}).run(tokens, positions, attend).logits
        assert (changed - logits).abs().max() > 0.01, key


@pytest.mark.parametrize("name", NAMES)
def test_the_rope_settings_matter(name: str) -> None:
    config, model, oracle = judged(name)
    if config["rope_parameters"]["rope_type"] == "default":
        other = {"rope_type": "default", "rope_theta": 500.0}
    else:
        other = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    tokens, positions = random_tokens(config["vocab_size"], seed=7), torch.arange(N)
    attend = torch.ones(N, N, dtype=torch.bool)
    plain = Oracle({**config, "rope_parameters": other}, weights_of(model)).run(tokens, positions, attend)
    assert (plain.logits - oracle.run(tokens, positions, attend).logits).abs().max() > 0.01


def test_every_family_has_variants_with_unique_names() -> None:
    assert set(VARIANTS) == {"llama", "mistral", "qwen2", "qwen3"}
    assert all(len(group) >= 4 for group in VARIANTS.values())
    assert len(set(NAMES)) == len(NAMES)


def test_the_same_seed_gives_the_same_model_and_another_gives_another() -> None:
    first, again, other = (weights_of(random_hf("qwen3", seed)[1]) for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window-layers", "qwen3-window-layers"])
def test_window_counts_position_ids(name: str) -> None:
    """The last row sees exactly the slots less than a window behind it, wherever they lie, in the windowed layers."""
    config, _, oracle = judged(name)
    positions = torch.tensor([10, 3, 9, 4, 8, 5, 7, 6, 11])
    attention = oracle.run(list(range(9)), positions, causal(9)).attention
    for probs, window in zip(attention, layer_windows(config)):
        seen = {int(positions[j]) for j in range(9) if probs[0, -1, j] > 0}
        assert seen == ({p for p in range(3, 12) if 11 - p < window} if window else set(range(3, 12)))


def test_result_parts_belong_together() -> None:
    config, _, oracle = judged("llama-gqa-tied")
    result = oracle.run(random_tokens(config["vocab_size"], 8), torch.arange(N), causal(N))
    assert len(result.layer_outputs) == len(result.attention) == len(result.hidden) - 1 == config["num_hidden_layers"]
    assert torch.equal(result.hidden[1], result.layer_outputs[0])
    assert torch.equal(oracle.unembed(result.layer_outputs[-1]), result.logits)
    assert all(torch.allclose(p.sum(-1), torch.ones(N)) for p in result.attention)


def test_a_tied_model_reads_its_embeddings_even_beside_a_head() -> None:
    config, model, oracle = judged("qwen2-gqa-tied")
    weights = weights_of(model)
    assert "lm_head.weight" not in weights
    doubled = Oracle(config, {**weights, "lm_head.weight": torch.zeros(1, 1)})
    tokens = random_tokens(config["vocab_size"], 9)
    a, b = (o.run(tokens, torch.arange(N), causal(N)).logits for o in (oracle, doubled))
    assert torch.equal(a, b)


@pytest.mark.parametrize("shards", [False, True])
@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("name", ["llama3-rope", "mistral-window", "qwen2-gqa-tied", "qwen3-tied-headdim10"])
def test_a_saved_folder_loads_as_the_same_model(tmp_path: Path, name: str, shards: bool, old: bool) -> None:
    config, model, _ = judged(name)
    folder = save_hf(tmp_path, model, shards, old=old)
    assert (folder / "model.safetensors.index.json").exists() == shards
    assert len(list(folder.glob("*.safetensors"))) > 1 if shards else (folder / "model.safetensors").exists()
    assert ("rope_theta" in json.loads((folder / "config.json").read_text())) == old
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens, positions = random_tokens(config["vocab_size"], 10), torch.arange(N)
    a, b = (reference(m, tokens, positions, None).logits for m in (model, loaded))
    assert torch.equal(a, b)


def test_what_the_oracle_does_not_model_is_refused() -> None:
    config, model, oracle = judged("llama-gqa-tied")
    weights = weights_of(model)
    with pytest.raises(ValueError, match="not 'dynamic'"):
        Oracle({**config, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, weights)
    with pytest.raises(ValueError, match="not 'gemma'"):
        Oracle({**config, "model_type": "gemma"}, weights)
    with pytest.raises(ValueError, match="not 'gelu'"):
        Oracle({**config, "hidden_act": "gelu"}, weights)
    with pytest.raises(ValueError, match=r"not 0\.5 of each"):
        Oracle({**config, "partial_rotary_factor": 0.5}, weights)
    with pytest.raises(ValueError, match=r"'model\.extra'"):
        Oracle(config, {**weights, "model.extra": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"rows \[1\] attend to nothing"):
        oracle.run([1, 2], [0, 1], torch.tensor([[True, False], [False, False]]))
    with pytest.raises(ValueError, match=r"0 … 96, got \[-1\]"):
        oracle.run([-1], [0], causal(1))
    with pytest.raises(ValueError, match="bool attend"):
        oracle.run([1, 2], [0, 1], causal(3))


def test_a_row_blinded_by_its_window_is_refused() -> None:
    _, _, oracle = judged("mistral-window")
    with pytest.raises(ValueError, match=r"rows \[1\] attend to nothing"):
        oracle.run([1, 2], [0, 5], torch.tensor([[True, False], [True, False]]))
