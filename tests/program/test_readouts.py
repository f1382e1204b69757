"""Samplers and probes on any row: values equal the oracle's, draws are a function of (seed, position, ordinal), the
head runs on the rows that were asked for and nothing else leaves the device."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headway as hw
from headway import Mask
from headway.base.rng import uniform
from headway.base.specs.samplers import resolve
from headway.models.decoder import Decoder
from headway.runtime.batch import Batch
from headway.runtime.runners.base import InFlight, SegmentResult, StepResult
from headway.testing import random_model
from support import world as w
from support.checks import assert_close, random_tokens
from support.watched import WatchedRunner
from support.world import Cell, Choice, Judge, Twin

MODELS = ("llama-gqa-tied", "mistral-window", "qwen2-layer-types", "qwen3-headdim24")
V = 97


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[hw.Engine, Judge]]:
    folder, judge = w.model(request.param)
    with hw.Engine(folder, threads=1, pages=64, page_size=8) as engine:
        yield engine, judge


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(vocab_size=V), threads=1, pages=64) as made:
        yield made


# -- probes against the oracle -------------------------------------------------------------------------------------


class Expected:
    """What the oracle says of one cell, over the slots of a sequence."""

    def __init__(self, judge: Judge, cell: Cell, slots: Sequence[Cell]) -> None:
        order, result = judge.run([cell])
        row = order[cell]
        self.logits = result.logits[row].numpy()
        self.hidden = [h[row].numpy() for h in result.hidden]
        streams = [*result.hidden[:-1], result.layer_outputs[-1]]
        self.lens = [judge.oracle.unembed(h[row][None])[0].numpy() for h in streams]
        self.attention = [np.zeros((a.shape[0], len(slots))) for a in result.attention]
        for slot, other in enumerate(slots):
            if other in order:
                for mine, theirs in zip(self.attention, result.attention, strict=True):
                    mine[:, slot] = theirs[:, row, order[other]].numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits - logits.max()
    return top - np.log(np.exp(top).sum())


def check_distribution(found: tuple[np.ndarray, np.ndarray], logits: np.ndarray, k: int) -> None:
    """Ids likeliest first; where two probabilities are all but equal, either order will do."""
    ids, probs = found
    exact = np.exp(log_softmax(logits))
    assert len(ids) == len(set(ids.tolist())) == (k or len(logits))
    assert_close(probs, exact[ids], "probabilities")
    assert (np.diff(probs) <= 0).all()
    assert_close(np.sort(exact)[::-1][: len(ids)], exact[ids], "the likeliest")


def ask_everything(forward: hw.Forward, index: int, layers: int) -> dict[str, Any]:
    handles: dict[str, Any] = {
        "logits": forward.probe(index, hw.Logits()),
        "again": forward.probe(index, hw.Logits()),
        "top": forward.probe(index, hw.Distribution(k=5)),
        "warm": forward.probe(index, hw.Distribution(temperature=2.5, k=0)),
        "one": forward.probe(index, hw.Logprob(3)),
        "some": forward.probe(index, hw.Logprobs([96, 0, 0, 41])),
        "entropy": forward.probe(index, hw.Entropy()),
        "lens": forward.probe(index, hw.LogitLens(range(layers + 1), 4)),
        "no lens": forward.probe(index, hw.LogitLens([], 4)),
        "whole lens": forward.probe(index, hw.LogitLens([layers, 0, layers], 0)),
        "greedy": forward.sample([index], hw.Argmax()),
    }
    for layer in range(layers + 1):
        handles[f"hidden {layer}"] = forward.probe(index, hw.Hidden(layer))
    for layer in range(layers):
        for reduce in (None, "mean", "max"):
            handles[f"{reduce} scores {layer}"] = forward.probe(index, hw.AttentionScores(layer, reduce))
    return handles


def check_everything(out: hw.Output, h: dict[str, Any], e: Expected, layers: int) -> None:
    logs = log_softmax(e.logits)
    assert_close(out.logits(h["logits"]), e.logits)
    np.testing.assert_array_equal(out.logits(h["logits"]), out.logits(h["again"]))
    check_distribution(out.distribution(h["top"]), e.logits, 5)
    check_distribution(out.distribution(h["warm"]), e.logits / 2.5, 0)
    assert_close(out.logprobs(h["one"]), logs[[3]])
    assert_close(out.logprobs(h["some"]), logs[[96, 0, 0, 41]])
    assert math.isclose(out.entropy(h["entropy"]), -(np.exp(logs) * logs).sum(), abs_tol=1e-3)
    assert out.lens(h["no lens"]) == []
    for found, expected in zip(out.lens(h["lens"]), e.lens, strict=True):
        check_distribution(found, expected, 4)
    for found, layer in zip(out.lens(h["whole lens"]), (layers, 0, layers), strict=True):
        check_distribution(found, e.lens[layer], 0)
    assert e.logits[out.token(h["greedy"])] >= e.logits.max() - 1e-3
    for layer in range(layers + 1):
        assert_close(out.hidden(h[f"hidden {layer}"]), e.hidden[layer], f"hidden state {layer}")
    for layer in range(layers):
        full = out.attention(h[f"None scores {layer}"])
        assert_close(full, e.attention[layer], f"attention of layer {layer}")
        assert (full[e.attention[layer] == 0] == 0).all()
        assert_close(out.attention(h[f"mean scores {layer}"]), e.attention[layer].mean(0))
        assert_close(out.attention(h[f"max scores {layer}"]), e.attention[layer].max(0))


def raw_rows(base: int, count: int, seed: int) -> np.ndarray:
    bits = np.random.default_rng(seed).random((count, base + count)) < 0.3
    bits[:, 8:16] = False  # a page that nobody sees
    bits[np.arange(count), base + np.arange(count)] = True
    return bits


def setting(name: str, twin: Twin) -> tuple[list[int], list[int], Choice | None]:
    """What stands before the pass, and the pass: tokens, positions, mask."""
    twin.run(random_tokens(V, 21))
    tokens = random_tokens(V, 5, 1)
    match name:
        case "plain":
            return tokens, [], None
        case "decode":
            return tokens[:1], [], None
        case "masked and trimmed":
            bits = raw_rows(21, 5, 2)
            return tokens, [], Choice(Mask.from_bool(bits), rows=bits)
        case "window":
            return tokens, [], Choice(Mask.window(3), sees=w.window(3))
        case "not causal":
            bits = raw_rows(21, 5, 3)
            return tokens, [], Choice(Mask.from_bool(bits), rows=bits, causal=False)
        case "positions":
            return tokens, [7, 100, 7, 22, 3], None
        case "pending":
            twin.fill(random_tokens(V, 4, 5))
            return tokens, [], Choice(Mask.sink(1, 9), sees=w.sink(1, 9))
        case "discarded":
            twin.context.inner().discard_pages(0, 1)
            twin.world.gone = {0}
            twin.run([4])
            return tokens, [], None
        case "no input":
            return [], [], None
        case "state lost":
            twin.context.truncate(3)
            twin.world.truncate(3)
            return tokens, [], Choice(Mask.window(4), sees=w.window(4))
    raise KeyError(name)


SETTINGS = (
    "plain",
    "decode",
    "masked and trimmed",
    "window",
    "not causal",
    "positions",
    "pending",
    "discarded",
    "no input",
    "state lost",
)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_probe_on_every_row(pair: tuple[hw.Engine, Judge], name: str) -> None:
    engine, judge = pair
    with engine.context() as context:
        check_setting(Twin(context, judge), name)


@pytest.mark.parametrize("name", ["plain", "masked and trimmed", "not causal", "pending", "state lost"])
def test_every_probe_in_every_chunk(name: str) -> None:
    folder, judge = w.model("qwen2-layer-types")
    for budget in (1, 3):
        made = hw.Engine(folder, threads=1, pages=64, page_size=8, max_batch_tokens=budget)
        with made as engine, engine.context() as context:
            check_setting(Twin(context, judge), name)


def check_setting(twin: Twin, name: str) -> None:
    tokens, at, mask = setting(name, twin)
    layers = twin.judge.oracle.shape.layers
    plan, forward = twin.plan(tokens, at, mask), twin.build(tokens, at, mask)
    indices = range(-len(tokens) - 1, 0)
    handles = [ask_everything(forward, i, layers) for i in indices]
    out = forward.execute().result()
    cells = [*twin.world.cells, *plan.cells]
    for index, handle in zip(indices, handles, strict=True):
        slot = len(cells) + index
        whole = mask is not None and not mask.causal and index >= -len(tokens)
        expected = Expected(twin.judge, cells[slot], cells if whole else cells[: slot + 1])
        check_everything(out, handle, expected, layers)


# -- draws ---------------------------------------------------------------------------------------------------------

SAMPLERS: dict[str, Any] = {
    "multinomial": hw.Multinomial(temperature=0.7, seed=11),
    "top-k": hw.TopK(5, temperature=1.5, seed=11),
    "top-p": hw.TopP(0.8, seed=11),
    "min-p": hw.MinP(0.05, temperature=2.0, seed=11),
    "top-k top-p": hw.TopKTopP(9, 0.7, seed=11),
    "typical": hw.Typical(0.6, seed=11),
    "all parameters": hw.Sampling(
        temperature=1.7,
        top_k=20,
        top_p=0.95,
        min_p=0.01,
        typical_p=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 2.0, 50: -1.0},
        seed=(1 << 64) - 1,
    ),
}


def draw(
    logits: np.ndarray,
    how: hw.Sampling,
    number: float,
    *,
    allowed: np.ndarray | None = None,
    seen: Sequence[int] = (),
    generated: Sequence[int] = (),
) -> int:
    """The token a sampler must draw, worked out a second time, in float64 and with plain sorting."""
    scores = logits.astype(np.float64)
    for token, bias in how.bias:
        scores[token] += bias
    for token in {*seen, *generated}:
        scores[token] *= 1 / how.repetition_penalty if scores[token] > 0 else how.repetition_penalty
    for token, count in Counter(generated).items():
        scores[token] -= how.presence_penalty + how.frequency_penalty * count
    if allowed is not None:
        scores[~allowed] = -np.inf
    if how.temperature == 0:
        return int(scores.argmax())
    probs = np.exp((scores - scores.max()) / how.temperature)
    probs /= probs.sum()

    def keep(order: np.ndarray, count: int) -> None:
        probs[order[max(1, count) :]] = 0
        probs[:] = probs / probs.sum()

    def prefix(order: np.ndarray, share: float) -> None:
        keep(order, int((np.cumsum(probs[order]) < share - 1e-12).sum()) + 1)

    if how.top_k:
        keep(np.argsort(-probs, kind="stable"), how.top_k)
    if how.top_p < 1:
        prefix(np.argsort(-probs, kind="stable"), how.top_p)
    if how.min_p > 0:
        probs[probs < how.min_p * probs.max()] = 0
        probs /= probs.sum()
    if how.typical_p < 1:
        logs = np.log(np.where(probs > 0, probs, 1.0))
        distance = np.where(probs > 0, np.abs(-logs - -(probs * logs).sum()), np.inf)
        prefix(np.argsort(distance, kind="stable"), how.typical_p)
    running = np.cumsum(probs)
    return int(np.searchsorted(running, number * running[-1], side="right"))


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_are_a_function_of_seed_position_and_ordinal(engine: hw.Engine, name: str) -> None:
    sampler = SAMPLERS[name]
    how = resolve(sampler)
    assert how.seed is not None
    with engine.context() as context:
        context.fill([1, 2, 3, 3]).forward()
        forward = context.forward().input_at([5, 6, 5], [10, 2, 30])
        rows = [0, 1, 2, -1, 0, -4]
        first = forward.sample(rows, sampler)
        second = forward.sample([2], sampler)
        logits = {i: forward.probe(i, hw.Logits()) for i in (-4, 0, 1, 2)}
        out = forward.execute().result()
        positions, sequence = {-4: 3, 0: 10, 1: 2, 2: 30}, [1, 2, 3, 3, 5, 6, 5]
        ordinals: Counter[int] = Counter()
        expected = []
        for row in [*rows, 2]:
            place = 2 if row == -1 else row
            past = sequence[: 5 + place] if place >= 0 else sequence[:4]
            number = uniform(how.seed, positions[place], ordinals[place])
            ordinals[place] += 1
            expected.append(draw(out.logits(logits[place]), how, number, seen=past, generated=past))
        assert out.tokens(first) + out.tokens(second) == expected
        assert set(out.stats.seeds) == {how.seed}
        assert len(out.stats.seeds) == 7


def test_many_draws_at_one_row_differ_and_follow_the_distribution(engine: hw.Engine) -> None:
    with engine.context() as context:
        forward = context.forward().input([1, 2, 3])
        handle = forward.sample([-1] * 400, hw.Multinomial(temperature=1.0, seed=0))
        spread = forward.probe(-1, hw.Distribution())
        out = forward.execute().result()
    tokens, (ids, probs) = out.tokens(handle), out.distribution(spread)
    assert len(set(tokens)) > 5
    share = Counter(tokens)[int(ids[0])] / 400
    assert abs(share - probs[0]) < 4 * math.sqrt(probs[0] * (1 - probs[0]) / 400)


def test_a_seed_that_was_made_up_is_reported_and_draws_the_same_again(engine: hw.Engine) -> None:
    def tokens(seed: int | None) -> tuple[list[int], set[int]]:
        with engine.context() as context:
            forward = context.forward().input([1, 2, 3])
            handle = forward.sample([0, 1, 2] * 8, hw.Multinomial(temperature=5.0, seed=seed))
            out = forward.execute().result()
            return out.tokens(handle), set(out.stats.seeds)

    first, (seed,) = tokens(None)
    other, (another,) = tokens(None)
    assert seed != another
    assert first != other
    assert tokens(seed) == (first, {seed})


def test_unseeded_forks_differ_and_a_contexts_seed_is_for_samplers_without_one(engine: hw.Engine) -> None:
    with engine.context() as context, context.fork() as left, context.fork() as right:
        found = []
        for fork in (left, right):
            forward = fork.forward().input([1, 2])
            handle = forward.sample([-1] * 16, hw.Multinomial(temperature=9.0))
            out = forward.execute().result()
            assert len(set(out.stats.seeds)) == 1
            found.append(out.tokens(handle))
        assert found[0] != found[1]
    with engine.context(seed=77) as context:
        forward = context.forward().input([1])
        forward.sample([-1], hw.TopK(3))
        forward.sample([-1], hw.TopK(3, seed=5))
        assert forward.execute().result().stats.seeds == (77, 5)


def test_a_draw_does_not_depend_on_how_its_row_came_to_be(engine: hw.Engine) -> None:
    """One prompt, token by token, or a token read again: position and seed say what is drawn."""
    sampler, tokens, found = hw.Multinomial(temperature=3.0, seed=9), random_tokens(V, 20), []
    for way in ("whole", "steps", "again", "pending"):
        with engine.context() as context:
            if way == "steps":
                for token in tokens[:-1]:
                    context.forward().input([token]).execute().result()
            elif way == "again":
                context.forward().input([*tokens, 1]).execute().result()
                context.truncate(1)
            elif way == "pending":
                context.fill(tokens)
            forward = context.forward().input({"whole": tokens, "steps": tokens[-1:]}.get(way, []))
            handle = forward.sample([-1] * 5, sampler)
            found.append(forward.execute().result().tokens(handle))
    assert found[1:] == found[:1] * 3


# -- logit masks ---------------------------------------------------------------------------------------------------

ALLOWED = np.isin(np.arange(V), [4, 5, 6, 50, 96])
PACKED = np.packbits(np.pad(ALLOWED, (0, -V % 32)), bitorder="little").view(np.uint32)
FORMS: dict[str, Any] = {
    "runs": lambda f: f.mask([4, 3, 43, 1, 45, 1]),
    "numpy runs": lambda f: f.mask(np.array([4, 3, 43, 1, 45, 1])),
    "Brle": lambda f: f.mask(hw.Brle.from_bool(ALLOWED)),
    "allow": lambda f: f.mask(allow=[96, 4, 5, 6, 50, 4]),
    "allow from torch": lambda f: f.mask(allow=torch.tensor([96, 4, 5, 6, 50])),
    "forbid": lambda f: f.mask(forbid=np.flatnonzero(~ALLOWED)),
    "booleans": lambda f: f.mask(ALLOWED),
    "a list of booleans": lambda f: f.mask(ALLOWED.tolist()),
    "torch booleans": lambda f: f.mask(torch.from_numpy(ALLOWED)),
    "packed": lambda f: f.mask(PACKED),
    "several": lambda f: f.mask(allow=[1, 4, 5, 6, 7, 50, 96]).mask(forbid=[7]).mask(forbid=[1, 0]),
    "both in one": lambda f: f.mask(allow=[1, 4, 5, 6, 50, 96], forbid=[1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_logit_mask(engine: hw.Engine, form: str) -> None:
    with engine.context() as context:
        forward = context.forward().input([1, 2, 3])
        FORMS[form](forward)
        many = forward.sample([-1] * 60, hw.Multinomial(temperature=20.0, seed=1))
        best = forward.sample([0, 1], hw.Argmax())
        raw, seen = forward.probe(-1, hw.Logits()), forward.probe(-1, hw.Logits(masked=True))
        rows = [forward.probe(i, hw.Logits()) for i in (0, 1)]
        out = forward.execute().result()
    assert set(out.tokens(many)) == {4, 5, 6, 50, 96}
    for token, row in zip(out.tokens(best), rows, strict=True):
        assert token == int(np.where(ALLOWED, out.logits(row), -np.inf).argmax())
    assert np.isfinite(out.logits(raw)).all()
    np.testing.assert_array_equal(np.isfinite(out.logits(seen)), ALLOWED)
    np.testing.assert_array_equal(out.logits(seen)[ALLOWED], out.logits(raw)[ALLOWED])


def test_probes_see_the_models_own_logits_unless_they_say_masked(engine: hw.Engine) -> None:
    with engine.context() as context:
        forward = context.forward().input([1, 2, 3]).mask(ALLOWED)
        handles: dict[Any, Any] = {}
        for masked in (False, True):
            handles[masked] = (
                forward.probe(-1, hw.Logits(masked=masked)),
                forward.probe(-1, hw.Distribution(temperature=0.5, k=0, masked=masked)),
                forward.probe(-1, hw.Logprob(50, masked=masked)),
                forward.probe(-1, hw.Logprobs([0, 96], masked=masked)),
                forward.probe(-1, hw.Entropy(masked=masked)),
            )
        out = forward.execute().result()
    raw = out.logits(handles[False][0]).astype(np.float64)
    for masked in (False, True):
        _, spread, one, some, entropy = handles[masked]
        logits = np.where(ALLOWED, raw, -np.inf) if masked else raw
        logs = log_softmax(logits)
        with np.errstate(invalid="ignore"):
            bits = np.where(np.isfinite(logs), np.exp(logs) * logs, 0)
        assert_close(out.logprobs(one), logs[[50]])
        found = out.logprobs(some)
        assert_close(found[1:], logs[[96]])
        assert found[0] == -np.inf if masked else math.isclose(found[0], logs[0], abs_tol=1e-4)
        assert math.isclose(out.entropy(entropy), -bits.sum(), abs_tol=1e-4)
        check_distribution(out.distribution(spread), logits / 0.5, 0)


def test_a_mask_for_single_rows_binds_those_alone(engine: hw.Engine) -> None:
    with engine.context() as context:
        context.forward().input([9, 9]).execute().result()
        forward = context.forward().input([1, 2, 3])
        forward.mask(allow=[7], rows=[0]).mask(allow=[8, 11], rows=[-1]).mask(forbid=[8], rows=np.array([2]))
        forward.mask(allow=[12], rows=[-4])
        handle = forward.sample([0, 1, 2, -4], hw.Argmax())
        free = forward.probe(1, hw.Logits())
        out = forward.execute().result()
        tokens = out.tokens(handle)
        assert tokens == [7, int(out.logits(free).argmax()), 11, 12]
        forward = context.forward().mask(allow=[13], rows=[-1])
        handle = forward.sample([-1], hw.Argmax())
        assert forward.execute().result().token(handle) == 13


# -- penalties -----------------------------------------------------------------------------------------------------

PENALTIES = hw.Sampling(temperature=0, repetition_penalty=2.0, presence_penalty=3.0, frequency_penalty=1.5)


@pytest.mark.parametrize(
    ("history", "generated"), [(None, None), ([4, 4, 5], None), (None, [2, 2]), ([7], [1, 1, 3]), ([], None), ([], [])]
)
def test_penalties_count_the_contexts_tokens_or_what_they_are_given(
    engine: hw.Engine, history: list[int] | None, generated: list[int] | None
) -> None:
    with engine.context() as context:
        context.forward().input([1, 2, 2]).execute().result()
        context.fill([3, 1])
        forward = context.forward().input([5, 5, 6])
        rows = [0, 1, 2, -4]
        handles = [forward.sample([r], PENALTIES, history=history, generated=generated) for r in rows]
        raw = [forward.probe(r, hw.Logits()) for r in rows]
        out = forward.execute().result()
    sequence = [1, 2, 2, 3, 1, 5, 5, 6]
    for row, handle, logits in zip(rows, handles, raw, strict=True):
        past = sequence[: 6 + row] if row >= 0 else sequence[:5]
        seen = past if history is None else history
        new = seen if generated is None else generated
        assert out.token(handle) == draw(out.logits(logits), resolve(PENALTIES), 0.0, seen=seen, generated=new)


# -- what is computed and what leaves ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class CountingDecoder(Decoder):
    """A decoder that keeps count of the rows its head is given."""

    rows: list[int] = field(default_factory=list)

    def head(self, h: Tensor, tile: int | None) -> Tensor:
        self.rows.append(len(h))
        return super().head(h, tile)


class Watcher(WatchedRunner):
    """The engine's own runner, with an eye on the values that come back."""

    def __init__(self, engine: hw.Engine) -> None:
        super().__init__(engine)
        self.values: list[object] = []

    def begin(self, batch: Batch) -> InFlight:
        step = self.inner.begin(batch)
        result = step.result

        def watched() -> StepResult:
            found = result()
            self.values += [v for r in found.segments if isinstance(r, SegmentResult) for v in r.values.values()]
            return found

        step.result = watched  # type: ignore[method-assign]
        return step


