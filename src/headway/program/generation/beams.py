"""Beam search: several continuations grown side by side, the likeliest kept. Written with what every program has.

    context ──fork──▶ beam 0 ─┬─▶ beam 0 ──▶ …     the first child of a beam takes its context over,
                              ├─▶ beam 1 ──▶ …     its sisters fork it: committed pages are shared,
                              └─▶ beam 2 ──▶ …     only the page that is being written is copied

Each step is one `Forward` a beam, submitted together, so that all share one batch; `Logits` brings the scores. What is
chosen from them is worked out in `beam_choices`. This owns the beams' contexts and gives every one of them back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from headway.base.checks import check_integer, check_number
from headway.base.errors import ContextLengthExceeded, InvalidInput, WrongType
from headway.base.probes import Logits
from headway.base.rng import LIMIT, fresh_seed
from headway.program.generation.beam_choices import Continuation, Draws, Rules, Search
from headway.program.generation.parameters import BEAMS
from headway.program.ids import token_ids

if TYPE_CHECKING:
    from headway.base.masks import Mask
    from headway.program.context import Context
    from headway.program.engine import Engine
    from headway.program.forward import Forward


async def beam_search(
    context: Context,
    *,
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_return_sequences: int = 1,
    min_tokens: int = 0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    eos_ids: Iterable[int] | None = None,
    stop_ids: Iterable[int] = (),
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    attention_mask: Mask | None = None,
    adapter: object = None,
    adopt: bool = False,
) -> list[Continuation]:
    """The best continuations of a context, best first; fewer than asked when so many with any probability do not exist.

    The end tokens are the model's own unless `eos_ids` names others; `stop_ids` add to them. With `do_sample` the
    candidates of each step are drawn without replacement, at `temperature`, among the `top_k` and `top_p` best of each
    beam (all, unless given). `attention_mask` and `adapter` bind every pass. The context is left as it was; with
    `adopt` the best sequence is computed behind it, on the beams' pages where they are still cached. One beam is no
    beam search: that is `ctx.generate(...)`.
    """
    own = context.engine.eos_ids if eos_ids is None else token_ids(eos_ids, context.engine.vocab_size, "eos_ids")
    stops = frozenset(token_ids(stop_ids, context.engine.vocab_size, "stop_ids"))
    rules = Rules(
        beams=_beams(num_beams),
        max_tokens=check_integer(max_tokens, "max_tokens", low=1),
        length_penalty=check_number(length_penalty, "length_penalty"),
        early_stopping=_early(early_stopping),
        returned=_returned(num_return_sequences, num_beams),
        min_tokens=check_integer(min_tokens, "min_tokens"),
        repetition_penalty=_above_0(repetition_penalty, "repetition_penalty"),
        ngram=check_integer(no_repeat_ngram_size, "no_repeat_ngram_size"),
        eos=_ends(context.engine.vocab_size, [*own, *sorted(stops)]),
        stops=stops.difference(own),
        draws=_draws(context, do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    )
    _check_lengths(context, rules)
    search = Search(rules, context.tokens, context.engine.config.max_positions - context.room() - 1)
    binding = _Binding(attention_mask, adapter)
    with _Crowd(context.fork(), binding) as crowd:
        following = search.step(await crowd.read())
        while following is not None:
            crowd.follow([parent for parent, _ in following])
            following = search.step(await crowd.read([token for _, token in following]))
        found = search.results()
        if adopt and found[0].tokens:
            await binding.forward(context).input(found[0].tokens).execute()
    return [replace(one, text=spelled(context.engine, one.tokens)) for one in found]


def spelled(engine: Engine, tokens: Iterable[int]) -> str:
    """The text of generated tokens, as a stream of them would give it; "" for a model without a tokenizer."""
    if not engine.has_tokenizer:
        return ""
    stream, words = engine.stream(), engine.tokenizer.vocab_size
    return stream.push([token for token in tokens if token < words]) + stream.flush()


# -- the contexts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Binding:
    """What binds every pass of a search."""

    attention_mask: Mask | None
    adapter: object

    def forward(self, context: Context) -> Forward:
        forward = context.forward()
        if self.attention_mask is not None:
            forward.attention_mask(self.attention_mask)
        if self.adapter is not None:
            forward.adapter(self.adapter)
        return forward


class _Crowd:
    """The contexts of the running beams. One context stands for every beam until they part."""

    def __init__(self, first: Context, binding: _Binding) -> None:
        self._binding = binding
        self._contexts = [first]
        self._open = {first}
        self._lock = first.engine.lock

    async def read(self, tokens: Sequence[int] = ()) -> np.ndarray:
        """Feed each beam its token, if there are any, and read what it says about the next: [beams, V]."""
        forwards = [self._binding.forward(context) for context in self._contexts]
        for forward, token in zip(forwards, tokens):
            forward.input([token])
        handles = [forward.probe(-1, Logits()) for forward in forwards]
        with self._lock:  # the worker finds all of them, and makes one batch of them
            running = [forward.execute() for forward in forwards]
        outputs = await asyncio.gather(*running)
        return np.stack([out.logits(handle) for out, handle in zip(outputs, handles, strict=True)])

    def follow(self, parents: Sequence[int]) -> None:
        """One context for each new beam, behind its parent's; beams without children are released."""
        old = self._contexts
        taken: set[Context] = set()
        heirs: list[Context] = []
        for parent in parents:
            context = old[parent if len(old) > 1 else 0]
            heirs.append(context.fork() if context in taken else context)
            taken.add(context)
            self._open.add(heirs[-1])
        self._contexts = heirs
        self._release(self._open.difference(heirs))

    def _release(self, contexts: Iterable[Context]) -> None:
        for context in list(contexts):
            context.release()
            self._open.remove(context)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release(self._open)


