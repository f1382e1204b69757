"""GGUF files as llama.cpp computes them: its logits on the files that tests write, F32 tensors and KV cache.

Needs a Python with llama-cpp-python in HEADWAY_TEST_LLAMA_PYTHON; `make test-all` builds one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import headway as hw
from headway.models.quantized.write import quantize_model
from headway.text.gguf_metadata import gguf_metadata
from headway.text.gguf_vocab import PRE_TOKENIZERS, PreTokenizer
from support.checks import all_logits, random_tokens
from support.gguf_deepseek import FILES, write_deepseek
from support.gguf_families import write_family
from support.gguf_files import write_gguf
from support.gguf_recurrent import recurrent_model, write_recurrent
from support.hf import build_hf, random_hf, save_hf
from support.hf_families import CASES, family_model
from support.quantized_files import mxfp4
from support.tokenizer_folders import byte_level, pieces

PYTHON = os.environ.get("HEADWAY_TEST_LLAMA_PYTHON") or None
SCRIPT = Path(__file__).parents[1] / "support" / "llama_logits.py"
NEAR = 1e-4  # of the largest logit
TABLED = 2e-3  # the same where llama.cpp takes gelu from a table of float16
GELU = ("gemma", "gpt2", "gpt-neox", "falcon", "starcoder2")  # families with it
LOUD = {"gemma4-experts": 0.01, "gemma3n-published": 0.01}  # where later layers make more of that
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="HEADWAY_TEST_LLAMA_PYTHON names no Python with llama-cpp-python"),
]
FAMILIES = (
    *("gemma", "gemma2-head-scale", "gemma3-pattern", "phi3", "phi3-partial", "olmo2", "smollm3-every-fourth"),
    *("granite", "granite-moe", "cohere2-pattern", "stablelm", "stablelm-parallel-normed", "gpt2", "gpt-neox"),
    *("gpt-neox-serial", "falcon", "falcon-new", "starcoder2", "glm4", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe"),
    *(
        "gpt-oss",
        "llama4-published",
        "phi",
        "glm",
        "phi3-longrope",
        "ministral3",
        "olmo3",
        "gemma3n-published",
        "gemma4",
        "gemma4-experts",
        "gemma4-even",
    ),
)
# Values as wide as keys, and no biases of state-space layers: llama.cpp has no others.
WIDTHS = {"linear_value_head_dim": 8}
RECURRENT: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3-next-plain", "qwen3.5", "qwen3.5-moe"), WIDTHS),
    **{name: {} for name in ("lfm2", "mamba2", "mamba2-groups", "granite-hybrid")},
    "granite-hybrid-dense": {"mamba_proj_bias": False},
}
# Left out, as llama.cpp may not compute it as transformers does: the windows of three families, and yarn, of which it
# rounds the range that is blended, which GPT-OSS does not. And what its files do not have: biases, or a model without
# them, OLMoE with fewer heads of keys, other sizes of Gemma 3n than the published ones (and the deviation that decides
# which activations stay is of a sample there, which narrow layers show), layers of Gemma 4 that share keys and values
# with another than the last one but one, and logits without a cap.
LONG = {"original_max_position_embeddings": 512}  # as many positions as llama.cpp is asked for here: short factors
DIFFERENT: dict[str, dict[str, Any]] = {
    "phi3-longrope": {**LONG, "rope_parameters": CASES["Phi3"]["phi3-longrope"]["rope_parameters"] | LONG},
    "gpt-neox-serial": {"attention_bias": True},
    "cohere2-pattern": {"attention_bias": False},
    "falcon-new": {"bias": False},
    "olmoe": {"num_key_value_heads": 4},
    **{name: {"sliding_window": None} for name in ("phi3", "starcoder2", "mixtral")},
    "gemma3n-published": {
        "hidden_size_per_layer_input": 256,
        "intermediate_size": 8192,
        "activation_sparsity_pattern": [0.95] * 6,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
    },
    "gemma4": {"num_kv_shared_layers": 2},
    "gemma4-experts": {"final_logit_softcapping": 6.0},
    "gemma4-even": {"final_logit_softcapping": 6.0},
    "gpt-oss": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}


def llama_logits(path: Path, tokens: list[int]) -> np.ndarray:
    out = path.with_suffix(".npy")
    _run(SCRIPT, path, ",".join(map(str, tokens)), out)
    return np.load(out)


def _run(script: Path, *arguments: object) -> None:
    command = [str(PYTHON), str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def near(name: str) -> float:
    if name in LOUD:
        return LOUD[name]
    return TABLED if name.startswith(GELU) or name == "phi" else NEAR


def assert_near(ours: np.ndarray, theirs: np.ndarray, share: float = NEAR) -> None:
    assert np.abs(ours - theirs[:, : ours.shape[1]]).max() <= share * max(1, np.abs(theirs).max())


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_plain_families(arch: str, tmp_path: Path) -> None:
    _, model = random_hf(arch, 2)
    path, tokens = write_gguf(tmp_path / "m.gguf", model, metadata=_no_vocabulary), random_tokens(97, 40)
    with hw.Engine(path, pages=8, threads=1) as engine:
        assert_near(all_logits(engine, tokens), llama_logits(path, tokens))


@pytest.mark.parametrize("name", FAMILIES)
def test_other_families(name: str, tmp_path: Path) -> None:
    _, model = family_model(name, seed=3, **DIFFERENT.get(name, {}))
    path = write_family(tmp_path / "m.gguf", save_hf(tmp_path, model), model, metadata=_no_vocabulary)
    tokens = random_tokens(97, 40)
    with hw.Engine(path, pages=8, threads=2) as engine:
        assert_near(all_logits(engine, tokens), llama_logits(path, tokens), near(name))


@pytest.mark.parametrize("name", RECURRENT)
def test_families_with_recurrent_layers(name: str, tmp_path: Path) -> None:
    model = recurrent_model(name, **RECURRENT[name])
    path, tokens = tmp_path / "m.gguf", random_tokens(97, 40)
    write_recurrent(path, save_hf(tmp_path, model), model, metadata=_no_vocabulary)
    with hw.Engine(path, pages=8, threads=2) as engine:
        assert_near(all_logits(engine, tokens), llama_logits(path, tokens), near(name))


# llama.cpp takes groups of DeepSeek V2 as V3's, and wants queries with a rank.
@pytest.mark.parametrize(
    ("name", "changes"),
    [("deepseek-v3-yarn", {}), ("deepseek-v2-yarn", {"n_group": 1, "topk_group": 1, "topk_method": "greedy"})],
)
def test_families_with_latent_attention(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    kind, config = FILES[name]
    _, model = build_hf(f"{kind}Config", f"{kind}ForCausalLM", config | changes, 3)
    path, tokens = tmp_path / "m.gguf", random_tokens(97, 40)
    write_deepseek(path, save_hf(tmp_path, model), model, metadata=_no_vocabulary)
    with hw.Engine(path, pages=8, threads=2) as engine:
        assert_near(all_logits(engine, tokens), llama_logits(path, tokens))


MADE = ("gemma3-pattern", "phi3-partial", "gpt2", "granite-moe", "falcon", "deepseek-v3-yarn", *RECURRENT)
MADE += ("gemma3n-published", "gemma4", "gemma4-experts", "gemma4-even")


@pytest.mark.parametrize("name", MADE)
def test_files_that_are_made_of_folders(name: str, tmp_path: Path) -> None:
    if name in FILES:
        kind, config = FILES[name]
        model = build_hf(f"{kind}Config", f"{kind}ForCausalLM", config, 3)[1]
    else:
        model = recurrent_model(name, **(RECURRENT | DIFFERENT).get(name, {}))
    path, tokens = tmp_path / "out.gguf", random_tokens(97, 40)
    quantize_model(save_hf(tmp_path, model), "F32", path, vocabulary={"tokenizer.ggml.model": "no_vocab"})
    with hw.Engine(path, pages=8, threads=2) as engine:
        assert_near(all_logits(engine, tokens), llama_logits(path, tokens), near(name))


def test_experts_that_stay_in_mxfp4(tmp_path: Path) -> None:
    every = {"num_experts_per_tok": 5}  # none is chosen instead of another for activations in 8 bits
    _, model = family_model("gpt-oss", seed=3, intermediate_size=64, **DIFFERENT["gpt-oss"], **every)
    mxfp4(tmp_path / "folder", model)
    path, tokens = tmp_path / "out.gguf", random_tokens(97, 40)
    quantize_model(tmp_path / "folder", "Q8_0", path, vocabulary={"tokenizer.ggml.model": "no_vocab"})
    with hw.Engine(path, pages=8, threads=2, dtype="float32") as engine:
        assert_near(all_logits(engine, tokens), llama_logits(path, tokens), 0.08)


@pytest.mark.parametrize("to", ["Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q4_0", "Q8_0"])
def test_quantized_files_are_read_by_llama_cpp(to: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    _, model = random_hf("llama", 2, **sizes)
    source = write_gguf(tmp_path / "m.gguf", model, metadata=_no_vocabulary)
    quantize_model(source, to, tmp_path / "out.gguf")
    tokens = random_tokens(97, 20)
    theirs = llama_logits(tmp_path / "out.gguf", tokens)
    with hw.Engine(tmp_path / "out.gguf", pages=8, threads=1, dtype="float32") as engine:
        assert_near(all_logits(engine, tokens), theirs, 0.08)  # it quantizes activations; of K kinds 256 in a group


TEXTS = (
    "def test(): 12345",
    "Ünïcödé 🙂 it's\n\n  IT'S DON'T",
    "a  b   c\t\td",
    "日本語 中文 ١٢٣ ½",
    "x" * 50 + " 9876",
)
RULES = ("gpt-2", "llama-bpe", "qwen2", "qwen35", "gpt-4o", "tekken", "deepseek-v3", "deepseek-llm", "command-r")


@pytest.mark.parametrize("kind", [*RULES, "pieces", "pieces-prefixed"])
def test_tokenizers_of_folders(kind: str, tmp_path: Path) -> None:
    _, model = random_hf("llama", 1, vocab_size=430)
    folder, path = save_hf(tmp_path, model), tmp_path / "out.gguf"
    if kind in RULES:
        byte_level(folder, kind)
    else:
        pieces(folder, prefix=kind == "pieces-prefixed")
    quantize_model(folder, "F32", path, vocabulary=gguf_metadata(folder, 430))
    texts = [*TEXTS, Path(__file__).read_text()[:2000]]
    if not PRE_TOKENIZERS.get(kind, PreTokenizer(())).nfc:  # llama.cpp composes no characters
        texts.append("e\u0301")
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    _run(SCRIPT.with_name("llama_ids.py"), path, tmp_path / "texts.json", tmp_path / "ids.json")
    with hw.Engine(path, pages=8, threads=1) as engine:
        for text, ids in zip(texts, json.loads((tmp_path / "ids.json").read_text()), strict=True):
            assert engine.tokenizer.encode(text) == ids, text


def _no_vocabulary(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("no_vocab")
