"""The families that are not Llama's: logits against transformers, however the rows arrive, natively and on torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import headway as hw
from headway.kernels.reference.experts import grouped_linear, route
from headway.models.config import from_hf
from headway.models.families import FAMILIES
from headway.models.files.weights import SafetensorsWeights
from headway.models.weights.load_tensors import load_model
from headway.testing import random_model
from support.checks import all_logits, assert_close, logit_rows, random_tokens, reference_logits
from support.hf import build_hf, save_hf
from support.hf_families import OTHERS, QUICK, YARN, family_model
from support.models_table import FACTS, HEADER, PATHS, facts, known, passed, written

N = 37  # longer than two pages and every small window
HIDDEN = (3, 4, 17)  # slots that a mask hides


@dataclass(frozen=True, eq=False)
class Case:
    model: Any
    folder: Path
    engine: hw.Engine
    tokens: list[int]
    expected: np.ndarray  # [N, V]
    native: str  # HEADWAY_NATIVE of its engines


ON_TORCH = ("gemma2", "cohere2", "gpt-oss")  # quick cases of the reference
CASES = [
    *QUICK,
    *(f"{name}, torch" for name in ON_TORCH),
    *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS),
    *(pytest.param(f"{n}, torch", marks=pytest.mark.slow) for n in [*QUICK, *OTHERS] if n not in ON_TORCH),
]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, _, path = request.param.partition(", ")
    _, model = family_model(name)
    folder = save_hf(tmp_path_factory.mktemp(name), model)
    tokens = random_tokens(model.config.vocab_size, N)
    native = "off" if path else "require"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", native)
        engine = hw.Engine(folder, pages=64, threads=2, step_ms=60_000)
    with engine:
        assert engine.info.runner.startswith(path or "native")
        yield Case(model, folder, engine, tokens, reference_logits(model, tokens), native)


def test_logits_are_those_of_transformers_however_the_rows_arrive(case: Case) -> None:
    assert_close(all_logits(case.engine, case.tokens), case.expected, "the whole prompt")
    with case.engine.context() as context:
        rows = [logit_rows(context, case.tokens[:18])]
        with context.fork() as fork:
            logit_rows(fork, [5, 6, 7])
            fork.truncate(3)
            rows += [logit_rows(fork, case.tokens[18:30])]
            rows += [logit_rows(fork, [token]) for token in case.tokens[30:]]
        assert_close(np.concatenate(rows), case.expected, "a fork, token by token")
        assert_close(logit_rows(context, case.tokens[18:]), case.expected[18:], "the rest in one pass")


def test_masked_slots_are_those_of_transformers(case: Case) -> None:
    seen = torch.ones(1, N, dtype=torch.long)
    seen[0, list(HIDDEN)] = 0
    with torch.no_grad():
        theirs = case.model(
            input_ids=torch.tensor([case.tokens]),
            attention_mask=seen,
            position_ids=torch.arange(N)[None],
            use_cache=False,
        ).logits[0]
    attend = torch.ones(N, N, dtype=torch.bool).tril() & (seen.bool() | torch.eye(N, dtype=torch.bool))
    with case.engine.context() as context:
        forward = context.forward().input(case.tokens).attention_mask(hw.Mask.from_bool(attend.numpy()))
        handles = [forward.probe(i, hw.Logits()) for i in range(N)]
        out = forward.execute().result()
    rows = [i for i in range(N) if i not in HIDDEN]
    assert_close(np.stack([out.logits(handles[i]) for i in rows]), theirs[rows].numpy())


def test_a_prompt_in_chunks_beside_another(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", case.native)
    other = random_tokens(case.model.config.vocab_size, 11, seed=1)
    with hw.Engine(case.engine.decoder, pages=64, threads=2, max_batch_tokens=16, page_size=5) as engine:
        contexts = [engine.context(), engine.context()]
        forwards = [c.forward().input(t) for c, t in zip(contexts, (case.tokens, other), strict=True)]
        handles = [[f.probe(i, hw.Logits()) for i in range(n)] for f, n in zip(forwards, (N, 11), strict=True)]

        async def together() -> list[hw.Output]:
            with engine._lock:  # the worker forms no batch before both are queued
                running = [forward.execute() for forward in forwards]
            return list(await asyncio.gather(*running))

        outputs = asyncio.run(together())
        assert max(out.stats.steps for out in outputs) > 2
        ours = [np.stack([out.logits(h) for h in hs]) for out, hs in zip(outputs, handles, strict=True)]
    assert_close(ours[0], case.expected, "the long prompt")
    assert_close(ours[1], reference_logits(case.model, other), "the short prompt")


@pytest.mark.slow
def test_a_rows_bits_depend_on_nothing_else_in_deterministic_mode(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", case.native)
    with hw.Engine(case.folder, pages=64, threads=3, deterministic=True, step_ms=60_000) as engine:
        whole = all_logits(engine, case.tokens)
        assert_close(whole, case.expected)
        with engine.context() as context:
            rows = [logit_rows(context, case.tokens[:9]), *(logit_rows(context, [t]) for t in case.tokens[9:20])]
            rows.append(logit_rows(context, case.tokens[20:]))
        np.testing.assert_array_equal(np.concatenate(rows), whole)


@pytest.mark.slow
def test_positions_hidden_states_and_attention_are_those_of_transformers(case: Case) -> None:
    layers, positions = case.engine.config.layers, torch.arange(N) + 5
    with torch.no_grad():
        theirs = case.model(
            input_ids=torch.tensor([case.tokens]),
            position_ids=positions[None],
            output_hidden_states=True,
            output_attentions=True,
            use_cache=False,
        )
    with case.engine.context() as context:
        forward = context.forward().input_at(case.tokens, positions.tolist())
        logits = forward.probe(20, hw.Logits())
        hidden = [forward.probe(20, hw.Hidden(l)) for l in range(layers + 1)]
        attention = [forward.probe(20, hw.AttentionScores(l)) for l in range(layers)]
        out = forward.execute().result()
    assert_close(out.logits(logits), theirs.logits[0, 20].numpy())
    for l, handle in enumerate(hidden):
        assert_close(out.hidden(handle), theirs.hidden_states[l][0, 20].numpy(), f"hidden state {l}")
    for l, handle in enumerate(attention):
        assert_close(out.attention(handle), theirs.attentions[l][0, :, 20, :21].numpy(), f"attention {l}")


def test_the_sizes_that_are_reported_are_those_of_the_weights(case: Case) -> None:
    info = case.engine.info
    assert info.parameters == sum(p.numel() for p in case.model.parameters())
    if info.runner == "torch":
        assert info.weight_bytes == 4 * info.parameters
    else:  # rows are padded to blocks of 16
        assert 4 * info.parameters <= info.weight_bytes <= 4.6 * info.parameters


@pytest.mark.parametrize(
    "name", ["gemma3", "qwen2-moe", *(pytest.param(n, marks=pytest.mark.slow) for n in [*QUICK, *OTHERS])]
)
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(name: str, tmp_path: Path) -> None:
    """Transformers fills in what is missing; a key that Headway needs is refused by name."""
    config, _ = family_model(name)
    for key in list(config):
        if key in ("architectures", "model_type"):
            continue
        less = {k: v for k, v in config.items() if k != key}
        (tmp_path / "config.json").write_text(json.dumps(less))
        try:
            whole = json.loads(AutoConfig.from_pretrained(tmp_path).to_json_string(use_diff=False))
        except Exception:
            continue  # transformers refuses it itself
        whole["architectures"] = config["architectures"]
        ours = outcome(less)
        if not isinstance(ours, str) or key not in ours:
            assert ours == outcome(whole), key


def outcome(config: dict[str, Any]) -> object:
    try:
        return from_hf(config)
    except hw.HeadwayError as error:
        return str(error)


# -- files ---------------------------------------------------------------------------------------------------------


def test_published_files_without_a_prefix_and_with_masks_are_the_same_model(tmp_path: Path) -> None:
    """As GPT-2's own folder has them."""
    _, model = family_model("gpt2")
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 12)
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(2)}
    save_file(bare, folder / "model.safetensors")
    with hw.Engine(folder, pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {"model_type": "llama"}, "is the gemma2 family's, and model_type 'llama' the llama family's"),
        (
            "olmo2",
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is 30.0, which the olmo2 family",
        ),
        ("granite", {"num_local_experts": 8}, "num_local_experts is 8, which the granite family does not have"),
        ("gemma3", {"hidden_activation": "relu6"}, "hidden_activation is 'relu6'; supported are silu"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "layer_types must name one of sliding_attention"),
        ("olmo3", {"rope_parameters": {"rope_type": "ntk"}}, "rope type 'ntk' is not supported"),
        ("mixtral", {"num_experts_per_tok": 6}, "a token goes to 6 experts; it must be between 1 and 5"),
        ("mixtral", {"num_local_experts": 6}, "experts.5.w1.weight' is missing|gate.weight' has shape"),
        ("qwen3-moe", {"num_local_experts": 4}, r"mlp.gate.weight' has shape \[5, 64\]; this config needs \[4, 64\]"),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "no_rope_layers must name one of 1, 0"),
        ("falcon", {"alibi": True}, "alibi is true"),
        ("falcon", {"apply_residual_connection_post_layernorm": True}, "residuals after norms are not supported"),
        ("gemma3", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping is 3.0; Gemma 3 does not cap its scores"),
        ("gpt-oss", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized as 'mxfp4'"),
        ("phi3", {"partial_rotary_factor": 3.0, "rope_parameters": None}, "partial_rotary_factor is 3.0"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ("qwen2-moe", {"mlp_only_layers": [7]}, r"mlp_only_layers is \[7\]; it must list layers from 0 to 1"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name_before_memory_is_taken(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = family_model(name)
    folder = save_hf(tmp_path, model)
    (folder / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.setattr(SafetensorsWeights, "array", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(hw.HeadwayError, match=message):
        hw.Engine(folder, pages=8, threads=1)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("smollm3", {"hidden_act": "gelu"}),
        ("gemma", {"hidden_act": "silu"}),
        ("gpt-oss", {"attention_bias": False}),
        ("llama4", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),  # its norms undo the factor
    ],
)
def test_values_that_no_published_config_has_mean_what_transformers_takes_them_for(
    name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    _, model = family_model(name, **changes)
    tokens = random_tokens(97, 20)
    with hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine:
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))


def test_the_layers_of_mistral_that_have_a_window_may_be_listed(tmp_path: Path) -> None:
    """As Ministral 8B is published."""
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    sizes = {"num_hidden_layers": 3, "head_dim": 16, "sliding_window": 5, "layer_types": kinds}
    config, model = build_hf("MinistralConfig", "MinistralForCausalLM", sizes, 0)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 20)
    for names in ({}, {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}):
        (folder / "config.json").write_text(json.dumps(config | names))
        with hw.Engine(folder, pages=8, threads=1) as engine:
            assert engine.config.windows == (None, 5, 5)
            assert_close(all_logits(engine, tokens), reference_logits(model, tokens))


def test_ministral3_ends_where_its_queries_begin_to_grow_and_says_why(tmp_path: Path) -> None:
    _, model = family_model("ministral3")
    why = r"512 \(queries grow with their position from there to 1024, which is not supported\)"
    with hw.Engine(save_hf(tmp_path, model), pages=16, threads=1) as engine, engine.context() as context:
        with pytest.raises(hw.ContextLengthExceeded, match=why):
            context.forward().input_at([1], [512])
        forward = context.forward().input_at([5, 6], [0, 511])
        last = forward.probe(1, hw.Logits())
        with torch.no_grad():
            theirs = model(input_ids=torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, 511]])).logits[0, 1]
        assert_close(forward.execute().result().logits(last), theirs.numpy())


