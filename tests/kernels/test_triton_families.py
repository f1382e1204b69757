"""Layers that are not Llama's on the Triton kernels, against torch: however rows arrive, with masks, probes, adapters.

On a GPU captured graphs are compared too; without one the kernels run in Triton's interpreter, on fewer passes.
"""

from __future__ import annotations

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
from headway.runtime.runners.cuda import model as cuda_model  # noqa: E402
from headway.runtime.runners.cuda import runner as cuda_runner  # noqa: E402
from headway.testing import random_adapter, random_model  # noqa: E402
from support.checks import assert_close, logit_rows, random_tokens  # noqa: E402
from support.descriptions import ALL, DENSE, EXPERTS  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
N = 17  # two pages, and longer than every small window
HIDDEN = (3, 4, 7)  # slots that a mask hides
QUICK = (next(iter(DENSE)), next(iter(EXPERTS)))
CASES = [name if name in QUICK or DEVICE == "cuda" else pytest.param(name, marks=pytest.mark.slow) for name in ALL]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs one program after the other: there is no device to keep busy."""
    if DEVICE == "cpu":
        monkeypatch.setattr(cuda_model, "PROGRAMS", 8)


def passes(engine: hw.Engine) -> list[np.ndarray]:
    """A prompt, a fork that is cut and goes on token by token, hidden slots, and values from inside the model."""
    tokens, found = random_tokens(97, N), []
    with engine.context() as context:
        found.append(logit_rows(context, tokens[:11]))
        with context.fork() as fork:
            logit_rows(fork, [5, 6])
            fork.truncate(2)
            found += [logit_rows(fork, [token]) for token in tokens[11:14]]
        found.append(logit_rows(context, tokens[11:]))
    attend = np.tril(np.ones((9, 9), bool))
    attend[:, list(HIDDEN)] = False
    attend[np.arange(9), np.arange(9)] = True
    with engine.context() as context:
        forward = context.forward().input(tokens[:9]).attention_mask(hw.Mask.from_bool(attend))
        logits = [forward.probe(i, hw.Logits()) for i in (5, 8)]
        hidden = [forward.probe(8, hw.Hidden(l)) for l in range(engine.config.layers + 1)]
        attention = forward.probe(8, hw.AttentionScores(1))
        out = forward.execute().result()
        found += [out.logits(h) for h in logits] + [out.hidden(h) for h in hidden] + [out.attention(attention)]
    return found


def open_engine(mode: str, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], **options: Any) -> hw.Engine:
    monkeypatch.setenv("HEADWAY_NATIVE", mode)
    engine = hw.Engine(random_model(device=DEVICE, **config), pages=32, threads=1, **options)
    assert engine.info.runner == ("torch" if mode == "off" else "triton")
    return engine


@pytest.mark.parametrize("name", CASES)
def test_a_layer_of_any_kind_gives_what_torch_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for mode in ("triton", "off"):
        with open_engine(mode, monkeypatch, ALL[name]) as engine:
            found.append(passes(engine))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_prompts_in_chunks_beside_each_other_and_in_one_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments on the matrix units, and a last layer that computes the rows alone that are read."""
    monkeypatch.setattr(cuda_runner, "MUCH", 0)
    found = []

    async def together(engine: hw.Engine) -> list[list[int]]:
        import asyncio

        async def one(i: int) -> list[int]:
            async with engine.context() as context:
                return (
                    await context.fill(random_tokens(97, 20 + i, seed=i))
                    .generate(hw.Argmax(), max_tokens=3, stop_only=True)
                    .tokens()
                )

        return list(await asyncio.gather(*(one(i) for i in range(2))))

    for mode in ("triton", "off"):
        with open_engine(mode, monkeypatch, ALL[name], max_batch_tokens=24) as engine:
            found.append(engine.run(together))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_deterministic_rows_have_the_same_bits_in_any_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(97, 12)
    with open_engine("triton", monkeypatch, ALL[name], deterministic=True) as engine:
        with engine.context() as context:
            whole = logit_rows(context, tokens)
        engine.cache.clear()
        with engine.context() as context:
            rows = [logit_rows(context, tokens[:5]), logit_rows(context, tokens[5:6]), logit_rows(context, tokens[6:])]
        np.testing.assert_array_equal(np.concatenate(rows), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_adapters_are_added_where_the_layers_have_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, tokens = [], random_tokens(97, 9)
    for mode in ("triton", "off"):
        with open_engine(mode, monkeypatch, ALL[name]) as engine, engine.context() as context:
            roles = engine.capabilities.adapters
            adapter = random_adapter(
                engine.config, roles=roles if engine.config.description.experts is None else roles[:4]
            )
            forward = context.forward().input(tokens).adapter(adapter)
            handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
            out = forward.execute().result()
            found.append(np.stack([out.logits(h) for h in handles]))
            plain = engine.context()
            assert np.abs(found[-1] - logit_rows(plain, tokens)).max() > 0.01
            plain.close()
    assert_close(*found)
