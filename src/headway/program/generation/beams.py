"""Beam search: several continuations grown together, the likeliest kept. Written with the public API alone.

    context ──fork──▶ beam 0 ─┬─▶ beam 0 ──▶ …     the first child of a beam takes its context over,
                              ├─▶ beam 1 ──▶ …     its siblings fork it: committed pages are shared,
                              └─▶ beam 2 ──▶ …     only the page that is being written is copied

Each step is one `Forward` for each beam, submitted together, so that all share one batch; `Logits` reads the scores.
`BeamSearch` chooses from them as `transformers` does, in float32 and operation by operation, so that both choose the
same tokens. That includes exact ties, which fall as `torch.topk` on the CPU lets them fall.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, Literal, Self

import numpy as np
import torch
from torch import Tensor

from headway.base.errors import ContextLengthExceeded, InvalidInput, PassFailed
from headway.base.generation import PARAMETERS
from headway.base.probes import Logits, Value_co
from headway.base.rng import fresh_seed, uniform
from headway.base.text import short_repr
from headway.program.generation.ngrams import banned_by_ngrams
from headway.program.ids import token_ids

if TYPE_CHECKING:
    from headway.base.masks import Mask
    from headway.program.context import Context
    from headway.program.engine import Engine
    from headway.program.forward import Forward


NEVER = -1.0e9  # the score of what must not be chosen; transformers' value, which its ties depend on


@dataclass(frozen=True)
class Continuation(Generic[Value_co]):
    """One finished sequence: its tokens without the end token, its text, and why it ended.

    `score` is a beam's log-probability over length ** length_penalty, nan where no beams ran; `seed` is that of its
    draws, None where nothing was drawn; `probes` are a probe's values, one a step. A model without a tokenizer has no
    text: it is "" then.
    """

    tokens: tuple[int, ...]
    text: str
    finish: str
    score: float = math.nan
    seed: int | None = None
    probes: tuple[Value_co, ...] = field(default=(), compare=False)


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
    adopt: bool = False,
) -> list[Continuation]:
    """The best continuations of a context, best first; fewer than asked for when no more have any probability.

    The end tokens are the model's own unless `eos_ids` names others; `stop_ids` add to them. With `do_sample` the
    candidates of each step are drawn without replacement, at `temperature`, among the `top_k` and `top_p` best of each
    beam (all, unless given). `attention_mask` applies to every pass. The context is left as it was; with `adopt` the
    best sequence is appended and computed, on the beams' pages where they are still cached. For one beam, use
    `ctx.generate(...)`.
    """
    own = context.engine.eos_ids if eos_ids is None else token_ids(eos_ids, context.engine.vocab_size, "eos_ids")
    stops = frozenset(token_ids(stop_ids, context.engine.vocab_size, "stop_ids"))
    rules = BeamRules(
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
    )
    _check_lengths(context, rules)
    text_before = context.text_before
    search = BeamSearch(rules, context.tokens, context.engine.config.max_positions - context._room() - 1)
    with _BeamContexts(context.fork(), attention_mask) as beams:
        following = search.step(await beams.read())
        while following is not None:
            beams.follow([parent for parent, _ in following])
            following = search.step(await beams.read([token for _, token in following]))
        best = search.results()
        if adopt and best[0].tokens:
            await _masked(context, attention_mask).input(best[0].tokens).execute()
    return [replace(one, text=decoded(context.engine, one.tokens, text_before)) for one in best]


def decoded(engine: Engine, tokens: Iterable[int], prompt: Sequence[int]) -> str:
    """The text of tokens generated after a prompt, as a stream would give it; "" without a tokenizer."""
    if not engine.has_tokenizer:
        return ""
    stream, words = engine.stream(after=prompt), engine.tokenizer.vocab_size
    return stream.push([token for token in tokens if token < words]) + stream.flush()


# -- the contexts --------------------------------------------------------------------------------------------------


def _masked(context: Context, attention_mask: Mask | None) -> Forward:
    forward = context.forward()
    return forward if attention_mask is None else forward.attention_mask(attention_mask)


class _BeamContexts:
    """The contexts of the running beams. One context stands for every beam until they part."""

    def __init__(self, first: Context, attention_mask: Mask | None) -> None:
        self._attention_mask = attention_mask
        self._contexts = [first]
        self._open = {first}
        self._lock = first.engine._lock

    async def read(self, tokens: Sequence[int] = ()) -> np.ndarray:
        """The logits of every beam [B, V], after feeding each beam its token, if any are given."""
        forwards = [_masked(context, self._attention_mask) for context in self._contexts]
        for forward, token in zip(forwards, tokens):
            forward.input([token])
        handles = [forward.probe(-1, Logits()) for forward in forwards]
        with self._lock:  # the worker gets all of them at once and makes one batch
            running = [forward.execute() for forward in forwards]
        outputs = await asyncio.gather(*running)
        return np.stack([out.logits(handle) for out, handle in zip(outputs, handles, strict=True)])

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


# -- choosing ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BeamSampling:
    """How the candidates of a sampled search are drawn."""

    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class BeamRules:
    """The parameters of a search, checked."""

    beams: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    returned: int
    min_tokens: int
    repetition_penalty: float
    ngram: int
    eos: tuple[int, ...]  # every token that ends a beam
    stops: frozenset[int]  # those of them that the caller named
    draws: BeamSampling | None

    @property
    def candidates(self) -> int:
        """K: enough that B of them go on even if every end token is among the best."""
        return max(2, 1 + len(self.eos)) * self.beams


@dataclass(frozen=True)
class _EndedBeam:
    """A sequence that has ended; one without probability takes a place and is not a result."""

    tokens: tuple[int, ...]
    finish: str
    possible: bool


class BeamSearch:
    """Chooses the beams that go on and those that end. Knows no contexts. B beams, V tokens, K candidates."""

    def __init__(self, rules: BeamRules, prompt: tuple[int, ...], position: int) -> None:
        self.rules, self.prompt, self.position = rules, prompt, position
        self.length = 0  # of every running beam
        self.paths: list[tuple[int, ...]] = [()] * rules.beams
        self.scores = torch.full((rules.beams,), NEVER)  # [B]
        self.scores[0] = 0.0  # the beams are all the same one at first
        self.ends: list[_EndedBeam | None] = [None] * rules.beams
        self.end_scores = torch.full((rules.beams,), NEVER)  # [B]

    def step(self, logits: np.ndarray) -> list[tuple[int, int]] | None:
        """(parent, token) of each beam that goes on, chosen by the beams' logits; None when the search is over."""
        if np.isnan(logits).any():
            raise PassFailed("the model's logits are NaN at the end of a beam; no token can be chosen")
        scores, chosen = self._candidates(torch.from_numpy(logits))
        self.length += 1
        moves = [divmod(flat, logits.shape[1]) for flat in chosen.tolist()]
        paths = [(*self.paths[parent], token) for parent, token in moves]
        last = self.length == self.rules.max_tokens
        ended = torch.tensor([last or token in self.rules.eos for _, token in moves])  # [K]
        running = scores + ended.float() * NEVER
        heirs = torch.topk(running, self.rules.beams).indices
        self._collect(paths, scores, ended)
        self.paths, self.scores = [paths[i] for i in heirs.tolist()], running[heirs]
        return None if bool(ended.all()) or self._settled() else [moves[i] for i in heirs.tolist()]

    def results(self) -> list[Continuation]:
        """The best sequences, best first, without their texts."""
        seed = None if self.rules.draws is None else self.rules.draws.seed
        pairs = zip(self.ends, self.end_scores.tolist(), strict=True)
        found = [Continuation(end.tokens, "", end.finish, score, seed) for end, score in pairs if end and end.possible]
        if not found:
            raise InvalidInput(
                f"no sequence is possible: after {self.length} tokens every one that may follow has no probability; "
                "relax no_repeat_ngram_size or min_tokens, or a penalty that makes scores too large to compare"
            )
        return found[: self.rules.returned]

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and flat (beam, token) indices of the K best continuations."""
        rows = torch.log_softmax(logits, dim=-1)  # [1, V] at first, then [B, V]
        for row, path in zip(rows, self.paths):
            self._adjust(row, (*self.prompt, *path))
        draws, keep = self.rules.draws, 1 + (len(self.rules.eos) or 1)
        if draws is not None:
            rows = _filtered(rows / draws.temperature, draws, keep)
        sums = (rows + self.scores[:, None]).flatten()  # [B * V]
        if draws is None:
            best = torch.topk(sums, self.rules.candidates)
            return best.values, best.indices
        chosen = drawn(sums, self.rules.candidates, draws.seed, self.position + self.length)
        return sums[chosen], chosen

    def _adjust(self, row: Tensor, tokens: tuple[int, ...]) -> None:
        """Penalize and forbid tokens of one beam's row [V], in place."""
        rules = self.rules
        if rules.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(tokens)))
            old = row[seen]
            row[seen] = torch.where(old < 0, old * rules.repetition_penalty, old / rules.repetition_penalty)
        banned = banned_by_ngrams(tokens, rules.ngram)
        if self.length < rules.min_tokens:
            banned.update(rules.eos)
        if banned:
            row[torch.tensor(sorted(banned))] = -torch.inf

    def _collect(self, paths: list[tuple[int, ...]], scores: Tensor, ended: Tensor) -> None:
        """Keep the best B of those that ended before and those of the first B candidates that end now."""
        first = ended & (torch.arange(len(ended)) < self.rules.beams)
        level = scores / self.length**self.rules.length_penalty + (~first).float() * NEVER
        possible = (scores > NEVER / 2).tolist()
        new = [self._end(paths[i], possible[i]) if ends else None for i, ends in enumerate(first.tolist())]
        every = [*self.ends, *new]
        merged = torch.cat((self.end_scores, level))
        kept = torch.topk(merged, self.rules.beams).indices
        self.ends, self.end_scores = [every[i] for i in kept.tolist()], merged[kept]

    def _end(self, path: tuple[int, ...], possible: bool) -> _EndedBeam:
        if path[-1] not in self.rules.eos:
            return _EndedBeam(path, "length", possible)
        return _EndedBeam(path[:-1], "stop" if path[-1] in self.rules.stops else "eos", possible)

    def _settled(self) -> bool:
        """Whether the beams that run cannot, or need not, beat those that ended."""
        full = None not in self.ends
        rules = self.rules
        hopeful = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if hopeful else self.length
        best = float(self.scores[0] / length**rules.length_penalty)
        worst = float(self.end_scores.min()) if full else NEVER
        return best <= worst or (full and rules.early_stopping is True)


