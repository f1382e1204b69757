"""The snippets of the two source documents, in their Python form, each with the intent its prose states."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps

import numpy as np
import pytest

import headway as hw
from headway import (
    Argmax,
    AttentionScores,
    Brle,
    Distribution,
    Entropy,
    Logits,
    Logprob,
    Logprobs,
    Mask,
    Multinomial,
)
from headway.testing import random_model

VOCAB, PAGE = 203, 16


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(vocab_size=VOCAB, layers=3), pages=128, threads=1) as engine:
        yield engine


Program = Callable[[hw.Engine], Awaitable[None]]


def program(body: Program) -> Callable[[hw.Engine], None]:
    """A test written as a program; it gives all its pages back."""

    @wraps(body)
    def test(engine: hw.Engine) -> None:
        engine.run(body)
        assert engine.stats().pages_held == 0

    return test


def ids(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(VOCAB, size=n).tolist()


async def filled(engine: hw.Engine, n: int) -> hw.Context:
    """A context with n computed tokens."""
    ctx = engine.context().fill(ids(n))
    await ctx.flush()
    return ctx


async def attended(ctx: hw.Context, fwd: hw.Forward, row: int = 0) -> list[int]:
    """The slots to which a row gives any attention, the same in every layer and head."""
    layers = range(ctx.engine.config.layers)
    handles = [fwd.probe(row, AttentionScores(layer)) for layer in layers]
    out = await fwd.execute()
    seen = {tuple(np.flatnonzero(head)) for h in handles for head in out.attention(h)}
    assert all(np.allclose(out.attention(h).sum(axis=1), 1, atol=1e-5) for h in handles)
    assert len(seen) == 1, "heads differ in what they can see"
    return [int(slot) for slot in seen.pop()]


async def last_logits(fwd: hw.Forward) -> np.ndarray:
    handle = fwd.probe(-1, Logits())
    return (await fwd.execute()).logits(handle)


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a - b).max() <= 1e-4 * max(1.0, float(np.abs(b).max())))


# -- the forward pass --------------------------------------------------------------------------------------------------


@program
async def test_what_forward_does(engine: hw.Engine) -> None:
    async with engine.context() as ctx:
        fwd = ctx.forward()
        fwd.input(ids(5))  # auto-derived positions
        h = fwd.sample([0], Argmax())  # SampleHandle for row 0
        d = fwd.probe(0, Distribution(temperature=1.0, k=32))

        out = await fwd.execute()

        token = out.token(h)
        found, probs = out.distribution(d)
        assert token == found[0]
        assert len(found) == len(probs) == 32
        assert list(probs) == sorted(probs, reverse=True)


@program
async def test_execute_computes_pending_tokens_reserves_places_and_commits(engine: hw.Engine) -> None:
    tokens = ids(40)
    async with engine.context() as ctx, engine.context() as whole:
        ctx.fill(tokens[:30])
        assert (ctx.seq_len, len(ctx.pending)) == (0, 30)
        fwd = ctx.forward().input(tokens[30:])
        first, last = fwd.probe(0, Logits()), fwd.probe(-1, Logits())
        out = await fwd.execute()
        assert (ctx.seq_len, len(ctx.pending)) == (40, 0)
        assert (ctx.inner().committed_page_count, ctx.inner().working_page_count) == (2, 1)
        assert out.stats.rows == 10

        check = whole.forward().input(tokens)
        rows = check.probe(30, Logits()), check.probe(39, Logits())
        expected = await check.execute()
        assert close(out.logits(first), expected.logits(rows[0]))  # index 0 is the first token of input
        assert close(out.logits(last), expected.logits(rows[1]))


@program
async def test_passes_of_live_programs_share_a_batch(engine: hw.Engine) -> None:
    async with await filled(engine, 20) as ctx:
        forks = [ctx.fork() for _ in range(6)]
        passes = [fork.forward().input(ids(3, seed)) for seed, fork in enumerate(forks)]
        for fwd in passes:
            fwd.sample([-1], Argmax())
        outs = await asyncio.gather(*(_run(fwd) for fwd in passes))
        assert max(out.stats.batch_size for out in outs) > 1


async def _run(fwd: hw.Forward) -> hw.Output:
    return await fwd.execute()


@program
async def test_outputs(engine: hw.Engine) -> None:
    target, id_a, id_b = 17, 3, 200
    async with engine.context() as ctx:
        fwd = ctx.forward().input(ids(4))
        logits_h = fwd.probe(0, Logits())
        dist_h = fwd.probe(0, Distribution(temperature=1.0, k=32))
        lp_h = fwd.probe(0, Logprob(target))  # log p(target)
        lps_h = fwd.probe(0, Logprobs([id_a, id_b]))  # log p of each
        ent_h = fwd.probe(0, Entropy())

        out = await fwd.execute()

        raw = bytes(out.logits(logits_h))  # raw float32 bytes
        logits = np.frombuffer(raw, dtype=np.float32).astype(np.float64)
        assert logits.shape == (VOCAB,)
        logp = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        found, probs = out.distribution(dist_h)
        assert list(found) == list(np.argsort(-logp, kind="stable")[:32])
        np.testing.assert_allclose(probs, np.exp(logp[found]), rtol=1e-4)
        assert out.logprobs(lp_h).shape == (1,)
        np.testing.assert_allclose(out.logprobs(lp_h), logp[[target]], rtol=1e-4)
        np.testing.assert_allclose(out.logprobs(lps_h), logp[[id_a, id_b]], rtol=1e-4)
        assert out.entropy(ent_h) == pytest.approx(-(np.exp(logp) * logp).sum(), rel=1e-4)
        assert not hasattr(out, "logprob")  # both queries are read with logprobs


@program
async def test_mismatched_access_reads_as_none(engine: hw.Engine) -> None:
    async with engine.context() as ctx:
        fwd = ctx.forward().input([1])
        token, entropy = fwd.sample([0], Argmax()), fwd.probe(0, Entropy())
        out = await fwd.execute()
        assert out.token(entropy) is None  # type: ignore[arg-type]
        assert out.tokens(entropy) is None  # type: ignore[arg-type]
        for reader in (out.entropy, out.logits, out.logprobs, out.distribution, out.hidden, out.attention, out.lens):
            assert reader(token) is None  # type: ignore[arg-type]
        for reader in (out.logits, out.logprobs, out.distribution, out.hidden, out.attention, out.lens):
            assert reader(entropy) is None  # type: ignore[arg-type]


@program
async def test_setters_chain_and_execute_runs_once(engine: hw.Engine) -> None:
    async with engine.context() as ctx:
        fwd = ctx.forward().input([1]).input_at([2], [7]).attention_mask([[0], [1]]).mask(allow=[4, 5])
        chosen = fwd.sample([-1], Argmax())
        assert (await fwd.execute()).token(chosen) in (4, 5)
        with pytest.raises(hw.Closed, match="executed before"):
            await fwd.execute()


# -- tokens and positions ----------------------------------------------------------------------------------------------


@program
async def test_auto_positions_follow_the_context(engine: hw.Engine) -> None:
    a, b, c = ids(3, seed=1)
    async with await filled(engine, 100) as ctx, ctx.fork() as twin, ctx.fork() as other:
        auto = await last_logits(ctx.forward().input([a, b, c]))
        explicit = await last_logits(twin.forward().input_at([a, b, c], [100, 101, 102]))
        moved = await last_logits(other.forward().input_at([a, b, c], [101, 102, 103]))
        assert close(auto, explicit)
        assert not close(auto, moved)


@program
async def test_explicit_positions_standard_and_with_a_gap(engine: hw.Engine) -> None:
    tokens = ids(6)
    async with engine.context() as plain, engine.context() as standard, engine.context() as custom:
        expected = await last_logits(plain.forward().input(tokens))
        positions = list(range(len(tokens)))
        assert close(await last_logits(standard.forward().input_at(tokens, positions)), expected)

        gapped = await last_logits(custom.forward().input_at(tokens, [0, 1, 2, 10, 11, 12]))
        assert not close(gapped, expected)
        async with custom.fork() as fork:  # the next auto position is the largest so far + 1
            auto = await last_logits(custom.forward().input([9]))
            assert close(await last_logits(fork.forward().input_at([9], [13])), auto)


@program
async def test_positions_are_independent_of_the_order_of_tokens(engine: hw.Engine) -> None:
    """Two tokens that do not see each other may be written in either order; only their position ids count."""
    apart = [[0], [0, 1], [2]]
    async with engine.context() as ctx, engine.context() as reordered, engine.context() as moved:
        expected = await last_logits(ctx.forward().input_at([5, 6, 7], [0, 1, 2]).attention_mask(apart))
        fwd = reordered.forward().input_at([6, 5, 7], [1, 0, 2]).attention_mask(apart)
        assert close(await last_logits(fwd), expected)
        fwd = moved.forward().input_at([6, 5, 7], [0, 1, 2]).attention_mask(apart)
        assert not close(await last_logits(fwd), expected)


@program
async def test_two_competing_drafts_at_one_position(engine: hw.Engine) -> None:
    draft_a, draft_b = 11, 22
    async with await filled(engine, 5) as ctx:
        alone = [await last_logits(ctx.fork().forward().input([draft])) for draft in (draft_a, draft_b)]
        fwd = ctx.forward().input_at([draft_a, draft_b], [5, 5])
        fwd.attention_mask([[5], [5, 1]])  # the second does not see the first
        handles = [fwd.probe(row, Logits()) for row in (0, 1)]
        out = await fwd.execute()
        for handle, expected in zip(handles, alone, strict=True):
            assert close(out.logits(handle), expected)


# -- attention masks ---------------------------------------------------------------------------------------------------


def test_brle_in_one_paragraph() -> None:
    assert Brle.from_runs([3, 2, 4, 1]).to_bool().astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 0, 1]


@program
async def test_in_attention_masks_zero_attends_and_one_masks(engine: hw.Engine) -> None:
    async with await filled(engine, 10) as ctx:
        fwd = ctx.forward().input([1]).attention_mask([[3, 2, 4, 1]])
        assert await attended(ctx, fwd) == [0, 1, 2, 5, 6, 7, 8, 10]  # and itself


@pytest.mark.parametrize("total_len", [40, 47, 48, 49, 64, 100])
@pytest.mark.parametrize("window_size", [16, 20, 33])
def test_sliding_window(engine: hw.Engine, total_len: int, window_size: int) -> None:
    """Keep only the last N tokens. Tokens outside are masked, and their pages can be released."""

    async def body(engine: hw.Engine) -> None:
        async with await filled(engine, total_len) as ctx:
            raw = ctx.inner()
            psize = ctx.page_size
            held = engine.stats().pages_held

            evict_count = max(0, ctx.seq_len - window_size)
            pages_to_release = evict_count // psize
            if pages_to_release > 0:
                raw.discard_pages(0, pages_to_release)
            assert engine.stats().pages_held == held - pages_to_release

            fwd = ctx.forward().input([7])
            fwd.attention_mask([[0, evict_count, window_size]])  # mask out evicted, attend to window
            assert await attended(ctx, fwd) == list(range(evict_count, total_len + 1))

    program(body)(engine)


@program
async def test_a_sliding_window_of_many_steps_keeps_exactly_the_last_tokens(engine: hw.Engine) -> None:
    window_size, discarded = 20, 0
    async with await filled(engine, 10) as ctx, engine.context() as dense:
        await dense.fill(ids(10)).flush()
        for step, token in enumerate(ids(60, seed=2)):
            evict_count = max(0, ctx.seq_len - window_size)
            if evict_count // PAGE > discarded:
                ctx.inner().discard_pages(discarded, evict_count // PAGE - discarded)
                discarded = evict_count // PAGE
            runs = [0, evict_count, min(window_size, ctx.seq_len)]
            seen = await attended(ctx, ctx.forward().input([token]).attention_mask([runs]))
            assert seen == list(range(evict_count, 10 + step + 1))
            assert engine.stats().pages_held - -(-dense.seq_len // PAGE) <= window_size // PAGE + 2
            await dense.forward().input([token]).attention_mask(Mask.window(window_size + 1)).execute()
        same = [await last_logits(c.forward().input([3]).attention_mask(Mask.window(21))) for c in (ctx, dense)]
        assert close(*same)
        assert discarded == 3


@program
async def test_the_documents_window_read_literally_keeps_the_wrong_side(engine: hw.Engine) -> None:
    """Zeros come first and 0 = attend, so [evicted, window] is the complement: it attends to what was evicted."""
    evict_count, window_size = 32, 18
    async with await filled(engine, 50) as ctx, ctx.fork() as freed:
        fwd = ctx.forward().input([7]).attention_mask([[evict_count, window_size]])
        assert await attended(ctx, fwd) == [*range(evict_count), 50]
        freed.inner().discard_pages(0, 2)
        with pytest.raises(hw.InvalidMask, match="discarded"):
            await freed.forward().input([7]).attention_mask([[evict_count, window_size]]).execute()


@pytest.mark.parametrize(("sink_size", "window_size"), [(4, 16), (16, 20), (1, 33), (0, 16)])
def test_attention_sink(engine: hw.Engine, sink_size: int, window_size: int) -> None:
    """Keep a fixed prefix always live, plus a sliding window of recent tokens."""

    async def body(engine: hw.Engine) -> None:
        async with await filled(engine, 70) as ctx, ctx.fork() as twin:
            evict_count = ctx.seq_len - window_size
            mask = [
                sink_size,  # zeros: attend to sink
                evict_count - sink_size,  # ones: mask the evicted middle
                window_size,  # zeros: attend to window
            ]
            fwd = ctx.forward().input([7]).attention_mask([mask])
            assert await attended(ctx, fwd) == [*range(sink_size), *range(evict_count, 71)]
            symbolic = twin.forward().input([7]).attention_mask(Mask.sink(sink_size, window_size + 1))
            assert await attended(twin, symbolic) == [*range(sink_size), *range(evict_count, 71)]

    program(body)(engine)


@program
async def test_hierarchical_attention_sees_what_its_blocks_say(engine: hw.Engine) -> None:
    async with engine.context() as ctx:
        fwd = ctx.forward().input(ids(12)).attention_mask(Mask.blocks([2, 3, 3], sees=[(1, 0), (2, 0)]))
        assert await attended(ctx, fwd, row=7) == [0, 1, 5, 6, 7]


# -- logit masks -------------------------------------------------------------------------------------------------------


@program
async def test_a_logit_mask_restricts_the_sampler_alone(engine: hw.Engine) -> None:
    async with await filled(engine, 5) as ctx:
        fwd = ctx.forward()
        mask = [100, 50, engine.vocab_size - 150]  # forbid 0..100, allow 100..150, forbid the rest
        fwd.mask(mask)
        drawn = [fwd.sample([-1], Multinomial(2.0, seed=seed)) for seed in range(200)]
        raw, masked = fwd.probe(-1, Distribution()), fwd.probe(-1, Distribution(masked=True))
        out = await fwd.execute()
        tokens = {out.token(h) for h in drawn}
        assert len(tokens) > 1
        assert tokens <= set(range(100, 150))
        assert np.count_nonzero(out.distribution(raw)[1]) > 50
        found, probs = out.distribution(masked)
        assert set(found[probs > 0].tolist()) == set(range(100, 150))


# -- page-trim ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "trimmed"),
    [
        ([[5, 5, 38]], 0),  # slots 5 to 9 inside a page
        ([[0, 16, 32]], 1),  # a whole leading page
        ([[0, 17, 31]], 1),
        ([[0, 15, 33]], 0),
        ([[16, 16, 16]], 1),  # a middle page
        ([[0, 48]], 3),  # all pages but the one that is written
        ([[0, 16, 32], [0, 16, 33]], 1),  # every row agrees
        ([[0, 16, 32], [49]], 0),  # one row disagrees
        ([[0, 32, 16], [0, 16, 33]], 1),
    ],
)
def test_page_trim_drops_the_pages_that_every_row_masks(engine: hw.Engine, rows: list[list[int]], trimmed: int) -> None:
    async def body(engine: hw.Engine) -> None:
        with hw.Engine(engine.decoder, pages=8, trim=False, threads=1) as untrimmed:
            found = []
            for where in (engine, untrimmed):
                async with await filled(where, 48) as ctx:
                    fwd = ctx.forward().input(range(len(rows))).attention_mask(rows)
                    last = fwd.probe(-1, Logits())
                    out = await fwd.execute()
                    found.append((out.stats.pages_trimmed, out.stats.pages, out.logits(last)))
            assert [pages for pages, _, _ in found] == [trimmed, 0]
            assert [pages for _, pages, _ in found] == [4 - trimmed, 4]
            assert close(found[0][2], found[1][2])

    program(body)(engine)


@program
async def test_pages_that_are_written_are_never_trimmed(engine: hw.Engine) -> None:
    async with await filled(engine, 40) as ctx:
        fwd = ctx.forward().input([1]).attention_mask([[0, 40]])  # it sees itself alone
        fwd.sample([-1], Argmax())
        out = await fwd.execute()
        assert (out.stats.pages_trimmed, out.stats.pages) == (2, 1)


@program
async def test_trim_is_for_each_request_and_keeps_positions(engine: hw.Engine) -> None:
    async with await filled(engine, 48) as ctx, ctx.fork() as other, ctx.fork() as alone:
        masks = [[0, 32, 16]], [[16, 16, 16]]
        passes = [c.forward().input([5]).attention_mask(m) for c, m in zip((ctx, other), masks, strict=True)]
        handles = [fwd.probe(-1, Logits()) for fwd in passes]
        outs = await asyncio.gather(*(_run(fwd) for fwd in passes))
        assert [out.stats.pages_trimmed for out in outs] == [2, 1]
        expected = await last_logits(alone.forward().input_at([5], [48]).attention_mask(masks[0]))
        assert close(outs[0].logits(handles[0]), expected)
        assert ctx.seq_len == other.seq_len == 49


# -- page-level operations ---------------------------------------------------------------------------------------------


@program
async def test_page_level_operations(engine: hw.Engine) -> None:
    async with engine.context() as ctx:
        raw = ctx.inner()

        raw.reserve_working_pages(4)  # pre-allocate 4 working pages
        assert (raw.working_page_count, engine.stats().pages_held) == (4, 4)
        await ctx.forward().input(ids(40)).defer_commit().execute()
        assert (raw.committed_page_count, raw.working_page_count, raw.working_page_token_count) == (0, 4, 40)
        raw.commit_working_pages(2)  # promote 2 full working pages to committed
        assert (raw.committed_page_count, raw.working_page_count, raw.working_page_token_count) == (2, 2, 8)
        with pytest.raises(hw.InvalidInput, match="only full pages commit"):
            raw.commit_working_pages(1)
        raw.truncate_working_page_tokens(3)  # drop the last 3 tokens (rollback)
        assert (ctx.seq_len, raw.working_page_token_count) == (37, 5)
        raw.release_working_pages(2)  # free 2 working pages
        assert (ctx.seq_len, raw.working_page_count, engine.stats().pages_held) == (32, 0, 2)


@program
async def test_forks_share_committed_pages(engine: hw.Engine) -> None:
    async with await filled(engine, 40) as ctx, ctx.fork() as fork:
        assert engine.stats().pages_held == 4  # two shared, one half-full page each
        own, theirs = await last_logits(ctx.forward().input([1])), await last_logits(fork.forward().input([1]))
        assert close(own, theirs)
        await ctx.forward().input(ids(10, seed=5)).execute()
        assert fork.seq_len == 41


@program
async def test_a_draft_is_rolled_back_by_hand(engine: hw.Engine) -> None:
    async with await filled(engine, 20) as ctx, ctx.fork() as never:
        await ctx.forward().input(ids(9, seed=3)).defer_commit().execute()
        ctx.inner().truncate_working_page_tokens(9)
        assert ctx.seq_len == 20
        assert close(await last_logits(ctx.forward().input([4])), await last_logits(never.forward().input([4])))
