"""Layers that are not Llama's on a CUDA device: the Triton kernels in graphs against torch on the same device.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.kernels.host.expert_form import FP4, ExpertForm
from headway.models.description import Description, Experts
from headway.models.quantized.fp4 import Fp4Experts
from headway.models.quantized.int_experts import GroupedMatrix, IntExperts
from headway.testing import random_adapter, random_model

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.checks import logit_rows
from support.descriptions import ALL, EXPERTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V = 97


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))


def draw(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


async def rows_of(engine: hw.Engine, tokens: list[int], cuts: list[int], mask: Any = None) -> np.ndarray:
    """The logits of every row of a prompt that is computed in pieces."""
    async with engine.context() as context:
        rows = []
        for start, stop in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
            forward = context.forward().input(tokens[start:stop])
            if mask is not None:
                forward.attention_mask(mask)
            handles = [forward.probe(i, hw.Logits()) for i in range(stop - start)]
            out = await forward.execute()
            rows += [out.logits(h) for h in handles]
        return np.stack(rows)


def open_engine(name: str, mode: str, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32", **options: Any) -> Any:
    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    engine = hw.Engine(random_model(device="cuda", dtype=dtype, **ALL[name]), device="cuda", pages=300, **options)
    assert engine.info.runner == ("torch" if mode == "off" else "triton")
    return engine


def near(found: np.ndarray, expected: np.ndarray, limit: float = 1e-4) -> None:
    assert np.abs(found - expected).max() <= limit * max(1.0, np.abs(expected).max())


@pytest.mark.parametrize("name", ALL)
def test_logits_are_those_of_torch_however_rows_arrive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = draw(50)
    attend = np.tril(np.ones((50, 50), bool))
    attend[:, [3, 4, 17]] = False
    attend[np.arange(50), np.arange(50)] = True
    mask = hw.Mask.from_bool(attend)
    with open_engine(name, "off", monkeypatch) as engine:
        expected, masked = engine.run(rows_of, tokens, []), engine.run(rows_of, tokens, [], mask)
    with open_engine(name, "auto", monkeypatch) as engine:
        for cuts in ([], [1], [16, 33], list(range(1, 50))):
            for _ in range(2):  # launched, then captured
                engine.cache.clear()
                near(engine.run(rows_of, tokens, cuts), expected)
        near(engine.run(rows_of, tokens, [], mask), masked)


@pytest.mark.parametrize("name", ALL)
def test_many_sequences_decode_as_on_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of every padded size, in graphs, prompts of several lengths beside each other."""

    async def all_of_them(engine: hw.Engine, count: int) -> list[list[int]]:
        async def one(i: int) -> list[int]:
            async with engine.context() as context:
                prompt = draw(3 + 7 * (i % 5), i)
                return await context.fill(prompt).generate(hw.Argmax(), max_tokens=6, stop_only=True).tokens()

        return list(await asyncio.gather(*(one(i) for i in range(count))))

    with open_engine(name, "off", monkeypatch) as engine:
        expected = {count: engine.run(all_of_them, count) for count in (1, 5, 40)}
    with open_engine(name, "auto", monkeypatch) as engine:
        for count, tokens in expected.items():
            for _ in range(2):
                assert engine.run(all_of_them, count) == tokens
        assert len(engine._loop._runner.captured) > 3


