"""Adapters that are not what they say: refused by name, before anything is loaded."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import headway as hw
from headway.models.adapters.bound import bind
from headway.testing import random_config
from support.gguf_files import write
from support.properties import examples

Tensors = dict[str, torch.Tensor]
NAME = "base_model.model.model.layers.{}.{}.lora_{}.weight"
SHAPES = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "mlp.down_proj": (64, 84)}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "bias": "none",
    "target_modules": ["q_proj", "k_proj", "down_proj"],
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
}


def tensors(rank: int = 4) -> Tensors:
    found: Tensors = {}
    for layer in range(2):
        for module, (n, k) in SHAPES.items():
            found[NAME.format(layer, module, "A")] = torch.ones(rank, k)
            found[NAME.format(layer, module, "B")] = torch.ones(n, rank)
    return found


def saved(folder: Path, weights: Tensors | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors() if weights is None else weights, str(folder / "adapter_model.safetensors"))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def test_the_folder_that_the_others_spoil_is_fine(tmp_path: Path) -> None:
    adapter = hw.Adapter.load(saved(tmp_path / "it"))
    assert (adapter.rank, adapter.name, len(adapter.pairs)) == (4, "it", 6)
    assert {pair.scaling for pair in adapter.pairs.values()} == {2.0}
    assert len(bind(adapter, random_config()).layers) == 2
    assert "rank 4" in repr(adapter)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "DoRA"),
    "another method": ({"peft_type": "IA3"}, "IA3"),
    "saved modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "trainable tokens": ({"trainable_token_indices": [1, 2]}, "trainable tokens"),
    "biases": ({"bias": "all"}, "bias"),
    "biases of LoRA": ({"lora_bias": True}, "lora_bias"),
    "other base weights": ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
    "replicated layers": ({"layer_replication": [[0, 1]]}, "replicated"),
    "parameters": ({"target_parameters": ["experts"]}, "target_parameters"),
    "aLoRA": ({"alora_invocation_tokens": [5]}, "aLoRA"),
    "QALoRA": ({"use_qalora": True}, "QALoRA"),
    "a group that repeats": ({"target_modules": r"(.*\.?)+q_proj"}, "repeat"),
    "many repetitions": ({"target_modules": ".*" * 9 + "q_proj"}, "repeat"),
}
BACKTRACKS = "[a-z0-9_.]*" * 5 + "[^a-z]"
LONG = "self_attn." + "q" * 180
SLOW: dict[str, tuple[str, dict[str, Any], str]] = {
    "many": ("mlp.up_proj", {"rank_pattern": {f"{i}": 4 for i in range(5000)}}, "5000 patterns in rank_pattern"),
    "slow ones": (
        "mlp.up_proj",
        {"alpha_pattern": {f"{BACKTRACKS}{i}": 4 for i in range(4000)}},
        "more than 3 seconds",
    ),
    "one on a long name": (LONG, {"target_modules": BACKTRACKS}, "5 times.*a name of 205 characters"),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow) if "ones" in case else case for case in SLOW]
)
def test_patterns_that_take_for_ever_are_refused(case: str) -> None:
    module, config, words = SLOW[case]
    given = {NAME.format(0, module, side): torch.ones(4, 4) for side in "AB"}
    with pytest.raises((hw.Unsupported, hw.BadModelFile), match=words):
        hw.Adapter.from_tensors(given, CONFIG | {"target_modules": ["up_proj"]} | config)


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "another rank": ({"r": 8}, "rank 8"),
    "a rank of 0": ({"r": 0}, "r is 0"),
    "a rank in words": ({"r": "four"}, "four"),
    "alpha is not a number": ({"lora_alpha": float("nan")}, "lora_alpha"),
    "alpha too large": ({"lora_alpha": 1e300}, "scaling"),
    "a rank pattern": ({"rank_pattern": {"q_proj": 3}}, "rank 3"),
    "a rank pattern that is none": ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
    "modules without tensors": ({"target_modules": ["q_proj", "k_proj", "down_proj", "up_proj"]}, "up_proj"),
    "tensors without a module": ({"target_modules": ["q_proj", "k_proj"]}, "down_proj"),
    "no modules": ({"target_modules": None}, "target_modules"),
    "modules that are numbers": ({"target_modules": [1]}, "target_modules"),
    "a broken pattern": ({"target_modules": "(q_proj"}, "target_modules"),
    "layers that are words": ({"layers_to_transform": ["one"]}, "layers_to_transform"),
    "a head without tensors": ({"target_modules": ["q_proj", "k_proj", "down_proj", "lm_head"]}, "lm_head"),
    "other layers": ({"layers_to_transform": [1]}, "layers.0"),
    "rslora in words": ({"use_rslora": "yes"}, "use_rslora"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_plain_lora_is_refused_by_name(tmp_path: Path, case: str) -> None:
    config, words = REFUSED[case]
    with pytest.raises(hw.Unsupported, match=words):
        hw.Adapter.load(saved(tmp_path, **config))


@pytest.mark.parametrize("case", LIES)
def test_a_config_that_lies_is_refused(tmp_path: Path, case: str) -> None:
    config, words = LIES[case]
    with pytest.raises(hw.BadModelFile, match=words):
        bind(hw.Adapter.load(saved(tmp_path, **config)), random_config())


def spoil(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    found = tensors()
    found[name] = change(found[name])
    return found


def one_more(name: str) -> Tensors:
    return tensors() | {name: torch.ones(4, 9)}


FIRST_A, FIRST_B = (NAME.format(0, "self_attn.q_proj", side) for side in "AB")
SPOILED: dict[str, tuple[Callable[[], Tensors], str]] = {
    "a NaN": (lambda: spoil(FIRST_A, lambda t: t * float("nan")), "finite"),
    "an infinity": (lambda: spoil(FIRST_B, lambda t: t / 0), "finite"),
    "integers": (lambda: spoil(FIRST_A, torch.Tensor.int), "I32|int32"),
    "a vector": (lambda: spoil(FIRST_A, lambda t: t[0]), "matrix"),
    "two ranks": (lambda: spoil(FIRST_B, lambda t: t[:, :3].contiguous()), "rank"),
    "no B": (lambda: {k: v for k, v in tensors().items() if k != FIRST_B}, "A and B"),
    "no tensors": (lambda: {"base_model.model.x": torch.ones(1)}, "modules_to_save"),
    "LoRA of the embedding": (lambda: one_more("base_model.model.model.embed_tokens.lora_embedding_A"), "embeddings"),
    "a head without B": (lambda: one_more("base_model.model.lm_head.lora_A.weight"), "A and B"),
    "a whole head": (lambda: one_more("base_model.model.lm_head.weight"), "save_embedding_layers"),
    "DoRA's vectors": (lambda: one_more(FIRST_A.replace("lora_A", "lora_magnitude_vector")), "DoRA"),
    "another module": (lambda: one_more("base_model.model.visual.fc.lora_A.weight"), "linear layers"),
    "a layer past the end": (lambda: one_more(NAME.format(99999999, "mlp.up_proj", "A")), "layers go"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILED)
def test_tensors_that_are_not_lora_are_refused(tmp_path: Path, case: str) -> None:
    build, words = SPOILED[case]
    for attempt in (
        lambda: hw.Adapter.load(saved(tmp_path, build())),
        lambda: hw.Adapter.from_tensors(build(), CONFIG),
        lambda: hw.Adapter.from_tensors(build()),
    ):
        with pytest.raises((hw.BadModelFile, hw.Unsupported), match=words):
            attempt()


def test_size_is_bounded_before_anything_is_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    with pytest.raises(hw.BadModelFile, match=r"rank 4; it must be in \[1, 3\]"):
        hw.Adapter.load(folder, max_rank=3)
    with pytest.raises(hw.BadModelFile, match="the limit for an adapter is 1000"):
        hw.Adapter.load(folder, max_bytes=1000)
    with pytest.raises(hw.BadModelFile, match="the limit for an adapter is 1000"):
        hw.Adapter.from_tensors(tensors(), max_bytes=1000)
    with pytest.raises(hw.InvalidInput, match="max_rank"):
        hw.Adapter.load(folder, max_rank=0)


def test_files_that_are_missing_or_pickles(tmp_path: Path) -> None:
    with pytest.raises(hw.ModelNotFound, match=r"adapter_config\.json"):
        hw.Adapter.load(tmp_path / "nowhere")
    with pytest.raises(hw.ModelNotFound, match=r"adapter_model\.safetensors"):
        hw.Adapter.load(tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(hw.Unsupported, match="pickle"):
        hw.Adapter.load(tmp_path)
    folder = saved(tmp_path / "it")
    (folder / "adapter_config.json").unlink()
    with pytest.raises(hw.BadModelFile, match=r"adapter_config\.json"):
        hw.Adapter.load(folder)
    for text in ("{", "[]", '{"r": 4}'):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(hw.BadModelFile):
            hw.Adapter.load(folder)
    for wrong in (3, None, b"x"):
        with pytest.raises(hw.WrongType):
            hw.Adapter.load(wrong)  # type: ignore[arg-type]
    for values in ({"x": 3}, {3: torch.ones(1)}, [torch.ones(1)]):
        with pytest.raises(hw.WrongType):
            hw.Adapter.from_tensors(values)  # type: ignore[arg-type]
    name, matrix = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", torch.ones(2, 4)
    for value, why in ((matrix.to("meta"), "meta device"), (matrix.to_sparse(), "sparse_coo, not dense")):
        with pytest.raises(hw.BadModelFile, match=why):
            hw.Adapter.from_tensors({name: value, name.replace("_A", "_B"): matrix.T})


GGUF: dict[str, Any] = {
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}


def floats(*shape: int) -> tuple[str, np.ndarray]:
    return "F32", np.ones(shape, np.float32).view(np.uint8)


PAIR = {"blk.0.attn_q.weight.lora_a": floats(4, 64), "blk.0.attn_q.weight.lora_b": floats(64, 4)}
BAD_GGUF: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "a model": ({"general.type": "model"}, PAIR, "general.type"),
    "another adapter": ({"adapter.type": "control_vector"}, PAIR, "control_vector"),
    "alpha in words": ({"adapter.lora.alpha": "8"}, PAIR, "alpha"),
    "half a pair": ({}, {"blk.0.attn_q.weight.lora_a": floats(4, 64)}, "lora_b"),
    "an embedding": ({}, PAIR | {"token_embd.weight.lora_a": floats(4, 64)}, "token_embd"),
    "another shape": ({}, PAIR | {"blk.0.attn_q.weight.lora_a": floats(4, 32)}, "matrix is"),
    "nothing": ({}, {}, "no LoRA"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_GGUF)
def test_gguf_files_that_are_not_lora_are_refused(tmp_path: Path, case: str) -> None:
    facts, stored, words = BAD_GGUF[case]
    with pytest.raises((hw.BadModelFile, hw.Unsupported), match=words):
        bind(hw.Adapter.load(write(tmp_path / "it.gguf", stored, **(GGUF | facts))), random_config())


def test_a_gguf_adapter_of_another_architecture_is_refused(tmp_path: Path) -> None:
    adapter = hw.Adapter.load(write(tmp_path / "it.gguf", PAIR, **GGUF))
    assert bind(adapter, random_config("mistral")).rank == 4  # whose files call themselves llama
    with pytest.raises(hw.BadModelFile, match="'llama'; the model's is 'qwen3'"):
        bind(adapter, random_config("qwen3"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


PATTERNS = ["rank_pattern", "alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform"]
FIELDS = [*CONFIG, *PATTERNS, "use_rslora", "init_lora_weights"]


@settings(max_examples=examples(100), deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3))
def test_any_config_is_read_or_refused(config: dict[str, Any]) -> None:
    with contextlib.suppress(hw.BadModelFile, hw.Unsupported):
        bind(hw.Adapter.from_tensors(tensors(), CONFIG | config), random_config())
