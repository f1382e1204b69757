"""`POST /lab/api/trace`: one pass over a prompt, and everything requested about its last token.

    prompt + take ──▶ tokens ──▶ [ before ][ rows ] ──▶ Forward: probes at the last row, scores at each ──▶ response

Tokens before the rows are computed causally (or taken from the prefix cache). A mask applies to the rows; tokens before
them are then computed in a pass of their own, so that attention can skip pages that all rows mask.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, InvalidMask, WrongType
from headway.base.rng import fresh_seed
from headway.base.specs.brle import Brle
from headway.base.specs.masks import Mask
from headway.base.specs.probes import AttentionScores, Entropy, LogitLens, Logits, Rank, Ranking
from headway.base.specs.samplers import Sampling
from headway.kernels.host import sampling
from headway.program.context import Context
from headway.program.engine import Engine
from headway.program.forward import Forward
from headway.program.output import Output
from headway.runtime.profile import Sample, measure_bandwidth
from headway.server.api.checks import RequestChecks
from headway.server.api.parsing import JsonRoute
from headway.server.api.prompts import read_prompts
from headway.server.api.tokens import text_of
from headway.server.errors import ApiError, bad_request
from headway.server.lab.schema import (
    AttentionArray,
    AttentionOptions,
    Base64Array,
    BoundMask,
    LensLayer,
    MaskRow,
    MaskRule,
    PageInfo,
    PhaseTime,
    SamplingOptions,
    SamplingResult,
    TokenScore,
    TraceRequest,
    TraceResponse,
    TraceStats,
    TraceTiming,
)
from headway.server.models import requested_model
from headway.server.serving import Serving
from headway.server.threads import WorkerThreads

MAX_ROWS = 512  # masked or scored in one pass
MAX_SCORES = 1 << 22  # attention values in one response
MAX_LENS = 256
MAX_DRAWS = 1024

router = APIRouter(route_class=JsonRoute)


@dataclass(frozen=True, eq=False)
class TokenSequence:
    """The tokens of a trace: a prompt and the tokens taken after it."""

    prompt: tuple[int, ...]
    take: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.take)


@dataclass(frozen=True, eq=False)
class TracePlan:
    """The plan of a trace: every value checked against the model and the server's limits."""

    sequence: TokenSequence
    rows: int  # how many of the last tokens are rows of the pass
    masks: tuple[Brle, ...] | None  # what each attends to, 1 = attend
    sampler: Sampling | None
    draws: int
    lens: LogitLens | None
    layers: tuple[int, ...]  # whose attention is read
    attended: int  # of how many of the last tokens
    scores: int


@router.post("/lab/api/trace", summary="Trace one pass", response_model=TraceResponse)
async def trace(body: TraceRequest, request: Request) -> Response:
    """One forward pass over a prompt: logits, sampling, the logit lens, attention, a mask."""
    serving: Serving = request.app.state.serving
    lease, tenant = await requested_model(request, body.model), serving.tenant(request)
    engine = lease.engine
    check = RequestChecks(serving, engine)
    priority = check.priority(body.priority, tenant)
    with serving.queue_slot(tenant):
        sequence = await read_sequence(body.prompt, body.take, check)
        plan = await serving.readers.run(plan_trace, body, sequence, check)
    async with serving.admit(tenant, tokens=len(sequence.tokens) + 1, lease=lease) as admitted:
        admitted.prompt(len(sequence.tokens))
        async with engine.context(priority=priority, salt=tenant.salt) as context:
            result = await _run(context, plan, body, lease.name, serving.writers)
        admitted.finish("stop")
    text = await serving.writers.run(lambda: result.model_dump_json(exclude_none=True))
    return Response(text, media_type="application/json")


async def read_sequence(prompt: str | list[int], take: list[int], check: RequestChecks) -> TokenSequence:
    """The tokens of a prompt and those taken after it, which must fit the context and the KV cache."""
    if isinstance(prompt, list) and not prompt:
        raise bad_request("prompt is empty; pass text or tokens", "prompt")
    (read,) = await read_prompts(prompt, check)
    sequence = TokenSequence(read.ids, check.ids("take", take))
    check.max_new_tokens(len(sequence.tokens), 0, 0, "prompt")
    return sequence


