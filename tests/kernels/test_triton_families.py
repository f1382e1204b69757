"""Layers that are not Llama's on the Triton kernels, against torch: however rows arrive, with masks, probes, adapters.

On a GPU captured graphs are compared too; without one the kernels run in Triton's interpreter, on fewer passes.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

import headway as hw  # noqa: E402
from headway.models.quantized.reference import float_decoder  # noqa: E402
from headway.runtime.runners.cuda import model as cuda_model  # noqa: E402
from headway.runtime.runners.cuda import runner as cuda_runner  # noqa: E402
from headway.testing import random_adapter, random_model  # noqa: E402
from support.checks import assert_close, logit_rows, random_tokens, reference_logits  # noqa: E402
from support.descriptions import ALL, DENSE, EXPERTS, LATENT, PER_LAYER, STREAMS  # noqa: E402
from support.gguf_families import write_family  # noqa: E402
from support.hf import build_hf, save_hf  # noqa: E402
from support.hf_families import CASES as OF_TRANSFORMERS  # noqa: E402
from support.hf_families import LATENT_AND_CHUNKED, family_model  # noqa: E402
from support.hf_families import PER_LAYER as OF_LAYERS  # noqa: E402
from support.quantized_files import mxfp4, with_weights  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
N = 17  # two pages, and longer than every small window
HIDDEN = (3, 4, 7)  # slots that a mask hides
QUICK = tuple(next(iter(group)) for group in (DENSE, EXPERTS, LATENT, STREAMS))
NAMED = [name for group in (OF_TRANSFORMERS | LATENT_AND_CHUNKED | OF_LAYERS).values() for name in group]
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
@pytest.mark.parametrize("name", [*PER_LAYER, *STREAMS])
def test_drafts_of_the_first_layers_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an adapter of every matrix, of which the first layers have a part."""
    found = []
    for mode in ("triton", "off"):
        with open_engine(mode, monkeypatch, ALL[name]) as engine:
            adapter = random_adapter(engine.config, roles=engine.capabilities.adapters)

            async def drawn(engine: hw.Engine, adapter: hw.Adapter = adapter) -> tuple[list[int], object]:
                async with engine.context().fill(random_tokens(97, 5)) as context:
                    drafter = hw.OwnLayers(1, adaptive=False)
                    generation = context.generate(hw.Argmax(), max_tokens=6, adapter=adapter, speculate=drafter)
                    return await generation.tokens(), generation.speculation

            found.append(engine.run(drawn))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_adapters_are_added_where_the_layers_have_matrices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, tokens = [], random_tokens(97, 9)
    for mode in ("triton", "off"):
        with open_engine(mode, monkeypatch, ALL[name]) as engine, engine.context() as context:
            adapter = random_adapter(engine.config, roles=engine.capabilities.adapters)
            forward = context.forward().input(tokens).adapter(adapter)
            handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
            out = forward.execute().result()
            found.append(np.stack([out.logits(h) for h in handles]))
            with engine.context() as plain:
                assert np.abs(found[-1] - logit_rows(plain, tokens)).max() > 0.01
    assert_close(*found)


async def moved(engine: hw.Engine) -> list[np.ndarray]:
    """Logits after slots were moved, some of them to other positions."""
    found = []
    async with engine.context() as context, engine.context() as other:
        await context.fill(random_tokens(97, 20, seed=1)).flush()
        await other.fill(random_tokens(97, 17, seed=2)).flush()
        context.inner().keep_slots([0, 3, *range(6, 20)], 0)
        for move in (lambda: context.inner().append_from(other, [0], 7), lambda: None):
            with context.fork() as fork:
                forward = fork.forward().input([1])
                handle = forward.probe(-1, hw.Logits())
                found.append((await forward.execute()).logits(handle))
            move()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [next(iter(DENSE)), *LATENT, *PER_LAYER, *STREAMS])
def test_moved_slots_are_those_of_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for mode in ("triton", "off"):
        with open_engine(mode, monkeypatch, ALL[name]) as engine:
            found.append(engine.run(moved))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_deterministic_rows_have_the_same_bits_in_any_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(97, 12)
    with open_engine("triton", monkeypatch, ALL[name], deterministic=True) as engine:
        with engine.context() as context:
            whole = logit_rows(context, tokens)
        engine.cache.clear()
        with engine.context() as context:
            rows = [logit_rows(context, tokens[:9]), *(logit_rows(context, [token]) for token in tokens[9:])]
        np.testing.assert_array_equal(np.concatenate(rows), whole)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
def test_families_give_the_logits_of_transformers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    _, model = family_model(name)
    tokens = random_tokens(model.config.vocab_size, 50 if DEVICE == "cuda" else 9)
    expected = reference_logits(model, tokens)
    with hw.Engine(save_hf(tmp_path, model), device=DEVICE, dtype="float32", pages=16, threads=1) as engine:
        assert engine.info.runner == "triton"
        with engine.context() as context:
            assert_close(logit_rows(context, tokens), expected)
        engine.cache.clear()
        with engine.context() as context:
            rows = [logit_rows(context, tokens[:5]), *(logit_rows(context, [token]) for token in tokens[5:])]
            assert_close(np.concatenate(rows), expected)


