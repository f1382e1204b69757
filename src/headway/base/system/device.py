"""A device by its name: cpu, cuda, cuda:1, mps. torch's own devices have the same fields."""

from __future__ import annotations

from typing import Protocol

from headway.base.dataclass import dataclass

MAX_RANKS = 64  # devices, or processes, that one model may be split over


class AnyDevice(Protocol):
    """A `Device`, or a device of torch."""

    @property
    def type(self) -> str: ...
    @property
    def index(self) -> int | None: ...


@dataclass(frozen=True)
class Device:
    """The kind of a device, and its number if it was given."""

    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


CPU = Device("cpu")