def test_a_file_without_one_expert_is_refused_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = family_model("qwen3-moe")
    folder = save_hf(tmp_path, model)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.experts.3.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    monkeypatch.setattr(SafetensorsWeights, "array", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(hw.BadModelFile, match=r"layers\.1\.mlp\.experts\.3\.up_proj\.weight' is missing"):
        hw.Engine(folder, pages=8, threads=1)


def test_what_a_described_family_does_not_do_is_refused_and_listed(tmp_path: Path) -> None:
    _, model = family_model("gpt2")
    folder = save_hf(tmp_path, model)
    with hw.Engine(folder, pages=16, threads=1, page_size=4) as engine:
        can = engine.capabilities
        assert (can.triton, can.update_weights, can.shift_pages) == (True, True, False)
        assert can.runner.startswith("native")
        assert "gate" not in can.adapters
        with engine.context() as one, engine.context() as other:
            other.forward().input(range(8)).execute().result()
            one.inner().append_from(other, [0])
            with pytest.raises(hw.Unsupported, match="shift is 3, and a gpt2 model learned its positions"):
                one.inner().append_from(other, [0], shift=3)


def test_a_plain_family_can_do_everything() -> None:
    with hw.Engine(random_model("qwen3"), pages=4) as engine:
        assert engine.capabilities.missing() == ()


IN_MEMORY = ["gemma3n", "gemma4", "gemma4-experts"]


@pytest.mark.parametrize("name", ["gemma3", *IN_MEMORY, *(pytest.param(n, marks=pytest.mark.slow) for n in QUICK)])
def test_a_decoder_of_torch_in_memory_is_computed_natively(name: str, tmp_path: Path) -> None:
    _, model = family_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 12)
    decoder = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
    with hw.Engine(decoder, pages=8, threads=2) as engine:
        assert engine.info.runner.startswith("native")
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))


