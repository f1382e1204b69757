"""Adapters that peft makes of experts, shared ones and routers: the same logits, in any names and layouts of theirs."""

from __future__ import annotations

import asyncio
import copy
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import peft
import pytest
import torch
from safetensors.torch import save_file

import headway as hw
from support.checks import all_logits, assert_close, random_tokens
from support.gguf_families import write_family
from support.hf import save_hf
from support.hf_families import family_model
from support.lora import logits_of, randomize, save_lora, state_of, with_lora
from support.own_drafts import own_drafts

QUICK = ("qwen2-moe", "gpt-oss")
SLOW = (
    *("mixtral", "qwen2-moe-dense-layer", "qwen3-moe-sparse", "olmoe", "granite-moe", "qwen3-next", "qwen3.5-moe"),
    *("granite-hybrid", "deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "llama4", "llama4-published"),
    "gemma4-experts",
)
PARAMETERS = re.compile(r"(?:experts\.(?:gate_up|down)_proj|\.(?:gate|router|router\.proj)\.weight)$")
LINEAR = re.compile(r"shared_expert|shared_mlp|self_attn\.(?:[qv]_proj|kv_b_proj)$")
TOKENS = random_tokens(97, 21)


def adapted(model: Any, *, parts: str = "", **config: Any) -> peft.PeftModel:
    """The model under an adapter of its routers, experts, shared experts and some of attention, or of what is named so.

    peft is not told the type of the model, which it would know: of some it makes other targets of what is given.
    """
    model = copy.deepcopy(model)
    model.config.model_type = "unknown"
    linear = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and LINEAR.search(n)]
    every = [n for n, _ in model.named_parameters() if PARAMETERS.search(n)]
    linear, every = ([name for name in names if re.search(parts, name)] for names in (linear, every))
    return with_lora(model, target_modules="|".join(map(re.escape, linear)) or [], target_parameters=every, **config)


def adapter_of(wrapped: peft.PeftModel) -> hw.Adapter:
    return hw.Adapter.from_tensors(state_of(wrapped), wrapped.peft_config["default"].to_dict())


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_experts_and_routers_give_the_logits_of_peft(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    folder, wrapped = save_hf(tmp_path, model), adapted(model)
    adapter, expected = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped)), logits_of(wrapped, TOKENS)
    assert np.abs(expected - logits_of(model, TOKENS)).max() > 0.1
    for native, deterministic in (("require", False), ("off", True), ("off", False)):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, dtype="float32", pages=16, threads=2, deterministic=deterministic) as engine:
            assert_close(all_logits(engine, TOKENS, adapter), expected)


