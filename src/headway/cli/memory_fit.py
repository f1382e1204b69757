"""Whether a model fits into memory, without loading it: `headway doctor --check`."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from headway.base.config import settings
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.system.device import AnyDevice
from headway.base.system.machine import Machine
from headway.cli.facts import ModelFacts, kept_bytes, read_model
from headway.cli.terminal.render import show_pairs, size
from headway.models.capabilities import check_split

STEP_ROWS = 512  # rows of a prefill step
PAGE = 16  # slots, by default


@dataclass(frozen=True)
class StoredWeights:
    """Weights that stay in the formats of their file."""

    format: str  # most bytes first
    bytes: int
    reference: int = 0  # of the float32 copy that torch computes with where there is no native step


@dataclass(frozen=True)
class MemoryFit:
    """Whether a model fits: weights + KV cache + workspace, against free memory."""

    model: ModelFacts
    dtype: str
    item: int  # bytes per element of that type
    context: int
    available: int
    kv_dtype: str
    stored: StoredWeights | None = None  # where the weights stay in the file's formats
    tensor_parallel: int = 1
    devices: int = 1  # that each have a share of weights and KV cache
    computed_by: str = ""

    @property
    def weights(self) -> int:
        """On one device."""
        if self.stored is not None:
            return self.stored.bytes + self.stored.reference
        return -(-self.model.parameters * self.item // self.devices)

    @property
    def kv_per_token(self) -> int:
        """On one device."""
        return self.model.kv_values_per_token * (4 if self.kv_dtype == "float32" else 2) // self.devices

    @property
    def workspace(self) -> int:
        """Activations of one step of `STEP_ROWS` rows and one row of logits, in float32."""
        m = self.model
        row = 4 * m.hidden_size + (m.heads + 2 * m.kv_heads) * m.head_dim + 3 * m.intermediate_size
        return 4 * (STEP_ROWS * row + m.vocab_size)

    @property
    def recurrent(self) -> int:
        """Recurrent state: as many places as an engine with pages for this context has."""
        from headway.kv.states import LEAST_PLACES, STATE_WIDTH, pages_between

        if not (state := self.model.state_values * STATE_WIDTH):
            return 0
        every = pages_between(state, self.kv_per_token * PAGE)
        return state * max(LEAST_PLACES, -(-self.context // PAGE) // every)

    @property
    def needed(self) -> int:
        return self.weights + self.kv_per_token * self.context + self.recurrent + self.workspace

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def longest_context(self) -> int:
        """Tokens whose KV cache fits next to the weights, up to the model's context length."""
        left = self.available - self.weights - self.workspace - self.recurrent
        if not self.kv_per_token:
            return self.model.max_positions if left >= 0 else 0
        return max(0, min(self.model.max_positions, left // self.kv_per_token))

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.model.path),
            "dtype": self.dtype,
            "format": self.dtype if self.stored is None else self.stored.format,
            "weights_bytes": self.weights,
            "kv_dtype": self.kv_dtype,
            "kv_bytes_per_token": self.kv_per_token,
            "recurrent_bytes": self.recurrent,
            "tensor_parallel": self.tensor_parallel,
            "context": self.context,
            "work_bytes": self.workspace,
            "needed_bytes": self.needed,
            "computed_by": self.computed_by,
            "available_bytes": self.available,
            "fits": self.fits,
            "longest_context": self.longest_context,
        }


def memory_fit(
    path: Path,
    device: AnyDevice,
    machine: Machine,
    dtype: str,
    *,
    context: int | None,
    fraction: float | None,
    kv_dtype: str,
    ranks: int,
) -> MemoryFit:
    """Whether a model fits on a device, by its headers alone."""
    from headway.models.config import read_config
    from headway.models.weights.load import has_quantized, stored_dtype
    from headway.runtime.device import pick_dtype
    from headway.runtime.memory import read_memory
    from headway.runtime.runners.select import NATIVE, TRITON, check_float_ranks, what_computes

    facts, kind = read_model(path), pick_dtype(dtype, device, stored_dtype(path))
    if ranks > 1:
        check_split(read_config(path), ranks)
    if context is not None and not 1 <= context <= facts.max_positions:
        raise InvalidInput(
            f"--context is {context}; it must be an integer in [1, {facts.max_positions}] for this model"
        )
    memory = read_memory(device)
    free = min(memory.free, machine.memory_free) if device.type == "cpu" else memory.free
    if fraction is not None:
        free = min(free, int(fraction * memory.total))
    item = 4 if kind == "float32" else 2
    stored, runner = None, what_computes(path, dtype, device, settings(), ranks)
    if ranks > 1:
        check_float_ranks(ranks, device, dtype, None, quantized=has_quantized(path))
    elif dtype == "auto" and runner == NATIVE:
        stored = _stored_weights(path)
    elif dtype == "auto" and device.type == "cpu" and facts.why_not_native is None and has_quantized(path):
        stored = replace(_stored_weights(path), reference=4 * facts.parameters)
    elif runner == TRITON:
        stored = weights_with_experts(path, kind, item)
    quantized = stored is not None and has_quantized(path)
    kept = _kv_dtype(kv_dtype, kind, quantized=quantized, on_cpu=device.type == "cpu")
    devices = ranks if device.type == "cuda" else 1  # ranks on a CPU share its memory
    reach = context or facts.max_positions
    return MemoryFit(facts, kind, item, reach, free, kept, stored, ranks, devices, runner)


