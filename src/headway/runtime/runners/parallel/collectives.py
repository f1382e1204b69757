"""Sums and gathers over ranks: a process group of torch.distributed, which no other code of the process can see.

On CPUs it is gloo over the loopback device, on CUDA devices NCCL, whose calls are captured in graphs like kernels. The
group is made from a store in a folder of its own, so that several engines, and a trainer's own default group, do not
meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT = timedelta(seconds=300)  # of one call: ranks differ by milliseconds, unless one is stopped


def why_no_collectives(device: str) -> str | None:
    """Why ranks on such devices cannot sum, in words, or None."""
    if not dist.is_available():
        return "this torch was built without torch.distributed"
    if device == "cuda":
        return None if dist.is_nccl_available() else "this torch was built without NCCL"
    return None if dist.is_gloo_available() else "this torch was built without gloo"


def open_group(folder: Path, rank: int, size: int, device: torch.device) -> Any:
    """A process group of `size` ranks that meet in a folder; returns when all have come."""
    library: Any = dist
    store = library.FileStore(str(folder / "store"), size)
    store.set_timeout(TIMEOUT)
    if device.type == "cuda":
        options = library.ProcessGroupNCCL.Options()
        options._timeout = TIMEOUT
        return library.ProcessGroupNCCL(store, rank, size, options)
    options = library.ProcessGroupGloo._Options()
    options._devices = [library.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return library.ProcessGroupGloo(store, rank, size, options)


class Collectives:
    """A rank's link to the others (`models.shards.RankLink`).

    With `ordered` a sum adds the ranks' parts one after the other, so that a number's bits depend on nothing but the
    parts; else the library decides. `on_head` is what rank 0 does before the others compute the head, `on_error` says
    what is raised when a call fails.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        *,
        on_head: Callable[[int], None] | None = None,
        on_error: Callable[[Exception], Exception] = lambda error: error,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._on_head, self._on_error = on_head, on_error
        self._group: Any = None  # until `connect`
        self._is_nccl = device.type == "cuda"
        self.ordered = False
        self._alone = False
        self.bytes_sent = 0  # what this rank has put into sums and gathers

    def connect(self, folder: Path) -> None:
        """Meet the other ranks in a folder, which nobody needs afterwards."""
        self._group = open_group(folder, self.rank, self.size, self.device)
        self.agreed(True)  # NCCL meets in its first call

    def sum(self, part: Tensor) -> Tensor:
        """The sum of every rank's part; on CPUs in float32 at least."""
        if self._alone:
            return part
        self.bytes_sent += part.nbytes
        if self.ordered and self.size > 2:  # two numbers have one sum
            parts = self._all(part)
            total = parts[0].float()
            for each in parts[1:]:
                total = total + each.float()
            return total.to(part.dtype)
        whole = part if self._is_nccl else part.float()
        whole = whole.clone() if whole is part else whole
        self._call("allreduce", [whole])
        return whole.to(part.dtype)

    def sum_into(self, y: Tensor) -> None:
        """Put the sum of every rank's y in its place; in a captured graph, on the memory that is captured."""
        if self._is_nccl and not (self.ordered and self.size > 2) and not self._alone and y.is_contiguous():
            self.bytes_sent += y.nbytes
            self._call("allreduce", [y])
        else:
            y.copy_(self.sum(y))

    def gather(self, part: Tensor) -> list[Tensor] | None:
        """Every rank's part on rank 0, bit for bit; None on others."""
        if self._alone:
            return [part] * self.size if self.rank == 0 else None
        self.bytes_sent += part.nbytes
        if self._is_nccl:
            gathered = self._all(part)
            return gathered if self.rank == 0 else None
        options = dist.GatherOptions()
        options.rootRank = 0
        part = part.contiguous()
        own = part.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)] if self.rank == 0 else []
        self._call("gather", [parts] if parts else [], [own], options)
        return [each.view(part.dtype).view(part.shape) for each in parts] or None

    def _all(self, part: Tensor) -> list[Tensor]:
        """Every rank's part, as bytes on the way: every library has those."""
        part = part.contiguous()
        own = part.reshape(-1).view(torch.uint8)
        parts = [torch.empty_like(own) for _ in range(self.size)]
        self._call("allgather", [parts], [own])
        return [each.view(part.dtype).view(part.shape) for each in parts]

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            getattr(self._group, name)(*arguments).wait()
        except RuntimeError as error:
            raise self._on_error(error) from None

    def share(self, rows: Tensor) -> Tensor:
        """Rank 0's rows, on every rank."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        rows = rows.contiguous()
        own = rows.view(-1).view(torch.uint8)
        self._call("broadcast", [own], options)
        return rows

    def agreed(self, flag: bool) -> bool:
        """Whether it is so on every rank."""
        count = torch.tensor([int(flag)], dtype=torch.float32, device=self.device)
        self._call("allreduce", [count])
        return int(count) == self.size

    def begin_head(self, h: Tensor) -> None:
        """On rank 0, have the others compute the head of these rows too."""
        if self._on_head is not None and not self._alone:
            self._on_head(len(h))
            self.share(h)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute without the others, whose parts are missing: to try this rank's own matmuls."""
        self._alone = True
        try:
            yield
        finally:
            self._alone = False

    def abort(self) -> None:
        """End calls that wait for a rank that is gone, if the library can."""
        abort = getattr(self._group, "abort", None)
        if abort is not None:
            abort()

    def leave(self) -> None:
        """End the library's own threads, which else keep a process from ending; no rank calls after this."""
        group, self._group = self._group, None
        if self._is_nccl and group is not None:
            group.abort()
            group.shutdown()
