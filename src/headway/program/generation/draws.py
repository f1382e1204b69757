"""How a generation samples its tokens: sampler, seed, end tokens, masks, probe. A value, from which passes are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.rng import fresh_seed
from headway.base.specs.adapters import AdapterMix
from headway.base.specs.masks import Mask
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampler, Sampling, resolve
from headway.base.text import short_repr
from headway.program.generation.steps import Prepared, ProbeHandles
from headway.program.generation.transcript import Transcript
from headway.program.generation.word_bias import WordBias
from headway.program.output import SampleHandle
from headway.runtime.batch import reads_final_state
from headway.runtime.passes import AsyncLogitMask

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.forward import Forward

Probes: TypeAlias = Probe | tuple[Probe, ...] | None  # one, several, none


@dataclass(frozen=True)
class Drawing:
    """How tokens are sampled; the same for every token of a generation."""

    sampler: Sampling
    seed: int
    seeded: bool  # chosen by the user; otherwise every fork gets a seed of its own
    end_ids: frozenset[int]  # the tokens that end it
    least: int  # tokens that must come before an end token may
    probe: Probes
    attention: Mask | None  # what any row attends to
    penalize_prompt: bool
    adapter: AdapterMix | None = None  # what its tokens, and pending ones, are computed under
    words: WordBias | None = None  # sequences that must not come, or with a bias

    @staticmethod
    def of(
        context: Context,
        sampler: Sampler,
        *,
        end_ids: frozenset[int],
        least: int,
        probe: Probes,
        attention_mask: Mask | None,
        penalize_prompt: bool,
        adapter: AdapterMix | None = None,
        words: WordBias | None = None,
    ) -> Drawing:
        """From the arguments of `generate`; a sampler without a seed gets the context's."""
        what = resolve(sampler)
        chosen = what.seed if what.seed is not None else context.seed
        seed = fresh_seed() if chosen is None else chosen
        if what.seed != seed:
            what = replace(what, seed=seed)
        attention = _symbolic(attention_mask)
        if attention is not None and not context.engine.capabilities.masks:
            if not attention.is_causal:
                raise Unsupported(
                    f"attention_mask is {short_repr(attention_mask)}, and a {context.engine.config.family} model has "
                    "recurrent layers, which take in every slot before a row, in order; leave it out"
                )
            attention = None
        return Drawing(
            what, seed, chosen is not None, end_ids, least, probe, attention, penalize_prompt, adapter, words
        )

    def reseeded(self, seed: int | None) -> Drawing:
        """With another seed, or with fresh entropy."""
        sampler = replace(self.sampler, seed=fresh_seed() if seed is None else seed)
        assert sampler.seed is not None
        return replace(self, sampler=sampler, seed=sampler.seed, seeded=seed is not None)

    def prepared(
        self,
        context: Context,
        transcript: Transcript,
        fed: SampleHandle | None = None,
        mask: AsyncLogitMask | None = None,
    ) -> Prepared:
        """A pass that samples one token, after the context's last token or after one that is being sampled (`fed`).

        `mask` is the async logit mask that depends on the token being sampled.
        """
        forward, constraint = context.forward()._under(self.adapter), transcript.constraint
        if fed is not None:
            forward.input(fed)._counting_fed()
        if self.attention is not None:
            forward.attention_mask(self.attention)
        if mask is not None:
            forward.mask_async(mask)
        bits = None if constraint is None or mask is not None else constraint.mask()
        return Prepared(forward, *self.read(forward, transcript.generated, bits, fed=fed is not None))

    def read(
        self,
        forward: Forward,
        generated: Sequence[int],
        allowed: np.ndarray | None,
        *,
        row: int | None = None,
        fed: bool = False,
        drafts: Sequence[int] = (),
        tree: bool = False,
    ) -> tuple[SampleHandle, ProbeHandles]:
        """The draw and the probe at a row that comes after these generated tokens, and one more if it is `fed`.

        Without a row it is the last one, and the only one that is read. `drafts` are those that come before it; in a
        `tree` they are not all rows before it.
        """
        rows, row = (None, -1) if row is None else ([row], row)
        if allowed is not None:
            forward.mask(allowed, rows=rows)
        if len(generated) + fed < self.least and self.end_ids:
            forward.mask(forbid=sorted(self.end_ids), rows=rows)
        sampler = self.sampler
        if self.words is not None:
            assert not fed  # which words have begun depends on it
            sampler, forbidden = self.words.sampler(sampler, (*forward._context.tokens, *drafts))
            if forbidden:
                forward.mask(forbid=forbidden, rows=rows)
        counted = generated if sampler.penalizes else None
        history = None if self.penalize_prompt else counted
        if tree and self.penalize_prompt and counted is not None:
            history = (*forward._context.tokens, *drafts)
        handle = forward.sample([row], sampler, history=history, generated=counted)
        return handle, add_probes(forward, self.probe, row)

    def is_alike(self, generated: int) -> bool:
        """Whether all draws after n generated tokens differ only by their rows, and nothing else is read."""
        free = not self.end_ids or generated >= self.least
        return free and self.probe is None and not (self.looks_back or self.sampler.penalizes)

    @property
    def looks_back(self) -> bool:
        """Whether a token must be known before the pass that samples the next one can be built."""
        return self.words is not None

    def repeats(self, context: Context, transcript: Transcript) -> bool:
        """Whether the passes after the next differ only by their token and its mask, and nobody counts them."""
        table, windows = context._table, context.engine.config.windows
        plain = self._probes_repeat(transcript) and not table.has_discards
        sliding = any(window is not None for window in windows)
        known = self.attention is None or not (sliding or self.attention.needs_positions)
        free = not self.end_ids or len(transcript.generated) + 1 >= self.least
        reserved = table.working > -(-table.working_tokens // table.page_size)
        return plain and known and free and not reserved and table.token_budget is None

    def _probes_repeat(self, transcript: Transcript) -> bool:
        """Whether each row of a decoding sequence can be probed alike: its final state, and no mask of a token."""
        probes = self.probe if isinstance(self.probe, tuple) else (self.probe,)
        final = all(probe is None or reads_final_state(probe) for probe in probes)
        return self.probe is None or (final and transcript.constraint is None)

    def of_values(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The entry of `Step.probes` for what was probed at a row."""
        return (tuple(values),) if isinstance(self.probe, tuple) else tuple(values)


def add_probes(forward: Forward, probe: Probes, row: int = -1) -> ProbeHandles:
    """Read these at a row of a pass."""
    if probe is None or not isinstance(probe, tuple):
        return None if probe is None else forward.probe(row, probe)
    return tuple(forward.probe(row, one) for one in probe)


def _symbolic(mask: Mask | None) -> Mask | None:
    if mask is None or (isinstance(mask, Mask) and mask.rows is None):
        return mask
    if not isinstance(mask, Mask):
        raise WrongType(f"attention_mask is {short_repr(mask)}; a Mask is needed, such as Mask.window(64)")
    raise InvalidInput(
        f"attention_mask has {mask.rows} rows of its own, and a generation adds rows without end: give a mask "
        "that applies to any row, such as Mask.window(64) or Mask.sink(4, 64)"
    )
