"""`headway doctor`: what this machine is, what Headway makes of it, and whether a model fits."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.base.checks import check_fraction
from headway.base.config import settings
from headway.base.errors import InvalidInput
from headway.base.machine import Machine, read_machine
from headway.cli.facts import (
    PACKAGES,
    ModelFacts,
    headway_version,
    package_version,
    read_model,
    system_name,
)
from headway.cli.options import WHOLE, Device, Dtype, Json, MemoryFraction, Threads
from headway.cli.render import emit_json, show_pairs, size
from headway.models.hub import store

if TYPE_CHECKING:
    import torch

STEP_ROWS = 512  # rows of a long prompt that one step computes together


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_total: int
    memory_free: int


@dataclass(frozen=True)
class Kept:
    """Weights that the native step keeps in the formats of their file."""

    format: str  # most bytes first
    bytes: int


@dataclass(frozen=True)
class Fit:
    """The sum that says whether a model fits: weights + keys and values + work space, against free memory."""

    model: ModelFacts
    dtype: str
    item: int  # bytes of one number of that type
    context: int
    available: int
    kept: Kept | None = None  # the weights, where they stay as the file has them

    @property
    def weights(self) -> int:
        return self.model.parameters * self.item if self.kept is None else self.kept.bytes

    @property
    def kv_per_token(self) -> int:
        return self.model.kv_values_per_token * self.item

    @property
    def work(self) -> int:
        """One step of `STEP_ROWS` rows: the widest activations of a layer, and one row of logits, in float32."""
        m = self.model
        row = 4 * m.hidden_size + (m.heads + 2 * m.kv_heads) * m.head_dim + 3 * m.intermediate_size
        return 4 * (STEP_ROWS * row + m.vocab_size)

    @property
    def needed(self) -> int:
        return self.weights + self.kv_per_token * self.context + self.work

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def longest_context(self) -> int:
        """Tokens whose keys and values fit beside the weights; at most what the model can address."""
        return max(0, min(self.model.max_positions, (self.available - self.weights - self.work) // self.kv_per_token))

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.model.path),
            "dtype": self.dtype,
            "format": self.dtype if self.kept is None else self.kept.format,
            "weights_bytes": self.weights,
            "kv_bytes_per_token": self.kv_per_token,
            "context": self.context,
            "work_bytes": self.work,
            "needed_bytes": self.needed,
            "available_bytes": self.available,
            "fits": self.fits,
            "longest_context": self.longest_context,
        }


def doctor(
    *,
    check: Annotated[
        str | None,
        typer.Option(
            "--check", "--model", "-m", metavar="MODEL", help="Say whether this model fits, without loading it."
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", **WHOLE, help="Tokens to make room for; by default all the model can.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    memory_fraction: MemoryFraction = None,
    json: Json = False,
) -> None:
    """Show versions, device, memory, threads and cache, and what would make Headway faster."""
    from headway.runtime.device import pick_device, pick_threads
    from headway.runtime.profile import measure_bandwidth

    where, count, machine = pick_device(device), pick_threads(threads), read_machine()
    check_fraction(memory_fraction, "--memory-fraction")
    if check is not None:
        fit = _fit(
            store.resolve(check, download=False), where, machine, dtype, context=context, fraction=memory_fraction
        )
        emit_json(fit.to_json()) if json else _show_fit(fit, str(where))
        return
    if context is not None:
        raise InvalidInput("--context is for --check; name a model with it")
    if memory_fraction is not None:
        raise InvalidInput("--memory-fraction is for --check; name a model with it")
    report = _report(machine, _gpus(), str(where), measure_bandwidth(str(where)), count)
    if json:
        emit_json(report)
    else:
        _show(report)


def hints(machine: Machine, gpus: list[Gpu], device: str, threads: int) -> list[str]:
    """What would make Headway faster here; each follows from a fact."""
    found, flags = [], machine.instructions
    if device == "cpu" and gpus:
        found.append(f"a CUDA device is there ({gpus[0].name}); --device cuda uses it")
    if threads > machine.fair_threads:
        found.append(
            f"{threads} threads are more than the {machine.fair_threads} that can run at once: they would wait"
        )
    if machine.cpu_quota is not None and machine.cpu_quota < machine.usable_cores:
        found.append(
            f"the container may use {machine.cpu_quota:g} of {machine.usable_cores} cores; "
            "a higher CPU limit adds threads"
        )
    if device == "cpu" and "AVX2" not in flags and "NEON" not in flags:
        found.append("this CPU has no AVX2, which every fast CPU path of torch needs")
    elif device == "cpu" and "AVX2" in flags and "AVX-512 VNNI" not in flags and "AVX-VNNI" not in flags:
        found.append("this CPU has no VNNI, so integer products run at about half the pace of one that has it")
    if device == "cpu" and "AVX2" in flags and not {"AVX-512 BF16", "AMX BF16"} & set(flags):
        found.append("this CPU has no BF16 instructions: float32 is the fastest --dtype here")
    if machine.memory_free < 1 << 30:
        found.append(
            f"only {size(machine.memory_free)} of memory is free; a model that does not fit is read from disk again"
        )
    return found


def _report(machine: Machine, gpus: list[Gpu], device: str, speed: float, threads: int) -> dict[str, Any]:
    config = settings()
    models = [model for model in store.list_models() if model.installed]
    return {
        "versions": {
            "headway": headway_version(),
            "python": sys.version.split()[0],
            **{name: package_version(name) for name in PACKAGES},
        },
        "system": system_name(),
        "cpu": {
            "model": machine.cpu,
            "instructions": list(machine.instructions),
            "cores": machine.cores,
            "usable_cores": machine.usable_cores,
            "container_limit": machine.cpu_quota,
            "threads": threads,
        },
        "memory": {
            "total_bytes": machine.memory_total,
            "available_bytes": machine.memory_available,
            "container_limit_bytes": machine.memory_limit,
            "free_bytes": machine.memory_free,
            "bandwidth_bytes_per_second": round(speed),
        },
        "native": _native(),
        "device": device,
        "cuda": [vars(gpu) for gpu in gpus],
        "gpu": gpu_path(bool(gpus), config.native).to_json(),
        "cache": {"path": str(config.cache), "bytes": sum(model.bytes for model in models)},
        "models": [model.name for model in models],
        "hub_offline": config.hub_offline,
        "hints": hints(machine, gpus, device, threads),
    }


def _show(report: dict[str, Any]) -> None:
    cpu, memory = report["cpu"], report["memory"]
    quota = "none" if cpu["container_limit"] is None else f"{cpu['container_limit']:g} cores"
    limit = "none" if memory["container_limit_bytes"] is None else size(memory["container_limit_bytes"])
    cuda = [f"{gpu['name']}, {size(gpu['memory_free'])} of {size(gpu['memory_total'])} free" for gpu in report["cuda"]]
    show_pairs(((name, text or "not installed") for name, text in report["versions"].items()), title="Versions")
    machine = [
        ("system", report["system"]),
        ("CPU", cpu["model"]),
        ("instruction sets", ", ".join(cpu["instructions"]) or "none that Headway looks for"),
        ("cores", f"{cpu['cores']}, {cpu['usable_cores']} usable; container limit: {quota}"),
        ("threads", str(cpu["threads"])),
        (
            "memory",
            f"{size(memory['available_bytes'])} of {size(memory['total_bytes'])} free; container limit: {limit}",
        ),
        ("memory bandwidth", f"{size(memory['bandwidth_bytes_per_second'])}/s measured"),
        ("CUDA devices", "; ".join(cuda) or f"none: {report['gpu']['missing']}"),
        *([("Triton", _triton_line(report["gpu"])), ("CUDA graphs", report["gpu"]["graphs"])] if cuda else []),
        ("native kernels", _native_line(report["native"])),
        ("device", report["device"]),
    ]
    show_pairs(machine, title="Machine")
    cache = report["cache"]
    kept = [
        ("cache", f"{cache['path']}, {size(cache['bytes'])}"),
        ("models", ", ".join(report["models"]) or "none installed; `headway models pull` fetches the default"),
        ("hub", "offline (HF_HUB_OFFLINE is set)" if report["hub_offline"] else "asked when a model is missing"),
    ]
    show_pairs(kept, title="Models")
    print("What would make it faster")
    for hint in report["hints"] or ["nothing that this machine shows"]:
        print(f"  {hint}")


def _fit(
    path: Path, device: torch.device, machine: Machine, dtype: str, *, context: int | None, fraction: float | None
) -> Fit:
    from headway.runtime.device import pick_dtype
    from headway.runtime.memory import read_memory
    from headway.runtime.runners.select import why_not_native

    facts, kind = read_model(path), pick_dtype(dtype, device)
    if context is not None and not 1 <= context <= facts.max_positions:
        raise InvalidInput(f"--context is {context}; this model takes 1 to {facts.max_positions} positions")
    memory = read_memory(device)
    free = min(memory.free, machine.memory_free) if device.type == "cpu" else memory.free
    if fraction is not None:
        free = min(free, int(fraction * memory.total))
    kept = _kept(path) if dtype == "auto" and why_not_native(path, dtype, device, settings()) is None else None
    return Fit(facts, str(kind).removeprefix("torch."), kind.itemsize, context or facts.max_positions, free, kept)


def _kept(path: Path) -> Kept:
    """What the weights take where they are kept as the file has them, from its headers alone."""
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights
    from headway.models.quantized.repack import kept_size

    config, found = read_config(path), Counter[str]()
    with open_weights(path) as weights:
        for name in weights.names():
            if not (config.tied and name == "lm_head.weight"):  # some files have it twice
                label, count = kept_size(weights.stored(name), weights.shape(name))
                found[label] += count
    return Kept(", ".join(label for label, _ in found.most_common()), found.total())


def _show_fit(fit: Fit, device: str) -> None:
    kv = f"{fit.kv_per_token:,} bytes a token × {fit.context:,} = {size(fit.kv_per_token * fit.context)}"
    weights = f"{fit.model.parameters:,} × {fit.item} bytes ({fit.dtype}) = {size(fit.weights)}"
    if fit.kept is not None:
        weights = f"{fit.model.parameters:,} as the file has them ({fit.kept.format}) = {size(fit.weights)}"
    pairs = [
        ("weights", weights),
        ("keys and values", kv),
        ("work space", f"{STEP_ROWS} rows of a step = {size(fit.work)}"),
        ("needed", size(fit.needed)),
        ("available", f"{size(fit.available)} on {device}"),
    ]
    show_pairs(pairs, title=str(fit.model.path))
    print(_verdict(fit))


def _verdict(fit: Fit) -> str:
    if fit.fits:
        return f"It fits, with {size(fit.available - fit.needed)} to spare."
    if fit.longest_context > 0:
        return f"It fits only with a context of up to {fit.longest_context:,} tokens (--context {fit.longest_context})."
    smaller = " or a smaller --dtype" if fit.dtype == "float32" and 2 * fit.model.parameters < fit.weights else ""
    return f"It does not fit: {size(fit.needed - fit.available)} are missing. A smaller model{smaller} would."


def _native() -> dict[str, Any]:
    """Whether the native step can serve here, with what, or why not."""
    from headway.kernels.native.library import ISA_NAMES, open_library

    library = open_library()
    if library.calls is None:
        return {"available": False, "instructions": None, "reason": library.missing}
    return {"available": True, "instructions": ISA_NAMES[library.isa], "reason": None}


def _native_line(native: dict[str, Any]) -> str:
    return native["instructions"] if native["available"] else f"none: {native['reason']}; torch computes instead"


@dataclass(frozen=True)
class GpuPath:
    """How a CUDA device is used here, or what is missing."""

    missing: str | None  # for a CUDA device to be used at all
    triton: str | None  # its version
    reason: str | None  # why its kernels do not serve
    graphs: str  # on, or off and why

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def gpu_path(there: bool, native: str) -> GpuPath:
    """What serves on a CUDA device, whether one is `there` or not; `native` is what HEADWAY_NATIVE says."""
    import torch

    from headway.kernels.triton import missing

    reason = "HEADWAY_NATIVE is off" if native == "off" else missing()
    absent = None
    if not there and torch.version.cuda is None:
        absent = f"torch {torch.__version__} is built without CUDA; a build with it is at https://pytorch.org"
    elif not there:
        absent = f"torch is built for CUDA {torch.version.cuda} and no driver or device answers; see nvidia-smi"
    graphs = "on" if reason is None else f"off: {reason}"
    return GpuPath(absent, package_version("triton"), reason, graphs if there else "off: there is no CUDA device")


def _triton_line(path: dict[str, Any]) -> str:
    if path["reason"] is None:
        return path["triton"] or "installed"
    return f"not used: {path['reason']}; torch computes instead"


def _gpus() -> list[Gpu]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return found
