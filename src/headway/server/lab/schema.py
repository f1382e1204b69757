"""The Lab's requests and responses: their fields and types, and how arrays are encoded."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from headway.server.api.request_schema import FailAtFirst, Ids, RequestSchema

Dtype = Literal["float32", "float64", "int32"]
Runs = Annotated[list[int], FailAtFirst()]


class Base64Array(BaseModel):
    """An array: base64 of its numbers, little-endian, in row order."""

    dtype: Dtype
    shape: list[int]
    data: str

    @classmethod
    def of(cls, array: np.ndarray, dtype: Dtype) -> Base64Array:
        data = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<"))
        return cls(dtype=dtype, shape=list(array.shape), data=base64.b64encode(data.tobytes()).decode("ascii"))

    def array(self) -> np.ndarray:
        """The decoded array."""
        kind = np.dtype(self.dtype).newbyteorder("<")
        return np.frombuffer(base64.b64decode(self.data), kind).reshape(self.shape)


class SamplingOptions(RequestSchema):
    """The parameters of a `Sampling`, and how many tokens to draw with it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    eta_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    draws: int = 1


class LensOptions(RequestSchema):
    """The `k` likeliest tokens at each layer, as if the model ended there; 0 is the embedding. Default: all layers."""

    k: int = 8
    layers: Ids | None = None


class AttentionOptions(RequestSchema):
    """The attention of the last token, or of the last `rows` tokens, to each slot, for each head of these layers.

    Default: all layers.
    """

    layers: Ids | None = None
    rows: int | None = None


class MaskRule(RequestSchema):
    """What the last `rows` tokens (default: all) attend to; tokens before them are causal.

    `window` keeps the last slots, `sink` also the first ones. `runs` gives it cell by cell, one list for each of these
    tokens: alternating runs, zeros first, 0 = attend, 1 = masked, over the slots before the token, with or without its
    own.
    """

    rows: int | None = None
    window: int | None = None
    sink: int | None = None
    runs: Annotated[list[Runs], FailAtFirst()] | None = None


class TraceRequest(RequestSchema):
    """One pass over a prompt and the tokens taken after it, read at the last token."""

    model: str | None = None
    prompt: str | Ids = Field(description="A text, or token ids.")
    take: Ids = Field([], description="Tokens after it, which penalties count as generated.")
    logits: bool = True
    sampling: SamplingOptions | None = None
    lens: LensOptions | None = None
    attention: AttentionOptions | None = None
    mask: MaskRule | None = None
    scores: int = Field(0, description="How many of the last tokens to score.")
    profile: bool = False
    priority: float | None = None


class BranchesRequest(RequestSchema):
    """Continuations of one prompt; common prefixes are computed once and shared."""

    model: str | None = None
    prompt: str | Ids
    branches: Annotated[list[Ids], FailAtFirst()]
    priority: float | None = None


class LabResponse(BaseModel):
    """A response; fields that were not requested are omitted."""

    model_config = ConfigDict(ser_json_inf_nan="null")


class SamplingResult(LabResponse):
    """What the engine's own `Sampling` does with the row: the tokens it keeps, and those it drew."""

    ids: Base64Array  # int32, ascending
    probs: Base64Array  # float64
    seed: int
    tokens: list[int]


class LensLayer(LabResponse):
    """The likeliest tokens at one layer."""

    layer: int
    ids: list[int]
    probs: list[float]


class AttentionArray(LabResponse):
    """Attention, [layers, heads, slots], or with `rows` [layers, rows, heads, slots]; 0 where masked."""

    layers: list[int]
    array: Base64Array


class MaskRow(LabResponse):
    """One row of a mask in both polarities, each alternating and zeros first, its own slot included."""

    attend: list[int]  # 1 = attend
    raw: list[int]  # 0 = attend, 1 = masked: as Forward.attention_mask takes it


class BoundMask(LabResponse):
    """The mask of the pass: rows from slot `first` on, and the pages that attention skipped."""

    first: int
    rows: list[MaskRow]
    trimmed: list[int]


class TokenScore(LabResponse):
    """A token's log-probability (nats), its rank, and the entropy (nats) of its distribution."""

    id: int
    logprob: float | None
    rank: int
    entropy: float


class PageInfo(LabResponse):
    """A page of a sequence: its number in the pool, and the number of its holders."""

    page: int | None
    state: Literal["committed", "working", "discarded", "preempted"]
    holders: int


class TraceStats(LabResponse):
    """Statistics of the pass."""

    rows: int
    pages: int
    pages_trimmed: int
    cache_hits: int
    batch_size: int
    steps: int
    seconds: float


class PhaseTime(LabResponse):
    """One phase of the steps that the pass ran in."""

    name: str
    seconds: float
    bytes: int
    calls: int


class TraceTiming(LabResponse):
    """Where the time went, and the measured memory bandwidth (bytes per second)."""

    tokens: int
    seconds: float
    bandwidth_limit: float
    phases: list[PhaseTime]


class TraceResponse(LabResponse):
    """The results of one pass at its last token."""

    object: Literal["lab.trace"] = "lab.trace"
    model: str
    tokens: list[int]
    texts: list[str]
    prompt_tokens: int
    position: int
    vocab_size: int
    page_size: int
    stats: TraceStats
    pages: list[PageInfo]
    logits: Base64Array | None = None
    sampling: SamplingResult | None = None
    lens: list[LensLayer] | None = None
    attention: AttentionArray | None = None
    mask: BoundMask | None = None
    scores: list[TokenScore] | None = None
    time: TraceTiming | None = None


class Branch(LabResponse):
    """One continuation: its pages and the scores of its tokens."""

    tokens: list[int]
    pages: list[PageInfo]
    scores: list[TokenScore]


class BranchesResponse(LabResponse):
    """Continuations as forks of one context, while all of them exist."""

    object: Literal["lab.branches"] = "lab.branches"
    model: str
    prompt_tokens: int
    page_size: int
    pages: int  # distinct ones that they hold in total
    pages_alone: int  # what they would hold without sharing
    batch_size: int  # the most passes in one step
    branches: list[Branch]
