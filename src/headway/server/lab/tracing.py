"""`POST /lab/api/trace`: one pass over a prompt, and everything that was asked about its last token.

    prompt + take ──▶ tokens ──▶ [ before ][ rows ] ──▶ Forward: probes at the last row, scores at each ──▶ Trace

Tokens before the rows are computed causally (or found in the prefix cache). A mask binds rows; so that pages which all
rows mask can be left out, what comes before them is then computed in a pass of its own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fastapi import APIRouter, Request
from starlette.responses import Response

from headway.base.brle import Brle
from headway.base.errors import InvalidInput, InvalidMask, WrongType
from headway.base.masks import Mask
from headway.base.probes import AttentionScores, Entropy, LogitLens, Logits, Rank, Ranking
from headway.base.rng import fresh_seed
from headway.base.samplers import Sampling
from headway.kernels.reference import sampling
from headway.program.context import Context
from headway.program.engine import Engine
from headway.program.forward import Forward
from headway.program.output import Output
from headway.runtime.profile import Sample, measure_bandwidth
from headway.server.errors import ApiError, bad_request
from headway.server.lab.schema import (
    Bound,
    Drawn,
    Knobs,
    LensLayer,
    MaskRow,
    MaskRule,
    Packed,
    PageInfo,
    PhaseTime,
    Score,
    Scores,
    Stats,
    Timing,
    Trace,
    TraceRequest,
)
from headway.server.openai.checks import Check
from headway.server.openai.parsing import JsonRoute
from headway.server.openai.prompts import read_prompts
from headway.server.openai.respond import check_model
from headway.server.openai.tokens import text_of
from headway.server.serving import Serving

MAX_ROWS = 512  # that a mask binds, or that are scored, in one pass
MAX_SCORES = 1 << 22  # attention values in one answer
MAX_LENS = 256
MAX_DRAWS = 1024

router = APIRouter(route_class=JsonRoute)


@dataclass(frozen=True, eq=False)
class Sequence:
    """The tokens of a trace: a prompt and what was taken behind it."""

    prompt: tuple[int, ...]
    take: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.take)


@dataclass(frozen=True, eq=False)
class Asked:
    """A trace, settled: every value read against the model and the server's limits."""

    sequence: Sequence
    rows: int  # the last tokens that are rows of the pass
    masks: tuple[Brle, ...] | None  # what each attends to, 1 = attend
    sampler: Sampling | None
    draws: int
    lens: LogitLens | None
    layers: tuple[int, ...]  # whose attention is read
    scores: int


@router.post("/lab/api/trace", summary="One pass, and everything about its last token", response_model=Trace)
async def trace(asked: TraceRequest, request: Request) -> Response:
    """One forward pass over a prompt: logits, what a sampler makes of them, the logit lens, attention, a mask."""
    serving: Serving = request.app.state.serving
    engine, tenant = serving.engine, serving.tenant(request)
    check_model(serving, asked.model)
    check = Check(serving)
    priority = check.priority(asked.priority, tenant)
    with serving.counted(tenant):
        sequence = await read_sequence(asked.prompt, asked.take, check)
        settled = await serving.reading.run(settle, asked, sequence, check)
    async with serving.admit(tenant, tokens=len(sequence.tokens) + 1) as ticket:
        ticket.prompt(len(sequence.tokens))
        async with engine.context(priority=priority, salt=tenant.salt) as context:
            found = await _traced(context, settled, asked, serving)
        ticket.finish("stop")
    body = await serving.writing.run(lambda: found.model_dump_json(exclude_none=True))
    return Response(body, media_type="application/json")


async def read_sequence(prompt: str | list[int], take: list[int], check: Check) -> Sequence:
    """The tokens of a prompt and those behind it, which must fit the model and the pages."""
    if isinstance(prompt, list) and not prompt:
        raise bad_request("prompt is empty; give it text or tokens", "prompt")
    (read,) = await read_prompts(prompt, check)
    sequence = Sequence(read.ids, check.ids("take", take))
    check.length(len(sequence.tokens), 0, 0, "prompt")
    return sequence


