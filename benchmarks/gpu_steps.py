"""The step alone: a decode batch through the runner over and over.

What the engine adds to it (programs, scheduling, pages) is in the other rows of gpu.py.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import torch

from headway.base.specs.brle import Brle
from headway.base.specs.samplers import Sampling
from headway.kv.tensor_pool import TensorPool
from headway.models.decoder import Decoder
from headway.runtime.batch import NO_POSITIONS, Batch, Segment
from headway.runtime.passes import Readout
from headway.runtime.profile import Profiler
from headway.runtime.runners.cuda.runner import CudaRunner

PAGE = 16


def decode_batch(rows: int, context: int, mask: Brle | None = None, how: Sampling = Sampling(temperature=0.0)) -> Batch:
    """A decode batch: one token for each sequence, attending to all slots before it."""
    pages = context // PAGE + 1
    where = np.full(rows, context)
    tables = 1 + np.arange(rows * pages).reshape(rows, pages)
    segments = tuple(
        Segment(
            rows=range(i, i + 1),
            slots=where[i : i + 1],
            pages=tables[i],
            numbers=np.arange(pages),
            masks=(mask,),
            slot_positions=NO_POSITIONS,
            readouts=((0, i, Readout(0, how, seed=i)),),
            keep_last=True,
            kept=None,
            before_position=context - 1,
        )
        for i in range(rows)
    )
    slots = tables[:, -1] * PAGE + context % PAGE
    tokens = np.random.default_rng(0).integers(0, 100, rows)
    return Batch(tokens, where, np.arange(rows), slots, segments)


def runner_for(decoder: Decoder, rows: int, context: int) -> CudaRunner:
    """A runner with a random KV cache for these sequences."""
    c = decoder.config
    latent = c.description.latent
    pool = TensorPool(
        layers=c.layers,
        pages=rows * (context // PAGE + 1),
        page_size=PAGE,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        dtype=decoder.dtype,
        device=decoder.device,
        by_head=True,
        value_dim=None if latent is None else latent.size,
    )
    pool.raw.normal_()
    return CudaRunner(decoder, pool, PAGE, profiler=Profiler(torch.cuda.synchronize, str(decoder.device)))


def step_seconds(runner: CudaRunner, batch: Batch, count: int = 20) -> float:
    """Seconds of the device for a step, samplers included: the median of replays of what was captured of it."""
    for _ in range(3):
        runner.begin(batch).result()
    found = []
    for _ in range(count):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for graph in runner.captured:
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def host_seconds(runner: CudaRunner, batch: Batch, count: int = 20) -> float:
    """Seconds from a batch to its tokens on the host, one step after the other: the median."""
    found = []
    for _ in range(count):
        begin = time.perf_counter()
        runner.begin(batch).result()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)
