"""`POST /v1/completions`: continues prompts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.dataclass import dataclass
from headway.models.adapters.adapter import Adapter
from headway.program.chat.reader import ReplyReader
from headway.program.context import Context
from headway.program.generation.generator import Generation
from headway.program.generation.steps import Step
from headway.server.api.beams import FoundSequence, search
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.plan import RequestPlan, plan_request
from headway.server.api.prompts import Prompt, read_prompts, score_prompt, scored_tokens
from headway.server.api.request_schema import CompletionRequest
from headway.server.api.respond import DONE, FINISH_REASONS, TokenUsage, check_stream_options, respond
from headway.server.api.response_schema import Completion, whole_or_stream
from headway.server.api.streaming import Put, forks, run_all
from headway.server.api.tokens import ScoredToken, TokenStream, completion_logprobs, prompt_logprobs
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.models import ModelLease, requested_model
from headway.server.serving import AdmittedRequest, Serving
from headway.text.replies.parts import Content

DEFAULT_MAX_TOKENS = 16  # as OpenAI has it
CONCURRENT_PROMPTS = 16  # of one request
CONCURRENT_SEQUENCES = 64  # of one request with several prompts: more would wait for each other's pages

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/completions", summary="Continue a prompt", responses=whole_or_stream(Completion))
async def completions(body: CompletionRequest, request: Request) -> Response:
    """A continuation of each prompt, whole or as a stream of server-sent events."""
    serving: Serving = request.app.state.serving
    tenant = serving.tenant(request)
    lease = await requested_model(request, body.model)
    check_stream_options(body)
    with serving.queue_slot(tenant):
        job = await plan_completion(body, serving, tenant, lease)
    return await respond(serving, request, body, job, tokens=job.tokens, lease=lease)


@dataclass(frozen=True)
class TextCut:
    """What is kept of a piece of text, and how much of it was read: a token that begins after that does not count."""

    text: str
    read: int


@dataclass(frozen=True)
class CompletionExtras:
    """What other APIs ask of a completion, and OpenAI's does not.

    `cut` makes a function for each sequence, of each piece of its text: it returns where the sequence ends, as
    `max_tokens` would end it, and None while it goes on. With `warms` prompts are computed also for no token.
    """

    cut: Callable[[], Callable[[str], TextCut | None]] | None = None
    warms: bool = False
    penalize_prompt: bool = False  # the repetition penalty counts the prompt
    adapters: tuple[tuple[Adapter, float], ...] | None = None  # instead of the one that the model's name says
    limits: tuple[int, ...] = ()  # `max_tokens` of each prompt, where they differ


async def plan_completion(
    body: CompletionRequest,
    serving: Serving,
    tenant: Tenant,
    lease: ModelLease,
    extras: CompletionExtras = CompletionExtras(),
) -> CompletionJob:
    """The job of a request that passes all checks, with its prompts."""
    check, n = RequestChecks(serving, lease.engine), body.n or 1
    count = n if body.use_beam_search else _count(body, check)
    top_logprobs = body.logprobs if body.logprobs is not None or count == n else 0  # best_of ranks by log-probability
    plan = await plan_request(body, serving, tenant, lease, top_logprobs=top_logprobs, grammar=None)
    adapters = plan.adapters if extras.adapters is None else extras.adapters
    plan = replace(plan, count=count, penalize_prompt=extras.penalize_prompt, adapters=adapters)
    max_tokens = _max_tokens(body, check, warms=extras.warms)
    _check_suffix(body)
    prompts = await read_prompts(
        body.prompt, check, truncate=body.truncate_prompt_tokens, max_tokens=max_tokens, suffix=body.suffix
    )
    job = CompletionJob(body, plan, prompts, max_tokens, extras)
    for prompt, limit in zip(prompts, job.limits, strict=True):
        check.max_new_tokens(len(prompt.ids), limit, plan.min_tokens, "prompt")
    if body.echo:
        check.prompt_logprobs("logprobs", job.usage.prompt, body.logprobs, n)
    check.prompt_logprobs("prompt_logprobs", job.usage.prompt, plan.prompt_logprobs, n)
    check.response_logprobs(body.stream, count * sum(job.limits), plan.top_logprobs)
    return job


def _count(body: CompletionRequest, check: RequestChecks) -> int:
    """How many sequences are generated for each prompt."""
    n = check.in_range("n", body.n, 1, check.settings.max_n) or 1
    best = check.in_range("best_of", body.best_of, 1, check.settings.max_best_of) or n
    if best < n:
        raise bad_request(f"best_of is {best} and n is {n}; it must be at least that", "best_of")
    if best > n and body.stream:
        raise bad_request(
            f"best_of is {best} and stream is set, but the best are known only at the end; remove one of them",
            "best_of",
        )
    return best


def _check_suffix(body: CompletionRequest) -> None:
    for name in ("echo", "truncate_prompt_tokens"):
        if body.suffix and getattr(body, name):
            raise bad_request(f"suffix and {name} cannot be combined; remove one of them", "suffix")


def _max_tokens(body: CompletionRequest, check: RequestChecks, *, warms: bool) -> int:
    given = check.in_range("max_tokens", body.max_tokens, 0, check.engine.config.max_positions)
    if given == 0 and not body.echo and body.prompt_logprobs is None and not warms:
        raise bad_request(
            "max_tokens is 0, so the response would be empty; pass echo or prompt_logprobs too", "max_tokens"
        )
    return DEFAULT_MAX_TOKENS if given is None else given


@dataclass(frozen=True)
class SequenceEnd:
    """Why a sequence ended, and when what happened, as `perf_counter` has it."""

    reason: str  # the step's own finish reason
    stop_string: str = ""  # the one that ended it
    cached: int = 0  # tokens of its prompt that were in the prefix cache
    began: float = 0.0  # its prompt
    first: float = 0.0  # its first token was there
    ended: float = 0.0


@dataclass(frozen=True)
class SequenceDelta:
    """New text and tokens of one sequence: `tokens` are those whose text is final, `new` how many were generated.

    The first delta of a sequence may echo its `prompt`, given by its number.
    """

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    new: int = 0
    finish: str | None = None
    prompt: int | None = None
    end: SequenceEnd | None = None  # with `finish`


@dataclass
class SequenceState:
    """One sequence so far."""

    texts: list[str] = field(default_factory=list)
    tokens: list[ScoredToken] = field(default_factory=list)
    finish: str | None = None

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens, by which `best_of` ranks."""
        ranks = [token.rank.logprob for token in self.tokens if token.rank is not None]
        return sum(ranks) / len(ranks) if ranks else float("-inf")


