"""Speculation: the same text with and without it, whatever the drafter says, and nothing left behind."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.kernels.reference.sampling import RowSampler, processed_logprobs
from headway.program.engine import Engine
from headway.program.generation.speculation.draft_model import first_layers
from headway.runtime.step_costs import StepCosts
from headway.testing import ScriptedRunner, random_model
from support.checks import random_tokens
from support.sweeps import swept

V = 97
PROMPT = random_tokens(V, 5, 3) * 7
GREEDY, SEEDED = hw.Argmax(), hw.Sampling(temperature=0.6, top_k=12, top_p=0.95, seed=4)
STRICT = {"threads": 1, "deterministic": True}


class Replay:
    """Knows what will come, and is wrong where it is told to be: `wrong` is the share of its drafts."""

    adaptive = False

    def __init__(self, known: Sequence[int], wrong: float = 0.3, most: int = 7, seed: int = 0) -> None:
        self.known, self.wrong, self.most = list(known), wrong, most
        self.random, self.accepted = np.random.default_rng(seed), []

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        ahead = self.known[len(tokens) : len(tokens) + min(limit, self.most)]
        return [int(self.random.integers(V)) if self.random.random() < self.wrong else t for t in ahead]

    def accept(self, tokens: Sequence[int]) -> None:
        self.accepted += tokens

    def copy(self) -> Replay:
        return Replay(self.known, self.wrong, self.most)


class Says:
    """Drafts whatever it is given."""

    adaptive = False

    def __init__(self, what: Any) -> None:
        self.what = what

    def draft(self, tokens: Sequence[int], limit: int) -> Any:
        return self.what(tokens, limit) if callable(self.what) else self.what

    def accept(self, tokens: Sequence[int]) -> None:
        pass

    def copy(self) -> Says:
        return Says(self.what)


class OnlyEven:
    """Even ids, the lowest half of them after a multiple of 8."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed(self) -> np.ndarray:
        ids = np.arange(-(-V // 32) * 32)
        allowed = (ids % 2 == 0) & (ids < V)
        return allowed & (ids < 50) if self.tokens and self.tokens[-1] % 8 == 0 else allowed

    def mask(self) -> np.ndarray:
        return np.packbits(self.allowed(), bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert self.allowed()[token]
        self.tokens.append(token)

    def rollback(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]

    def copy(self) -> OnlyEven:
        twin = OnlyEven()
        twin.tokens = self.tokens[:]
        return twin


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=128, **STRICT) as made:
        yield made


async def collected(
    engine: hw.Engine, prompt: Sequence[int] = PROMPT, sampler: hw.Sampler = GREEDY, **options: Any
) -> tuple[list[int], str | None, list[Any], hw.Generation]:
    async with engine.context().fill(prompt) as context:
        given: dict[str, Any] = {"max_tokens": 60} | options
        generation = context.generate(sampler, **given)
        probes = [value async for step in generation for value in step.probes]
        tokens = await generation.tokens()
        assert list(context.tokens) == [*prompt, *tokens]
        pages = context.inner()
        assert pages.committed_page_count == context.seq_len // 16
        assert pages.committed_page_count + pages.working_page_count == -(-context.seq_len // 16)
        return tokens, generation.finish, probes, generation


def same(engine: hw.Engine, sampler: hw.Sampler = GREEDY, **options: Any) -> list[hw.Generation]:
    """Check that drafts change nothing, whoever makes them; the generations with them."""

    async def program(engine: hw.Engine) -> list[hw.Generation]:
        def fresh() -> dict[str, Any]:
            return {name: value() if callable(value) else value for name, value in options.items()}

        plain = await collected(engine, sampler=sampler, **fresh())
        known = [*PROMPT, *plain[0], *plain[0]]
        drafters = [
            hw.PromptLookup(adaptive=False),
            Replay(known, 0.0),
            Replay(known, 0.3),
            Replay(known, 0.3, most=1),
            Says(lambda tokens, limit: [int(t) for t in np.random.default_rng(len(tokens)).integers(0, V, limit)]),
        ]
        made = []
        for drafter in drafters:
            tokens, finish, probes, generation = await collected(engine, sampler=sampler, speculate=drafter, **fresh())
            assert tokens == plain[0], drafter
            assert finish == plain[1]
            assert len(probes) == len(plain[2])
            assert all(np.array_equal(a, b) for a, b in zip(probes, plain[2]))
            made.append(generation)
        return made

    made = engine.run(program)
    assert engine.stats().pages_held == 0
    return made


@pytest.mark.parametrize("sampler", [GREEDY, SEEDED, hw.Typical(0.9, seed=3)], ids=["greedy", "seeded", "typical"])
def test_the_tokens_are_those_without_drafts(engine: hw.Engine, sampler: hw.Sampler) -> None:
    lookup, exact, *_ = same(engine, sampler)
    assert lookup.speculation is not None
    assert exact.speculation is not None
    assert exact.speculation.accepted == exact.speculation.drafted > 40
    assert exact.speculation.rounds < 12


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 1.3, "penalize_prompt": False},
        {"min_tokens": 20, "stop": lambda: range(0, V, 3)},
        {"stop": lambda: [40, 41, 42, 43]},
        {"constrain": OnlyEven},
        {"constrain": OnlyEven, "min_tokens": 9, "stop": lambda: [8, 16]},
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 2, "constrain": OnlyEven},
        {"attention_mask": hw.Mask.window(11)},
        {"attention_mask": hw.Mask.sink(3, 9)},
        {"probe": hw.Logits()},
        {"max_tokens": 1},
        {"max_tokens": 2},
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("seeded", swept([True, False]), ids=["seeded", "greedy"])
def test_so_under_everything_that_binds_a_token(engine: hw.Engine, options: dict[str, Any], seeded: bool) -> None:
    sampler = SEEDED if seeded else hw.Sampling(temperature=0)
    if "repetition_penalty" in options:
        sampler = replace(sampler, presence_penalty=0.4, frequency_penalty=0.3)
    same(engine, sampler, **options)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_so_on_other_families(family: str) -> None:
    overrides: dict[str, Any] = {"windows": (8, 8)} if family == "mistral" else {}
    with hw.Engine(random_model(family, **overrides), pages=64, **STRICT) as engine:
        same(engine, SEEDED)


def test_so_up_to_the_context_limit() -> None:
    with hw.Engine(random_model(max_positions=64), pages=16, **STRICT) as engine:
        for generation in same(engine, max_tokens=100):
            assert generation.finish == "length"
            assert len(generation.generated) == 64 - len(PROMPT) + 1


def test_so_when_pages_are_few() -> None:
    with hw.Engine(random_model(), pages=6, **STRICT) as engine:

        async def program(engine: hw.Engine) -> None:
            plain = (await collected(engine))[0]
            draft = Replay([*PROMPT, *plain], 0.2)
            # 35 + 60 tokens fill the six pages of the pool: there is no room for drafts beyond them.
            tokens = (await collected(engine, speculate=draft))[0]
            assert tokens == plain
            both = await asyncio.gather(*(collected(engine, speculate=draft.copy()) for _ in range(2)))
            assert [tokens for tokens, *_ in both] == [plain, plain]

        engine.run(program)
        assert engine.stats().pages_held == 0
        assert engine.stats().preemptions > 0


def test_so_in_a_crowd(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        prompts = [random_tokens(V, 5 + i, i) * 3 for i in range(6)]
        samplers = [GREEDY if i % 2 else hw.Multinomial(0.7, seed=i) for i in range(6)]
        plain = [(await collected(engine, p, s))[0] for p, s in zip(prompts, samplers)]
        drafters = [Replay([*p, *t], 0.3, seed=i) for i, (p, t) in enumerate(zip(prompts, plain))]
        mixed = [None if i in (1, 4) else drafter for i, drafter in enumerate(drafters)]
        before = engine.stats()
        found = await asyncio.gather(
            *(collected(engine, p, s, speculate=d) for p, s, d in zip(prompts, samplers, mixed))
        )
        after = engine.stats()
        assert [tokens for tokens, *_ in found] == plain
        steps, passes = after.steps - before.steps, after.passes - before.passes
        if isinstance(engine, Engine):  # elsewhere messages come one by one
            assert passes > 2 * steps  # rounds share steps with each other and with decode rows
        drafted = sum(g.speculation.drafted for *_, g in found if g.speculation is not None)
        assert after.drafted - before.drafted == drafted
        assert 0 < after.accepted - before.accepted < drafted

    engine.run(program)


def test_steps_and_the_generation_count_drafts(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        plain = (await collected(engine))[0]
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(GREEDY, max_tokens=60, speculate=Replay([*PROMPT, *plain], 0.3))
            steps = [step async for step in generation]
        assert all(len(step.tokens) in (step.accepted, step.accepted + 1) for step in steps)
        stats = generation.speculation
        assert stats is not None
        assert stats.drafted == sum(step.drafted for step in steps)
        assert stats.accepted == sum(step.accepted for step in steps)
        assert 0.3 < stats.acceptance < 1
        assert [t for step in steps for t in step.tokens] == plain

    engine.run(program)


def test_rejected_drafts_leave_no_slot_no_page_and_no_key(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        engine.cache.clear()
        wrong = Says(lambda tokens, limit: [(tokens[-1] + 1 + i) % V for i in range(min(limit, 40))])
        async with engine.context().fill(PROMPT) as context:
            async for step in context.generate(GREEDY, max_tokens=9, speculate=wrong):
                assert context.seq_len + len(context.pending) == len(context.tokens)
                assert engine.stats().pages_held == -(-context.seq_len // 16)
                assert engine.stats().pages_cached == 0
                assert step.drafted - step.accepted >= 0

    engine.run(program)


# -- trees ---------------------------------------------------------------------------------------------------------


class Tree(Replay):
    """Knows what will come, and hides it in a tree: at every depth the right token is one of a few, in any place."""

    def draft(self, tokens: Sequence[int], limit: int) -> Any:
        ahead = self.known[len(tokens) :]
        drafts: list[int] = []
        parents: list[int] = []
        right = -1
        for token in ahead[: int(self.random.integers(1, 6))]:
            others = [int(t) for t in self.random.choice(V, 3, replace=False) if t != token]
            siblings = [*others, token] if self.random.random() > self.wrong else others
            self.random.shuffle(siblings)
            if len(drafts) + len(siblings) > limit:
                break
            parent, first = right, len(drafts)
            drafts += siblings
            parents += [parent] * len(siblings)
            right = first + siblings.index(token) if token in siblings else -1
            at = int(self.random.integers(len(drafts)))
            if len(drafts) < limit and at != right and (at, 5) not in zip(parents, drafts):  # a branch for nothing
                drafts.append(5)
                parents.append(at)
            if right < 0:
                break
        return hw.Draft(drafts, parents)

    def copy(self) -> Tree:
        return Tree(self.known, self.wrong, self.most)


@pytest.fixture(scope="module")
def loose() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=128, threads=1) as made:
        yield made


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        (GREEDY, {}),
        (SEEDED, {}),
        (replace(SEEDED, presence_penalty=0.5, repetition_penalty=1.2), {}),
        (SEEDED, {"penalize_prompt": False, "min_tokens": 20, "stop": range(0, V, 5)}),
        (SEEDED, {"constrain": OnlyEven}),
        (GREEDY, {"no_repeat_ngram_size": 2}),
        (GREEDY, {"probe": hw.Entropy()}),
    ],
    ids=str,
)
def test_a_tree_changes_no_token_and_its_path_is_not_computed_again(
    loose: hw.Engine, sampler: hw.Sampler, options: dict[str, Any]
) -> None:
    async def program(engine: hw.Engine) -> None:
        def fresh() -> dict[str, Any]:
            return {"max_tokens": 60} | {name: v() if isinstance(v, type) else v for name, v in options.items()}

        async with engine.context().fill(PROMPT) as plain, engine.context().fill(PROMPT) as context:
            expected = await plain.generate(sampler, **fresh()).tokens()
            for wrong in (0.0, 0.3):
                generation = context.generate(
                    sampler, speculate=Tree([*PROMPT, *expected], wrong, seed=int(10 * wrong)), **fresh()
                )
                probes, before = [], engine.stats().tokens
                async for step in generation:
                    probes += step.probes
                    if generation.finish is None:
                        assert context.seq_len == len(context.tokens) - 1
                assert await generation.tokens() == expected
                stats = generation.speculation
                assert stats is not None
                assert stats.accepted > 10
                computed = engine.stats().tokens - before
                assert computed <= len(PROMPT) + stats.drafted + stats.rounds + 4
                raw = context.inner()
                assert raw.committed_page_count == context.seq_len // 16
                positions = context._table.positions.tolist()
                assert positions == list(range(context.seq_len))
                assert context._table.masks == [None] * context.seq_len
                await plain.flush()
                await context.flush()
                rows = []
                for each in (plain, context):
                    forward = each.forward().input([7])
                    logits = forward.probe(-1, hw.Logits())
                    rows.append((await forward.execute()).logits(logits))
                    each.truncate(1)
                np.testing.assert_allclose(rows[0], rows[1], atol=1e-4 * np.abs(rows[0]).max())
                context.truncate(len(context.tokens))
                context.fill(PROMPT)

    loose.run(program)
    assert loose.stats().pages_held == 0


def test_a_tree_is_a_line_where_slots_must_not_move(engine: hw.Engine, loose: hw.Engine) -> None:
    """In deterministic mode, and under an attention mask, the first branch is verified."""
    for made, options in ((engine, {}), (loose, {"attention_mask": hw.Mask.window(20)})):

        async def program(engine: hw.Engine, options: dict[str, Any] = options) -> None:
            plain = (await collected(engine, **options))[0]
            tree = Tree([*PROMPT, *plain], 0.1)
            tokens, _, _, generation = await collected(engine, speculate=tree, **options)
            assert tokens == plain
            assert generation.speculation is not None
            assert 0 < generation.speculation.accepted < generation.speculation.drafted

        made.run(program)


def test_a_tree_whose_path_finds_no_page_is_computed_again() -> None:
    with hw.Engine(random_model(), pages=4, threads=1) as engine:

        async def program(engine: hw.Engine) -> None:
            options: dict[str, Any] = {"max_tokens": 29}
            plain = (await collected(engine, **options))[0]
            for seed in range(3):
                tree = Tree([*PROMPT, *plain], 0.0, seed=seed)
                assert (await collected(engine, speculate=tree, **options))[0] == plain

        engine.run(program)
        assert engine.stats().pages_held == 0


# -- rejection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [300, pytest.param(6000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["line", "tree", "draft model"])
def test_rejection_is_equal_in_distribution(loose: hw.Engine, kind: str, count: int) -> None:
    """The first three tokens, drawn many times, against their exact probabilities."""
    how = hw.Sampling(temperature=0.7, top_k=3, repetition_penalty=1.2)
    plausible: list[int] = []

    class Drawn(Says):
        """Two tokens of a distribution of its own, which it names."""

        def draft(self, tokens: Sequence[int], limit: int) -> hw.Draft:
            rng = np.random.default_rng([len(tokens), self.what])
            chances = [np.full(V, 1e-4) for _ in range(3)]
            for chance in chances:
                chance[plausible] += rng.dirichlet(np.full(len(plausible), 0.5))
            chances = [chance / chance.sum() for chance in chances]
            if kind == "tree":  # the first two are drawn from one distribution, the third follows the first
                chances[1] = chances[0]
                ids = [int(rng.choice(V, p=chance)) for chance in chances]
                if ids[0] == ids[1] or limit < 3:
                    return hw.Draft(ids[:1], probabilities=chances[:1])
                return hw.Draft(ids, [-1, -1, 0], chances)
            ids = [int(rng.choice(V, p=chance)) for chance in chances][:limit]
            return hw.Draft(ids, probabilities=chances[: len(ids)])

    async def program(engine: hw.Engine) -> tuple[Counter[tuple[int, ...]], dict[tuple[int, ...], float], int]:
        home, found, accepted = engine.context().fill(PROMPT), Counter[tuple[int, ...]](), 0
        await home.flush()
        expected = await exact(home)
        plausible.extend(sorted({token for path in expected for token in path}))
        for seed in range(count):
            drafter: Any = Drawn(seed)
            drafter.copy = lambda drafter=drafter: drafter
            if kind == "draft model":  # the model itself, which knows nothing of the penalty
                drafter = hw.DraftModel(engine, adaptive=False)
            async with home.fork() as context:
                sampler = replace(how, seed=seed)
                generation = context.generate(sampler, max_tokens=3, speculate=drafter, verify="rejection")
                found[tuple(await generation.tokens())] += 1
                assert generation.speculation is not None
                accepted += generation.speculation.accepted
        home.release()
        return found, expected, accepted

    async def exact(home: hw.Context, path: tuple[int, ...] = ()) -> dict[tuple[int, ...], float]:
        if len(path) == 3:
            return {path: 1.0}
        async with home.fork() as context:
            forward = context.fill(path).forward()
            handle = forward.probe(-1, hw.Logits())
            logits = torch.from_numpy((await forward.execute()).logits(handle))
            seen = torch.tensor(sorted({*PROMPT, *path}))
            chance = processed_logprobs(logits, RowSampler(how, seen=seen)).exp()
        found: dict[tuple[int, ...], float] = {}
        for token in chance.nonzero().flatten().tolist():
            for rest, p in (await exact(home, (*path, token))).items():
                found[rest] = float(chance[token]) * p
        return found

    found, expected, accepted = loose.run(program)
    assert set(found) <= set(expected)
    assert accepted > count / 50
    likely = [path for path, p in expected.items() if p * count >= 5]
    rare = 1 - sum(expected[path] for path in likely)
    observed = [found[path] for path in likely] + [count - sum(found[path] for path in likely)] * (rare > 1e-9)
    wanted = [count * expected[path] for path in likely] + [count * rare] * (rare > 1e-9)
    statistic = sum((a - b) ** 2 / b for a, b in zip(observed, wanted))
    assert statistic < chi_square(len(wanted) - 1), (statistic, len(wanted))


def chi_square(freedom: int) -> float:
    """What a sum of squares exceeds once in ten thousand times (Wilson and Hilferty)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


def test_rejection_takes_the_likeliest_token_where_nothing_is_drawn(loose: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        plain = (await collected(engine))[0]
        for drafter in (Replay([*PROMPT, *plain], 0.2), hw.OwnLayers(1, adaptive=False)):
            assert (await collected(engine, speculate=drafter, verify="rejection"))[0] == plain

    loose.run(program)


def test_what_cannot_be_verified_is_refused(engine: hw.Engine) -> None:
    with engine.context().fill(PROMPT) as context:
        with pytest.raises(hw.InvalidInput, match="verify is 'hope'; it must be 'match' or 'rejection'"):
            context.generate(GREEDY, speculate=hw.PromptLookup(), verify="hope")  # type: ignore[call-overload]
        with pytest.raises(hw.InvalidInput, match="verify='rejection' has no effect without drafts"):
            context.generate(GREEDY, verify="rejection")
        with pytest.raises(hw.Unsupported, match="Ranking reads what was drawn"):
            context.generate(SEEDED, speculate=hw.PromptLookup(), verify="rejection", probe=[hw.Ranking(1)])


# -- under a grammar -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def words(smollm2_path: Path) -> Iterator[hw.Engine]:
    """A scripted model with SmolLM2's vocabulary: it draws evenly from what a mask allows, at no cost."""
    with hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=400, threads=1) as made:
        yield made


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ann", "Bob", "Barbara"]},
        "numbers": {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 2, "maxItems": 6},
        "note": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "numbers", "note"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "grammar",
    [hw.Grammar.json_schema(SCHEMA), hw.Grammar.regex("(ab|cde){3,9}!"), hw.Grammar.regex("(?s).{1,300}")],
    ids=["schema", "regex", "text"],
)
@pytest.mark.parametrize("stop", [(), ("7",)], ids=["no stop", "stop"])
def test_the_text_of_a_grammar_is_the_same(words: hw.Engine, grammar: hw.Grammar, stop: tuple[str, ...]) -> None:
    async def program(engine: hw.Engine) -> None:
        for seed in range(3):
            found = []
            prompt = engine.tokenizer.encode(f"A text {seed}:")
            known: list[int] = []
            for drafter in (None, Replay(known, 0.0), Replay(known, 0.3), hw.PromptLookup(adaptive=False)):
                async with engine.context().fill(prompt) as context:
                    options: dict[str, Any] = {"max_tokens": 60, "constrain": grammar, "stop": stop}
                    generation = context.generate(hw.Multinomial(seed=seed), speculate=drafter, **options)
                    found.append((await generation.text(), await generation.tokens(), generation.finish))
                    known[:] = known or context.tokens
                    assert list(context.tokens) == [*prompt, *await generation.tokens()]
            assert found[1:] == found[:1] * 3

    words.run(program)
    assert words.stats().pages_held == 0


