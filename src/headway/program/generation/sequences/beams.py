"""Beam search: several continuations grown together, the likeliest kept. Written with the public API alone.

    context ──fork──▶ beam 0 ─┬─▶ beam 0 ──▶ …     the first child of a beam takes its context over,
                              ├─▶ beam 1 ──▶ …     its siblings fork it: committed pages are shared,
                              └─▶ beam 2 ──▶ …     only the page that is being written is copied

Each step is one `Forward` for each beam, submitted together, so that all share one batch; `Logits` reads the scores.
`beam_choice.py` chooses from them, as `transformers` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

import numpy as np

from headway.base.errors import ContextLengthExceeded, InvalidInput
from headway.base.rng import fresh_seed
from headway.base.specs.adapters import AdapterMix
from headway.base.specs.generation import PARAMETERS
from headway.base.specs.probes import Logits
from headway.base.text import short_repr
from headway.program.checks.ids import token_ids
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar
from headway.program.generation.constrained import GenerationConstraint
from headway.program.generation.draws import Probes, add_probes
from headway.program.generation.hooks import LogitsHook, RunningBeam, changed_logits
from headway.program.generation.ngrams import copied
from headway.program.generation.results import Continuation
from headway.program.generation.sequences.beam_choice import (
    BeamRules,
    BeamSampling,
    BeamSearch,
    EndedBeam,
    log_probabilities,
)
from headway.program.generation.steps import probed
from headway.program.generation.transcript import Transcript
from headway.program.generation.word_bias import WordBias

if TYPE_CHECKING:
    from headway.base.specs.masks import Mask
    from headway.program.context import Context
    from headway.program.engine import Engine
    from headway.program.forward import Forward


T = TypeVar("T")


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
    stop: Sequence[str] = (),
    constrain: Grammar | Constraint | None = None,
    probe: Probes = None,
    adapter: AdapterMix | None = None,
    words: WordBias | None = None,
    logits: LogitsHook | None = None,
    adopt: bool = False,
) -> list[Continuation[Any]]:
    """The best continuations of a context, best first; fewer than asked for when no more have any probability.

    The end tokens are the model's own unless `eos_ids` names others; `stop_ids` add to them, and so do the strings of
    `stop`. With `do_sample` the candidates of each step are drawn without replacement, at `temperature`, among the
    `top_k` and `top_p` best of each beam (all, unless given). `attention_mask` and `adapter` apply to every pass. Each
    beam follows a copy of the constraint, and has what the probes read before each of its tokens. `logits` gets the
    log-probabilities after every beam before anything else looks at them, as transformers' processors do. The context
    is left as it was; with `adopt` the best sequence is appended and computed, on the beams' pages where they are still
    cached, and the constraint has accepted it. For one beam, use `ctx.generate(...)`.
    """
    own = context.engine.eos_ids if eos_ids is None else token_ids(eos_ids, context.engine.vocab_size, "eos_ids")
    stops = frozenset(token_ids(stop_ids, context.engine.vocab_size, "stop_ids"))
    rules = BeamRules(
        vocab=context.engine.vocab_size,
        beams=_beams(num_beams),
        max_tokens=_checked("max_tokens", max_tokens),
        length_penalty=_checked("length_penalty", length_penalty),
        early_stopping=_checked("early_stopping", early_stopping),
        returned=_returned(num_return_sequences, num_beams),
        min_tokens=_checked("min_tokens", min_tokens),
        repetition_penalty=_checked("repetition_penalty", repetition_penalty),
        ngram=_checked("no_repeat_ngram_size", no_repeat_ngram_size),
        eos=_ends(context.engine.vocab_size, [*own, *sorted(stops)]),
        stops=stops.difference(own),
        draws=_draws(context, do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
        words=words,
    )
    _check_lengths(context, rules)
    text_before, seed = context.text_before, None if rules.draws is None else rules.draws.seed
    first = await _transcript(context, tuple(stop), constrain)
    if first is not None and first.rule.finished:
        return [Continuation((), "", "constraint", 0.0, seed)]
    search = BeamSearch(rules, context.tokens, context.engine.config.max_positions - context._room() - 1, first)
    with _BeamContexts(context.fork(), attention_mask, adapter, probe) as beams:
        following: list[tuple[int, int]] | None = []
        while following is not None:
            allowed = search.allowed()
            read, probes = await beams.read(allowed, [token for _, token in following])
            rows = log_probabilities(read)
            if logits is not None:
                rows = await beams.hooked(logits, rows, [beam.tokens for beam in search.beams])
            grown = search.grow(rows, allowed, probes)
            await grown.settle()
            following = search.choose(grown)
            if following is not None:
                beams.follow([parent for parent, _ in following])
        best = [_continuation(context.engine, end, score, seed, text_before) for end, score in search.results()]
        if adopt and best[0].tokens:
            await _prepared(context, attention_mask, adapter).input(best[0].tokens).execute()
    if adopt and constrain is not None and not isinstance(constrain, Grammar):
        for token in best[0].tokens:
            constrain.accept(token)
    return best


async def _transcript(
    context: Context, stops: tuple[str, ...], constrain: Grammar | Constraint | None
) -> Transcript | None:
    """What follows constraint and stop strings, before the first token; None where there are none."""
    if not stops and constrain is None:
        return None
    rule = GenerationConstraint(context, copied(constrain))
    await rule.compile_async()
    transcript = Transcript(context.engine, stops, rule)
    transcript.begin(context.tokens, context.text_start)
    await rule.settle()
    return transcript


def _continuation(
    engine: Engine, end: EndedBeam, score: float, seed: int | None, prompt: Sequence[int]
) -> Continuation[Any]:
    text = decoded(engine, end.tokens, prompt) if end.beam.transcript is None else end.beam.text()
    return Continuation(end.tokens, text, end.finish, score, seed, end.beam.probes)


def decoded(engine: Engine, tokens: Iterable[int], prompt: Sequence[int]) -> str:
    """The text of tokens generated after a prompt, as a stream would give it; "" without a tokenizer."""
    if not engine.has_tokenizer:
        return ""
    stream, words = engine.stream(after=prompt), engine.tokenizer.vocab_size
    return stream.push([token for token in tokens if token < words]) + stream.flush()


# -- the contexts --------------------------------------------------------------------------------------------------


def _prepared(context: Context, attention_mask: Mask | None, adapter: AdapterMix | None) -> Forward:
    forward = context.forward()._under(adapter)
    return forward if attention_mask is None else forward.attention_mask(attention_mask)


class _BeamContexts:
    """The contexts of the running beams. One context stands for every beam until they part."""

    def __init__(self, first: Context, attention_mask: Mask | None, adapter: AdapterMix | None, probe: Probes) -> None:
        self._attention_mask, self._adapter, self._probe = attention_mask, adapter, probe
        self._contexts = [first]
        self._open = {first}
        self._lock = first.engine._lock

    async def read(
        self, allowed: list[np.ndarray | None], tokens: Sequence[int] = ()
    ) -> tuple[np.ndarray, list[tuple[Any, ...]]]:
        """The logits after every beam [B, V], and what the probes read there.

        Each beam is fed its token first, if any are given. Probes with `masked=True` see what is allowed.
        """
        forwards = [_prepared(context, self._attention_mask, self._adapter) for context in self._contexts]
        for forward, token in zip(forwards, tokens):
            forward.input([token])
        handles = [forward.probe(-1, Logits()) for forward in forwards]
        probes = [add_probes(forward, self._probe) for forward in forwards]
        if self._probe is not None:
            for forward, mask in zip(forwards, allowed, strict=True):
                if mask is not None and mask.any():
                    forward.mask(mask)
        with self._lock:  # the worker gets all of them at once and makes one batch
            running = [forward.execute() for forward in forwards]
        outputs = await asyncio.gather(*running)
        logits = np.stack([out.logits(handle) for out, handle in zip(outputs, handles, strict=True)])
        return logits, [probed(out, probe) for out, probe in zip(outputs, probes, strict=True)]

    async def hooked(self, hook: LogitsHook, rows: np.ndarray, tokens: Sequence[tuple[int, ...]]) -> np.ndarray:
        """What a hook makes of the log-probabilities after each beam [B, V]. Hooks that are async run together."""

        async def one(row: np.ndarray, context: Context, generated: tuple[int, ...]) -> np.ndarray:
            mark = context._table.stamp, context.pending
            changed = await changed_logits(hook, row, RunningBeam(context, generated))
            if mark != (context._table.stamp, context.pending):
                raise InvalidInput("the logits hook has changed the context of a beam; a hook may read it and fork it")
            return changed.astype(np.float32)

        results = await together([one(*each) for each in zip(rows, self._contexts, tokens)])
        return np.stack(results)

    def follow(self, parents: Sequence[int]) -> None:
        """Give each new beam a context that continues its parent's; beams without children are released."""
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


