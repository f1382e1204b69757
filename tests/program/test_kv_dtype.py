"""Keys and values in half precision: native and torch alike, held against transformers with a cache that rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headway as hw
from headway import Mask
from headway.kernels.native import library
from headway.testing import random_model
from support.checks import assert_close, logit_rows, random_tokens
from support.hf import random_hf, save_hf

V = 97
HALVES = ("float16", "bfloat16")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": V}


class RoundingCache(DynamicCache):
    """Gives back keys and values as a type of half precision keeps them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.rounded = dtype

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = (x.to(self.rounded).float() for x in (key_states, value_states))
        return super().update(keys, values, *args, **kwargs)


def rounding_attention(module: Any, query: Any, key: Any, value: Any, *_: Any, scaling: float, **more: Any) -> Any:
    """Causal attention with queries and weights in bfloat16, weights relative to the largest of 128 slots."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.bfloat16).float()

    key, value = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (key, value))
    scores = rounded(query * scaling) @ key.transpose(2, 3)  # [1, H, T, S]
    scores += torch.full(scores.shape[2:], -torch.inf).triu(1)
    most = scores.amax(-1, keepdim=True)
    total, mixed = torch.zeros_like(most), torch.zeros_like(query)
    for part, own in zip(scores.split(128, -1), value.split(128, 2), strict=True):
        largest = part.amax(-1, keepdim=True).clamp(min=-1e30)
        weights, factor = torch.exp(part - largest), torch.exp(largest - most)
        total = total + weights.sum(-1, keepdim=True) * factor
        mixed = mixed + rounded(weights) @ own * factor
    return (mixed / total).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("rounding", rounding_attention)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    _, model = random_hf("llama", 3, head_dim=16, **SIZES)
    return save_hf(tmp_path_factory.mktemp("half"), model), model


def opened(runner: str, path: Any, **options: Any) -> hw.Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", "require" if runner == "native" else "off")
        engine = hw.Engine(path, **{"pages": 32, "threads": 2, **options})
    assert engine.info.runner.startswith(runner)
    return engine


def passes(engine: hw.Engine, counts: tuple[int, ...] = (1, 40, 3, 1, 100, 1)) -> np.ndarray:
    tokens = random_tokens(V, sum(counts))
    with engine.context() as context:
        return np.concatenate([logit_rows(context, tokens[context.seq_len :][:n]) for n in counts])


@pytest.mark.parametrize("runner", ["native", "torch"])
@pytest.mark.parametrize("kind", HALVES)
def test_logits_are_those_of_transformers_with_a_cache_that_rounds(
    saved: tuple[Path, Any], kind: str, runner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, model = saved
    tokens = random_tokens(V, 146)
    with torch.inference_mode():
        plain = model(torch.tensor([tokens])).logits[0].numpy()
        with monkeypatch.context() as patch:
            if kind == "bfloat16":  # which queries and weights are rounded to as well
                patch.setattr(model.config, "_attn_implementation", "rounding")
            found = model(torch.tensor([tokens]), past_key_values=RoundingCache(getattr(torch, kind)))
    expected = found.logits[0].numpy()
    with opened(runner, path, kv_dtype=kind) as engine:
        assert (engine.info.kv_dtype, engine.info.kv_bytes_per_token) == (kind, 2 * engine.config.kv_values_per_token)
        ours = passes(engine)
    # A value on the border of two half-precision numbers may take either.
    assert_close(ours, expected, "logits", 2e-4 if kind == "float16" else 2e-3)
    assert np.abs(expected - plain).max() > 1e-5  # the cache does round


@pytest.mark.parametrize("page_size", [16, 24, 5])
@pytest.mark.parametrize("kind", ["float32", *HALVES])
def test_quantized_models_have_the_same_bits_on_native_and_torch(
    saved: tuple[Path, Any], kind: str, page_size: int
) -> None:
    options = {"quantize": "int8", "page_size": page_size, "kv_dtype": kind}
    with opened("native", saved[0], **options) as ours, opened("torch", saved[0], **options) as theirs:
        np.testing.assert_array_equal(passes(ours), passes(theirs))


@pytest.mark.parametrize("kind", HALVES)
def test_heads_of_an_odd_width_and_single_decodes_agree(kind: str) -> None:
    model = random_model("qwen3", head_dim=10, heads=2, kv_heads=2, layers=2)
    with opened("native", model, kv_dtype=kind) as ours, opened("torch", model, kv_dtype=kind) as theirs:
        for counts in ((1, 1, 1), (70, 1)):
            assert_close(passes(ours, counts), passes(theirs, counts), "logits", 2e-3)


@pytest.mark.parametrize("kind", HALVES)
def test_a_row_has_the_same_bits_in_every_chunk_fork_and_window(saved: tuple[Path, Any], kind: str) -> None:
    tokens = random_tokens(V, 60)
    with opened("native", saved[0], quantize="int8", kv_dtype=kind, deterministic=True) as engine:
        with engine.context(salt="whole") as context:
            whole = logit_rows(context, tokens)
        with engine.context(salt="parts") as context:
            parts = [logit_rows(context, tokens[i:j]) for i, j in ((0, 1), (1, 3), (3, 20), (20, 59))]
            forks = [context.fork() for _ in range(3)]
            ends = [fork.forward().input(tokens[59:]) for fork in forks]
            handles = [end.probe(0, hw.Logits()) for end in ends]
            running = [end.execute() for end in ends]
            for one, handle in zip(running, handles, strict=True):
                np.testing.assert_array_equal(one.result().logits(handle), whole[59])
            for fork in forks:
                fork.release()
            np.testing.assert_array_equal(np.concatenate(parts), whole[:59])
    found = []
    for trim in (True, False):
        engine = opened("native", saved[0], quantize="int8", kv_dtype=kind, trim=trim)
        with engine, engine.context() as context:
            logit_rows(context, tokens)
            forward = context.forward().input([3, 4]).attention_mask(Mask.window(20))
            handle = forward.probe(-1, hw.Logits())
            found.append(forward.execute().result().logits(handle))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("kind", HALVES)
def test_masked_prompts_have_the_same_bits_on_every_instruction_set_and_torch(
    saved: tuple[Path, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(V, 170)
    bits = np.random.default_rng(0).random((40, 170)) < 0.6
    bits[np.arange(40), 130 + np.arange(40)] = True
    found = []
    for isa in (*library.available_isas(), "torch"):
        if isa != "torch":
            monkeypatch.setenv("HEADWAY_ISA", isa)
        runner = "torch" if isa == "torch" else "native"
        with opened(runner, saved[0], quantize="int8", kv_dtype=kind) as engine, engine.context() as context:
            logit_rows(context, tokens[:130])
            forward = context.forward().input(tokens[130:]).attention_mask(Mask.from_bool(bits))
            handles = [forward.probe(i, hw.Logits()) for i in range(40)]
            out = forward.execute().result()
            found.append(np.stack([out.logits(handle) for handle in handles]))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


@pytest.mark.parametrize("kind", HALVES)
def test_a_masked_slot_that_is_not_a_number_is_not_multiplied(tmp_path: Path, kind: str) -> None:
    _, model = random_hf("llama", 3, head_dim=16, tie_word_embeddings=False, **SIZES)
    with torch.no_grad():
        model.model.embed_tokens.weight[96] = torch.nan
    path, masked = save_hf(tmp_path, model), [7, 12, 31]
    tokens, bits = random_tokens(90, 40), np.ones((40, 40), dtype=bool)
    bits[:, masked] = False
    bits[masked, masked] = True
    found = []
    for token in (5, 96):
        for slot in masked:
            tokens[slot] = token
        with opened("native", path, kv_dtype=kind) as engine, engine.context() as context:
            forward = context.forward().input(tokens).attention_mask(Mask.from_bool(bits))
            handles = {i: forward.probe(i, hw.Logits()) for i in range(40) if i not in masked}
            out = forward.execute().result()
            found.append(np.stack([out.logits(handle) for handle in handles.values()]))
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.parametrize("kind", HALVES)
def test_preempted_and_moved_pages_come_back_with_their_bits(saved: tuple[Path, Any], kind: str) -> None:
    tokens = random_tokens(V, 70)
    with opened("native", saved[0], kv_dtype=kind, pages=6, quantize="int8") as engine:
        with engine.context(salt="alone") as context:
            logit_rows(context, tokens[:69])
            expected = logit_rows(context, tokens[69:])
        first = engine.context(salt="first")
        logit_rows(first, tokens[:40])
        first.inner().discard_pages(0, 1)  # it cannot be computed again, and goes to host memory
        kept = logit_rows(first, [5])
        second = engine.context(salt="second")
        logit_rows(second, tokens[:69])
        np.testing.assert_array_equal(logit_rows(second, tokens[69:]), expected)
        second.release()
        first.truncate(1)
        np.testing.assert_array_equal(logit_rows(first, [5]), kept)
        assert engine.stats().preemptions
        first.release()


def test_a_snapshot_says_its_type_and_is_computed_again_under_another(
    saved: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    tokens, found = random_tokens(V, 40), {}
    with opened("native", saved[0], kv_dtype="float16") as engine, engine.context() as context:
        logit_rows(context, tokens)
        context.save("half", durable=True)
        found["float16"] = logit_rows(context, [7])
    for kind in ("float32", "bfloat16"):
        with opened("native", saved[0], kv_dtype=kind) as engine, engine.context() as context:
            logit_rows(context, tokens)
            found[kind] = logit_rows(context, [7])
    assert len({rows.tobytes() for rows in found.values()}) == 3
    for kind, expected in found.items():
        with opened("native", saved[0], kv_dtype=kind) as engine:
            context = engine.open("half")
            assert context is not None
            np.testing.assert_array_equal(logit_rows(context, [7]), expected)
            context.release()


def test_auto_is_float16_for_quantized_weights_and_float32_for_others(
    saved: tuple[Path, Any],
) -> None:
    for options, kind in (({}, "float32"), ({"quantize": "int8"}, "float16"), ({"quantize": "int4"}, "float16")):
        for runner in ("native", "torch"):
            with opened(runner, saved[0], **options) as engine:
                assert engine.info.kv_dtype == kind


def test_what_is_not_supported_is_refused(saved: tuple[Path, Any]) -> None:
    for wrong in ("float8", "", None, 16):
        with pytest.raises(hw.InvalidInput, match="it takes auto, float32, bfloat16 or float16"):
            hw.Engine(saved[0], kv_dtype=wrong, pages=8)  # type: ignore[arg-type]
    with pytest.raises(hw.Unsupported, match="'float16' is for CPUs that compute in float32; on cpu in bfloat16"):
        hw.Engine(saved[0], dtype="bfloat16", kv_dtype="float16", pages=8)
    hw.Engine(saved[0], dtype="bfloat16", kv_dtype="bfloat16", pages=8).close()


@pytest.mark.parametrize("kind", HALVES)
def test_validation_compares_with_the_same_cache(saved: tuple[Path, Any], kind: str) -> None:
    with opened("native", saved[0], quantize="int8", kv_dtype=kind) as engine:
        sync = hw.InferenceEngine(engine)
        sync.enable_validation_diagnostics()
        with hw.DecodeState() as state:
            sync.prefill_batched(state, random_tokens(V, 30))
            sync.decode_step(state, 3)
        assert sync.diagnostics