@pytest.mark.parametrize("name", ["gemma3", "cohere2", "glm4"])
def test_shifted_pages_are_those_of_the_other_positions(name: str, tmp_path: Path) -> None:
    """Layers with ropes of their own, without one, and heads that are rotated in part."""
    _, model = family_model(name)
    tokens = random_tokens(97, 16)
    with (
        hw.Engine(save_hf(tmp_path, model), pages=16, threads=1, page_size=16) as engine,
        engine.context() as source,
        engine.context() as shifted,
        engine.context() as direct,
    ):
        source.forward().input(tokens).execute().result()
        shifted.inner().append_from(source, [0], shift=9)
        direct.forward().input_at(tokens, range(9, 25)).execute().result()
        assert_close(logit_rows(shifted, [5, 6]), logit_rows(direct, [5, 6]))


# -- experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", [True, False])
def test_routing_takes_the_highest_and_of_equals_the_lower(normalize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (200, 9), generator=generator).float()  # ties in almost every row
    chosen, weights = route(logits, 4, normalize=normalize)
    for row, ids, given in zip(logits.double(), chosen.tolist(), weights, strict=True):
        best = sorted(range(9), key=lambda x: (-float(row[x]), x))[:4]
        assert ids == best
        exact = row[best].softmax(0) if normalize else row.softmax(0)[best]
        torch.testing.assert_close(given.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["qwen2-moe", "mixtral"])
