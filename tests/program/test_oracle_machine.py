"""Random programs against the oracle: whatever is done to contexts, every pass gives the dense computation's logits.

A state machine interleaves everything a context can do, several contexts and saved ones at a time, on small models of
all families. After each pass the rows read are compared with one dense run of the whole sequence; after each step the
pages are counted. Sizes around page boundaries are favoured.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import headway as hw
from support import world as w
from support.checks import assert_close
from support.sweeps import swept
from support.world import Choice, Judge, Plan, World

LONGEST = 120  # slots of a context
CONTEXTS = 4
NAMES = ("a", "b")
SIZES = (1, 1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33)

sizes = st.sampled_from(SIZES)
seeds = st.integers(0, 1 << 16)
picks = st.integers(0, 1 << 10)
flags = st.booleans()
explicit = st.sampled_from([False, False, True])
shifts = st.sampled_from([0, 0, 3, -2, 40])


@dataclass(frozen=True)
class Rows:
    """One call of `input` or `input_at`."""

    size: int
    explicit: bool
    seed: int

    def tokens(self, vocab: int) -> list[int]:
        return np.random.default_rng(self.seed).integers(vocab, size=self.size).tolist()

    def positions(self) -> list[int | None]:
        """Gaps, repeats and reorders."""
        if not self.explicit:
            return [None] * self.size
        return np.random.default_rng(self.seed + 1).integers(200, size=self.size).tolist()


@dataclass(frozen=True)
class Want:
    """A mask to be made once the slots are known."""

    kind: str
    one: int
    two: int
    seed: int
    causal: bool


rows = st.lists(st.builds(Rows, sizes, explicit, seeds), min_size=1, max_size=3)
KINDS = ("window", "sink", "blocks", "mixed", "inverted", "runs", "pages", "bool", "causal")
wants = st.none() | st.builds(
    Want, st.sampled_from(KINDS), st.integers(1, 40), st.integers(0, 40), seeds, st.sampled_from([True, True, False])
)


def symbolic(want: Want) -> tuple[hw.Mask, w.Sees] | None:
    """The mask as the package has it and as the oracle's side has it."""
    one, two, rng = want.one, want.two, np.random.default_rng(want.seed)
    match want.kind:
        case "causal":
            return hw.Mask.causal(), w.causal
        case "window":
            return hw.Mask.window(one), w.window(one)
        case "sink":
            return hw.Mask.sink(two, one), w.sink(two, one)
        case "blocks" | "mixed":
            lengths = rng.integers(1, 20, size=4).tolist()
            pairs = [(int(a), int(b)) for a, b in rng.integers(0, 5, size=(3, 2))]
            mask, sees = hw.Mask.blocks(lengths, sees=pairs), w.blocks(lengths, pairs)
            if want.kind == "mixed":
                mask = (mask & hw.Mask.sink(two, one)) | hw.Mask.window(1)
                sees = w.either(w.both(sees, w.sink(two, one)), w.window(1))
            return mask, sees
        case "inverted":  # often refused: the first rows see nothing
            return ~hw.Mask.window(one), w.neither(w.window(one))
    return None


