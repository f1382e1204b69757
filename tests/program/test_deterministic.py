"""Deterministic mode: a row's bits depend on its token, position, mask and the slots it sees, and on nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway import Mask
from headway.models.decoder import Decoder
from headway.testing import random_model
from support.checks import logit_rows, random_tokens
from support.mates import PAGE, SUBJECTS, V, read, run

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"heads": 6, "kv_heads": 3, "head_dim": 20},
    "mistral": {"heads": 4, "kv_heads": 1, "head_dim": 24},
    "qwen2": {"layers": 3, "windows": (None, 6, None)},
    "qwen3": {"head_dim": 10},
}


@pytest.fixture(scope="module", params=MODELS)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return random_model(request.param, vocab_size=V, **MODELS[request.param])


@pytest.fixture(scope="module")
def exact(decoder: Decoder) -> Iterator[hw.Engine]:
    with made(decoder) as engine:
        yield engine


def made(decoder: Decoder, **options: Any) -> hw.Engine:
    return hw.Engine(
        decoder, **{"threads": 1, "pages": 400, "page_size": PAGE, "deterministic": True, "step_ms": 60_000, **options}
    )


def assert_same_bits(one: Any, other: Any) -> None:
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)
    else:
        np.testing.assert_array_equal(one, other)


def values(found: tuple[hw.Output, list[Any]]) -> list[Any]:
    return [read(found[0], handle) for handle in found[1]]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_pass_has_the_same_bits_alone_and_in_any_batch(exact: hw.Engine, name: str) -> None:
    subject, rng = SUBJECTS[name], np.random.default_rng(list(SUBJECTS).index(name))
    alone = values(run(exact, [(subject, 0)])[0])
    for others in (1, 5, 12):
        names = rng.choice(list(SUBJECTS), size=others)
        crowd = [(SUBJECTS[str(n)], int(rng.integers(1, 1000))) for n in names]
        at = int(rng.integers(len(crowd) + 1))
        crowd.insert(at, (subject, 0))
        assert_same_bits(values(run(exact, crowd)[at]), alone)


@pytest.mark.parametrize("options", [{"max_batch_tokens": 1}, {"max_batch_tokens": 5}, {"trim": False}, {"pages": 40}])
def test_chunking_trim_and_pressure_change_no_bit(exact: hw.Engine, options: dict[str, Any]) -> None:
    """A pool of 40 pages cannot hold all of them at once: some contexts are preempted and computed again."""
    crowd = [(work, i) for i, work in enumerate(SUBJECTS.values())]
    expected = [values(found) for found in run(exact, crowd)]
    with made(exact.decoder, **options) as engine:
        assert_same_bits([values(found) for found in run(engine, crowd)], expected)
        assert (engine.stats().preemptions > 0) == ("pages" in options)


def test_rows_from_one_to_sixty_four_have_the_same_bits(exact: hw.Engine) -> None:
    tokens = random_tokens(V, 64)
    with exact.context() as context:
        whole = logit_rows(context, tokens)
    for count in (1, 2, 3, 7, 15, 16, 17, 31, 33, 48, 63, 64):
        exact.cache.clear()
        with exact.context() as context:
            parts = [logit_rows(context, tokens[i : i + count]) for i in range(0, 64, count)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_any_cutting_of_a_sequence_has_the_same_bits(exact: hw.Engine) -> None:
    tokens, rng = random_tokens(V, 90, 3), np.random.default_rng(0)
    with exact.context() as context:
        whole = logit_rows(context, tokens)
    for _ in range(4):
        cuts = np.unique([0, *rng.integers(1, 90, size=6), 90])
        exact.cache.clear()
        with exact.context() as context:
            parts = [logit_rows(context, tokens[a:b]) for a, b in pairwise(cuts)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_masks_that_say_the_same_have_the_same_bits(exact: hw.Engine) -> None:
    tokens, found = random_tokens(V, 40, 4), []
    window = np.tril(np.ones((40, 40), dtype=bool)) & ~np.tril(np.ones((40, 40), dtype=bool), -6)
    for mask in (Mask.window(6), Mask.from_bool(window), Mask.causal() & Mask.window(6), ~~Mask.window(6)):
        exact.cache.clear()
        with exact.context() as context:
            forward = context.forward().input(tokens).attention_mask(mask)
            handles = [forward.probe(i, hw.Logits()) for i in range(40)]
            out = forward.execute().result()
            found.append(np.stack([out.logits(h) for h in handles]))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


def test_a_token_read_again_has_the_bits_it_had(exact: hw.Engine) -> None:
    tokens = random_tokens(V, 30, 5)
    with exact.context() as context:
        rows = logit_rows(context, tokens)
        for at in (29, 28, 20, 16, 3):
            context.truncate(context.seq_len - at)
            forward = context.forward()
            again, hidden = forward.probe(-1, hw.Logits()), forward.probe(-1, hw.Hidden(1))
            out = forward.execute().result()
            np.testing.assert_array_equal(out.logits(again), rows[at - 1])
            assert out.hidden(hidden).any()


def test_cached_pages_forks_and_saved_contexts_have_the_same_bits(exact: hw.Engine) -> None:
    tokens = random_tokens(V, 50, 6)

    def tail(context: hw.Context) -> np.ndarray:
        return logit_rows(context, [7, 8, 9])

    exact.cache.clear()
    with exact.context() as context:
        context.forward().input(tokens).execute().result()
        with context.fork() as fork:
            expected = tail(fork)
        context.save("bits")
        opened = exact.open("bits")
        assert opened is not None
        with opened:
            np.testing.assert_array_equal(tail(opened), expected)
        exact.delete("bits")
    with exact.context() as context:
        out = context.forward().input(tokens).execute().result()
        assert out.stats.cache_hits == 6
        np.testing.assert_array_equal(tail(context), expected)
    exact.cache.clear()
    with exact.context() as context:
        assert context.forward().input(tokens).execute().result().stats.cache_hits == 0
        np.testing.assert_array_equal(tail(context), expected)


def test_a_saved_context_that_another_engine_computed_brings_no_other_bits(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages would be found in the prefix cache by everybody."""
    tokens = random_tokens(V, 50, 6)
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    with made(decoder) as engine, engine.context() as context:
        expected = logit_rows(context, [*tokens, 7])
    with made(decoder, deterministic=False) as engine, engine.context() as context:
        context.forward().input(tokens).execute().result()
        context.save("theirs", durable=True)
    with made(decoder) as engine:
        opened = engine.open("theirs")
        assert opened is not None
        with opened, engine.context() as other:
            assert engine.stats().tokens == len(tokens)  # computed again
            np.testing.assert_array_equal(logit_rows(opened, [7]), expected[-1:])
            assert other.forward().input(tokens).execute().result().stats.cache_hits > 0
            np.testing.assert_array_equal(logit_rows(other, [7]), expected[-1:])
            opened.save("mine", durable=True)
        before, mine = engine.stats().tokens, engine.open("mine")
        assert mine is not None
        with mine:
            assert engine.stats().tokens == before


def test_slots_that_others_discarded_or_cut_change_no_bit(exact: hw.Engine) -> None:
    """What a row does not see may be anything: masked, discarded, or never there."""
    tokens = random_tokens(V, 24, 8)
    found = []
    for way in ("masked", "discarded"):
        exact.cache.clear()
        with exact.context() as context:
            context.forward().input(tokens).execute().result()
            forward = context.forward().input([5])
            if way == "masked":
                forward.attention_mask([[0, 16, 8]])
            else:
                context.inner().discard_pages(0, 2)
                forward = context.forward().input([5])
            handle = forward.probe(-1, hw.Logits())
            found.append(forward.execute().result().logits(handle))
    np.testing.assert_array_equal(found[0], found[1])


def test_samples_are_the_same_tokens_in_every_run(exact: hw.Engine) -> None:
    async def write(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            context.fill([1, 2, 3])
            return await context.generate(hw.Multinomial(temperature=1.5, seed=4), max_tokens=40).tokens()

    first = exact.run(write)
    for options in ({}, {"max_batch_tokens": 2}):
        with made(exact.decoder, **options) as engine:
            assert engine.run(write) == first