def test_the_native_step_routes_ties_as_the_reference_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 24)
    weights = load_file(folder / "model.safetensors")
    for key in [key for key in weights if key.endswith((".gate.weight", "mlp.gate.weight"))]:
        weights[key][[0, 1, 2, 4]] = 0  # all but one expert have the same logit: which are taken is a matter of order
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    found = []
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, pages=8, threads=2) as engine:
            found.append(all_logits(engine, tokens))
    assert_close(*found)


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", *(pytest.param(n, marks=pytest.mark.slow) for n in QUICK)])
def test_a_rows_bits_depend_on_nothing_else_on_the_native_step(name: str, tmp_path: Path) -> None:
    """In floats and in 8 bits: alone, in a prompt, beside others, for any number of threads."""
    _, model = family_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 20)
    for quantize in (None, "int8"):
        with hw.Engine(folder, pages=32, threads=1, quantize=quantize) as engine:
            whole = all_logits(engine, tokens)
        with hw.Engine(folder, pages=32, threads=3, quantize=quantize) as engine, engine.context() as context:
            rows = [logit_rows(context, tokens[:9]), *(logit_rows(context, [t]) for t in tokens[9:12])]
            others = [engine.context() for _ in range(3)]
            forwards = [c.forward().input(t) for c, t in zip([context, *others], [tokens[12:], [5], [7] * 9, [3, 4]])]
            handles = [forwards[0].probe(i, hw.Logits()) for i in range(8)]

            async def together(forwards: list[hw.Forward] = forwards, engine: hw.Engine = engine) -> hw.Output:
                with engine._lock:  # the worker forms no batch before all are queued
                    running = [forward.execute() for forward in forwards]
                return (await asyncio.gather(*running))[0]

            out = asyncio.run(together())
            rows.append(np.stack([out.logits(h) for h in handles]))
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_an_experts_rows_are_one_matmul_whatever_their_order() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(*s, generator=generator) for s in ((11, 6), (4, 5, 6), (4, 5)))
    counts = [3, 0, 7, 1]
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    expected = torch.einsum("nk,nmk->nm", x.double(), weight[owners].double()) + bias[owners].double()
    for tile in (None, 4):
        found = grouped_linear(x, weight, bias, counts, tile)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_table_of_models_has_the_families_of_the_registry() -> None:
    header, *rows = written()
    assert header == HEADER
    assert [row[0] for row in rows] == [family.name for family in FAMILIES]
    for row, family in zip(rows, FAMILIES, strict=True):
        assert row[1] == ", ".join(f"`{name}`" for name in family.architectures), family.name
        assert (row[2] == "no") == (family.gguf is None and family.name != "mistral"), family.name
        configs = dict(zip(PATHS, map(int, row[len(FACTS) :]), strict=True))
        assert {path: configs[path] for path in known()[family.name]} == known()[family.name], (
            f"{family.name}: not all of its configs have passed; run them and `python -m support.models_table`"
        )
        assert bool(configs["GGUF"]) == (family.gguf is not None), family.name


