"""What the Lab is asked and what it answers: the fields, their types, and how arrays are written."""

from __future__ import annotations

import base64
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from headway.server.openai.request_schema import First, Ids, Wire

Dtype = Literal["float32", "float64", "int32"]
Runs = Annotated[list[int], First()]


class Packed(BaseModel):
    """An array: base64 of its numbers, little-endian, in row order."""

    dtype: Dtype
    shape: list[int]
    data: str

    @classmethod
    def of(cls, array: np.ndarray, dtype: Dtype) -> Packed:
        data = np.ascontiguousarray(array, dtype=np.dtype(dtype).newbyteorder("<"))
        return cls(dtype=dtype, shape=list(array.shape), data=base64.b64encode(data.tobytes()).decode("ascii"))

    def array(self) -> np.ndarray:
        """The numbers again."""
        kind = np.dtype(self.dtype).newbyteorder("<")
        return np.frombuffer(base64.b64decode(self.data), kind).reshape(self.shape)


class Knobs(Wire):
    """A `Sampling`, knob by knob, and how many tokens to draw with it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    draws: int = 1


class Lens(Wire):
    """The likeliest `k` tokens at each layer, as if the model ended there; 0 is the embedding, by default all."""

    k: int = 8
    layers: Ids | None = None


class Attention(Wire):
    """How much each head of these layers attends from the last token to each slot; by default all layers."""

    layers: Ids | None = None


class MaskRule(Wire):
    """What the last `rows` tokens attend to, by default all; tokens before them are causal.

    `window` keeps the last slots, `sink` the first ones too. `runs` says it cell by cell, one list for each of these
    tokens: alternating runs, zeros first, 0 = attend, 1 = masked, over the slots before the token, or those and itself.
    """

    rows: int | None = None
    window: int | None = None
    sink: int | None = None
    runs: Annotated[list[Runs], First()] | None = None


class TraceRequest(Wire):
    """One pass over a prompt and the tokens taken behind it, read at the last token."""

    model: str | None = None
    prompt: str | Ids = Field(description="A text, or token ids.")
    take: Ids = Field([], description="Tokens behind it, which penalties count as generated.")
    logits: bool = True
    sampling: Knobs | None = None
    lens: Lens | None = None
    attention: Attention | None = None
    mask: MaskRule | None = None
    scores: int = Field(0, description="Of how many of the last tokens to say how likely they were.")
    profile: bool = False
    priority: float | None = None


class BranchesRequest(Wire):
    """Continuations of one prompt; what they have in common is computed once and shared."""

    model: str | None = None
    prompt: str | Ids
    branches: Annotated[list[Ids], First()]
    priority: float | None = None


class Answer(BaseModel):
    """Answers leave out what was not asked for."""

    model_config = ConfigDict(ser_json_inf_nan="null")


class Drawn(Answer):
    """What the engine's own `Sampling` makes of the row: the tokens it keeps, and those it drew."""

    ids: Packed  # int32, rising
    probs: Packed  # float64
    seed: int
    tokens: list[int]


class LensLayer(Answer):
    """The likeliest tokens at one layer."""

    layer: int
    ids: list[int]
    probs: list[float]


class Scores(Answer):
    """Attention, [layers, heads, slots]; 0 where masked."""

    layers: list[int]
    array: Packed


class MaskRow(Answer):
    """One row of a mask in both polarities, each alternating and zeros first, its own slot included."""

    attend: list[int]  # 1 = attend
    raw: list[int]  # 0 = attend, 1 = masked: as Forward.attention_mask takes it


class Bound(Answer):
    """A mask as the pass had it: rows from slot `first` on, and the pages that were left out of attention."""

    first: int
    rows: list[MaskRow]
    trimmed: list[int]


class Score(Answer):
    """How likely a token was where it stands (nats), its rank, and the entropy (nats) of what could have come."""

    id: int
    logprob: float | None
    rank: int
    entropy: float


class PageInfo(Answer):
    """A page of a sequence: its number in the pool, and how many hold it."""

    page: int | None
    state: Literal["committed", "working", "discarded", "aside"]
    holders: int


class Stats(Answer):
    """What the pass took."""

    rows: int
    pages: int
    pages_trimmed: int
    cache_hits: int
    batch_size: int
    steps: int
    seconds: float


class PhaseTime(Answer):
    """One phase of the steps that the pass ran in."""

    name: str
    seconds: float
    bytes: int
    calls: int


class Timing(Answer):
    """Where the time went, and what the memory was measured to give (bytes per second)."""

    tokens: int
    seconds: float
    bandwidth_limit: float
    phases: list[PhaseTime]


class Trace(Answer):
    """What one pass found at its last token."""

    object: Literal["lab.trace"] = "lab.trace"
    model: str
    tokens: list[int]
    texts: list[str]
    prompt_tokens: int
    position: int
    vocab_size: int
    page_size: int
    stats: Stats
    pages: list[PageInfo]
    logits: Packed | None = None
    sampling: Drawn | None = None
    lens: list[LensLayer] | None = None
    attention: Scores | None = None
    mask: Bound | None = None
    scores: list[Score] | None = None
    time: Timing | None = None


class Branch(Answer):
    """One continuation: its pages, and how likely its tokens were."""

    tokens: list[int]
    pages: list[PageInfo]
    scores: list[Score]


class Branches(Answer):
    """Continuations as forks of one context, while all of them are there."""

    object: Literal["lab.branches"] = "lab.branches"
    model: str
    prompt_tokens: int
    page_size: int
    pages: int  # distinct ones that they hold together
    pages_alone: int  # what they would hold without sharing
    batch_size: int  # the most passes that one step had
    branches: list[Branch]
