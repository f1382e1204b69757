"""Ranks as threads of one process: the shares of a model computed together, without processes or a library."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from headway.kv.tensor_pool import TensorPool
from headway.models.decoder import Decoder
from headway.models.hooks import Hooks
from headway.models.shards import VocabularyShard
from headway.runtime.batch import Batch, Segment
from headway.runtime.profile import Profiler
from headway.runtime.runners.parallel.runner import new_own_pool
from headway.runtime.runners.torch import TorchRunner

Result = TypeVar("Result")
WAIT = 60.0  # seconds: a thread that fails must not leave the others waiting


class ThreadLink:
    """The link of one thread; all of them share `meeting`."""

    def __init__(self, rank: int, meeting: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._meeting, self._barrier = rank, len(meeting), meeting, barrier

    def sum(self, part: Tensor) -> Tensor:
        total = torch.stack([each.float() for each in self._all(part)]).sum(0)
        return total.to(part.dtype)

    def gather(self, part: Tensor) -> list[Tensor] | None:
        parts = self._all(part)
        return parts if self.rank == 0 else None

    def begin_head(self, h: Tensor) -> None:
        """Every thread calls the head by itself."""

    def _all(self, part: Tensor) -> list[Tensor]:
        self._meeting[self.rank] = part
        self._barrier.wait(WAIT)
        parts = list(self._meeting)
        self._barrier.wait(WAIT)
        return parts


def on_threads(size: int, work: Callable[[ThreadLink], Result]) -> list[Result]:
    """What each of `size` threads gives, by rank."""
    meeting, barrier = [None] * size, threading.Barrier(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(work, [ThreadLink(rank, meeting, barrier) for rank in range(size)]))


@torch.inference_mode()
def logits_of(decoder: Decoder, tokens: list[int], page: int = 4) -> np.ndarray:
    """The logits [T, V] of a sequence, in one pass; every rank calls it."""
    count, pages = len(tokens), -(-len(tokens) // page)
    pool: TensorPool = new_own_pool(decoder, pages=pages, page_size=page, dtype="float32")
    runner = TorchRunner(decoder, pool, page, deterministic=False, profiler=Profiler(lambda: None, "cpu"))
    numbers, slots = np.arange(pages), np.arange(count)
    segment = Segment(
        rows=range(count),
        slots=slots,
        pages=numbers + 1,
        numbers=numbers,
        masks=(None,) * count,
        slot_positions=slots,
        readouts=(),
        keep_last=False,
        kept=None,
        before_position=-1,
    )
    batch = Batch(np.array(tokens), slots, slots, slots + page, (segment,))
    x = runner.forward(runner.step(batch), Hooks())
    output: Any = decoder.output
    if isinstance(output, VocabularyShard) and output.link.rank:
        return output(decoder.finish(x, None)).numpy()  # what comes after the matmul is for rank 0
    return decoder.logits(x, None).numpy()