@pytest.fixture(scope="module")
def counting() -> Iterator[tuple[hw.Engine, CountingDecoder, Watcher]]:
    plain = random_model(vocab_size=V)
    decoder = CountingDecoder(**{f.name: getattr(plain, f.name) for f in fields(Decoder)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", "off")  # the native step has packed weights in place of this decoder
        made = hw.Engine(decoder, threads=1, pages=32)
    with made:
        decoder.rows.clear()
        yield made, decoder, Watcher(made)


ASKS: dict[str, tuple[Any, int, Any]] = {
    "nothing": (lambda f: None, 0, []),
    "argmax": (lambda f: f.sample([-1], hw.Argmax()), 1, [int]),
    "one row many times": (
        lambda f: [f.sample([5] * 9, hw.Argmax()), f.probe(5, hw.Entropy())],
        1,
        [int] * 9 + [float],
    ),
    "three rows": (lambda f: f.sample([0, 7, -1], hw.Multinomial()), 3, [int] * 3),
    "top eight": (lambda f: f.probe(3, hw.Distribution(k=8)), 1, [8 + 8]),
    "two logprobs": (lambda f: f.probe(3, hw.Logprobs([1, 2])), 1, [2]),
    "all logits": (lambda f: f.probe(3, hw.Logits()), 1, [V]),
    "a hidden state": (lambda f: f.probe(3, hw.Hidden(2)), 0, [64]),
    "attention": (lambda f: f.probe(9, hw.AttentionScores(1)), 0, [4 * 10]),
    "mean attention": (lambda f: f.probe(9, hw.AttentionScores(1, "mean")), 0, [10]),
    "a lens": (lambda f: f.probe(9, hw.LogitLens([0, 1], 3)), 2, [3 * 4]),
}


@pytest.mark.parametrize("name", ASKS)
def test_the_head_runs_on_the_rows_that_were_asked_for_and_only_their_values_leave(
    counting: tuple[hw.Engine, CountingDecoder, Watcher], name: str
) -> None:
    engine, decoder, watcher = counting
    ask, rows, sizes = ASKS[name]
    with engine.context() as context:
        forward = context.forward().input(random_tokens(V, 30, list(ASKS).index(name)))
        ask(forward)
        decoder.rows.clear()
        watcher.values.clear()
        forward.execute().result()
    assert sum(decoder.rows) == rows
    assert [size(v) for v in watcher.values] == sizes


def size(value: Any) -> Any:
    """The type of a plain number, or how many numbers there are."""
    if isinstance(value, int | float):
        return type(value)
    if isinstance(value, np.ndarray):
        return value.size
    return sum(size(v) for v in value)


def test_reading_what_was_kept_computes_no_row(counting: tuple[hw.Engine, CountingDecoder, Watcher]) -> None:
    engine, decoder, _ = counting
    with engine.context() as context:
        context.forward().input(random_tokens(V, 30)).execute().result()
        before, decoder.rows[:] = engine.stats().tokens, []
        forward = context.forward()
        handle = forward.sample([-1], hw.Argmax())
        out = forward.execute().result()
        assert 0 <= out.token(handle) < V
        assert (sum(decoder.rows), engine.stats().tokens) == (1, before)


# -- the values ----------------------------------------------------------------------------------------------------


def test_values_are_plain_numpy_and_belong_to_the_reader(engine: hw.Engine) -> None:
    with engine.context() as context:
        forward = context.forward().input([1, 2, 3])
        one, two = forward.probe(-1, hw.Logits()), forward.probe(-1, hw.Logits())
        spread, hidden = forward.probe(-1, hw.Distribution(k=3)), forward.probe(-1, hw.Hidden(0))
        scores, entropy = forward.probe(-1, hw.AttentionScores(0)), forward.probe(-1, hw.Entropy())
        token = forward.sample([-1], hw.Argmax())
        out = forward.execute().result()
    logits = out.logits(one)
    assert (logits.dtype, logits.shape, len(bytes(logits))) == (np.float32, (V,), 4 * V)
    logits[:] = 0
    assert out.logits(two).any()
    ids, probs = out.distribution(spread)
    assert (ids.dtype, probs.dtype) == (np.int64, np.float32)
    assert (out.hidden(hidden).dtype, out.hidden(hidden).shape) == (np.float32, (64,))
    assert (out.attention(scores).dtype, out.attention(scores).shape) == (np.float32, (4, 3))
    assert (type(out.token(token)), type(out.entropy(entropy))) == (int, float)
    np.testing.assert_allclose(out.attention(scores).sum(1), 1, atol=1e-5)


def test_the_logits_of_untied_and_tied_heads_are_v_wide() -> None:
    for tied in (False, True):
        made = hw.Engine(random_model(vocab_size=131, tied=tied), threads=1, pages=8)
        with made as engine, engine.context() as context:
            forward = context.forward().input([130])
            handle = forward.probe(-1, hw.Logits())
            assert forward.execute().result().logits(handle).shape == (131,)
