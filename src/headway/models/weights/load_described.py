"""Weight files to a `DescribedDecoder`: every weight that the description asks for, wherever the family keeps it.

All names and shapes are checked before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.reference.quantized import tensor
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.described import DescribedDecoder, DescribedLayer
from headway.models.description import GatedDelta, Mamba2, ShortConv
from headway.models.experts import ExpertWeights, GroupedExperts, InputWeightedExperts, ScaledExperts
from headway.models.families.family import Cut, Each
from headway.models.files.weights import open_weights
from headway.models.layers import Linear, fused
from headway.models.quantized.int_experts import IntExperts
from headway.models.recurrent import GatedDeltaMixer, Mamba2Mixer, Mixer, ShortConvMixer
from headway.models.weights.kept_experts import KeptExperts, read_kept
from headway.models.weights.kept_forms import EXPERTS, kept_kind
from headway.models.weights.load import LoadProgress
from headway.models.weights.roles import Roles
from headway.models.weights.rows import half_split
from headway.models.weights.shapes import has_experts, layer_shapes, model_shapes

OTHER_NORMS = ("mix_norm", "dense_norm", "expert_in_norm", "expert_out_norm")  # those of parts of a layer

if TYPE_CHECKING:
    from headway.models.shards import Split


def load_described(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: LoadProgress | None = None,
    split: Split | None = None,
    keep_experts: bool = False,
    quantize: str | None = None,
) -> Decoder:
    """The decoder in a Hugging Face folder or a GGUF file, its weights in one dtype on one device, or a rank's share of
    it. With `keep_experts` those that can stay quantized do (`kept_forms`), and others are by `quantize`, int4 or int8.
    """
    device = device if split is None else torch.device("cpu")
    with open_weights(path) as weights:
        roles = Roles.of(path, config, weights)
        roles.check()
        if quantize is not None:
            _check_floats(path, roles, dtype, quantize)
        reader = DescribedReader(config, dtype, device, roles, keep_experts, quantize)
        return build_described(reader, progress, split)


def _check_floats(path: Path, roles: Roles, dtype: torch.dtype, quantize: str) -> None:
    """Raise if there is nothing to quantize: experts that are quantized in the file stay as they are."""
    layers = [layer for layer in range(roles.config.layers) if has_experts(roles.config, layer)]
    kinds = {kept_kind(roles, some, layer, _name_of(dtype)) for layer in layers for some in EXPERTS}
    if None not in kinds:
        raise Unsupported(
            f"quantize={quantize!r} is for experts of floats, and those of {path.name} are in "
            f"{', '.join(sorted(map(str, kinds)))}, which stay as they are; leave it out"
        )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class RoleReader(Protocol):
    """Weights by role, of one dtype on one device. `last` are those that were read last, if any are kept."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    last: dict[str, Tensor]

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        """The weight of a role, which must have this shape, of a layer or of the model."""
        ...

    def kept(self, roles: tuple[str, ...], layer: int) -> KeptExperts | None:
        """Experts' matrices, one below the other, if they stay quantized; without their biases."""
        ...

    def frequencies(self) -> Tensor:
        """A row of rotation frequencies for each layer."""
        ...


@dataclass(eq=False)
class DescribedReader:
    """The weights in files."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    roles: Roles
    keep_experts: bool
    quantize: str | None = None
    last: dict[str, Tensor] = field(default_factory=dict)

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        at = "" if layer is None else self.roles.layer(layer)
        match self.roles.part(role):
            case Each(name):
                return torch.stack([self._tensor(at + name.format(i), shape[1:]) for i in range(shape[0])])
            case Cut(name, whole, take):
                c = self.config
                tensor = take(self._tensor(at + name, whole(c)), c)
                assert tensor.shape == shape, (role, tensor.shape, shape)
                return self._halves(role, tensor.contiguous())
            case part:
                dtype = torch.float32 if role == "router_correction" else None  # what it adds to
                return self._halves(role, self._tensor(self.roles.name(at, part), shape, dtype))

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        name = self.roles.claim(name, shape)
        if name not in self.last:  # several weights may be cut from one
            self.last.clear()
            self.last[name] = self.roles.weights.load(name, dtype=dtype or self.dtype, device=self.device)
        return self.last[name].view(shape)

    def _halves(self, role: str, tensor: Tensor) -> Tensor:
        c = self.config
        if c.interleaved_weights and role.removesuffix("_bias") in ("q", "k"):
            return half_split(tensor, c.head_dim, c.rope.dim)
        return tensor

    def kept(self, roles: tuple[str, ...], layer: int) -> KeptExperts | None:
        if self.keep_experts and kept_kind(self.roles, roles, layer, _name_of(self.dtype)) is not None:
            return read_kept(self.roles, roles, layer, self.dtype, self.device)
        if self.quantize is None:
            return None
        shapes = layer_shapes(self.config, layer)
        weight = _stack(lambda role: self.read(role, shapes[role], layer), list(roles))
        return IntExperts.quantize(weight, "int4" if self.quantize == "int4" else "int8", gated=len(roles) > 1)

    def frequencies(self) -> Tensor:
        rows = tensor(self.roles.frequencies()).to(self.device)
        return rows if rows.ndim == 2 else rows.expand(self.config.layers, -1)


def build_described(reader: RoleReader, progress: LoadProgress | None = None, split: Split | None = None) -> Decoder:
    """The decoder of a reader's config and weights."""
    c = reader.config
    make = _decoder_kind(c)
    outer: dict[str, Any] = {}
    for role, shape in model_shapes(c).items():
        outer[role] = reader.read(role, shape, None)
        if split is not None and role in ("embedding", "output"):
            outer[role] = split.vocabulary(outer[role])
            reader.last.clear()
    layers = []
    for i in range(c.layers):
        layers.append(described_layer(reader, i) if split is None else split.layer(described_layer(reader, i)))
        if progress is not None:
            progress(i + 1, c.layers)
    outer.setdefault("output", outer["embedding"])
    decoder = make(config=c, layers=tuple(layers), inv_freq=reader.frequencies(), **outer)
    return decoder if split is None else split.finished(decoder)


