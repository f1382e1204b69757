"""Experts of GGUF files that stay quantized on a device have the numbers of their files, kind by kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from headway.cli.facts import read_model
from headway.cli.memory_fit import weights_with_experts
from headway.models.described import bytes_of
from headway.models.files.dequant import block_parts, dequantize
from headway.models.files.gguf import KINDS
from headway.models.files.weights import open_weights
from headway.models.quantized.fp4 import Fp4Experts
from headway.models.quantized.int_experts import IntExperts
from headway.models.quantized.write import quantize_model
from headway.models.weights.kept_forms import FORMS, kept_weights
from headway.models.weights.load_tensors import load_model
from headway.models.weights.roles import Roles
from support.gguf_families import write_family
from support.gguf_files import random_bytes
from support.hf import save_hf
from support.hf_families import family_model

ROLES = {"gate_up": ("gate", "up"), "down": ("down",)}


def written(folder: Path, kind: str) -> Path:
    """A file with experts in a kind, or in those that a mix has."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 1, "num_experts": 3, "head_dim": 64}
    _, model = family_model("qwen3-moe", seed=3, **sizes)
    path = folder / f"{kind}.gguf"
    if kind in ("TQ1_0", "TQ2_0"):
        return write_family(path, save_hf(folder / "whole", model), model, kind=kind)
    quantize_model(save_hf(folder / "whole", model), kind, path)
    return path


KINDS_OF_FILES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "TQ1_0")


@pytest.mark.parametrize("kind", KINDS_OF_FILES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_experts_have_the_numbers_of_the_file(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    path = written(tmp_path, kind)
    decoder: Any = load_model(path, dtype=dtype, device=torch.device("cpu"), keep_experts=True)
    with open_weights(path) as weights:
        sizes = kept_weights(Roles.of(path, decoder.config, weights), str(dtype)[6:])
        for name, roles in ROLES.items():
            names = [f"blk.0.ffn_{role}_exps.weight" for role in roles]
            floats = np.concatenate([weights.array(each).reshape(3, 256, 256) for each in names], 1)
            kept = getattr(decoder.layers[0], name)
            assert isinstance(kept, IntExperts)
            assert kept.form == FORMS[weights.stored(names[0])]
            assert torch.equal(kept.weight, torch.from_numpy(floats).to(dtype))
            assert kept.nbytes == sum(sizes[each][1] for each in names)


@pytest.mark.parametrize("kind", sorted(FORMS.keys() - {"MXFP4"}))
def test_parts_of_blocks_fit_their_form(kind: str) -> None:
    """As random blocks have them, of which any bit may be set."""
    raw = torch.from_numpy(random_bytes(kind, 4, 512).reshape(-1))
    parts, form = block_parts(kind, raw), FORMS[kind]
    expected = gguf.quants.dequantize(raw.numpy().reshape(4, -1), gguf.GGMLQuantizationType[kind])
    assert torch.equal(parts.values().reshape(4, 512), torch.from_numpy(expected))
    assert torch.equal(dequantize(kind, raw, (4, 512), torch.float32), parts.values().reshape(4, 512))
    assert int(parts.quants.max()) < (16 if form.kind == "int4" else 256)
    assert (parts.steps is not None) == form.steps
    assert (parts.minimum is not None) == form.minimum
    if parts.steps is not None:
        assert parts.steps.shape[1] == KINDS[kind].block // form.group


def test_mxfp4_becomes_floats_in_float16_alone(tmp_path: Path) -> None:
    _, model = family_model("gpt-oss", seed=3, intermediate_size=32, num_hidden_layers=1)
    path = write_family(tmp_path / "m.gguf", save_hf(tmp_path / "whole", model), model, kind="MXFP4")
    for dtype, is_kept in ((torch.bfloat16, True), (torch.float16, False)):
        decoder: Any = load_model(path, dtype=dtype, device=torch.device("cpu"), keep_experts=True)
        assert isinstance(decoder.layers[0].down, Fp4Experts) == is_kept


def test_a_report_says_which_experts_stay_so(tmp_path: Path) -> None:
    path = written(tmp_path, "Q4_K_M")
    assert "experts in Q4_K, Q6_K stay so on a CUDA device" in read_model(path).in_memory
    decoder: Any = load_model(path, dtype=torch.bfloat16, device=torch.device("cpu"), keep_experts=True)
    fit = weights_with_experts(path, "bfloat16", 2)
    assert fit is not None
    assert (fit.bytes, fit.format) == (pytest.approx(bytes_of(decoder), rel=0.001), "Q4_K, Q6_K, bfloat16")