@dataclass(frozen=True, eq=False)
class SequenceInProgress:
    """A generation whose steps are read: after this text, which begins at an offset of what is echoed."""

    index: int
    generation: Generation | FoundSequence
    context: Context
    text_before: Sequence[int]
    offset: int


class CompletionJob:
    """The generation of one request, and its response."""

    id_prefix, object, chunk_object, last_event = "cmpl", "text_completion", "text_completion", DONE

    def __init__(
        self,
        body: CompletionRequest,
        plan: RequestPlan,
        prompts: Sequence[Prompt],
        max_tokens: int,
        extras: CompletionExtras = CompletionExtras(),
    ) -> None:
        self._body, self._plan, self._prompts, self._max_tokens = body, plan, prompts, max_tokens
        self._extras, self._limits = extras, extras.limits or (max_tokens,) * len(prompts)
        self._began = [0.0] * len(prompts)  # when each was begun
        self._sequences = [SequenceState() for _ in range(len(prompts) * plan.count)]
        self._scores: dict[int, list[Any]] = {}  # `prompt_logprobs` by the prompt's number, for all its choices
        self._echoed: dict[int, dict[str, Any]] = {}  # `logprobs` of echoed prompts
        self._begun: set[int] = set()  # sequences whose first chunk was sent
        self.usage = TokenUsage(prompt=sum(len(prompt.ids) for prompt in prompts))
        self.tokens = self.usage.prompt + plan.width * sum(self._limits)  # upper bound of what is computed

    @property
    def plan(self) -> RequestPlan:
        return self._plan

    @property
    def prompts(self) -> Sequence[Prompt]:
        return self._prompts

    @property
    def sequences(self) -> Sequence[SequenceState]:
        """Where the response is whole: what each of them has."""
        return self._sequences

    @property
    def limits(self) -> Sequence[int]:
        """The most tokens of each prompt's sequences."""
        return self._limits

    async def run(self, put: Put[SequenceDelta]) -> None:
        gate = asyncio.Semaphore(max(1, min(CONCURRENT_PROMPTS, CONCURRENT_SEQUENCES // self._plan.width)))
        await run_all(self._prompt(i, prompt, put, gate) for i, prompt in enumerate(self._prompts))

    async def _prompt(self, number: int, prompt: Prompt, put: Put[SequenceDelta], gate: asyncio.Semaphore) -> None:
        async with gate, self._plan.context() as home:
            self._began[number] = time.perf_counter()
            await self._fill_prompt(home, number, prompt)
            count, first = self._plan.count, number * self._plan.count
            if self._extras.warms and not self._max_tokens:
                await home.flush(adapter=self._plan.adapters)
            for index in range(first, first + count):
                finish = None if self._max_tokens else "length"
                if self._body.echo or finish:
                    text = prompt.text if self._body.echo else ""
                    end = None if finish is None else self._end(index, home, finish)
                    await put(SequenceDelta(index, text, finish=finish, prompt=number, end=end))
            offset = len(prompt.text) if self._body.echo else 0
            if self._max_tokens and self._plan.beams is not None:
                before = home.text_before
                ranked = await search(self._plan, home, self._plan.grammar, self._max_tokens)
                for index, one in enumerate(ranked, first):
                    await self._write(SequenceInProgress(index, one, home, before, offset), put)
            elif self._max_tokens:
                async with forks(home, count, self._plan.adapters) as contexts:
                    await run_all(self._generate(one, i, first + i, offset, put) for i, one in enumerate(contexts))
            self.usage.add_context(home)

    async def _fill_prompt(self, home: Context, number: int, prompt: Prompt) -> None:
        """Fill the prompt into the context, and keep its log-probabilities if requested, once for all choices."""
        shown, top_logprobs, engine = (
            self._body.logprobs if self._body.echo else None,
            self._plan.prompt_logprobs,
            self._plan.engine,
        )
        if shown is None and top_logprobs is None:
            home.fill(prompt.ids)
            return
        k = max(shown or 0, top_logprobs or 0)
        scores = await score_prompt(home, prompt.ids, k, self._plan.adapters)

        def keep_logprobs() -> None:
            if top_logprobs is not None:
                self._scores[number] = prompt_logprobs(scored_tokens(prompt, scores, top_logprobs, engine), engine)
            if shown is not None:
                self._echoed[number] = completion_logprobs(scored_tokens(prompt, scores, shown, engine), engine)

        await self._plan.writers.run(keep_logprobs)

    async def _generate(self, context: Context, number: int, index: int, offset: int, put: Put[SequenceDelta]) -> None:
        limit, before = self._limits[index // self._plan.count], context.text_before
        generation = self._plan.generation(context, number, self._plan.grammar, limit)
        await self._write(SequenceInProgress(index, generation, context, before, offset), put)

    async def _write(self, running: SequenceInProgress, put: Put[SequenceDelta]) -> None:
        generation, index = running.generation, running.index
        token_stream, before = TokenStream(self._plan.engine, running.text_before, running.offset), 0
        text_of_step = self._text_reader(generation, running.text_before)
        cut, first, at = None if self._extras.cut is None else self._extras.cut(), 0.0, running.offset
        async for given in generation:
            step, first = given, first or time.perf_counter()
            kept = before + len(step.tokens) if step.finish is None else len(generation.generated)
            text = text_of_step(step)
            ended = None if cut is None else cut(text)
            if ended is not None and (step.finish is None or ended.text != text):
                text, step = ended.text, replace(step, finish="length")
            tokens = token_stream.push(step, kept)
            if ended is not None:
                read = [token for token in tokens if token.offset < at + ended.read]
                tokens, kept = read, kept - (len(tokens) - len(read))
            at += len(text)
            finish = None if step.finish is None else FINISH_REASONS[step.finish]
            if text or tokens or finish or kept > before:
                why = None if step.finish is None else (step.finish, generation.stop_string or "")
                end = None if why is None else self._end(index, running.context, *why, first=first)
                await put(SequenceDelta(index, text, tuple(tokens), max(0, kept - before), finish, end=end))
            before = kept
            if finish:
                break
        self.usage.completion += before

    def _end(
        self, index: int, context: Context, reason: str, stop_string: str = "", *, first: float = 0.0
    ) -> SequenceEnd:
        began, now = self._began[index // self._plan.count], time.perf_counter()
        return SequenceEnd(reason, stop_string, context.cached_tokens, began, first or now, now)

    def _text_reader(self, generation: Generation | FoundSequence, before: Sequence[int]) -> Callable[[Step], str]:
        """A function of each step of a sequence: its text, with special tokens and the stop string where requested."""
        plan = self._plan
        special = plan.show_special and plan.engine.has_tokenizer
        reader = ReplyReader(plan.engine.tokenizer, None, special=True, continues=True) if special else None
        if reader is not None:
            reader.begin(before)

        def read(step: Step) -> str:
            text = step.text
            if reader is not None:
                text = "".join(part.text for part in reader.push(step) if isinstance(part, Content))
            stopped = plan.show_stop and step.finish == "stop"
            return text + (generation.stop_string or "") if stopped else text

        return read

    # -- the response ----------------------------------------------------------------------------------------------

    def add(self, delta: SequenceDelta, admitted: AdmittedRequest) -> None:
        if delta.new:
            admitted.tokens(delta.new, choice=delta.index)
        if delta.finish is not None:
            admitted.finish(delta.finish)
        if self._body.stream:
            return
        sequence = self._sequences[delta.index]
        sequence.texts.append(delta.text)
        sequence.tokens += delta.tokens
        sequence.finish = delta.finish or sequence.finish

    def response(self) -> dict[str, Any]:
        count, n = self._plan.count, self._body.n or 1
        choices: list[dict[str, Any]] = []
        for number in range(len(self._prompts)):
            candidates = self._sequences[number * count : (number + 1) * count]
            best = sorted(candidates, key=lambda one: -one.mean_logprob) if count > n else candidates
            best = [one for one in best[:n] if one.finish is not None]  # a search may find fewer
            choices += [self._choice(one, number, len(choices) + i) for i, one in enumerate(best)]
        return {"choices": choices}

    def _choice(self, sequence: SequenceState, number: int, index: int) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(sequence.texts),
            "logprobs": self._logprobs(sequence.tokens, number),
            "finish_reason": sequence.finish,
            **({"prompt_logprobs": self._scores[number]} if number in self._scores else {}),
            **self._ids(sequence.tokens, number),
        }

    def _ids(self, tokens: Iterable[ScoredToken], prompt: int | None) -> dict[str, Any]:
        """The ids of tokens and of the prompt, if requested."""
        if not self._body.return_token_ids:
            return {}
        own = {"token_ids": [token.id for token in tokens]}
        return own if prompt is None else own | {"prompt_token_ids": list(self._prompts[prompt].ids)}

    def _logprobs(self, tokens: Sequence[ScoredToken], prompt: int | None) -> dict[str, Any] | None:
        """The log-probabilities of tokens, after those of the echoed prompt."""
        if self._body.logprobs is None:
            return None
        own, before = completion_logprobs(tokens, self._plan.engine), self._echoed.get(-1 if prompt is None else prompt)
        return own if before is None else {name: before[name] + values for name, values in own.items()}

    @property
    def response_size(self) -> int:
        n, own = (
            self._body.n or 1,
            sum(len(sequence.tokens) for sequence in self._sequences) * ((self._plan.top_logprobs or 0) + 1),
        )
        shown = (self._body.logprobs or 0) + 1 if self._echoed else 0
        return own + n * self.usage.prompt * (
            shown + (0 if self._plan.prompt_logprobs is None else self._plan.prompt_logprobs + 1)
        )

    def chunk_size(self, deltas: Iterable[SequenceDelta]) -> int:
        if self._body.logprobs is None:
            return 0
        echoed = sum(len(self._prompts[delta.prompt].ids) for delta in deltas if delta.prompt is not None)
        return (echoed + sum(len(delta.tokens) for delta in deltas)) * (self._body.logprobs + 1)

    def chunks(self, delta: SequenceDelta) -> Iterable[dict[str, Any]]:
        if not (delta.text or delta.tokens or delta.finish):
            return
        shown = delta.tokens or (delta.prompt in self._echoed)
        logprobs = self._logprobs(delta.tokens, delta.prompt) if shown else None
        choice = {"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}
        yield {"choices": [choice | self._chunk_ids(delta)]}

    def _chunk_ids(self, delta: SequenceDelta) -> dict[str, Any]:
        """The ids of a chunk; the first one of each sequence has the prompt's too."""
        first = self._body.return_token_ids and delta.index not in self._begun
        self._begun.add(delta.index)
        return self._ids(delta.tokens, delta.index // self._plan.count if first else None)
