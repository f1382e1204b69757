"""Quantized decoders on a CUDA device, through the engine, against torch on the CPU with the same weights as floats.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import headway as hw
from headway.models.decoder import Decoder
from headway.testing import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V = 97
FEW = 64  # rows that are multiplied by quantized weights
LIMIT = 5e-3  # rows go into products in float16
FLIPPED = 2e-2  # or in fp8, where a number in the middle of two may go either way
DRIFTED = 0.12  # and in other kernels' sums many do, layer after layer: the mean difference against the logits' spread
KINDS = pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen2", pytest.param("qwen3", marks=pytest.mark.slow)])


def pair(family: str, kind: str, dtype: str = "float32", hidden: int = 512) -> tuple[Decoder, Decoder]:
    """A quantized decoder, and one of the same weights in float32, which takes rows as the format has them."""
    from headway.kernels.triton.quantized import as_kind
    from headway.models.quantized.cuda import quantize_decoder
    from headway.models.quantized.reference import float_decoder

    def drawn(dtype: str) -> Decoder:
        sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "heads": 8, "kv_heads": 4, "head_dim": 64}
        whole = random_model(family, device="cuda", dtype=dtype, **sizes)
        return quantize_decoder(whole, as_kind(kind))

    in_float = drawn("float32")
    return (in_float if dtype == "float32" else drawn(dtype)), float_decoder(in_float)


@contextmanager
def on_torch(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> Iterator[hw.Engine]:
    """An engine whose matmuls are torch's, on the CPU."""
    with monkeypatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", "off")
        engine = hw.Engine(decoder, pages=400, device="cpu")
    with engine:
        assert engine.info.runner == "torch"
        yield engine


def prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(count)
    return [rng.integers(0, V, 3 + i % 20).tolist() for i in range(count)]


async def all_logits(engine: hw.Engine, count: int) -> list[np.ndarray]:
    """Logits of so many sequences' prompts, row by row, and of three single tokens after each of them."""

    async def one(prompt: list[int]) -> np.ndarray:
        async with engine.context() as context:
            rows = []
            for tokens in (prompt, [1], [2], [3]):
                forward = context.forward().input(tokens)
                handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
                out = await forward.execute()
                rows += [out.logits(h) for h in handles]
            return np.stack(rows)

    return list(await asyncio.gather(*(one(p) for p in prompts(count))))


def alike(found: list[np.ndarray], expected: list[np.ndarray], kind: str) -> None:
    """Equal as far as sums of another order are."""
    if kind != "fp8":
        near(found, expected)
        return
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).mean() <= DRIFTED * other.std()


def near(found: list[np.ndarray], expected: list[np.ndarray], limit: float = LIMIT) -> None:
    for one, other in zip(found, expected, strict=True):
        assert np.abs(one - other).max() <= limit * max(1.0, np.abs(other).max())


@KINDS
@FAMILIES
@pytest.mark.parametrize(
    ("graphs", "hidden"),
    [(True, 512), *(pytest.param(*some, marks=pytest.mark.slow) for some in ((True, 160), (False, 224)))],
)
def test_logits_are_those_of_the_same_weights_as_floats(
    kind: str, family: str, graphs: bool, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized, floats = pair(family, kind, hidden=hidden)
    with hw.Engine(quantized, pages=400) as engine, on_torch(floats, monkeypatch) as plain:
        engine._loop._runner._graphs.enabled = graphs  # type: ignore[attr-defined]
        for count in (1, 3, 16, 40, 100):
            expected = plain.run(all_logits, count)
            alike(engine.run(all_logits, count), expected, kind)
            alike(engine.run(all_logits, count), expected, kind)  # captured by now


@KINDS
def test_a_row_is_the_same_alone_and_among_any_number(kind: str) -> None:
    quantized, _ = pair("llama", kind)
    with hw.Engine(quantized, pages=400) as engine:
        for count in (3, 16, 40, 100):
            among = engine.run(all_logits, count)
            for i in (0, count // 2, count - 1):

                async def alone(engine: hw.Engine, i: int = i, count: int = count) -> list[np.ndarray]:
                    async with engine.context() as context:
                        forward = context.forward().input(prompts(count)[i])
                        handle = forward.probe(-1, hw.Logits())
                        return [(await forward.execute()).logits(handle)]

                # Many rows are multiplied as floats, and are not rounded to float16 first.
                many = sum(map(len, prompts(count))) > FEW
                limit = FLIPPED if kind == "fp8" else LIMIT if many else 1e-5
                near(engine.run(alone), [among[i][-4]], limit)


@KINDS
def test_deterministic_rows_do_not_depend_on_their_number(kind: str) -> None:
    quantized, _ = pair("llama", kind)
    with hw.Engine(quantized, pages=400, deterministic=True) as engine:
        whole = engine.run(all_logits, 40)

        async def alone(engine: hw.Engine, i: int) -> np.ndarray:
            async with engine.context() as context:
                forward = context.forward().input(prompts(40)[i])
                handles = [forward.probe(j, hw.Logits()) for j in range(len(prompts(40)[i]))]
                out = await forward.execute()
                return np.stack([out.logits(h) for h in handles])

        for i in (0, 7, 39):
            assert np.array_equal(engine.run(alone, i), whole[i][:-3])


@KINDS
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_models_of_sixteen_bits_are_near(kind: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, floats = pair("llama", kind, dtype)
    with hw.Engine(quantized, pages=400) as engine, on_torch(floats, monkeypatch) as plain:
        for count in (1, 16, 100):
            for one, other in zip(engine.run(all_logits, count), plain.run(all_logits, count), strict=True):
                assert np.abs(one - other).mean() <= 0.15 * other.std()


@KINDS
def test_hidden_states_and_attention_are_read_from_coded_decoders(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, floats = pair("qwen3", kind)

    async def look(engine: hw.Engine) -> list[np.ndarray]:
        async with engine.context() as context:
            forward = context.forward().input(list(range(9)))
            hidden, scores = forward.probe(4, hw.Hidden(1)), forward.probe(8, hw.AttentionScores(1))
            out = await forward.execute()
            return [out.hidden(hidden), out.attention(scores)]

    with hw.Engine(quantized, pages=40) as engine, on_torch(floats, monkeypatch) as plain:
        near(engine.run(look), plain.run(look), 0.15 if kind == "fp8" else 1e-2)
