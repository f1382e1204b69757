"""`draw`: the engine's sampler on any array of logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike

from headway.base.checks import check_integer, number_array
from headway.base.errors import InvalidInput, InvalidMask
from headway.base.rng import LIMIT, fresh_seed
from headway.base.specs.samplers import Sampler, Sampling, bias_array, resolve
from headway.program.checks.ids import token_ids
from headway.program.checks.readouts import check_one_draw
from headway.runtime.passes import Readout
from headway.runtime.readout import sample_row


def draw(
    logits: ArrayLike,
    sampler: Sampler,
    *,
    seed: int | None = None,
    position: int = 0,
    ordinal: int = 0,
    history: Iterable[int] = (),
    generated: Iterable[int] | None = None,
) -> int:
    """The token that the engine draws at a row with these logits [V]: same filters, penalties and random numbers.

        token = hw.draw(2 * strong - weak, hw.TopP(0.9), seed=7, position=ctx.next_position - 1)

    A draw depends on the seed (the sampler's own if it is left out, or fresh entropy), on the position id of the row
    that the logits are of, and on the ordinal of the draw at that row. Penalties count `history`; presence and
    frequency only `generated` when it is given. Logits of -inf are never drawn.
    """
    row = check_logits(logits)
    how = resolve(sampler)
    check_one_draw(how)
    _check_bias(how, row.size)
    chosen = how.seed if seed is None else check_integer(seed, "seed", high=LIMIT - 1)
    past = token_ids(history, row.size, "history")
    counted = past if generated is None else token_ids(generated, row.size, "generated")
    readout = Readout(
        row=0,
        what=how,
        seed=fresh_seed() if chosen is None else chosen,
        ordinal=check_integer(ordinal, "ordinal", high=LIMIT - 1),
        seen=sorted({*past, *counted}),
        generated=Counter(counted),
    )
    return sample_row(row, readout, check_integer(position, "position", high=LIMIT - 1))


def check_logits(values: ArrayLike, name: str = "the logits") -> np.ndarray:
    """The row as floats that may be drawn from."""
    array = number_array(values, name)
    if array.ndim != 1 or array.size == 0:
        raise InvalidInput(f"{name} have shape {array.shape}; expected one row, [V]")
    row = np.array(array, np.float64 if array.dtype.kind != "f" or array.itemsize > 4 else np.float32)
    if np.isnan(row).any():
        raise InvalidInput(f"{name} are not a number at token {int(np.flatnonzero(np.isnan(row))[0])}")
    if not (row > -np.inf).any():
        raise InvalidMask(f"{name} are -inf for every token; at least one must be possible")
    return row


def _check_bias(how: Sampling, vocab: int) -> None:
    token_ids([token for token, _ in how.bias], vocab, "logit_bias ids")
    if how.dense_bias is not None:
        bias_array(how.dense_bias, "logit_bias", vocab)
