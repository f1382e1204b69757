"""Facts about this machine and about a model on disk, for `doctor` and `models show`."""

from __future__ import annotations

import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.dataclass import dataclass

if TYPE_CHECKING:
    from headway.models.config import ModelConfig
    from headway.models.files.weights import Weights

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "llguidance")


def headway_version() -> str:
    import headway

    return headway.__version__


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def system_name() -> str:
    """The operating system, its release and the architecture."""
    try:
        pretty = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        pretty = platform.system()
    return f"{pretty}, {platform.system()} {platform.release()}, {platform.machine()}"


@dataclass(frozen=True)
class ModelFacts:
    """A model's format, size and shape, from its headers alone."""

    path: Path
    format: str
    family: str
    parameters: int
    file_bytes: int
    stored_types: tuple[tuple[str, int], ...]  # type, tensors
    gpu_dtype: str  # with dtype auto
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    active_parameters: int = 0  # that one token uses
    memory_bytes: int = 0  # that the weights take on a CPU, with dtype auto
    windows: tuple[int, int] = (0, 0)  # layers with a sliding window or chunks, and the widest
    chunked: bool = False  # whether they have chunks
    latent: bool = False  # whether attention is latent: a slot is one vector for all heads
    experts: tuple[int, int] | None = None  # how many, and how many a token goes to
    head_shapes: tuple[tuple[int, int, int], ...] = ()  # layers, their key heads, numbers of a head; where these differ
    sharing_layers: int = 0  # that attend to another layer's keys and values
    limit_reason: str = ""  # why there are fewer positions than its config says
    kv_values_per_token: int = 0
    recurrent_layers: int = 0
    state_values: int = 0  # numbers of a sequence's recurrent state
    why_not_native: str | None = None  # why the native step does not compute it
    why_not_triton: str | None = None  # why Triton kernels do not compute it
    missing: tuple[str, ...] = ()  # what is refused
    in_memory: str = ""  # what becomes of quantized weights; empty where there are none


def read_model(path: Path) -> ModelFacts:
    """Facts about the model at `path`, without reading its weights."""
    from headway.base.system.device import Device
    from headway.kernels.host.attention import ChunkWindow
    from headway.models.capabilities import Capabilities, why_no_native_layers, why_no_triton_layers
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights
    from headway.models.weights.load import stored_dtype
    from headway.runtime.device import pick_dtype

    config = read_config(path)
    why_not_native = why_no_native_layers(config)
    with open_weights(path) as weights:
        names = weights.names()
        kinds = Counter(weights.stored(name) for name in names)
        stored = sum(weights.nbytes(name) for name in names)
        in_memory = _in_memory(weights, native=why_not_native is None)
        if config.description.experts is not None and why_no_triton_layers(config) is None:
            in_memory = "; ".join(filter(None, (in_memory, _on_cuda(path, config, weights))))
        kept = kept_bytes(weights, config).total()
    return ModelFacts(
        path=path,
        format="Hugging Face folder" if path.is_dir() else "GGUF",
        parameters=config.parameters,
        file_bytes=stored,
        stored_types=tuple(kinds.most_common()),
        memory_bytes=kept if why_not_native is None else 4 * config.parameters,
        gpu_dtype=pick_dtype("auto", Device("cuda"), stored_dtype(path)),
        windows=(len(bound := [w for w in config.windows if w is not None]), max(map(_span, bound), default=0)),
        chunked=any(isinstance(w, ChunkWindow) for w in bound),
        experts=None if (experts := config.description.experts) is None else (experts.count, experts.per_token),
        latent=config.description.latent is not None,
        head_shapes=_head_shapes(config),
        sharing_layers=len(config.attention_layers) - len(config.kv_layers),
        recurrent_layers=len(config.recurrent_layers),
        why_not_native=why_not_native,
        why_not_triton=why_no_triton_layers(config),
        missing=Capabilities.of(config).missing(),
        in_memory=in_memory,
        **{name: getattr(config, name) for name in _SHAPE},
    )


def kept_bytes(weights: Weights, config: ModelConfig) -> Counter[str]:
    """Bytes of all weights by format, as the native step holds them."""
    from headway.models.quantized.repack import kept_weight

    sizes = Counter[str]()
    for name in weights.names():
        if not (config.tied and name == "lm_head.weight"):  # some files store it twice
            label, count = kept_weight(weights, name)
            sizes[label] += count
    return sizes


def _head_shapes(config: ModelConfig) -> tuple[tuple[int, int, int], ...]:
    shapes = Counter((shape.heads, shape.dim) for shape in map(config.kv_shape, config.attention_layers))
    return tuple((layers, heads, dim) for (heads, dim), layers in shapes.items()) if len(shapes) > 1 else ()


def _in_memory(weights: Weights, *, native: bool) -> str:
    """What becomes of quantized matrices: which stay so on a CPU, and which become floats."""
    from headway.models.files.blocks import FLOATS
    from headway.models.quantized.repack import kept_weight

    kept, floats = dict[str, dict[str, None]](), dict[str, None]()
    for name in weights.names():
        kind = weights.stored(name)
        if kind not in FLOATS:
            label = kept_weight(weights, name)[0]
            if native and label != "f32":
                kept.setdefault(kind, {})[label] = None
            else:
                floats[kind] = None
    parts = [f"{kind} stays quantized on a CPU ({', '.join(labels)})" for kind, labels in kept.items()]
    return "; ".join([*parts, *(f"{kind} becomes floats when it is loaded" for kind in floats)])


def _on_cuda(path: Path, config: ModelConfig, weights: Weights) -> str:
    """Which experts stay quantized where Triton kernels compute."""
    from headway.models.weights.kept_forms import kept_weights
    from headway.models.weights.roles import Roles

    kinds = dict.fromkeys(kind for kind, _ in kept_weights(Roles.of(path, config, weights), "bfloat16").values())
    return f"experts in {', '.join(kinds)} stay so on a CUDA device" if kinds else ""


def _span(window: object) -> int:
    return getattr(window, "size", window)  # type: ignore[return-value]


_SHAPE = ("family", "active_parameters", "layers", "hidden_size", "heads", "kv_heads", "head_dim")
_SHAPE += ("intermediate_size", "vocab_size", "max_positions", "kv_values_per_token", "state_values", "limit_reason")
