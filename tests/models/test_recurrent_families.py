"""Families with recurrent layers: the logits of transformers, however rows arrive and whatever becomes of a context."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from transformers import Lfm2Config, Lfm2ForCausalLM

import headway as hw
from headway.kv.states import pages_between
from headway.models.config import from_hf
from headway.models.description import GatedDelta
from headway.models.files.weights import SafetensorsWeights
from headway.program.generation.speculation.drafter import Draft
from support.checks import all_logits, assert_close, logit_rows, random_tokens, reference_logits
from support.hf import save_hf
from support.hf_families import RECURRENT, family_model
from support.int8_hf import int8
from support.scripted import QUIET

N = 37
QUICK = ("lfm2", "qwen3-next", "mamba2", "granite-hybrid")
NAMES = [name for group in RECURRENT.values() for name in group]
CASES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
CASES += ["lfm2, torch", "qwen3-next, torch"]
CASES += [pytest.param(f"{name}, torch", marks=pytest.mark.slow) for name in NAMES if f"{name}, torch" not in CASES]


@dataclass(frozen=True, eq=False)
class Case:
    model: Any
    folder: Path
    engine: hw.Engine
    tokens: list[int]
    expected: np.ndarray  # [N, V]


@pytest.fixture(autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a test are of its case's path: native where it has none."""
    call = getattr(request.node, "callspec", None)
    monkeypatch.setenv("HEADWAY_NATIVE", native_setting(call.params.get("case", "") if call else ""))


