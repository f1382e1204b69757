"""Adapters that peft makes of what Gemma 3n and Gemma 4 have besides: inputs of the token, residuals side by side, a
product of low rank, and the matrices outside of layers."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch

import headway as hw
from support.checks import all_logits, assert_close, random_tokens
from support.hf import save_hf
from support.hf_families import family_model
from support.lora import logits_of, save_lora, state_of, with_lora
from support.own_drafts import own_drafts

TOKENS = random_tokens(97, 21)
OUTSIDE = r".*(per_layer_model_projection|altup_projections\.\d|altup_unembed_projections\.\d)"
BESIDE = r".*(per_layer_input_gate|per_layer_projection|laurel\.linear_\w+|altup\.(modality_router|\w+_coefs))"
OF_3N = ("laurel_down", "laurel_up", "altup_router", "altup_predict", "altup_correct", "altup_spread", "altup_gather")


def adapter_of(wrapped: peft.PeftModel) -> hw.Adapter:
    return hw.Adapter.from_tensors(state_of(wrapped), wrapped.peft_config["default"].to_dict())


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_all_linear_is_what_peft_makes_of_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = family_model(name)
    folder, wrapped = save_hf(tmp_path, model), with_lora(model, target_modules="all-linear")
    adapter, expected = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped)), logits_of(wrapped, TOKENS)
    assert "per_layer_model_projection" in repr(adapter)
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, dtype="float32", pages=16, threads=2) as engine:
            has = {"input_gate", "input_out", "input_projection", *(OF_3N if name == "gemma3n" else ())}
            assert has <= set(engine.capabilities.adapters)
            assert_close(all_logits(engine, TOKENS, adapter), expected)


@pytest.mark.parametrize(("native", "deterministic"), [("require", False), ("off", True)])
def test_rows_of_a_batch_have_streams_of_their_own(
    native: str, *, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, on forks, with several adapters and scales, beside a row without any; and each as it is alone."""
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    _, model = family_model("gemma3n")
    one, two = with_lora(model, target_modules="all-linear"), with_lora(model, seed=1, r=7, target_modules=OUTSIDE)
    three = with_lora(model, seed=2, r=17, target_modules=BESIDE)
    first, second, third = map(adapter_of, (one, two, three))
    of = {first: one, second: two, third: three}
    mixes: list[list[tuple[hw.Adapter, float]]] = [
        [],
        [(first, 1.0)],
        [(first, 0.5), (second, -0.5), (third, 0.5)],
        [(second, 2.0)],
        [(third, 1.0)],
    ]
    prompts = [random_tokens(97, 9 + 3 * i, i) for i in range(len(mixes))]

    async def rows(engine: hw.Engine, i: int) -> np.ndarray:
        async with engine.context().fill(prompts[i][:5]) as context:
            await context.flush(adapter=mixes[i] or None)
            async with context.fork() as fork:
                forward = fork.forward().input(prompts[i][5:])
                for adapter, scale in mixes[i]:
                    forward.adapter(adapter, scale)
                handles = [forward.probe(row, hw.Logits()) for row in range(len(prompts[i]) - 5)]
                out = await forward.execute()
                return np.stack([out.logits(handle) for handle in handles])

    async def together(engine: hw.Engine) -> list[np.ndarray]:
        return list(await asyncio.gather(*(rows(engine, i) for i in range(len(mixes)))))

    options: dict[str, Any] = {"max_batch_tokens": 8, "deterministic": deterministic}
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=64, threads=2, **options) as engine:
        batched = engine.run(together)
        warm = engine.run(together)  # from the prefix cache
        engine.cache.clear()
        for i, found in enumerate(batched):
            alone = engine.run(rows, i)
            if deterministic:
                np.testing.assert_array_equal(found, alone)
                np.testing.assert_array_equal(found, warm[i])
            assert_close(found, alone)
            assert_close(found, warm[i])
            assert_close(found, logits_of(mixed(model, mixes[i], of), prompts[i])[5:])


@torch.no_grad()
def mixed(model: Any, mix: list[tuple[hw.Adapter, float]], wrapped: dict[hw.Adapter, peft.PeftModel]) -> Any:
    """The model with what peft merges for each adapter, times its scale."""
    result = copy.deepcopy(model)
    for adapter, scale in mix:
        merged = copy.deepcopy(wrapped[adapter]).merge_and_unload()
        others = dict(merged.named_parameters())
        base = dict(model.named_parameters())
        for name, own in result.named_parameters():
            own += scale * (others[name] - base[name])
    return result


def test_slots_keep_what_they_were_computed_under(tmp_path: Path) -> None:
    """A prefix is shared under the same matrices outside of layers only; a row that is read again has its own."""
    _, model = family_model("gemma3n")
    adapter = adapter_of(with_lora(model, target_modules=OUTSIDE))
    tokens = random_tokens(97, 36)

    async def last(engine: hw.Engine, mix: Any) -> tuple[np.ndarray, int]:
        async with engine.context() as context:
            await context.fill(tokens).flush(adapter=mix)
            again = context.forward()  # without input: under the adapter of its slot
            handle = again.probe(-1, hw.Logits())
            return (await again.execute()).logits(handle), context.cached_tokens

    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=32, threads=1) as engine:
        plain, under = engine.run(last, None), engine.run(last, adapter)
        assert_close(plain[0], logits_of(model, tokens)[-1])
        assert_close(under[0], logits_of(with_lora(model, target_modules=OUTSIDE), tokens)[-1])
        assert (plain[1], under[1]) == (0, 0)
        again = engine.run(last, adapter)
        assert again[1] == 32
        assert_close(again[0], under[0])