def test_experts_in_mxfp4_stay_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token alone multiplies its experts one by one, a prompt in blocks."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_local_experts": 4, "head_dim": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6, "vocab_size": 97}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    _, model = build_hf("GptOssConfig", "GptOssForCausalLM", sizes | rope, 5)
    floats, tokens = mxfp4(tmp_path, model), random_tokens(97, 7)
    expected = reference_logits(with_weights(model, floats), tokens)
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    with hw.Engine(tmp_path, device=DEVICE, dtype="float32", pages=8, threads=1) as engine:
        assert engine.info.format == "float32, mxfp4 experts"
        assert engine.info.weight_bytes < 4 * engine.info.parameters
        with engine.context() as context:
            rows = [logit_rows(context, tokens[:6]), logit_rows(context, tokens[6:])]
        assert_close(np.concatenate(rows), expected)
        decoder: Any = engine.decoder
        dense = float_decoder(decoder)
        engine.update_weights({"model.layers.0.input_layernorm.weight": torch.ones(32)})
        updated: Any = engine.decoder
        assert updated.layers[0].down is decoder.layers[0].down
        bias = {"model.layers.0.mlp.experts.down_proj_bias": torch.zeros(4, 32)}
        with pytest.raises(hw.Unsupported, match="layer 0 has mxfp4 experts as in its file"):
            engine.update_weights(bias)
    for name in ("gate_up", "down"):
        assert getattr(dense.layers[0], name).weight.dtype == torch.float32
    down = floats["model.layers.0.mlp.experts.down_proj"]
    assert torch.equal(dense.layers[0].down.weight, down.swapaxes(1, 2))


STORED = [  # a family, how its file has experts, and what they are called on a device
    ("gpt-oss", "MXFP4", "mxfp4"),
    ("qwen3-moe", "Q4_0", "int4"),
    ("gpt-oss", "Q5_1", "int8"),
    ("llama4", "Q8_0", "int8"),
    pytest.param("gemma4-experts", "Q4_1", "int4", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "kind", "label"), STORED)
def test_experts_of_a_gguf_file_stay_as_they_are_stored(
    name: str, kind: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They give what torch gives of their floats; other matrices are floats in both."""
    folder, tokens, found, adapted = tmp_path / "folder", random_tokens(97, 7), [], []
    sizes = {"intermediate_size": 32, "moe_intermediate_size": 32, "num_hidden_layers": 1 + (name == "llama4")}
    _, model = family_model(name, seed=3, **({"moe_intermediate_size": 32} if name == "gemma4-experts" else sizes))
    path = write_family(tmp_path / "m.gguf", save_hf(folder, model), model, kind=kind)
    for mode in ("triton", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", mode)
        with hw.Engine(path, device=DEVICE, dtype="float32", pages=8, threads=1) as engine:
            assert engine.info.format == (f"float32, {label} experts" if mode == "triton" else "float32")
            assert (engine.info.weight_bytes < 3.8 * engine.info.parameters) == (mode == "triton")
            adapter = random_adapter(engine.config, roles=engine.capabilities.adapters)
            with engine.context() as context:
                found.append(np.concatenate([logit_rows(context, tokens[:6]), logit_rows(context, tokens[6:])]))
            with engine.context() as context:
                adapted.append(logit_rows(context, tokens[:6], adapter))
    assert_close(*found)
    assert_close(*adapted)
    assert np.abs(adapted[0] - found[0][:6]).max() > 1e-3 * np.abs(found[0]).max()


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_experts_are_quantized_when_they_are_loaded(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number is rounded to the nearest step, and the model is that of the rounded numbers; the rest are floats."""
    sizes = {"moe_intermediate_size": 32, "num_hidden_layers": 1}
    _, model = family_model("qwen3-moe", seed=3, **sizes)
    folder, tokens, role = save_hf(tmp_path, model), random_tokens(97, 7), "model.layers.0.mlp.experts."
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    with hw.Engine(folder, device=DEVICE, dtype="float32", quantize=kind, pages=8, threads=1) as engine:
        assert engine.info.format == f"float32, {kind} experts"
        with engine.context() as context:
            rows = np.concatenate([logit_rows(context, tokens[:6]), logit_rows(context, tokens[6:])])
        layer: Any = engine.decoder.layers[0]
        exact = model.model.layers[0].mlp.experts
        for found, own in ((layer.gate_up, exact.gate_up_proj), (layer.down, exact.down_proj)):
            groups = own.detach().unflatten(2, (-1, 32))
            step = groups.abs().amax(3, keepdim=True) / (8 if kind == "int4" else 127)
            away = (found.weight.cpu().unflatten(2, (-1, 32)) - groups).abs()
            assert (away <= step * (1.01 if kind == "int4" else 0.51)).all()
        names = {"gate_up_proj": layer.gate_up.weight, "down_proj": layer.down.weight}
        rounded = {role + name: weight.cpu() for name, weight in names.items()}
        assert_close(rows, reference_logits(with_weights(model, rounded), tokens))
        with pytest.raises(hw.Unsupported, match=f"layer 0 has {kind} experts, which are not updated"):
            engine.update_weights({f"{role}down_proj": torch.zeros_like(exact.down_proj)})


def test_what_cannot_be_quantized_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "triton")
    _, model = family_model("qwen3-moe", num_hidden_layers=1, moe_intermediate_size=28)
    folder = save_hf(tmp_path / "odd", model)
    with pytest.raises(hw.Unsupported, match="int8 takes inputs in groups of 32 and experts here have 28"):
        hw.Engine(folder, device=DEVICE, dtype="float32", quantize="int8", pages=8)
    with pytest.raises(hw.Unsupported, match="fp8 is for Llama's layers alone there; int8 and int4 take the experts"):
        hw.Engine(folder, device=DEVICE, dtype="float32", quantize="fp8", pages=8)
    _, model = family_model("qwen3-moe", num_hidden_layers=1, moe_intermediate_size=32)
    path = write_family(tmp_path / "m.gguf", save_hf(tmp_path / "even", model), model, kind="Q4_0")
    with pytest.raises(hw.Unsupported, match=r"those of m.gguf are in Q4_0, which stay as they are; leave it out"):
        hw.Engine(path, device=DEVICE, dtype="float32", quantize="int4", pages=8)
