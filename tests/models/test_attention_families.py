"""Latent attention and experts by groups (DeepSeek), chunked attention (Llama 4), layers that differ from each other
(Gemma 3n, Gemma 4), on the native step and on torch.

The logits are those of transformers, however rows arrive and whatever becomes of a context.
"""

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
from headway.kernels.host.attention import ChunkWindow, is_near
from headway.kernels.reference.experts import route_by_groups
from headway.models.config import from_hf
from headway.models.files.weights import SafetensorsWeights
from headway.testing import random_adapter
from support.checks import all_logits, assert_close, logit_rows, random_tokens, reference_logits
from support.hf import save_hf
from support.hf_families import LATENT_AND_CHUNKED, PER_LAYER, family_model
from support.lora import logits_of, save_lora, with_lora
from support.merged import merged

N = 37  # longer than two pages and every small chunk
HIDDEN = (3, 4, 17)  # slots that a mask hides
GROUPS = (LATENT_AND_CHUNKED | PER_LAYER).values()
QUICK = [next(iter(group)) for group in GROUPS]
OTHERS = [name for group in GROUPS for name in list(group)[1:]]
ON_TORCH = ("deepseek-v3", "llama4", "gemma3n", "gemma4")  # quick cases of the reference
NAMES = [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
CASES = [
    *QUICK,
    *(f"{name}, torch" for name in ON_TORCH),
    *(pytest.param(name, marks=pytest.mark.slow) for name in [*OTHERS, "deepseek-v2, torch"]),
    *(pytest.param(f"{name}, torch", marks=pytest.mark.slow) for name in OTHERS),
]


@dataclass(frozen=True, eq=False)
class Case:
    name: str
    model: Any
    folder: Path
    engine: hw.Engine
    tokens: list[int]
    expected: np.ndarray  # [N, V]


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a test are of its case's path: native where it has none."""
    given = call.params if (call := getattr(request.node, "callspec", None)) else {}
    monkeypatch.setenv("HEADWAY_NATIVE", native_setting(given.get("case") or given.get("name", "")))


def native_setting(name: str) -> str:
    return "off" if name.endswith(", torch") else "require"


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, _, path = request.param.partition(", ")
    _, model = family_model(name)
    folder = save_hf(tmp_path_factory.mktemp(name), model)
    tokens = random_tokens(model.config.vocab_size, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", native_setting(request.param))
        engine = hw.Engine(folder, pages=64, threads=1 if path else 2, step_ms=60_000)
    with engine:
        assert engine.info.runner.startswith(path or "native")
        yield Case(name, model, folder, engine, tokens, reference_logits(model, tokens))


def greedy(engine: hw.Engine, prompt: list[int], count: int, **options: Any) -> list[int]:
    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            return list(await context.fill(prompt).generate(hw.Argmax(), max_tokens=count, **options).tokens())

    return engine.run(program)


def test_logits_are_those_of_transformers_however_the_rows_arrive(case: Case) -> None:
    assert_close(all_logits(case.engine, case.tokens), case.expected, "the whole prompt")
    with case.engine.context() as context:
        rows = [logit_rows(context, case.tokens[:18])]
        with context.fork() as fork:
            logit_rows(fork, [5, 6, 7])
            fork.truncate(3)
            rows += [logit_rows(fork, case.tokens[18:30])]
            rows += [logit_rows(fork, [token]) for token in case.tokens[30:]]
            fork.truncate(N - 7)
            assert_close(logit_rows(fork, case.tokens[7:12]), case.expected[7:12], "cut far back")
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


def test_a_prompt_in_chunks_beside_another(case: Case) -> None:
    other = random_tokens(case.model.config.vocab_size, 11, seed=1)
    with hw.Engine(case.engine.decoder, pages=64, threads=1, max_batch_tokens=16, page_size=5) as engine:
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


def test_cached_preempted_and_saved_pages_are_the_same(case: Case) -> None:
    with hw.Engine(case.engine.decoder, pages=12, threads=1, page_size=4) as engine:
        assert_close(all_logits(engine, case.tokens), case.expected)
        with engine.context() as context:
            forward = context.forward().input(case.tokens)
            handle = forward.probe(-1, hw.Logits())
            out = forward.execute().result()
            assert out.stats.cache_hits == (N - 1) // 4
            assert_close(out.logits(handle), case.expected[-1], "after a cached prefix")
        contexts = [engine.context() for _ in range(3)]
        for part in (slice(0, 20), slice(20, 27), slice(27, N)):
            for context in contexts:
                assert_close(logit_rows(context, case.tokens[part]), case.expected[part], "preempted and resumed")
        assert engine.stats().preemptions > 0
    with case.engine.context() as context:
        logit_rows(context, case.tokens[:21])
        context.save("latent-kept")
        context.save("latent-durable", durable=True)
    before = case.engine.stats().tokens
    for name in ("latent-kept", "latent-durable"):
        opened = case.engine.take(name)
        assert opened is not None
        with opened:
            assert_close(logit_rows(opened, case.tokens[21:]), case.expected[21:], name)
    assert case.engine.stats().tokens - before == 2 * (N - 21)  # nothing was computed again
    case.engine.delete("latent-durable")
    with case.engine.context().fill(case.tokens) as context:  # nothing is computed yet: no page is saved
        context.save("latent-empty", durable=True)
    opened = case.engine.take("latent-empty")
    assert opened is not None
    with opened:
        assert (opened.seq_len, opened.pending) == (0, tuple(case.tokens))


def test_pages_in_host_memory_come_back_as_they_were(case: Case) -> None:
    """A context that has discarded pages is copied out when it is preempted."""
    with (
        hw.Engine(case.engine.decoder, pages=12, threads=1, page_size=4) as engine,
        engine.context() as context,
        engine.context() as other,
    ):
        logit_rows(context, case.tokens[:20])
        context.inner().discard_pages(1, 2)
        with context.fork() as fork:
            expected = logit_rows(fork, case.tokens[20:24])
        logit_rows(other, random_tokens(97, 40, seed=3))
        assert engine.stats().preemptions > 0
        other.release()
        assert_close(logit_rows(context, case.tokens[20:24]), expected)


def test_slots_that_are_kept_or_moved_are_those_of_their_positions(case: Case) -> None:
    with (
        hw.Engine(case.engine.decoder, pages=32, threads=1, page_size=16) as engine,
        engine.context() as source,
        engine.context() as moved,
        engine.context() as direct,
        engine.context() as few,
    ):
        logit_rows(source, case.tokens[:16])
        moved.inner().append_from(source, [0])
        assert_close(logit_rows(moved, case.tokens[16:]), case.expected[16:], "pages of another context")
        few.forward().input(case.tokens[:20]).execute().result()
        tree = [*range(16), 17, 19]
        few.inner().keep_slots(tree)
        mask = np.zeros((20, 20), bool)
        mask[np.tril_indices(20)] = True
        forward = direct.forward().input(case.tokens[:20])
        forward.execute().result()
        row = np.isin(np.arange(20), tree)
        other = direct.forward().input_at([5], [20]).attention_mask(hw.Mask.from_bool(row[None]))
        wanted = other.probe(0, hw.Logits())
        kept = few.forward().input_at([5], [20])
        found = kept.probe(0, hw.Logits())
        assert_close(kept.execute().result().logits(found), other.execute().result().logits(wanted), "kept slots")


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3-halves", "gemma3n", "gemma4"])
def test_shifted_pages_are_those_of_the_other_positions(name: str, tmp_path: Path) -> None:
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


def test_hidden_states_and_attention_are_those_of_transformers(case: Case) -> None:
    layers = case.engine.config.layers
    with torch.no_grad():
        theirs = case.model(
            input_ids=torch.tensor([case.tokens]), output_hidden_states=True, output_attentions=True, use_cache=False
        )
    with case.engine.context() as context:
        forward = context.forward().input(case.tokens)
        hidden = [forward.probe(20, hw.Hidden(l)) for l in range(layers + 1)]
        attention = [forward.probe(20, hw.AttentionScores(l)) for l in range(layers)]
        lens = forward.probe(20, hw.LogitLens([layers - 1], k=3))
        out = forward.execute().result()
    states, altup = theirs.hidden_states, case.engine.config.description.altup
    if altup is not None:  # of all streams, one is active; transformers does not show what becomes of them at the end
        hidden, states = hidden[:-1], [state[altup.active] for state in states]
    for l, handle in enumerate(hidden):
        assert_close(out.hidden(handle), states[l][0, 20].numpy(), f"hidden state {l}")
    for l, handle in enumerate(attention):
        assert_close(out.attention(handle), theirs.attentions[l][0, :, 20, :21].numpy(), f"attention {l}")
    assert len(out.lens(lens)) == 1


def test_speculation_and_drafts_of_its_own_layers_change_nothing(case: Case) -> None:
    prompt = case.tokens[:12] * 3
    plain = greedy(case.engine, prompt, 20)
    assert greedy(case.engine, prompt, 20, speculate=hw.PromptLookup()) == plain
    assert greedy(case.engine, prompt, 20, speculate=hw.OwnLayers(1)) == plain
    logits = reference_logits(case.model, [*prompt, *plain])[len(prompt) - 1 : -1]
    assert float((logits.max(1) - logits[np.arange(20), plain]).max()) < 1e-3


def test_a_rows_bits_depend_on_nothing_else_in_deterministic_mode(case: Case) -> None:
    with hw.Engine(case.folder, pages=64, threads=1, deterministic=True, step_ms=60_000) as engine:
        whole = all_logits(engine, case.tokens)
        assert_close(whole, case.expected)
        with engine.context() as context:
            rows = [logit_rows(context, case.tokens[:9]), *(logit_rows(context, [t]) for t in case.tokens[9:20])]
            with context.fork() as fork:
                logit_rows(fork, [3])
                fork.truncate(6)
                logit_rows(fork, case.tokens[15:20])
                rows.append(logit_rows(fork, case.tokens[20:]))
        np.testing.assert_array_equal(np.concatenate(rows), whole)


def test_the_sizes_that_are_reported_are_those_of_weights_and_cache(case: Case) -> None:
    info, config = case.engine.info, case.model.config
    corrections = sum(b.numel() for name, b in case.model.named_buffers() if name.endswith("correction_bias"))
    assert info.parameters == corrections + sum(p.numel() for p in case.model.parameters())
    rotated = {"llama4": 3, "llama4-published": 4}.get(case.name, 0)
    ones = 2 * 4 * 16 * rotated  # of norms without weights, in layers with a rope
    scales = 4 * sum(b.numel() for name, b in case.model.named_buffers() if name.endswith("layer_scalar"))
    if info.runner == "torch":
        assert info.weight_bytes - scales - 4 * info.parameters in (0, ones, ones // 2)
    else:  # rows in whole blocks of 16
        assert 1 <= info.weight_bytes / (4 * info.parameters) < 2
    if case.engine.config.description.latent is not None:
        slot = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim)
        assert case.engine.config.kv_values_per_token == slot  # a latent vector and a rotated key, for all heads
        assert case.engine._pool is not None
        assert case.engine._pool.nbytes == 4 * slot * 16 * (64 + 1)


def test_half_precision_computes_the_same_within_its_rounding(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with hw.Engine(case.folder, pages=16, threads=1, dtype="bfloat16") as engine:
        found = all_logits(engine, case.tokens[:8])
    assert np.isfinite(found).all()
    assert np.abs(found - case.expected[:8]).mean() < 0.15 * np.abs(case.expected[:8]).max()


def test_what_is_not_there_is_refused_and_listed(case: Case) -> None:
    can = case.engine.capabilities
    assert (can.native, can.triton, can.quantize, can.keeps_quantized) == (True, True, True, True)
    assert can.masks
    assert can.tree_drafts
    family = case.engine.config.family
    assert "the native step (torch computes it on a CPU)" not in can.missing()
    with pytest.raises(hw.Unsupported, match=f"the {family} model has .*not split; run it without tensor_parallel"):
        hw.Engine(case.folder, pages=8, tensor_parallel=2)
    assert can.update_weights


BITWISE = ("gemma3n", "gemma3n-second-stream", "gemma4", "gemma4-experts", "gemma4-even")


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "llama4", *BITWISE])
@pytest.mark.parametrize("quantize", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_quantized_weights_give_the_logits_of_the_reference(
    name: str, quantize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    folder, tokens, found = save_hf(tmp_path, model), random_tokens(97, 21), []
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, pages=16, threads=2, quantize=quantize) as engine:
            assert quantize in engine.info.format
            found.append(all_logits(engine, tokens))
            with engine.context() as context:
                parts = [logit_rows(context, tokens[:10]), *(logit_rows(context, [t]) for t in tokens[10:])]
            np.testing.assert_array_equal(np.concatenate(parts), found[-1])  # whatever the neighbors
    if name in BITWISE:
        np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(*found, rtol=1e-4, atol=1e-4)
    least = 0.9
    if quantize == "int4":  # scores that are not scaled down; experts that rounding chooses otherwise
        least = 0.6 if name in BITWISE else 0.8 if name == "deepseek-v3" else 0.9
    assert np.corrcoef(found[0].ravel(), reference_logits(model, tokens).ravel())[0, 1] > least


def test_the_synchronous_api_validates_and_profiles_it(case: Case) -> None:
    with hw.InferenceEngine(case.folder, pages=32, threads=1) as engine:
        engine.enable_profiling()
        engine.enable_validation_diagnostics()
        with hw.DecodeState() as state:
            engine.prefill_batched(state, case.tokens[:9], validate=True)
            engine.decode_step(state, case.tokens[9], True)
            assert len(state.layer_outputs) == case.engine.config.layers
            assert engine.sample_greedy(state) == int(case.expected[9].argmax())
        engine.record_profiling_sample()
        assert {"qkv", "attention", "feed-forward"} <= {phase.name for phase in engine.profile().phases}
    parts = case.engine.decoder.nbytes()
    assert parts["qkv"] > parts["norm"]
    assert sum(parts.values()) + case.engine.decoder.embedding.nbytes >= case.engine.info.weight_bytes


def test_a_row_that_sees_nothing_of_its_chunk_is_refused(tmp_path: Path) -> None:
    _, model = family_model("llama4")
    with hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine, engine.context() as context:
        logit_rows(context, random_tokens(97, 20))
        attend = np.arange(21) < 9  # the row's chunk begins at 18
        forward = context.forward().input([5]).attention_mask(hw.Mask.from_bool(attend[None]))
        with pytest.raises(
            hw.InvalidMask, match="inside this model's own chunk of 6 positions; let it attend to itself"
        ):
            forward.execute()


# -- adapters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("deepseek-v2-lite", ["q_proj", "o_proj", "lm_head"]),
        ("deepseek-v3", ["o_proj"]),
        ("llama4", ["q_proj", "k_proj", "v_proj", "o_proj"]),
        ("gemma3n", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("gemma4", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("gemma4-experts", ["q_proj", "k_proj", "down_proj"]),
    ],
)
def test_an_adapter_gives_the_logits_of_peft(name: str, modules: list[str], tmp_path: Path) -> None:
    _, model = family_model(name)
    wrapped = with_lora(model, target_modules=modules)
    adapter, tokens = hw.Adapter.load(save_lora(tmp_path / "adapter", wrapped)), random_tokens(97, 21)
    expected = logits_of(wrapped, tokens)
    for deterministic in (False, True):
        with hw.Engine(save_hf(tmp_path, model), pages=16, threads=1, deterministic=deterministic) as engine:
            with engine.context() as context:
                forward = context.forward().input(tokens).adapter(adapter)
                handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
                out = forward.execute().result()
            assert_close([out.logits(h) for h in handles], expected)


def test_an_adapter_of_a_dense_layer_is_that_of_merged_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """peft targets experts where it finds gate_proj, and so has no such adapter to compare with."""
    _, model = family_model("deepseek-v3-dense")
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with hw.Engine(save_hf(tmp_path, model), pages=16, threads=1) as engine:
        adapter, tokens = random_adapter(engine.config, roles=("o", "gate", "up", "down")), random_tokens(97, 21)
        with engine.context() as context:
            forward = context.forward().input(tokens).adapter(adapter, 0.5)
            handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
            out = forward.execute().result()
        decoder: Any = merged(engine.decoder, (adapter, 0.5))
    for native in ("off", "require"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(decoder, pages=16, threads=1) as engine:
            assert_close([out.logits(h) for h in handles], all_logits(engine, tokens))


# -- layers that share keys and values -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_layers_that_share_keys_and_values_take_no_slots_and_need_no_weights(name: str, tmp_path: Path) -> None:
    """Published files have matrices for them that nobody reads."""
    _, model = family_model(name)
    folder, tokens = save_hf(tmp_path, model), random_tokens(97, 12)
    weights = load_file(folder / "model.safetensors")
    for part in ("k_proj", "v_proj"):
        weights[f"model.layers.4.self_attn.{part}.weight"] = torch.full((32, 64), 3.0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with hw.Engine(folder, pages=16, threads=1) as engine:
        assert engine.config.kv_layers == (0, 1, 2)
        assert engine.config.attention_layers == (0, 1, 2, 3, 4, 5)
        assert engine.config.kv_places == (0, 1, 2, 1, 2, 1)
        numbers = 2 * 2 * (16 + 16 + 16) if name == "gemma3n" else 2 * 2 * (16 + 24 + 16)
        assert engine.info.kv_bytes_per_token == 4 * numbers
        assert engine._pool is not None
        assert engine._pool.nbytes == 4 * numbers * 16 * (16 + 1)
        assert_close(all_logits(engine, tokens), reference_logits(model, tokens))
    weights["model.layers.4.self_attn.q_gate.weight"] = torch.zeros(2, 2)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(hw.BadModelFile, match=r"do not belong to this .* config, such as .*q_gate"):
        hw.Engine(folder, pages=8, threads=1)


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
def test_an_adapter_of_keys_that_a_layer_does_not_have_is_refused_by_name(name: str, tmp_path: Path) -> None:
    _, whole = family_model(name, num_kv_shared_layers=0)
    _, model = family_model(name)
    adapter = hw.Adapter.load(save_lora(tmp_path / "adapter", with_lora(whole, target_modules=["k_proj"])))
    with (
        hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine,
        pytest.raises(hw.Unsupported, match=r"layers\.3\.self_attn\.k_proj.*has no such matrix"),
    ):
        engine.load_adapter(adapter)


# -- routing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_routing_by_groups_takes_the_best_and_of_equals_the_lower(score: str) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 4, (200, 12), generator=generator).float()  # ties in almost every row
    correction = torch.randint(-1, 2, (12,), generator=generator).float() if score == "sigmoid" else None
    best, normalize = (2, True) if score == "sigmoid" else (1, False)
    how: dict[str, Any] = {"score": score, "groups": 4, "kept": 2, "best": best, "scale": 2.5}
    chosen, weights = route_by_groups(logits, 5, correction=correction, normalize=normalize, **how)
    for row, ids, given in zip(logits, chosen.tolist(), weights, strict=True):
        own = (row.sigmoid() if score == "sigmoid" else row.softmax(0)).tolist()
        ranked = own if correction is None else (torch.tensor(own) + correction).tolist()
        groups = [sorted(ranked[3 * g : 3 * g + 3])[-best:] for g in range(4)]
        kept = sorted(range(4), key=lambda g: (-round(sum(groups[g]), 5), g))[:2]
        wanted = sorted((x for x in range(12) if x // 3 in kept), key=lambda x: (-round(ranked[x], 5), x))[:5]
        assert ids == wanted
        exact = torch.tensor([own[x] for x in wanted])
        exact = 2.5 * (exact / exact.sum() if normalize else exact)
        torch.testing.assert_close(given, exact, rtol=1e-5, atol=1e-6)


def test_a_chunk_is_the_rows_own() -> None:
    positions = np.arange(7)
    near = is_near(ChunkWindow(3), positions[:, None], positions[None])
    assert near.tolist() == [[i // 3 == j // 3 for j in range(7)] for i in range(7)]


# -- configs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v3", {"n_group": 3}, "n_group is 3; 8 experts cannot be divided into so many groups"),
        ("deepseek-v3", {"n_group": 8}, "n_group is 8; a group of 8 experts has 1, and needs 2"),
        ("deepseek-v3", {"topk_group": 5}, "topk_group is 5; it must be at most n_group, which is 4"),
        ("deepseek-v3", {"topk_group": 1}, "a token goes to 3 experts, and topk_group, which is 1, leaves it 2"),
        ("deepseek-v3", {"n_group": None}, "has no key 'n_group'"),
        ("deepseek-v3", {"scoring_func": "tanh"}, "scoring_func is 'tanh'; supported are sigmoid"),
        ("deepseek-v3", {"topk_method": "greedy"}, "topk_method is 'greedy'; supported are noaux_tc"),
        ("deepseek-v3", {"kv_lora_rank": None}, "has no key 'kv_lora_rank'"),
        ("deepseek-v3", {"q_lora_rank": "..."}, "has no key 'q_lora_rank'; it must be a size, or null"),
        ("deepseek-v3", {"q_lora_rank": 0}, "q_lora_rank is 0; it must be between 1"),
        ("deepseek-v3", {"q_lora_rank": 25}, r"q_a_proj.weight' has shape \[24, 64\]; this config needs \[25, 64\]"),
        ("deepseek-v3", {"qk_rope_head_dim": 7}, "7 rotated dimensions|the head size is 7"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads is 2; each of 4 heads has keys of its own"),
        ("deepseek-v3", {"moe_layer_freq": 2}, "moe_layer_freq is 2; the deepseek-v3 family has 1 alone"),
        ("deepseek-v3", {"model_type": "deepseek_v2"}, "the config mixes families"),
        ("deepseek-v3", {"sliding_window": 8, "attn_temperature_tuning": True}, "attn_temperature_tuning is True"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "quantized as 'fp8'"),
        (
            "deepseek-v3",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope type 'linear' is not supported with latent attention",
        ),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported are softmax"),
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported are greedy"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob is true"),
        ("deepseek-v2", {"num_experts_per_tok": None}, "has no key 'num_experts_per_tok'"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be between 1"),
        ("llama4", {"moe_layers": [7]}, r"moe_layers is \[7\]; it must list layers from 0 to 3"),
        ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers must name one of 1, 0 for each of 4 layers"),
        ("llama4", {"num_experts_per_tok": 6}, "a token goes to 6 experts; it must be between 1 and 5"),
        ("llama4", {"layer_types": ["sliding_attention"] * 4}, "layer_types must name one of chunked_attention"),
        ("llama4", {"architectures": ["Llama4ForConditionalGeneration"]}, "text_config is None; Llama4ForConditional"),
        (
            "llama4",
            {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {"model_type": "gemma2"}},
            "the text model of Llama4ForConditionalGeneration is 'gemma2' .* supported are llama4_text",
        ),
        ("gemma3n", {"num_kv_shared_layers": 5}, "no layer before 1 is of the kind of layer 1"),
        ("gemma3n", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6; it must be between 0 and 5"),
        ("gemma3n", {"altup_active_idx": 3}, "altup_active_idx is 3; it must be between 0 and 2"),
        ("gemma3n", {"altup_num_inputs": 1}, "altup_num_inputs is 1; it must be between 2"),
        ("gemma3n", {"intermediate_size": [84, 52]}, "intermediate_size must have a positive integer for each of 6"),
        ("gemma3n", {"activation_sparsity_pattern": [1.0] * 6}, "a number from 0 to less than 1 for each of 6 layers"),
        ("gemma3n", {"model_type": "gemma3_text"}, "the config mixes families"),
        (
            "gemma3n",
            {"architectures": ["Gemma3nForConditionalGeneration"]},
            "text_config is None; Gemma3nForConditional",
        ),
        (
            "gemma3n",
            {
                "architectures": ["Gemma3nForConditionalGeneration"],
                "text_config": {},
                "quantization_config": {"quant_method": "fp8"},
            },
            "Gemma3nForConditionalGeneration with quantized weights is not supported",
        ),
        ("gemma4", {"vocab_size_per_layer_input": 96}, "is 96; it must be at least vocab_size, 97"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ("gemma4", {"per_layer_config": {"1": {"hidden_size": 9}}}, "for layer 1; it may have head_dim and"),
        ("gemma4", {"per_layer_config": {"1": {"num_key_value_heads": 3}}}, "4 heads cannot share 3 key heads evenly"),
        ("gemma4", {"per_layer_config": {"5": {"head_dim": 20}}}, "layer 3 cannot attend|layer 5 cannot attend"),
        ("gemma4", {"rope_parameters": {"rope_type": "default"}}, "must have an object for each of full_attention"),
        ("gemma4-experts", {"top_k_experts": 6}, "a token goes to 6 experts; it must be between 1 and 5"),
        ("gemma4-experts", {"num_experts": 6}, r"per_expert_scale' has shape \[5\]; this config needs \[6\]"),
        ("gemma4-experts", {"num_experts": None}, "has no key 'num_experts'"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name_before_memory_is_taken(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = family_model(name)
    folder = save_hf(tmp_path, model)
    changed = {key: value for key, value in (config | changes).items() if value != "..."}
    (folder / "config.json").write_text(json.dumps(changed))
    monkeypatch.setattr(SafetensorsWeights, "array", lambda *_, **__: pytest.fail("a weight was read"))
    monkeypatch.setattr(SafetensorsWeights, "load", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(hw.HeadwayError, match=message):
        hw.Engine(folder, pages=8, threads=1)


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_left_out_means_what_transformers_takes_it_for(name: str, tmp_path: Path) -> None:
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


def test_a_published_config_is_read(tmp_path: Path) -> None:
    """As DeepSeek's own folder spells it, with a layer that drafts."""
    published = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "attention_bias": False,
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
    }
    config = from_hf(published)
    assert config.kv_values_per_token == 61 * 576
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * np.log(40) + 1) ** 2)
    assert config.parameters == 671_026_419_200  # as its own card counts, without the layer that drafts
    assert config.active_parameters == pytest.approx(37e9, rel=0.02)


def test_the_published_config_of_gemma4_is_read() -> None:
    """As google/gemma-4-E2B has its text model: the sizes of heads in keys of their own."""
    config = from_hf(
        {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "vocab_size": 262144,
            "hidden_size": 1536,
            "intermediate_size": 6144,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "global_head_dim": 512,
            "max_position_embeddings": 131072,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
            "num_kv_shared_layers": 20,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 30.0,
        }
    )
    assert config.kv_values_per_token == 2 * (12 * 256 + 3 * 512)
    assert config.kv_places[15:20] == (13,) * 4 + (14,)
    assert config.inner(14) == 6144
    assert config.inner(15) == 12288
    assert config.active_parameters == pytest.approx(2.3e9, rel=0.05)  # the E of its name: without tables of tokens
