"""DRY, XTC and mirostat: what changes a row's logits before its draw, from the tokens so far.

A generation applies them where a program's `logits` hook would, before it: the same on every device, with the seeds of
any draw. They see the model's logits of the tokens that may come; bias, penalties, temperature and filters come after.

DRY       "don't repeat yourself": a token that would continue a sequence that occurred before loses
          multiplier × base ** (length of the repeated sequence − allowed length)
XTC       "exclude top choices": by chance, all tokens of at least a probability go, but for the least likely of them
mirostat  keeps the surprise of the text near tau: truncates to what is less surprising than mu, which follows the
          surprise of what was drawn
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from headway.base.errors import InvalidInput
from headway.base.rng import uniform
from headway.base.specs.logits_rules import LogitsRuleValues
from headway.base.specs.samplers import Sampling

if TYPE_CHECKING:
    from headway.program.context import Context
    from headway.program.engine import Engine

XTC_ORDINAL = 1 << 32  # its draw at a row is apart from all draws of tokens there
MOST_EXPONENT = 100  # of DRY's base: longer repetitions cost no more
LOWEST = float(np.finfo(np.float32).min)  # a logit that DRY leaves at least: it rules no token out
ZIPF_TOKENS = 100  # that mirostat 1 estimates the distribution from


class LogitsRules:
    """The rules of one generation, and what they remember of it."""

    def __init__(self, values: LogitsRuleValues, sampler: Sampling, engine: Engine) -> None:
        if values.mirostat and sampler.temperature == 0:
            raise InvalidInput("mirostat draws tokens, and the temperature is 0; give a temperature above 0")
        assert sampler.seed is not None
        self._values, self._seed = values, sampler.seed
        self._breaks = _breaker_test(engine, values.dry_sequence_breakers) if values.dry_multiplier else None
        self._mirostat = Mirostat(values, sampler.temperature) if values.mirostat else None

    def apply(
        self, logits: np.ndarray, allowed: np.ndarray | None, context: Context, generated: Sequence[int]
    ) -> np.ndarray:
        """The logits [V] after the rules, in float32; -inf for tokens that are not allowed."""
        values, row = self._values, logits.astype(np.float64)
        if allowed is not None:
            row[~allowed] = -np.inf  # so that what may come is not ruled out altogether
        if not (row > -np.inf).any():
            return logits
        if self._breaks is not None:
            dry(row, context.tokens, values, self._breaks)
        if values.xtc_probability:
            chance = uniform(self._seed, context.next_position - 1, XTC_ORDINAL)
            xtc(row, values.xtc_probability, values.xtc_threshold, chance)
        if self._mirostat is not None:
            self._mirostat.follow(generated)
            self._mirostat.truncate(row)
        return row.astype(np.float32)


# -- the three algorithms ----------------------------------------------------------------------------------------------


def dry(row: np.ndarray, tokens: Sequence[int], values: LogitsRuleValues, breaks: Callable[[int], bool]) -> None:
    """Subtract from the logits [V] of tokens that would continue a repetition."""
    last_n = values.dry_penalty_last_n
    kept = tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]
    if len(kept) < 2:
        return
    history = np.array(kept, np.int64)
    longest = values.dry_allowed_length + MOST_EXPONENT
    limit = next((n for n, token in enumerate(kept[: -longest - 1 : -1]) if breaks(int(token))), longest)
    ends = np.flatnonzero(history[:-1] == history[-1]) if limit else history[:0]  # where what is repeated ends
    best: dict[int, int] = {}
    length = 1
    while ends.size:
        if length >= values.dry_allowed_length:
            best.update(dict.fromkeys(history[ends + 1].tolist(), length))
        if length >= min(limit, longest):
            break
        ends = ends[ends >= length]
        ends = ends[history[ends - length] == history[len(history) - 1 - length]]
        length += 1
    for token, matched in best.items():
        loss = values.dry_multiplier * values.dry_base ** (matched - values.dry_allowed_length)
        row[token] = min(row[token], max(row[token] - loss, LOWEST))


def xtc(row: np.ndarray, probability: float, threshold: float, chance: float) -> None:
    """Rule out all but the least likely of the tokens that are at least `threshold` probable, if the chance says so."""
    if chance >= probability:
        return
    probs = _probabilities(row)
    top = np.flatnonzero((probs >= threshold) & (row > -np.inf))
    if top.size > 1:
        keep = top[np.argmin(probs[top])]
        row[top[top != keep]] = -np.inf


class Mirostat:
    """The state of mirostat 1 or 2 in one sequence."""

    def __init__(self, values: LogitsRuleValues, temperature: float) -> None:
        self._values, self._temperature = values, temperature
        self.mu = 2 * values.mirostat_tau
        self._count = -1  # tokens before the last truncation
        self._surprises: np.ndarray | None = None  # of every token then, in bits

    def follow(self, generated: Sequence[int]) -> None:
        """Take note of the token that was drawn from the last truncation."""
        if self._surprises is not None and len(generated) == self._count + 1:
            surprise = float(self._surprises[generated[-1]])
            if np.isfinite(surprise):  # a grammar may have forced what was ruled out
                self.mu -= self._values.mirostat_eta * (surprise - self._values.mirostat_tau)
        self._count = len(generated)

    def truncate(self, row: np.ndarray) -> None:
        """Rule out what is too surprising; the likeliest token always stays."""
        probs = _probabilities(row, self._temperature)
        order = np.argsort(-probs, kind="stable")
        with np.errstate(divide="ignore"):
            surprise = -np.log2(probs[order])
        if self._values.mirostat == 1:
            keep = zipf_count(probs[order], self.mu)
        else:
            keep = int((surprise <= self.mu).sum())
        row[order[max(1, keep) :]] = -np.inf
        with np.errstate(divide="ignore"):
            self._surprises = -np.log2(_probabilities(row, self._temperature))


def zipf_count(probs: np.ndarray, mu: float) -> int:
    """How many of the likeliest tokens mirostat 1 keeps; `probs` descend."""
    top = probs[:ZIPF_TOKENS][probs[:ZIPF_TOKENS] > 0]
    ranks = np.arange(1, len(top))
    steps, falls = np.log((ranks + 1) / ranks), np.log(top[:-1] / top[1:])
    total = float((steps * steps).sum())
    if not total or (exponent := float((steps * falls).sum()) / total) <= 0:
        return len(probs)
    epsilon = exponent - 1
    whole = 1 - len(probs) ** -epsilon
    ratio = 1 / np.log(len(probs)) if abs(epsilon) < 1e-9 else epsilon / whole
    return int(min(len(probs), (ratio * 2.0 ** min(mu, 500.0)) ** (1 / exponent)))


def _probabilities(row: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """The softmax of logits [V]; the row is not all -inf."""
    peak = row.max()
    if peak == np.inf:
        weights = (row == np.inf).astype(np.float64)
    else:
        with np.errstate(over="ignore"):  # far below the peak, by a low temperature
            weights = np.exp((row - peak) / temperature)
    return weights / weights.sum()


def _breaker_test(engine: Engine, texts: Sequence[str]) -> Callable[[int], bool]:
    """Whether a token's text has one of the sequence breakers in it."""
    if not texts:
        return lambda token: False
    tokenizer, known = engine.tokenizer, {}

    def breaks(token: int) -> bool:
        if token not in known:
            piece = tokenizer.decode([token])
            known[token] = any(text in piece for text in texts)
        return known[token]

    return breaks
