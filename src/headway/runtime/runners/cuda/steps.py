"""One forward on a CUDA device: what the host has laid out for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from headway.base.dataclass import dataclass
from headway.models.hooks import Hooks
from headway.runtime.runners.cuda.adapters import StepTiles
from headway.runtime.runners.cuda.attention.prompts import CausalPrompt
from headway.runtime.runners.cuda.attention.shared_pages import SharedStep

Mark = Callable[[str], None]  # ends a phase of the profile


@dataclass(frozen=True, eq=False)
class DeviceStep:
    """One forward of `count` rows. `ints` is laid out for `rows` of them; attention takes the rows of `singles` one by
    one (None: all of them), those of `items` [n, 2] together, and `prompts` each by itself; `shared` are pages that
    single rows share. `needed` [r] are the rows whose residual somebody reads, where these are few (None: all of them);
    some may be there twice. With `hooks` it is launched by hand."""

    ints: Tensor
    rows: int
    count: int
    singles: Tensor | None = None
    items: Tensor | None = None
    prompts: Sequence[CausalPrompt] = ()
    shared: SharedStep | None = None
    needed: Tensor | None = None
    hooks: Hooks | None = None
    hooks_from: int = 0  # the row that hooks count from: decode rows have none
    adapters: StepTiles | None = None
