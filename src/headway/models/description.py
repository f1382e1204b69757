"""What a model's layers compute where they differ from Llama's: data that drives the torch decoder.

The defaults are Llama's, so a model whose description is `PLAIN` is what the fast paths compute. It knows no tensors
and no family.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from headway.base.errors import BadModelFile
from headway.kernels.host.rope import Rope

NormKind = Literal["rms", "rms+1", "layer"]  # root mean square; the same, weights counted from 1; mean and variance
NormPlace = Literal["before", "after", "both"]  # of attention and of the feed-forward
QkNorm = Literal["head", "row", "each"]  # one weight for all heads; over a whole row; weights of each head's own


@dataclass(frozen=True)
class Experts:
    """A feed-forward of experts: a router gives each row to `per_token` of `count`.

    With `normalize` the weights of the chosen ones sum to 1. A shared expert of `shared_size` sees every row, times the
    sigmoid of a gate of its own. `dense_layers` have an ordinary feed-forward.
    """

    count: int
    per_token: int
    size: int
    normalize: bool = True
    router_bias: bool = False
    bias: bool = False
    shared_size: int = 0
    clamp: float | None = None  # gate and up are clamped, and up counts from 1 (GPT-OSS)
    alpha: float = 1.0  # the gate's silu is gate × sigmoid(alpha × gate)
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 65_536:
            raise BadModelFile(f"the model has {self.count} experts; it must be between 1 and 65536")
        if not 1 <= self.per_token <= self.count:
            raise BadModelFile(
                f"a token goes to {self.per_token} experts; it must be between 1 and {self.count}, which there are"
            )


@dataclass(frozen=True)
class Description:
    """A layer, the embedding before the layers and the head after them."""

    norm: NormKind = "rms"
    norm_place: NormPlace = "before"
    norm_bias: bool = False
    parallel: bool = False  # attention and feed-forward read the same residual
    one_norm: bool = False  # a parallel layer's one norm is for both
    qk_norm: QkNorm = "head"
    qkv_clip: float | None = None
    ropes: tuple[Rope, ...] | None = None  # for each layer, where they differ; dim 0 is not rotated
    attention_scale: float | None = None  # else 1 / √head size
    attention_cap: float | None = None
    sinks: bool = False
    activation: str = "silu"
    gated: bool = True
    experts: Experts | None = None
    residual_scale: float = 1.0
    embedding_scale: float = 1.0
    learned_positions: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None

    def __post_init__(self) -> None:
        if self.one_norm and not self.parallel:
            raise BadModelFile("a layer with one norm must be parallel")

    def differences(self) -> tuple[str, ...]:
        """What is not as Llama has it, in words."""
        found = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return tuple(WORDS.get(f"{name}={value}") or WORDS[name] for name, value in found)


WORDS = {
    "norm=rms+1": "norm weights counted from 1",
    "norm=layer": "layer norms",
    "norm_place=after": "norms after attention and feed-forward",
    "norm_place=both": "norms before and after attention and feed-forward",
    "norm_bias": "norms with biases",
    "parallel": "parallel attention and feed-forward",
    "one_norm": "one norm for both",
    "qk_norm=row": "norms of queries and keys over all heads",
    "qk_norm=each": "norms for each head of queries and keys",
    "qkv_clip": "clipped queries, keys and values",
    "ropes": "layers with rotations of their own",
    "attention_scale": "an attention scale of its own",
    "attention_cap": "soft-capped attention",
    "sinks": "attention sinks",
    "activation": "gelu",
    "gated": "a feed-forward without a gate",
    "experts": "experts",
    "residual_scale": "a scaled residual",
    "embedding_scale": "scaled embeddings",
    "learned_positions": "learned positions",
    "head_bias": "an output bias",
    "logit_scale": "scaled logits",
    "logit_cap": "soft-capped logits",
}
PLAIN = Description()
