"""`POST /lab/api/branches`: continuations of one prompt as forks of one context, and the pages they share.

Nothing is kept between requests: the prompt and the branches are computed (or found in the prefix cache), looked at
while all of them are there, and released.
"""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter, Request

from headway.base.probes import Entropy, Ranking
from headway.program.context import Context
from headway.server.errors import bad_request
from headway.server.lab.schema import Branch, Branches, BranchesRequest, Score
from headway.server.lab.tracing import MAX_ROWS, pages_of, read_sequence, scored
from headway.server.openai.checks import Check
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.respond import check_model
from headway.server.openai.streaming import together
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
    if not asked.branches:
        raise bad_request("branches is empty; give at least one", "branches")
    for i, branch in enumerate(asked.branches):
        if not branch:
            raise bad_request(f"branches[{i}] is empty; a branch has at least one token", "branches")
        check.size(f"branches[{i}]", len(branch), MAX_ROWS)
    with serving.counted(tenant):
        prompt = (await read_sequence(asked.prompt, [], check)).prompt
    takes = [check.ids("branches", branch, f"branches[{i}]") for i, branch in enumerate(asked.branches)]
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
    """The branches, while all of them are there."""
    with ExitStack() as stack:
        tree = _Tree(takes, stack)
        await tree.grow(home, last, list(range(len(takes))), 0)
        pages = [pages_of(tree.leaves[i]) for i in range(len(takes))]
    held = [page.page for table in pages for page in table if page.page is not None]
    return Branches(
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
    """Forks where branches part: what several have in common is computed once, in the context they are forked from."""

    def __init__(self, takes: list[tuple[int, ...]], stack: ExitStack) -> None:
        self._takes, self._stack = takes, stack
        self.leaves: dict[int, Context] = {}
        self.scores: list[list[Score]] = [[] for _ in takes]
        self.batch_size = 0

    async def grow(self, context: Context, last: int, group: list[int], depth: int) -> None:
        """Grow the branches of a group, which are the same up to `depth`; `last` is the token before, not computed."""
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
        parted: dict[tuple[int, ...], list[int]] = {}  # by the next token; each that ends here is alone
        for i in group:
            rest = self._takes[i][depth + size :]
            parted.setdefault(rest[:1] or (-1, i), []).append(i)
        after = run[-1] if run else last
        children = [(self._stack.enter_context(context.fork()), part) for part in parted.values()]
        await together(self.grow(fork, after, part, depth + size) for fork, part in children)

    async def _score(self, context: Context, rows: list[int], run: tuple[int, ...]) -> list[Score]:
        """Compute rows; how likely each token of the run was at the row before it."""
        if not rows:
            return []
        forward = context.forward().input(rows)
        ranks = [forward.probe(i, Ranking(0, ids=[token])) for i, token in enumerate(run)]
        entropies = [forward.probe(i, Entropy()) for i in range(len(run))]
        out = await forward.execute()
        self.batch_size = max(self.batch_size, out.stats.batch_size)
        return [
            scored(out.ranking(rank).ids[0], out.entropy(entropy))
            for rank, entropy in zip(ranks, entropies, strict=True)
        ]


def _common(first: tuple[int, ...], others: list[tuple[int, ...]]) -> int:
    """How many leading tokens all have."""
    columns = zip(first, *others, strict=False)
    return next((i for i, column in enumerate(columns) if len(set(column)) > 1), min(map(len, [first, *others])))
