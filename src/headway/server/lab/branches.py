"""`POST /lab/api/branches`: continuations of one prompt as forks of one context, and the pages they share.

Nothing is kept between requests: the prompt and the branches are computed (or found in the prefix cache), looked at
while all of them are there, and released.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import numpy as np
from fastapi import APIRouter, Request

from headway.base.probes import Entropy, Ranking
from headway.program.context import Context
from headway.server.errors import bad_request
from headway.server.lab.tracing import MAX_ROWS, pages_of, read_sequence
from headway.server.lab.wire import Branch, Branches, BranchesRequest, Score
from headway.server.openai.answers import check_model
from headway.server.openai.bodies import JsonRoute
from headway.server.openai.checks import Check
from headway.server.serving import Serving

MAX_BRANCHES = 64

router = APIRouter(route_class=JsonRoute)


@router.post("/lab/api/branches", summary="Continuations of one prompt, and the pages they share")
async def branches(asked: BranchesRequest, request: Request) -> Branches:
    """Continuations of a prompt as forks: how likely their tokens were, and which pages they share."""
    serving: Serving = request.app.state.serving
    engine, tenant = serving.engine, serving.tenant(request)
    check_model(serving, asked.model)
    check = Check(serving)
    priority = check.priority(asked.priority, tenant)
    check.size("branches", len(asked.branches), MAX_BRANCHES)
    for i, branch in enumerate(asked.branches):
        if not branch:
            raise bad_request(f"branches[{i}] is empty; a branch has at least one token", "branches")
        check.size(f"branches[{i}]", len(branch), MAX_ROWS)
    with serving.counted(tenant):
        read = [await read_sequence(asked.prompt, branch, check) for branch in asked.branches or [[]]]
    prompt = read[0].prompt
    takes = [one.take for one in read if one.take]
    total = len(prompt) + sum(map(len, takes))
    check.length(total, 0, 0, "branches")  # all of them are there at once
    async with serving.admit(tenant, tokens=total) as ticket:
        ticket.prompt(total)
        async with engine.context(priority=priority, salt=tenant.salt) as home:
            home.fill(prompt[:-1])
            await home.flush()
            found = await _grown(home, prompt[-1], takes)
        ticket.finish("stop")
    return found.model_copy(update={"model": serving.model_name, "prompt_tokens": len(prompt)})


async def _grown(home: Context, last: int, takes: list[tuple[int, ...]]) -> Branches:
    """Forks with the branches in them, computed side by side."""
    with ExitStack() as stack:
        forks = [stack.enter_context(home.fork()) for _ in takes]
        done = await asyncio.gather(*(_grow(fork, last, take) for fork, take in zip(forks, takes, strict=True)))
        pages = [pages_of(fork) for fork in forks]
    held = [page.page for table in pages for page in table if page.page is not None]
    return Branches(
        model="",
        prompt_tokens=0,
        page_size=home.page_size,
        pages=len(set(held)),
        pages_alone=len(held),
        batch_size=max((size for _, size in done), default=0),
        branches=[
            Branch(tokens=list(take), pages=table, scores=scores)
            for take, table, (scores, _) in zip(takes, pages, done, strict=True)
        ],
    )


async def _grow(fork: Context, last: int, take: tuple[int, ...]) -> tuple[list[Score], int]:
    """Compute a branch behind the prompt's last token; how likely its tokens were, and how many passes ran with it."""
    forward = fork.forward().input([last, *take])
    ranks = [forward.probe(i, Ranking(0, ids=[token])) for i, token in enumerate(take)]
    entropies = [forward.probe(i, Entropy()) for i in range(len(take))]
    out = await forward.execute()
    found = [out.ranking(handle).ids[0] for handle in ranks]
    scores = [
        Score(
            id=r.id, logprob=r.logprob if r.logprob > -np.inf else None, rank=r.rank, entropy=float(out.entropy(handle))
        )
        for r, handle in zip(found, entropies, strict=True)
    ]
    return scores, out.stats.batch_size
