"""What a family may differ in. The one decoder is configured by this and the model's own config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from headway.base.dataclass import dataclass
from headway.models.keys import Keys

if TYPE_CHECKING:
    from headway.models.config import ModelConfig

LAYER_NORM_GGUF = {"attention.layer_norm_rms_epsilon": "attention.layer_norm_epsilon"}  # as GGUF files name it


@dataclass(frozen=True)
class Cut:
    """A weight that is part of another: `take(tensor, config)` of the tensor `name`, which has `shape(config)`.

    It takes an array or a tensor of torch. In a GGUF file it takes rows, and so may be given their numbers alone.
    """

    name: str
    shape: Callable[[ModelConfig], tuple[int, ...]]
    take: Callable[[Any, ModelConfig], Any]


@dataclass(frozen=True)
class Each:
    """A weight whose files have a tensor for each head or expert, `{}` in the name: they are stacked."""

    name: str


@dataclass(frozen=True)
class FirstOf:
    """A weight that has one name or another: the first that there is."""

    names: tuple[str, ...]


Part = str | Cut | Each | FirstOf  # where a weight is: a name after the layer's, or more
Describe = Callable[[Keys, "ModelConfig"], "ModelConfig"]
DescribeGguf = Callable[[Keys, "ModelConfig", "set[str]"], "ModelConfig"]


@dataclass(frozen=True)
class Family:
    """A named set of differences.

    `qkv_bias`, `o_bias` and `mlp_bias` are True, False, or the name of the config key that decides.
    `window` says which layers a `sliding_window` binds: none, all unless the config lists them, all if the config has
    one (`given`), or those that the config lists (`layers`).

    A family whose layers are not Llama's has `describe`, which completes the config, and says where its files keep a
    weight under another name than Llama's: `parts` by role, see `headway.models.weights.shapes`. `describe_gguf` and
    `gguf_parts` are the same for GGUF files. Adapters may have names by `modules` too.
    """

    name: str
    architectures: tuple[str, ...]
    gguf: str | None
    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    biased: bool = False  # what a key that decides about a bias means when it is left out
    window: Literal["none", "all", "given", "layers"] = "none"
    theta: float = 10_000.0
    head_dim: int | None = None  # when the config is silent; else hidden size / heads
    kv_heads: int | None = None  # when the config is silent; else as many as heads
    inner: int | None = None  # hidden sizes that the feed-forward has when the config is silent
    inner_by_layer: bool = False  # its config may list a size of the feed-forward for each layer
    gguf_by_layer: bool = False  # its GGUF files may list those, and numbers of key heads
    eps: float | None = None  # when the config is silent
    partial: float | None = None  # share of a head that is rotated when the config is silent; else heads are whole
    tied: bool = False  # when the config is silent
    interleaved_gguf: bool = False  # its GGUF files store q and k rows for rotation of neighboring pairs
    interleaved_hf: bool = False  # and its folders
    cycled_gguf: bool = False  # its GGUF files have the value heads of gated delta nets in another order than folders
    latent: bool = False  # its GGUF files have latent attention: values narrower than keys, yarn of its own
    turned_experts: bool = False  # its folders have matrices of experts as [K, N], and their module does not say so
    experts: bool = False  # files of several families may have one GGUF architecture
    model_types: tuple[str, ...] = ()  # what its config.json calls itself
    outer: Mapping[str, str] = field(default_factory=dict)  # models that it is the text model of, and its name there
    defaults: Mapping[str, Any] = field(default_factory=dict)  # other keys when the config is silent
    keys: Mapping[str, str] = field(default_factory=dict)  # its spelling of Llama's keys
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    describe: Describe | None = None
    describe_gguf: DescribeGguf | None = None
    ignored: str | None = None  # a pattern of weights in its folders that carry nothing, such as masks
    parts: Mapping[str, Part] = field(default_factory=dict)
    gguf_parts: Mapping[str, Part] = field(default_factory=dict)
    modules: Mapping[str, Part] = field(default_factory=dict)  # names in transformers where folders have others