def _decoder_kind(c: ModelConfig) -> Any:
    """The class of a decoder; most models do not need the others."""
    d = c.description
    if d.altup is not None:
        from headway.models.variants.altup import AltUpDecoder as Kind
    elif d.per_layer is not None:
        from headway.models.variants.per_layer import PerLayerDecoder as Kind
    elif d.recurrence is not None:
        from headway.models.variants.hybrid import HybridDecoder as Kind
    elif d.latent is not None:
        from headway.models.variants.latent import LatentDecoder as Kind
    elif d.temperature is not None:
        from headway.models.variants.tempered import TemperedDecoder as Kind
    else:
        Kind = DescribedDecoder
    return Kind


def described_layer(reader: RoleReader, i: int) -> DescribedLayer:
    """One layer of a reader's model."""
    c = reader.config
    shapes = layer_shapes(c, i)

    def read(role: str) -> Tensor:
        return reader.read(role, shapes[role], i)

    def linear(*roles: str) -> Linear:
        return Linear(*(_stack(read, [r + s for r in roles]) for s in ("", "_bias") if roles[0] + s in shapes))

    def expert(*roles: str) -> Linear | KeptExperts:
        if (kept := reader.kept(roles, i)) is None:
            return linear(*roles)
        bias = _stack(read, [f"{role}_bias" for role in roles]) if f"{roles[0]}_bias" in shapes else None
        return replace(kept, bias=bias)

    norms: dict[str, Any] = {role: read(role) for role in shapes if "norm" in role and role not in OTHER_NORMS}
    norms.setdefault("input_norm", norms.get("post_attention_norm"))  # not used
    norms.setdefault("mlp_norm", norms.get("post_mlp_norm", norms["input_norm"]))  # not used
    norms = {"q_norm": None, "k_norm": None, **norms}
    none = Linear(torch.empty(0, 0, dtype=reader.dtype, device=reader.device))
    if c.description.no_feed_forward:
        gate_up, down, experts = none, none, None
    elif has_experts(c, i):
        gate_up, down = expert("expert_gate", "expert_up"), expert("expert_down")
        experts = _experts(c, linear, read, shapes)
    else:
        gate_up = linear("gate", "up") if c.description.gated else linear("up")
        down, experts = linear("down"), None
    make: Any = DescribedLayer
    if c.description.per_layer is not None:
        make, parts = _per_layer(c, i, linear, expert, read, shapes)
        norms |= parts
    elif c.description.latent is not None:
        from headway.models.variants.latent import LatentLayer as make

        norms |= {"kv_down": linear("kv_down"), "key_up": read("key_up"), "value_up": read("value_up")}
        norms["q_up"] = linear("q_up") if "q_up" in shapes else None
    elif c.qk_norm and c.description.qk_norm == "unit" and _is_rotated(c, i):
        norms |= dict.fromkeys(("q_norm", "k_norm"), torch.ones(c.head_dim, dtype=reader.dtype, device=reader.device))
    elif c.description.temperature is not None and not _is_rotated(c, i):
        from headway.models.variants.tempered import TemperedLayer as make
    if c.description.recurrence is not None:
        from headway.models.variants.hybrid import HybridLayer as make

        norms["mixer"] = _mixer(c, linear, read, shapes) if i in c.description.recurrent_layers else None
        norms["attention_gate"] = linear("attention_gate") if "attention_gate" in shapes else None
    return make(
        qkv=linear(*(role for role in ("q", "k", "v", "q_down") if role in shapes)) if "o" in shapes else none,
        out=linear("o") if "o" in shapes else none,
        gate_up=gate_up,
        down=down,
        heads=c.heads,
        kv_heads=c.kv_shape(i).heads,
        head_dim=c.kv_shape(i).dim,
        eps=c.norm_eps,
        description=c.description,
        experts=experts,
        sinks=read("sinks") if "sinks" in shapes else None,
        **norms,
    )


