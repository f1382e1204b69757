"""`headway doctor`: this machine, how Headway would use it, and whether a model fits."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.base.checks import check_fraction
from headway.base.config import settings
from headway.base.device import AnyDevice
from headway.base.errors import InvalidInput
from headway.base.extras import has_torch
from headway.base.machine import Machine, read_machine
from headway.cli.facts import (
    PACKAGES,
    ModelFacts,
    headway_version,
    package_version,
    read_model,
    system_name,
)
from headway.cli.options import INTEGER, Device, Dtype, Json, MemoryFraction, Threads
from headway.cli.render import emit_json, show_pairs, size
from headway.models.hub import store

STEP_ROWS = 512  # rows of a prefill step


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_total: int
    memory_free: int


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
    stored: StoredWeights | None = None  # where the weights stay in the file's formats

    @property
    def weights(self) -> int:
        return self.model.parameters * self.item if self.stored is None else self.stored.bytes + self.stored.reference

    @property
    def kv_per_token(self) -> int:
        return self.model.kv_values_per_token * self.item

    @property
    def workspace(self) -> int:
        """Activations of one step of `STEP_ROWS` rows and one row of logits, in float32."""
        m = self.model
        row = 4 * m.hidden_size + (m.heads + 2 * m.kv_heads) * m.head_dim + 3 * m.intermediate_size
        return 4 * (STEP_ROWS * row + m.vocab_size)

    @property
    def needed(self) -> int:
        return self.weights + self.kv_per_token * self.context + self.workspace

    @property
    def fits(self) -> bool:
        return self.needed <= self.available

    @property
    def longest_context(self) -> int:
        """Tokens whose KV cache fits next to the weights, up to the model's context length."""
        return max(
            0, min(self.model.max_positions, (self.available - self.weights - self.workspace) // self.kv_per_token)
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.model.path),
            "dtype": self.dtype,
            "format": self.dtype if self.stored is None else self.stored.format,
            "weights_bytes": self.weights,
            "kv_bytes_per_token": self.kv_per_token,
            "context": self.context,
            "work_bytes": self.workspace,
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
            "--check", "--model", "-m", metavar="MODEL", help="Check whether this model fits, without loading it."
        ),
    ] = None,
    context: Annotated[
        int | None, typer.Option("--context", **INTEGER, help="Context length to check; the model's own by default.")
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
        raise InvalidInput("--context needs --check MODEL")
    if memory_fraction is not None:
        raise InvalidInput("--memory-fraction needs --check MODEL")
    report = _report(machine, _gpus(), str(where), measure_bandwidth(str(where)), count)
    if json:
        emit_json(report)
    else:
        _show(report)


def hints(machine: Machine, gpus: list[Gpu], device: str, threads: int) -> list[str]:
    """What would make Headway faster on this machine."""
    found, flags = [], machine.instructions
    if device == "cpu" and gpus:
        found.append(f"there is a CUDA device ({gpus[0].name}); use it with --device cuda")
    if threads > machine.fair_threads:
        found.append(f"{threads} threads are more than the {machine.fair_threads} that can run concurrently")
    if machine.cpu_quota is not None and machine.cpu_quota < machine.usable_cores:
        found.append(
            f"the container may use {machine.cpu_quota:g} of {machine.usable_cores} cores; "
            "a higher CPU limit allows more threads"
        )
    if device == "cpu" and "AVX2" not in flags and "NEON" not in flags:
        found.append("this CPU has no AVX2, which every fast CPU path of torch needs")
    elif device == "cpu" and "AVX2" in flags and "AVX-512 VNNI" not in flags and "AVX-VNNI" not in flags:
        found.append("this CPU has no VNNI: integer matmuls run at about half speed")
    if device == "cpu" and "AVX2" in flags and not {"AVX-512 BF16", "AMX BF16"} & set(flags):
        found.append("this CPU has no BF16 instructions: float32 is the fastest --dtype here")
    if machine.memory_free < 1 << 30:
        found.append(
            f"only {size(machine.memory_free)} of memory is free; a model that does not fit is reread from disk"
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
        "computes": _computes(device, config.native),
        "extras": extras(),
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
        ("instruction sets", ", ".join(cpu["instructions"]) or "none that Headway uses"),
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
        ("computes", report["computes"]),
        ("device", report["device"]),
    ]
    show_pairs(machine, title="Machine")
    show_pairs(((name, text) for name, text in report["extras"].items()), title="Extras")
    cache = report["cache"]
    stored = [
        ("cache", f"{cache['path']}, {size(cache['bytes'])}"),
        ("models", ", ".join(report["models"]) or "none installed; `headway models pull` fetches the default"),
        ("hub", "offline (HF_HUB_OFFLINE is set)" if report["hub_offline"] else "online"),
    ]
    show_pairs(stored, title="Models")
    print("Hints")
    for hint in report["hints"] or ["none"]:
        print(f"  {hint}")


def _fit(
    path: Path, device: AnyDevice, machine: Machine, dtype: str, *, context: int | None, fraction: float | None
) -> MemoryFit:
    from headway.models.load import has_quantized, stored_dtype
    from headway.runtime.device import pick_dtype
    from headway.runtime.memory import read_memory
    from headway.runtime.runners.select import why_not_native

    facts, kind = read_model(path), pick_dtype(dtype, device, stored_dtype(path))
    if context is not None and not 1 <= context <= facts.max_positions:
        raise InvalidInput(
            f"--context is {context}; it must be an integer in [1, {facts.max_positions}] for this model"
        )
    memory = read_memory(device)
    free = min(memory.free, machine.memory_free) if device.type == "cpu" else memory.free
    if fraction is not None:
        free = min(free, int(fraction * memory.total))
    stored = None
    if dtype == "auto" and why_not_native(path, dtype, device, settings()) is None:
        stored = _stored_weights(path)
    elif dtype == "auto" and device.type == "cpu" and has_quantized(path):
        stored = replace(_stored_weights(path), reference=4 * facts.parameters)
    item = 4 if kind == "float32" else 2
    return MemoryFit(facts, kind, item, context or facts.max_positions, free, stored)


def _stored_weights(path: Path) -> StoredWeights:
    """The size of the weights in the file's own formats, from its headers alone."""
    from headway.models.config import read_config
    from headway.models.files.weights import open_weights
    from headway.models.quantized.repack import kept_size

    config, found = read_config(path), Counter[str]()
    with open_weights(path) as weights:
        for name in weights.names():
            if not (config.tied and name == "lm_head.weight"):  # some files store it twice
                label, count = kept_size(weights.stored(name), weights.shape(name))
                found[label] += count
    return StoredWeights(", ".join(label for label, _ in found.most_common()), found.total())


def _show_fit(fit: MemoryFit, device: str) -> None:
    kv = f"{fit.kv_per_token:,} bytes per token × {fit.context:,} = {size(fit.kv_per_token * fit.context)}"
    weights = f"{fit.model.parameters:,} × {fit.item} bytes ({fit.dtype}) = {size(fit.weights)}"
    if fit.stored is not None:
        copy = ", and in float32 for torch" if fit.stored.reference else ""
        weights = f"{fit.model.parameters:,} as stored ({fit.stored.format}){copy} = {size(fit.weights)}"
    pairs = [
        ("weights", weights),
        ("KV cache", kv),
        ("workspace", f"{STEP_ROWS} rows per step = {size(fit.workspace)}"),
        ("needed", size(fit.needed)),
        ("available", f"{size(fit.available)} on {device}"),
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


EXTRAS = {  # a package that each brings, and what it adds
    "torch": ("torch", "the reference path, other dtypes on a CPU, and machines without a native library"),
    "cuda": ("triton", "NVIDIA GPUs, with a CUDA build of torch"),
    "pipelines": ("transformers", "tasks for other kinds of models: embeddings, classification, images, sound"),
    "parquet": ("pyarrow", "batch jobs over Parquet files"),
    "audio": ("soundfile", "FLAC, Ogg and MP3"),
    "onnx": ("onnxruntime", "pipelines on ONNX Runtime"),
}


def extras() -> dict[str, str]:
    """Whether each extra is installed, and what it adds or would add."""
    found = {}
    for name, (package, adds) in EXTRAS.items():
        there = find_spec(package) is not None and (name in ("parquet", "audio") or has_torch())
        state = "installed" if there else f"pip install 'headway[{name}]' adds"
        found[name] = f"{state}: {adds}"
    return found


def _computes(device: str, native: str) -> str:
    """What computes a model by default on this device."""
    from headway.kernels.native.library import open_library
    from headway.kernels.triton import missing

    if device.startswith("cuda") and native != "off":
        return "Triton kernels" if missing() is None else "torch"
    if device == "cpu" and native not in ("off", "triton") and open_library().calls is not None:
        return "the native step, with numpy; torch is not imported"
    return "torch" if has_torch() else "nothing: there is no native step, and torch is not installed"


def _native() -> dict[str, Any]:
    """Whether the native runner is available, its instruction set, or why not."""
    from headway.kernels.native.library import ISA_NAMES, open_library

    library = open_library()
    if library.calls is None:
        return {"available": False, "instructions": None, "reason": library.missing}
    return {"available": True, "instructions": ISA_NAMES[library.isa], "reason": None}


def _native_line(native: dict[str, Any]) -> str:
    return native["instructions"] if native["available"] else f"none: {native['reason']}; torch computes instead"


@dataclass(frozen=True)
class GpuPath:
    """How a CUDA device is used, or what is missing."""

    missing: str | None  # to use a CUDA device at all
    triton: str | None  # its version
    reason: str | None  # why its kernels are not used
    graphs: str  # on, or off and why

    def to_json(self) -> dict[str, Any]:
        return vars(self)


def gpu_path(there: bool, native: str) -> GpuPath:
    """How a CUDA device would be used, whether one is `there` or not; `native` is HEADWAY_NATIVE."""
    from headway.kernels.triton import missing

    reason = "HEADWAY_NATIVE is off" if native == "off" else missing()
    absent = None
    if not there:
        absent = _no_cuda()
    graphs = "on" if reason is None else f"off: {reason}"
    return GpuPath(absent, package_version("triton"), reason, graphs if there else "off: there is no CUDA device")


def _no_cuda() -> str:
    """Why there is no CUDA device."""
    if not has_torch():
        return "torch is not installed; run: pip install 'headway[cuda]'"
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; a build with it is at https://pytorch.org"
    return f"torch is built for CUDA {torch.version.cuda} and no driver or device answers; see nvidia-smi"


def _triton_line(path: dict[str, Any]) -> str:
    if path["reason"] is None:
        return path["triton"] or "installed"
    return f"not used: {path['reason']}; torch computes instead"


def _gpus() -> list[Gpu]:
    from headway.runtime.device import has_cuda

    if not has_cuda():
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        found.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return found