# -- steering ------------------------------------------------------------------------------------------------------


def test_cuts_forks_and_pauses_change_no_token(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        rng = np.random.default_rng(3)
        for sampler in (GREEDY, SEEDED):
            plain = (await collected(engine, sampler=sampler))[0]
            async with engine.context().fill(PROMPT) as context:
                drafter = Replay([*PROMPT, *plain], 0.2)
                generation = context.generate(sampler, max_tokens=60, speculate=drafter)
                for _ in range(30):
                    async for _ in generation:
                        break
                    if generation.finish is not None:
                        break
                    match int(rng.integers(4)):
                        case 0:
                            context.truncate(int(rng.integers(0, min(9, 1 + len(generation.generated)))))
                        case 1:
                            twin = generation.fork()
                            assert await twin.tokens() == plain
                            twin.context.release()
                        case 2:
                            count = len(generation.generated)
                            generation.accept(plain[count : count + 2])
                assert await generation.tokens() == plain

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_a_drafter_hears_every_token_once(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        plain = (await collected(engine))[0]
        for adaptive in (False, True):
            drafter = Replay([*PROMPT, *plain], 0.4)
            drafter.adaptive = adaptive
            heard = drafter.accepted
            drafter.copy = lambda drafter=drafter: drafter  # type: ignore[method-assign]
            assert (await collected(engine, speculate=drafter))[0] == plain
            assert heard == [*PROMPT, *plain][: len(heard)]
            assert len(heard) >= len(PROMPT) + len(plain) - 1

    engine.run(program)


def test_a_cancelled_round_is_undone(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        plain = (await collected(engine, max_tokens=200))[0]
        rng = np.random.default_rng(5)
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(GREEDY, max_tokens=200, speculate=Replay([*PROMPT, *plain], 0.2, most=5))
            while generation.finish is None:
                task = asyncio.ensure_future(anext(generation))
                await asyncio.sleep(float(rng.random()) * 0.002)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                tokens = [*PROMPT, *generation.generated]
                assert list(context.tokens) == tokens == [*PROMPT, *plain][: len(tokens)]
                if not task.cancelled():
                    continue
                async for _ in generation:
                    break
            assert await generation.tokens() == plain

    engine.run(program)
    assert engine.stats().pages_held == 0


# -- bad drafters --------------------------------------------------------------------------------------------------


def forever(tokens: Sequence[int], limit: int) -> Iterator[int]:
    while True:
        yield 1


def angry(tokens: Sequence[int], limit: int) -> list[int]:
    raise RuntimeError("no idea")


BAD: list[tuple[Any, str]] = [
    ([V], f"returned token id {V}; ids are 0 to {V - 1}"),
    ([3, -1], "returned token id -1"),
    (forever, "more than the"),
    (lambda tokens, limit: [1] * (limit + 1), "more than the"),
    (angry, "raised RuntimeError: no idea"),
    ("text", "must return token ids, or a Draft"),
    (None, "must return token ids, or a Draft"),
    ([1.5], "must be an integer"),
    ([[1, 2]], "must be an integer"),
    (np.ones((2, 2), int), "must be an integer"),
    (hw.Draft([1, 2], parents=[0, -1]), "draft 0 follows draft 0"),
    (hw.Draft([1, 2], parents=[1, 0]), "draft 0 follows draft 1"),
    (hw.Draft([1, 2], parents=[-1, -2]), "draft 1 follows draft -2"),
    (hw.Draft([1, 2], parents=[-1]), "2 tokens and 1 parents"),
    (hw.Draft([1, 2], parents=[-1, 0, 1]), "2 tokens and more parents"),
    (hw.Draft([1, 1], parents=[-1, -1]), "drafts 0 and 1 are both token 1 after draft -1"),
    (hw.Draft([1], probabilities=[np.ones(3)]), f"distribution 0 is not {V} probabilities"),
    (hw.Draft([1], probabilities=[np.eye(V)[2]]), "gives no chance"),
]


@pytest.mark.parametrize(("what", "message"), BAD, ids=[message for _, message in BAD])
def test_a_bad_drafter_is_named_and_the_text_unharmed(engine: hw.Engine, what: Any, message: str) -> None:
    async def program(engine: hw.Engine) -> None:
        plain = (await collected(engine, max_tokens=12))[0]
        async with engine.context().fill(PROMPT) as context:
            good = {"until": 40}

            def sometimes(tokens: Sequence[int], limit: int) -> Any:
                if len(tokens) < good["until"]:
                    return [1] if limit else []
                return what(tokens, limit) if callable(what) else what

            generation = context.generate(GREEDY, max_tokens=12, speculate=Says(sometimes))
            with pytest.raises(hw.HeadwayError, match=r"the drafter Says") as raised:
                await generation.tokens()
            assert message in str(raised.value)
            tokens = list(context.tokens)
            assert len(tokens) >= 40
            assert tokens == [*PROMPT, *generation.generated] == [*PROMPT, *plain][: len(tokens)]
            good["until"] = 1000
            assert await generation.tokens() == plain

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_a_drafter_that_cannot_listen_is_named(engine: hw.Engine) -> None:
    class Deaf(Says):
        def accept(self, tokens: Sequence[int]) -> None:
            if len(tokens) < 5:
                raise KeyError("what?")

    async def program(engine: hw.Engine) -> None:
        for adaptive in (True, False):
            drafter = Deaf([1])
            drafter.copy = lambda drafter=drafter: drafter  # type: ignore[method-assign]
            drafter.adaptive = adaptive
            async with engine.context().fill(PROMPT) as context:
                generation = context.generate(GREEDY, max_tokens=12, speculate=drafter)
                with pytest.raises(hw.InvalidInput, match=r"the drafter Deaf raised KeyError: 'what\?'"):
                    await generation.tokens()
                assert list(context.tokens) == [*PROMPT, *generation.generated]

    engine.run(program)


@pytest.mark.parametrize("what", [3, "prompt-lookup", hw.PromptLookup, object()], ids=["int", "str", "class", "object"])
def test_what_is_no_drafter_is_refused(engine: hw.Engine, what: Any) -> None:
    with engine.context().fill([1]) as context:
        with pytest.raises(hw.WrongType, match="speculate is "):
            context.generate(GREEDY, speculate=what)
        with pytest.raises(hw.Unsupported, match="speculate cannot be given with num_beams=2"):
            context.generate(num_beams=2, speculate=hw.PromptLookup())
        assert context.pending == (1,)


def test_a_drafter_without_copy_serves_one_sequence(engine: hw.Engine) -> None:
    class Plain:
        def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
            return []

        def accept(self, tokens: Sequence[int]) -> None:
            pass

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill(PROMPT) as context:
            generation = context.generate(GREEDY, max_tokens=4, speculate=Plain())
            with pytest.raises(hw.Unsupported, match=r"the drafter Plain has no copy\(\)"):
                generation.fork()
            await generation.tokens()

    engine.run(program)
    assert engine.stats().pages_held == 0


# -- models that draft ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", swept([SEEDED, GREEDY]), ids=["seeded", "greedy"])
def test_a_draft_model_changes_no_token(engine: hw.Engine, sampler: hw.Sampler) -> None:
    with hw.Engine(random_model(seed=1), pages=64, **STRICT) as other, hw.Engine(random_model(), **STRICT) as twin:

        async def program(engine: hw.Engine) -> None:
            plain = (await collected(engine, sampler=sampler))[0]
            drafters = hw.DraftModel(twin, adaptive=False), hw.DraftModel(other, adaptive=False), hw.DraftModel(engine)
            for drafter in (*drafters, hw.OwnLayers(1, adaptive=False), hw.OwnLayers(1)):
                for fresh in (dict, lambda: {"repetition_penalty": 1.2}, lambda: {"constrain": OnlyEven()}):
                    options: list[dict[str, Any]] = [fresh(), fresh()]
                    expected = (await collected(engine, sampler=sampler, **options[0]))[0]
                    found = await collected(engine, sampler=sampler, speculate=drafter, **options[1])
                    assert found[0] == expected
            *_, exact = await collected(engine, sampler=sampler, speculate=drafters[0])
            assert exact.generated == tuple(plain)
            assert exact.speculation is not None
            assert exact.speculation.acceptance == 1  # the same weights, and draws with the same numbers
            assert exact.speculation.rounds < 10
            *_, rare = await collected(engine, sampler=sampler, speculate=drafters[1])
            assert rare.speculation is not None
            assert rare.speculation.acceptance < 0.5

        engine.run(program)
        for each in (engine, other, twin):
            assert each.stats().pages_held == 0


def test_the_first_layers_are_the_models_own(engine: hw.Engine) -> None:
    """What they draft is what the logit lens reads of that layer."""

    async def program(engine: hw.Engine) -> None:
        heard: list[tuple[list[int], list[int]]] = []

        class Heard(hw.OwnLayers):
            async def draft(self, tokens: Sequence[int], limit: int) -> hw.Draft:
                found = await super().draft(tokens, limit)
                heard.append((list(tokens), list(found.tokens)))
                return found

            def copy(self) -> Heard:
                return Heard(1, adaptive=False)

        await collected(engine, max_tokens=12, speculate=Heard(1, adaptive=False))
        assert len(heard) > 2
        for tokens, drafted in heard:
            async with engine.context().fill(tokens) as context:
                forward = context.forward().input(drafted)
                lenses = [forward.probe(i - len(drafted) - 1, hw.LogitLens([1], k=1)) for i in range(len(drafted))]
                out = await forward.execute()
                assert [int(out.lens(lens)[0][0][0]) for lens in lenses] == drafted

    engine.run(program)


def test_the_first_layers_follow_new_weights() -> None:
    with hw.Engine(random_model(), pages=64, **STRICT) as engine:
        before = engine.run(lambda engine: collected(engine, speculate=hw.OwnLayers(1, adaptive=False)))
        old = first_layers(engine, 1)
        assert first_layers(engine, 1) is old
        engine.update_weights({"model.norm.weight": torch.linspace(0.5, 2.0, engine.config.hidden_size)})
        assert first_layers(engine, 1) is not old
        after = engine.run(lambda engine: collected(engine, speculate=hw.OwnLayers(1, adaptive=False)))
        assert after[0] == engine.run(collected)[0] != before[0]
        first_layers(engine, 1).close()
        old.close()


def test_a_draft_model_of_other_tokens_is_refused(engine: hw.Engine, words: hw.Engine) -> None:
    with hw.Engine(random_model(vocab_size=98), pages=8, threads=1) as other, engine.context().fill(PROMPT) as context:
        with pytest.raises(hw.InvalidInput, match="the draft model has 98 tokens and the model 97"):
            context.generate(GREEDY, speculate=hw.DraftModel(other))
        with pytest.raises(hw.InvalidInput, match="the draft model has 49152 tokens and the model 97"):
            context.generate(GREEDY, speculate=hw.DraftModel(words))
        with pytest.raises(hw.OutOfRange, match=r"OwnLayers\(2\): this model has 2 layers; give 1 to 1"):
            context.generate(GREEDY, speculate=hw.OwnLayers(2))
        with pytest.raises(hw.WrongType, match="DraftModel was given 'smollm2'"):
            hw.DraftModel("smollm2")  # type: ignore[arg-type]
        assert context.pending == tuple(PROMPT)


def test_a_draft_model_that_is_closed_or_too_short_harms_nobody(engine: hw.Engine) -> None:
    with hw.Engine(random_model(max_positions=50), pages=64, threads=1) as short, hw.Engine(random_model()) as closed:
        plain = engine.run(collected)[0]
        tokens, _, _, generation = engine.run(
            lambda engine: collected(engine, speculate=hw.DraftModel(short, adaptive=False))
        )
        assert tokens == plain
        assert generation.speculation is not None
        assert 0 < generation.speculation.drafted < 20
        closed.close()
        with engine.context().fill(PROMPT) as context:
            generation = context.generate(GREEDY, max_tokens=9, speculate=hw.DraftModel(closed))
            with pytest.raises(hw.Closed, match="the drafter DraftModel: the engine is closed"):
                engine.run(lambda _: generation.tokens())
            assert list(context.tokens) == [*PROMPT, *generation.generated]
    assert engine.stats().pages_held == 0


# -- prompt lookup -------------------------------------------------------------------------------------------------


def looked_up(tokens: Sequence[int], low: int = 2, high: int = 4) -> list[int]:
    """What prompt lookup says follows, by looking everywhere."""
    for n in range(high, low - 1, -1):
        for at in range(len(tokens) - n - 1, -1, -1):
            if n <= len(tokens) and tokens[at : at + n] == tokens[len(tokens) - n :]:
                return list(tokens[at + n :])
    return []


def test_prompt_lookup_finds_what_a_search_finds() -> None:
    rng = np.random.default_rng(0)
    for _ in range(60):
        tokens = [int(t) for t in rng.integers(0, 4, int(rng.integers(1, 60)))]
        drafter, at = hw.PromptLookup(max_tokens=64), 0
        while at < len(tokens):
            step = int(rng.integers(1, 5))
            drafter.accept(tokens[at : at + step])
            at = min(len(tokens), at + step)
            found, expected = list(drafter.draft(tokens[:at], 64).tokens), looked_up(tokens[:at])
            assert found[: len(expected)] == expected[:64]
            assert len(found) in (0, 64)  # what it repeats goes round


def test_prompt_lookup_forgets_what_is_too_far_back() -> None:
    drafter = hw.PromptLookup(window=64)
    for i in range(3000):
        drafter.accept([i, i + 1])
    assert len(drafter._tokens) <= 64
    assert len(drafter._index) <= 64 * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 65}, "max_tokens"),
        ({"min_ngram": 0}, "min_ngram"),
        ({"min_ngram": 5}, "min_ngram is 5 and max_ngram is 4"),
        ({"window": 3}, "window"),
    ],
)
def test_prompt_lookup_refuses_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hw.InvalidInput, match=message):
        hw.PromptLookup(**options)