def _per_layer(  # noqa: PLR0917
    c: ModelConfig,
    i: int,
    linear: Callable[..., Linear],
    expert: Callable[..., Any],
    read: Callable[[str], Tensor],
    shapes: Mapping[str, object],
) -> tuple[Any, dict[str, Any]]:
    """The class of a layer that differs from others, and what it has besides a described layer's parts."""
    from headway.models.variants.altup import AltUpLayer
    from headway.models.variants.per_layer import ExpertsBeside, PerLayerLayer

    what, altup = c.description.experts, c.description.altup
    parts: dict[str, Any] = {role: linear(role) for role in ("input_gate", "input_out") if role in shapes}
    parts |= {role: read(role) for role in ("layer_scale", "altup_scale") if role in shapes}
    if what is not None:
        scales = {"router_scale": read("router_scale"), "expert_scale": read("expert_scale"), "eps": c.norm_eps}
        parts["beside"] = ExpertsBeside(
            experts=ScaledExperts(what, linear("router"), **scales),
            gate_up=expert("expert_gate", "expert_up"),
            down=expert("expert_down"),
            **{role: read(role) for role in ("dense_norm", "expert_in_norm", "expert_out_norm")},
        )
    if altup is None:
        return PerLayerLayer, parts
    roles = ("laurel_down", "laurel_up", "altup_router", "altup_predict", "altup_correct")
    return AltUpLayer, parts | {role: linear(role) for role in roles} | {"sparsity": altup.sparsity[i]}


def _is_rotated(c: ModelConfig, i: int) -> bool:
    return c.description.ropes is None or c.description.ropes[i].dim > 0


def _mixer(
    c: ModelConfig, linear: Callable[..., Linear], read: Callable[[str], Tensor], shapes: Mapping[str, object]
) -> Mixer:
    """The recurrence of a layer."""
    what, conv = c.description.recurrence, read("conv")
    bias = read("conv_bias") if "conv_bias" in shapes else None
    match what:
        case ShortConv():
            return ShortConvMixer(what, linear("mix_in"), conv, bias, linear("mix_out"))
        case GatedDelta():
            return GatedDeltaMixer(
                what=what,
                mix_in=linear("mix_qkv", "mix_beta", "mix_step"),
                mix_gate=linear("mix_gate"),
                conv=conv,
                step_bias=read("step_bias"),
                rate=read("rate").float(),
                mix_norm=read("mix_norm"),
                mix_out=linear("mix_out"),
                eps=c.norm_eps,
            )
        case Mamba2():
            return Mamba2Mixer(
                what=what,
                mix_in=linear("mix_in"),
                conv=conv,
                conv_bias=bias,
                step_bias=read("step_bias"),
                rate=read("rate").float(),
                skip=read("skip"),
                mix_norm=read("mix_norm") if "mix_norm" in shapes else None,
                mix_out=linear("mix_out"),
                eps=c.norm_eps,
                activation=c.description.activation,
            )
    raise AssertionError(what)


def _stack(read: Callable[[str], Tensor], roles: list[str]) -> Tensor:
    """Matrices, or those of experts, with their rows one after the other."""
    parts = [read(role) for role in roles]
    by_expert = roles[0].startswith("expert_")
    return torch.cat(parts, 1) if by_expert and len(parts) > 1 else fused(parts) if not by_expert else parts[0]


def _experts(
    c: ModelConfig, linear: Callable[..., Linear], read: Callable[[str], Tensor], shapes: Mapping[str, object]
) -> ExpertWeights:
    what = c.description.experts
    assert what is not None
    shared: dict[str, Linear] = {}
    if "shared_up" in shapes:
        shared = {"shared_gate_up": linear("shared_gate", "shared_up"), "shared_down": linear("shared_down")}
        shared |= {"shared_router": linear("shared_router")} if what.shared_gated else {}
    if what.groups is not None:
        correction = read("router_correction") if what.groups.corrected else None
        return GroupedExperts(what, linear("router"), **shared, correction=correction)
    return (InputWeightedExperts if what.sigmoid_inputs else ExpertWeights)(what, linear("router"), **shared)