def native_setting(name: str) -> str:
    return "off" if name.endswith(", torch") else "require"


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, _, path = request.param.partition(", ")
    _, model = family_model(name)
    folder = save_hf(tmp_path_factory.mktemp("recurrent"), model)
    tokens = random_tokens(model.config.vocab_size, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", native_setting(request.param))
        engine = hw.Engine(folder, pages=64, threads=1 if path else 2, step_ms=60_000)
    with engine:
        assert engine.info.runner.startswith(path or "native")
        yield Case(model, folder, engine, tokens, reference_logits(model, tokens))
        check_states(engine)


def check_states(engine: hw.Engine) -> None:
    """Every place of the state pool is free, or kept for somebody."""
    with engine._lock:
        engine._loop.drain()
        assert engine._states is not None
        tables = [t.states for t in engine._loop.kv_cache.tables if not t.closed and t.states is not None]
        engine._states.check(tables)
        assert not engine._states._pinned


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
        check_states(engine)


def test_the_last_token_is_read_again_after_a_cut(case: Case) -> None:
    with case.engine.context() as context:
        logit_rows(context, case.tokens)
        context.truncate(9)
        forward = context.forward()
        handle = forward.probe(-1, hw.Logits())
        hidden = forward.probe(-1, hw.Hidden(1))
        out = forward.execute().result()
        assert_close(out.logits(handle), case.expected[N - 10])
        assert out.hidden(hidden).shape == (case.engine.config.hidden_size,)
        assert_close(logit_rows(context, case.tokens[N - 9 :]), case.expected[N - 9 :])


def test_a_cached_prefix_ends_where_state_is_kept(case: Case) -> None:
    with hw.Engine(case.engine.decoder, pages=64, threads=1, page_size=4) as engine:
        assert_close(all_logits(engine, case.tokens), case.expected)
        with engine.context() as context:
            forward = context.forward().input(case.tokens)
            handle = forward.probe(-1, hw.Logits())
            out = forward.execute().result()
            assert out.stats.cache_hits == (N - 1) // 4
            assert_close(out.logits(handle), case.expected[-1])
        with engine.context() as context:  # another text after two pages
            other = [*case.tokens[:9], 1, 2, 3]
            forward = context.forward().input(other)
            handle = forward.probe(-1, hw.Logits())
            out = forward.execute().result()
            assert out.stats.cache_hits in (0, 2)
            assert_close(out.logits(handle), reference_logits(case.model, other)[-1])
        engine.cache.clear()
        assert_close(all_logits(engine, case.tokens), case.expected)
        check_states(engine)


def test_preempted_contexts_resume_with_their_state(case: Case) -> None:
    with hw.Engine(case.engine.decoder, pages=12, threads=1, page_size=4) as engine:
        contexts = [engine.context() for _ in range(3)]
        for part in (slice(0, 20), slice(20, 27), slice(27, N)):
            for context in contexts:
                assert_close(logit_rows(context, case.tokens[part]), case.expected[part])
        assert engine.stats().preemptions > 0
        check_states(engine)


def test_saved_contexts_go_on_where_they_were(case: Case) -> None:
    with case.engine.context() as context:
        logit_rows(context, case.tokens[:21])
        context.save("recurrent-kept")
        context.save("recurrent-durable", durable=True)
    steps = case.engine.stats().tokens
    for name in ("recurrent-kept", "recurrent-durable"):
        opened = case.engine.take(name)
        assert opened is not None
        with opened:
            assert_close(logit_rows(opened, case.tokens[21:]), case.expected[21:], name)
    assert case.engine.stats().tokens - steps == 2 * (N - 21)  # nothing was computed again
    case.engine.delete("recurrent-durable")


def test_speculation_changes_nothing(case: Case) -> None:
    prompt = case.tokens[:12] * 3
    plain = greedy(case.engine, prompt, 30)
    assert greedy(case.engine, prompt, 30, speculate=hw.PromptLookup()) == plain
    assert greedy(case.engine, prompt, 30, speculate=Wrong([*prompt, *plain])) == plain
    assert case.engine.stats().accepted > 0
    logits = reference_logits(case.model, [*prompt, *plain])
    assert logit_argmax_gap(logits[len(prompt) - 1 : -1], plain) < 1e-3


def logit_argmax_gap(logits: np.ndarray, chosen: list[int]) -> float:
    """How far the chosen tokens are below the best."""
    rows = np.arange(len(chosen))
    return float((logits.max(1) - logits[rows, chosen]).max())


class Wrong:
    """Drafts two right tokens and then two others."""

    adaptive = False

    def __init__(self, text: list[int]) -> None:
        self._text = text

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        right = self._text[len(tokens) : len(tokens) + 2]
        return [*right, 1, 2][:limit] if right else []

    def accept(self, tokens: Sequence[int]) -> None:
        pass


@pytest.mark.slow
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


def test_the_sizes_that_are_reported_are_those_of_the_weights(case: Case) -> None:
    info = case.engine.info
    assert info.parameters == sum(p.numel() for p in case.model.parameters())
    if info.runner == "torch":
        assert info.weight_bytes == 4 * info.parameters
    else:  # rows in whole blocks of 16
        assert 1 <= info.weight_bytes / (4 * info.parameters) < 2


# -- what is refused -----------------------------------------------------------------------------------------------


def test_what_recurrent_layers_cannot_do_is_refused_early_and_listed(case: Case) -> None:
    can = case.engine.capabilities
    assert can.native
    assert not any((can.masks, can.move_slots, can.repeat_positions, can.tree_drafts))
    with case.engine.context() as context, case.engine.context() as other:
        logit_rows(context, case.tokens[:20])
        logit_rows(other, case.tokens[:20])
        for mask, causal in ((hw.Mask.window(3), True), (hw.Mask.causal(), False)):
            with pytest.raises(hw.Unsupported, match="recurrent layers"):
                context.forward().input([1, 2, 3]).attention_mask(mask, causal=causal).execute()
        with pytest.raises(hw.Unsupported, match="position 4 is given again"):
            context.forward().input_at([1, 2], [20, 4]).execute()
        inner = context.inner()
        moves: list[Any] = [lambda: inner.discard_pages(0, 1), lambda: inner.keep_slots([0, 2])]
        for move in [*moves, lambda: inner.append_from(other, [0])]:
            with pytest.raises(hw.Unsupported, match="recurrent layers"):
                move()
        with pytest.raises(hw.Unsupported, match="recurrent layers"):
            context.generate(hw.Argmax(), attention_mask=hw.Mask.window(9), max_tokens=3)
        with pytest.raises(hw.Unsupported, match="proposed a tree"):
            greedy(case.engine, case.tokens[:9], 9, speculate=Tree())
        layer = case.engine.config.recurrent_layers[0]
        with pytest.raises(hw.Unsupported, match=f"layer {layer} is recurrent"):
            context.forward().input([1]).probe(0, hw.AttentionScores(layer))
        explicit = context.forward().input(case.tokens[20:]).attention_mask(hw.Mask.causal())
        handle = explicit.probe(-1, hw.Logits())
        assert_close(explicit.execute().result().logits(handle), case.expected[-1])


@pytest.mark.parametrize("name", QUICK)
def test_quantized_weights_give_the_logits_of_transformers_with_rounded_numbers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, model = family_model(name)
    model.config._experts_implementation = "eager"  # experts by linear layers, which `int8` changes
    folder, tokens, found = save_hf(tmp_path, model), random_tokens(97, 21), []
    for native in ("require", "off"):
        monkeypatch.setenv("HEADWAY_NATIVE", native)
        with hw.Engine(folder, pages=16, threads=2, quantize="int8", kv_dtype="float32") as engine:
            found.append(all_logits(engine, tokens))
            with engine.context() as context:
                parts = [logit_rows(context, tokens[:10]), *(logit_rows(context, [t]) for t in tokens[10:])]
            if native == "require":  # whatever the neighbors
                np.testing.assert_array_equal(np.concatenate(parts), found[-1])
    with int8(model):
        expected = reference_logits(model, tokens)
    for logits in found:  # a number between two of 8 bits may fall to either side, and change what comes after it
        assert_close(logits[:8], expected[:8])
        assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > 0.99


@pytest.mark.parametrize(
    "changes",
    [
        {"block_ff_dim": 100},
        {"block_ff_dim": 100, "intermediate_size": 61, "tie_embedding": False},
        {
            "intermediate_size": 61,
            "block_ffn_dim_multiplier": 1.3,
            "block_multiple_of": 7,
            "tie_word_embeddings": False,
        },
        {"block_ff_dim": 100, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False, "tie_embedding": True},
        {"block_ff_dim": 99, "block_ffn_dim_multiplier": 0.7, "block_multiple_of": 1},
        {},
    ],
)
def test_the_feed_forward_of_lfm2_is_as_wide_as_its_rules_say(changes: dict[str, Any]) -> None:
    """Published configs have its width in `block_ff_dim` alone, and tie the output by `tie_embedding`."""
    config, _ = family_model("lfm2")
    rules = ("block_", "tie_", "intermediate_size")
    config = {key: value for key, value in config.items() if not key.startswith(rules)} | changes
    with torch.device("meta"):
        theirs = Lfm2ForCausalLM(Lfm2Config.from_dict(dict(config)))
    ours = from_hf(config)
    assert ours.parameters == sum(p.numel() for p in theirs.parameters())
    assert ours.tied == theirs.config.tie_word_embeddings


class Tree:
    adaptive = False

    def draft(self, tokens: Sequence[int], limit: int) -> Draft:
        return Draft((1, 2), parents=(-1, -1)) if limit > 1 else Draft(())

    def accept(self, tokens: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"layer_types": ["conv"]}, "layer_types must name one of conv, full_attention for each of 4 layers"),
        ("lfm2", {"conv_L_cache": 0}, "conv_L_cache is 0; it must be between 2"),
        ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; recurrent layers have silu alone"),
        ("granite-hybrid", {"hidden_act": "gelu"}, "recurrent layers have silu alone"),
        ("mamba2", {"hidden_act": "gelu"}, "recurrent layers have silu alone"),
        ("lfm2", {"layer_types": None, "full_attn_idxs": [9]}, r"full_attn_idxs is \[9\]; it must list layers"),
        ("qwen3-next", {"linear_num_value_heads": 3}, "3 value heads cannot share 2 key heads evenly"),
        ("qwen3-next", {"linear_key_head_dim": 9}, r"in_proj_qkvz.weight' has shape \[128, 64\]; this config needs"),
        ("mamba2", {"num_heads": 7}, r"7 heads of 8 \(num_heads, head_dim\) do not make up 64"),
        ("mamba2", {"time_step_limit": [1.0]}, "time_step_limit is .* must be a list of two numbers"),
        ("granite-hybrid", {"mamba_d_head": 3}, "8 heads of 3 .* do not make up 64"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_by_name_before_memory_is_taken(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = family_model(name)
    folder = save_hf(tmp_path, model)
    (folder / "config.json").write_text(json.dumps(config | changes))
    monkeypatch.setattr(SafetensorsWeights, "array", lambda *_, **__: pytest.fail("a weight was read"))
    monkeypatch.setattr(SafetensorsWeights, "load", lambda *_, **__: pytest.fail("a weight was read"))
    with pytest.raises(hw.HeadwayError, match=message):
        hw.Engine(folder, pages=8, threads=1)


# -- any order of forks, cuts and passes ----------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """Contexts of a hybrid model, each compared with transformers on its whole sequence."""

    name = "lfm2"
    made: ClassVar[dict[str, Any]] = {}

    @initialize(pages=st.sampled_from([24, 64]))
    def begins(self, pages: int) -> None:
        if self.name not in self.made:
            _, model = family_model(self.name)
            folder = save_hf(Path(tempfile.mkdtemp()), model)
            with hw.Engine(folder, pages=4, threads=1) as engine:
                self.made[self.name] = model, engine.decoder
        self.model, decoder = self.made[self.name]
        self.engine = hw.Engine(decoder, pages=pages, threads=1, page_size=4, max_batch_tokens=8)
        self.twins: list[tuple[hw.Context, list[int]]] = [(self.engine.context(), [])]

    @rule(which=st.integers(0, 3), count=st.sampled_from([1, 2, 5, 13]), seed=st.integers(0, 2))
    def computes(self, which: int, count: int, seed: int) -> None:
        context, tokens = self.twins[which % len(self.twins)]
        if len(tokens) + count <= 60:
            ids = random_tokens(97, count, seed)
            before = len(tokens)
            tokens += ids
            assert_close(logit_rows(context, ids), reference_logits(self.model, tokens)[before:])

    @rule(which=st.integers(0, 3), count=st.sampled_from([1, 4, 9]))
    def generates(self, which: int, count: int) -> None:
        context, tokens = self.twins[which % len(self.twins)]
        if tokens and len(tokens) + count <= 60:
            added = asyncio.run(context.generate(hw.Argmax(), max_tokens=count, stop_only=True).tokens())
            logits = reference_logits(self.model, [*tokens, *added])
            assert logit_argmax_gap(logits[len(tokens) - 1 : -1], list(added)) < 1e-3
            tokens += added

    @rule(which=st.integers(0, 3), part=st.floats(0, 1))
    def truncates(self, which: int, part: float) -> None:
        context, tokens = self.twins[which % len(self.twins)]
        drop = int(part * len(tokens))
        context.truncate(drop)
        del tokens[len(tokens) - drop :]

    @rule(which=st.integers(0, 3))
    def forks(self, which: int) -> None:
        context, tokens = self.twins[which % len(self.twins)]
        if len(self.twins) < 4:
            self.twins.append((context.fork(), list(tokens)))

    @rule(which=st.integers(0, 3))
    def reads_the_last(self, which: int) -> None:
        context, tokens = self.twins[which % len(self.twins)]
        if tokens:
            forward = context.forward()
            handle = forward.probe(-1, hw.Logits())
            assert_close(forward.execute().result().logits(handle), reference_logits(self.model, tokens)[-1])

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            for context, _ in self.twins:
                context.release()
            check_states(self.engine)
            self.engine.close()


class DeltaMachine(Machine):
    name = "qwen3.5"


TestForksAndCuts = Machine.TestCase
TestForksAndCuts.settings = settings(max_examples=8, stateful_step_count=15, **QUIET)


@pytest.mark.slow
class TestForksAndCutsLong(DeltaMachine.TestCase):
    settings = settings(max_examples=60, stateful_step_count=25, **QUIET)


def test_checkpoints_take_no_more_memory_than_pages() -> None:
    assert GatedDelta(2, 4, 8, 12, 4).state_values(64) == (2 * 16 + 48) * 3 + 4 * 8 * 12
    assert [pages_between(state, 4096) for state in (1000, 4096, 10_000)] == [1, 1, 3]
    assert pages_between(10_000, 0) == 32  # a model without attention, whose pages take no memory