@pytest.mark.parametrize("native", ["require", "off"])
def test_rows_of_a_batch_have_experts_of_their_own(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, on forks, with several adapters and scales, beside a row without any; and each as it is alone."""
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    _, model = family_model("qwen2-moe")
    one, two = adapted(model), adapted(model, seed=1, r=7, lora_alpha=5, parts=r"experts|shared_expert_gate")
    first, second = map(adapter_of, (one, two))
    mixes: list[Any] = [None, first, [(first, 0.5), (second, -0.5)], (second, 2.0), second]
    prompts = [random_tokens(97, 9 + 3 * i, i) for i in range(len(mixes))]

    async def rows(engine: hw.Engine, i: int) -> np.ndarray:
        async with engine.context().fill(prompts[i][:5]) as context:
            await context.flush(adapter=mixes[i])
            async with context.fork() as fork:
                forward = fork.forward().input(prompts[i][5:])
                for adapter, scale in [] if mixes[i] is None else pairs(mixes[i]):
                    forward.adapter(adapter, scale)
                handles = [forward.probe(row, hw.Logits()) for row in range(len(prompts[i]) - 5)]
                out = await forward.execute()
                return np.stack([out.logits(handle) for handle in handles])

    async def together(engine: hw.Engine) -> list[np.ndarray]:
        return list(await asyncio.gather(*(rows(engine, i) for i in range(len(mixes)))))

    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=64, threads=2, max_batch_tokens=8) as engine:
        batched = engine.run(together)
        engine.cache.clear()
        for i, found in enumerate(batched):
            assert_close(found, engine.run(rows, i))
            assert_close(found, logits_of(mixed(model, mixes[i], {first: one, second: two}), prompts[i])[5:])


def pairs(mix: Any) -> list[tuple[hw.Adapter, float]]:
    return mix if isinstance(mix, list) else [mix if isinstance(mix, tuple) else (mix, 1.0)]


@torch.no_grad()
def mixed(model: Any, mix: Any, wrapped: dict[hw.Adapter, peft.PeftModel]) -> Any:
    """The model with what peft merges for each adapter, times its scale."""
    result = copy.deepcopy(model)
    for adapter, scale in [] if mix is None else pairs(mix):
        merged = copy.deepcopy(wrapped[adapter]).merge_and_unload()
        for own, base, other in zip(result.parameters(), model.parameters(), merged.parameters(), strict=True):
            own += scale * (other - base)
    return result


@pytest.mark.parametrize(
    "name", ["qwen2-moe", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt-oss", "deepseek-v2", "llama4"))]
)
def test_beside_quantized_experts_only_their_rounding_differs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    folder, found, wrapped = save_hf(tmp_path, model), [], adapted(model, parts="expert")
    expected, adapter = logits_of(wrapped, TOKENS), adapter_of(wrapped)
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, quantize="int8", pages=16, threads=2) as engine:
            error = kl(logits_of(model, TOKENS), all_logits(engine, TOKENS))
            found.append(all_logits(engine, TOKENS, adapter))
            assert kl(expected, found[-1]) <= 5 * error + 1e-4
            assert kl(expected, all_logits(engine, TOKENS)) > 0.005
    assert np.array_equal(*found)


def kl(expected: np.ndarray, found: np.ndarray) -> float:
    p, q = (torch.from_numpy(np.asarray(x)).double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


def by_expert(state: dict[str, torch.Tensor], rank: int, *, old: bool) -> dict[str, torch.Tensor]:
    """The same adapter with a module for each expert, as transformers had them, and in Mixtral's names if `old`."""
    found = {}
    for name, a in state.items():
        if ".experts." not in name:
            found[name.replace("mlp.gate.", "block_sparse_moe.gate.") if old else name] = a
            continue
        if ".lora_B." in name:
            continue
        b = state[name.replace(".lora_A.", ".lora_B.")]
        at = name.partition(".experts.")[0].replace("mlp", "block_sparse_moe" if old else "mlp")
        own = ("w1", "w3", "w2") if old else ("gate_proj", "up_proj", "down_proj")
        for expert in range(len(a) // rank):
            part, outputs = a[expert * rank : (expert + 1) * rank], b[:, expert :: len(a) // rank]
            sides = zip(own[:2], outputs.chunk(2), strict=True) if ".base_layer." in name else [(own[2], outputs)]
            for module, rows in sides:
                found[f"{at}.experts.{expert}.{module}.lora_A.weight"] = part
                found[f"{at}.experts.{expert}.{module}.lora_B.weight"] = rows.contiguous()
    return found


@pytest.mark.parametrize("name", ["mixtral", pytest.param("qwen2-moe", marks=pytest.mark.slow)])
def test_a_module_for_each_expert_is_the_same_adapter(name: str, tmp_path: Path) -> None:
    """Some experts may have none, and others another rank."""
    _, model = family_model(name)
    wrapped = adapted(model, parts=r"experts|mlp\.gate", use_rslora=True)
    state, old = state_of(wrapped), name == "mixtral"
    apart = by_expert(state, 4, old=old)
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        found = all_logits(engine, TOKENS, adapter_of(wrapped))
        assert_close(all_logits(engine, TOKENS, hw.Adapter.from_tensors(apart, alpha=3 * 4)), found)
        own = "block_sparse_moe.experts.1.w2" if old else "mlp.experts.1.down_proj"
        some = {
            n: (t[:, :1] if ".lora_B." in n else t[:1]) if ".experts.1." in n else t
            for n, t in apart.items()
            if ".experts.0." not in n
        }
        config = {
            "r": 4,
            "lora_alpha": 12,
            "target_modules": r".*\.(?:mlp|block_sparse_moe)\.(?:gate|experts\.\d+\.\w+)",
            "rank_pattern": {r"experts\.1\.\w+": 1},
            "exclude_modules": r".*\.experts\.0\..*",
            "target_parameters": None if old else ["mlp.gate.weight"],
        }
        few = hw.Adapter.from_tensors(some, config)
        merged = copy.deepcopy(model)
        with torch.no_grad():
            for layer, key in [(l, k) for l in range(2) for k in ("gate_up_proj", "down_proj")]:
                weights = getattr(merged.model.layers[layer].mlp.experts, key)
                parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)} if old else {
                    "gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)
                }  # fmt: skip
                at = f"base_model.model.model.layers.{layer}." + own.partition(".experts.")[0]
                for expert in range(1, len(weights)):
                    modules = [f"{at}.experts.{expert}.{part}" for part in parts[key]]
                    deltas = [some[f"{m}.lora_B.weight"] @ some[f"{m}.lora_A.weight"] for m in modules]
                    weights[expert] += torch.cat(deltas) * (12 if expert == 1 else 3)
                router = f"{at}.gate"
                if key == "down_proj":
                    merged.model.layers[layer].mlp.gate.weight += 3 * (
                        some[f"{router}.lora_B.weight"] @ some[f"{router}.lora_A.weight"]
                    )
        assert_close(all_logits(engine, TOKENS, few), logits_of(merged, TOKENS))
        missing = {n: t for n, t in some.items() if own.replace(".1.", ".2.") not in n}
        with pytest.raises(hw.BadModelFile, match=rf"targets layers\.0\.{own.replace('.1.', '.2.')}, and there are no"):
            engine.load_adapter(hw.Adapter.from_tensors(missing, config))


def test_an_adapter_of_older_modules_is_what_peft_makes_of_it(tmp_path: Path) -> None:
    """peft converts a file with a module for each expert when it loads one for Mixtral: the same logits."""
    _, model = family_model("mixtral")
    wrapped = adapted(model, parts=r"experts")
    state = by_expert(state_of(wrapped), 4, old=True)
    generator = torch.Generator().manual_seed(5)
    state = {name: torch.randn(t.shape, generator=generator) / t.shape[-1] ** 0.5 for name, t in sorted(state.items())}
    facts = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["w1", "w2", "w3"], task_type="CAUSAL_LM")
    facts.save_pretrained(str(tmp_path / "adapter"))
    save_file(state, str(tmp_path / "adapter" / "adapter_model.safetensors"))
    expected = logits_of(peft.PeftModel.from_pretrained(copy.deepcopy(model), str(tmp_path / "adapter")), TOKENS)
    assert np.abs(expected - logits_of(model, TOKENS)).max() > 0.1
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        assert_close(all_logits(engine, TOKENS, hw.Adapter.load(tmp_path / "adapter")), expected)


