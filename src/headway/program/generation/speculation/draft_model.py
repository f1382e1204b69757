"""Drafts of another model: a smaller one in an engine of its own, or this model's own first layers.

    drafter   … 7 3 │ 5 9 2          its context follows the sequence, and goes on by itself for a few tokens
    sequence  … 7 3 │ 5 9 4          what was drafted and not kept is cut off again before the next draft

With a seed both models draw with the same random numbers at the same position, so that they agree more often than two
that draw by themselves. For `verify="rejection"` the drafter draws with numbers of its own, and says how likely each
token was.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, OutOfPages, OutOfRange, Unsupported, WrongType
from headway.base.rng import uniform
from headway.base.specs.adapters import OUTSIDE, AdapterMix, LoadedWeights
from headway.base.specs.probes import Logits
from headway.base.specs.samplers import Sampling
from headway.base.text import short_repr
from headway.kernels.host.sampling import RowSampler, processed_logprobs
from headway.models.adapters.adapter import Adapter
from headway.models.adapters.low_rank import HEAD, Target
from headway.program.adapters import AdapterArgument, mix_of
from headway.program.checks.ids import common
from headway.program.generation.draws import Drawing
from headway.program.generation.speculation.drafter import MAX_DRAFT, Draft
from headway.runtime.adapters import LoadedAdapter

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.engine import Engine
    from headway.program.execution import Execution
    from headway.program.output import Output

OWN_ORDINAL = 1 << 32  # of draws that are independent of those of the model that is drafted for
OWN_PAGES = 1024  # of the first layers, at most
_same_tokens: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
_first_layers: weakref.WeakKeyDictionary[Any, dict[int, tuple[Any, Any]]] = weakref.WeakKeyDictionary()
_first_parts: weakref.WeakKeyDictionary[LoadedAdapter, dict[int, Adapter | None]] = weakref.WeakKeyDictionary()


class ModelDrafter:
    """Drafts with a model in an engine, in a context of its own there."""

    def __init__(self, max_tokens: int, adaptive: bool) -> None:
        self._most, self.adaptive = check_integer(max_tokens, "max_tokens", 1, MAX_DRAFT), adaptive
        self._sequence: list[int] = []
        self._known = 0  # tokens of the sequence that the context has
        self._drafted: list[int] = []  # what it has after them
        self._context: Context | None = None
        self._prefill: Execution[Output] | None = None
        self._sampler, self._vocab, self._rejects = Sampling(temperature=0), 0, False
        self._adapter: AdapterMix | None = None  # what its tokens are computed under

    @property
    def _model(self) -> Engine:
        raise NotImplementedError

    def bind(self, context: Context, drawing: Drawing, *, rejects: bool) -> None:
        """Draw as this generation does; raises unless both models have the same tokens."""
        check_same_tokens(context.engine, self._model)
        self.draw_as(drawing.sampler, context.engine.vocab_size, rejects=rejects)

    def draw_as(self, how: Sampling, vocab: int, *, rejects: bool) -> None:
        """Draw as a generation does, of a model with so many tokens; `rejects` where it verifies by rejection."""
        self._sampler = replace(how, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        self._vocab, self._rejects = vocab, rejects and how.temperature > 0

    def accept(self, tokens: Sequence[int]) -> None:
        """Follow the sequence. A prompt is computed from now on, concurrently with the other model."""
        self._sequence += tokens
        if len(tokens) > MAX_DRAFT and self._prefill is None and self._fits:
            self._prefill = self._follow().forward()._under(self._adapter).execute()

    async def draft(self, tokens: Sequence[int], limit: int) -> Draft:
        """What the model says comes next."""
        try:
            return await self._draft(limit)
        except OutOfPages:  # other contexts of its engine have them
            self.release()
            return Draft(())

    async def _draft(self, limit: int) -> Draft:
        if (prefill := self._prefill) is not None:
            self._prefill = None
            await prefill
        count = min(limit, self._most)
        if not self._fits:
            return Draft(())
        context = self._follow()
        if self._rejects:
            return await self._draws(context, count)
        try:
            drafting = context.generate(self._sampler, max_tokens=count, stop_only=True, adapter=self._adapter)
            tokens = await drafting.tokens()
        finally:
            self._drafted = list(context.tokens[self._known :])
        return Draft(self._within(tokens))

    async def _draws(self, context: Context, count: int) -> Draft:
        """Draws that do not depend on the other model's, each with its distribution."""
        chances: list[np.ndarray] = []
        for _ in range(count):
            forward = context.forward()._under(self._adapter)
            logits = forward.probe(-1, Logits())
            position = context.next_position - 1
            row = (await forward.execute()).logits(logits)
            chance = np.exp(processed_logprobs(row, RowSampler(self._sampler)))
            reached = chance.cumsum()
            number = uniform(self._sampler.seed or 0, position, OWN_ORDINAL) * reached[-1]
            token = min(int(np.searchsorted(reached, number, side="right")), len(chance) - 1)
            if token >= self._vocab:
                break
            chance = chance[: self._vocab] / chance[: self._vocab].sum()
            chances.append(np.pad(chance, (0, self._vocab - len(chance))))
            self._drafted.append(token)
            context.fill([token])
        return Draft(tuple(self._drafted), probabilities=chances)

    def release(self) -> None:
        """Give its pages back; the next draft begins anew."""
        if self._prefill is not None:
            self._prefill.cancel()
        if self._context is not None:
            self._context.release()
        self._context = self._prefill = None
        self._known, self._drafted = 0, []

    @property
    def _fits(self) -> bool:
        """Whether the sequence and a draft are inside its model's context limit."""
        return len(self._sequence) + self._most < self._model.config.max_positions

    def _follow(self) -> Context:
        """Its context, with the tokens of the sequence."""
        if self._context is None:
            self._context, self._known, self._drafted = self._model.context(), 0, []
        after = self._sequence[self._known :]
        same = common(after, self._drafted)
        if same == len(after) > 0:  # the last token is needed again, to say what follows it
            same -= 1
        self._context.truncate(len(self._drafted) - same)
        self._context.fill(after[same:])
        self._known, self._drafted = len(self._sequence), []
        return self._context

    def _within(self, tokens: list[int]) -> tuple[int, ...]:
        """The tokens before the first that the other model does not have."""
        beyond = next((i for i, token in enumerate(tokens) if token >= self._vocab), len(tokens))
        return tuple(tokens[:beyond])