# -- reading the request -----------------------------------------------------------------------------------------------


def settle(asked: TraceRequest, sequence: Sequence, check: Check) -> Asked:
    """The request against the model; raises an `ApiError` that names the field."""
    count, layers = len(sequence.tokens), check.engine.config.layers
    scores = check.between("scores", asked.scores, 0, min(MAX_ROWS, count) - 1) or 0
    bound = () if asked.mask is None else _bound(asked.mask, count, check)
    rows = max(1, len(bound), scores + 1)
    open_ = [Brle.ones(count - i) for i in range(rows - 1, len(bound) - 1, -1)]  # rows before those of the mask
    draws = 0 if asked.sampling is None else check.between("sampling.draws", asked.sampling.draws, 0, MAX_DRAWS) or 0
    return Asked(
        sequence=sequence,
        rows=rows,
        masks=(*open_, *bound) if bound else None,
        sampler=None if asked.sampling is None else _sampler(asked.sampling, check),
        draws=draws,
        lens=None if asked.lens is None else _lens(asked.lens.k, asked.lens.layers, layers, check),
        layers=() if asked.attention is None else _layers(asked.attention.layers, check, count),
        scores=scores,
    )


def _bound(rule: MaskRule, count: int, check: Check) -> tuple[Brle, ...]:
    """What the last tokens attend to."""
    most = min(MAX_ROWS, count)
    listed = len(rule.runs) if rule.runs is not None else None
    if listed is not None and (rule.window, rule.sink) != (None, None):
        raise bad_request("mask has runs beside window or sink; give one of them", "mask.runs")
    if listed is not None and rule.rows not in (None, listed):
        raise bad_request(f"mask.rows is {rule.rows} and mask.runs has {listed} rows; give one of them", "mask.rows")
    rows = check.between("mask.rows", listed if listed is not None else rule.rows, 1, most)
    rows = most if rows is None else rows
    try:
        mask = _mask(rule)
        bound = mask.bind(count - rows, rows)
    except (InvalidMask, InvalidInput, WrongType) as error:
        raise bad_request(str(error), "mask", "invalid_mask") from error
    for i, row in enumerate(bound):
        if not row.any():
            raise bad_request(
                f"mask row {i} (token {count - rows + i}) attends to none of its {len(row)} slots; it needs at least 1",
                "mask",
                "invalid_mask",
            )
    return bound


def _mask(rule: MaskRule) -> Mask:
    if rule.runs is not None:
        return Mask.from_runs(rule.runs)
    if rule.sink is not None:
        return Mask.sink(rule.sink, 1 if rule.window is None else rule.window)
    return Mask.causal() if rule.window is None else Mask.window(rule.window)


def _sampler(knobs: Knobs, check: Check) -> Sampling:
    values: dict[str, Any] = knobs.model_dump(exclude={"draws", "logit_bias"})
    values["seed"] = fresh_seed() if knobs.seed is None else knobs.seed
    try:
        return Sampling(**values, logit_bias=check.bias(knobs.logit_bias or {}))
    except (InvalidInput, WrongType) as error:
        raise bad_request(f"sampling: {error}", "sampling", "out_of_range") from error


def _lens(k: int, layers: list[int] | None, count: int, check: Check) -> LogitLens:
    most = min(MAX_LENS, check.engine.vocab_size)
    check.between("lens.k", k, 1, most)
    chosen = range(count + 1) if layers is None else layers
    for layer in chosen:
        check.between("lens.layers", layer, 0, count)
    check.size("lens.layers", len(chosen), count + 1)
    return LogitLens(list(chosen), k)


