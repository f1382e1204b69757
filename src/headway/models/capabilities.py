"""What can be done with a model: known from its config, before any weight is read."""

from __future__ import annotations

from headway.base.dataclass import dataclass
from headway.base.errors import Unsupported
from headway.kernels.host.attention import ChunkWindow
from headway.kernels.native.library import ADAPTER_ROLES, EXPERT_ROLES, HEAD_ROLES, STREAM_ROLES
from headway.models.config import ModelConfig
from headway.models.families import is_llama_like
from headway.models.weights.shapes import layer_shapes, model_shapes

ADAPTED = (*ADAPTER_ROLES, *EXPERT_ROLES, *HEAD_ROLES, *STREAM_ROLES)  # linear layers that adapters may change
ATTENTION, FEED_FORWARD = ("q", "k", "v", "o"), ("gate", "up", "down")


@dataclass(frozen=True)
class Capabilities:
    """What an engine of this model can do. What it cannot is refused where it is asked for."""

    runner: str  # what computes: the native step, Triton kernels or torch; empty before loading
    reason: str  # why it is not a faster one, if it is not
    native: bool  # whether the native step has this model's layers
    triton: bool  # whether the Triton kernels have them
    adapters: tuple[str, ...]  # linear layers that LoRA may change besides the output matrix, by role, in one or more
    quantize: bool  # whether `quantize=` takes it
    keeps_quantized: bool  # whether quantized weights of a file stay so; else they become floats
    update_weights: bool
    shift_pages: bool  # `append_from(shift=)`: keys can be rotated to other positions
    masks: bool  # attention masks other than the causal one
    move_slots: bool  # `discard_pages`, `keep_slots`, `append_from`
    repeat_positions: bool  # `input_at` with a position that the sequence has already
    tree_drafts: bool  # drafters that propose more than one line
    tensor_parallel: int = 1  # ranks that each compute a share of it

    @classmethod
    def of(cls, config: ModelConfig, *, runner: str = "", reason: str = "", tensor_parallel: int = 1) -> Capabilities:
        """Of a model of this config; one that is split over ranks has float weights."""
        split = tensor_parallel > 1
        plain = is_llama_like(config)
        recurs = config.description.recurrence is not None
        native = why_no_native_layers(config) is None
        roles = set(model_shapes(config)).union(*(layer_shapes(config, layer) for layer in range(config.layers)))
        return cls(
            runner=runner,
            reason=reason,
            native=native,
            triton=why_no_triton_layers(config) is None,
            adapters=tuple(role for role in ADAPTED if role in roles),
            quantize=native and not split,
            keeps_quantized=native and not split,
            update_weights=plain or not split,
            shift_pages=not config.description.learned_positions and not recurs,
            masks=not recurs,
            move_slots=not recurs,
            repeat_positions=not recurs,
            tree_drafts=not recurs,
            tensor_parallel=tensor_parallel,
        )

    def missing(self) -> tuple[str, ...]:
        """What is refused, in words."""
        has = {role.removeprefix("expert_") for role in self.adapters}
        has |= {"q", "k", "v"} if "key_up" in has else set()
        without = [role for role in ATTENTION + FEED_FORWARD if role not in has]
        words = (
            (self.native, "the native step (torch computes it on a CPU)"),
            (self.triton, "Triton kernels (torch computes it on a CUDA device)"),
            (not without, f"adapters of {', '.join(without)}"),
            (self.quantize, "quantize="),
            (self.keeps_quantized, "quantized weights of a file in memory (they become floats)"),
            (self.update_weights, "update_weights"),
            (self.shift_pages or not self.move_slots, "append_from with a shift"),
            (self.masks, "attention masks other than the causal one"),
            (self.move_slots, "discard_pages, keep_slots and append_from"),
            (self.repeat_positions, "a position that the sequence has already"),
            (self.tree_drafts, "tree drafts"),
        )
        return tuple(word for has, word in words if not has)