# -- reading the request -----------------------------------------------------------------------------------------------


def plan_trace(body: TraceRequest, sequence: TokenSequence, check: RequestChecks) -> TracePlan:
    """The plan of a request; raises an `ApiError` that names the field."""
    count, layers = len(sequence.tokens), check.engine.config.layers
    scores = check.in_range("scores", body.scores, 0, min(MAX_ROWS, count) - 1) or 0
    masks = () if body.mask is None else _row_masks(body.mask, count, check)
    attended = (
        1
        if body.attention is None
        else check.in_range("attention.rows", body.attention.rows, 1, min(MAX_ROWS, count)) or 1
    )
    rows = max(1, len(masks), scores + 1, attended)
    open_ = [Brle.ones(count - i) for i in range(rows - 1, len(masks) - 1, -1)]  # rows before the masked ones
    draws = 0 if body.sampling is None else check.in_range("sampling.draws", body.sampling.draws, 0, MAX_DRAWS) or 0
    return TracePlan(
        sequence=sequence,
        rows=rows,
        masks=(*open_, *masks) if masks else None,
        sampler=None if body.sampling is None else _sampler(body.sampling, check),
        draws=draws,
        lens=None if body.lens is None else _lens(body.lens.k, body.lens.layers, layers, check),
        layers=() if body.attention is None else _layers(body.attention.layers, check, count * attended),
        attended=attended,
        scores=scores,
    )


def _row_masks(rule: MaskRule, count: int, check: RequestChecks) -> tuple[Brle, ...]:
    """What each of the last tokens attends to."""
    most = min(MAX_ROWS, count)
    listed = len(rule.runs) if rule.runs is not None else None
    if listed is not None and (rule.window, rule.sink) != (None, None):
        raise bad_request("mask has runs and window or sink; pass one of them", "mask.runs")
    if listed is not None and rule.rows not in (None, listed):
        raise bad_request(f"mask.rows is {rule.rows} and mask.runs has {listed} rows; pass one of them", "mask.rows")
    rows = check.in_range("mask.rows", listed if listed is not None else rule.rows, 1, most)
    rows = most if rows is None else rows
    try:
        mask = _mask(rule)
        masks = mask.bind(count - rows, rows)
    except (InvalidMask, InvalidInput, WrongType) as error:
        raise bad_request(str(error), "mask", "invalid_mask") from error
    for i, row in enumerate(masks):
        if not row.any():
            raise bad_request(
                f"mask row {i} (token {count - rows + i}) attends to none of its {len(row)} slots; it needs at least 1",
                "mask",
                "invalid_mask",
            )
    return masks


def _mask(rule: MaskRule) -> Mask:
    if rule.runs is not None:
        return Mask.from_runs(rule.runs)
    if rule.sink is not None:
        return Mask.sink(rule.sink, 1 if rule.window is None else rule.window)
    return Mask.causal() if rule.window is None else Mask.window(rule.window)


def _sampler(options: SamplingOptions, check: RequestChecks) -> Sampling:
    values: dict[str, Any] = options.model_dump(exclude={"draws", "logit_bias"})
    values["seed"] = fresh_seed() if options.seed is None else options.seed
    try:
        return Sampling(**values, logit_bias=check.bias(options.logit_bias or {}))
    except (InvalidInput, WrongType) as error:
        raise bad_request(f"sampling: {error}", "sampling", "out_of_range") from error


def _lens(k: int, layers: list[int] | None, count: int, check: RequestChecks) -> LogitLens:
    most = min(MAX_LENS, check.engine.vocab_size)
    check.in_range("lens.k", k, 1, most)
    chosen = range(count + 1) if layers is None else layers
    for layer in chosen:
        check.in_range("lens.layers", layer, 0, count)
    check.size("lens.layers", len(chosen), count + 1)
    return LogitLens(list(chosen), k)


