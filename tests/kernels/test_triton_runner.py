"""Whole engines on the Triton kernels against the same engines on torch: every readout, masks, trims, samplers.

On a GPU captured graphs are compared too; without one the kernels run in Triton's interpreter, on fewer passes.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.base.specs.probes import Ranking  # noqa: E402
from headway.models.weights.update import weight_shapes  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_model  # noqa: E402
from headway.runtime.runners.cuda import runner as cuda_runner  # noqa: E402
from headway.testing import random_model  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
V = 97
FAMILIES = ("llama", "mistral", "qwen2", "qwen3") if DEVICE == "cuda" else ("mistral", "qwen3")
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow
ONE_FAMILY = [FAMILIES[0], *(pytest.param(family, marks=SLOWER) for family in FAMILIES[1:])]
# The interpreter takes its time for every row, head and tile, so there are few of them.
SIZES: dict[str, Any] = (
    {} if DEVICE == "cuda" else {"hidden_size": 32, "intermediate_size": 32, "heads": 2, "kv_heads": 1}
)


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: there is no device to keep busy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_model, "PROGRAMS", 8)


def tokens(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, V, count).tolist()


async def everything(engine: hw.Engine, seed: int) -> tuple[list[np.ndarray], list[int]]:
    """Passes of every kind over one context: numbers to be compared, and the tokens that were drawn."""
    async with engine.context() as ctx:
        forward = ctx.fill(tokens(19, seed)).forward().input(tokens(5, seed + 1))
        rows = [forward.probe(i, hw.Logits()) for i in range(-6, 5)]
        read = [
            forward.probe(2, hw.Distribution(k=7)),
            forward.probe(2, hw.Logprobs([1, 5])),
            forward.probe(1, hw.Entropy()),
            forward.probe(2, hw.Distribution(0.5, masked=True)),
        ]
        ranks = [
            forward.probe(i, Ranking(3, [7], processed=p)) for i, p in ((2, False), (2, True), (0, True), (3, True))
        ]
        drawn = [
            forward.sample([-1, -1, 0], hw.TopP(0.8, seed=seed)),
            forward.sample([2], hw.Sampling(temperature=0.7, repetition_penalty=1.3, logit_bias={3: 2.0}, seed=3)),
            forward.sample([3], hw.Typical(0.7, seed=4)),
        ]
        forward.mask(forbid=list(range(40, 60)))
        out = await forward.execute()
        found: list[Any] = [out.logits(h) for h in rows]
        found += [out.distribution(read[0])[1], out.logprobs(read[1]), np.array(out.entropy(read[2]))]
        found += [part for pair in (out.distribution(read[0]), out.distribution(read[3])) for part in pair]
        for ranked in (out.ranking(h) for h in ranks):
            lines = [(r.id, r.rank, max(r.logprob, -99.0)) for r in (*ranked.drawn, *ranked.ids, *ranked.best)]
            found.append(np.array(lines))
        chosen = [token for handle in drawn for token in out.tokens(handle)]
        assert not {*chosen} & {*range(40, 60)}
        penal = hw.Sampling(temperature=0.9, top_k=20, frequency_penalty=0.4, seed=9)
        chosen += await ctx.generate(penal, max_tokens=3, stop_only=True).tokens()
        ctx.inner().discard_pages(0, 1)
        chosen += await ctx.generate(hw.Argmax(), max_tokens=3, stop_only=True).tokens()
        sparse = np.random.default_rng(seed).random((2, ctx.seq_len + len(ctx.pending) + 2)) < 0.4
        sparse[:, :16] = False
        sparse[np.arange(2), -2 + np.arange(2)] = True
        forward = ctx.forward().input(tokens(2, seed + 2)).attention_mask(hw.Mask.from_bool(sparse))
        last = [forward.probe(0, hw.Logits()), forward.probe(1, hw.Logits()), forward.probe(1, hw.Hidden(1))]
        scores = forward.probe(1, hw.AttentionScores(1))
        lens, final = forward.probe(0, hw.LogitLens([1, 2], 3)), forward.probe(0, hw.Hidden(2))
        out = await forward.execute()
        found += [out.logits(last[0]), out.logits(last[1]), out.hidden(last[2]), out.attention(scores)]
        found += [part for pair in out.lens(lens) for part in pair] + [out.hidden(final)]
        return found, chosen


async def several(engine: hw.Engine, seeds: range) -> list[tuple[list[np.ndarray], list[int]]]:
    return list(await asyncio.gather(*(everything(engine, seed) for seed in seeds)))


def run(monkeypatch: pytest.MonkeyPatch, mode: str, family: str, seeds: range, **options: Any) -> list[Any]:
    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    with hw.Engine(random_model(family, device=DEVICE, **SIZES, **options), pages=64, threads=1) as engine:
        assert engine.info.runner == ("torch" if mode == "off" else "triton")
        return engine.run(several, seeds)


def agree(found: list[Any], expected: list[Any], limit: float) -> None:
    for (values, drawn), (others, chosen) in zip(found, expected, strict=True):
        for value, other in zip(values, others, strict=True):
            assert value.shape == other.shape
            assert np.abs(value - other).max() <= limit * max(1.0, np.abs(other).max())
        assert drawn == chosen


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_every_kind_of_pass_equals_torch(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = range(6 if DEVICE == "cuda" else 2)
    agree(run(monkeypatch, "triton", family, seeds), run(monkeypatch, "off", family, seeds), 1e-4)


@pytest.mark.slow
def test_steps_of_chunks_and_single_rows_equal_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts on the matrix units beside decode rows, in steps with room for more of both."""
    monkeypatch.setattr(cuda_runner, "MUCH", 0)
    seeds = range(6 if DEVICE == "cuda" else 2)
    agree(run(monkeypatch, "triton", "mistral", seeds), run(monkeypatch, "off", "mistral", seeds), 1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_is_the_same_alone_and_among_any_number(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    among = run(monkeypatch, "triton", family, range(9))
    for seed in range(9):
        agree(run(monkeypatch, "triton", family, range(seed, seed + 1)), among[seed : seed + 1], 1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs need a CUDA device")
def test_graphs_of_every_size_give_what_the_kernels_give_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")

    async def decode(engine: hw.Engine, count: int) -> list[list[int]]:
        async def one(i: int) -> list[int]:
            async with engine.context() as ctx:
                how = hw.Sampling(temperature=0.8 if i % 3 else 0.0, top_p=0.9 if i % 2 else 1.0, seed=i)
                return await ctx.fill(tokens(3 + i % 40, i)).generate(how, max_tokens=6, stop_only=True).tokens()

        return list(await asyncio.gather(*(one(i) for i in range(count))))

    with (
        hw.Engine(random_model(device=DEVICE), pages=4000) as graphs,
        hw.Engine(random_model(device=DEVICE), pages=4000) as hand,
    ):
        hand._loop._runner._graphs.enabled = False  # type: ignore[attr-defined]
        for count in (1, 2, 3, 7, 33, 100):
            for _ in range(2):
                assert graphs.run(decode, count) == hand.run(decode, count)
        assert len(graphs._loop._runner._graphs.graphs) > 5  # type: ignore[attr-defined]


async def rows_of(engine: hw.Engine, prompt: list[int], cuts: list[int]) -> list[np.ndarray]:
    """The logits of every row of a prompt that is computed in pieces."""
    async with engine.context() as ctx:
        found = []
        for start, stop in zip([0, *cuts], [*cuts, len(prompt)], strict=True):
            forward = ctx.forward().input(prompt[start:stop])
            handles = [forward.probe(i, hw.Logits()) for i in range(stop - start)]
            out = await forward.execute()
            found += [out.logits(h) for h in handles]
        return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_deterministic_rows_have_the_same_bits_in_any_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    prompts = [tokens(n, n) for n in ((3, 21, 34) if DEVICE == "cuda" else (3, 18))]

    async def together(engine: hw.Engine) -> list[list[np.ndarray]]:
        return list(await asyncio.gather(*(rows_of(engine, p, []) for p in prompts)))

    model = random_model(family, device=DEVICE, **SIZES)
    with hw.Engine(model, pages=64, threads=1, deterministic=True) as engine:
        assert engine.info.runner == "triton"
        alone = [engine.run(rows_of, p, []) for p in prompts]
        engine.cache.clear()
        for found, expected in zip(engine.run(together), alone, strict=True):
            assert np.array_equal(np.stack(found), np.stack(expected))
        for cuts in ([1, 17], [16], [5, 6, 7, 20]) if DEVICE == "cuda" else ([1, 17],):
            engine.cache.clear()
            assert np.array_equal(np.stack(engine.run(rows_of, prompts[1], cuts)), np.stack(alone[1]))


async def biased(engine: hw.Engine, seed: int) -> list[int]:
    """Tokens of rows with a bias for every token, next to rows without, and of a generation."""
    rng = np.random.default_rng(seed)
    async with engine.context() as ctx:
        own, other = rng.normal(0, 3, (2, V))
        forward = ctx.forward().input(tokens(5, seed)).bias(other, rows=[1, 3])
        handles = [
            forward.sample([0, 1, 2, 3], hw.TopP(0.9, seed=seed)),
            forward.sample([1, 4], hw.Sampling(0.8, logit_bias=own, frequency_penalty=0.5, seed=seed)),
            forward.sample([0, 1], hw.Argmax()),
            forward.sample([2], hw.Sampling(epsilon_cutoff=0.01, eta_cutoff=0.02, seed=seed)),
        ]
        ranks = [forward.probe(i, Ranking(2, processed=True)) for i in (1, 3, 4)]
        out = await forward.execute()
        drawn = [token for handle in handles for token in out.tokens(handle)]
        best = [rank.id for handle in ranks for rank in (*out.ranking(handle).drawn, *out.ranking(handle).best)]
        how = hw.Sampling(0.9, logit_bias=own, seed=seed)
        return [*drawn, *best, *await ctx.generate(how, max_tokens=4, stop_only=True).tokens()]


@pytest.mark.slow
def test_biases_for_every_token_equal_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_of_them(engine: hw.Engine) -> list[list[int]]:
        return list(await asyncio.gather(*(biased(engine, seed) for seed in range(3))))

    found = []
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(random_model("qwen3", device=DEVICE, **SIZES), pages=64, threads=1) as engine:
            found.append(engine.run(all_of_them))
    assert found[0] == found[1]


async def moved(engine: hw.Engine) -> list[np.ndarray]:
    """Logits after slots were moved, and after new weights."""
    found = []

    async def read(context: hw.Context) -> None:
        with context.fork() as fork:
            forward = fork.forward().input([1])
            handle = forward.probe(-1, hw.Logits())
            found.append((await forward.execute()).logits(handle))

    async with engine.context() as ctx, engine.context() as module:
        await ctx.fill(tokens(36, 1)).flush()
        await module.fill(tokens(32, 2)).flush()
        ctx.inner().keep_slots([0, 3, *range(18, 36)], 0)
        await read(ctx)
        ctx.inner().append_from(module, [0, 1], 7)
        await read(ctx)
        ctx.inner().discard_pages(1, 1)
        await read(ctx)
    async with engine.context() as ctx:
        await ctx.fill(tokens(20, 3)).flush()
        shapes = sorted(weight_shapes(engine.config).items())
        rng = np.random.default_rng(0)
        new = {name: rng.normal(0, 0.2, shape) for name, shape in shapes if name != "lm_head.weight"}
        engine.update_weights(new)
        await read(ctx)
        engine.sleep()
        engine.wake()
        await read(ctx)
    return found


@pytest.mark.slow
def test_moved_slots_and_new_weights_equal_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(random_model("qwen3", device=DEVICE, **SIZES), pages=16, threads=1) as engine:
            found.append(engine.run(moved))
    for ours, theirs in zip(*found, strict=True):
        assert np.abs(ours - theirs).max() <= 1e-4 * max(1.0, np.abs(theirs).max())
    assert np.abs(found[0][-1] - found[0][-2]).max() <= 1e-4
    assert np.abs(found[0][-1] - found[0][0]).max() > 0.01
