"""Beam search: several continuations grown side by side, the likeliest kept. Written with what every program has.

    context ──fork──▶ beam 0 ─┬─▶ beam 0 ──▶ …     the first child of a beam takes its context over,
                              ├─▶ beam 1 ──▶ …     its sisters fork it: committed pages are shared,
                              └─▶ beam 2 ──▶ …     only the page that is being written is copied

Each step is one `Forward` a beam, submitted together, so that all share one batch; `Logits` brings the scores. What is
chosen from them is worked out here as `transformers` does it, in float32 and operation by operation, so that both
choose the same tokens. That includes exact ties, which fall as `torch.topk` on the CPU lets them fall.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from headway.base.brle import whole
from headway.base.errors import ContextLengthExceeded, InvalidInput, PassFailed, WrongType
from headway.base.probes import Logits
from headway.base.rng import LIMIT, fresh_seed, uniform
from headway.base.samplers import real
from headway.program.ids import token_ids

if TYPE_CHECKING:
    from headway.program.context import Context

BEAMS = 1024  # beams at most
NEVER = -1.0e9  # the score of what must not be chosen; transformers' number, which its ties depend on


@dataclass(frozen=True)
class Beam:
    """One finished sequence: its tokens without the end token, and its log-probability over length ** length_penalty.

    `finish` is "eos" or "length"; `seed` is that of a sampled search.
    """

    tokens: tuple[int, ...]
    score: float
    finish: str
    seed: int | None = None


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
    do_sample: bool = False,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    adopt: bool = False,
) -> list[Beam]:
    """The best continuations of a context, best first; fewer than asked when so many with any probability do not exist.

    The end tokens are the model's own unless `eos_ids` names others. With `do_sample` the candidates of each step are
    drawn without replacement, at `temperature`, among the `top_k` and `top_p` best of each beam (all, unless given).
    The context is left as it was; with `adopt` the best sequence is computed behind it, on the beams' pages where they
    are still cached. One beam is no beam search: that is `ctx.generate(...)`.
    """
    rules = _Rules(
        beams=_beams(num_beams),
        max_tokens=whole(max_tokens, "max_tokens", low=1),
        length_penalty=real(length_penalty, "length_penalty"),
        early_stopping=_early(early_stopping),
        returned=_returned(num_return_sequences, num_beams),
        min_tokens=whole(min_tokens, "min_tokens"),
        repetition_penalty=_above_0(repetition_penalty, "repetition_penalty"),
        ngram=whole(no_repeat_ngram_size, "no_repeat_ngram_size"),
        eos=_ends(context, eos_ids),
        draws=_draws(context, do_sample, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed),
    )
    _check_lengths(context, rules)
    search = _Search(rules, context.tokens, context.engine.config.max_positions - context.room() - 1)
    with _Crowd(context.fork()) as crowd:
        following = search.step(await crowd.read())
        while following is not None:
            crowd.follow([parent for parent, _ in following])
            following = search.step(await crowd.read([token for _, token in following]))
        found = search.results()
        if adopt and found[0].tokens:
            await context.forward().input(found[0].tokens).execute()
    return found


def banned_by_ngrams(tokens: Sequence[int], n: int) -> set[int]:
    """The tokens that would complete a run of n tokens which `tokens` has already; none with n = 0."""
    n = whole(n, "n")
    if n == 0 or len(tokens) < n:
        return set()
    last = tuple(tokens[len(tokens) - n + 1 :])
    runs = (tuple(tokens[at : at + n]) for at in range(len(tokens) - n + 1))
    return {run[-1] for run in runs if run[:-1] == last}


# -- the contexts --------------------------------------------------------------------------------------------------


class _Crowd:
    """The contexts of the running beams. One context stands for every beam until they part."""

    def __init__(self, first: Context) -> None:
        self._contexts = [first]
        self._open = {first}
        self._lock = first.engine.lock

    async def read(self, tokens: Sequence[int] = ()) -> np.ndarray:
        """Feed each beam its token, if there are any, and read what it says about the next: [beams, V]."""
        forwards = [context.forward() for context in self._contexts]
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


# -- the choices ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draws:
    temperature: float
    top_k: int
    top_p: float
    seed: int


@dataclass(frozen=True)
class _Rules:
    beams: int
    max_tokens: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    returned: int
    min_tokens: int
    repetition_penalty: float
    ngram: int
    eos: tuple[int, ...]
    draws: _Draws | None

    @property
    def candidates(self) -> int:
        """K: so many that beams to go on with are left when every end token is among the best."""
        return max(2, 1 + len(self.eos)) * self.beams


@dataclass(frozen=True)
class _End:
    """A sequence that has ended; without probability it takes a place and is no result."""

    tokens: tuple[int, ...]
    finish: str
    possible: bool


class _Search:
    """What is known of the running beams and of the best that ended. B beams, V tokens, K candidates."""

    def __init__(self, rules: _Rules, prompt: tuple[int, ...], position: int) -> None:
        self.rules, self.prompt, self.position = rules, prompt, position
        self.made = 0
        self.paths: list[tuple[int, ...]] = [()] * rules.beams
        self.scores = torch.full((rules.beams,), NEVER)  # [B]
        self.scores[0] = 0.0  # the beams are all the same one at first
        self.ends: list[_End | None] = [None] * rules.beams
        self.end_scores = torch.full((rules.beams,), NEVER)  # [B]

    def step(self, logits: np.ndarray) -> list[tuple[int, int]] | None:
        """Choose by the beams' logits: (parent, token) of each beam that goes on, or None when the search is over."""
        if np.isnan(logits).any():
            raise PassFailed("the model's logits are not a number at the end of a beam; no token can be chosen")
        scores, chosen = self._candidates(torch.from_numpy(logits))
        self.made += 1
        moves = [divmod(flat, logits.shape[1]) for flat in chosen.tolist()]
        paths = [(*self.paths[parent], token) for parent, token in moves]
        last = self.made == self.rules.max_tokens
        ended = torch.tensor([last or token in self.rules.eos for _, token in moves])  # [K]
        running = scores + ended.float() * NEVER
        heirs = torch.topk(running, self.rules.beams).indices
        self._collect(paths, scores, ended)
        self.paths, self.scores = [paths[i] for i in heirs.tolist()], running[heirs]
        return None if bool(ended.all()) or self._settled() else [moves[i] for i in heirs.tolist()]

    def results(self) -> list[Beam]:
        """The best sequences, best first."""
        seed = None if self.rules.draws is None else self.rules.draws.seed
        pairs = zip(self.ends, self.end_scores.tolist(), strict=True)
        found = [Beam(end.tokens, score, end.finish, seed) for end, score in pairs if end and end.possible]
        if not found:
            raise InvalidInput(
                f"no sequence is possible: after {self.made} tokens every one that may follow has no probability; "
                "relax no_repeat_ngram_size or min_tokens, or a penalty that makes scores too large to compare"
            )
        return found[: self.rules.returned]

    def _candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and flat (beam, token) indices of the K continuations that come into question."""
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
        chosen = drawn(sums, self.rules.candidates, draws.seed, self.position + self.made)
        return sums[chosen], chosen

    def _adjust(self, row: Tensor, tokens: tuple[int, ...]) -> None:
        """Penalise and forbid tokens of one beam's row [V], in place."""
        rules = self.rules
        if rules.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(tokens)))
            old = row[seen]
            row[seen] = torch.where(old < 0, old * rules.repetition_penalty, old / rules.repetition_penalty)
        banned = banned_by_ngrams(tokens, rules.ngram)
        if self.made < rules.min_tokens:
            banned.update(rules.eos)
        if banned:
            row[torch.tensor(sorted(banned))] = -torch.inf

    def _collect(self, paths: list[tuple[int, ...]], scores: Tensor, ended: Tensor) -> None:
        """Keep the best B of those that ended before and those that end now among the first B candidates."""
        first = ended & (torch.arange(len(ended)) < self.rules.beams)
        level = scores / self.made**self.rules.length_penalty + (~first).float() * NEVER
        possible = (scores > NEVER / 2).tolist()
        new = [self._end(paths[i], possible[i]) if ends else None for i, ends in enumerate(first.tolist())]
        every = [*self.ends, *new]
        merged = torch.cat((self.end_scores, level))
        kept = torch.topk(merged, self.rules.beams).indices
        self.ends, self.end_scores = [every[i] for i in kept.tolist()], merged[kept]

    def _end(self, path: tuple[int, ...], possible: bool) -> _End:
        eos = path[-1] in self.rules.eos
        return _End(path[:-1] if eos else path, "eos" if eos else "length", possible)

    def _settled(self) -> bool:
        """Whether the beams that run cannot, or need not, beat those that ended."""
        full = None not in self.ends
        rules = self.rules
        hopeful = rules.early_stopping == "never" and rules.length_penalty > 0
        length = rules.max_tokens if hopeful else self.made
        best = float(self.scores[0] / length**rules.length_penalty)
        worst = float(self.end_scores.min()) if full else NEVER
        return best <= worst or (full and rules.early_stopping is True)


