"""The synchronous API, sentence by sentence: steps, prefills, sampling, readback, validation, limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import headway as hw
from headway.runtime.validate import Diagnostic, Trace, compare
from headway.testing import random_model
from support.checks import all_logits, assert_close, random_tokens, reference_logits
from support.hf import random_hf, save_hf

V, LAYERS = 97, 3
PROMPT = random_tokens(V, 21)
VARIABLE = "HEADWAY_BATCHED_PREFILL"


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return random_hf("qwen3", 1, head_dim=16, num_hidden_layers=LAYERS)[1]


@pytest.fixture(scope="module")
def engine(reference: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[hw.InferenceEngine]:
    folder = save_hf(tmp_path_factory.mktemp("sync"), reference)
    with hw.InferenceEngine(folder, pages=64, threads=2) as made:
        yield made


@pytest.fixture
def own() -> Iterator[hw.InferenceEngine]:
    """An engine that a test may change."""
    with hw.InferenceEngine(random_model(layers=LAYERS), pages=32, threads=2) as made:
        yield made


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def passes(engine: hw.InferenceEngine) -> int:
    return engine.engine.stats().passes


def logits_of(engine: hw.InferenceEngine, state: hw.DecodeState) -> np.ndarray:
    assert state.context is not None
    forward = state.context.forward()
    handle = forward.probe(-1, hw.Logits())
    return forward.execute().result().logits(handle)


# -- steps ---------------------------------------------------------------------------------------------------------


def test_a_fresh_state_stands_at_position_zero_and_steps_move_it(engine: hw.InferenceEngine) -> None:
    with hw.DecodeState() as state:
        assert (state.position, state.generated_tokens, state.logits) == (0, [], None)
        engine.prefill_batched(state, PROMPT)
        assert (state.position, state.generated_tokens) == (len(PROMPT), [])
        engine.decode_step(state, 5)
        engine.decode_step(state, np.int64(6))  # type: ignore[arg-type]
        assert (state.position, state.generated_tokens) == (len(PROMPT) + 2, [5, 6])


def test_decode_steps_compute_the_references_logits(engine: hw.InferenceEngine, reference: PreTrainedModel) -> None:
    expected = reference_logits(reference, PROMPT)
    with hw.DecodeState() as state:
        for i, token in enumerate(PROMPT):
            engine.decode_step(state, token)
            assert_close(logits_of(engine, state), expected[i])


def test_collect_output_leaves_each_layers_output(engine: hw.InferenceEngine, reference: PreTrainedModel) -> None:
    with torch.no_grad():
        theirs = reference(input_ids=torch.tensor([[*PROMPT, 9]]), output_hidden_states=True).hidden_states
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        engine.decode_step(state, 9)
        assert state.layer_outputs == []
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        engine.decode_step(state, 9, collect_output=True)
        outputs = state.layer_outputs
    assert len(outputs) == LAYERS
    for l in range(LAYERS - 1):
        assert_close(outputs[l], theirs[l + 1][0, -1].numpy(), f"layer {l}")
    with torch.no_grad():  # the reference keeps its last hidden state after the final norm, a layer's output is before
        normed = reference.model.norm(torch.from_numpy(outputs[-1]))  # type: ignore[operator, union-attr]
    assert_close(normed.numpy(), theirs[LAYERS][0, -1].numpy(), "the last layer")


# -- prefills ------------------------------------------------------------------------------------------------------


def test_prefill_batched_is_one_pass_and_prefill_batch_one_a_token(engine: hw.InferenceEngine) -> None:
    before = passes(engine)
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        assert passes(engine) - before == 1
        batched = logits_of(engine, state)
    before = passes(engine)
    with hw.DecodeState() as state:
        engine.prefill_batch(state, PROMPT)
        assert passes(engine) - before == len(PROMPT)
        assert_close(logits_of(engine, state), batched)


@pytest.mark.parametrize("method", ["prefill_batch", "prefill_batched"])
def test_prefills_continue_a_live_state_and_an_empty_list_does_nothing(
    engine: hw.InferenceEngine, reference: PreTrainedModel, method: str
) -> None:
    prefill = getattr(engine, method)
    with hw.DecodeState() as state:
        prefill(state, [])
        assert state.position == 0
        prefill(state, PROMPT[:8])
        engine.decode_step(state, PROMPT[8])
        prefill(state, np.array(PROMPT[9:]))
        before = passes(engine)
        prefill(state, ())
        assert (state.position, passes(engine)) == (len(PROMPT), before)
        assert_close(logits_of(engine, state), reference_logits(reference, PROMPT)[-1])


@pytest.mark.parametrize(
    ("value", "serial", "batched"),
    [("off", True, False), ("0", True, False), ("on", False, True), ("1", False, True), ("validate", True, True)],
)
def test_the_environment_chooses_the_path_of_prefill_batched(
    engine: hw.InferenceEngine, monkeypatch: pytest.MonkeyPatch, value: str, serial: bool, batched: bool
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    before = passes(engine)
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        assert state.position == len(PROMPT)
    assert passes(engine) - before == len(PROMPT) * serial + batched


@pytest.mark.parametrize("value", ["yes please", "2", "validat", "-"])
def test_garbage_in_the_environment_is_refused(
    engine: hw.InferenceEngine, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(VARIABLE, value)
    with hw.DecodeState() as state:
        with pytest.raises(hw.InvalidInput, match=f"{VARIABLE} is {value!r}; it must be one of off, on, validate"):
            engine.prefill_batched(state, PROMPT)
        assert state.position == 0


def test_validate_runs_both_ways_and_keeps_the_batched_one(engine: hw.InferenceEngine) -> None:
    free = engine.engine.stats().pages_free
    before = passes(engine)
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT[:10], validate=True)
        engine.prefill_batched(state, PROMPT[10:], validate=True)
        assert passes(engine) - before == len(PROMPT) + 2
        assert_close(logits_of(engine, state), all_logits(engine.engine, PROMPT)[-1])
    assert engine.engine.stats().pages_free == free


@pytest.mark.parametrize("layer", range(LAYERS))
def test_validate_names_the_first_layer_that_is_wrong_and_leaves_the_state_as_it_was(layer: int) -> None:
    decoder = random_model(layers=LAYERS)
    decoder.layers[layer].down.weight[3, 7] = float("nan")
    with hw.InferenceEngine(decoder, pages=16, threads=1) as engine, hw.DecodeState() as state:
        with pytest.raises(hw.ValidationFailed, match=rf"position 20: layer {layer} first"):
            engine.prefill_batched(state, PROMPT, validate=True)
        assert state.position == 0
        engine.prefill_batched(state, PROMPT)
        with pytest.raises(hw.PassFailed, match="not a number"):
            engine.sample_greedy(state)


# -- sampling ------------------------------------------------------------------------------------------------------


def test_sample_greedy_takes_the_likeliest_token_of_the_state_stepped_last(engine: hw.InferenceEngine) -> None:
    with hw.DecodeState() as one, hw.DecodeState() as other:
        engine.prefill_batched(one, PROMPT)
        engine.prefill_batched(other, PROMPT[:7])
        rows = all_logits(engine.engine, PROMPT)
        assert engine.sample_greedy(one) == int(rows[20].argmax())
        assert engine.sample_greedy() == int(rows[6].argmax())
        engine.decode_step(one, 3)
        assert engine.sample_greedy() == engine.sample_greedy(one)
        assert isinstance(engine.sample_greedy(), int)


def test_greedy_sampling_moves_one_integer_and_no_logits(engine: hw.InferenceEngine) -> None:
    with engine.engine.context() as context:
        forward = context.forward().input(PROMPT)
        handles = [forward.sample([i], hw.Argmax()) for i in (0, 20)]
        out = forward.execute().result()
        assert [type(v) for v in out._result.values] == [int, int]
        assert [out.token(h) for h in handles] == list(out._result.values)


TABLE = [
    ({}, False),
    ({"temperature": 0.7}, True),
    ({"top_p": 0.9}, True),
    ({"repetition_penalty": 1.1}, True),
    ({"presence_penalty": 0.5}, True),
    ({"frequency_penalty": 0.5}, True),
    ({"top_k": 5}, False),  # the likeliest token is the same among five
    ({"min_p": 0.2}, False),
    ({"temperature": 0.0, "top_p": 1.0, "repetition_penalty": 1.0}, False),
]


@pytest.mark.parametrize(("options", "needed"), TABLE)
def test_which_settings_need_more_than_the_argmax(options: dict[str, Any], needed: bool) -> None:
    assert hw.SamplingParams(**options).requires_logits_readback() is needed


def test_settings_that_need_only_the_argmax_are_greedy_whatever_the_seed(engine: hw.InferenceEngine) -> None:
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        greedy = engine.sample_greedy(state)
        for options, needed in TABLE:
            if not needed:
                assert {engine.sample(state, hw.SamplingParams(**options), seed) for seed in range(4)} == {greedy}


def test_a_seed_or_a_generator_in_the_same_state_repeats(engine: hw.InferenceEngine) -> None:
    params = hw.SamplingParams(temperature=2.0)
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        by_seed = [[engine.sample(state, params, seed) for seed in range(20)] for _ in range(2)]
        assert by_seed[0] == by_seed[1]
        assert len(set(by_seed[0])) > 5
        one, other = np.random.default_rng(7), np.random.default_rng(7)
        assert [engine.sample(state, params, one) for _ in range(20)] == [
            engine.sample(state, params, other) for _ in range(20)
        ]
        for bad in (None, "7", 1.5, True):
            with pytest.raises(hw.WrongType, match="seed"):
                engine.sample(state, params, bad)  # type: ignore[arg-type]
        with pytest.raises(hw.InvalidInput, match="-1"):
            engine.sample(state, params, -1)


def test_draws_follow_the_distribution(engine: hw.InferenceEngine) -> None:
    draws = 800
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        logits = logits_of(engine, state).astype(np.float64) / 1.5
        probs = np.exp(logits - logits.max())
        probs /= probs.sum()
        random = np.random.default_rng(0)
        found = np.bincount(
            [engine.sample(state, hw.SamplingParams(temperature=1.5), random) for _ in range(draws)], minlength=V
        )
        top = int(probs.argmax())
        spread = (probs[top] * (1 - probs[top]) / draws) ** 0.5
        assert abs(found[top] / draws - probs[top]) < 4 * spread
        assert np.abs(found / draws - probs).sum() / 2 < 0.15
        best = set(np.argsort(-probs)[:3].tolist())
        few = hw.SamplingParams(temperature=1.5, top_k=3)
        assert {engine.sample(state, few, random) for _ in range(60)} <= best


def test_penalties_count_generated_tokens_and_not_the_prompt(engine: hw.InferenceEngine) -> None:
    params = hw.SamplingParams(repetition_penalty=1.8, presence_penalty=0.7, frequency_penalty=0.4)
    with hw.DecodeState() as state:
        engine.prefill_batched(state, [*PROMPT, *range(V)])  # every token stands in the prompt
        assert engine.sample(state, params, 0) == engine.sample_greedy(state)
        changed = 0
        for _ in range(12):
            logits = logits_of(engine, state).astype(np.float64)
            counts = np.bincount(state.generated_tokens, minlength=V)
            seen = counts > 0
            expected = np.where(seen, np.where(logits > 0, logits / 1.8, logits * 1.8), logits)
            expected = expected - 0.7 * seen - 0.4 * counts
            token = engine.sample(state, params, 0)
            assert token == int(expected.argmax())
            changed += token != int(logits.argmax())
            engine.decode_step(state, token)
        assert changed


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 1.5},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("inf")},
    ],
)
def test_absurd_sampling_values_are_refused_by_name(options: dict[str, Any]) -> None:
    with pytest.raises(hw.HeadwayError, match=next(iter(options))):
        hw.SamplingParams(**options)


def test_sampling_before_any_step_is_refused(own: hw.InferenceEngine) -> None:
    for call in (own.sample_greedy, lambda: own.sample(hw.DecodeState(), hw.SamplingParams(), 0)):
        with pytest.raises(hw.InvalidInput, match="nothing was computed yet"):
            call()


# -- generate ------------------------------------------------------------------------------------------------------


def greedy(reference: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(int(reference_logits(reference, sequence)[-1].argmax()))
    return sequence[len(prompt) :]


def test_generate_returns_the_continuation_alone(engine: hw.InferenceEngine, reference: PreTrainedModel) -> None:
    held = engine.engine.stats().pages_held
    expected = greedy(reference, PROMPT, 10)
    assert hw.generate(engine, PROMPT, 10) == expected
    assert hw.generate(engine, iter(PROMPT), 3) == expected[:3]
    assert hw.generate(engine, PROMPT, 0) == []
    assert engine.engine.stats().pages_held == held  # what it computed may stay cached


def test_generate_stops_before_the_end_token(engine: hw.InferenceEngine, reference: PreTrainedModel) -> None:
    expected = greedy(reference, PROMPT, 10)
    end = expected[4]
    kept = expected[: expected.index(end)]
    assert hw.generate(engine, PROMPT, 10, end) == kept
    assert hw.generate(engine, PROMPT, 10, [end, (end + 1) % V]) == list(
        itertools.takewhile(lambda t: t not in (end, (end + 1) % V), expected)
    )
    assert hw.generate(engine, PROMPT, 10, []) == expected


def test_generate_samples_when_asked_and_repeats_by_seed(engine: hw.InferenceEngine) -> None:
    params = hw.SamplingParams(temperature=1.5, top_p=0.95)
    runs = [hw.generate(engine, PROMPT, 12, params=params, random=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    drawn = [hw.generate(engine, PROMPT, 12, params=params, random=np.random.default_rng(3)) for _ in range(2)]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([], 4), hw.InvalidInput, "prompt is empty"),
        (([1, V], 4), hw.InvalidToken, rf"prompt_tokens\[1\] is {V}"),
        (([1], -1), hw.InvalidInput, "max_tokens is -1"),
        (([1], 1.5), hw.WrongType, "max_tokens"),
        (([1], 2, V), hw.InvalidToken, "eos_token_id"),
        (("text", 2), hw.WrongType, "text"),
        (([1] * 1025, 1), hw.ContextLengthExceeded, "1025 more tokens after position 0.*limit of 1024"),
    ],
)
def test_generate_refuses_what_cannot_be(
    engine: hw.InferenceEngine, arguments: tuple, error: type[Exception], message: str
) -> None:
    free, before = engine.engine.stats().pages_free, passes(engine)
    with pytest.raises(error, match=message):
        hw.generate(engine, *arguments)
    assert (engine.engine.stats().pages_free, passes(engine)) == (free, before)


# -- readback and diagnostics --------------------------------------------------------------------------------------


def test_logits_readback_keeps_the_logits_of_every_step(own: hw.InferenceEngine) -> None:
    rows = all_logits(own.engine, PROMPT)
    with hw.DecodeState() as state:
        own.prefill_batched(state, PROMPT[:5])
        assert state.logits is None
        own.enable_logits_readback()
        for prefill in (own.prefill_batched, own.prefill_batch):
            at = state.position
            prefill(state, PROMPT[at : at + 5])
            assert state.logits is not None
            assert state.logits.dtype == np.float32
            assert_close(state.logits, rows[at + 4])
        own.decode_step(state, PROMPT[15])
        assert_close(state.logits, rows[15])
        own.prefill_batched(state, PROMPT[16:], validate=True)
        assert_close(state.logits, rows[20])


def test_diagnostics_pass_on_every_kind_of_step(own: hw.InferenceEngine) -> None:
    with hw.DecodeState() as state, hw.DecodeState() as other:
        own.prefill_batched(state, PROMPT[:4])
        own.enable_validation_diagnostics()
        own.enable_validation_diagnostics()
        own.decode_step(state, PROMPT[4])
        own.prefill_batched(state, PROMPT[5:12])
        own.prefill_batched(state, PROMPT[12:15], validate=True)  # not a step that is diagnosed
        own.prefill_batch(state, PROMPT[15:17])
        own.prefill_batched(other, PROMPT)
        own.decode_step(state, PROMPT[17], collect_output=True)
    assert [d.position for d in own.diagnostics] == [4, 11, 15, 16, 20, 17]
    assert all(d.passed and len(d.layers) == LAYERS for d in own.diagnostics)
    worst = max(d.logits for d in own.diagnostics)
    assert worst < 1e-5
    assert worst > 0  # what computes the steps does not check itself


@pytest.mark.parametrize("layer", range(LAYERS))
def test_diagnostics_catch_keys_that_went_wrong_and_name_the_layer(own: hw.InferenceEngine, layer: int) -> None:
    own.enable_validation_diagnostics()
    with hw.DecodeState() as state:
        own.prefill_batched(state, PROMPT[:10])
        keys = own.engine._loop._runner.pool.keys[layer, :, :4]  # type: ignore[attr-defined]
        own.engine._loop.call(lambda: keys.__imul__(1.5))  # a fault of the device; keys are a tensor or an array
        with pytest.raises(
            hw.ValidationFailed, match=rf"this step and the reference differ at position 10: layer {layer} first"
        ):
            own.decode_step(state, PROMPT[10], collect_output=True)
        assert (state.position, state.generated_tokens, state.layer_outputs) == (10, [], [])
        assert [d.passed for d in own.diagnostics] == [True, False]
        own.engine._loop.call(lambda: keys.__itruediv__(1.5))
        own.decode_step(state, PROMPT[10])
        assert own.diagnostics[-1].passed


def test_traces_are_compared_layer_by_layer() -> None:
    rng = np.random.default_rng(0)
    trace = Trace([rng.standard_normal(8).astype(np.float32) * 3 for _ in range(4)], np.ones(11, np.float32) * 20)
    same = compare(5, trace, trace, "float32")
    assert same.passed
    assert same == Diagnostic(5, (0.0,) * 4, 0.0, 1e-4)
    same.check("one", "other")
    layers = [t.copy() for t in trace.layers]
    layers[2][3] += 0.1
    found = compare(5, replace(trace, layers=layers), trace, "float32")
    assert (found.first_bad_layer, found.passed) == (2, False)
    with pytest.raises(hw.ValidationFailed, match="one and other differ at position 5: layer 2 first"):
        found.check("one", "other")
    logits = trace.logits.copy()
    logits[0] += 20 * 2e-4  # relative to the largest value
    found = compare(5, replace(trace, logits=logits), trace, "float32")
    assert found.first_bad_layer is None
    with pytest.raises(hw.ValidationFailed, match=r"the logits first, by 0\.0002"):
        found.check("one", "other")
    assert compare(5, replace(trace, logits=logits), trace, "bfloat16").passed
    logits[0] = np.nan
    assert not compare(5, replace(trace, logits=logits), trace, "bfloat16").passed


# -- limits and ends -----------------------------------------------------------------------------------------------


def test_a_state_at_capacity_takes_no_more(own: hw.InferenceEngine) -> None:
    decoder = random_model(layers=LAYERS, max_positions=24)
    with hw.InferenceEngine(decoder, pages=4, threads=1) as engine, hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        calls = [
            lambda: engine.prefill_batched(state, [1] * 4),
            lambda: engine.prefill_batch(state, [1] * 4),
            lambda: engine.prefill_batched(state, [1] * 4, validate=True),
        ]
        for call in calls:
            with pytest.raises(hw.ContextLengthExceeded, match=r"4 more tokens after position 21 .* limit of 24"):
                call()
            assert state.position == 21
        for token in (1, 2, 3):
            engine.decode_step(state, token)
        with pytest.raises(hw.ContextLengthExceeded, match="1 more tokens after position 24"):
            engine.decode_step(state, 4)
        assert (state.position, state.generated_tokens) == (24, [1, 2, 3])
        assert 0 <= engine.sample_greedy(state) < V


@pytest.mark.parametrize("token", [-1, V, 1 << 31, 1 << 63, 1.0, True, "1", None])
def test_a_token_outside_the_vocabulary_is_refused(engine: hw.InferenceEngine, token: Any) -> None:
    with hw.DecodeState() as state:
        engine.prefill_batched(state, [1, 2])
        for call in (
            lambda: engine.decode_step(state, token),
            lambda: engine.prefill_batched(state, [3, token]),
            lambda: engine.prefill_batched(state, [3, token], validate=True),
            lambda: engine.prefill_batch(state, [3, token]),
        ):
            with pytest.raises((hw.InvalidToken, hw.WrongType), match="tokens"):
                call()
            assert (state.position, state.generated_tokens) == (2, [])


@pytest.mark.parametrize("how", ["prefill_batch", "prefill_batched"])
def test_a_prefill_that_finds_no_pages_leaves_the_state_as_it_was(how: str) -> None:
    with hw.InferenceEngine(random_model(), pages=2, threads=1) as engine, hw.DecodeState() as state:
        engine.prefill_batched(state, [1, 2, 3])
        expected = engine.sample_greedy(state)
        with pytest.raises(hw.OutOfPages, match="the pool has 2"):
            getattr(engine, how)(state, [4] * 30)
        assert (state.position, state.generated_tokens) == (3, [])
        assert engine.sample_greedy(state) == expected
        getattr(engine, how)(state, [4] * 29)


def test_what_is_no_state_no_settings_and_no_engine_is_refused(engine: hw.InferenceEngine) -> None:
    wrong: Any = hw.Sampling()
    with hw.DecodeState() as state:
        engine.prefill_batched(state, [1, 2])
        for call, says in (
            (lambda: engine.decode_step(wrong, 1), "the state is Sampling"),
            (lambda: engine.prefill_batched(wrong, [1]), "the state is Sampling"),
            (lambda: engine.sample_greedy(wrong), "the state is Sampling"),
            (lambda: engine.sample(state, wrong, 0), "params is Sampling.*SamplingParams"),
            (lambda: hw.generate(engine, [1], 2, params=wrong), "params is Sampling"),
            (lambda: hw.generate(wrong, [1], 2), "the engine is Sampling.*InferenceEngine"),
        ):
            with pytest.raises(hw.WrongType, match=says):
                call()
        assert state.position == 2


def test_a_closed_state_raises_and_its_pages_are_free(own: hw.InferenceEngine) -> None:
    state = hw.DecodeState()
    own.prefill_batched(state, PROMPT)
    assert own.engine.stats().pages_held == 2
    state.close()
    state.close()
    assert own.engine.stats().pages_held == 0
    for call in (
        lambda: own.decode_step(state, 1),
        lambda: own.prefill_batched(state, [1]),
        lambda: own.prefill_batched(state, []),
        lambda: own.prefill_batch(state, [1]),
        lambda: own.prefill_batch(state, []),
        lambda: own.sample(state, hw.SamplingParams(), 0),
        lambda: own.sample_greedy(state),
        own.sample_greedy,
    ):
        with pytest.raises(hw.Closed, match="closed"):
            call()


def test_a_closed_engine_raises() -> None:
    with hw.InferenceEngine(random_model(), pages=4, threads=1) as engine:
        engine.enable_validation_diagnostics()
    with pytest.raises(hw.Closed, match="closed"):
        engine.prefill_batched(hw.DecodeState(), [1])


def test_a_state_of_another_engine_is_refused(engine: hw.InferenceEngine, own: hw.InferenceEngine) -> None:
    with hw.DecodeState() as state:
        engine.prefill_batched(state, [1, 2])
        with pytest.raises(hw.InvalidInput, match="another engine"):
            own.decode_step(state, 1)
        with pytest.raises(hw.InvalidInput, match="another engine"):
            own.sample_greedy(state)


def test_it_is_a_face_of_an_engine_that_may_exist_already(engine: hw.InferenceEngine) -> None:
    with hw.InferenceEngine(engine.engine) as face:
        assert face.info == engine.info
        assert hw.generate(face, PROMPT, 3) == hw.generate(engine, PROMPT, 3)
    assert len(hw.generate(engine, PROMPT, 1)) == 1  # closing the face left the engine alone
    with pytest.raises(hw.InvalidInput, match="pages"):
        hw.InferenceEngine(engine.engine, pages=3)


def test_many_states_live_side_by_side(engine: hw.InferenceEngine) -> None:
    prompts = [random_tokens(V, n, n) for n in (3, 17, 33)]
    states = [hw.DecodeState() for _ in prompts]
    for i in range(3):
        for state, prompt in zip(states, prompts, strict=True):
            engine.prefill_batched(state, prompt[i::3])
    for state, prompt in zip(states, prompts, strict=True):
        sequence = [t for i in range(3) for t in prompt[i::3]]
        assert_close(logits_of(engine, state), all_logits(engine.engine, sequence)[-1])
        state.close()


def test_the_engine_of_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(hw.ModelNotFound):
        hw.InferenceEngine(tmp_path / "nothing.gguf")


# -- greedy tokens drawn with their step -------------------------------------------------------------------------------


def test_once_greedy_tokens_are_asked_for_a_step_draws_its_own(own: hw.InferenceEngine) -> None:
    with hw.DecodeState() as state:
        own.prefill_batched(state, PROMPT)
        token = own.sample_greedy(state)
        before = passes(own)
        for _ in range(5):
            own.decode_step(state, token)
            token = own.sample_greedy(state)
            assert own.sample_greedy(state) == token == int(np.argmax(logits_of(own, state)))
        assert passes(own) - before == 10  # a step each, and the logits that were compared


def test_a_greedy_token_is_that_of_the_state_as_it_is(own: hw.InferenceEngine) -> None:
    draw = np.random.default_rng(3)
    with hw.DecodeState() as state:
        own.prefill_batched(state, PROMPT)
        for turn in range(30):
            context = state.context
            assert context is not None
            match int(draw.integers(5)):
                case 0:
                    own.decode_step(state, int(draw.integers(90)))
                case 1:
                    context.truncate(int(draw.integers(1, 3)))
                case 2:
                    context.fill([int(draw.integers(90))])  # pending, behind the API's back
                case 3:
                    own.prefill_batched(state, [int(draw.integers(90)), 3])
                case 4 if turn % 2:
                    weights = {"model.norm.weight": torch.rand(own.engine.config.hidden_size)}
                    own.engine.update_weights(weights)
            found = own.sample_greedy(state)
            assert found == int(np.argmax(logits_of(own, state))), turn
