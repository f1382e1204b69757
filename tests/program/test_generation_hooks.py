"""Hooks of a generation, before every pass and every draw; and sequences with a bias, as transformers has them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as theirs

import headway as hw
from headway.testing import random_model
from support.small import small_engine

V = 97
PROMPT = [5, 6, 7, 8]
HOW = hw.Sampling(temperature=0.9, top_p=0.95, repetition_penalty=1.1, seed=4)


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(vocab_size=V), threads=1, pages=64) as made:
        yield made


def tokens_of(engine: hw.Engine, sampler: hw.Sampler = HOW, **options: Any) -> list[int]:
    with engine.context() as ctx:
        return asyncio.run(ctx.fill(PROMPT).generate(sampler, max_tokens=16, stop_only=True, **options).tokens())


# -- logits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [hw.Argmax(), HOW, hw.Typical(0.8, seed=2)])
def test_a_hook_that_changes_nothing_changes_nothing(engine: hw.Engine, sampler: hw.Sampler) -> None:
    plain = tokens_of(engine, sampler)
    assert tokens_of(engine, sampler, logits=lambda logits, gen: None) == plain
    assert tokens_of(engine, sampler, logits=lambda logits, gen: logits.astype(np.float64)) == plain
    assert tokens_of(engine, sampler, prepare=lambda prepared: None) == plain


@pytest.mark.parametrize("sampler", [hw.Argmax(), HOW])
def test_a_hook_that_adds_a_bias_is_the_bias(engine: hw.Engine, sampler: hw.Sampler) -> None:
    bias = np.random.default_rng(0).normal(0, 2, V).astype(np.float32)

    def in_place(logits: np.ndarray, gen: hw.Generation) -> None:
        logits += bias

    async def later(logits: np.ndarray, gen: hw.Generation) -> np.ndarray:
        await asyncio.sleep(0)
        return logits.astype(np.float64) + bias

    how = hw.Sampling(temperature=0, logit_bias=bias) if isinstance(sampler, hw.Argmax) else None
    if how is None:
        how = hw.Sampling(0.9, top_p=0.95, repetition_penalty=1.1, seed=4, logit_bias=bias)
    biased = tokens_of(engine, how)
    assert biased != tokens_of(engine, sampler)
    assert tokens_of(engine, sampler, logits=in_place) == biased
    assert tokens_of(engine, sampler, logits=later) == biased


def test_hooks_see_the_generation_and_stay_in_the_batch(engine: hw.Engine) -> None:
    """Contrastive decoding by a second context, many at once: each has what it has alone, and steps are shared."""

    async def one(engine: hw.Engine, seed: int) -> list[int]:
        async with engine.context() as ctx, engine.context() as weak:

            async def contrast(logits: np.ndarray, gen: hw.Generation) -> np.ndarray:
                assert gen.context is ctx
                assert ctx.tokens == (*PROMPT, seed, *gen.generated)
                forward = weak.forward().input([PROMPT[0]] if not gen.generated else gen.generated[-1:])
                probe = forward.probe(-1, hw.Logits())
                return 2 * logits - (await forward.execute()).logits(probe)

            ctx.fill([*PROMPT, seed])
            return await ctx.generate(hw.TopP(0.9, seed=seed), max_tokens=8, stop_only=True, logits=contrast).tokens()

    async def all_of_them(engine: hw.Engine) -> tuple[list[list[int]], int, int]:
        before = engine.stats()
        found = list(await asyncio.gather(*(one(engine, seed) for seed in range(6))))
        after = engine.stats()
        return found, after.passes - before.passes, after.steps - before.steps

    found, passes, steps = engine.run(all_of_them)
    assert passes == 6 * 16
    assert steps < passes / 2
    assert found == [engine.run(one, seed) for seed in range(6)]


def test_masks_constraints_stops_and_probes_hold_with_hooks(tmp_path: Any) -> None:
    with small_engine(tmp_path) as engine:

        def wild(logits: np.ndarray, gen: hw.Generation) -> np.ndarray:
            return np.random.default_rng(len(gen.generated)).normal(0, 9, logits.size)

        async def program(engine: hw.Engine) -> None:
            async with engine.context() as ctx:
                grammar = hw.Grammar.choices(["yes", "no", "maybe"])
                text = await ctx.fill("the").generate(logits=wild, constrain=grammar).text()
                assert text in ("yes", "no", "maybe")
            async with engine.context() as ctx:
                gen = ctx.fill("the").generate(HOW, max_tokens=12, min_tokens=6, logits=wild, probe=hw.Entropy())
                steps = [step async for step in gen]
                assert len(gen.generated) >= 6
                assert all(len(step.probes) == 1 for step in steps)
            async with engine.context() as ctx:
                gens = ctx.fill("the").generate(HOW, max_tokens=5, num_return_sequences=2, logits=wild, stop_only=True)
                one, other = await gens.sequences()
                assert one.tokens[0] != () != other.tokens

        engine.run(program)


def test_a_generation_with_hooks_is_forked_cut_and_gone_on_with(engine: hw.Engine) -> None:
    def shifted(logits: np.ndarray, gen: hw.Generation) -> np.ndarray:
        return np.roll(logits, len(gen.generated))

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as ctx:
            gen = ctx.fill(PROMPT).generate(HOW, max_tokens=10, stop_only=True, logits=shifted)
            for _ in range(4):
                await anext(gen)
            fork = gen.fork()
            whole = await gen.tokens()
            assert await fork.tokens() == whole
            ctx.truncate(3)
            assert await gen.resume(3).tokens() == whole
            fork.context.release()

    engine.run(program)


def test_a_hook_that_fails_leaves_nothing_behind(engine: hw.Engine) -> None:
    plain = tokens_of(engine)
    bad: list[tuple[Callable[..., Any], type[Exception], str]] = [
        (lambda logits, gen: 1 / 0, ZeroDivisionError, "division"),
        (lambda logits, gen: logits[:-1], hw.InvalidInput, rf"shape \({V - 1},\); expected \({V},\)"),
        (lambda logits, gen: logits[None], hw.InvalidInput, "shape"),
        (lambda logits, gen: logits * np.nan, hw.InvalidInput, "not a number at token 0"),
        (lambda logits, gen: np.full(V, -np.inf), hw.InvalidMask, "-inf for every token"),
        (lambda logits, gen: "no", hw.WrongType, "numbers"),
        (lambda logits, gen: gen.context.fill([1]) and None, hw.InvalidInput, "changed the context"),
    ]

    async def program(engine: hw.Engine) -> None:
        for hook, error, says in bad:
            async with engine.context() as ctx:
                calls = []

                def at_third(logits: np.ndarray, gen: hw.Generation, hook: Any = hook, calls: Any = calls) -> Any:
                    calls.append(1)
                    return hook(logits, gen) if len(calls) == 3 else None

                gen = ctx.fill(PROMPT).generate(HOW, max_tokens=16, stop_only=True, logits=at_third)
                found = [*(await anext(gen)).tokens, *(await anext(gen)).tokens]
                with pytest.raises(error, match=says):
                    await anext(gen)
                extra = len(ctx.pending) if "changed" in says else 0
                ctx.truncate(extra)
                assert ctx.tokens == (*PROMPT, *found)
                assert gen.generated == tuple(found)
                assert await gen.tokens() == plain

    engine.run(program)
    for name in ("prepare", "logits"):
        with pytest.raises(hw.WrongType, match=name), engine.context() as ctx:
            ctx.fill([1]).generate(**{name: 3})  # type: ignore[arg-type]


class Ends:
    """A constraint whose masks run out."""

    def mask(self) -> None:
        raise StopAsyncIteration

    def accept(self, token: int) -> None:
        pass

    def rollback(self, n: int) -> None:
        pass

    def copy(self) -> Ends:
        return self


@pytest.mark.parametrize(
    ("name", "beams"), [("logits", 1), ("logits", 2), ("prepare", 1), ("constrain", 1), ("constrain", 2)]
)
def test_a_hook_whose_own_iterator_ends_does_not_end_the_text(engine: hw.Engine, name: str, beams: int) -> None:
    """As from `anext` of a second generation: a loop over steps would take it for the end of this one."""

    def ends(*_: Any) -> Any:
        raise StopAsyncIteration

    async def program(engine: hw.Engine) -> None:
        options: dict[str, Any] = {name: Ends() if name == "constrain" else ends}
        async with engine.context() as ctx:
            gen = ctx.fill(PROMPT).generate(num_beams=beams, max_tokens=4, stop_only=True, **options)
            with pytest.raises(RuntimeError, match="of this generation raised StopAsyncIteration"):
                async for _ in gen:
                    pass
            assert ctx.tokens == tuple(PROMPT)

    engine.run(program)


# -- prepare -----------------------------------------------------------------------------------------------------------


def test_a_hook_may_add_masks_biases_and_probes_to_every_pass(engine: hw.Engine) -> None:
    seen: list[tuple[hw.Forward, Any]] = []
    bias = np.random.default_rng(1).normal(0, 2, V)

    async def prepare(prepared: hw.Prepared) -> None:
        forward = prepared.forward
        seen.append((forward, forward.bias(bias).mask(forbid=[3, 4]).probe(-1, hw.Entropy())))

    found = tokens_of(engine, prepare=prepare)
    without = np.where(np.isin(range(V), [3, 4]), -np.inf, bias)
    how = hw.Sampling(0.9, top_p=0.95, repetition_penalty=1.1, seed=4, logit_bias=without)
    assert found == tokens_of(engine, how)
    assert len(seen) == 16
    assert all(forward.output.entropy(handle) > 0 for forward, handle in seen)


def test_a_prepare_hook_that_fails_or_spends_the_pass_leaves_the_context_as_it_was(engine: hw.Engine) -> None:
    plain = tokens_of(engine)

    async def program(engine: hw.Engine) -> None:
        for number, hook in enumerate([lambda p: 1 / 0, lambda p: p.forward.mask(forbid=range(V)), lambda p: p.take()]):
            async with engine.context() as ctx:
                calls = []

                def at_third(prepared: hw.Prepared, hook: Any = hook, calls: Any = calls) -> Any:
                    calls.append(1)
                    return hook(prepared) if len(calls) == 3 else None

                gen = ctx.fill(PROMPT).generate(HOW, max_tokens=16, stop_only=True, prepare=at_third)
                await anext(gen)
                await anext(gen)
                with pytest.raises((ZeroDivisionError, hw.HeadwayError)):
                    await anext(gen)
                assert await gen.tokens() == plain, number

    engine.run(program)


def test_a_pass_has_no_output_before_its_end(engine: hw.Engine) -> None:
    with engine.context() as ctx:
        forward = ctx.forward().input([1])
        handle = forward.sample([0], hw.Argmax())
        with pytest.raises(hw.Closed, match="no results"):
            forward.output  # noqa: B018
        token = forward.execute().result().token(handle)
        assert forward.output.token(handle) == token


# -- sequences with a bias ---------------------------------------------------------------------------------------------


def test_biases_are_those_of_transformers() -> None:
    from headway.program.generation.word_bias import WordBias, check_bad_words, check_sequence_bias

    rng = np.random.default_rng(6)
    for _ in range(100):
        size = 6  # few tokens, so that sequences are met
        tokens = rng.integers(0, size, rng.integers(1, 9)).tolist()
        biases = {tuple(rng.integers(0, size, rng.integers(1, 4)).tolist()): float(rng.normal()) for _ in range(5)}
        words = [rng.integers(0, size, rng.integers(1, 4)).tolist() for _ in range(3)]
        logits = torch.tensor(rng.normal(0, 1, size), dtype=torch.float32)
        chain = [theirs.SequenceBiasLogitsProcessor(biases), theirs.NoBadWordsLogitsProcessor(words)]  # type: ignore[arg-type]
        expected = logits[None].clone()
        for each in chain:
            expected = each(torch.tensor([tokens]), expected)  # type: ignore[arg-type]
        own = WordBias.of(check_bad_words(words), check_sequence_bias(biases), size)
        assert own is not None
        found = logits.double()
        for token, bias in own.after(tokens).items():
            found[token] += bias
        assert torch.allclose(found.float(), expected[0], atol=1e-6)


def test_a_generation_under_biases_equals_one_by_hand(engine: hw.Engine) -> None:
    plain = tokens_of(engine, hw.Argmax())
    pair, single = plain[2:4], plain[6]

    biases = {(pair[0],): -1.0, (plain[0], plain[1]): -9.0}

    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as ctx:
            found: list[int] = []
            for _ in range(16):
                forward = ctx.forward() if found else ctx.fill(PROMPT).forward()
                if found:
                    forward.input(found[-1:])
                logits = forward.probe(-1, hw.Logits())
                row = (await forward.execute()).logits(logits).astype(np.float64)
                tokens = [*PROMPT, *found]
                row[pair[0]] -= 1.0
                if tokens[-1] == plain[0]:
                    row[plain[1]] -= 9.0
                row[single] = -np.inf
                if tokens[-1] == pair[0]:
                    row[pair[1]] = -np.inf
                found.append(int(np.argmax(row)))
        return found

    found = tokens_of(engine, hw.Argmax(), bad_words_ids=[pair, [single]], sequence_bias=biases)
    assert found == engine.run(program)
    assert found != plain


def test_sequences_count_drafts_before_a_row(engine: hw.Engine) -> None:
    """The same tokens with and without speculation, drafts on a line that are often right."""
    words = [[a, b] for a in range(V) for b in range(a % 2, V, 2)]

    async def tokens(engine: hw.Engine, speculate: Any) -> list[int]:
        async with engine.context() as ctx:
            ctx.fill([5, 6, 7, 8] * 4)
            how = hw.Sampling(temperature=0.7, seed=3)
            options: dict[str, Any] = {"bad_words_ids": words, "sequence_bias": {(7,): 3.0, (7, 8): 3.0, (8, 5): 3.0}}
            gen = ctx.generate(how, max_tokens=30, stop_only=True, speculate=speculate, **options)
            found = await gen.tokens()
            assert speculate is None or (gen.speculation is not None and gen.speculation.accepted > 5)
            return found

    plain = engine.run(tokens, None)
    assert engine.run(tokens, Replay([5, 6, 7, 8] * 4, plain)) == plain
    with pytest.raises(hw.Unsupported, match="speculate"), engine.context() as ctx:
        ctx.fill([1]).generate(speculate=hw.PromptLookup(), logits=lambda logits, gen: None)


class Replay:
    """Drafts what comes, wrong every third time."""

    adaptive = False

    def __init__(self, prompt: list[int], tokens: list[int]) -> None:
        self._all, self._prompt, self._at = tokens, len(prompt), 0

    def draft(self, tokens: Any, limit: int) -> list[int]:
        done = len(tokens) - self._prompt
        found = self._all[done : done + min(limit, 4)]
        return [token if (done + i) % 3 else (token + 1) % V for i, token in enumerate(found)]

    def accept(self, *_: Any) -> None:
        pass


def test_bad_sequences_are_refused(engine: hw.Engine) -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"bad_words_ids": [[]]}, hw.InvalidInput, r"bad_words_ids\[0\] is empty"),
        ({"bad_words_ids": [3]}, hw.WrongType, "list of token ids"),
        ({"bad_words_ids": [[V]]}, hw.InvalidToken, f"token {V}"),
        ({"bad_words_ids": [["a"]]}, hw.WrongType, "integer"),
        ({"sequence_bias": {(1,): float("nan")}}, hw.InvalidInput, "finite"),
        ({"sequence_bias": {(): 1.0}}, hw.InvalidInput, "empty"),
        ({"sequence_bias": [[[1], 1.0], [[1], 2.0]]}, hw.InvalidInput, "twice"),
        ({"sequence_bias": [1]}, hw.WrongType, "pairs"),
        ({"sequence_bias": {(V, 1): 1.0}}, hw.InvalidToken, f"token {V}"),
    ]
    for options, error, says in wrong:
        with engine.context().fill([1]) as ctx, pytest.raises(error, match=says):
            ctx.generate(**options)
    with pytest.raises(hw.InvalidMask, match="allows none"):
        tokens_of(engine, bad_words_ids=[[token] for token in range(V)])
