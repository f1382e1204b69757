"""Checks of a pass against its model and context. Each raises with the value, the limit and a hint."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, InvalidMask, OutOfRange, Unsupported, WrongType
from headway.base.rng import LIMIT
from headway.base.specs.brle import Brle
from headway.base.specs.masks import check_rows, logit_mask, row_name
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampling, bias_array
from headway.base.text import short_repr
from headway.kernels.host.attention import ChunkWindow, is_near
from headway.kv.table import PageTable
from headway.models.config import ModelConfig
from headway.program.checks.ids import position_ids, token_ids
from headway.program.checks.readouts import check_readout
from headway.runtime.batch import reads_final_state
from headway.runtime.passes import BEFORE, Pass

if TYPE_CHECKING:
    from headway.program.context import Context


def check_windows(
    config: ModelConfig, masks: Sequence[Brle | None], positions: Iterable[int], base: int, pending: int = 0
) -> None:
    """Raise if a mask leaves a row nothing inside the model's sliding window; the first `pending` are not rows."""
    windows = {w for w in config.windows if w is not None}
    known = np.fromiter(positions, np.int64) if windows else np.empty(0, np.int64)
    for window in windows:
        for i, mask in enumerate(masks):
            if mask is None:
                continue
            near = is_near(window, known[base + i], known[: len(mask)])
            if not (mask.to_bool() & near).any():
                raise InvalidMask(
                    f"{row_name(i, pending)} attends to nothing inside this model's own {_span(window)} positions; "
                    "let it attend to itself"
                )


def _span(window: int | ChunkWindow) -> str:
    return f"chunk of {window.size}" if isinstance(window, ChunkWindow) else f"window of {window}"


def check_recurrent(
    config: ModelConfig,
    masks: Sequence[Brle | None] | None,
    positions: Sequence[int],
    before: Iterable[int],
    *,
    next_position: int,
    causal: bool = True,
    pending: int = 0,
) -> None:
    """Raise for what recurrent layers cannot do: they take in every slot, once, in order."""
    if not config.recurrent_layers:
        return
    what = f"a {config.family} model has recurrent layers, which take in every slot before a row, in order"
    masked = next((i for i, mask in enumerate(masks or ()) if mask is not None), None)
    if not causal or masked is not None:
        which = "this pass is not causal" if not causal else f"{row_name(masked or 0, pending)} does not attend to all"
        raise Unsupported(f"{which}, and {what}; leave out the attention mask")
    if isinstance(positions, range) and positions.start >= next_position:
        return
    known = set(before)
    for position in positions:
        if position in known:
            raise Unsupported(f"position {position} is given again, and {what}; give each position once")
        known.add(position)


def check_reread(table: PageTable, what: Sampling | Probe) -> None:
    """Raise unless the last token can be read again: its state is kept, or all it attended to still exists."""
    if table.state is not None and reads_final_state(what):
        return
    live, mask = table.live(table.length), table.masks[-1]
    lost = not live.all() if mask is None else (mask[0 : table.length] & ~live).any() or mask.any(table.length)
    if lost or table.length - 1 in table.partial:
        raise Unsupported(
            "the last token cannot be computed again: slots it attended to were discarded or cut off; "
            "read it in the pass that computes it, or give the pass an input"
        )


def check_pass(context: Context, work: Pass) -> None:
    """Raise unless a pass that was built by hand fits this context, as one of the builder does."""
    if not isinstance(work, Pass):
        raise WrongType(f"the pass is {short_repr(work)} of type {type(work).__name__}; it must be a Pass")
    config, table, pending = context.engine.config, context._table, list(context.pending)
    token_ids(work.tokens, config.vocab_size)
    position_ids(work.positions, config.max_positions, why=config.limit_reason)
    if work.tokens and list(work.tokens[: work.pending]) != pending:
        raise InvalidInput(
            f"the context has {len(pending)} pending tokens; a pass must start with all of them and say so "
            "with pending=, or the context be flushed first"
        )
    if work.feeds:
        raise InvalidInput("a pass built by hand cannot feed handles; use ctx.forward().input(handle)")
    for mix in work.adapters or ():
        if mix is not None and not all(context.engine._adapters.has(adapter) for adapter, _ in mix.uses):
            raise InvalidInput("a pass names an adapter that this engine has not loaded; use fwd.adapter(...)")
    _check_masks(table, work)
    check_recurrent(
        config,
        work.masks,
        work.positions,
        table.positions,
        next_position=table.next_position,
        causal=work.causal,
        pending=work.pending,
    )
    check_windows(config, work.masks or (), chain(table.positions, work.positions), table.length)
    _check_readouts(config, table, work)


def _check_masks(table: PageTable, work: Pass) -> None:
    base, end = table.length, table.length + len(work.tokens)
    rows = [(i, m) for i, m in enumerate(work.masks or ()) if m is not None]
    for i, mask in rows:
        if not isinstance(mask, Brle):
            raise WrongType(f"mask {i} is {short_repr(mask)}; it must be a Brle (1 = attend) or None")
        wanted = {base + i + 1} if work.causal else {base + i + 1, end}
        if len(mask) not in wanted:
            raise InvalidMask(f"mask {i} covers {len(mask)} slots; {sorted(wanted)} are possible")
        if table.has_discards and (mask & ~table.live(len(mask))).any():
            raise InvalidMask(f"mask {i} attends to a slot that was discarded")
    check_rows(work.masks or ())


def _check_readouts(config: ModelConfig, table: PageTable, work: Pass) -> None:
    first, vocab = BEFORE if table.length else 0, config.vocab_size
    for readout in work.readouts:
        if not first <= readout.row < len(work.tokens):
            raise OutOfRange(f"a readout names row {readout.row}; this pass has rows 0 to {len(work.tokens) - 1}")
        if not isinstance(readout.what, Sampling | Probe):
            raise WrongType(
                f"a readout has {short_repr(readout.what)}; it must be a probe or a Sampling (samplers.resolve)"
            )
        check_integer(readout.seed, "seed", high=LIMIT - 1)
        check_integer(readout.ordinal, "ordinal", high=LIMIT - 1)
        check_readout(config, readout.what)
        if readout.row == BEFORE:
            check_reread(table, readout.what)
        if readout.allowed is not None:
            logit_mask(vocab, readout.allowed)
        if readout.bias is not None:
            bias_array(readout.bias, "a readout's bias", vocab)
        token_ids(readout.seen, vocab, "seen")
        token_ids(readout.generated, vocab, "generated")