@pytest.mark.parametrize(
    "name", ["mixtral", *(pytest.param(n, marks=pytest.mark.slow) for n in ("qwen3-moe", "olmoe", "deepseek-v2"))]
)
def test_modules_that_peft_makes_parameters_are_beside_others(name: str, tmp_path: Path) -> None:
    """Of the older names of experts it makes parameters without a place, such as `down_proj`."""
    _, model = family_model(name)
    experts = ("w1", "w2", "w3") if name == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    wrapped = with_lora(model, target_modules=["q_proj", "o_proj", "kv_b_proj", "gate", *experts])
    assert "down_proj" in wrapped.peft_config["default"].target_parameters
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        assert_close(all_logits(engine, TOKENS, adapter), logits_of(wrapped, TOKENS))


def test_parameters_may_have_ranks_of_their_own(tmp_path: Path) -> None:
    _, model = family_model("qwen2-moe")
    wrapped = adapted(
        model, parts="experts", rank_pattern={r".*\.gate_up_proj": 6}, alpha_pattern={r".*\.down_proj": 9}
    )
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped))
    assert {pair.rank for pair in adapter.pairs.values()} == {4, 6}
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        assert_close(all_logits(engine, TOKENS, adapter), logits_of(wrapped, TOKENS))


def test_a_parameter_that_peft_took_for_its_transpose_is_told_by_its_shape(tmp_path: Path) -> None:
    """As releases have that did not ask which way round a parameter is."""
    _, model = family_model("qwen2-moe")
    wrapped = adapted(model, parts="experts")
    state, config = state_of(wrapped), wrapped.peft_config["default"].to_dict()
    turned = {}
    for name in (name for name in state if ".lora_A." in name):
        a, b = state[name], state[name.replace(".lora_A.", ".lora_B.")]
        a, b = a.unflatten(0, (5, 4)), b.unflatten(1, (4, 5))  # [X, r, K] and [N, r, X]
        turned[name] = b.permute(2, 1, 0).flatten(0, 1)
        turned[name.replace(".lora_A.", ".lora_B.")] = a.permute(2, 1, 0).flatten(1)
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        found = all_logits(engine, TOKENS, hw.Adapter.from_tensors(turned, config))
        assert_close(found, logits_of(wrapped, TOKENS))