def _layers(layers: list[int] | None, check: RequestChecks, slots: int) -> tuple[int, ...]:
    config = check.engine.config
    chosen = tuple(range(config.layers) if layers is None else layers)
    for layer in chosen:
        check.in_range("attention.layers", layer, 0, config.layers - 1)
    values = len(chosen) * config.heads * slots
    if values > MAX_SCORES or len(chosen) > config.layers:
        raise bad_request(
            f"{len(chosen)} layers of attention have {values} values; at most {MAX_SCORES} are allowed: pass fewer",
            "attention.layers",
            "too_many",
        )
    return chosen


# -- the pass ----------------------------------------------------------------------------------------------------------


async def _run(
    context: Context, plan: TracePlan, body: TraceRequest, name: str, writers: WorkerThreads
) -> TraceResponse:
    engine, tokens = context.engine, plan.sequence.tokens
    context.fill(tokens[: len(tokens) - plan.rows])
    if plan.masks is not None and plan.rows < len(tokens):
        await context.flush()
    forward = context.forward().input(tokens[len(tokens) - plan.rows :])
    if plan.masks is not None:
        forward.attention_mask([list((~row).runs) for row in plan.masks])
    handles = _Handles(forward, plan)
    sample = None
    if body.profile:
        out, sample = await _run_profiled(forward, engine)
    else:
        out = await forward.execute()
    result = handles.read(out, pages_of(context), sample)
    return await writers.run(_response, result, plan, body, name, engine)


class _Handles:
    """The readouts of the pass."""

    def __init__(self, forward: Forward, plan: TracePlan) -> None:
        tokens = plan.sequence.tokens
        self._how = plan
        self._logits = forward.probe(-1, Logits())
        self._lens = None if plan.lens is None else forward.probe(-1, plan.lens)
        self._attention = [
            [forward.probe(row, AttentionScores(layer)) for row in range(plan.rows - plan.attended, plan.rows)]
            for layer in plan.layers
        ]
        self._ranks, self._entropies = [], []
        for i in range(plan.scores):  # the row before each scored token has its probability
            row, token = plan.rows - 1 - plan.scores + i, tokens[len(tokens) - plan.scores + i]
            self._ranks.append(forward.probe(row, Ranking(0, ids=[token])))
            self._entropies.append(forward.probe(row, Entropy()))
        self._sampling_result = None
        if plan.sampler is not None and plan.draws:
            history, taken = tokens, plan.sequence.take
            self._sampling_result = forward.sample([-1] * plan.draws, plan.sampler, history=history, generated=taken)

    def read(self, out: Output, pages: list[PageInfo], sample: Sample | None) -> _TraceResult:
        ranks = [out.ranking(handle).ids[0] for handle in self._ranks]
        entropies = [out.entropy(handle) for handle in self._entropies]
        return _TraceResult(
            stats=TraceStats(**{name: getattr(out.stats, name) for name in TraceStats.model_fields}),
            logits=out.logits(self._logits),
            tokens=[] if self._sampling_result is None else out.tokens(self._sampling_result),
            lens=[] if self._lens is None else out.lens(self._lens),
            attention=[[out.attention(handle) for handle in rows] for rows in self._attention],
            scores=[token_score(rank, entropy) for rank, entropy in zip(ranks, entropies, strict=True)],
            pages=pages,
            sample=sample,
        )


@dataclass(frozen=True, eq=False)
class _TraceResult:
    """What the pass returned."""

    stats: TraceStats
    logits: np.ndarray
    tokens: list[int]
    lens: list[tuple[np.ndarray, np.ndarray]]
    attention: list[list[np.ndarray]]  # of each layer, of each row, [H, slots]
    scores: list[TokenScore]
    pages: list[PageInfo]
    sample: Sample | None


async def _run_profiled(forward: Forward, engine: Engine) -> tuple[Output, Sample | None]:
    """Run the pass and profile its steps, which may include passes of other requests."""
    if engine.is_profiling:
        raise ApiError(
            409,
            "another pass is being profiled, one at a time; try again, or without profile",
            code="busy",
            headers={"Retry-After": "1"},
        )
    engine.enable_profiling(automatic=False)
    try:
        out = await forward.execute()
    finally:
        sample = engine.disable_profiling()
    return out, sample


