"""Deterministic mode in Triton kernels and graphs: a row's bits, whatever shares its step.

Needs a GPU and random models only. Run with `pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.testing import random_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

V = 97
DTYPES = ("float32", "bfloat16", pytest.param("float16", marks=pytest.mark.slow))  # each has kernels of its own
MATES = (2, 7, 40, 130)
Rows = list[np.ndarray]


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


def engine(family: str = "llama", dtype: str = "float32", **config: Any) -> hw.Engine:
    model = random_model(family, dtype=dtype, device="cuda", **config)
    made = hw.Engine(model, device="cuda", pages=3000, deterministic=True)
    assert made.info.runner == "triton"
    return made


async def rows_of(engine: hw.Engine, prompt: Sequence[int], cuts: Sequence[int]) -> Rows:
    """The logits of every row of a prompt that is computed in pieces."""
    async with engine.context() as context:
        found: Rows = []
        for start, stop in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
            forward = context.forward().input(prompt[start:stop])
            handles = [forward.probe(i, hw.Logits()) for i in range(stop - start)]
            out = await forward.execute()
            found += [out.logits(h) for h in handles]
        return found


async def decode(engine: hw.Engine, i: int, steps: int) -> tuple[list[int], Rows]:
    """Tokens drawn one by one after a prompt of its own, and the logits that they were drawn from."""
    async with engine.context() as context:
        context.fill(tokens(3 + 7 * i % 90, i))
        how = hw.Sampling(temperature=0.8 if i % 3 else 0.0, top_p=0.9 if i % 2 else 1.0, seed=i)
        drawn: list[int] = []
        found: Rows = []
        for _ in range(steps):
            forward = context.forward()
            if drawn:
                forward.input(drawn[-1:])
            if i % 4 == 1 and drawn:
                forward.attention_mask(hw.Mask.sink(4, 9))
            token, row = forward.sample([-1], how), forward.probe(-1, hw.Logits())
            out = await forward.execute()
            drawn.append(out.token(token))
            found.append(out.logits(row))
        return drawn, found


async def together(engine: hw.Engine, count: int, steps: int) -> list[tuple[list[int], Rows]]:
    return list(await asyncio.gather(*(decode(engine, i, steps) for i in range(count))))


def equal(found: Rows, expected: Rows) -> bool:
    return len(found) == len(expected) and all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_a_decode_has_the_same_bits_alone_and_among_any_number(family: str, dtype: str) -> None:
    steps = 5  # the first of a size is launched by hand, the second captured, the others replayed
    with engine(family, dtype) as one:
        alone = [one.run(decode, i, steps) for i in range(9)]
        for count in MATES:
            one.cache.clear()
            for (drawn, rows), (token, row) in zip(one.run(together, count, steps), alone, strict=False):
                assert drawn == token
                assert equal(rows, row)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_prompt_has_the_same_bits_in_one_piece_and_token_by_token(family: str, dtype: str) -> None:
    prompt = tokens(150, 0)
    with engine(family, dtype) as one:
        whole = one.run(rows_of, prompt, [])
        for cuts in ([1], [16, 33], [149], list(range(1, 150))):
            one.cache.clear()
            assert equal(one.run(rows_of, prompt, cuts), whole)


def test_a_long_prompt_has_the_bits_of_its_pieces_and_of_recomputation() -> None:
    prompt = tokens(1500, 1)
    with engine(dtype="bfloat16", head_dim=64, max_positions=4096) as one:

        async def last(engine: hw.Engine, cuts: list[int]) -> np.ndarray:
            async with engine.context() as context:
                for start, stop in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
                    context.fill(prompt[start:stop])
                    await context.flush()
                forward = context.forward()
                row = forward.probe(-1, hw.Logits())
                return (await forward.execute()).logits(row)

        whole = one.run(last, [])
        assert np.array_equal(one.run(last, [1000]), whole)  # with pages from the cache
        for cuts in ([64], [700, 1499], list(range(100, 1500, 100))):
            one.cache.clear()
            assert np.array_equal(one.run(last, cuts), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_have_the_bits_of_kernels_launched_by_hand(dtype: str) -> None:
    with engine(dtype=dtype) as graphs, engine(dtype=dtype) as hand:
        hand._loop._runner._graphs.enabled = False  # type: ignore[attr-defined]
        for count in (1, 3, 33):
            for _ in range(2):
                found, expected = graphs.run(together, count, 4), hand.run(together, count, 4)
                assert all(a == b and equal(x, y) for (a, x), (b, y) in zip(found, expected, strict=True))


def test_pages_that_a_mask_leaves_out_change_no_bit() -> None:
    prompt = tokens(200, 4)

    async def seen(engine: hw.Engine, discard: bool) -> np.ndarray:
        async with engine.context() as context:
            await context.fill(prompt).flush()
            if discard:
                context.inner().discard_pages(1, 6)
            forward = context.forward().input([5])
            if not discard:
                there = np.ones((1, 201), bool)
                there[:, 16 : 7 * 16] = False
                forward.attention_mask(hw.Mask.from_bool(there))
            row = forward.probe(0, hw.Logits())
            return (await forward.execute()).logits(row)

    for dtype in ("float32", "bfloat16"):
        with engine(dtype=dtype) as one:
            assert np.array_equal(one.run(seen, True), one.run(seen, False))


def test_a_mate_that_looks_inside_changes_no_bit() -> None:
    async def looking(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as context:
            context.fill(tokens(20, 7))
            forward = context.forward().input([1, 2])
            state, scores = forward.probe(1, hw.Hidden(1)), forward.probe(0, hw.AttentionScores(1))
            forward.probe(1, hw.LogitLens([0, 1], 3))
            out = await forward.execute()
            assert out.attention(scores).shape[0] == 4
            return out.hidden(state)

    async def beside(engine: hw.Engine) -> tuple[np.ndarray, tuple[list[int], Rows]]:
        return tuple(await asyncio.gather(looking(engine), decode(engine, 4, 3)))  # type: ignore[return-value]

    with engine(dtype="bfloat16") as one:
        state, (drawn, rows) = one.run(looking), one.run(decode, 4, 3)
        one.cache.clear()
        among, (token, row) = one.run(beside)
        assert np.array_equal(state, among)
        assert drawn == token
        assert equal(row, rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_generations_draw_the_same_tokens_alone_and_together(dtype: str) -> None:
    async def one(engine: hw.Engine, i: int) -> list[int]:
        async with engine.context() as context:
            how = hw.Multinomial(1.5, seed=i) if i % 2 else hw.TopP(0.95, temperature=1.5, seed=i)
            return await context.fill(tokens(3 + 11 * i % 70, i)).generate(how, max_tokens=40, stop_only=True).tokens()

    async def all_of(engine: hw.Engine) -> list[list[int]]:
        return list(await asyncio.gather(*(one(engine, i) for i in range(50))))

    with engine(dtype=dtype) as made:
        alone = [made.run(one, i) for i in range(0, 50, 7)]
        assert made.run(all_of)[::7] == alone


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
def test_weights_in_codes_give_a_row_its_own_bits_too(kind: Any) -> None:
    from headway.models.quantized.cuda import quantize_decoder

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "heads": 8, "kv_heads": 4, "head_dim": 64}
    model = random_model(dtype="bfloat16", device="cuda", **sizes)
    with hw.Engine(quantize_decoder(model, kind), device="cuda", pages=3000, deterministic=True) as one:
        alone = [one.run(decode, i, 4) for i in range(3)]
        for count in MATES:
            one.cache.clear()
            for (drawn, rows), (token, row) in zip(one.run(together, count, 4), alone, strict=False):
                assert drawn == token
                assert equal(rows, row)
        prompt = tokens(150, 0)
        whole = one.run(rows_of, prompt, [])
        one.cache.clear()
        assert equal(one.run(rows_of, prompt, [1, 9, 26, 100]), whole)


def test_deterministic_values_are_those_of_the_other_mode() -> None:
    prompt = tokens(60, 2)
    with (
        engine("qwen3") as one,
        hw.Engine(random_model("qwen3", device="cuda"), device="cuda", pages=64) as other,
    ):
        found, expected = np.stack(one.run(rows_of, prompt, [20])), np.stack(other.run(rows_of, prompt, [20]))
        assert np.abs(found - expected).max() <= 1e-4 * max(1.0, np.abs(expected).max())
