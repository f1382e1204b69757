"""This machine's CPU and memory and its container's limits, read from /proc and the control groups."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

from headway.base.dataclass import dataclass

INSTRUCTIONS = {  # flag in /proc/cpuinfo → name people use
    "avx2": "AVX2",
    "fma": "FMA",
    "f16c": "F16C",
    "avx_vnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512_vnni": "AVX-512 VNNI",
    "avx512_bf16": "AVX-512 BF16",
    "amx_bf16": "AMX BF16",
    "amx_int8": "AMX INT8",
    "asimd": "NEON",
    "asimddp": "NEON dot product",
    "i8mm": "NEON I8MM",
    "bf16": "NEON BF16",
    "sve": "SVE",
}
UNLIMITED = 1 << 60  # a v1 cgroup without a limit reports about this


@dataclass(frozen=True)
class Machine:
    """The hardware and the container's limits, None where there is none."""

    cpu: str
    instructions: tuple[str, ...]
    cores: int
    usable_cores: int
    cpu_quota: float | None
    memory_total: int
    memory_available: int
    memory_limit: int | None
    memory_limit_left: int | None

    @property
    def memory_free(self) -> int:
        """Bytes this process can still allocate: what is free, within the container's limit."""
        if self.memory_limit_left is None:
            return self.memory_available
        return min(self.memory_available, self.memory_limit_left)

    @property
    def fair_threads(self) -> int:
        """Threads that can run concurrently."""
        quota = self.cpu_quota if self.cpu_quota is not None else self.usable_cores
        return max(1, min(self.usable_cores, int(quota)))


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine whose file system is at `root`."""
    cpu, flags = _cpu(root)
    memory = _meminfo(root)
    limit, used = _memory_limit(root)
    return Machine(
        cpu=cpu,
        instructions=tuple(name for flag, name in INSTRUCTIONS.items() if flag in flags),
        cores=os.cpu_count() or 1,
        usable_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        cpu_quota=_cpu_quota(root),
        memory_total=memory.get("MemTotal", 0),
        memory_available=memory.get("MemAvailable", 0),
        memory_limit=limit,
        memory_limit_left=None if limit is None else max(0, limit - used),
    )


def _cpu(root: Path) -> tuple[str, set[str]]:
    name, flags = "", set[str]()
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        match key.strip():
            case "model name" | "Hardware":
                name = value.strip()
            case "flags" | "Features":
                flags.update(value.split())
    return name or platform.processor() or platform.machine(), flags  # the processor's name is asked of a program


def _meminfo(root: Path) -> dict[str, int]:
    """Bytes by name from /proc/meminfo."""
    fields = {}
    for line in _read(root / "proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdigit():
            fields[key] = int(words[0]) * (1024 if words[-1] == "kB" else 1)
    return fields


def _cpu_quota(root: Path) -> float | None:
    """CPUs the container may use: the tightest limit up the cgroup tree."""
    quotas = []
    for folder in _groups(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if not words:
            words = [_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory_limit(root: Path) -> tuple[int | None, int]:
    """The tightest memory limit up the cgroup tree, and what its group uses beyond reclaimable file pages."""
    best: tuple[int, int] | None = None
    for folder in _groups(root, "memory"):
        limit = _read(folder / "memory.max").strip() or _read(folder / "memory.limit_in_bytes").strip()
        if limit.isdigit() and int(limit) < UNLIMITED and (best is None or int(limit) < best[0]):
            used = _read(folder / "memory.current").strip() or _read(folder / "memory.usage_in_bytes").strip()
            best = (int(limit), max(0, int(used or 0) - _reclaimable(folder)))
    return best or (None, 0)


def _reclaimable(folder: Path) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key in ("inactive_file", "total_inactive_file") and value.strip().isdigit():
            return int(value)
    return 0


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's control groups, from its own up to the root, of version 2 and version 1."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "" or controller in controllers.split(","):
            mount = root / "sys/fs/cgroup" / (controller if controllers else "")
            inside = Path(path.strip().lstrip("/"))
            for part in (inside, *inside.parents):
                if (mount / part).is_dir():
                    yield mount / part


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