@pytest.mark.parametrize("name", ALL)
def test_long_prompts_and_bfloat16_are_near_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of an expert, segments on the matrix units, and the type that models are run in."""
    tokens = draw(120, 1)
    for dtype, limit in (("float32", 1e-4), ("bfloat16", 0.1)):
        found = []
        for mode in ("off", "auto"):
            with open_engine(name, mode, monkeypatch, dtype) as engine:
                found.append(engine.run(rows_of, tokens, [100]))
        if dtype == "float32":
            near(found[1], found[0], limit)
        else:  # a row whose experts are decided by rounding may differ
            away = np.abs(found[1] - found[0]).mean(1)
            assert np.median(away) <= limit * np.abs(found[0]).max()


@pytest.mark.parametrize("name", ALL)
def test_deterministic_rows_do_not_depend_on_their_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = draw(80, 2)
    for dtype in ("float32", "bfloat16"):
        with open_engine(name, "auto", monkeypatch, dtype, deterministic=True) as engine:
            whole = engine.run(rows_of, tokens, [])
            for cuts in ([1, 2, 3], [33, 66], [16]):
                engine.cache.clear()
                assert np.array_equal(engine.run(rows_of, tokens, cuts), whole)


@pytest.mark.parametrize("name", ["norms after, of whole rows of queries, clipped, as OLMo 2", *EXPERTS])
def test_adapters_give_what_torch_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def adapted(engine: hw.Engine) -> np.ndarray:
        roles = engine.capabilities.adapters
        adapter = random_adapter(engine.config, roles=roles)
        async with engine.context() as context:
            rows = []
            for part in (draw(40), draw(1)):
                forward = context.forward().input(part).adapter(adapter)
                handles = [forward.probe(i, hw.Logits()) for i in range(len(part))]
                out = await forward.execute()
                rows += [out.logits(h) for h in handles]
            return np.stack(rows)

    found = []
    for mode in ("off", "auto"):
        with open_engine(name, mode, monkeypatch) as engine:
            found.append(engine.run(adapted))
    near(found[1], found[0])


FORMS = (
    *(FP4, ExpertForm("int4"), ExpertForm("int4", minimum=True), ExpertForm("int8"), ExpertForm("int8", minimum=True)),
    *(ExpertForm(kind, 32, True, True) for kind in ("int4", "int8")),
    *(ExpertForm(kind, 16, True) for kind in ("int4", "int8")),
    ExpertForm("int4", 16, True, True),
    ExpertForm("int8", 32, True),
)


def quantized(form: ExpertForm, shape: torch.Size, dtype: torch.dtype, seed: int) -> Fp4Experts | IntExperts:
    """Experts of any numbers of a form, of about the size that random floats have."""
    count, n, k = shape
    generator, gated = torch.Generator().manual_seed(seed), n > k

    def draw(*size: int, low: int = 0, high: int = 256) -> torch.Tensor:
        return torch.randint(low, high, size, generator=generator).to("cuda", torch.int8 if low < 0 else torch.uint8)

    if form.kind == "fp4":
        return Fp4Experts.of(
            draw(count, n, k // 2), draw(count, n, k // 32, low=122, high=126), None, dtype, gated=gated
        )
    largest = 0.1 / (8 if form.kind == "int4" else 128) / (32 if form.steps else 1)
    matrices = []
    for _ in range(count):
        parts: dict[str, Any] = {}
        for name in ("scale", "minimum")[: 1 + form.minimum]:
            size = n, k // 256 if form.steps else k // form.group
            parts[name] = (torch.rand(*size, generator=generator) * largest).half().to("cuda")
            if form.steps:
                steps = draw(n, k // form.group, low=-32, high=32)
                parts["minimum_steps" if name == "minimum" else "steps"] = steps
        quants = draw(n, k, high=16 if form.kind == "int4" else 256)
        matrices.append(GroupedMatrix(quants, **parts, zero=form.zero))
    return IntExperts.of(form, matrices, dtype, gated=gated)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_quantized_experts_give_what_their_floats_give(
    dtype: str, form: ExpertForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with adapters; and in deterministic mode the same bits, however rows arrive."""
    if form == FP4 and dtype == "float16":
        pytest.skip("it becomes floats there")
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")
    what = Description(sinks=True, experts=Experts(4, 2, 256, router_bias=True, bias=True, clamp=2.0, alpha=1.7))
    sizes = {"hidden_size": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "layers": 2, "description": what}
    floats: Any = random_model(device="cuda", dtype=dtype, **sizes)
    layers, dense = [], []
    for l, layer in enumerate(floats.layers):
        parts: dict[str, Any] = {}
        for name in ("gate_up", "down"):
            matrix = getattr(layer, name)
            kept = quantized(form, matrix.weight.shape, matrix.weight.dtype, l)
            parts[name] = replace(kept, bias=matrix.bias)
        layers.append(replace(layer, **parts))
        dense.append(replace(layer, **{name: part.dense() for name, part in parts.items()}))
    tokens, found = draw(120, 3), []
    adapter = random_adapter(floats.config, roles=("expert_gate", "expert_up", "expert_down"))
    for kept in (layers, dense):
        decoder = replace(floats, layers=tuple(kept))
        with hw.Engine(decoder, device="cuda", pages=64) as engine:
            assert engine.info.runner == "triton"
            rows = [engine.run(rows_of, tokens, cuts) for cuts in ([], [60, 61, 62, 63])]
            with engine.context() as context:
                rows.append(logit_rows(context, tokens[:20], adapter))
            found.append(np.concatenate(rows))
    away, largest = np.abs(found[0] - found[1]).max(1), np.abs(found[1]).max()
    assert np.median(away) <= (1e-4 if dtype == "float32" else 0.1) * largest
    with hw.Engine(replace(floats, layers=tuple(layers)), device="cuda", pages=64, deterministic=True) as engine:
        whole = engine.run(rows_of, tokens, [])
        engine.cache.clear()
        assert np.array_equal(engine.run(rows_of, tokens, [60, 61, 62, 63]), whole)
