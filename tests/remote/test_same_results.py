"""A program gives the same through `hw.connect` as in process: passes, generations, callables, snapshots."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw
from headway.models.adapters.source import AdapterSource
from headway.testing import ScriptedRunner, random_model
from support.adapter_files import saved_adapter
from support.live import live
from support.through import Served

V = 97
Program = Callable[[Any], Awaitable[Any]]


def plain(value: Any) -> Any:
    """A result that can be compared with ==."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value


def assert_same(served: Served, remote: hw.RemoteEngine, program: Program) -> None:
    assert plain(remote.run(program)) == plain(served.engine.run(program))
    gc.collect()


async def passes(engine: Any) -> Any:
    async with engine.context(seed=5) as ctx:
        ctx.fill(range(30))
        fwd = ctx.forward().input([7, 8]).input_at([9], [40]).defer_commit()
        fwd.mask(forbid=[3]).mask(allow=range(0, V, 2), rows=[-1]).bias(np.linspace(0, 1, V), rows=[0])
        fwd.attention_mask(hw.Mask.window(20) | hw.Mask.sink(2, 1))
        drawn = fwd.sample([0, -1], hw.Sampling(temperature=0.9, top_k=20, repetition_penalty=1.2))
        handles = [
            fwd.probe(-1, probe)
            for probe in (hw.Logits(), hw.Distribution(k=3), hw.Logprobs([1, 2]), hw.Entropy(), hw.Ranking(2, [5]))
        ]
        more = fwd.probe(0, hw.Hidden(1)), fwd.probe(1, hw.AttentionScores(0)), fwd.probe(1, hw.LogitLens([0, 1], 2))
        out = await fwd.execute()
        read = [out.logits, out.distribution, out.logprobs, out.entropy, out.ranking]
        found = [reader(handle) for reader, handle in zip(read, handles)]
        found += [out.hidden(more[0]), out.attention(more[1]), out.lens(more[2]), out.tokens(drawn)]
        found += [out.stats.rows, out.stats.seeds, ctx.seq_len, ctx.next_position, ctx.tokens]
        pages = ctx.inner()
        found += [pages.committed_page_count, pages.working_page_count, pages.working_page_token_count]
        pages.commit_working_pages(1)
        return [*found, pages.committed_page_count, [page.state for page in pages.pages]]


async def fed_passes(engine: Any) -> Any:
    async with engine.context() as ctx:
        ctx.fill([1, 2, 3])
        first = ctx.forward()
        token = first.sample([-1], hw.Argmax())
        running = first.execute()
        second = ctx.forward().input(token)
        last = second.sample([-1], hw.Argmax())
        out, then = await running, await second.execute()
        return out.token(token), then.token(last), ctx.tokens


async def rules(engine: Any) -> Any:
    def rule(row: int, slots: np.ndarray) -> np.ndarray:
        return (slots < 3) | ((row - slots) % 4 == 0)

    async with engine.context() as ctx:
        ctx.fill(range(20))
        fwd = ctx.forward().input([5, 6]).attention_mask(hw.Mask.rule(rule) & ~hw.Mask.window(1) | hw.Mask.window(2))
        handle = fwd.probe(-1, hw.Logits())
        whole = ctx.fork().forward().input([5, 6]).attention_mask(hw.Mask.rule(lambda r, s: s >= 0), causal=False)
        other = whole.probe(0, hw.Logits())
        logits = [(await fwd.execute()).logits(handle), (await whole.execute()).logits(other)]
        ctx.fill([1, 2])
        await ctx.flush(hw.Mask.rule(rule))
        return *logits, await ctx.generate(hw.Argmax(), max_tokens=12, attention_mask=hw.Mask.rule(rule)).tokens()


async def steps(engine: Any) -> Any:
    found = []
    async with engine.context() as ctx:
        ctx.fill(range(9))
        generation = ctx.generate(hw.TopP(0.9, seed=3), max_tokens=60, probe=[hw.Entropy(), hw.Logprob(4)])
        for count in (1, 2, 9, 1, 20):  # between them the program looks at the context
            for _ in range(count):
                step = await anext(generation)
                found.append((step.tokens, step.probes))
            found += [ctx.seq_len, ctx.pending, ctx.next_position, generation.generated]
        ctx.truncate(5)
        found += [generation.generated, (await anext(generation)).tokens]
        twin = generation.fork(seed=8)
        twin.accept([11, 12])
        found += [await twin.tokens(), await generation.tokens(), generation.finish, ctx.tokens, twin.context.tokens]
        generation.resume(3)
        prepared = await generation.prepare()
        logits = prepared.forward.probe(-1, hw.Logits())
        prepared.forward.mask(allow=[64])
        found += [(await prepared.take()).tokens, prepared.forward.output.logits(logits), await generation.tokens()]
    return found


