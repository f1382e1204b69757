"""Facts about this machine and about a model on disk, for `doctor` and `models show`."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    windows: tuple[int, int] = (0, 0)  # layers with a sliding window, and the widest
    experts: tuple[int, int] | None = None  # how many, and how many a token goes to
    why_not_fast: str | None = None  # why neither the native step nor Triton kernels compute it
    missing: tuple[str, ...] = ()  # what is refused

    @property
    def kv_values_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim


def read_model(path: Path) -> ModelFacts:
    """Facts about the model at `path`, without reading its weights."""
    from headway.base.device import Device
    from headway.models.capabilities import Capabilities, why_not_fast
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights
    from headway.models.load import stored_dtype
    from headway.runtime.device import pick_dtype

    config = read_config(path)
    with open_weights(path) as weights:
        names = weights.names()
        kinds = Counter(weights.stored(name) for name in names)
        stored = sum(weights.nbytes(name) for name in names)
    return ModelFacts(
        path=path,
        format="Hugging Face folder" if path.is_dir() else "GGUF",
        parameters=config.parameters,
        file_bytes=stored,
        stored_types=tuple(kinds.most_common()),
        gpu_dtype=pick_dtype("auto", Device("cuda"), stored_dtype(path)),
        windows=(len(bound := [w for w in config.windows if w is not None]), max(bound, default=0)),
        experts=None if (experts := config.description.experts) is None else (experts.count, experts.per_token),
        why_not_fast=why_not_fast(config),
        missing=Capabilities.of(config).missing(),
        **{name: getattr(config, name) for name in _SHAPE},
    )


_SHAPE = ("family", "active_parameters", "layers", "hidden_size", "heads", "kv_heads", "head_dim")
_SHAPE += ("intermediate_size", "vocab_size", "max_positions")