def _layers(layers: list[int] | None, check: Check, slots: int) -> tuple[int, ...]:
    config = check.engine.config
    chosen = tuple(range(config.layers) if layers is None else layers)
    for layer in chosen:
        check.between("attention.layers", layer, 0, config.layers - 1)
    values = len(chosen) * config.heads * slots
    if values > MAX_SCORES or len(chosen) > config.layers:
        raise bad_request(
            f"attention of {len(chosen)} layers is {values} numbers; at most {MAX_SCORES} are given: name fewer layers",
            "attention.layers",
            "too_many",
        )
    return chosen


# -- the pass ----------------------------------------------------------------------------------------------------------


async def _traced(context: Context, how: Asked, asked: TraceRequest, serving: Serving) -> Trace:
    engine, tokens = context.engine, how.sequence.tokens
    context.fill(tokens[: len(tokens) - how.rows])
    if how.masks is not None and how.rows < len(tokens):
        await context.flush()
    forward = context.forward().input(tokens[len(tokens) - how.rows :])
    if how.masks is not None:
        forward.attention_mask([list((~row).runs) for row in how.masks])
    handles = _Handles(forward, how)
    measured = None
    if asked.profile:
        out, measured = await _profiled(forward, engine)
    else:
        out = await forward.execute()
    found = handles.read(out, pages_of(context), measured)
    return await serving.writing.run(_answer, found, how, asked, serving.model_name, engine)


class _Handles:
    """What is read of the pass, and where."""

    def __init__(self, forward: Forward, how: Asked) -> None:
        tokens = how.sequence.tokens
        self._how = how
        self._logits = forward.probe(-1, Logits())
        self._lens = None if how.lens is None else forward.probe(-1, how.lens)
        self._attention = [forward.probe(-1, AttentionScores(layer)) for layer in how.layers]
        self._ranks, self._entropies = [], []
        for i in range(how.scores):  # the row before each scored token says how likely it was
            row, token = how.rows - 1 - how.scores + i, tokens[len(tokens) - how.scores + i]
            self._ranks.append(forward.probe(row, Ranking(0, ids=[token])))
            self._entropies.append(forward.probe(row, Entropy()))
        self._drawn = None
        if how.sampler is not None and how.draws:
            history, taken = tokens, how.sequence.take
            self._drawn = forward.sample([-1] * how.draws, how.sampler, history=history, generated=taken)

    def read(self, out: Output, pages: list[PageInfo], measured: Sample | None) -> _Found:
        ranks = [out.ranking(handle).ids[0] for handle in self._ranks]
        entropies = [out.entropy(handle) for handle in self._entropies]
        return _Found(
            stats=Stats(**{name: getattr(out.stats, name) for name in Stats.model_fields}),
            logits=out.logits(self._logits),
            tokens=[] if self._drawn is None else out.tokens(self._drawn),
            lens=[] if self._lens is None else out.lens(self._lens),
            attention=[out.attention(handle) for handle in self._attention],
            scores=[scored(rank, entropy) for rank, entropy in zip(ranks, entropies, strict=True)],
            pages=pages,
            measured=measured,
        )


@dataclass(frozen=True, eq=False)
class _Found:
    """What the pass brought back."""

    stats: Stats
    logits: np.ndarray
    tokens: list[int]
    lens: list[tuple[np.ndarray, np.ndarray]]
    attention: list[np.ndarray]
    scores: list[Score]
    pages: list[PageInfo]
    measured: Sample | None


async def _profiled(forward: Forward, engine: Engine) -> tuple[Output, Sample | None]:
    """The pass, and where the time of the steps it ran in went, passes of others in them included."""
    if engine.profiler.enabled:
        raise ApiError(
            409,
            "another pass is being measured, one at a time; ask again, or without profile",
            code="busy",
            headers={"Retry-After": "1"},
        )
    engine.enable_profiling(automatic=False)
    try:
        out = await forward.execute()
    finally:
        with engine.lock:
            engine.profiler.enabled = False
            sample = engine.profiler.take()
    return out, sample


def scored(rank: Rank, entropy: float) -> Score:
    """What a pass says of a token; JSON has no infinity, so what could never come has no log-probability."""
    logprob = rank.logprob if rank.logprob > -np.inf else None
    return Score(id=rank.id, logprob=logprob, rank=rank.rank, entropy=float(entropy))


