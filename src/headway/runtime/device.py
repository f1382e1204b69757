"""What this machine is: devices, dtypes, threads."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported
from headway.base.system.device import CPU, AnyDevice, Device
from headway.base.system.extras import has_torch, need_torch
from headway.base.system.machine import read_machine
from headway.base.text import short_repr

DTYPES = {
    "float32": "float32",
    "f32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "f16": "float16",
}


@lru_cache(maxsize=1)
def may_have_cuda() -> bool:
    """Whether a CUDA driver answers and has a device. Without one torch need not be imported to know."""
    names = {"linux": "libcuda.so.1", "win32": "nvcuda.dll"}
    try:
        driver, count = ctypes.CDLL(names[sys.platform]), ctypes.c_int(0)
        return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except (KeyError, OSError, AttributeError):
        return False


def has_cuda() -> bool:
    """Whether torch can compute on a CUDA device here."""
    if sys.modules.get("torch") is None and not (has_torch() and may_have_cuda()):
        return False
    import torch

    return torch.cuda.is_available()


def pick_device(name: str) -> Device:
    """auto, cpu, cuda, cuda:N or mps as a device that is there."""
    if isinstance(name, str) and name == "auto":
        return Device("cuda") if has_cuda() else CPU
    kind, colon, number = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in ("cpu", "cuda", "mps") or (colon and not (number.isascii() and number.isdigit())):
        raise InvalidInput(f"device {short_repr(name)} is not known; it takes auto, cpu, cuda, cuda:N or mps")
    if kind == "cpu":
        return CPU
    need_torch(f"device {short_repr(name)}", "cuda" if kind == "cuda" else "torch")
    import torch

    if kind == "cuda":
        count = torch.cuda.device_count()
        if int(number or 0) >= count:
            raise Unsupported(
                f"device {short_repr(name)} was asked for and this machine has {count} CUDA devices; use cpu"
            )
    elif not torch.backends.mps.is_available():
        raise Unsupported(f"device {short_repr(name)} is not available here; it takes auto, cpu, cuda, cuda:N or mps")
    return Device(kind, int(number) if number else None)


def pick_dtype(name: str, device: AnyDevice, stored: str | None = None) -> str:
    """The dtype weights and activations have; `stored` is the float type of the file's matrices, if they have one.

    auto is float32 on a CPU. Elsewhere float16 and bfloat16 stay what they are, and everything else becomes bfloat16.
    """
    if isinstance(name, str) and name == "auto":
        if device.type == "cpu":
            return "float32"
        return "float16" if stored == "float16" else "bfloat16"
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidInput(f"dtype {short_repr(name)} is not known; it takes auto, float32, bfloat16 or float16")
    return DTYPES[name]


def dtype_name(dtype: Any) -> str:
    """float16 for torch.float16, numpy.float16 or its name; empty for None."""
    return str(dtype).removeprefix("torch.") if dtype is not None else ""


def pick_threads(threads: int | None) -> int:
    """The number of threads: as asked, or what the CPU limit of this process allows."""
    if threads is None:
        return read_machine().fair_threads
    return check_integer(threads, "threads", 1, 1024)


def synchronizer(device: AnyDevice) -> Callable[[], None]:
    """What waits until a device has done everything; on a CPU nothing has to be waited for."""
    if device.type != "cuda":
        return lambda: None
    import torch

    return partial(torch.cuda.synchronize, str(device))
