"""Reading a step: only the rows that were asked for are normed, go through the head and leave the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, PassFailed
from headway.base.rng import uniform
from headway.base.specs.adapters import Mixes
from headway.base.specs.probes import (
    AttentionScores,
    Distribution,
    Entropy,
    Hidden,
    LogitLens,
    Logits,
    Logprob,
    Logprobs,
    Rank,
    Ranked,
    Ranking,
)
from headway.base.specs.samplers import Sampling
from headway.base.system.device import AnyDevice
from headway.kernels.host import sampling as host
from headway.kernels.host.sampling import RowSampler
from headway.models.config import ModelConfig
from headway.models.hooks import Hooks
from headway.runtime.batch import Batch
from headway.runtime.passes import BEFORE, Readout
from headway.runtime.runners.adapter_rows import add_to_products, has_head
from headway.runtime.runners.attention_groups import score_group
from headway.runtime.runners.base import SegmentResult

SLAB = 64  # rows of logits held at once
NO_NUMBER = "the model's logits are not a number at a sampled row"


@dataclass(frozen=True, eq=False)
class Ask:
    """One readout of one segment, at a row of the batch (or the kept state of the token before)."""

    segment: int
    index: int
    row: int
    readout: Readout


def asks(batch: Batch) -> list[Ask]:
    """Every readout of the batch."""
    return [Ask(s, i, row, readout) for s, segment in enumerate(batch.segments) for i, row, readout in segment.readouts]


class Head(Protocol):
    """The end of a model, as a reader needs it: `Decoder` with its tensors, or its native twin with arrays.

    `functions` reads logits of its kind: `kernels.host.sampling`, or `kernels.reference.sampling`.
    """

    @property
    def config(self) -> ModelConfig: ...
    @property
    def device(self) -> AnyDevice: ...
    @property
    def functions(self) -> Any: ...
    def finish(self, x: Any, tile: int | None) -> Any: ...
    def logits(self, x: Any, tile: int | None) -> Any: ...
    def products_of(self, x: Any, tile: int | None) -> Any: ...
    def finish_logits(self, products: Any) -> Any: ...
    def best(self, logits: Any) -> tuple[list[bool], list[int] | None]: ...
    def sample(self, logits: Any, samplers: Sequence[RowSampler]) -> list[int]: ...


def make_hooks(batch: Batch, decoder: Head, page_size: int) -> Hooks:
    """What the forward must look at on its way for these readouts."""
    hidden: dict[int, set[int]] = {}
    scores: dict[int, list[Any]] = {}
    for ask in asks(batch):
        match ask.readout.what:
            case Hidden(layer):
                hidden.setdefault(layer, set()).add(ask.row)
            case LogitLens(layers=layers):
                for layer in layers:
                    hidden.setdefault(layer, set()).add(ask.row)
            case AttentionScores(layer):
                group = score_group(batch.segments[ask.segment], ask.row, decoder.config.windows[layer], page_size)
                scores.setdefault(layer, []).append(group)
    rows = {l: np.array(sorted(r), np.int64) for l, r in hidden.items()}
    return Hooks(hidden=rows, scores=scores)


AddHeads = Callable[
    [Any, Any, Mixes], object
]  # adds what adapters of the output matrix make of normed rows to its products


class Reader:
    """Turns the residual rows of one step into values, one per readout, or an error where a row is not finite."""

    def __init__(self, decoder: Head, tile: int | None, add_heads: AddHeads = add_to_products) -> None:
        self.decoder, self.tile, self._functions, self._add_heads = decoder, tile, decoder.functions, add_heads

    def read(self, batch: Batch, x: Any, hooks: Hooks, mark: Any) -> dict[tuple[int, int], object]:
        """Values by (segment, readout index). x [T, E] is the residual before the final norm; None when T is 0."""
        values: dict[tuple[int, int], object] = {}
        heads, others = [], []
        for ask in asks(batch):
            (others if isinstance(ask.readout.what, Hidden | AttentionScores | LogitLens) else heads).append(ask)
        for ask in others:
            values[ask.segment, ask.index] = self.look(ask, batch, hooks)
        owners = {self._place(a): a.segment for a in heads}
        places = sorted(owners)
        for start in range(0, len(places), SLAB):
            part = places[start : start + SLAB]
            mixes = [batch.segments[owners[p]].mix_of(p[0]) for p in part]
            logits = self.logits([self._residual(p, batch, x) for p in part], mixes)
            mark("head")
            inside = {p: i for i, p in enumerate(part)}
            chosen = [a for a in heads if self._place(a) in inside]
            values.update(self.answers(chosen, [inside[self._place(a)] for a in chosen], logits, batch))
            mark("sample")
        return values

    @staticmethod
    def _place(ask: Ask) -> tuple[int, int]:
        """Where a readout's residual is: a batch row, or a segment's kept state."""
        return (ask.row, 0) if ask.row != BEFORE else (BEFORE, ask.segment)

    @staticmethod
    def _residual(place: tuple[int, int], batch: Batch, x: Any) -> Any:
        row, segment = place
        if row == BEFORE:
            return batch.segments[segment].kept
        assert x is not None
        return x[row]

    def logits(self, rows: Sequence[Any], mixes: Mixes) -> Any:
        """Logits [R, V] of residual rows, each under its adapters."""
        x = self._functions.stack(rows)
        if not has_head(mixes):
            return self.decoder.logits(x, self.tile)
        products = self.decoder.products_of(x, self.tile)
        self._add_heads(products, self.decoder.finish(x, self.tile), mixes)
        return self.decoder.finish_logits(products)

    def answers(self, chosen: list[Ask], at: list[int], logits: Any, batch: Batch) -> dict[tuple[int, int], object]:
        """The values of these readouts of the head, each at its row of logits [R, V]."""
        values: dict[tuple[int, int], object] = {}
        bad, best = self.decoder.best(logits)
        draws, owners, rows = [], [], []
        for ask, i in zip(chosen, at, strict=True):
            key = (ask.segment, ask.index)
            if isinstance(ask.readout.what, Ranking):
                continue  # it looks at what is drawn
            if not isinstance(ask.readout.what, Sampling):
                values[key] = _probe_or_error(ask.readout, logits[i], self._functions)
            elif bad[i]:
                values[key] = not_a_number()
            elif best is not None and plainly_greedy(ask.readout):
                values[key] = best[i]
            else:
                try:
                    draws.append(self._draw(ask, batch, logits))
                except HeadwayError as error:  # there is no mask for this row; the others go on
                    values[key] = error
                    continue
                owners.append(key)
                rows.append(i)
        if draws:
            tokens = self.decoder.sample(logits[rows] if rows != list(range(len(logits))) else logits, draws)
            values.update(zip(owners, tokens, strict=True))
        for ask, i in zip(chosen, at, strict=True):
            if isinstance(ask.readout.what, Ranking):
                mates = [a for a in chosen if (a.segment, a.row) == (ask.segment, ask.row)]
                samplers = [a for a in mates if isinstance(a.readout.what, Sampling)]
                drawn = [values[a.segment, a.index] for a in samplers]
                if bad[i]:
                    values[ask.segment, ask.index] = not_a_number()
                    continue
                values[ask.segment, ask.index] = self.ranked(ask.readout.what, logits[i], samplers, drawn, batch)
        return values

    def ranked(
        self, what: Ranking, logits: Any, samplers: list[Ask], drawn: list[object], batch: Batch
    ) -> Ranked | HeadwayError:
        """Where the tokens stand that were drawn at a row, and others."""
        failed = next((value for value in drawn if isinstance(value, HeadwayError)), None)
        if failed is not None:
            return failed
        tokens = [token for token in drawn if isinstance(token, int)]
        if what.processed and samplers:
            scores = self._functions.processed_logprobs(logits, self._draw(samplers[0], batch, logits))
        else:
            scores = self._functions.log_softmax(logits)
        assert isinstance(what.ids, tuple)
        named, best = self._functions.ranked(scores, [*tokens, *what.ids], what.k)
        ranks = [Rank(*pair) for pair in named]
        return Ranked(tuple(ranks[: len(tokens)]), tuple(ranks[len(tokens) :]), tuple(map(Rank._make, best)))

    def _draw(self, ask: Ask, batch: Batch, logits: Any) -> RowSampler:
        return row_sampler(ask.readout, _position(batch, ask), self._functions, logits)

    def look(self, ask: Ask, batch: Batch, hooks: Hooks) -> object:
        """The value of a readout that looks inside the model."""
        match ask.readout.what:
            case Hidden(layer):
                state = self._hidden_state(hooks, layer, ask.row)
                if layer == self.decoder.config.layers:
                    state = self.decoder.finish(state[None], self.tile)[0]
                return np.array(self._functions.to_numpy(state), np.float32)
            case LogitLens(layers=layers, k=k):
                rows = [self._hidden_state(hooks, layer, ask.row) for layer in layers]
                if not rows:
                    return []
                mixes = [batch.segments[ask.segment].mix_of(ask.row)] * len(rows)
                return [_distribution(row, 1.0, k, self._functions) for row in self.logits(rows, mixes)]
            case AttentionScores(layer, reduce):
                return self._scores(ask, batch, hooks, layer, reduce)
        raise AssertionError(ask.readout.what)

    @staticmethod
    def _hidden_state(hooks: Hooks, layer: int, row: int) -> Any:
        """The residual of a row [E] after a layer, which the hooks kept."""
        return hooks.hidden_out[layer][hooks.hidden[layer].tolist().index(row)]

    def _scores(self, ask: Ask, batch: Batch, hooks: Hooks, layer: int, reduce: str | None) -> np.ndarray:
        group = next(i for i, g in enumerate(hooks.scores[layer]) if int(g.rows[0, 0]) == ask.row)
        heads = self._functions.to_numpy(hooks.scores_out[layer][group])  # [H, S]
        segment = batch.segments[ask.segment]
        mask = segment.masks[ask.row - segment.rows.start]
        slots = int(segment.slots[ask.row - segment.rows.start]) + 1 if mask is None else len(mask)
        heads = np.pad(heads, ((0, 0), (0, max(0, slots - heads.shape[1]))))[:, :slots]
        if reduce == "mean":
            return heads.mean(0)
        return heads.max(0) if reduce == "max" else heads


def row_sampler(readout: Readout, position: int, functions: Any, logits: Any) -> RowSampler:
    """How a row of these logits, with this position id, is sampled."""
    how, vector = readout.what, functions.vector
    assert isinstance(how, Sampling)
    seen = generated = None
    if how.penalizes:
        seen = vector(sorted(readout.seen), "int64", logits)
        counts = list(readout.generated.values())
        generated = (vector(list(readout.generated), "int64", logits), vector(counts, "int64", logits))
    bias, allowed = readout.dense_bias, readout.permitted()
    return RowSampler(
        sampling=how,
        uniform=0.0 if how.temperature == 0 else uniform(readout.seed, position, readout.ordinal),
        allowed=None if allowed is None else vector(allowed, "bool", logits),
        seen=seen,
        generated=generated,
        bias=None if bias is None else vector(bias, "float64", logits),  # a copy: nobody may write to the array
    )


def sample_row(logits: np.ndarray, readout: Readout, position: int) -> int:
    """The token that a sampler chooses from these logits [V], as at a row with this position id."""
    return int(host.sample(logits[None], [row_sampler(readout, position, host, logits)])[0])


def segment_results(batch: Batch, x: Any, values: Mapping[tuple[int, int], object]) -> list[SegmentResult]:
    """What each segment gets: its readouts' values and, if wanted, its last row of the residual x [T, E]."""
    few = x is not None and len(x) <= SLAB  # then a row may be a view, which keeps all of x in memory
    rows = list(x) if x is not None and few else ()
    results = []
    for i, segment in enumerate(batch.segments):
        state = None
        if x is not None and segment.keep_last:
            state = rows[segment.rows[-1]] if few else x[[segment.rows[-1]]][0]
        results.append(SegmentResult({index: values[i, index] for index, _, _ in segment.readouts}, state))
    return results