def pages_of(context: Context) -> list[PageInfo]:
    """The pages of a context, and who holds them."""
    engine, table = context.engine, context.table
    with engine.lock:
        found = []
        for number, page in enumerate(table.pages):
            if page is None:
                found.append(PageInfo(page=None, state="discarded", holders=0))
            elif page == 0:
                found.append(PageInfo(page=None, state="aside", holders=0))
            else:
                state = "committed" if number < table.committed else "working"
                found.append(PageInfo(page=page, state=state, holders=engine.allocator.holders(page)))
        return found


# -- the answer --------------------------------------------------------------------------------------------------------


def _answer(found: _Found, how: Asked, asked: TraceRequest, model: str, engine: Engine) -> Trace:
    """The answer, made beside the event loop."""
    tokens = how.sequence.tokens
    return Trace(
        model=model,
        tokens=list(tokens),
        texts=[text_of(id, engine, "") for id in tokens],
        prompt_tokens=len(how.sequence.prompt),
        position=len(tokens) - 1,
        vocab_size=engine.vocab_size,
        page_size=engine.page_size,
        stats=found.stats,
        pages=found.pages,
        logits=Packed.of(found.logits, "float32") if asked.logits else None,
        sampling=None if how.sampler is None else _drawn(how.sampler, how.sequence, found),
        lens=None if how.lens is None else _lens_layers(how.lens, found),
        attention=_attention(how.layers, found) if asked.attention is not None else None,
        mask=None if how.masks is None else _mask_answer(how.masks, len(tokens), engine.page_size),
        scores=found.scores if asked.scores else None,
        time=None if found.measured is None else _timing(found.measured, engine),
    )


def _drawn(sampler: Sampling, sequence: Sequence, found: _Found) -> Drawn:
    """The distribution that the engine draws from, for the whole vocabulary."""
    counts = Counter(sequence.take)
    generated = (torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values())))
    seen = torch.tensor(sorted(set(sequence.tokens)), dtype=torch.int64)
    ids, probs = sampling.sampling_distribution(
        torch.from_numpy(found.logits.copy()), sampler, seen=seen, generated=generated
    )
    assert sampler.seed is not None
    return Drawn(
        ids=Packed.of(ids.numpy(), "int32"),
        probs=Packed.of(probs.numpy(), "float64"),
        seed=sampler.seed,
        tokens=found.tokens,
    )


def _lens_layers(lens: LogitLens, found: _Found) -> list[LensLayer]:
    return [
        LensLayer(layer=layer, ids=ids.tolist(), probs=probs.tolist())
        for layer, (ids, probs) in zip(lens.layers, found.lens, strict=True)
    ]


def _attention(layers: tuple[int, ...], found: _Found) -> Scores:
    array = np.stack(found.attention) if layers else np.zeros((0, 0, 0), np.float32)  # [L, H, slots]
    return Scores(layers=list(layers), array=Packed.of(array, "float32"))


def _mask_answer(masks: tuple[Brle, ...], count: int, size: int) -> Bound:
    rows = [MaskRow(attend=list(row.runs), raw=list((~row).runs)) for row in masks]
    first = count - len(masks)
    seen = {p for row in masks for a, b in row.intervals() for p in range(a // size, (b - 1) // size + 1)}
    all_open = all(row.all() for row in masks)  # the same as no mask: nothing is left out
    trimmed = [] if all_open else [p for p in range(first // size) if p not in seen]
    return Bound(first=first, rows=rows, trimmed=trimmed)


def _timing(sample: Sample, engine: Engine) -> Timing:
    return Timing(
        tokens=sample.tokens,
        seconds=sample.seconds,
        bandwidth_limit=measure_bandwidth(engine.info.device),
        phases=[PhaseTime(name=p.name, seconds=p.seconds, bytes=p.bytes, calls=p.calls) for p in sample.phases],
    )
