"""Passes of every kind, alone or in one step with others, for tests of what a pass may depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import headway as hw
from headway import Mask
from support.checks import assert_close, random_tokens

V, PAGE = 97, 8


@dataclass(frozen=True)
class Work:
    """A pass: what stands before it, and what it asks for."""

    before: int
    build: Callable[[hw.Forward], list[Any]]
    cut: int = 0
    discard: int = 0
    waiting: int = 0


def logits_everywhere(forward: hw.Forward, rows: int) -> list[Any]:
    return [forward.probe(i, hw.Logits()) for i in range(-rows, 0)]


def bits(base: int, count: int, seed: int) -> np.ndarray:
    found = np.random.default_rng(seed).random((count, base + count)) < 0.4
    found[np.arange(count), base + np.arange(count)] = True
    return found


def prompt(forward: hw.Forward) -> list[Any]:
    return logits_everywhere(forward.input(random_tokens(V, 23, 1)), 23)


def decode(forward: hw.Forward) -> list[Any]:
    return [
        *logits_everywhere(forward.input([5]), 2),
        forward.sample([-1] * 3, hw.Multinomial(temperature=2.0, seed=3)),
    ]


def masked(forward: hw.Forward) -> list[Any]:
    forward.input(random_tokens(V, 6, 2)).attention_mask(Mask.from_bool(bits(20, 6, 1)))
    return [*logits_everywhere(forward, 6), forward.probe(2, hw.AttentionScores(1))]


def windowed(forward: hw.Forward) -> list[Any]:
    return logits_everywhere(forward.input([8, 9]).attention_mask(Mask.window(5)), 3)


def both_ways(forward: hw.Forward) -> list[Any]:
    forward.input(random_tokens(V, 7, 3)).attention_mask(Mask.from_bool(bits(20, 7, 2)), causal=False)
    return logits_everywhere(forward, 7)


def elsewhere(forward: hw.Forward) -> list[Any]:
    forward.input_at([1, 2, 3, 4], [90, 3, 3, 55]).mask(allow=[3, 4, 50])
    return [*logits_everywhere(forward, 4), forward.sample([0, 1, 2, 3], hw.TopP(0.9, temperature=3.0, seed=8))]


def everything(forward: hw.Forward) -> list[Any]:
    forward.input(random_tokens(V, 4, 6))
    penal = hw.Sampling(temperature=0.9, top_k=30, repetition_penalty=1.4, frequency_penalty=0.3, seed=5)
    return [
        *logits_everywhere(forward, 5),
        forward.probe(1, hw.Hidden(0)),
        forward.probe(1, hw.Hidden(2)),
        forward.probe(-5, hw.Hidden(1)),
        forward.probe(3, hw.AttentionScores(0, "max")),
        forward.probe(2, hw.LogitLens([0, 1, 2], 0)),
        forward.probe(2, hw.Distribution(temperature=0.7)),
        forward.probe(0, hw.Entropy()),
        forward.probe(0, hw.Logprobs([0, 96])),
        forward.sample([0, 1, 2, 3, -5], penal),
        forward.sample([3] * 4, hw.Typical(0.9, seed=1)),
        forward.sample([0, 1, 2, 3], hw.Argmax()),
    ]


def last(forward: hw.Forward) -> list[Any]:
    return logits_everywhere(forward, 1)


SUBJECTS: dict[str, Work] = {
    "a prompt": Work(0, prompt),
    "a prompt after others": Work(13, prompt),
    "a decode": Work(31, decode),
    "a decode on a page border": Work(32, decode),
    "raw masks": Work(20, masked),
    "a window that trims": Work(40, windowed),
    "rows that see later ones": Work(20, both_ways),
    "positions and a logit mask": Work(12, elsewhere),
    "every probe": Work(19, everything),
    "pending tokens": Work(9, everything, waiting=6),
    "after a discard": Work(40, everything, discard=2),
    "the last token": Work(17, last),
    "the last token, again": Work(17, last, cut=3),
}


def set_up(engine: hw.Engine, work: Work, seed: int) -> hw.Context:
    context = engine.context()
    if work.before:
        context.forward().input(random_tokens(V, work.before + work.cut, seed)).execute().result()
    context.truncate(work.cut)
    if work.discard:
        context.inner().discard_pages(0, work.discard)
        context.forward().input([1]).execute().result()
    return context.fill(random_tokens(V, work.waiting, seed + 1))


def run(engine: hw.Engine, crowd: list[tuple[Work, int]]) -> list[tuple[hw.Output, list[Any]]]:
    """The passes of a crowd in one step."""
    contexts = [set_up(engine, work, seed) for work, seed in crowd]
    forwards = [context.forward() for context in contexts]
    handles = [work.build(forward) for (work, _), forward in zip(crowd, forwards, strict=True)]
    with engine._lock:
        running = [forward.execute() for forward in forwards]
    outs = [execution.result() for execution in running]
    for context in contexts:
        context.release()
    engine.cache.clear()
    return list(zip(outs, handles, strict=True))


def read(out: hw.Output, handle: Any) -> Any:
    if (tokens := out.tokens(handle)) is not None:
        return tokens
    readers = (out.logits, out.distribution, out.logprobs, out.entropy, out.hidden, out.attention, out.lens)
    return next(value for reader in readers if (value := reader(handle)) is not None)


def check_same(one: Any, other: Any) -> None:
    """Equal to float tolerance; a ranking by its values."""
    if isinstance(one, list) and all(isinstance(v, int) for v in one):
        assert one == other
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            check_same(a, b)
    elif isinstance(one, tuple):
        assert_close(one[1][np.argsort(one[0])], other[1][np.argsort(other[0])])
    else:
        assert_close(one, other)
