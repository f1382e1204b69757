"""`headway doctor`: this machine, how Headway would use it, and whether a model fits."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Annotated, Any

from headway.base.checks import check_fraction, check_integer
from headway.base.config import settings
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.base.system.device import MAX_RANKS
from headway.base.system.extras import has_torch
from headway.base.system.machine import Machine, read_machine
from headway.cli.facts import (
    PACKAGES,
    headway_version,
    package_version,
    system_name,
)
from headway.cli.flags.declare import Option
from headway.cli.flags.shared import (
    INTEGER,
    Device,
    Dtype,
    Json,
    KvDtype,
    Memory,
    MemoryFraction,
    TensorParallel,
    Threads,
)
from headway.cli.memory_fit import memory_fit, show_fit
from headway.cli.terminal.render import emit_json, show_pairs, size
from headway.models.hub import store


@dataclass(frozen=True)
class Gpu:
    """One CUDA device."""

    name: str
    memory_total: int
    memory_free: int


def doctor(
    *,
    check: Annotated[
        str | None,
        Option("--check", "--model", "-m", metavar="MODEL", help="Check whether this model fits, without loading it."),
    ] = None,
    context: Annotated[
        int | None, Option("--context", **INTEGER, help="Context length to check; the model's own by default.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    memory_fraction: MemoryFraction = None,
    kv_dtype: KvDtype = "auto",
    memory: Memory = None,
    tensor_parallel: TensorParallel = 1,
    json: Json = False,
) -> None:
    """Show versions, device, memory, threads and cache, and what would make Headway faster."""
    from headway.runtime.device import pick_device, pick_threads
    from headway.runtime.memory import memory_share
    from headway.runtime.profile import measure_bandwidth

    where, count, machine = pick_device(device), pick_threads(threads), read_machine()
    check_fraction(memory_fraction, "--memory-fraction")
    if check is not None:
        fit = memory_fit(
            store.resolve(check, download=False),
            where,
            machine,
            dtype,
            context=context,
            fraction=memory_share(memory, memory_fraction, where),
            kv_dtype=kv_dtype,
            ranks=check_integer(tensor_parallel, "--tensor-parallel", 1, MAX_RANKS),
        )
        emit_json(fit.to_json()) if json else show_fit(fit, str(where))
        return
    if context is not None:
        raise InvalidInput("--context needs --check MODEL")
    for flag, given in (
        ("--memory-fraction", memory_fraction is not None),
        ("--memory", memory is not None),
        ("--kv-dtype", kv_dtype != "auto"),
        ("--tensor-parallel", tensor_parallel != 1),
    ):
        if given:
            raise InvalidInput(f"{flag} needs --check MODEL")
    report = _report(machine, _gpus(), str(where), measure_bandwidth(str(where)), count)
    if json:
        emit_json(report)
    else:
        _show(report)


def hints(machine: Machine, gpus: list[Gpu], device: str, threads: int) -> list[str]:
    """What would make Headway faster on this machine."""
    hints, flags = [], machine.instructions
    if device == "cpu" and gpus:
        hints.append(f"there is a CUDA device ({gpus[0].name}); use it with --device cuda")
    if threads > machine.fair_threads:
        hints.append(f"{threads} threads are more than the {machine.fair_threads} that can run concurrently")
    if machine.cpu_quota is not None and machine.cpu_quota < machine.usable_cores:
        hints.append(
            f"the container may use {machine.cpu_quota:g} of {machine.usable_cores} cores; "
            "a higher CPU limit allows more threads"
        )
    if device == "cpu" and "AVX2" not in flags and "NEON" not in flags:
        hints.append("this CPU has no AVX2, which every fast CPU path of torch needs")
    elif device == "cpu" and "AVX2" in flags and "AVX-512 VNNI" not in flags and "AVX-VNNI" not in flags:
        hints.append("this CPU has no VNNI: integer matmuls run at about half speed")
    if device == "cpu" and "AVX2" in flags and not {"AVX-512 BF16", "AMX BF16"} & set(flags):
        hints.append("this CPU has no BF16 instructions: float32 is the fastest --dtype here")
    if machine.memory_free < 1 << 30:
        hints.append(
            f"only {size(machine.memory_free)} of memory is free; a model that does not fit is reread from disk"
        )
    return hints


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
        "tensor_parallel": _tensor_parallel(len(gpus)),
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
        ("tensor parallel", report["tensor_parallel"]),
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


def _tensor_parallel(gpus: int) -> str:
    """What ranks could compute on, in words."""
    if not has_torch():
        return "not available: torch is not installed"
    from headway.runtime.runners.parallel.collectives import why_no_collectives

    libraries = []
    for kind, library in (("cpu", "gloo on CPUs"), ("cuda", f"NCCL on {gpus} CUDA devices")):
        missing = why_no_collectives(kind)
        if missing is not None or kind == "cpu" or gpus:
            libraries.append(library if missing is None else missing)
    return "; ".join(libraries)


EXTRAS = {  # a package that each brings, and what it adds
    "torch": ("torch", "the reference path, other dtypes on a CPU, and machines without a native library"),
    "cuda": ("triton", "NVIDIA GPUs, with a CUDA build of torch"),
    "pipelines": ("transformers", "tasks for other kinds of models: embeddings, classification, images, sound"),
    "parquet": ("pyarrow", "batch jobs over Parquet files"),
    "audio": ("soundfile", "FLAC, Ogg and MP3"),
    "onnx": ("onnxruntime", "pipelines on ONNX Runtime"),
    "otel": ("opentelemetry.exporter.otlp.proto.http", "OpenTelemetry traces of `headway serve`"),
}


def extras() -> dict[str, str]:
    """Whether each extra is installed, and what it adds or would add."""
    states = {}
    for name, (package, adds) in EXTRAS.items():
        there = _is_there(package) and (name in ("parquet", "audio", "otel") or has_torch())
        state = "installed" if there else f"pip install 'headway[{name}]' adds"
        states[name] = f"{state}: {adds}"
    return states


def _is_there(package: str) -> bool:
    """Whether a package can be imported; its parents are."""
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        return False


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

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), total, free))
    return gpus