class DraftModel(ModelDrafter):
    """Drafts with a model of the same vocabulary, loaded in `engine`: `max_tokens` at a time at most.

    A draft costs a pass of the small model for every token of it, and the prompt is computed there too. The engine
    stays the caller's; it may serve any number of generations, and anything else. Adapters of the generation are for
    the other model: `adapter` is what this one drafts under.
    """

    def __init__(
        self, engine: Engine, *, adapter: AdapterArgument | None = None, max_tokens: int = 8, adaptive: bool = True
    ) -> None:
        super().__init__(max_tokens, adaptive)
        if not hasattr(engine, "context"):
            raise WrongType(f"DraftModel was given {short_repr(engine)}; give it an Engine of the smaller model")
        self._engine, self._adapter = engine, engine._mix(adapter)

    def __repr__(self) -> str:
        return f"DraftModel({self._engine!r}, max_tokens={self._most})"

    def copy(self) -> DraftModel:
        """One for another sequence, with the same engine."""
        return DraftModel(self._engine, adapter=self._adapter, max_tokens=self._most, adaptive=self.adaptive)

    @property
    def _model(self) -> Engine:
        return self._engine


class OwnLayers(ModelDrafter):
    """Drafts with the first `layers` layers of the model itself, read through its final norm and its head.

    They run as a model of their own that shares the weights. It has its own KV cache for these layers, so a slot costs
    `layers` / L more memory, and a draft token `layers` / L of a pass, besides the head. A model that was not trained
    to leave early agrees with its own first layers only if these are most of it. They draft under the generation's
    adapters, as far as these change the same layers or the head.
    """

    def __init__(self, layers: int, *, max_tokens: int = 4, adaptive: bool = True) -> None:
        super().__init__(max_tokens, adaptive)
        self._layers = check_integer(layers, "layers", 1)
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        return f"OwnLayers({self._layers}, max_tokens={self._most})"

    def copy(self) -> OwnLayers:
        """One for another sequence."""
        return OwnLayers(self._layers, max_tokens=self._most, adaptive=self.adaptive)

    def bind(self, context: Context, drawing: Drawing, *, rejects: bool) -> None:
        self._engine = first_layers(context.engine, self._layers)
        if drawing.adapter is not None:
            few = [(_first_part(adapter, self._layers), scale) for adapter, scale in drawing.adapter.uses]
            self._adapter = mix_of(self._engine, [(part, scale) for part, scale in few if part is not None])
        super().bind(context, drawing, rejects=rejects)

    @property
    def _model(self) -> Engine:
        assert self._engine is not None
        return self._engine


