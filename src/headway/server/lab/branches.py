"""`POST /lab/api/branches`: continuations of one prompt as forks of one context, and the pages they share.

Nothing is kept between requests: the prompt and the branches are computed (or taken from the prefix cache), inspected
while all of them exist, and released.
"""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter, Request

from headway.base.specs.probes import Entropy, Ranking
from headway.program.context import Context
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.streaming import run_all
from headway.server.errors import bad_request
from headway.server.lab.schema import Branch, BranchesRequest, BranchesResponse, TokenScore
from headway.server.lab.tracing import MAX_ROWS, pages_of, read_sequence, token_score
from headway.server.models import requested_model
from headway.server.serving import Serving

MAX_BRANCHES = 64

router = APIRouter(route_class=JsonRoute)


@router.post("/lab/api/branches", summary="Continuations of one prompt, and the pages they share")
async def branches(body: BranchesRequest, request: Request) -> BranchesResponse:
    """Continuations of a prompt as forks: how likely their tokens were, and which pages they share."""
    serving: Serving = request.app.state.serving
    lease, tenant = await requested_model(request, body.model), serving.tenant(request)
    engine = lease.engine
    check = RequestChecks(serving, engine)
    priority = check.priority(body.priority, tenant)
    check.size("branches", len(body.branches), MAX_BRANCHES)
    if not body.branches:
        raise bad_request("branches is empty; pass at least one", "branches")
    for i, branch in enumerate(body.branches):
        if not branch:
            raise bad_request(f"branches[{i}] is empty; a branch must have at least one token", "branches")
        check.size(f"branches[{i}]", len(branch), MAX_ROWS)
    with serving.queue_slot(tenant):
        prompt = (await read_sequence(body.prompt, [], check)).prompt
    takes = [check.ids("branches", branch, f"branches[{i}]") for i, branch in enumerate(body.branches)]
    total = len(prompt) + sum(map(len, takes))
    check.max_new_tokens(total, 0, 0, "branches")  # all of them exist at the same time
    async with serving.admit(tenant, tokens=total, lease=lease) as admitted:
        admitted.prompt(total)
        async with engine.context(priority=priority, salt=tenant.salt) as home:
            home.fill(prompt[:-1])
            await home.flush()
            response = await _grow_branches(home, prompt[-1], takes)
        admitted.finish("stop")
    return response.model_copy(update={"model": lease.name, "prompt_tokens": len(prompt)})


async def _grow_branches(home: Context, last: int, takes: list[tuple[int, ...]]) -> BranchesResponse:
    """The branches, inspected while all of them exist."""
    with ExitStack() as stack:
        tree = _Tree(takes, stack)
        await tree.grow(home, last, list(range(len(takes))), 0)
        pages = [pages_of(tree.leaves[i]) for i in range(len(takes))]
    held = [page.page for table in pages for page in table if page.page is not None]
    return BranchesResponse(
        model="",
        prompt_tokens=0,
        page_size=home.page_size,
        pages=len(set(held)),
        pages_alone=len(held),
        batch_size=tree.batch_size,
        branches=[
            Branch(tokens=list(take), pages=table, scores=scores)
            for take, table, scores in zip(takes, pages, tree.scores, strict=True)
        ],
    )


class _Tree:
    """Forks where branches diverge: a common prefix is computed once, in the context they are forked from."""

    def __init__(self, takes: list[tuple[int, ...]], stack: ExitStack) -> None:
        self._takes, self._stack = takes, stack
        self.leaves: dict[int, Context] = {}
        self.scores: list[list[TokenScore]] = [[] for _ in takes]
        self.batch_size = 0

    async def grow(self, context: Context, last: int, group: list[int], depth: int) -> None:
        """Grow the branches of a group, which are equal up to `depth`; `last` is the token before, not computed yet."""
        first, *others = (self._takes[i][depth:] for i in group)
        size = len(first) if not others else _common(first, others)
        run = first[:size]
        ends = not others
        scores = await self._score(context, [last, *run] if ends else [last, *run][:size], run)
        for i in group:
            self.scores[i] += scores
        if ends:
            self.leaves[group[0]] = context
            return
        groups: dict[tuple[int, ...], list[int]] = {}  # by the next token; each branch that ends here is its own group
        for i in group:
            rest = self._takes[i][depth + size :]
            groups.setdefault(rest[:1] or (-1, i), []).append(i)
        after = run[-1] if run else last
        children = [(self._stack.enter_context(context.fork()), part) for part in groups.values()]
        await run_all(self.grow(fork, after, part, depth + size) for fork, part in children)

    async def _score(self, context: Context, rows: list[int], run: tuple[int, ...]) -> list[TokenScore]:
        """Compute rows, and score each token of the run at the row before it."""
        if not rows:
            return []
        forward = context.forward().input(rows)
        ranks = [forward.probe(i, Ranking(0, ids=[token])) for i, token in enumerate(run)]
        entropies = [forward.probe(i, Entropy()) for i in range(len(run))]
        out = await forward.execute()
        self.batch_size = max(self.batch_size, out.stats.batch_size)
        return [
            token_score(out.ranking(rank).ids[0], out.entropy(entropy))
            for rank, entropy in zip(ranks, entropies, strict=True)
        ]


def _common(first: tuple[int, ...], others: list[tuple[int, ...]]) -> int:
    """The length of the common prefix."""
    columns = zip(first, *others, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, [first, *others])))