@pytest.mark.slow
def test_the_table_of_models_says_what_the_configs_of_the_tests_do() -> None:
    for row, family in zip(written()[1:], FAMILIES, strict=True):
        assert row[: len(FACTS)] == facts(family)


def test_configs_count_where_every_test_of_them_has_passed(tmp_path: Path) -> None:
    cases = [
        ("test_described_families", "test_a[gemma2]", ""),
        ("test_described_families", "test_b[gemma2]", ""),
        ("test_described_families", "test_a[gemma2-no-caps]", ""),
        ("test_described_families", "test_b[gemma2-no-caps]", "<failure/>"),
        ("test_described_families", "test_a[gemma2, torch]", ""),
        ("test_described_families", "test_a[gemma2-no-caps, torch]", "<error/>"),
        ("test_attention_families", "test_a[gemma4]", ""),
        ("test_attention_families", "test_a[something]", ""),  # not a config
        ("test_attention_families", "test_a[gemma4, torch]", ""),
        ("test_load", "test_a_gguf_file_is_the_model_it_was_written_from[0-qwen3]", ""),
        ("test_load", "test_a_gguf_file_is_the_model_it_was_written_from[1-qwen3]", ""),
        ("test_recurrent_gguf", "test_a_gguf_file_is_the_model_it_was_written_from[qwen3-next-plain-off]", ""),
        ("test_llama_cpp", "test_other_families[gpt2]", "<skipped/>"),
    ]
    body = "".join(f'<testcase classname="tests.models.{f}" name="{n}">{v}</testcase>' for f, n, v in cases)
    (tmp_path / "results.xml").write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>")
    counts = passed(tmp_path / "results.xml")
    assert counts["gemma2"] == {"native": 1, "torch": 1}
    assert counts["gemma4"] == {"native": 1, "torch": 1}
    assert counts["qwen3"] == {"GGUF": 2}
    assert counts["qwen3-next"] == {"GGUF": 1}
    assert counts["gpt2"] == {"llama.cpp": 0}
