"""Profiling returns data: phases with seconds and bytes that add up, samples, and plain JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

import headway as hw
from headway.runtime.profile import PHASES, Phase, Profile, Profiler, measure_bandwidth
from headway.testing import random_model
from support.checks import random_tokens

V, LAYERS, PAGE = 96, 3, 16
PROMPT = random_tokens(V, 21)


@pytest.fixture
def engine() -> Iterator[hw.InferenceEngine]:
    """Its matrices are whole blocks of 16 outputs: packed, they take the bytes that they have as tensors."""
    model = random_model("qwen3", layers=LAYERS, vocab_size=V, intermediate_size=80)
    with hw.InferenceEngine(model, pages=16, threads=2, page_size=PAGE) as made:
        yield made


def phases_of(engine: hw.InferenceEngine) -> tuple[str, ...]:
    """The native step writes keys and values as it turns them."""
    return tuple(name for name in PHASES if name != "kv write" or engine.engine.info.runner == "torch")


def by_name(profile: Profile) -> dict[str, Phase]:
    return {phase.name: phase for phase in profile.phases}


def test_every_phase_is_there_once_and_in_order(engine: hw.InferenceEngine) -> None:
    engine.enable_profiling()
    hw.generate(engine, PROMPT, 4)
    engine.record_profiling_sample()
    assert tuple(phase.name for phase in engine.profile().phases) == phases_of(engine)


def test_seconds_are_positive_and_lie_within_the_time_that_passed(engine: hw.InferenceEngine) -> None:
    engine.enable_profiling()
    start = time.perf_counter()
    hw.generate(engine, PROMPT, 6)
    passed = time.perf_counter() - start
    engine.record_profiling_sample()
    profile = engine.profile()
    assert all(phase.seconds > 0 for phase in profile.phases)
    assert sum(phase.seconds for phase in profile.phases) == pytest.approx(profile.seconds)
    assert 0 < profile.seconds <= passed


def test_bytes_of_the_weight_phases_are_the_weights_times_the_steps(engine: hw.InferenceEngine) -> None:
    engine.enable_profiling()
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        for token in (1, 2, 3, 4):
            engine.decode_step(state, token)
            engine.sample_greedy(state)
    engine.record_profiling_sample()
    profile, weights, steps = engine.profile(), engine.engine.decoder.nbytes(), 5
    phases = by_name(profile)
    for name in ("norm", "qkv", "output projection", "feed-forward"):
        assert phases[name].bytes == weights[name] * steps
    assert phases["head"].bytes == weights["head"] * 4  # only what was sampled went through the head
    whole = sum(weights.values()) + engine.engine.decoder.embedding.nbytes
    assert whole == engine.info.weight_bytes
    assert profile.tokens == len(PROMPT) + 4
    assert phases["embed"].bytes == profile.tokens * 64 * 4
    written, turned = profile.tokens * engine.info.kv_bytes_per_token, profile.tokens * LAYERS * (4 + 2) * 16 * 4 * 2
    assert sum(phases[n].bytes for n in ("rope", "kv write") if n in phases) == written + turned
    pages = steps * 2  # 21 to 25 slots lie on two pages
    assert phases["attention"].bytes == pages * PAGE * engine.info.kv_bytes_per_token
    assert phases["sample"].bytes == 4 * V * 4
    assert (phases["qkv"].calls, phases["norm"].calls, phases["embed"].calls) == (5 * LAYERS, 10 * LAYERS, 5)


def test_recording_folds_what_was_measured_into_one_sample(engine: hw.InferenceEngine) -> None:
    engine.enable_profiling()
    with hw.DecodeState() as state:
        engine.prefill_batched(state, PROMPT)
        assert engine.profile().samples == ()
        engine.record_profiling_sample()
        engine.record_profiling_sample()  # nothing new was measured
        engine.decode_step(state, 1)
        engine.decode_step(state, 2)
        engine.record_profiling_sample()
    profile = engine.profile()
    assert [sample.tokens for sample in profile.samples] == [21, 2]
    for phase in profile.phases:
        parts = [p for sample in profile.samples for p in sample.phases if p.name == phase.name]
        assert phase.seconds == pytest.approx(sum(p.seconds for p in parts))
        assert (phase.bytes, phase.calls) == (sum(p.bytes for p in parts), sum(p.calls for p in parts))
    for sample in profile.samples:
        assert sample.seconds == pytest.approx(sum(p.seconds for p in sample.phases))


def test_an_engine_that_records_by_itself_has_one_sample_a_step(engine: hw.InferenceEngine) -> None:
    engine.engine.enable_profiling()
    with engine.engine.context() as context:
        context.forward().input(PROMPT).execute().result()
        context.forward().input([1]).execute().result()
    assert [sample.tokens for sample in engine.engine.profile().samples] == [21, 1]


def test_nothing_is_measured_until_it_is_enabled(engine: hw.InferenceEngine) -> None:
    hw.generate(engine, PROMPT, 2)
    engine.record_profiling_sample()
    profile = engine.profile()
    assert (profile.samples, profile.phases, profile.tokens, profile.seconds) == ((), (), 0, 0)


def test_enabling_in_the_middle_of_a_step_leaves_that_step_out() -> None:
    profiler = Profiler(lambda: None, "cpu")
    profiler.begin(5)
    profiler.enabled = True
    profiler.mark("embed")
    profiler.end({"embed": 10})
    profiler.begin(3)
    profiler.mark("embed")
    profiler.end({"embed": 10, "head": 99})
    (sample,) = profiler.profile().samples
    assert (sample.tokens, [(p.name, p.bytes) for p in sample.phases]) == (3, [("embed", 10)])
    assert sample.seconds < 60


def test_json_is_plain_and_complete(engine: hw.InferenceEngine) -> None:
    engine.enable_profiling()
    hw.generate(engine, PROMPT, 3)
    engine.record_profiling_sample()
    profile = engine.profile()
    data = profile.to_json()
    back = json.loads(json.dumps(data))
    assert back["tokens"] == profile.tokens
    assert back["seconds"] == profile.seconds
    assert [p["name"] for p in back["phases"]] == list(phases_of(engine))
    for phase, told in zip(profile.phases, back["phases"], strict=True):
        assert (told["seconds"], told["bytes"], told["calls"]) == (phase.seconds, phase.bytes, phase.calls)
        assert told["bandwidth"] == pytest.approx(phase.bytes / phase.seconds)
        assert told["of_limit"] == pytest.approx(phase.bandwidth / profile.bandwidth_limit)
    assert [s["tokens"] for s in back["samples"]] == [s.tokens for s in profile.samples]
    assert [p["name"] for p in back["samples"][0]["phases"]] == [p.name for p in profile.samples[0].phases]


def test_the_memory_limit_is_measured_once() -> None:
    limit = measure_bandwidth("cpu")
    assert 1e8 < limit < 1e13
    assert measure_bandwidth("cpu") == limit
