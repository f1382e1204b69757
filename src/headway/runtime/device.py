"""What this machine is: devices, dtypes, threads."""

from __future__ import annotations

import torch

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported
from headway.base.machine import read_machine
from headway.base.text import short_repr

DTYPES = {
    "float32": torch.float32,
    "f32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "f16": torch.float16,
}


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda, cuda:N or mps as a device that is there."""
    if isinstance(name, str) and name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name if isinstance(name, str) else "")
    except RuntimeError:
        raise InvalidInput(f"device {short_repr(name)} is not known; it takes auto, cpu, cuda, cuda:N or mps") from None
    match device.type:
        case "cpu":
            return torch.device("cpu")
        case "cuda":
            count = torch.cuda.device_count()
            if int(name.partition(":")[2] or 0) >= count:  # torch keeps eight bits of the number
                raise Unsupported(
                    f"device {short_repr(name)} was asked for and this machine has {count} CUDA devices; use cpu"
                )
            return device
        case "mps" if torch.backends.mps.is_available():
            return device
    raise Unsupported(f"device {short_repr(name)} is not available here; it takes auto, cpu, cuda, cuda:N or mps")


def pick_dtype(name: str, device: torch.device, stored: torch.dtype | None = None) -> torch.dtype:
    """The dtype weights and activations have; `stored` is the float type of the file's matrices, if they have one.

    auto is float32 on a CPU. Elsewhere float16 and bfloat16 stay what they are, and everything else becomes bfloat16.
    """
    if isinstance(name, str) and name == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.float16 if stored == torch.float16 else torch.bfloat16
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidInput(f"dtype {short_repr(name)} is not known; it takes auto, float32, bfloat16 or float16")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype | None) -> str:
    """float16 for torch.float16, and so on; empty for None."""
    return str(dtype).removeprefix("torch.") if dtype is not None else ""


def pick_threads(threads: int | None) -> int:
    """The number of threads: as asked, or what the CPU limit of this process allows."""
    if threads is None:
        return read_machine().fair_threads
    return check_integer(threads, "threads", 1, 1024)
