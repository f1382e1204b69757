"""`POST /v1/completions`: text that goes on from prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.program.context import Context
from headway.server.auth import Tenant
from headway.server.errors import bad_request
from headway.server.openai.checks import Check
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.plan import Plan, plan
from headway.server.openai.prompts import Prompt, read_prompts, score, spelled
from headway.server.openai.request_schema import CompletionRequest
from headway.server.openai.respond import REASONS, Usage, check_model, check_stream, respond
from headway.server.openai.response_schema import Completion, streams
from headway.server.openai.streaming import Put, copies, together
from headway.server.openai.tokens import Spelling, Token, completion_logprobs, prompt_logprobs
from headway.server.serving import Serving, Ticket

MAX_TOKENS = 16  # where a request says nothing, as with OpenAI
AT_ONCE = 16  # prompts of one request that are worked on together

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", summary="Text that goes on from a prompt", responses=streams(Completion))
async def completions(asked: CompletionRequest, request: Request) -> Response:
    """Text that goes on from each prompt, whole or as a stream of events."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    check_model(serving, asked.model)
    check_stream(asked)
    with serving.counted(tenant):
        job = await _settled(asked, serving, tenant)
    return await respond(serving, request, asked, job, tokens=job.tokens)


async def _settled(asked: CompletionRequest, serving: Serving, tenant: Tenant) -> Completions:
    """A request that can be answered, with its prompts."""
    check, n = Check(serving), asked.n or 1
    count = _count(asked, check)
    top = asked.logprobs if asked.logprobs is not None or count == n else 0  # the best are chosen by it
    how = await plan(asked, serving, tenant, top=top, grammar=None)
    how = replace(how, count=count)
    most = _max_tokens(asked, check)
    prompts = await read_prompts(asked.prompt, check)
    for prompt in prompts:
        check.length(len(prompt.ids), most, how.min_tokens, "prompt")
    job = Completions(asked, how, prompts, most)
    if asked.echo:
        check.prompt_scores("logprobs", job.usage.prompt, asked.logprobs, n)
    check.prompt_scores("prompt_logprobs", job.usage.prompt, how.prompt_top, n)
    check.answer_scores(asked.stream, len(prompts) * count * most, how.top)
    return job


def _count(asked: CompletionRequest, check: Check) -> int:
    """How many sequences are drawn for each prompt."""
    n = check.between("n", asked.n, 1, check.settings.max_n) or 1
    best = check.between("best_of", asked.best_of, 1, check.settings.max_best_of) or n
    if best < n:
        raise bad_request(f"best_of is {best} and n is {n}; it must not be smaller", "best_of")
    if best > n and asked.stream:
        raise bad_request(f"best_of is {best} with stream: the best are known at the end; leave one out", "best_of")
    return best


def _max_tokens(asked: CompletionRequest, check: Check) -> int:
    given = check.between("max_tokens", asked.max_tokens, 0, check.engine.config.max_positions)
    if given == 0 and not asked.echo and asked.prompt_logprobs is None:
        raise bad_request(
            "max_tokens is 0, so nothing would be answered; give echo or prompt_logprobs too", "max_tokens"
        )
    return MAX_TOKENS if given is None else given


@dataclass(frozen=True)
class Delta:
    """What has come of a sequence; `tokens` are those whose text is certain, and `new` how many were drawn.

    The first of a sequence may be its `prompt`, by its number.
    """

    index: int
    text: str = ""
    tokens: tuple[Token, ...] = ()
    new: int = 0
    finish: str | None = None
    prompt: int | None = None


