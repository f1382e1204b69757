"""Probes on the device: what a step asks about its rows is launched together and copied back once.

Queries (probe_rounds) are uploaded and answered by kernels in a graph (kernels/triton/probes); more than a few of a
row's best are found by torch. What that leaves undecided is the torch reader's, over the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.transfer import to_device
from headway.kernels.triton import probes as probing
from headway.kernels.triton.probes import (
    BEST_INTS,
    JOB_INTS,
    LEAST_BEST,
    MOST_BEST,
    NUMBERS,
    PAIR_HEADER,
    PAIR_INTS,
    ProbeQueries,
    ProbeResults,
    RowStats,
)
from headway.runtime.runners.cuda.arrays import StreamPoint, Upload
from headway.runtime.runners.cuda.graphs import Graphs
from headway.runtime.runners.cuda.model import CudaModel
from headway.runtime.runners.cuda.probe_rounds import (
    JOBS,
    NO_MASK,
    PAIRS,
    Answers,
    BestScores,
    Key,
    Plan,
    ProbeRound,
    Query,
    tell,
)

SLAB = 64  # rows of logits that are ranked or sorted at once


class CudaProbes:
    """Answers probes over rows of logits. Owns what is uploaded, found and copied back for them."""

    def __init__(self, model: CudaModel, graphs: Graphs, name: str) -> None:
        self.model, self._graphs, self._name = model, graphs, name
        self._vocab, self._device = model.config.vocab_size, model.device
        self._words, self._pieces = -(-self._vocab // 32), probing.pieces(self._vocab)
        self._questions = Upload(JOBS * (JOB_INTS + BEST_INTS) + PAIRS * PAIR_INTS, torch.int32, self._device)
        self._masks = Upload(self._words, torch.int32, self._device)
        size = JOBS * (self._pieces * NUMBERS + 2 * MOST_BEST) + PAIRS * (PAIR_HEADER + self._pieces)
        self._results = torch.empty(size, dtype=torch.int32, device=self._device)
        self._back = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._blocks: Tensor | None = None  # what rows' best are found by, once any are
        self._sent: ProbeRound | None = None  # whose questions are on the device

    def begin(
        self, asked: Plan, logits: Tensor, tokens: Tensor, *, lasting: bool
    ) -> Callable[[dict[Key, object]], list[Query]]:
        """Set the device to work on these probes of logits [R, V], which are where they always are if `lasting`.

        `tokens` [A] int32 are those that the device draws in front of it. What comes back waits, adds values, and gives
        the probes that are left undecided.
        """
        rounds = asked.rounds
        first = self._launch(rounds[0], logits, tokens, lasting) if rounds else None

        def finish(values: dict[Key, object]) -> list[Query]:
            values.update(asked.known)
            undecided = list(asked.left)
            for i, part in enumerate(rounds):
                wait = first if i == 0 and first is not None else self._launch(part, logits, tokens, lasting)
                undecided += tell(part, wait(), values)
            return undecided

        return finish

    def _launch(self, part: ProbeRound, logits: Tensor, tokens: Tensor, lasting: bool) -> Callable[[], Answers]:
        jobs, pairs, best = _padded(len(part.jobs)), _padded(len(part.pairs)), _padded(len(part.best_jobs))
        self._send(part, jobs, pairs, best)
        most = max(LEAST_BEST, _padded(part.most[0]))
        parts = _split(self._questions.device, jobs * JOB_INTS, pairs * PAIR_INTS, best * BEST_INTS)
        questions = ProbeQueries(
            parts[0].view(jobs, JOB_INTS),
            parts[1].view(pairs, PAIR_INTS),
            self._masks.device.view(-1, self._words),
            tokens,
            parts[2].view(best, BEST_INTS),
        )
        sizes = jobs * self._pieces * NUMBERS, pairs * (PAIR_HEADER + self._pieces), best * 2 * most
        parts, back = _split(self._results, *sizes), sum(sizes)
        results = ProbeResults(
            parts[0].view(torch.float32).view(jobs, self._pieces, NUMBERS),
            parts[1].view(pairs, PAIR_HEADER + self._pieces),
            parts[2].view(best, 2, most),
            self._room() if best else self._results.view(torch.float32),
        )

        def work() -> None:
            probing.run_probes(logits, questions, results)
            self._back[:back].copy_(self._results[:back], non_blocking=True)

        if back:
            sizes = jobs, pairs, best, most
            key = ("probe", *sizes, logits.data_ptr(), self._masks.device.data_ptr(), self._name)
            self._graphs.run(key if lasting else None, work)
        more = self._ordered(list(part.best[1]), part.masks, logits, part.most[1] + 1)
        whole = self._ordered(list(part.sorted), part.masks, logits, self._vocab)
        rows = [_host(_taken(logits, list(part.rows)))] if part.rows else []
        done = StreamPoint(self._device)
        done.record()

        def wait() -> Answers:
            done.wait()
            measured, placed, few = _split(self._back[:back].numpy(), *(parts[i].numel() for i in range(3)))
            return Answers(
                *_read(part, measured.view(np.float32), placed, self._pieces),
                best=(_few_best(few.reshape(best, 2, most)), _more_best(more, self._vocab)),
                sorted=_pairs_of(whole),
                rows=[row for block in rows for row in block.numpy()],
            )

        return wait

    def _room(self) -> Tensor:
        """What rows' best are found by [JOBS, blocks]."""
        if self._blocks is None:
            size = JOBS, probing.block_count(self._vocab)
            self._blocks = torch.empty(size, dtype=torch.float32, device=self._device)
        return self._blocks

    def _send(self, part: ProbeRound, jobs: int, pairs: int, best: int) -> None:
        """Upload a round's questions, unless they are there, with padding to these numbers of them."""
        if part is self._sent:
            return
        self._sent = part
        self._questions.wait()
        sizes = jobs * JOB_INTS, pairs * PAIR_INTS, best * BEST_INTS
        measures, named, ranked = _split(self._questions.host, *sizes)
        measures, named = measures.reshape(jobs, JOB_INTS), named.reshape(pairs, PAIR_INTS)
        ranked = ranked.reshape(best, BEST_INTS)
        measures[len(part.jobs) :, 0] = named[len(part.pairs) :, 0] = ranked[len(part.best_jobs) :, 1] = -1
        if part.jobs:
            rows, masks, rates = zip(*part.jobs, strict=True)
            measures[: len(rows), 0], measures[: len(rows), 1] = rows, masks
            measures[: len(rows), 2] = np.array(rates, np.float32).view(np.int32)
        if part.pairs:
            named[: len(part.pairs)] = part.pairs
        if part.best_jobs:
            ranked[: len(part.best_jobs), 0] = part.best_jobs
            ranked[: len(part.best_jobs), 1:] = list(part.best[0])
        self._questions.send(sum(sizes))
        self._send_masks(part.masks)

    def _send_masks(self, masks: Sequence[np.ndarray]) -> None:
        if not masks:
            return
        if len(masks) * self._words > len(self._masks):
            self._masks.grow(2 * len(masks) * self._words)
        self._masks.wait()
        bits = self._masks.host[: len(masks) * self._words].view(np.uint8).reshape(len(masks), -1)
        for line, allowed in zip(bits, masks, strict=True):
            packed = np.packbits(allowed, bitorder="little")
            line[: len(packed)], line[len(packed) :] = packed, 0
        self._masks.send(len(masks) * self._words)

    def _ordered(
        self, pairs: list[tuple[int, int]], masks: Sequence[np.ndarray], logits: Tensor, count: int
    ) -> list[tuple[Tensor, Tensor]]:
        """The `count` best scores of these rows, each under its mask, and their ids, on their way to the host."""
        ordered = []
        for start in range(0, len(pairs), SLAB):
            slab = pairs[start : start + SLAB]
            lines = _taken(logits, [row for row, _ in slab])
            bound = [(i, mask) for i, (_, mask) in enumerate(slab) if mask != NO_MASK]
            if bound:
                allowed = torch.ones(lines.shape, dtype=torch.bool)
                for i, mask in bound:
                    allowed[i] = torch.from_numpy(masks[mask])
                lines = lines.masked_fill(~allowed.to(self._device), float("-inf"))
            if count >= self._vocab:
                scores, ids = lines.sort(dim=1, descending=True, stable=True)
            else:
                scores, ids = lines.topk(count, dim=1)
            ordered.append((_host(scores), _host(ids)))
        return ordered


