"""Numbers that no machine word holds, and that Python does not even write out, are refused like any other bad value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.testing import random_model

HUGE = [10**5000, -(10**5000), 10**400, 2**1024, 2**64]
V = 97


@pytest.fixture(scope="module")
def engine() -> Any:
    with hw.Engine(random_model(), pages=64, threads=1) as made:
        yield made


def passed(context: hw.Context, build: Callable[[hw.Forward], Any]) -> None:
    forward = context.forward().input([1, 2])
    build(forward)
    forward.execute().result(60)


CALLS: dict[str, Callable[[hw.Context, int], Any]] = {
    "fill": lambda c, n: c.fill([n]),
    "fill numpy": lambda c, n: c.fill(np.array([n], object).tolist()),
    "truncate": lambda c, n: c.truncate(n),
    "input": lambda c, n: passed(c, lambda f: f.input([n])),
    "input_at": lambda c, n: passed(c, lambda f: f.input_at([1], [n])),
    "sample": lambda c, n: passed(c, lambda f: f.sample([n], hw.Argmax())),
    "probe": lambda c, n: passed(c, lambda f: f.probe(n, hw.Logits())),
    "history": lambda c, n: passed(c, lambda f: f.sample([-1], hw.Sampling(repetition_penalty=1.2), history=[n])),
    "mask": lambda c, n: passed(c, lambda f: f.mask(allow=[n])),
    "mask rows": lambda c, n: passed(c, lambda f: f.mask(allow=[1], rows=[n])),
    "Mask.blocks": lambda _, n: hw.Mask.blocks([1, 2], sees=[(n, 0)]),
    "Mask.to_bool": lambda _, n: hw.Mask.window(2).to_bool(0, n),
    "Mask.to_bool from": lambda _, n: hw.Mask.window(2).to_bool(n, 2),
    "Logprobs": lambda _, n: (
        hw.Logprobs([n]) if n.bit_length() > 1000 else passed(_, lambda f: f.probe(0, hw.Logprob(n)))
    ),
    "LogitLens": lambda c, n: passed(c, lambda f: f.probe(0, hw.LogitLens([0], n))),
    "logit_bias": lambda c, n: passed(c, lambda f: f.sample([0], hw.Sampling(logit_bias={n: 1.0}))),
    "stop": lambda c, n: c.generate(max_tokens=1, stop=[n]),
    "min_tokens": lambda c, n: c.generate(max_tokens=1, min_tokens=n),
    "num_return_sequences": lambda c, n: c.generate(do_sample=True, num_return_sequences=n, max_tokens=1),
    "resume": lambda c, n: c.generate(max_tokens=1).resume(n) if n.bit_length() > 1000 or n < 0 else c.fill([n]),
    "reserve": lambda c, n: c.inner().reserve_working_pages(n),
    "commit": lambda c, n: c.inner().commit_working_pages(n),
    "discard": lambda c, n: c.inner().discard_pages(0, n),
    "release": lambda c, n: c.inner().release_working_pages(n),
    "keep_slots": lambda c, n: c.inner().keep_slots([n]),
    "pin": lambda c, n: c.engine.cache.pin([n]),
    "pin ttl": lambda c, n: c.engine.cache.pin([1], ttl=n if n.bit_length() > 1000 else -1),
    "draw": lambda _, n: hw.draw([0.0, 1.0], hw.Sampling(repetition_penalty=1.2), seed=1, position=1, history=[n]),
}


@pytest.mark.parametrize("number", HUGE, ids=["5000 digits", "-5000 digits", "400 digits", "2**1024", "2**64"])
@pytest.mark.parametrize("name", CALLS)
def test_a_huge_number_is_refused_with_an_error_of_ours(engine: hw.Engine, name: str, number: int) -> None:
    with engine.context().fill([1, 2, 3]) as context:
        with pytest.raises(hw.HeadwayError) as refused:
            CALLS[name](context, number)
        assert len(str(refused.value)) < 900
        assert context.tokens == (1, 2, 3)


def test_numpy_seeds_and_sizes_are_plain_numbers_inside(engine: hw.Engine) -> None:
    seed: Any = np.int64(2**62)
    with engine.context().fill([1]) as context:
        generation = context.generate(hw.Multinomial(), max_tokens=1).reseed(seed)
        assert (type(generation.seed), generation.seed) == (int, 2**62)
    with pytest.raises(hw.OutOfPages, match=f"{2**62} pages"):
        hw.Engine(random_model(), pages=seed)


def test_the_ends_of_a_slice_of_bits_are_integers() -> None:
    bits = hw.Brle.from_runs([1, 2])
    end: Any = float("inf")
    for take in (lambda: bits[0:end], lambda: bits.any(0, end), lambda: bits.all(end)):
        with pytest.raises(hw.WrongType, match="its ends must be integers"):
            take()
    assert bits[0 : 10**5000] == bits