@dataclass
class Sequenced:
    """One sequence, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish: str | None = None

    @property
    def goodness(self) -> float:
        """The log-probability a token, by which the best are chosen."""
        ranks = [token.rank.logprob for token in self.tokens if token.rank is not None]
        return sum(ranks) / len(ranks) if ranks else float("-inf")


class Completions:
    """The work of one request, and its answer."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, asked: CompletionRequest, how: Plan, prompts: Sequence[Prompt], max_tokens: int) -> None:
        self._asked, self._plan, self._prompts, self._max_tokens = asked, how, prompts, max_tokens
        self._found = [Sequenced() for _ in range(len(prompts) * how.count)]
        self._scores: dict[int, list[Any]] = {}  # `prompt_logprobs`, by the prompt's number; all its choices have them
        self._echoed: dict[int, dict[str, Any]] = {}  # the same as `logprobs` have them, when the prompt is echoed
        self.usage = Usage(prompt=sum(len(prompt.ids) for prompt in prompts))
        self.tokens = self.usage.prompt + len(prompts) * how.count * max_tokens  # that may be computed

    async def work(self, put: Put[Delta]) -> None:
        gate = asyncio.Semaphore(AT_ONCE)
        await together(self._prompt(i, prompt, put, gate) for i, prompt in enumerate(self._prompts))

    async def _prompt(self, number: int, prompt: Prompt, put: Put[Delta], gate: asyncio.Semaphore) -> None:
        async with gate, self._plan.context() as home:
            await self._open(home, number, prompt)
            count, first = self._plan.count, number * self._plan.count
            for index in range(first, first + count):
                finish = None if self._max_tokens else "length"
                if self._asked.echo or finish:
                    text = prompt.text if self._asked.echo else ""
                    await put(Delta(index, text, finish=finish, prompt=number))
            if self._max_tokens:
                offset = len(prompt.text) if self._asked.echo else 0
                async with copies(home, count) as contexts:
                    await together(self._draw(one, i, first + i, offset, put) for i, one in enumerate(contexts))
            self.usage.cached += home.cached_tokens

    async def _open(self, home: Context, number: int, prompt: Prompt) -> None:
        """Write the prompt, and keep the log-probabilities that were asked for, spelled once for all its choices."""
        shown, top, engine = (
            self._asked.logprobs if self._asked.echo else None,
            self._plan.prompt_top,
            self._plan.engine,
        )
        if shown is None and top is None:
            home.fill(prompt.ids)
            return
        scores = await score(home, prompt.ids, max(shown or 0, top or 0))

        def spell() -> None:
            if top is not None:
                self._scores[number] = prompt_logprobs(spelled(prompt, scores, top, engine), engine)
            if shown is not None:
                self._echoed[number] = completion_logprobs(spelled(prompt, scores, shown, engine), engine)

        await self._plan.writing.run(spell)

    async def _draw(self, context: Context, number: int, index: int, offset: int, put: Put[Delta]) -> None:
        generation = self._plan.generation(context, number, self._plan.grammar, self._max_tokens)
        spelling, before = Spelling(self._plan.engine, offset), 0
        async for step in generation:
            kept = before + len(step.tokens) if step.finish is None else len(generation.generated)
            tokens = spelling.push(step, kept)
            finish = None if step.finish is None else REASONS[step.finish]
            if step.text or tokens or finish or kept > before:
                await put(Delta(index, step.text, tuple(tokens), max(0, kept - before), finish))
            before = kept
        self.usage.completion += before

    # -- the answer ------------------------------------------------------------------------------------------------

    def take(self, delta: Delta, ticket: Ticket) -> None:
        if delta.new:
            ticket.tokens(delta.new, choice=delta.index)
        if delta.finish is not None:
            ticket.finish(delta.finish)
        if self._asked.stream:
            return
        found = self._found[delta.index]
        found.texts.append(delta.text)
        found.tokens += delta.tokens
        found.finish = delta.finish or found.finish

    def answer(self) -> dict[str, Any]:
        count, n = self._plan.count, self._asked.n or 1
        choices: list[dict[str, Any]] = []
        for number in range(len(self._prompts)):
            drawn = self._found[number * count : (number + 1) * count]
            best = sorted(drawn, key=lambda one: -one.goodness) if count > n else drawn
            choices += [self._choice(one, number, len(choices) + i) for i, one in enumerate(best[:n])]
        return {"choices": choices}

    def _choice(self, found: Sequenced, number: int, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(found.texts),
            "logprobs": self._logprobs(found.tokens, number),
            "finish_reason": found.finish,
            **({"prompt_logprobs": self._scores[number]} if number in self._scores else {}),
        }

    def _logprobs(self, tokens: Sequence[Token], prompt: int | None) -> dict[str, Any] | None:
        """Those of tokens, behind those of a prompt that is echoed."""
        if self._asked.logprobs is None:
            return None
        own, before = completion_logprobs(tokens, self._plan.engine), self._echoed.get(-1 if prompt is None else prompt)
        return own if before is None else {name: before[name] + values for name, values in own.items()}

    @property
    def whole_weight(self) -> int:
        n, own = self._asked.n or 1, sum(len(found.tokens) for found in self._found) * ((self._plan.top or 0) + 1)
        shown = (self._asked.logprobs or 0) + 1 if self._echoed else 0
        return own + n * self.usage.prompt * (
            shown + (0 if self._plan.prompt_top is None else self._plan.prompt_top + 1)
        )

    def weight(self, deltas: Iterable[Delta]) -> int:
        if self._asked.logprobs is None:
            return 0
        echoed = sum(len(self._prompts[delta.prompt].ids) for delta in deltas if delta.prompt is not None)
        return (echoed + sum(len(delta.tokens) for delta in deltas)) * (self._asked.logprobs + 1)

    def chunks(self, delta: Delta) -> Iterable[dict[str, Any]]:
        if not (delta.text or delta.tokens or delta.finish):
            return
        shown = delta.tokens or (delta.prompt in self._echoed)
        logprobs = self._logprobs(delta.tokens, delta.prompt) if shown else None
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}
        yield {"choices": [choice]}