def _read(
    part: ProbeRound, measured: np.ndarray, placed: np.ndarray, pieces: int
) -> tuple[RowStats, np.ndarray, np.ndarray, np.ndarray]:
    """Rows that were measured, and the scores, ranks and tokens of pairs."""
    jobs, pairs = len(part.jobs), len(part.pairs)
    rates = np.array([rate for _, _, rate in part.jobs])
    rows = probing.combine(measured.reshape(-1, pieces, NUMBERS)[:jobs], rates)
    lines = placed.reshape(-1, PAIR_HEADER + pieces)[:pairs]
    scores = np.ascontiguousarray(lines[:, 0]).view(np.float32)
    return rows, scores, 1 + lines[:, PAIR_HEADER:].sum(1), lines[:, 1].copy()


def _few_best(found: np.ndarray) -> BestScores:
    """What the device has found of rows' best [B, 2, K]."""
    scores = np.ascontiguousarray(found[:, 0]).view(np.float32)
    return BestScores(scores, found[:, 1].astype(np.int64), complete=True)


def _more_best(blocks: list[tuple[Tensor, Tensor]], vocab: int) -> BestScores:
    """What torch has found of them, ties in any order."""
    if not blocks:
        return BestScores(np.empty((0, 0), np.float32), np.empty((0, 0), np.int64), complete=True)
    scores, ids = (np.concatenate([pair[i].numpy() for pair in blocks]) for i in range(2))
    order = np.lexsort((ids, -scores), axis=-1)
    scores, ids = np.take_along_axis(scores, order, 1), np.take_along_axis(ids, order, 1)
    return BestScores(scores, ids, complete=scores.shape[1] == vocab)


def _split(numbers: Any, *sizes: int) -> list[Any]:
    """Parts of these sizes, one after the other."""
    ends = list(accumulate(sizes))
    return [numbers[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _padded(count: int) -> int:
    """The next power of two, so that there are few graphs; 0 for none."""
    return 1 << (count - 1).bit_length() if count else 0


def _taken(logits: Tensor, rows: list[int]) -> Tensor:
    """These rows of logits [R, V]: itself where it can be."""
    if rows == list(range(len(rows))):
        return logits[: len(rows)]
    return logits.index_select(0, to_device(rows, torch.int64, logits.device))


def _host(x: Tensor) -> Tensor:
    """A copy on its way to the host; it is there when the stream is."""
    if x.device.type != "cuda":
        return x.clone()
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _pairs_of(blocks: list[tuple[Tensor, Tensor]]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Scores and ids of every row."""
    return [(s.copy(), i.copy()) for scores, ids in blocks for s, i in zip(scores.numpy(), ids.numpy(), strict=True)]
