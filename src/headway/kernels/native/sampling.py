"""Native sampling: the fast path of `kernels.reference.sampling.sample`, for all but rare filters and dense biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.base.errors import InvalidMask, WrongType
from headway.kernels.native import library
from headway.kernels.native.library import ThreadPool, check
from headway.kernels.reference import sampling
from headway.kernels.reference.sampling import RowSampler

NOTHING_ALLOWED = -2  # the library's token for a mask that allows nothing


def sample(thread_pool: ThreadPool, logits: Tensor, samplers: Sequence[RowSampler]) -> list[int]:
    """The token of each row of logits [R, V], as `reference.sampling.sample` gives it, up to rounding."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise WrongType(f"logits are of {logits.dtype} with strides {logits.stride()}; rows of float32 are needed")
    rare = [i for i, each in enumerate(samplers) if each.sampling.filters_rarely or each.bias is not None]
    tokens = dict(zip(rare, sampling.sample(logits[rare], [samplers[i] for i in rare]).tolist(), strict=True))
    rest = [i for i in range(len(samplers)) if i not in tokens]
    alive: list[Tensor] = []  # tensors that the structs point at
    jobs = (library.SamplingStruct * len(rest))(*(_job(logits[i], samplers[i], alive) for i in rest))
    if rest:
        check(thread_pool.calls.hw_sample(thread_pool.handle, jobs, len(rest)))
    for i, job in zip(rest, jobs, strict=True):
        if job.token == NOTHING_ALLOWED:
            raise InvalidMask(f"the logit mask allows none of {logits.shape[1]} tokens; allow at least one")
        tokens[i] = job.token
    return [tokens[i] for i in range(len(samplers))]


def _job(row: Tensor, sampler: RowSampler, alive: list[Tensor]) -> library.SamplingStruct:
    how = sampler.sampling
    job = library.SamplingStruct(
        logits=row.data_ptr(),
        temperature=how.temperature,
        top_p=how.top_p,
        min_p=how.min_p,
        uniform=sampler.uniform,
        vocab=len(row),
        top_k=how.top_k,
    )
    if sampler.allowed is not None:
        allowed = sampler.allowed.contiguous()
        alive.append(allowed)
        job.allowed = allowed.data_ptr()
    if how.bias or how.penalizes:
        ids, scores = sampling.changed_scores(row, sampler)
        ids = ids.to(torch.int32)
        alive += (ids, scores)
        job.changed, job.scores, job.changes = ids.data_ptr(), scores.data_ptr(), len(ids)
    return job
