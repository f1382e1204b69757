"""Native sampling: the fast path of `kernels.host.sampling.sample`, for all but rare filters and dense biases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headway.base.errors import InvalidMask, WrongType
from headway.kernels.host import sampling
from headway.kernels.host.sampling import RowSampler
from headway.kernels.native import library
from headway.kernels.native.library import ThreadPool, check

NOTHING_ALLOWED = -2  # the library's token for a mask that allows nothing


def sample(thread_pool: ThreadPool, logits: np.ndarray, samplers: Sequence[RowSampler]) -> list[int]:
    """The token of each row of logits [R, V], as `host.sampling.sample` gives it, up to rounding."""
    if logits.dtype != np.float32 or logits.strides[1] != 4:
        raise WrongType(f"logits are of {logits.dtype} with strides {logits.strides}; rows of float32 are needed")
    rare = [i for i, each in enumerate(samplers) if each.sampling.filters_rarely or each.bias is not None]
    tokens = dict(zip(rare, sampling.sample(logits[rare], [samplers[i] for i in rare]).tolist(), strict=True))
    rest = [i for i in range(len(samplers)) if i not in tokens]
    alive: list[np.ndarray] = []  # arrays that the structs point at
    jobs = (library.SamplingStruct * len(rest))(*(_job(logits[i], samplers[i], alive) for i in rest))
    if rest:
        check(thread_pool.calls.hw_sample(thread_pool.handle, jobs, len(rest)))
    for i, job in zip(rest, jobs, strict=True):
        if job.token == NOTHING_ALLOWED:
            raise InvalidMask(f"the logit mask allows none of {logits.shape[1]} tokens; allow at least one")
        tokens[i] = job.token
    return [tokens[i] for i in range(len(samplers))]


def _job(row: np.ndarray, sampler: RowSampler, alive: list[np.ndarray]) -> library.SamplingStruct:
    how = sampler.sampling
    job = library.SamplingStruct(
        logits=row.ctypes.data,
        temperature=how.temperature,
        top_p=how.top_p,
        min_p=how.min_p,
        uniform=sampler.uniform,
        vocab=len(row),
        top_k=how.top_k,
    )
    if sampler.allowed is not None:
        allowed = np.ascontiguousarray(sampler.allowed)
        alive.append(allowed)
        job.allowed = allowed.ctypes.data
    if how.bias or how.penalizes:
        ids, scores = sampling.changed_scores(row, sampler)
        ids = ids.astype(np.int32)
        alive += (ids, scores)
        job.changed, job.scores, job.changes = ids.ctypes.data, scores.ctypes.data, len(ids)
    return job
