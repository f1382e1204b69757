"""How much memory a device has, what of it Headway may use, the page pool that follows, and what running out says.

    total × fraction ── weights, workspaces ── what the largest step needs ── graphs ──▶ pages

Nothing here allocates; `program/sizing` runs the step whose needs are counted.
"""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput, OutOfMemory, OutOfPages, PassFailed
from headway.base.system.device import CPU, AnyDevice, Device
from headway.base.system.machine import read_machine
from headway.base.text import format_bytes, short_repr

SEQUENCES = 32  # sequences of full length that the automatic pool can hold
SHARE = 0.4  # of the free memory of a CPU's machine that the automatic pool may take at most
ROOM = 8  # it takes one part in so many of all memory, or a sequence of full length, if that is more
FRACTION = 0.9  # of a CUDA device's memory that Headway may use, by default
GRAPHS, GRAPHS_OF_LAYER = 128 << 20, 12 << 20  # bytes held back for captured graphs: 92 of them at 128 KiB a layer
RAN_OUT = "memory ran out"
# What torch, Triton and cuBLAS say.
OF_HOST = "DefaultCPUAllocator"
OF_DEVICE = ("CUDA error: out of memory", "[CUDA]: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
WAYS_OUT = "a smaller max_batch_tokens, quantize, a higher memory_fraction, or another device"


@dataclass(frozen=True)
class Memory:
    """A device's memory in bytes: all of it, within a container's limit, and what nobody has."""

    total: int
    free: int


def read_memory(device: AnyDevice) -> Memory:
    """Where a device's memory stands now."""
    if device.type == "cuda":
        import torch

        free, total = torch.cuda.mem_get_info(str(device))
        return Memory(total, free)
    machine = read_machine()
    limits = [n for n in (machine.memory_total, machine.memory_limit) if n]
    return Memory(min(limits, default=machine.memory_free), machine.memory_free)


def tidy(device: AnyDevice) -> None:
    """Free memory that is only kept for reuse, so that what an engine takes can be measured."""
    if device.type == "cuda":
        import torch

        gc.collect()
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class MemoryBudget:
    """What the number of pages follows from, in bytes."""

    device: str
    total: int
    free: int
    fraction: float | None  # of the total that Headway may use; None: a share of what is free
    taken: int = 0  # by the engine so far: weights, and what its libraries keep
    work: int = 0  # what the largest step needs in addition
    graphs: int = 0  # held back for captured graphs

    @property
    def allowed(self) -> int:
        """What Headway may use in all."""
        return self.total if self.fraction is None else int(self.total * self.fraction)

    @property
    def left(self) -> int:
        """What pages may take."""
        return max(0, min(self.allowed - self.taken, self.free) - self.work - self.graphs)

    def describe(self) -> str:
        """The sum in words."""
        parts = [f"weights and libraries take {format_bytes(self.taken)}"]
        parts += [f"a step {format_bytes(self.work)}"] if self.work else []
        parts += [f"graphs {format_bytes(self.graphs)}"] if self.graphs else []
        share = "" if self.fraction is None else f" ({self.fraction:g} of {format_bytes(self.total)})"
        return (
            f"of {format_bytes(self.allowed)}{share} on {self.device}, of which {format_bytes(self.free)} are free, "
            f"{', '.join(parts)}"
        )


@dataclass(frozen=True)
class Wish:
    """What a pool is to be: the bytes of a page, the pages that make sense, and those it cannot do without."""

    page: int
    most: int
    least: int
    one: int = 0  # pages of a sequence of full length


def pick_pages(pages: int | None, wish: Wish, budget: MemoryBudget) -> int:
    """How many pages the pool has: as asked, or as many as fit and make sense."""
    if pages is not None:
        return _requested(pages, wish.page, budget)
    if budget.fraction is None:
        fitting = int(budget.free * SHARE) // wish.page
        if fitting < 1:
            raise OutOfPages(f"a page takes {wish.page} bytes and only {budget.free >> 20} MiB of memory are free")
        return min(wish.most, fitting, max(1, _modest(wish, budget)))
    fitting = budget.left // wish.page
    if fitting < wish.least:
        raise OutOfMemory(
            f"there is no room for keys and values: {budget.describe()}; {format_bytes(budget.left)} are left, which "
            f"is {fitting} pages of {format_bytes(wish.page)}, and a step needs "
            f"{wish.least} ({format_bytes(wish.least * wish.page)}); try {WAYS_OUT}"
        )
    return min(wish.most, fitting)


def _modest(wish: Wish, budget: MemoryBudget) -> int:
    """Pages that leave room for others on a CPU's machine."""
    return max(budget.total // ROOM // wish.page, wish.one)


def reason(pages: int, requested: int | None, wish: Wish, budget: MemoryBudget) -> str:
    """Why the pool has this many pages, in words."""
    if requested is not None:
        return "as many pages as were asked for"
    if pages == wish.most:
        return f"{SEQUENCES} sequences of full length"
    if budget.fraction is not None:
        return f"what weights leave {budget.describe()}"
    if pages < _modest(wish, budget):
        return f"{SHARE:.0%} of the {format_bytes(budget.free)} that are free"
    if pages == wish.one:
        return "one sequence of full length"
    return f"an eighth of the {format_bytes(budget.total)} of this machine"


def memory_share(amount: int | str | None, fraction: float | None, device: AnyDevice) -> float | None:
    """The fraction of the device's memory that may be used: `fraction`, or that of an amount in bytes or like "2G"."""
    if amount is None:
        return fraction
    if fraction is not None:
        raise InvalidInput("memory and memory_fraction both say how much memory may be used; give one of them")
    size, total = amount_bytes(amount, "memory"), read_memory(device).total
    if not 0 < size <= total:
        limit = f"more than 0 and at most {format_bytes(total)}, which {device} has"
        raise InvalidInput(f"memory is {format_bytes(size)}; it must be {limit}")
    return size / total


def amount_bytes(amount: int | str, name: str) -> int:
    """Bytes, or text like "2G", "1.5 GiB" or "512 MB"; `name` is that of the option."""
    if not isinstance(amount, str):
        return check_integer(amount, name, 1)
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)(?:i?b)?\s*", amount, re.IGNORECASE | re.ASCII)
    if match is None:
        raise InvalidInput(
            f"{name} is {short_repr(amount)}; it must be a number of bytes, or one with K, M, G or T, such as 2G"
        )
    return int(float(match[1]) * 1024 ** " kmgt".index(match[2].lower() or " "))


def _requested(pages: int, page: int, budget: MemoryBudget) -> int:
    pages = check_integer(pages, "pages", 1)
    if pages * page > budget.free:
        raise OutOfPages(
            f"{pages} pages of {page} bytes need {pages * page >> 20} MiB and {budget.free >> 20} MiB are free; "
            f"at most {budget.free // page} fit"
        )
    if budget.fraction is not None and pages * page > budget.left:
        raise OutOfPages(
            f"{pages} pages of {page} bytes need {pages * page >> 20} MiB: {budget.describe()}, and "
            f"{format_bytes(budget.left)} are left; at most {budget.left // page} fit, or give a higher memory_fraction"
        )
    return pages


# -- running out -------------------------------------------------------------------------------------------------------


@contextmanager
def running_out(device: AnyDevice, doing: str) -> Iterator[None]:
    """Say in numbers that memory ran out while `doing` something."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, HeadwayError) or not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"{RAN_OUT} while {doing}: {_numbers(error, device)}; try {WAYS_OUT}") from None


def step_error(error: Exception) -> HeadwayError:
    """What becomes of an error in a step: itself where it is ours."""
    if isinstance(error, HeadwayError):
        return error
    if not is_out_of_memory(error):
        return PassFailed(f"the device failed while computing a pass: {error}")
    device = _where(error)
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()  # what others of this process keep for later may be what is missing
    ways = f"read fewer rows at once, or create the engine with fewer pages or {WAYS_OUT}"
    return PassFailed(f"{RAN_OUT} while computing a pass: {_numbers(error, device)}; {ways}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the host, has not the memory that was asked for."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and (OF_HOST in str(error) or _of_device(error))


def _of_device(error: BaseException) -> bool:
    """Whether it is a CUDA device's memory: torch's allocator, or a driver or library that allocates some itself."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(error, torch.OutOfMemoryError):
        return True
    return any(phrase in str(error) for phrase in OF_DEVICE)


def _where(error: BaseException) -> AnyDevice:
    """The device that ran out; torch names a GPU by its number."""
    torch = sys.modules.get("torch")
    if torch is None or not _of_device(error) or not torch.cuda.is_available():
        return CPU
    named = re.search(r"GPU (\d+)", str(error))
    return Device("cuda", int(named[1]) if named else torch.cuda.current_device())


def _numbers(error: BaseException, device: AnyDevice) -> str:
    memory = read_memory(device)
    amount = re.search(r"allocate ([\d.]+ ?[KMGT]?i?B|\d+ bytes)", str(error))
    wanted = f"{amount[1]} were asked for and " if amount else ""
    own = sys.modules["torch"].cuda.memory_allocated(str(device)) if device.type == "cuda" else None
    kept = "" if own is None else f", {format_bytes(own)} of it by this process"
    used = memory.total - memory.free
    return (
        f"{wanted}{format_bytes(memory.free)} are free on {device}; "
        f"{format_bytes(used)} of {format_bytes(memory.total)} are used{kept}"
    )