def _filtered(rows: Tensor, draws: BeamSampling, keep: int) -> Tensor:
    """Rows [R, V] with everything outside top-k and top-p at -inf; `keep` tokens stay at least."""
    if 0 < draws.top_k < rows.shape[1]:
        edge = torch.topk(rows, min(max(draws.top_k, keep), rows.shape[1])).values[:, -1:]
        rows = rows.masked_fill(rows < edge, -torch.inf)
    if draws.top_p < 1.0:
        ranked = rows.sort(dim=-1, descending=True, stable=True)
        probs = ranked.values.double().softmax(dim=-1)
        outside = probs.cumsum(dim=-1) - probs >= draws.top_p  # those before it reach the share already
        outside[:, :keep] = False
        rows = rows.masked_fill(outside.scatter(1, ranked.indices, outside), -torch.inf)
    return rows


def drawn(scores: Tensor, count: int, seed: int, position: int) -> Tensor:
    """Indices of `count` draws without replacement, with probabilities softmax(scores) [N], in the order drawn.

    What has no probability comes last, by index, when nothing else is left.
    """
    peak = scores.max()
    weights = torch.where(scores == -torch.inf, 0.0, (scores - peak).double().exp()).numpy()
    found: list[int] = []
    for ordinal in range(count):
        live = np.flatnonzero(weights)
        if live.size == 0:
            break
        reached = np.cumsum(weights[live])
        at = np.searchsorted(reached, uniform(seed, position, ordinal) * reached[-1], side="right")
        found.append(int(live[min(int(at), live.size - 1)]))
        weights[found[-1]] = 0.0
    if len(found) < count:
        rest = np.setdiff1d(np.arange(scores.numel()), found)
        found += rest[: count - len(found)].tolist()
    return torch.tensor(found)


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
