"""What a model's layers compute where they differ from Llama's: data that drives the torch decoder and the native step.

The defaults are Llama's: the Triton kernels compute a model whose description is `PLAIN`. It knows no tensors and no
family.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile
from headway.kernels.host.rope import Rope

NormKind = Literal["rms", "rms+1", "layer"]  # root mean square; the same, weights counted from 1; mean and variance
NormPlace = Literal["before", "after", "both"]  # of attention and of the feed-forward
# One weight for all heads; over a whole row; weights of each head's own; none, and in rotated layers alone.
QkNorm = Literal["head", "row", "each", "unit"]


@dataclass(frozen=True)
class ExpertGroups:
    """Routing by groups (DeepSeek): of `count` groups a row's experts come from the `kept` best.

    A group is as good as the sum of its `best` highest scores. With `corrected` a number is added to each expert's
    score where experts are chosen, not where they are weighted. Weights are multiplied by `scale`.
    """

    score: Literal["softmax", "sigmoid"]
    count: int = 1
    kept: int = 1
    best: int = 1
    corrected: bool = False
    scale: float = 1.0


@dataclass(frozen=True)
class Experts:
    """A feed-forward of experts: a router gives each row to `per_token` of `count`.

    With `normalize` the weights of the chosen ones sum to 1. A shared expert of `shared_size` sees every row, times the
    sigmoid of a gate of its own if it is `shared_gated`. `dense_layers` have an ordinary feed-forward.
    """

    count: int
    per_token: int
    size: int
    normalize: bool = True
    router_bias: bool = False
    bias: bool = False
    shared_size: int = 0
    shared_gated: bool = True
    clamp: float | None = None  # gate and up are clamped, and up counts from 1 (GPT-OSS)
    alpha: float = 1.0  # the gate's silu is gate × sigmoid(alpha × gate)
    groups: ExpertGroups | None = None
    beside_dense: bool = False  # besides the ordinary feed-forward, each with norms of its own (Gemma 4)
    sigmoid_inputs: bool = False  # an expert's input, not its output, is weighted: by its logit's sigmoid (Llama 4)
    dense_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 65_536:
            raise BadModelFile(f"the model has {self.count} experts; it must be between 1 and 65536")
        if not 1 <= self.per_token <= self.count:
            raise BadModelFile(
                f"a token goes to {self.per_token} experts; it must be between 1 and {self.count}, which there are"
            )


@dataclass(frozen=True)
class ShortConv:
    """A gated convolution over the last `taps` tokens (LFM2)."""

    taps: int
    bias: bool = False

    def state_values(self, hidden: int) -> int:
        """Numbers of the state of one layer."""
        return hidden * (self.taps - 1)


@dataclass(frozen=True)
class GatedDelta:
    """A gated delta net behind a short convolution (Qwen3-Next): a state [key size, value size] for each value head.

    Each key head serves `value_heads / key_heads` value heads: consecutive ones, or with `cycled` every so manyth.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    cycled: bool = False

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise BadModelFile(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly")

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    def state_values(self, hidden: int) -> int:
        return self.channels * (self.taps - 1) + self.value_heads * self.key_dim * self.value_dim


@dataclass(frozen=True)
class Mamba2:
    """A state-space layer behind a short convolution: a state [head size, state size] for each head.

    Heads of a group share what reads and writes their states. `steps` bounds the time steps. Outputs are gated and then
    normed by group, or gated alone.
    """

    heads: int
    head_dim: int
    groups: int
    state_size: int
    taps: int
    conv_bias: bool = True
    bias: bool = False
    steps: tuple[float, float] = (0.0, float("inf"))
    normed: bool = True
    gate_first: bool = True  # whether the norm comes after the gate

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise BadModelFile(f"{self.heads} state-space heads cannot share {self.groups} groups evenly")

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution: inputs, and what writes and reads the states of each group."""
        return self.inner + 2 * self.groups * self.state_size

    def state_values(self, hidden: int) -> int:
        return self.channels * (self.taps - 1) + self.inner * self.state_size


Recurrence = ShortConv | GatedDelta | Mamba2


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): a slot has one latent vector, of which every head's key and value are
    made, and one rotated key that all heads share.

    Queries are made of a latent vector too, of `query_size`, unless that is 0. `paired` says that the rotation takes
    neighboring dimensions. `eps` is that of the norms of latent vectors.
    """

    size: int
    rotated: int
    key_dim: int  # of a head's key, without what is rotated
    value_dim: int
    query_size: int = 0
    paired: bool = True
    eps: float = 1e-6

    @property
    def width(self) -> int:
        """Numbers of a slot in the KV cache: the rotated key, then the latent vector."""
        return self.rotated + self.size

    @property
    def query_dim(self) -> int:
        """Numbers of a head's query."""
        return self.key_dim + self.rotated


@dataclass(frozen=True)
class Temperature:
    """Queries of layers without a rope grow with their position (Llama 4): they are multiplied by
    1 + scale × log(1 + ⌊(position + 1) / floor⌋)."""

    floor: float
    scale: float


@dataclass(frozen=True)
class KvShape:
    """The keys, or the values, of a slot in one layer."""

    heads: int
    dim: int


@dataclass(frozen=True)
class LayerInputs:
    """What each layer adds of the token itself (Gemma 3n, Gemma 4): `size` numbers of a table of its own with `vocab`
    rows, and as many of the embedding."""

    size: int
    vocab: int


@dataclass(frozen=True)
class PerLayer:
    """Where layers differ from each other (Gemma 3n, Gemma 4). Each tuple has an entry for each layer.

    A layer whose entry in `kv_from` is another one attends to that one's keys and values, and has none of its own.
    Values are normed without weights; in `keys_as_values` they are the keys before their norm and rotation.
    """

    kv_from: tuple[int, ...]
    kv_shapes: tuple[KvShape, ...]
    inners: tuple[int, ...]  # sizes of feed-forwards
    keys_as_values: frozenset[int] = frozenset()
    inputs: LayerInputs | None = None
    scaled: bool = False  # a layer's output is multiplied by a number of its own

    def first_layers(self, count: int) -> PerLayer:
        """Of the first layers alone."""
        return replace(
            self,
            kv_from=self.kv_from[:count],
            kv_shapes=self.kv_shapes[:count],
            inners=self.inners[:count],
            keys_as_values=self.keys_as_values & frozenset(range(count)),
        )

    def differences(self) -> tuple[str, ...]:
        """What is not as Llama has it, in words."""
        words = (
            (True, "normed values"),
            (len(set(self.kv_shapes)) > 1, "layers with heads of their own"),
            (bool(self.keys_as_values), "keys as values"),
            (any(other != l for l, other in enumerate(self.kv_from)), "layers that share keys and values"),
            (len(set(self.inners)) > 1, "layers with widths of their own"),
            (self.inputs is not None, "inputs for each layer"),
            (self.scaled, "scaled layers"),
        )
        return tuple(word for has, word in words if has)


@dataclass(frozen=True)
class AltUp:
    """Residuals side by side (Gemma 3n): every layer computes the `active` one of `streams` and predicts the others.

    Beside attention there is a matrix product of `rank`. `sparsity` is for each layer the share of its gates that are
    cut off, as if they were normally distributed. With `scaled` the corrected stream is scaled before what the layer
    takes of the token is added to the others.
    """

    streams: int
    active: int
    rank: int
    sparsity: tuple[float, ...]
    scaled: bool = True

    def first_layers(self, count: int) -> AltUp:
        """Of the first layers alone."""
        return replace(self, sparsity=self.sparsity[:count])

    def differences(self) -> tuple[str, ...]:
        """What is not as Llama has it, in words."""
        return ("residuals side by side", *(("sparse activations",) if any(self.sparsity) else ()))


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
    gated_attention: bool = False  # each head's output times the sigmoid of a gate of its own
    latent: LatentAttention | None = None
    temperature: Temperature | None = None
    per_layer: PerLayer | None = None
    altup: AltUp | None = None
    recurrence: Recurrence | None = None  # what some layers have in place of attention
    recurrent_layers: frozenset[int] = frozenset()
    both: bool = False  # recurrent layers have attention too, and add both
    no_feed_forward: bool = False
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
        if (self.recurrence is None) != (not self.recurrent_layers):
            raise BadModelFile("a recurrence needs the layers that have it, and the other way round")

    def differences(self) -> tuple[str, ...]:
        """What is not as Llama has it, in words."""
        words: list[str | None] = []
        for name in (f.name for f in fields(self) if getattr(self, f.name) != f.default):
            value = getattr(self, name)
            if isinstance(value, PerLayer | AltUp):
                words += value.differences()
            else:
                words.append(WORDS.get(f"{name}={value}") or KINDS.get(type(value)) or WORDS.get(name))
        return tuple(word for word in words if word is not None)


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
    "qk_norm=unit": "norms of queries and keys without weights",
    "qkv_clip": "clipped queries, keys and values",
    "ropes": "layers with rotations of their own",
    "attention_scale": "an attention scale of its own",
    "attention_cap": "soft-capped attention",
    "sinks": "attention sinks",
    "gated_attention": "gated attention",
    "latent": "latent attention",
    "temperature": "queries that grow with their position",
    "both": "attention and recurrence side by side",
    "no_feed_forward": "no feed-forward",
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
KINDS = {
    ShortConv: "short convolutions in place of attention",
    GatedDelta: "gated delta nets in place of attention",
    Mamba2: "state-space layers",
}
PLAIN = Description()