# -- checking ------------------------------------------------------------------------------------------------------


def _beams(value: Any) -> int:
    if check_integer(value, "num_beams", low=1, high=BEAMS) == 1:
        raise InvalidInput("num_beams is 1; beam search takes 2 or more, and ctx.generate(...) is the search with one")
    return int(value)


def _returned(value: Any, beams: int) -> int:
    number = check_integer(value, "num_return_sequences", low=1)
    if number > beams:
        raise InvalidInput(f"num_return_sequences is {number}; with num_beams={beams} it is at most {beams}")
    return number


def _early(value: Any) -> bool | Literal["never"]:
    if isinstance(value, bool):
        return value
    if value != "never":
        raise InvalidInput(f"early_stopping is {value!r}; it takes False, True or 'never'")
    return "never"


def _above_0(value: Any, name: str) -> float:
    if (number := check_number(value, name)) <= 0:
        raise InvalidInput(f"{name} is {number}; it must be above 0 (1 leaves scores as they are)")
    return number


def _ends(vocab: int, ids: Iterable[int]) -> tuple[int, ...]:
    ends = tuple(dict.fromkeys(ids))
    if max(2, 1 + len(ends)) > vocab:
        raise InvalidInput(f"eos_ids has {len(ends)} of {vocab} tokens; leave at least one that does not end a text")
    return ends


def _draws(context: Context, do_sample: bool, **knobs: Any) -> Draws | None:
    if not isinstance(do_sample, bool):
        raise WrongType(f"do_sample is {do_sample!r}; it takes True or False")
    if not do_sample:
        if unused := [f"{name}={value!r}" for name, value in knobs.items() if value is not None]:
            raise InvalidInput(f"{', '.join(unused)} has no meaning without sampling; give do_sample=True, or leave it")
        return None
    temperature, top_k, top_p, seed = (knobs[name] for name in ("temperature", "top_k", "top_p", "seed"))
    share = 1.0 if top_p is None else check_number(top_p, "top_p")
    if not 0 < share <= 1:
        raise InvalidInput(f"top_p is {share}; it must be above 0 and at most 1 (1 keeps every token)")
    own = seed if seed is not None else context.seed
    return Draws(
        temperature=1.0 if temperature is None else _above_0(temperature, "temperature"),
        top_k=0 if top_k is None else check_integer(top_k, "top_k"),
        top_p=share,
        seed=fresh_seed() if own is None else check_integer(own, "seed", high=LIMIT - 1),
    )


def _check_lengths(context: Context, rules: Rules) -> None:
    if not context.tokens:
        raise InvalidInput("the context is empty, so there is nothing to continue; fill it first")
    if rules.min_tokens > rules.max_tokens:
        raise InvalidInput(f"min_tokens is {rules.min_tokens} and max_tokens {rules.max_tokens}; it must not be larger")
    if rules.max_tokens > (room := context.room()):
        raise ContextLengthExceeded(
            f"max_tokens is {rules.max_tokens}; behind the {len(context.tokens)} tokens of the context this model's "
            f"limit of {context.engine.config.max_positions} leaves {max(room, 0)}"
        )
    try:
        _ = float(rules.max_tokens) ** abs(rules.length_penalty)
    except OverflowError:
        raise InvalidInput(
            f"length_penalty is {rules.length_penalty}; {rules.max_tokens} to that power is no number any more"
        ) from None