def first_layers(engine: Engine, count: int) -> Engine:
    """An engine of a model's first layers, which shares its weights; one for each number, kept as long as the model."""
    config = engine.config
    if not 1 <= count < config.layers:
        raise OutOfRange(f"OwnLayers({count}): this model has {config.layers} layers; give 1 to {config.layers - 1}")
    if engine._backend.ranks is not None:
        raise Unsupported(
            f"OwnLayers({count}) shares the weights of one process, and tensor_parallel is "
            f"{engine._backend.tensor_parallel}; draft by hw.PromptLookup() or by a model of its own"
        )
    engines, decoder = _first_layers.setdefault(engine, {}), engine._backend.decoder
    source, small = engines.get(count, (None, None))
    if small is None or not small.alive or source() is not decoder:  # update_weights makes another decoder
        small = type(engine)(
            decoder.first_layers(count),
            threads=engine.info.threads,
            page_size=engine.page_size,
            pages=min(engine.pages, OWN_PAGES),
            deterministic=engine.deterministic,
        )
        engines[count] = weakref.ref(decoder), small
    return small


def _first_part(loaded: LoadedWeights, count: int) -> Adapter | None:
    """The part of an adapter that changes a model's first layers or its head; None where there is none."""
    assert isinstance(loaded, LoadedAdapter)
    parts = _first_parts.setdefault(loaded, {})
    if count not in parts:
        bound, head = loaded.bound, loaded.bound.head
        layers = bound.layers[:count]
        pairs = {Target(number, role): pair for number, layer in enumerate(layers) for role, pair in layer.items()}
        pairs |= {Target(OUTSIDE, role): pair for role, pair in bound.outer.items()}
        if (whole := bound.outer.get("input_projection")) is not None:  # a part of it is each layer's
            first = len(whole.b) // len(bound.layers) * count
            pairs[Target(OUTSIDE, "input_projection")] = replace(whole, b=whole.b[:first])
        pairs |= {} if head is None else {HEAD: head}
        parts[count] = Adapter(pairs, name=loaded.name, in_order=True) if pairs else None
    return parts[count]


def check_same_tokens(engine: Engine, drafter: Engine) -> None:
    """Raise unless an id is the same token for both models."""
    if not (engine.has_tokenizer and drafter.has_tokenizer):
        if engine.vocab_size != drafter.vocab_size:
            raise InvalidInput(
                f"the draft model has {drafter.vocab_size} tokens and the model {engine.vocab_size}; "
                "a draft model must have the same vocabulary"
            )
        return
    ours, theirs = engine.tokenizer, drafter.tokenizer
    alike = _same_tokens.setdefault(ours, weakref.WeakSet())
    if ours is theirs or theirs in alike:
        return
    for id, (mine, other) in enumerate(zip_longest(ours.vocabulary(), theirs.vocabulary())):
        if mine != other:
            raise InvalidInput(
                f"token {id} is {short_repr(other)} for the draft model and {short_repr(mine)} for the model; "
                "a draft model must have the same tokenizer"
            )
    alike.add(theirs)
