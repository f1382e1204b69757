"""Speculative sampling by rejection: a draft is kept with the probability that makes the text distributed as ever.

    a draft x, drawn from q        kept with probability min(1, p(x) / q(x))
    if not                         p becomes the part of it that q does not cover, and the next draft is tried
    no draft kept                  a token is drawn from what p has become

(Leviathan et al. 2023, Chen et al. 2023; for several drafts of one site, Miao et al. 2023.) The tokens are others than
without drafts, and equally likely. The logits of every row with drafts come to the host, so a round costs more than one
that compares draws; it pays where a drafter draws tokens by itself and says how likely each was.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.errors import PassFailed
from headway.base.rng import uniform
from headway.base.specs.probes import Logits
from headway.kernels.host.sampling import RowSampler, processed_logprobs
from headway.program.generation.draws import Drawing
from headway.program.output import ProbeHandle

if TYPE_CHECKING:
    from headway.program.forward import Forward


class Rejection:
    """How the drafts of one round are chosen. `position` is that of the token before them, `tokens` the sequence."""

    def __init__(self, drawing: Drawing, tokens: Sequence[int], position: int) -> None:
        self._drawing, self._tokens, self._position = drawing, tokens, position
        self._rows: dict[int, tuple[ProbeHandle[Any], RowSampler]] = {}  # by site

    def read(
        self,
        forward: Forward,
        site: int,
        generated: Sequence[int],
        allowed: np.ndarray | None,
        *,
        row: int,
        drafts: Sequence[int],
    ) -> None:
        """Read the logits of a site, after which these tokens have been generated, drafts last."""
        drawing, vocab = self._drawing, forward._context.engine.vocab_size
        forbidden = list(drawing.end_ids) if len(generated) < drawing.least else []
        how = drawing.sampler
        if drawing.words is not None:
            how, words = drawing.words.sampler(how, (*self._tokens, *drafts))
            forbidden += words
        if forbidden:
            allowed = np.ones(vocab, bool) if allowed is None else allowed.copy()
            allowed[forbidden] = False
        past = {*self._tokens, *generated} if drawing.penalize_prompt else set(generated)
        counts = Counter(generated)
        sampler = RowSampler(
            how,
            allowed=allowed,
            seen=np.array(sorted(past), np.int64),
            generated=(np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64)),
        )
        self._rows[site] = forward.probe(row, Logits()), sampler

    def choose(
        self, values: Mapping[int, object], site: int, depth: int, drafts: Sequence[tuple[int, np.ndarray | None]]
    ) -> int:
        """The token after a site: one of the drafts, or another."""
        handle, sampler = self._rows[site]
        logits = values[handle.first]
        assert isinstance(logits, np.ndarray)
        if np.isnan(logits).any():
            raise PassFailed("the model's logits are not a number at a drafted row")
        chance = np.exp(processed_logprobs(logits, sampler))
        for number, (token, drawn_from) in enumerate(drafts):
            likely = 1.0 if drawn_from is None else drawn_from[token]
            if self._uniform(depth, 1 + number) * likely < chance[token]:
                return token
            rest = chance.copy()
            if drawn_from is None:
                rest[token] = 0.0
            else:
                rest = np.maximum(rest - drawn_from, 0.0)
            if (total := rest.sum()) > 0:  # else rounding alone has refused the draft
                chance = rest / total
        reached = chance.cumsum()
        at = int(np.searchsorted(reached, self._uniform(depth, 0) * reached[-1], side="right"))
        return int(min(at, np.flatnonzero(chance)[-1]))

    def _uniform(self, depth: int, ordinal: int) -> float:
        return uniform(self._drawing.seed, self._position + depth, ordinal)