# -- adapting ------------------------------------------------------------------------------------------------------


def test_drafts_that_are_never_right_end(engine: hw.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same text, a drafter that is always wrong is soon no longer asked to be verified.

    A step takes what this says it takes, and the host next to nothing: a busy machine decides nothing here.
    """
    monkeypatch.setattr(StepCosts, "seconds", lambda self, rows: 1000.0 + rows)

    async def program(engine: hw.Engine) -> None:
        monkeypatch.setattr(Says, "adaptive", True)
        monkeypatch.setattr(Replay, "adaptive", True)
        plain = (await collected(engine, max_tokens=300))[0]
        wrong = Says(lambda tokens, limit: [(t + 1) % V for t in plain[len(tokens) - len(PROMPT) :][: min(8, limit)]])
        right = Replay([*PROMPT, *plain], 0.0)
        for drafter, check in ((wrong, lambda n: n < 40), (right, lambda n: n > 150)):
            tokens, _, _, generation = await collected(engine, max_tokens=300, speculate=drafter)
            assert tokens == plain
            assert generation.speculation is not None
            assert check(generation.speculation.drafted), generation.speculation

    engine.run(program)


def test_a_tree_changes_no_token_where_activations_are_quantized(smollm2: hw.Engine) -> None:
    """There a row in another slot has other sums, which 8 bits magnify: the first branch alone is verified."""

    async def program(engine: hw.Engine) -> None:
        ids = engine.tokenizer.encode("One, two,")
        async with engine.context().fill(ids) as context:
            plain = await context.generate(GREEDY, max_tokens=21, stop_only=True).tokens()

        def tree(tokens: Sequence[int], limit: int) -> hw.Draft:
            right = plain[len(tokens) - len(ids) :][: max(1, limit - 1)]
            wrong = (right[0] + 1) % engine.vocab_size if right else 0
            parents = (-1, -1, *range(1, len(right)))
            return hw.Draft((wrong, *right)[:limit], parents[: min(limit, len(right) + 1)])

        async with engine.context().fill(ids) as context:
            generation = context.generate(GREEDY, max_tokens=21, stop_only=True, speculate=Says(tree))
            assert await generation.tokens() == plain
            assert generation.speculation is not None
            assert generation.speculation.drafted > 0

    smollm2.run(program)


def test_a_drafter_whose_copy_fails_is_named(engine: hw.Engine) -> None:
    class Broken(Says):
        def copy(self) -> Says:
            raise LookupError("no copy today")

    async def program(engine: hw.Engine) -> None:
        async with engine.context().fill(PROMPT) as context:
            with pytest.raises(hw.InvalidInput, match="the drafter Broken raised LookupError: no copy today"):
                await context.generate(GREEDY, max_tokens=4, speculate=Broken(lambda tokens, limit: [1])).tokens()
            assert await context.generate(GREEDY, max_tokens=4).tokens()

    engine.run(program)
