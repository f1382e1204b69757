"""Drawing tokens natively: the fast path of `kernels.sampling.choose`, for every sampler but typical."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.base.errors import InvalidMask, WrongType
from headway.kernels.native import library
from headway.kernels.native.library import Team, check
from headway.kernels.reference import sampling
from headway.kernels.reference.sampling import Draw

NOTHING_ALLOWED = -2  # what the library answers then


def choose(team: Team, logits: Tensor, draws: Sequence[Draw]) -> list[int]:
    """The token of each row of logits [R, V], as `sampling.choose` gives it but for rounding."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise WrongType(f"logits are of {logits.dtype} with strides {logits.stride()}; rows of float32 are needed")
    typical = [i for i, draw in enumerate(draws) if draw.sampling.typical_p < 1]
    tokens = dict(zip(typical, sampling.choose(logits[typical], [draws[i] for i in typical]).tolist(), strict=True))
    rest = [i for i in range(len(draws)) if i not in tokens]
    alive: list[Tensor] = []  # what the structs point at
    jobs = (library.Draw * len(rest))(*(_job(logits[i], draws[i], alive) for i in rest))
    if rest:
        check(team.calls.hw_draw_all(team.handle, jobs, len(rest)))
    for i, job in zip(rest, jobs, strict=True):
        if job.token == NOTHING_ALLOWED:
            raise InvalidMask(f"the logit mask allows none of {logits.shape[1]} tokens; allow at least one")
        tokens[i] = job.token
    return [tokens[i] for i in range(len(draws))]


def _job(row: Tensor, draw: Draw, alive: list[Tensor]) -> library.Draw:
    how = draw.sampling
    job = library.Draw(
        logits=row.data_ptr(),
        temperature=how.temperature,
        top_p=how.top_p,
        min_p=how.min_p,
        uniform=draw.uniform,
        vocab=len(row),
        top_k=how.top_k,
    )
    if draw.allowed is not None:
        allowed = draw.allowed.contiguous()
        alive.append(allowed)
        job.allowed = allowed.data_ptr()
    if how.bias or how.penalizes:
        ids, scores = sampling.changed(row, draw)
        ids = ids.to(torch.int32)
        alive += (ids, scores)
        job.changed, job.scores, job.changes = ids.data_ptr(), scores.data_ptr(), len(ids)
    return job
