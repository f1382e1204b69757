"""What config.json and GGUF metadata mean: defaults as transformers has them, and every bad value refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

import headway as hw
from headway.models.config import ModelConfig, from_gguf, from_hf, read_config
from headway.models.families import FAMILIES
from headway.models.files.gguf import Strings
from support.hf import NAMES, VARIANTS, old_style, random_hf, variant
from support.properties import examples

NASTY: list[Any] = [
    *(None, True, "12", "", [], {}, [3], 0, -1, 1, 3, 2.5, -0.5, 0.0),
    *(1 << 24, 1 << 31, 1 << 63, 10**400, 1e308, -1e308, float("nan"), float("inf"), -float("inf")),
]
NULLABLE = ("num_key_value_heads", "head_dim", "sliding_window")
WITHOUT_NULL = {("head_dim", "qwen3"), ("num_key_value_heads", "mistral")}  # transformers itself refuses these
NEEDED = {
    "architectures",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
}


def llama(**changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 97,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 84,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        **changes,
    }


def gguf(arch: str = "llama", **changes: Any) -> dict[str, Any]:
    keys = {
        "embedding_length": 64,
        "block_count": 2,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 84,
        "context_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "vocab_size": 97,
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in (keys | changes).items()}}


# -- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_of_a_config_mean_the_same(name: str) -> None:
    config, _ = variant(name)
    assert from_hf(config) == from_hf(old_style(config))


@pytest.mark.parametrize(
    ("family", "key", "how"),
    [(f, k, "missing") for f in VARIANTS for k in (*NULLABLE, "tie_word_embeddings")]
    + [(f, k, "null") for f in VARIANTS for k in NULLABLE if (k, f) not in WITHOUT_NULL],
)
def test_a_key_that_is_left_out_or_null_means_what_transformers_takes_it_for(
    tmp_path: Path, family: str, key: str, how: str
) -> None:
    config, _ = random_hf(family, 0, num_attention_heads=32, num_key_value_heads=4, hidden_size=128)
    config.pop(key, None)
    if how == "null":
        config[key] = None
    config.pop("layer_types", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), read_config(tmp_path)
    assert ours.kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 128 // 32)
    assert ours.tied == theirs.tie_word_embeddings
    assert ours.windows == (getattr(theirs, "sliding_window", None),) * 2


def test_a_model_is_as_large_as_its_reference_says() -> None:
    for name in NAMES:
        config, model = variant(name)
        assert from_hf(config).parameters == sum(p.numel() for p in model.parameters()), name


def test_gguf_metadata_means_the_same_model_as_config_json() -> None:
    tensors = {"output.weight"}
    assert from_gguf(gguf(), tensors) == from_hf(llama()).__class__(
        **{**vars(from_hf(llama())), "interleaved_weights": True}
    )
    assert from_gguf(gguf(), set()).tied
    assert from_gguf(gguf("qwen2"), {"blk.0.attn_q.bias"}).qkv_bias
    assert from_gguf(gguf("qwen3", **{"attention.key_length": 32}), set()).head_dim == 32
    assert from_gguf(gguf("qwen3"), set()).qk_norm
    words = gguf(**{"vocab_size": None}) | {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert from_gguf(words, set()).vocab_size == 3


def test_mistral_small_in_gguf_has_ministrals_name_and_all_of_its_context() -> None:
    config = from_gguf(gguf("mistral3", **{"attention.key_length": 32}), {"output.weight"})
    assert (config.family, config.max_positions, config.limit_reason) == ("ministral3", 512, "")
    assert config == replace(from_gguf(gguf(**{"attention.key_length": 32}), {"output.weight"}), family="ministral3")


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", sorted(NEEDED))
def test_a_config_without_a_needed_key_names_it(key: str) -> None:
    config = llama()
    del config[key]
    with pytest.raises(hw.BadModelFile, match=key):
        from_hf(config)


@pytest.mark.parametrize("key", [k for k in gguf() if k not in ("llama.attention.head_count_kv",)])
def test_metadata_without_a_needed_key_names_it(key: str) -> None:
    metadata = gguf()
    del metadata[key]
    with pytest.raises(hw.BadModelFile, match=key.split(".", 1)[1]):
        from_gguf(metadata, set())


@pytest.mark.parametrize("name", ["BloomForCausalLM", "MambaForCausalLM", "", "llama"])
def test_an_unknown_architecture_is_refused_with_the_list_of_those_supported(name: str) -> None:
    with pytest.raises(hw.UnsupportedModel) as error:
        from_hf(llama(architectures=[name]))
    assert repr(name) in str(error.value)
    for family in FAMILIES:
        assert all(architecture in str(error.value) for architecture in family.architectures)
    with pytest.raises(hw.UnsupportedModel, match=r"'bloom' is not supported; supported are .*llama, .*olmo2.*, qwen3"):
        from_gguf(gguf("bloom"), set())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": [["LlamaForCausalLM"]]}, hw.BadModelFile, "architectures is .* a list with one name"),
        ({"architectures": []}, hw.BadModelFile, r"architectures is \[\]"),
        ({"architectures": ["A", "B"]}, hw.BadModelFile, "one name"),
        ({"hidden_act": "gelu"}, hw.Unsupported, "'gelu'.*silu"),
        ({"vocab_size": 0}, hw.BadModelFile, "vocab_size is 0"),
        ({"vocab_size": 1 << 63}, hw.BadModelFile, f"{1 << 63}"),
        ({"num_attention_heads": 0}, hw.BadModelFile, "num_attention_heads is 0"),
        ({"num_key_value_heads": 3}, hw.BadModelFile, "4 heads cannot share 3"),
        ({"num_hidden_layers": 100_000}, hw.BadModelFile, "100000"),
        ({"head_dim": 7}, hw.BadModelFile, "7 rotated dimensions; it must be an even number"),
        ({"max_position_embeddings": 0}, hw.BadModelFile, "max_positions is 0"),
        ({"max_position_embeddings": -5}, hw.BadModelFile, "-5"),
        ({"rms_norm_eps": -1.0}, hw.BadModelFile, r"epsilon is -1\.0"),
        ({"rms_norm_eps": float("nan")}, hw.BadModelFile, "rms_norm_eps is nan"),
        ({"rms_norm_eps": "1e-5"}, hw.BadModelFile, "'1e-5'.*finite number"),
        ({"vocab_size": 97.0}, hw.BadModelFile, r"97\.0.*it must be an integer"),
        ({"tie_word_embeddings": 1}, hw.BadModelFile, "true or false"),
        ({"rope_theta": 1.0}, hw.BadModelFile, "theta"),
        ({"rope_scaling": [1]}, hw.BadModelFile, "object"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, hw.Unsupported, "'dynamic'.*default, linear, llama3"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1}},
            hw.BadModelFile,
            "original_max_position_embeddings is 1; longrope needs at least 2",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1e308}},
            hw.BadModelFile,
            "mscale_all_dim is 1e.308; its size must be at most",
        ),
        ({"rope_scaling": {"rope_type": "longrope"}}, hw.BadModelFile, "short_factor is None"),
        ({"rope_scaling": {"type": "linear"}}, hw.BadModelFile, "'factor'"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, hw.BadModelFile, "factor is 0"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}},
            hw.BadModelFile,
            "original_max_position_embeddings is 0",
        ),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            hw.BadModelFile,
            "low_freq_factor 4.0 must not be above high_freq_factor 1.0",
        ),
        ({"partial_rotary_factor": 1.5}, hw.BadModelFile, "partial_rotary_factor is 1.5"),
        (
            {"partial_rotary_factor": 0.5},
            hw.Unsupported,
            "partial_rotary_factor is 0.5; this family rotates whole heads",
        ),
        ({"architectures": ["PhiForCausalLM"], "partial_rotary_factor": 0.2}, hw.BadModelFile, "3 rotated dimensions"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(changes: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_hf(llama(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention.sliding_window": -4}, "sliding window is -4"),
        ({"attention.value_length": 8}, "another size"),
        ({"rope.dimension_count": 64}, "64 dimensions are rotated; a head has 16"),
        ({"rope.scaling.type": "longrope"}, "'longrope', and the file has no 'rope_factors_short.weight'"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_attn_factor": 1.3}, "1.3"),
        ({"rope.scaling.attn_factor": 0.8}, "attn_factor is 0.8"),
        ({"attention.head_count_kv": [2, 1]}, r"\[2, 1\].*different numbers of key heads"),
        ({"context_length": 0}, "max_positions is 0"),
    ],
)
def test_metadata_that_cannot_be_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hw.HeadwayError, match=message):
        from_gguf(gguf(**changes), set())


def only_our_errors(read: Any, *arguments: Any) -> None:
    try:
        config = read(*arguments)
    except hw.HeadwayError:
        return
    assert isinstance(config, ModelConfig)


@pytest.mark.parametrize(
    "key", [*llama(), "head_dim", "rope_theta", "partial_rotary_factor", "rope_scaling", "hidden_act"]
)
def test_a_nasty_value_anywhere_gives_a_config_or_one_of_our_errors(key: str) -> None:
    for value in NASTY:
        only_our_errors(from_hf, llama(**{key: value}))


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_a_nasty_rope_value_gives_a_config_or_one_of_our_errors(kind: str) -> None:
    from headway.kernels.host.rope import frequencies

    whole = {
        **{"rope_type": kind, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "beta_fast": 32.0},
        **{"beta_slow": 1.0, "original_max_position_embeddings": 256, "attention_factor": 1.0, "mscale": 1.0},
        **{"mscale_all_dim": 1.0, "truncate": True, "rope_theta": 10000.0},
    }
    for key in whole:
        for value in NASTY:
            try:
                config = from_hf(llama(rope_parameters=whole | {key: value}))
            except hw.HeadwayError:
                continue
            if config.head_dim <= 64:
                assert np.isfinite(frequencies(config.rope)).all(), (key, value)


@pytest.mark.parametrize("architecture", ["MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    "key", ["sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "attention_bias"]
)
def test_nasty_windows_give_a_config_or_one_of_our_errors(architecture: str, key: str) -> None:
    whole = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1, "architectures": [architecture]}
    for value in [*NASTY, [["a"], {}], ["full_attention"], ["full_attention", "chunked_attention"]]:
        only_our_errors(from_hf, llama(**whole | {key: value}))


@pytest.mark.parametrize(
    "key", [k.removeprefix("llama.") for k in gguf() if k.startswith("llama.")] + ["rope.scaling.type"]
)
def test_nasty_metadata_gives_a_config_or_one_of_our_errors(key: str) -> None:
    for value in NASTY:
        only_our_errors(from_gguf, gguf(**{key: value}), {"output.weight"})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = [*llama(), "head_dim", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"]


@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from([f.architectures[0] for f in FAMILIES]), st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3)
)
def test_any_json_gives_a_config_or_one_of_our_errors(architecture: str, changes: dict[str, Any]) -> None:
    only_our_errors(from_hf, llama(architectures=[architecture]) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[]", "holds a list"),
        ("[" * 100_000, "is not valid JSON"),
        ("\xff", "is not valid JSON"),
    ],
)
def test_a_config_file_that_is_no_json_object_is_refused_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(hw.BadModelFile, match=rf"config\.json.*{message}"):
        read_config(tmp_path)


def test_a_folder_without_a_config_says_so(tmp_path: Path) -> None:
    with pytest.raises(hw.BadModelFile, match=r"has no config\.json"):
        hw.Engine(tmp_path)


def test_a_gguf_file_that_leaves_out_its_vocabulary_size_has_as_many_as_tokens() -> None:
    """Many strings stay as they lie in the file, and are not a list."""
    words = Strings(b"".join((1).to_bytes(8, "little") + b"a" for _ in range(1500)), 1500)
    sizes = {"block_count": 2, "embedding_length": 64, "attention.head_count": 4, "feed_forward_length": 96}
    sizes |= {"context_length": 128, "attention.layer_norm_rms_epsilon": 1e-5}
    metadata = {"general.architecture": "llama", "tokenizer.ggml.tokens": words}
    assert from_gguf(metadata | {f"llama.{k}": v for k, v in sizes.items()}, set()).vocab_size == 1500