GGUF_NAMES = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"),
    "mlp.experts.down_proj": "ffn_down_exps",
}


def test_llama_cpp_s_names_are_the_same_adapter(tmp_path: Path) -> None:
    _, model = family_model("qwen2-moe")
    folder, wrapped = save_hf(tmp_path, model), adapted(model, parts="mlp")
    adapter, expected = adapter_of(wrapped), logits_of(wrapped, TOKENS)
    path = write_gguf(tmp_path / "adapter.gguf", adapter)
    for where in (folder, write_family(tmp_path / "model.gguf", folder, model)):
        with hw.Engine(where, dtype="float32", pages=16, threads=1) as engine:
            assert_close(all_logits(engine, TOKENS, hw.Adapter.load(path)), expected)


def write_gguf(path: Path, adapter: hw.Adapter, **changed: np.ndarray) -> Path:
    writer = gguf.GGUFWriter(path, "qwen2moe")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 6.0)
    for target, pair in adapter.pairs.items():
        names = GGUF_NAMES[target.part]
        parts = [pair.b] if isinstance(names, str) else np.split(pair.b, 2, axis=1)
        for name, b in zip([names] if isinstance(names, str) else names, parts, strict=True):
            for side, matrix in (("a", pair.a), ("b", b)):
                tensor = changed.get(f"{name}_{side}", matrix)
                writer.add_tensor(f"blk.{target.layer}.{name}.weight.lora_{side}", np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_drafts_of_the_first_layers_have_their_experts(tmp_path: Path) -> None:
    _, model = family_model("qwen2-moe")
    with torch.no_grad():  # the second layer adds nothing, so that the first drafts as the model draws
        second = model.model.layers[1]
        for weight in (second.self_attn.o_proj.weight, second.mlp.experts.down_proj):
            weight.zero_()
        second.mlp.shared_expert.down_proj.weight.zero_()
    adapter = adapter_of(adapted(model, parts=r"layers\.0\.mlp"))
    stats = own_drafts(save_hf(tmp_path, model), adapter, TOKENS, 12)
    assert (stats.drafted > 0, stats.acceptance) == (True, 1.0)


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    _, model = family_model("qwen2-moe")
    wrapped = adapted(model, parts=r"mlp\.experts|mlp\.gate")
    state, config = state_of(wrapped), wrapped.peft_config["default"].to_dict()
    down = "base_model.model.model.layers.0.mlp.experts.lora_{}.weight"

    def given(changes: dict[str, torch.Tensor | None], **facts: Any) -> hw.Adapter:
        own = {name: t for name, t in (state | changes).items() if t is not None}
        return hw.Adapter.from_tensors(own, config | facts)

    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        cases: list[tuple[str, Any]] = [
            (r"down_proj has only the matrix A", lambda: given({down.format("B"): None})),
            (r"down_proj: A is \[19, 28\].*rank 4", lambda: given({down.format("A"): torch.zeros(19, 28)})),
            (
                r"of 4 experts for layers\.0\.mlp\.experts\.down_proj.*5 experts",
                lambda: given({down.format("A"): torch.zeros(16, 28), down.format("B"): torch.zeros(64, 16)}),
            ),
            (
                r"of \[63, 28\] for layers\.0\.mlp\.experts\.down_proj.*\[64, 28\]",
                lambda: given({down.format("B"): torch.zeros(63, 20)}),
            ),
            (r"down_proj: B has a value that is not", lambda: given({down.format("B"): torch.full((64, 20), np.nan)})),
            (r"no adapter_config.json that lists it", lambda: hw.Adapter.from_tensors(state)),
            (r"no adapter_config.json that lists it", lambda: given({}, target_parameters=["mlp.gate.weight"])),
            (r"down_proj_bias.*target_parameters", lambda: given({}, target_parameters=["experts.down_proj_bias"])),
            (r"target_parameters=3", lambda: given({}, target_parameters=3)),
            (r"rank 4; it must be in \[1, 3\]", lambda: hw.Adapter.from_tensors(state, config, max_rank=3)),
            (r"has \d+ bytes; the limit", lambda: hw.Adapter.from_tensors(state, config, max_bytes=99)),
            (
                r"config targets layers\.1\.mlp\.experts\.down_proj, and there are no weights",
                lambda: given({n: None for n in state if ".1.mlp.experts.lora_" in n}),
            ),
        ]
        apart = by_expert({n: t for n, t in state.items() if ".gate." not in n}, 4, old=False)
        name = "base_model.model.model.layers.0.mlp.experts.{}.down_proj.lora_A.weight"
        far = {n.replace(".experts.4.", ".experts.5."): t for n, t in apart.items()}
        cases += [
            (r"layers\.0\.mlp\.experts\.5\.\w+, and the model has 5 experts", lambda: hw.Adapter.from_tensors(far)),
            (
                r"layers\.0\.mlp\.experts\.2\.down_proj has only the matrix B",
                lambda: hw.Adapter.from_tensors({n: t for n, t in apart.items() if n != name.format(2)}),
            ),
            (
                r"and others for the model's expert_down\.0 besides",
                lambda: given(
                    {n: t for n, t in apart.items() if ".0.mlp.experts.0.down_proj" in n}, target_modules=["down_proj"]
                ),
            ),
        ]
        for message, make in cases:
            with pytest.raises((hw.BadModelFile, hw.Unsupported), match=message):
                engine.load_adapter(make())
        assert engine.stats().adapters == 0


def test_a_gguf_file_of_experts_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    _, model = family_model("qwen2-moe")
    adapter = adapter_of(adapted(model, parts=r"mlp\.experts"))
    zeros = np.zeros
    for changed, message in (
        ({"ffn_down_exps_a": zeros((4, 4, 28), np.float32)}, "A is for 4 experts and B for 5"),
        ({"ffn_down_exps_a": zeros((4, 28), np.float32)}, r"A has shape \[4, 28\]; a matrix for each expert"),
        ({"ffn_down_exps_b": zeros((5, 64, 3), np.float32)}, "A has rank 4 and B has rank 3"),
    ):
        with pytest.raises(hw.BadModelFile, match=message):
            hw.Adapter.load(write_gguf(tmp_path / "adapter.gguf", adapter, **changed))


def test_memory_of_experts_is_counted(tmp_path: Path) -> None:
    _, model = family_model("qwen2-moe")
    adapter = adapter_of(adapted(model, parts=r"mlp\.experts"))
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        engine.load_adapter(adapter)
        assert engine.stats().adapter_bytes >= adapter.nbytes
        engine.unload_adapter(adapter)
        assert (engine.stats().adapters, engine.stats().adapter_bytes) == (0, 0)


@pytest.mark.parametrize("native", ["require", "off"])
def test_keys_and_values_of_heads_share_what_they_are_made_with(
    native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A of `kv_b_proj` is kept twice, for keys and for values, whatever the number of heads."""
    monkeypatch.setenv("HEADWAY_NATIVE", native)
    _, model = family_model("deepseek-v2")
    wrapped = adapted(model, parts="kv_b_proj", r=16)
    adapter = adapter_of(wrapped)
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        assert_close(all_logits(engine, TOKENS, adapter), logits_of(wrapped, TOKENS))
        once_more = sum(pair.a.nbytes for pair in adapter.pairs.values())
        assert engine.stats().adapter_bytes - adapter.nbytes < 4 * once_more  # what it is padded with included


def test_zero_is_no_change(tmp_path: Path) -> None:
    """Experts that no token goes to, and matrices of zeros."""
    _, model = family_model("qwen2-moe")
    wrapped = adapted(model, parts=r"mlp\.experts")
    randomize(wrapped, 0, 0.0)
    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=8, threads=1) as engine:
        assert_close(all_logits(engine, TOKENS[:1], adapter_of(wrapped)), logits_of(model, TOKENS[:1]))
