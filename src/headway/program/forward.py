"""The forward pass: a builder that ends in a frozen Pass."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from headway.base.dataclass import dataclass
from headway.base.errors import (
    Closed,
    InvalidInput,
    InvalidMask,
    OutOfRange,
    PassFailed,
    WrongType,
)
from headway.base.rng import fresh_seed
from headway.base.specs.adapters import AdapterMix, LoadedWeights
from headway.base.specs.brle import Brle
from headway.base.specs.masks import Mask, check_rows, logit_mask
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampler, Sampling, bias_array
from headway.base.text import short_repr
from headway.models.adapters.adapter import Adapter
from headway.program.adapters import use_of
from headway.program.checks.ids import check_position, integers, position_ids, token_ids
from headway.program.checks.passes import check_recurrent, check_reread, check_windows
from headway.program.checks.readouts import check_probe, checked_sample
from headway.program.execution import Execution
from headway.program.output import Output, ProbeHandle, SampleHandle
from headway.program.view import ContextView
from headway.runtime.job import Job
from headway.runtime.passes import BEFORE, AsyncLogitMask, Feed, Pass, Readout

if TYPE_CHECKING:
    from headway.program.context import Context

P = TypeVar("P", bound=Probe)
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class _Ask:
    """A sampler or probe at a row of the builder; the row may be negative."""

    row: int
    what: Sampling | Probe
    history: tuple[int, ...] | None
    generated: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class _OverTokens:
    """An array over all tokens, a logit mask or a bias, and the rows that it is for."""

    values: np.ndarray
    rows: tuple[int, ...] | None

    def is_for(self, row: int, rows: int) -> bool:
        """Whether it is for this one of `rows` rows, which may be counted from the end."""
        return self.rows is None or row - rows in self.rows or (row >= 0 and row in self.rows)


class Forward:
    """One pass over a context: add inputs and readouts, then `await execute()`, once."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._tokens: list[int] = []
        self._positions: list[int | None] = []  # None: the next one
        self._asks: list[_Ask] = []
        self._mask: Mask | None = None
        self._causal = True
        self._logit_masks: list[_OverTokens] = []
        self._biases: list[_OverTokens] = []
        self._async_mask: AsyncLogitMask | None = None
        self._counts_fed = False
        self._commit = True
        self._mix: AdapterMix | None = None  # what a generation computes under, and `adapter` adds to
        self._uses: list[tuple[LoadedWeights, float]] = []
        self._executed = False
        self._feeds: list[tuple[int, SampleHandle, int]] = []  # (row, whose token, which)
        self._job: Job | None = None
        self._raw_pending = 0  # pending tokens that raw mask rows apply to, in a flush
        self._then: Callable[[Mapping[int, object]], None] | None = None  # see Context._submit

    def __repr__(self) -> str:
        samples = sum(isinstance(ask.what, Sampling) for ask in self._asks)
        state = "executed" if self._executed else "not executed"
        probes = len(self._asks) - samples
        return f"<Forward: {len(self._tokens)} input tokens, {samples} samples, {probes} probes, {state}>"

    # -- input -----------------------------------------------------------------------------------------------------

    def input(self, tokens: Iterable[int] | SampleHandle) -> Forward:
        """Append tokens at the positions that follow.

        A handle feeds what an earlier pass over this context samples, without waiting for it: execute that pass, then
        this one, then await both.
        """
        self._check_open()
        if isinstance(tokens, SampleHandle):
            return self._feed(tokens)
        ids = token_ids(tokens, self._context.engine.vocab_size)
        self._tokens += ids
        self._positions += [None] * len(ids)
        return self

    def input_at(self, tokens: Iterable[int], positions: Iterable[int]) -> Forward:
        """Append tokens at explicit position ids: gaps, repeats and reorders are allowed."""
        self._check_open()
        ids = token_ids(tokens, self._context.engine.vocab_size)
        config = self._context.engine.config
        at = position_ids(positions, config.max_positions, why=config.limit_reason)
        if len(ids) != len(at):
            raise InvalidInput(f"input_at has {len(ids)} tokens and {len(at)} positions; there must be one for each")
        self._tokens += ids
        self._positions += at
        return self

    def _feed(self, handle: SampleHandle) -> Forward:
        source = handle.owner
        assert isinstance(source, Forward)
        if source._context is not self._context:
            raise InvalidInput("this handle belongs to a pass over another context; feed its token after reading it")
        if source._job is None:
            raise InvalidInput("this handle's pass was not executed yet; call execute() on it first")
        for i in range(handle.count):
            self._feeds.append((len(self._tokens), handle, i))
            self._tokens.append(0)
            self._positions.append(None)
        return self

    # -- modifiers -------------------------------------------------------------------------------------------------

    def attention_mask(self, mask: Mask | Sequence[Sequence[int]], *, causal: bool = True) -> Forward:
        """What each row attends to: a `Mask`, or raw runs, one list a row (zeros first, 0 = attend, 1 = masked)."""
        self._check_open()
        if self._mask is not None:
            raise InvalidMask("attention_mask was called twice; combine masks with & and | and give them once")
        if not isinstance(causal, bool | np.bool_):
            raise WrongType(f"causal is {short_repr(causal)}; expected True or False")
        self._mask = mask if isinstance(mask, Mask) else Mask.from_runs(mask)
        self._causal = bool(causal)
        return self

    def mask(self, runs: Any = None, *, allow: Any = None, forbid: Any = None, rows: Any = None) -> Forward:
        """Which tokens samplers may choose (1 = allowed): runs, ids, a bool array or a packed bitmask. Calls AND."""
        self._check_open()
        allowed = logit_mask(self._context.engine.vocab_size, runs, allow=allow, forbid=forbid)
        self._logit_masks.append(_OverTokens(allowed, _rows(rows)))
        return self

    def bias(self, array: ArrayLike, *, rows: Iterable[int] | None = None) -> Forward:
        """Add an array [V] to the logits before everything else that samplers do; -inf rules a token out.

        Calls add up. A probe still reads the model's own logits.
        """
        self._check_open()
        added = bias_array(array, "the bias", self._context.engine.vocab_size)
        self._biases.append(_OverTokens(added, _rows(rows)))
        return self

    def mask_async(self, mask: AsyncLogitMask) -> Forward:
        """An async logit mask for all rows: it depends on tokens fed by a handle and is computed while the device runs.
        The step waits for it, so it must be fast; the generator gives masks of compiled grammars."""
        self._check_open()
        if not self._feeds:
            raise InvalidInput(
                "mask_async is for a pass that is fed by a handle; this one's tokens are known, use mask"
            )
        self._async_mask = mask
        return self

    def _counting_fed(self) -> Forward:
        """Tokens that are fed to this pass were generated: penalties count them besides what `sample` is given."""
        self._counts_fed = True
        return self

    def adapter(self, adapter: Adapter, scale: float = 1.0) -> Forward:
        """Compute this pass under a LoRA adapter, pending rows included. Several add up, each times its scale."""
        self._check_open()
        self._uses.append(use_of(self._context.engine, adapter, scale))
        return self

    def _under(self, mix: AdapterMix | None) -> Forward:
        """Compute this pass under a mix that is loaded already."""
        self._mix = mix
        return self

    def defer_commit(self) -> Forward:
        """Leave full pages working after the pass; commit them with `ctx.inner().commit_working_pages`."""
        self._check_open()
        self._commit = False
        return self

    # -- readouts --------------------------------------------------------------------------------------------------

    def sample(
        self,
        indices: Iterable[int],
        sampler: Sampler,
        *,
        history: Iterable[int] | None = None,
        generated: Iterable[int] | None = None,
    ) -> SampleHandle:
        """Draw one token at each row. Penalties count `history`, by default the context's tokens up to the row;
        presence and frequency count only `generated` when it is given."""
        self._check_open()
        ask = checked_sample(self._context.engine.config, indices, sampler, history, generated)
        handle = SampleHandle(self, len(self._asks), len(ask.rows))
        self._asks += [_Ask(row, ask.what, ask.history, ask.generated) for row in ask.rows]
        return handle

    def probe(self, index: int, probe: P) -> ProbeHandle[P]:
        """Read something at a row without choosing a token."""
        self._check_open()
        (row,) = integers([index], "index")
        check_probe(self._context.engine.config, probe)
        handle = ProbeHandle(self, len(self._asks), probe)
        self._asks.append(_Ask(row, probe, None, None))
        return handle

    def _flushing(self, tokens: int) -> Forward:
        """This pass only computes pending tokens, and raw mask rows apply to them."""
        self._raw_pending = tokens
        return self

    # -- running ---------------------------------------------------------------------------------------------------

    def execute(self) -> Execution[Output]:
        """Submit the pass now; await the execution for its `Output`. On any error the context is as it was."""
        self._check_open()
        sources = {id(h.owner): h.owner for _, h, _ in self._feeds}
        if len(sources) > 1:
            raise InvalidInput(
                "the handles fed to this pass belong to several passes; only the one before it can feed it"
            )
        source = next((s._job for s in sources.values() if isinstance(s, Forward)), None)
        with self._context._changing(after=source) as (context, ahead):
            work = self._build(context, context._view(ahead))
            if source is not None and ahead is None:  # it has finished: its tokens are known
                work = work.fed(_values(source), context._table.tokens)
            job = self._job = context._submit(work, ahead, self._then)
            if source is not None:
                source.then = job
        self._executed = True
        self._feeds.clear()  # a handle keeps its pass alive, so each pass of a long generation would keep all before it
        return Execution(job, context, lambda result: Output(self, result))

    @property
    def output(self) -> Output:
        """The results of a pass that was executed and has ended; for whoever did not execute it."""
        job = self._job
        result = job.outcome.result() if job is not None and job.outcome.done() else None  # raises why it failed
        if job is None or result is None or job.abandoned:
            raise Closed("this pass has no results; execute it, and await the execution")
        return Output(self, result)

    def _check_open(self) -> None:
        if self._executed:
            raise Closed("this pass was executed before; build a new one with ctx.forward()")

    def _build(self, context: Context, view: ContextView) -> Pass:
        """The frozen pass: pending tokens first, then rows. The caller holds the lock."""
        pending = len(view.pending)
        tokens = [*view.pending, *self._tokens]
        if not tokens and not self._asks:
            raise InvalidInput("this pass has no input and reads nothing; give it tokens, a sampler or a probe")
        positions, mix = self._place(view.next_position, pending), self._mix
        if self._uses:
            mix = AdapterMix.of([*(() if mix is None else mix.uses), *self._uses])
        masks = self._bind(view, positions)
        check_recurrent(
            context.engine.config,
            masks,
            positions,
            view.positions,
            next_position=view.next_position,
            causal=self._causal,
            pending=pending - self._raw_pending,
        )
        return Pass(
            tokens=tuple(tokens),
            positions=positions,
            masks=masks,
            readouts=self._readouts(context, view, tokens),
            pending=pending,
            causal=self._causal,
            commit=self._commit,
            feeds=tuple(Feed(pending + row, handle.first + i) for row, handle, i in self._feeds),
            adapters=None if mix is None else (mix,) * len(tokens),
        )

    def _place(self, first: int, pending: int) -> Sequence[int]:
        config = self._context.engine.config
        limit = config.max_positions
        count = pending + len(self._positions)
        if count and first + count <= limit and self._positions.count(None) == len(self._positions):
            return range(first, first + count)
        positions, following = [], first
        for given in [*([None] * pending), *self._positions]:
            position = following if given is None else given
            check_position(position, limit, why=config.limit_reason)
            following = max(following, position + 1)
            positions.append(position)
        return tuple(positions)

    def _bind(self, view: ContextView, positions: Sequence[int]) -> tuple[Brle | None, ...] | None:
        """The attention mask of every token of the pass, or None for plain causal attention over live slots."""
        pending, rows = len(view.pending), len(self._tokens)
        base, total = view.length, view.length + pending + rows
        if self._mask is None and view.live is None:
            return None
        plain = [None if view.live is None else view.live(base + i + 1) for i in range(pending + rows)]
        if self._mask is None:
            return tuple(plain)
        live = None if view.live is None else view.live(total)
        at = np.fromiter(chain(view.positions, positions), np.int64) if self._mask.needs_positions else None
        masks: list[Brle | None] = [*plain[:pending]]
        if self._mask.covers_pending or self._raw_pending:
            masks = [*self._over_live(self._mask.bind(base, pending, positions=at), live)]
        if not self._raw_pending:
            end = None if self._causal else total
            bound = self._mask.bind(base + pending, rows, causal=self._causal, total=end, positions=at, pending=pending)
            masks += self._over_live(bound, live)
        before = pending - self._raw_pending  # the rows of a flush are its pending tokens
        check_rows(masks, read=self._mask.polarity, pending=before)
        check_windows(self._context.engine.config, masks, chain(view.positions, positions), base, before)
        if self._causal and live is None:
            masks = [None if m is not None and m.all() else m for m in masks]  # an explicit causal mask equals none
        return None if all(m is None for m in masks) else tuple(masks)

    def _over_live(self, rows: Sequence[Brle], live: Brle | None) -> Sequence[Brle]:
        """The rows without discarded slots; raises for a raw row that attends to one."""
        assert self._mask is not None
        if live is None:
            return rows
        for i, row in enumerate(rows):
            if self._mask.rows is not None and (row & ~live[0 : len(row)]).any():
                raise InvalidMask(f"row {i} of the attention mask attends to a slot that was discarded; mask it (1)")
        return [row & live[0 : len(row)] for row in rows]

    def _readouts(self, context: Context, view: ContextView, tokens: list[int]) -> tuple[Readout, ...]:
        for row in {r for given in (*self._logit_masks, *self._biases) for r in given.rows or ()}:
            self._check_row(row, view)
        draws: Counter[int] = Counter()
        fresh: int | None = None
        readouts = []
        for ask in self._asks:  # one for each draft of a round: what few passes have comes last
            row, what = self._row(ask, context, view), ask.what
            allowed = self._allowed(row - len(view.pending)) if self._logit_masks else None
            if not isinstance(what, Sampling):
                readouts.append(Readout(row, what, allowed=allowed, async_mask=self._async_mask))
                continue
            own = what.seed if what.seed is not None else context.seed
            if own is None:
                own = fresh = fresh if fresh is not None else fresh_seed()
            drawn = Readout(row, what, allowed, own, draws[row], async_mask=self._async_mask)
            if what.penalizes:
                drawn = self._counting(drawn, ask, view, tokens)
            if self._biases:
                drawn = replace(drawn, bias=self._bias(row - len(view.pending)))
            if drawn.is_biased:
                _check_some_left(drawn)
            readouts.append(drawn)
            draws[row] += 1
        return tuple(readouts)

    def _row(self, ask: _Ask, context: Context, view: ContextView) -> int:
        """The row of the pass for an index of the builder; -(n+1) is the token just before the rows."""
        index, n, pending = ask.row, len(self._tokens), len(view.pending)
        self._check_row(index, view)
        row = pending + (index if index >= 0 else n + index)
        if row == BEFORE and view.length == context._table.length:  # else a pass in flight provides it
            check_reread(context._table, ask.what)
        return row

    def _check_row(self, index: int, view: ContextView) -> None:
        n = len(self._tokens)
        low = -(n + 1) if view.length + len(view.pending) > 0 else -n
        if not low <= index < n:
            span = f"{low} to {n - 1}" if low <= n - 1 else "none: the context is empty and the pass has no input"
            raise OutOfRange(f"row {index} is out of range; this pass has {n} rows, indices {span}")

    def _counting(self, drawn: Readout, ask: _Ask, view: ContextView, tokens: list[int]) -> Readout:
        """The draw with the ids that penalties count: those given, or the context's tokens up to its row."""
        by_rows = ask.history is None
        past = (*view.tokens, *tokens[: drawn.row + 1]) if ask.history is None else ask.history
        counted = past if ask.generated is None else ask.generated
        return replace(
            drawn,
            seen=tuple(sorted({*past, *counted})),
            generated=dict(Counter(counted)),
            seen_by_rows=by_rows,  # counted again once fed tokens are known
            generated_by_rows=by_rows and ask.generated is None,
            counts_fed=self._counts_fed,
        )

    def _allowed(self, row: int) -> np.ndarray | None:
        """The logit masks of a row, ANDed."""
        allowed = None
        for mask in self._logit_masks:
            if mask.is_for(row, len(self._tokens)):
                allowed = mask.values if allowed is None else allowed & mask.values
        if allowed is not None and not allowed.any():
            raise InvalidMask("the logit masks together allow no token; relax one of them (1 = allowed)")
        return allowed

    def _bias(self, row: int) -> np.ndarray | None:
        """The biases of a row, added up."""
        biases = [bias.values for bias in self._biases if bias.is_for(row, len(self._tokens))]
        return None if not biases else biases[0] if len(biases) == 1 else np.sum(biases, axis=0)


def _rows(rows: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if rows is None else tuple(integers(rows, "rows"))


def _check_some_left(readout: Readout) -> None:
    """Raise if masks and biases together leave a sampler nothing."""
    bias = readout.dense_bias
    if bias is not None:
        left = bias > -np.inf if readout.allowed is None else readout.allowed & (bias > -np.inf)
        if not left.any():
            raise InvalidMask("the bias is -inf for every token that the logit masks allow; leave at least one")


def _values(source: Job) -> Mapping[int, object]:
    """The values that a finished pass sampled."""
    if source.abandoned:
        raise PassFailed("the pass whose token is fed failed or was cancelled, so there is no token")
    return source.values