def token_score(rank: Rank, entropy: float) -> TokenScore:
    """The score of a token; without a log-probability if its probability is 0, since JSON has no infinity."""
    logprob = rank.logprob if rank.logprob > -np.inf else None
    return TokenScore(id=rank.id, logprob=logprob, rank=rank.rank, entropy=float(entropy))


def pages_of(context: Context) -> list[PageInfo]:
    """The pages of a context, and the number of their holders."""
    return [PageInfo(page=one.page, state=one.state, holders=one.holders) for one in context.inner().pages]


# -- the response ------------------------------------------------------------------------------------------------------


def _response(result: _TraceResult, plan: TracePlan, body: TraceRequest, model: str, engine: Engine) -> TraceResponse:
    """The response, built in a thread."""
    tokens = plan.sequence.tokens
    return TraceResponse(
        model=model,
        tokens=list(tokens),
        texts=[text_of(id, engine, "") for id in tokens],
        prompt_tokens=len(plan.sequence.prompt),
        position=len(tokens) - 1,
        vocab_size=engine.vocab_size,
        page_size=engine.page_size,
        stats=result.stats,
        pages=result.pages,
        logits=Base64Array.of(result.logits, "float32") if body.logits else None,
        sampling=None if plan.sampler is None else _sampling_result(plan.sampler, plan.sequence, result),
        lens=None if plan.lens is None else _lens_layers(plan.lens, result),
        attention=None if body.attention is None else _attention(body.attention, plan, result),
        mask=None if plan.masks is None else _mask_response(plan.masks, len(tokens), engine.page_size),
        scores=result.scores if body.scores else None,
        time=None if result.sample is None else _timing(result.sample, engine),
    )


def _sampling_result(sampler: Sampling, sequence: TokenSequence, result: _TraceResult) -> SamplingResult:
    """The distribution that the engine samples from, over the whole vocabulary."""
    counts = Counter(sequence.take)
    generated = (np.array(list(counts), np.int64), np.array(list(counts.values()), np.int64))
    seen = np.array(sorted(set(sequence.tokens)), np.int64)
    ids, probs = sampling.sampling_distribution(result.logits, sampler, seen=seen, generated=generated)
    assert sampler.seed is not None
    return SamplingResult(
        ids=Base64Array.of(ids, "int32"),
        probs=Base64Array.of(probs, "float64"),
        seed=sampler.seed,
        tokens=result.tokens,
    )


def _lens_layers(lens: LogitLens, result: _TraceResult) -> list[LensLayer]:
    return [
        LensLayer(layer=layer, ids=ids.tolist(), probs=probs.tolist())
        for layer, (ids, probs) in zip(lens.layers, result.lens, strict=True)
    ]


def _attention(options: AttentionOptions, plan: TracePlan, result: _TraceResult) -> AttentionArray:
    shape = (len(plan.layers), plan.attended, *(result.attention[0][-1].shape if plan.layers else (0, 0)))
    array = np.zeros(shape, np.float32)  # [L, R, H, slots]; a row ends at its own slot
    for layer, rows in enumerate(result.attention):
        for i, row in enumerate(rows):
            array[layer, i, :, : row.shape[-1]] = row
    array = array[:, -1] if options.rows is None else array
    return AttentionArray(layers=list(plan.layers), array=Base64Array.of(np.ascontiguousarray(array), "float32"))


def _mask_response(masks: tuple[Brle, ...], count: int, size: int) -> BoundMask:
    rows = [MaskRow(attend=list(row.runs), raw=list((~row).runs)) for row in masks]
    first = count - len(masks)
    seen = {p for row in masks for a, b in row.intervals() for p in range(a // size, (b - 1) // size + 1)}
    all_open = all(row.all() for row in masks)  # the same as no mask: no page is skipped
    trimmed = [] if all_open else [p for p in range(first // size) if p not in seen]
    return BoundMask(first=first, rows=rows, trimmed=trimmed)


def _timing(sample: Sample, engine: Engine) -> TraceTiming:
    return TraceTiming(
        tokens=sample.tokens,
        seconds=sample.seconds,
        bandwidth_limit=measure_bandwidth(engine.info.device),
        phases=[PhaseTime(name=p.name, seconds=p.seconds, bytes=p.bytes, calls=p.calls) for p in sample.phases],
    )