def _position(batch: Batch, ask: Ask) -> int:
    """The position id of the row that is read."""
    segment = batch.segments[ask.segment]
    return int(batch.positions[ask.row]) if ask.row != BEFORE else int(segment.before_position)


def _probe_or_error(readout: Readout, logits: Any, functions: Any) -> object:
    try:
        return _probe(readout, logits, functions)
    except HeadwayError as error:  # the async mask failed
        return error


def _probe(readout: Readout, logits: Any, functions: Any) -> object:
    what = readout.what
    if getattr(what, "masked", False) and (allowed := readout.permitted()) is not None:
        logits = functions.masked(logits, functions.vector(allowed, "bool", logits))
    match what:
        case Logits():
            return functions.to_numpy(logits).copy()
        case Distribution(temperature, k):
            return _distribution(logits, temperature, k, functions)
        case Logprob(id=token):
            return functions.to_numpy(functions.logprobs(logits, functions.vector([token], "int64", logits)))
        case Logprobs(ids=ids):
            return functions.to_numpy(functions.logprobs(logits, functions.vector(list(ids), "int64", logits)))
        case Entropy():
            return float(functions.entropy(logits))
    raise AssertionError(what)


def _distribution(logits: Any, temperature: float, k: int, functions: Any) -> tuple[np.ndarray, np.ndarray]:
    ids, probs = functions.distribution(logits, temperature, k)
    return functions.to_numpy(ids), functions.to_numpy(probs)


def not_a_number() -> PassFailed:
    """The value of a sampled row whose logits are broken."""
    return PassFailed(f"{NO_NUMBER}; no token can be drawn or ranked")


def plainly_greedy(readout: Readout) -> bool:
    """Whether the largest logit is the answer as it stands."""
    what = readout.what
    assert isinstance(what, Sampling)
    return (
        what.temperature == 0
        and readout.allowed is None
        and readout.async_mask is None
        and readout.bias is None
        and not (what.penalizes or what.logit_bias)
    )