def why_no_triton_layers(config: ModelConfig) -> str | None:
    """Why the Triton kernels do not compute a model of this config, in words, or None."""
    d = config.description
    words = (
        ("latent attention with caps or sinks", d.latent is not None and (d.attention_cap is not None or d.sinks)),
        ("recurrent layers", d.recurrence is not None),
        ("norms after parallel attention", d.parallel and d.norm_place != "before"),
    )
    others = ", ".join(word for word, has in words if has)
    return f"they do not have {others}, as {config.family} has" if others else None


def why_llama_alone(config: ModelConfig) -> str | None:
    """Why weights that are split or quantized on a CUDA device are not computed by Triton kernels, or None."""
    if is_llama_like(config):
        return None
    others = ", ".join(config.differences()) or "its weights in files of another layout"
    return f"they have Llama's layers alone there, and {config.family} has {others}"


def why_not_quantized(config: ModelConfig, quantize: str) -> str | None:
    """Why Triton kernels do not compute a model whose floats are quantized on a CUDA device, or None."""
    if is_llama_like(config) or config.description.experts is None:
        return why_llama_alone(config)
    if quantize == "fp8":
        return f"fp8 is for Llama's layers alone there; int8 and int4 take the experts of {config.family}"
    return why_no_triton_layers(config)


def why_no_native_layers(config: ModelConfig) -> str | None:
    """Why the native step does not compute a model of this config, in words, or None."""
    if config.description.both:
        return f"it does not have attention and recurrence in one layer, as {config.family} has"
    return None


def _not_split(config: ModelConfig) -> list[str]:
    """What a model has, in words, that ranks do not compute."""
    d, experts = config.description, config.description.experts
    words = (
        *((word, True) for own in (d.per_layer, d.altup) if own is not None for word in own.differences()),
        ("latent attention", d.latent is not None),
        ("chunked attention", any(isinstance(window, ChunkWindow) for window in config.windows)),
        ("queries that grow with their position", d.temperature is not None),
        ("norms of queries and keys without weights", config.qk_norm and d.qk_norm == "unit"),
        ("experts that are chosen by groups", experts is not None and experts.groups is not None),
        ("experts with weighted inputs", experts is not None and experts.sigmoid_inputs),
    )
    return [word for word, has in words if has]


def check_split(config: ModelConfig, size: int) -> None:
    """Raise unless a model can be split over this many ranks; the error names what does not divide."""
    if config.description.recurrence is not None:
        raise Unsupported(
            f"tensor_parallel={size}: the {config.family} model has recurrent layers, which are not split; "
            "run it without tensor_parallel"
        )
    experts = config.description.experts
    if others := _not_split(config):
        raise Unsupported(
            f"tensor_parallel={size}: the {config.family} model has {', '.join(others)}, which is not split; run it "
            "without tensor_parallel"
        )
    parts = [("attention heads", config.heads), ("key-value heads", config.kv_heads)]
    if experts is None or experts.dense_layers:
        parts.append(("feed-forward width", config.intermediate_size))
    if experts is not None:
        parts.append(("number of experts", experts.count))
        parts += [("shared expert's width", experts.shared_size)] if experts.shared_size else []
    for name, count in parts:
        if count % size:
            fits = [n for n in range(2, size) if all(c % n == 0 for _, c in parts)]
            way = f"{fits[-1]} divides all of them" if fits else "run it without tensor_parallel"
            raise Unsupported(
                f"tensor_parallel={size}: the {config.family} model's {name}, {count}, cannot be divided by {size}; "
                f"{way}"
            )
    d = config.description
    if config.qk_norm and d.qk_norm == "row" and d.norm != "rms":
        raise Unsupported(
            f"tensor_parallel={size}: the {config.family} model norms queries and keys over all heads by {d.norm}, "
            "which is not split; run it without tensor_parallel"
        )