async def together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """All results, in order. When one fails, the others are cancelled and have ended before the error is raised."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# -- checking ------------------------------------------------------------------------------------------------------


def _checked(name: str, value: Any) -> Any:
    return PARAMETERS[name].check(value)


def _beams(value: Any) -> int:
    if (beams := _checked("num_beams", value)) == 1:
        raise InvalidInput("num_beams is 1; beam search takes 2 or more, and ctx.generate(...) is the search with one")
    return beams


def _returned(value: Any, beams: int) -> int:
    if (number := _checked("num_return_sequences", value)) > beams:
        raise InvalidInput(f"num_return_sequences is {number}; with num_beams={beams} it is at most {beams}")
    return number


def _ends(vocab: int, ids: Iterable[int]) -> tuple[int, ...]:
    ends = tuple(dict.fromkeys(ids))
    if max(2, 1 + len(ends)) > vocab:
        raise InvalidInput(f"eos_ids has {len(ends)} of {vocab} tokens; leave at least one that does not end a text")
    return ends


def _draws(context: Context, do_sample: bool, **given: Any) -> BeamSampling | None:
    values = {name: _checked(name, value) for name, value in given.items() if value is not None}
    if not _checked("do_sample", do_sample):
        if unused := [f"{name}={short_repr(value)}" for name, value in values.items()]:
            raise InvalidInput(f"{', '.join(unused)} has no effect without sampling; give do_sample=True, or leave it")
        return None
    if values.get("temperature") == 0:
        raise InvalidInput("temperature is 0.0; it must be above 0 to draw (do_sample=False takes the likeliest)")
    defaults = {name: PARAMETERS[name].default for name in ("temperature", "top_k", "top_p")}
    seed = context.seed if context.seed is not None else fresh_seed()
    return BeamSampling(**{"seed": seed, **defaults, **values})


def _check_lengths(context: Context, rules: BeamRules) -> None:
    if not context.tokens:
        raise InvalidInput("the context is empty, so there is nothing to continue; fill it first")
    if rules.min_tokens > rules.max_tokens:
        raise InvalidInput(f"min_tokens is {rules.min_tokens} and max_tokens {rules.max_tokens}; it must not be larger")
    if rules.max_tokens > (room := context._room()):
        raise ContextLengthExceeded(
            f"max_tokens is {rules.max_tokens}; after the {len(context.tokens)} tokens of the context this model's "
            f"limit of {context.engine.config.max_positions} leaves {max(room, 0)}"
        )
    try:
        _ = float(rules.max_tokens) ** abs(rules.length_penalty)
    except OverflowError:
        raise InvalidInput(
            f"length_penalty is {rules.length_penalty}; {rules.max_tokens} to that power overflows"
        ) from None