@pytest.mark.parametrize("native", ["require", "off"])
def test_drafts_of_the_first_layers_have_what_is_outside_of_them(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    _, model = family_model("gemma4")
    with torch.no_grad():  # other layers add nothing, so that the first drafts as the model draws
        for layer in model.model.layers[1:]:
            for linear in (layer.self_attn.o_proj, layer.mlp.down_proj, layer.per_layer_projection):
                linear.weight.zero_()
            layer.layer_scalar.fill_(1.0)
    names = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." not in n]
    adapter = adapter_of(with_lora(model, target_modules=[*names, "layers.0.per_layer_input_gate"]))
    stats = own_drafts(save_hf(tmp_path, model), adapter, TOKENS, 12)
    assert (stats.drafted > 0, stats.acceptance) == (True, 1.0)


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_streams_of_drafts_have_adapters_too(quantize: Any, tmp_path: Path) -> None:
    _, model = family_model("gemma3n")
    adapter = adapter_of(with_lora(model, target_modules="all-linear"))

    async def drawn(engine: hw.Engine, drafter: hw.Drafter | None) -> list[int]:
        async with engine.context().fill(TOKENS) as context:
            return await context.generate(hw.Argmax(), max_tokens=12, adapter=adapter, speculate=drafter).tokens()

    options: dict[str, Any] = {"dtype": "float32"} if quantize is None else {"quantize": quantize}
    with hw.Engine(save_hf(tmp_path, model), pages=32, threads=2, **options) as engine:
        assert engine.run(drawn, hw.OwnLayers(2, adaptive=False)) == engine.run(drawn, None)


def test_names_of_a_text_model_inside_of_another_are_its_own() -> None:
    _, model = family_model("gemma3n")
    wrapped = with_lora(model, target_modules=f"{OUTSIDE}|{BESIDE}")
    own = adapter_of(wrapped)
    for outer in ("model.language_model.", "language_model.model.", "language_model.", ""):
        renamed = {
            name.replace("base_model.model.model.", f"base_model.model.{outer}"): tensor
            for name, tensor in state_of(wrapped).items()
        }
        assert hw.Adapter.from_tensors(renamed, wrapped.peft_config["default"].to_dict()).digest == own.digest
    tensor = {"base_model.model.model.vision_tower.altup_projections.0.lora_A.weight": torch.zeros(2, 64)}
    with pytest.raises(hw.Unsupported, match=r"altup_projections\.0\.lora_A.*none of a decoder's linear layers"):
        hw.Adapter.from_tensors(tensor)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["per_layer_model_projection", "per_layer_input_gate"], "layers_to_transform": [1]},
        {"target_modules": ["altup_projections.1", "linear_left"], "rank_pattern": {"linear_left": 3}},
        {"target_modules": "all-linear", "exclude_modules": OUTSIDE},
    ],
    ids=["layers", "one stream", "excluded"],
)
def test_a_config_means_what_it_does_in_peft(config: dict[str, Any], tmp_path: Path) -> None:
    _, model = family_model("gemma3n")
    wrapped = with_lora(model, **config)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        assert_close(all_logits(engine, TOKENS, adapter), logits_of(wrapped, TOKENS))


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    _, model = family_model("gemma3n")
    _, wider = family_model("gemma3n-second-stream")  # four streams, and five layers
    _, llama = family_model("gemma3")
    wrapped = with_lora(model, target_modules="all-linear")
    state, config = state_of(wrapped), wrapped.peft_config["default"].to_dict()

    def without(part: str) -> hw.Adapter:
        return hw.Adapter.from_tensors({name: t for name, t in state.items() if f".{part}." not in name}, config)

    more = state_of(with_lora(wider, target_modules=r".*altup_projections\.2"))
    cases = [
        ("config targets per_layer_model_projection, and", lambda: without("per_layer_model_projection")),
        (r"config targets altup_unembed_projections\.1, and", lambda: without("altup_unembed_projections.1")),
        (r"config targets layers\.2\.laurel\.linear_left, and", lambda: without("layers.2.laurel.linear_left")),
        (r"for altup_projections\.2, and the model has 2 matrices", lambda: hw.Adapter.from_tensors(more)),
        (
            r"\[40, 64\] for per_layer_model_projection, and the model's matrix is \[48, 64\]",
            lambda: adapter_of(with_lora(wider, target_modules=r".*per_layer_model_projection")),
        ),
    ]
    with hw.Engine(save_hf(tmp_path / "a", model), dtype="float32", pages=8, threads=1) as engine:
        for message, make in cases:
            with pytest.raises(hw.BadModelFile, match=message):
                engine.load_adapter(make())
    adapter = adapter_of(with_lora(model, target_modules=OUTSIDE))
    with (
        hw.Engine(save_hf(tmp_path / "b", llama), dtype="float32", pages=8, threads=1) as engine,
        pytest.raises(hw.Unsupported, match=r"altup_projections\.0, and the gemma3 model has no linear layer of that"),
    ):
        engine.load_adapter(adapter)