async def logits_rules(engine: Any) -> Any:
    sampler = hw.Sampling(0.9, seed=7, dry_multiplier=2.0, dry_sequence_breakers=(), xtc_probability=0.5)
    found = []
    for options in ({}, {"mirostat": 2, "mirostat_tau": 2.0}):
        async with engine.context() as ctx:
            ctx.fill([5, 6, 7, 5, 6])
            found.append(await ctx.generate(sampler, max_tokens=8, stop_only=True, **options).tokens())
    return found


async def several(engine: Any) -> Any:
    async with engine.context() as ctx:
        ctx.fill(range(5))
        beams = ctx.fork().generate(num_beams=3, num_return_sequences=2, max_tokens=5, probe=hw.Entropy())
        drawn = ctx.generate(hw.Multinomial(seed=2), num_return_sequences=3, max_tokens=4)
        found = [(one.tokens, one.score, one.finish, one.probes) for one in await beams.sequences()]
        contexts = await drawn.contexts()
        return found, drawn.seed, [one.seed for one in await drawn.sequences()], [each.tokens for each in contexts]


class Even:
    """A constraint: even ids; it ends after so many, and forces one token."""

    def __init__(self, most: int) -> None:
        self.most, self.tokens = most, list[int]()

    def mask(self) -> np.ndarray:
        bits = np.zeros((V + 31) // 32 * 32, np.uint8)
        bits[0:V:2] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        if token % 2:
            raise LookupError(f"{token} is odd")
        self.tokens.append(token)

    def rollback(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]

    def copy(self) -> Even:
        twin = Even(self.most)
        twin.tokens = list(self.tokens)
        return twin

    def forced(self) -> list[int]:
        return [42] if len(self.tokens) == 2 else []

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= self.most


class Guess:
    """A drafter: the tokens that a plain run has given, with a mistake now and then."""

    def __init__(self, known: Sequence[int]) -> None:
        self.known, self.told = known, list[int]()

    def accept(self, tokens: Sequence[int]) -> None:
        self.told += tokens

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        assert list(tokens) == self.told
        at = len(tokens) - 4
        return [t if (at + i) % 5 else (t + 1) % V for i, t in enumerate(self.known[at : at + limit])]


async def callables(engine: Any) -> Any:
    async with engine.context() as ctx:
        ctx.fill([1, 2, 3, 4])
        known = await ctx.fork().generate(hw.Argmax(), max_tokens=20).tokens()
        guess, even = Guess(known), Even(9)
        drafted = await ctx.fork().generate(hw.Argmax(), max_tokens=20, speculate=guess).tokens()
        constrained = ctx.generate(hw.Multinomial(seed=4), max_tokens=20, constrain=even)
        step = await anext(constrained)
        while len(constrained.generated) < 5:
            step = await anext(constrained)
        twin = constrained.fork()
        ends = [await constrained.tokens(), constrained.finish, even.tokens, await twin.tokens()]
        with pytest.raises(LookupError, match="5 is odd"):
            constrained.resume(4).accept([5])

        seen: list[int] = []

        async def prefer(logits: np.ndarray, generation: Any) -> None:
            seen.append(len(generation.generated))
            logits[17] += 3.0

        handles: list[Any] = []

        def prepare(prepared: Any) -> None:
            handles.append((prepared.forward, prepared.forward.probe(-1, hw.Entropy())))
            prepared.forward.mask(forbid=[0])

        hooked = ctx.fork().generate(hw.TopP(0.9, seed=1), max_tokens=6, logits=prefer, prepare=prepare)
        tokens = [(await anext(hooked)).tokens for _ in range(4)]
        entropies = [forward.output.entropy(handle) for forward, handle in handles]
        return known, drafted, known == drafted, step.tokens, ends, seen, tokens, entropies


async def snapshots(engine: Any) -> Any:
    async with engine.context() as ctx:
        ctx.fill(range(20))
        await ctx.flush()
        ctx.fill([5])
        ctx.save("one")
    with engine.open("one") as first, engine.take("one") as second:
        first.truncate(1).inner().append_from(second, [0])
        found = [first.tokens, second.tokens, second.pending, engine.take("one"), engine.delete("one")]
        second.truncate(1).inner().keep_slots([0, 3, 7])
        return [*found, second.tokens, (await second.fill([1]).generate(hw.Argmax(), max_tokens=3).tokens())]


PROGRAMS = [passes, fed_passes, rules, logits_rules, steps, several, callables, snapshots]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_same_over_a_unix_socket(served: Served, remote: hw.RemoteEngine, program: Program) -> None:
    assert_same(served, remote, program)


def test_the_same_over_a_websocket() -> None:
    engine = hw.Engine(random_model(), pages=128, threads=1)
    expected = [plain(engine.run(program)) for program in PROGRAMS]
    with live(engine) as server:
        with hw.connect(server.url) as remote:
            assert [plain(remote.run(program)) for program in PROGRAMS] == expected
            gc.collect()
        server.until(server.is_quiet)


async def adapted(engine: Any, red: Any, blue: Any, unit: float = 1.0) -> Any:
    async with engine.context() as ctx:
        ctx.fill(range(9))
        await ctx.flush(adapter=red)
        fwd = ctx.forward().input([5]).adapter(red).adapter(blue, 0.5 * unit)
        logits = fwd.probe(-1, hw.Logits())
        found = [(await fwd.execute()).logits(logits)]
        for adapter in (None, red, (blue, 2.0 * unit), [red, (blue, 0.25 * unit)]):
            generation = ctx.fork().generate(hw.Argmax(), max_tokens=8, stop_only=True, adapter=adapter)
            found.append(await generation.tokens())
        assert len({tuple(tokens) for tokens in found[1:]}) == 4
        return found


def test_adapters_are_named_as_the_server_has_them(tmp_path: Path) -> None:
    engine = hw.Engine(random_model(), pages=128, threads=1)
    folders = [saved_adapter(tmp_path / name, engine.config, seed=seed) for seed, name in enumerate(("red", "blue"), 1)]
    expected = plain(engine.run(adapted, *map(hw.Adapter.load, folders)))
    sources = (AdapterSource("red", folders[0]), AdapterSource("blue", folders[1], 0.5))
    with live(engine, adapters=sources) as server:
        with hw.connect(server.url) as remote:
            assert remote.adapters == {"red": 1.0, "blue": 0.5}
            assert plain(remote.run(adapted, "red", "blue", 2.0)) == expected  # times the server's own scale
        server.until(server.is_quiet)


async def leave_everywhere(engine: Any) -> Any:
    """Leave a generation after every step in turn, near a stop among them, and look."""
    found = []
    for taken in range(1, 14):
        async with engine.context() as ctx:
            ctx.fill([3])
            generation = ctx.generate(hw.Argmax(), max_tokens=12, stop=[42, 17], stop_only=True)
            tokens = []
            async for step in generation:
                tokens += step.tokens
                if len(tokens) >= taken:
                    break
            found.append((tokens, generation.finish, ctx.tokens, ctx.seq_len, ctx.pending))
            found.append((await generation.tokens(), generation.finish))
    return found


def test_a_generation_can_be_left_after_every_step(served: Served, remote: hw.RemoteEngine) -> None:
    assert_same(served, remote, leave_everywhere)


async def cut_between(engine: Any) -> Any:
    """Cut the context when all steps were taken, so that the server was not told of it, and leave in the middle."""
    async with engine.context() as ctx:
        ctx.fill([3, 1])
        generation, found = ctx.generate(hw.TopP(0.9, seed=5), max_tokens=60), []
        for count, cut in ((1, 1), (4, 0), (1, 1), (5, 3), (2, 2), (6, 1), (1, 0)):
            found.append([(await anext(generation)).tokens for _ in range(count)])
            ctx.truncate(cut)
            found += [generation.generated, ctx.tokens]
        return found


def test_a_context_that_is_cut_between_steps_goes_on_from_there(served: Served, remote: hw.RemoteEngine) -> None:
    assert_same(served, remote, cut_between)


def test_many_passes_are_in_flight_and_share_batches(remote: hw.RemoteEngine) -> None:
    async def program(engine: hw.RemoteEngine) -> list[int]:
        async def one(number: int) -> int:
            async with engine.context() as ctx:
                return (await ctx.fill([number, 2]).generate(hw.Argmax(), max_tokens=40).tokens())[-1]

        return await asyncio.gather(*(one(i) for i in range(20)))

    before = remote.stats()
    assert len(remote.run(program)) == 20
    after = remote.stats()
    assert after.passes - before.passes > after.steps - before.steps


def test_errors_are_those_of_the_engine(remote: hw.RemoteEngine) -> None:
    async def program(engine: hw.RemoteEngine) -> None:
        ctx = engine.context()
        with pytest.raises(hw.InvalidToken, match="tokens\\[1\\] is 97"):
            ctx.fill([1, V])
        with pytest.raises(hw.InvalidInput, match="truncate"):
            ctx.truncate(1)
        with pytest.raises(hw.OutOfRange, match="layers 0 to"):
            ctx.forward().probe(0, hw.AttentionScores(9))
        with pytest.raises(hw.InvalidMask, match="row 0 of the attention mask covers"):
            await ctx.forward().input([1]).attention_mask([[9]]).execute()
        with pytest.raises(hw.InvalidInput, match="no adapter 'x' on this server; it has none"):
            await ctx.forward().input([1]).adapter("x").execute()
        with pytest.raises(hw.WrongType, match="takes no argument 'max_new_tokens'; give max_tokens"):
            ctx.generate(max_new_tokens=3)  # type: ignore[call-arg]
        running = ctx.forward().input([1]).execute()
        with pytest.raises(hw.Unsupported, match="cannot be pickled"):
            running.__reduce__()
        await running
        ctx.release()
        with pytest.raises(hw.Closed, match="released"):
            ctx.fill([1])

    remote.run(program)
    remote.close()
    with pytest.raises(hw.Closed, match="closed"):
        remote.context()


def test_a_cancelled_pass_is_undone(remote: hw.RemoteEngine) -> None:
    async def at_once(engine: hw.RemoteEngine) -> None:
        async with engine.context() as ctx:
            execution = ctx.fill([1, 2]).forward().input([3]).execute()
            execution.cancel()
            assert ctx.pending == (1, 2)
            assert ctx.seq_len == 0

    remote.run(at_once)


WITHOUT = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("numpy", "torch"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import headway as hw

async def program(engine):
    async with engine.context() as ctx:
        ctx.fill(range(8))
        fwd = ctx.forward().input([7]).mask(forbid=[3]).attention_mask(hw.Mask.window(5))
        token, logits = fwd.sample([-1], hw.Argmax()), fwd.probe(-1, hw.Logits())
        scores = fwd.probe(-1, hw.AttentionScores(0))
        out = await fwd.execute()
        assert len(out.logits(logits)) == engine.vocab_size and len(out.attention(scores)[0]) == 9
        other = ctx.fork().forward().input([7, 8]).attention_mask(hw.Mask.window(5), causal=False)
        other.mask([4, engine.vocab_size - 4]).bias([0.0] * engine.vocab_size)
        handle = other.sample([-1], hw.Sampling(logit_bias={5: 1.0}))
        assert len((await other.execute()).tokens(handle)) == 1
        hw.Grammar.json_schema({"type": "integer"}), hw.Grammar.regex("a+"), hw.Grammar.choices(["a", "b"])
        return out.token(token), await ctx.generate(hw.TopP(0.9, seed=1), max_tokens=8).tokens()

with hw.connect(sys.argv[1]) as engine:
    print(engine.run(program))
"""


def test_the_client_needs_neither_torch_nor_numpy(served: Served) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, served.url], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

    async def program(engine: hw.Engine) -> Any:
        async with engine.context() as ctx:
            ctx.fill(range(8))
            fwd = ctx.forward().input([7]).mask(forbid=[3]).attention_mask(hw.Mask.window(5))
            token = fwd.sample([-1], hw.Argmax())
            out = await fwd.execute()
            return out.token(token), await ctx.generate(hw.TopP(0.9, seed=1), max_tokens=8).tokens()

    assert done.stdout.strip() == str(served.engine.run(program))


# --- chat, and a draft model

DRAFTS = random_model(layers=1, seed=0)


async def drafted(engine: Any) -> Any:
    with hw.Engine(DRAFTS, pages=64, threads=1) as small:
        async with engine.context() as ctx:
            ctx.fill([1, 2, 3])
            plain = await ctx.fork().generate(hw.TopP(0.9, seed=3), max_tokens=24).tokens()
            drafter = hw.DraftModel(small, adaptive=False)
            generation = ctx.generate(hw.TopP(0.9, seed=3), max_tokens=24, speculate=drafter)
            assert await generation.tokens() == plain
            stats = generation.speculation
            assert stats.drafted > 0
        assert small.stats().pages_held == 0
        return plain


def test_a_draft_model_of_the_client_drafts_for_the_server(served: Served, remote: hw.RemoteEngine) -> None:
    assert_same(served, remote, drafted)


CALLED: list[bool] = []


async def switch(on: bool) -> str:
    """Switch the light."""
    CALLED.append(on)
    return f"the light is {'on' if on else 'off'}"


async def chat(engine: Any) -> Any:
    CALLED.clear()
    async with engine.context() as ctx:
        ctx.system("Be brief.")
        reply = ctx.chat(
            "Go.",
            hw.Multinomial(seed=7),
            tools=[switch],
            tool_choice="required",
            tool_format="hermes",
            max_tokens=400,
            max_rounds=1,
        )
        parts, result = [], None
        async for part in reply:
            parts.append(type(part).__name__)
            if parts[-1] == "ToolResult":
                result = part
                break
        assert result is not None
        return parts, result.text, CALLED[0], reply.rounds, ctx.tokens, [m["role"] for m in ctx.messages]


def test_a_chat_runs_its_tools_in_the_client(smollm2_path: Path) -> None:
    """A scripted model draws evenly from what a call's grammar allows, which is a call."""
    engine = hw.Engine(smollm2_path, runner=ScriptedRunner(49152, 16), pages=64, threads=1)
    server = Served(engine)
    try:
        with hw.connect(server.url) as remote:
            assert_same(server, remote, chat)
    finally:
        server.close()
        engine.close()