def choose(want: Want | None, base: int, count: int, size: int) -> Choice | None:
    """The mask for `count` input rows from slot `base` on."""
    if want is None:
        return None
    if (found := symbolic(want)) is not None:
        return Choice(found[0], sees=found[1], causal=want.causal)
    rng, total = np.random.default_rng(want.seed), base + count
    if want.kind == "pages":  # whole pages, alike for all rows: what trim is for
        bits = np.tile(np.repeat(rng.random(-(-total // size)) < want.one / 60, size)[:total], (count, 1))
    else:
        bits = rng.random((count, total)) < want.one / 40
    own = rng.random(count) < 0.9
    bits[np.arange(count), base + np.arange(count)] = own
    if want.kind == "bool":
        return Choice(hw.Mask.from_bool(bits), rows=bits, causal=want.causal)
    runs = []
    for i, line in enumerate(bits):
        stop = total if not want.causal else base + i + (not own[i] or rng.random() < 0.5)
        runs.append(w.runs_of(~line[:stop]))
    return Choice(runs, rows=bits, causal=want.causal)


class Machine(RuleBasedStateMachine):
    """Contexts and their worlds, side by side."""

    name = ""
    size = 16
    pages = 96
    engine: hw.Engine
    judge: Judge

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[hw.Context, World]] = []
        self.saved: dict[str, World] = {}

    @initialize()
    def begin(self) -> None:
        self.new()

    def teardown(self) -> None:
        for context, _ in self.pairs:
            context.release()
        for name in self.saved:
            self.engine.delete(name)
        self.engine.cache.clear()  # so that an example can be repeated
        stats = self.engine.stats()
        assert stats.pages_free == stats.pages_total
        self.pairs, self.saved = [], {}

    def pick(self, which: int) -> tuple[hw.Context, World]:
        return self.pairs[which % len(self.pairs)]

    # -- contexts --------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.pairs) < CONTEXTS)
    @rule()
    def new(self) -> None:
        self.pairs.append((self.engine.context(), World(self.size, self.engine.config.windows)))

    @precondition(lambda self: len(self.pairs) < CONTEXTS)
    @rule(which=picks)
    def fork(self, which: int) -> None:
        context, world = self.pick(which)
        need = -(-len(world.cells) // self.size) - world.committed
        need -= len([p for p in world.gone if p >= world.committed])
        twin = self.attempt(context.fork, need)
        if twin is not None:
            self.pairs.append((twin, world.fork()))

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(which=picks)
    def drop(self, which: int) -> None:
        context, _ = self.pairs.pop(which % len(self.pairs))
        context.release()

    @rule(which=picks, name=st.sampled_from(NAMES), durable=st.sampled_from([False, False, True]))
    def save(self, which: int, name: str, durable: bool) -> None:
        context, world = self.pick(which)
        need = -(-len(world.cells) // self.size) - world.committed
        need -= len([p for p in world.gone if p >= world.committed])
        if self.attempt(lambda: context.save(name, durable=durable) or True, need):
            self.saved[name] = world.fork()

    @precondition(lambda self: self.saved and len(self.pairs) < CONTEXTS)
    @rule(name=st.sampled_from(NAMES), take=flags)
    def open(self, name: str, take: bool) -> None:
        if name not in self.saved:
            assert self.engine.open(name) is None
            assert self.engine.take(name) is None
            assert not self.engine.delete(name)
            return
        world = self.saved[name]
        free = self.engine._allocator.available
        try:
            context = self.engine.take(name) if take else self.engine.open(name)
        except hw.OutOfPages:
            assert free < world.pages
            return
        assert context is not None
        self.pairs.append((context, world.fork()))
        if take:
            del self.saved[name]

    # -- tokens and passes -----------------------------------------------------------------------------------------

    @rule(which=picks, part=st.builds(Rows, sizes, st.just(False), seeds))
    def fill(self, which: int, part: Rows) -> None:
        context, world = self.pick(which)
        if len(world.cells) + len(world.pending) + part.size > LONGEST:
            return
        context.fill(part.tokens(self.engine.vocab_size))
        world.pending += part.tokens(self.engine.vocab_size)

    @rule(which=picks, want=wants)
    def flush(self, which: int, want: Want | None) -> None:
        context, world = self.pick(which)
        count = len(world.pending)
        choice = (
            None if want is None else choose(Want(**{**vars(want), "causal": True}), len(world.cells), count, self.size)
        )
        if not count and choice is not None:
            with pytest.raises(hw.InvalidInput):
                self.engine.run(lambda _: context.flush(choice.given))  # type: ignore[arg-type]
            return
        if not count:
            self.engine.run(lambda _: context.flush())
            return
        plain = World(**{**vars(world), "pending": []})
        plan = Plan(plain, list(world.pending), world.place([]), choice)
        if self.settle(plan, world, lambda: self.engine.run(lambda _: context.flush(choice and choice.given))):  # type: ignore[arg-type]
            world.advance(plan)

    @rule(which=picks, parts=rows, want=wants, commit=flags, reads=st.lists(picks, max_size=4))
    def forward(self, which: int, parts: list[Rows], want: Want | None, commit: bool, reads: list[int]) -> None:
        self.together([(which, parts, want, commit, reads)])

    @rule(size=st.sampled_from([16, 17, 33, 48, 64]), text=st.integers(0, 1), want=st.none() | wants, fill=flags)
    def prompt(self, size: int, text: int, want: Want | None, fill: bool) -> None:
        """A sequence that may have been computed before, in a fresh context: pages of the prefix cache are found."""
        if len(self.pairs) == CONTEXTS:
            self.drop(0)
        self.new()
        part, last = Rows(size, False, text), Rows(1, False, text)
        if fill:
            self.fill(-1, part)
        self.together([(-1, [last] if fill else [part], want, True, [])])

    @rule(
        asks=st.lists(
            st.tuples(picks, rows, wants, flags, st.lists(picks, max_size=3)),
            min_size=2,
            max_size=CONTEXTS,
            unique_by=lambda ask: ask[0] % CONTEXTS,
        )
    )
    def batch(self, asks: list[Any]) -> None:
        self.together(asks)

    def together(self, asks: list[Any]) -> None:
        """Passes over different contexts, submitted at once."""
        running, used = [], set()
        for which, parts, want, commit, reads in asks:
            context, world = self.pick(which)
            total = len(world.cells) + len(world.pending) + sum(p.size for p in parts)
            if id(context) in used or total > LONGEST:
                continue
            used.add(id(context))
            running.append((world, commit, *self.build(context, world, parts, want, commit=commit, reads=reads)))
        free = self.engine._allocator.available
        needs = [world.new_pages(len(plan.cells)) for world, _, plan, _, _ in running]
        aside = sum(len(context._table.absent()) for context, _ in self.pairs)
        with self.engine._lock:  # one step for all
            started = [(self.submit(forward, plan), *rest) for *rest, plan, forward, _ in running]
        for (execution, world, commit), (_, _, plan, _, handles) in zip(started, running, strict=True):
            if execution is None:
                continue
            try:
                out = execution.result()
            except hw.OutOfPages:
                assert sum(needs) + aside > free
                continue
            self.compare(out, handles, world, plan)
            assert out.stats.pages_trimmed == (plan.trimmed(world) if plan.cells else len(world.gone))
            world.advance(plan, commit=commit)

    def build(
        self, context: hw.Context, world: World, parts: list[Rows], want: Want | None, *, commit: bool, reads: list[int]
    ) -> tuple[Plan, hw.Forward, list[Any]]:
        forward, vocab = context.forward(), self.engine.vocab_size
        tokens = [t for part in parts for t in part.tokens(vocab)]
        positions = [p for part in parts for p in part.positions()]
        for part in parts:
            if part.explicit:
                forward.input_at(part.tokens(vocab), part.positions())  # type: ignore[arg-type]
            else:
                forward.input(part.tokens(vocab))
        choice = choose(want, len(world.cells) + len(world.pending), len(tokens), self.size)
        if choice is not None:
            forward.attention_mask(choice.given, causal=choice.causal)  # type: ignore[arg-type]
        if not commit:
            forward.defer_commit()
        before = world.pending or (world.cells and world.readable)
        lowest = -(len(tokens) + 1) if before else -len(tokens)
        handles = []
        for read in [*reads, 1 << 10]:  # the last row always
            index = lowest + read % (len(tokens) - lowest) if read != 1 << 10 else -1
            handles.append((index, forward.probe(index, hw.Logits())))
        return world.plan(tokens, positions, choice), forward, handles

    def submit(self, forward: hw.Forward, plan: Plan) -> Any:
        if plan.refused:
            with pytest.raises(hw.InvalidMask):
                forward.execute()
            return None
        return forward.execute()

    def compare(self, out: hw.Output, handles: list[Any], world: World, plan: Plan) -> None:
        """The rows that were read, against one dense run."""
        rows = len(plan.cells) - plan.pending
        cells = [*world.cells, *plan.cells]
        wanted = [cells[len(cells) - rows + i] if i >= 0 else cells[i] for i, _ in handles]
        found = np.stack([out.logits(h) for _, h in handles])
        assert_close(found, self.judge.logits(wanted), f"rows {[i for i, _ in handles]}")

    @rule(which=picks, again=flags)
    def read_last(self, which: int, again: bool) -> None:
        """Reading the last token without input; pending ones are computed on the way."""
        context, world = self.pick(which)
        forward = context.forward()
        handle = forward.probe(-1, hw.Logits())
        hidden = forward.probe(-1, hw.Hidden(0)) if again else None  # needs a second computation of the token
        plan = world.plan([], [], None)
        if not world.cells and not plan.cells:
            with pytest.raises(hw.OutOfRange):
                forward.execute()
            return
        if not plan.cells:
            possible = World(**{**vars(world), "kept": world.kept and not again}).readable
            try:
                out = forward.execute().result()
            except hw.Unsupported:
                assert not possible
                return
        else:
            out = self.settle(plan, world, lambda: forward.execute().result())
            if out is None:
                return
        last = (world.cells + plan.cells)[-1]
        assert_close(out.logits(handle), self.judge.logits([last])[0])
        assert hidden is None or out.hidden(hidden) is not None
        world.advance(plan)

    @rule(which=picks, length=st.integers(2, 4), part=st.builds(Rows, sizes, explicit, seeds), want=wants)
    def chain(self, which: int, length: int, part: Rows, want: Want | None) -> None:
        """Passes that feed each other's tokens before anyone has read them."""
        context, world = self.pick(which)
        total = len(world.cells) + len(world.pending) + part.size + length
        need = max(0, -(-total // self.size) - world.pages) + len(context._table.absent())
        if total > LONGEST or need > self.engine._allocator.available:
            return
        plan, forward, _ = self.build(context, world, [part], want, commit=True, reads=[])
        if plan.refused:
            return
        sampled = [forward.sample([-1], hw.Argmax())]
        running = [(forward, forward.execute())]
        for _ in range(length - 1):
            forward = context.forward().input(sampled[-1])
            sampled.append(forward.sample([-1], hw.Argmax()))
            running.append((forward, forward.execute()))
        for handle, (_, execution) in zip(sampled, running, strict=True):
            out = execution.result()
            world.advance(plan)
            logits, token = self.judge.logits([world.cells[-1]])[0], out.token(handle)
            assert logits[token] >= logits.max() - 1e-4 * max(1, np.abs(logits).max())
            plan = world.plan([token], [None], None)

    def settle(self, plan: Plan, world: World, run: Any) -> Any:
        """Run a pass that may have to be refused, or find no pages."""
        if plan.refused:
            with pytest.raises(hw.InvalidMask):
                run()
            return None
        return self.attempt(lambda: run() or True, world.new_pages(len(plan.cells)))

    def attempt(self, run: Any, need: int) -> Any:
        """The result, or None where the pool rightly had too few pages."""
        free = self.engine._allocator.available
        aside = sum(len(context._table.absent()) for context, _ in self.pairs)
        try:
            return run()
        except hw.OutOfPages:
            assert need + aside > free
            return None

    # -- cutting and pages -----------------------------------------------------------------------------------------

    @rule(which=picks, n=st.integers(0, 20) | st.sampled_from(SIZES))
    def truncate(self, which: int, n: int) -> None:
        context, world = self.pick(which)
        total = len(world.cells) + len(world.pending)
        if n > total:
            with pytest.raises(hw.InvalidInput):
                context.truncate(n)
            return
        keep = min(len(world.cells), total - n)
        if keep < len(world.cells) and keep % self.size and keep // self.size in world.gone:
            with pytest.raises(hw.InvalidInput):
                context.truncate(n)
            return
        if self.attempt(lambda: context.truncate(n), 1):
            world.truncate(n)

    @rule(which=picks, start=st.integers(0, 6), n=st.integers(0, 3))
    def discard(self, which: int, start: int, n: int) -> None:
        context, world = self.pick(which)
        allowed = range(len(world.cells) // self.size)
        chosen = range(start, start + n)
        if start + n > len(allowed) or any(p in world.gone for p in chosen):
            with pytest.raises((hw.OutOfRange, hw.InvalidInput)):
                context.inner().discard_pages(start, n)
            return
        context.inner().discard_pages(start, n)
        world.gone |= set(chosen)

    @rule(which=picks, start=picks, share=st.sampled_from([0.1, 0.5, 0.9]), seed=seeds, last=flags)
    def keep(self, which: int, start: int, share: float, seed: int, last: bool) -> None:
        context, world = self.pick(which)
        if not world.cells:
            return
        first, rng = start % len(world.cells), np.random.default_rng(seed)
        live = world.live(len(world.cells))
        kept = [s for s in range(first, len(world.cells)) if live[s] and rng.random() < share]
        if last and live[-1]:
            kept = sorted({*kept, len(world.cells) - 1})
        inside = first % self.size != 0 and first // self.size in world.gone
        if not kept or inside:
            with pytest.raises(hw.InvalidInput):
                context.inner().keep_slots(kept, first)
            return
        need = -(-len(kept) // self.size) + 1
        if self.attempt(lambda: context.inner().keep_slots(kept, first) or True, need):
            world.keep(kept, first)

    @precondition(lambda self: len(self.pairs) > 1)
    @rule(which=picks, other=picks, pages=st.lists(st.integers(0, 4), max_size=3), shift=shifts)
    def append(self, which: int, other: int, pages: list[int], shift: int) -> None:
        (context, world), (source, theirs) = self.pick(which), self.pick(other)
        if context is source or len(world.cells) + len(pages) * self.size > LONGEST:
            return
        cells = [c for p in pages for c in theirs.cells[p * self.size : (p + 1) * self.size]]
        refused = any(p >= theirs.committed or p in theirs.gone for p in pages) or world.pending
        refused = refused or any(not 0 <= c.position + shift < self.engine.config.max_positions for c in cells)
        if refused:
            with pytest.raises((hw.InvalidInput, hw.OutOfRange, hw.ContextLengthExceeded)):
                context.inner().append_from(source, pages, shift)
            return
        if self.attempt(lambda: context.inner().append_from(source, pages, shift) or True, len(pages) + 1):
            world.append(theirs, pages, shift)

    @rule(which=picks, n=st.integers(0, 3))
    def reserve(self, which: int, n: int) -> None:
        context, world = self.pick(which)
        if self.attempt(lambda: context.inner().reserve_working_pages(n) or True, n):
            world.pages += n

    @rule(which=picks, k=st.integers(0, 3))
    def commit(self, which: int, k: int) -> None:
        context, world = self.pick(which)
        if k > len(world.cells) // self.size - world.committed:
            with pytest.raises(hw.InvalidInput):
                context.inner().commit_working_pages(k)
            return
        context.inner().commit_working_pages(k)
        world.committed += k

    @rule(which=picks, n=st.integers(0, 3))
    def release(self, which: int, n: int) -> None:
        context, world = self.pick(which)
        if n > world.pages - world.committed:
            with pytest.raises(hw.InvalidInput):
                context.inner().release_working_pages(n)
            return
        context.inner().release_working_pages(n)
        world.release(n)

    @rule(which=picks, n=st.integers(0, 20))
    def truncate_working(self, which: int, n: int) -> None:
        context, world = self.pick(which)
        keep = len(world.cells) - n
        if n > world.working_tokens or any(page >= keep // self.size for page in world.gone):
            with pytest.raises(hw.InvalidInput):
                context.inner().truncate_working_page_tokens(n)
            return
        context.inner().truncate_working_page_tokens(n)
        world.cut(len(world.cells) - n)

    # -- what always holds -----------------------------------------------------------------------------------------

    @invariant()
    def counts_are_right(self) -> None:
        for context, world in self.pairs:
            inner = context.inner()
            assert context.seq_len == len(world.cells)
            assert list(context.pending) == world.pending
            assert context.tokens == (*(c.token for c in world.cells), *world.pending)
            assert inner.committed_page_count == world.committed
            assert inner.working_page_count == world.pages - world.committed
            assert inner.working_page_token_count == max(0, world.working_tokens)

    @invariant()
    def pages_are_conserved(self) -> None:
        with self.engine._lock:
            tables = [context._table for context, _ in self.pairs]
            tables += [kept._table for kept in self.engine._snapshots._kept.values()]
            self.engine._allocator.check([table.held() for table in tables])
            shared: dict[int, set[bool]] = {}
            for table in tables:
                for number, page in enumerate(table.pages):
                    if page is not None and page > 0:  # neither discarded nor preempted
                        shared.setdefault(page, set()).add(number < table.committed)
            for page, committed in shared.items():
                assert committed == {True} or self.engine._allocator.holders(page) == 1, "a working page is shared"


def machine(name: str, size: int, pages: int, budget: int | None = None, **options: Any) -> type[Machine]:
    """The machine on one model, with an engine of its own."""
    folder, judge = w.model(name)
    made = hw.Engine(folder, threads=1, page_size=size, pages=pages, max_batch_tokens=budget, **options)
    return type(f"On_{name}", (Machine,), {"size": size, "engine": made, "judge": judge})


# (model, page size, pages, tokens a step): a small pool meets OutOfPages, a small budget cuts passes into chunks
CASES = [
    ("mistral-window", 16, 96, 7),
    ("qwen2-layer-types", 4, 48, None),
    ("llama-gqa-tied", 16, 96, None),
    ("qwen3-headdim24", 4, 400, 24),
]


def drive(
    case: tuple[str, int, int, int | None], examples: int, steps: int, *, long: bool = False, **options: Any
) -> None:
    kind = machine(*case, **options)
    limits = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        print_blob=True,
        derandomize=not long,
    )
    try:
        run_state_machine_as_test(kind, settings=limits)
    finally:
        kind.engine.close()


@pytest.fixture(autouse=True, scope="module")
def snapshots_go_to_a_folder_of_their_own() -> Any:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "HEADWAY_CACHE", folder)
        yield


@pytest.mark.parametrize("case", swept(CASES), ids=lambda case: case[0])
def test_every_interleaving_equals_the_oracle(case: tuple[str, int, int, int | None]) -> None:
    drive(case, examples=50, steps=25)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_every_interleaving_equals_the_oracle_for_long(case: tuple[str, int, int, int | None]) -> None:
    drive(case, examples=2000, steps=60, long=True)