def _filtered(rows: Tensor, draws: _Draws, keep: int) -> Tensor:
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

    What has no probability comes last, by index, when there is too little else.
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


def _beams(value: Any) -> int:
    if whole(value, "num_beams", low=1, below=BEAMS + 1) == 1:
        raise InvalidInput("num_beams is 1; beam search takes 2 or more, and ctx.generate(...) is the search with one")
    return int(value)


def _returned(value: Any, beams: int) -> int:
    number = whole(value, "num_return_sequences", low=1)
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
    if (number := real(value, name)) <= 0:
        raise InvalidInput(f"{name} is {number}; it must be above 0 (1 leaves scores as they are)")
    return number


def _ends(context: Context, given: Iterable[int] | None) -> tuple[int, ...]:
    vocab = context.engine.vocab_size
    ids = context.engine.eos_ids if given is None else token_ids(given, vocab, "eos_ids")
    ends = tuple(dict.fromkeys(ids))
    if max(2, 1 + len(ends)) > vocab:
        raise InvalidInput(f"eos_ids has {len(ends)} of {vocab} tokens; leave at least one that does not end a text")
    return ends


def _draws(context: Context, do_sample: bool, **knobs: Any) -> _Draws | None:
    if not isinstance(do_sample, bool):
        raise WrongType(f"do_sample is {do_sample!r}; it takes True or False")
    if not do_sample:
        if unused := [f"{name}={value!r}" for name, value in knobs.items() if value is not None]:
            raise InvalidInput(f"{', '.join(unused)} has no meaning without sampling; give do_sample=True, or leave it")
        return None
    temperature, top_k, top_p, seed = (knobs[name] for name in ("temperature", "top_k", "top_p", "seed"))
    share = 1.0 if top_p is None else real(top_p, "top_p")
    if not 0 < share <= 1:
        raise InvalidInput(f"top_p is {share}; it must be above 0 and at most 1 (1 keeps every token)")
    own = seed if seed is not None else context.seed
    return _Draws(
        temperature=1.0 if temperature is None else _above_0(temperature, "temperature"),
        top_k=0 if top_k is None else whole(top_k, "top_k"),
        top_p=share,
        seed=fresh_seed() if own is None else whole(own, "seed", below=LIMIT),
    )


def _check_lengths(context: Context, rules: _Rules) -> None:
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
