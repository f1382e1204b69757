"""A device by its name: cpu, cuda, cuda:1, mps. torch's own devices have the same fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


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