def _kv_dtype(name: str, kind: str, *, quantized: bool, on_cpu: bool) -> str:
    """What keys and values would be stored in, as `Backend.kv_dtype` decides it for a model that is loaded."""
    from headway.runtime.device import DTYPES

    if name == "auto":
        return "float16" if quantized and on_cpu else kind
    if name not in DTYPES:
        raise InvalidInput(f"--kv-dtype is {name!r}; it takes auto, float32, bfloat16 or float16")
    if DTYPES[name] != kind and not (on_cpu and kind == "float32"):
        raise InvalidInput(f"--kv-dtype is {name!r}, which is for CPUs that compute in float32; here it is {kind}")
    return DTYPES[name]


def _stored_weights(path: Path) -> StoredWeights:
    """The size of the weights in the file's own formats, from its headers alone."""
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights

    with open_weights(path) as weights:
        sizes = kept_bytes(weights, read_config(path))
    return StoredWeights(", ".join(label for label, _ in sizes.most_common()), sizes.total())


def weights_with_experts(path: Path, kind: str, item: int) -> StoredWeights | None:
    """The size of floats beside experts that stay quantized with Triton kernels; None without such ones."""
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights
    from headway.models.weights.kept_forms import kept_weights
    from headway.models.weights.roles import Roles

    with open_weights(path) as weights:
        kept = kept_weights(Roles.of(path, read_config(path), weights), kind)
        floats = sum(item * prod(weights.shape(name)) for name in weights.names() if name not in kept)
    kinds = dict.fromkeys(stored for stored, _ in kept.values())
    total = floats + sum(each for _, each in kept.values())
    return StoredWeights(f"{', '.join(kinds)}, {kind}", total) if kept else None


def show_fit(fit: MemoryFit, device: str) -> None:
    total = size(fit.kv_per_token * fit.context)
    kv = f"{fit.kv_per_token:,} bytes per token ({fit.kv_dtype}) × {fit.context:,} = {total}"
    weights = f"{fit.model.parameters:,} × {fit.item} bytes ({fit.dtype}) = {size(fit.weights)}"
    if fit.devices > 1:
        weights = f"{weights} on each of {fit.devices} devices"
    if fit.stored is not None:
        copy = ", and in float32 for torch" if fit.stored.reference else ""
        weights = f"{fit.model.parameters:,} as stored ({fit.stored.format}){copy} = {size(fit.weights)}"
    pairs = [
        ("weights", weights),
        ("KV cache", kv),
        *([("recurrent state", size(fit.recurrent))] if fit.recurrent else []),
        ("workspace", f"{STEP_ROWS} rows per step = {size(fit.workspace)}"),
        ("needed", size(fit.needed)),
        ("available", f"{size(fit.available)} on {device}"),
        ("computed by", fit.computed_by),
    ]
    show_pairs(pairs, title=str(fit.model.path))
    print(_verdict(fit))


def _verdict(fit: MemoryFit) -> str:
    if fit.fits:
        return f"It fits, with {size(fit.available - fit.needed)} to spare."
    if fit.longest_context > 0:
        return f"It fits only with a context of up to {fit.longest_context:,} tokens (--context {fit.longest_context})."
    smaller = " or a smaller --dtype" if fit.dtype == "float32" and 2 * fit.model.parameters < fit.weights else ""
    return f"It does not fit: {size(fit.needed - fit.available)} are missing. A smaller model{smaller} would."
