"""What this machine is: devices, dtypes, threads, memory, and the page pool that fits it."""

from __future__ import annotations

import torch

from headway.base.errors import InvalidInput, OutOfPages, Unsupported
from headway.base.machine import read_machine
from headway.models.config import ModelConfig

DTYPES = {
    "float32": torch.float32,
    "f32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "f16": torch.float16,
}
SEQUENCES = 32  # how many sequences of full length the automatic pool has room for
SHARE = 0.4  # of the free memory the automatic pool may take


def pick_device(name: str) -> torch.device:
    """auto, cpu, cuda, cuda:N or mps as a device that is there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name if isinstance(name, str) else "")
    except RuntimeError:
        raise InvalidInput(f"device {name!r} is not known; it takes auto, cpu, cuda, cuda:N or mps") from None
    match device.type:
        case "cpu":
            return torch.device("cpu")
        case "cuda":
            count = torch.cuda.device_count()
            if (device.index or 0) >= count:
                raise Unsupported(f"device {name!r} was asked for and this machine has {count} CUDA devices; use cpu")
            return device
        case "mps" if torch.backends.mps.is_available():
            return device
    raise Unsupported(f"device {name!r} is not available here; it takes auto, cpu, cuda, cuda:N or mps")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype weights and activations have. auto is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if not isinstance(name, str) or name not in DTYPES:
        raise InvalidInput(f"dtype {name!r} is not known; it takes auto, float32, bfloat16 or float16")
    return DTYPES[name]


def pick_threads(threads: int | None) -> int:
    """The number of threads: as asked, or what the CPU limit of this process allows."""
    if threads is None:
        return read_machine().fair_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= 1024:
        raise InvalidInput(f"threads is {threads!r}; it takes a whole number from 1 to 1024")
    return threads


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return read_machine().memory_free


def pick_pages(pages: int | None, config: ModelConfig, page_size: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many pages the pool has: as asked, or as many as a share of the free memory holds."""
    size = config.kv_values_per_token * page_size * dtype.itemsize
    free = available_memory(device)
    if pages is not None:
        if isinstance(pages, bool) or not isinstance(pages, int) or pages < 1:
            raise InvalidInput(f"pages is {pages!r}; it takes a whole number from 1")
        if pages * size > free:
            raise OutOfPages(
                f"{pages} pages of {size} bytes need {pages * size >> 20} MiB and {free >> 20} MiB are free; "
                f"at most {free // size} fit"
            )
        return pages
    full = -(-config.max_positions // page_size) * SEQUENCES
    fitting = int(free * SHARE) // size
    if fitting < 1:
        raise OutOfPages(f"a page takes {size} bytes and only {free >> 20} MiB of memory are free")
    return min(full, fitting)
