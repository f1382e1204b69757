"""What computes: the native step on packed weights where machine and model allow it, else torch; and why."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headway.base.config import Settings
from headway.base.errors import Unsupported
from headway.kernels.native.library import ISA_NAMES, Team, open_library, use_isa
from headway.kv.pool import Pool
from headway.models.decoder import Decoder
from headway.models.load import load_model, load_packed_model
from headway.models.packed import PackedDecoder, pack_decoder
from headway.models.repack import check_quantize
from headway.runtime.device import pick_dtype
from headway.runtime.native import NativeRunner
from headway.runtime.profile import Profiler
from headway.runtime.runner import Runner, TorchRunner


@dataclass(frozen=True, eq=False)
class Backend:
    """A loaded model and how its batches are computed. `reason` says why it is not native, if it is not."""

    decoder: Decoder | PackedDecoder
    team: Team | None
    reason: str

    @property
    def name(self) -> str:
        return "torch" if self.team is None else f"native, {ISA_NAMES[self.team.isa]}"

    @property
    def format(self) -> str:
        """How the weights are kept."""
        if isinstance(self.decoder, PackedDecoder):
            return ", ".join(self.decoder.formats())
        return str(self.decoder.dtype).removeprefix("torch.")

    def runner(self, pool: Pool, page_size: int, *, deterministic: bool, profiler: Profiler) -> Runner:
        if isinstance(self.decoder, PackedDecoder):
            assert self.team is not None
            return NativeRunner(self.decoder, pool, page_size, team=self.team, profiler=profiler)
        return TorchRunner(self.decoder, pool, page_size, deterministic=deterministic, profiler=profiler)


def open_backend(
    model: Path | Decoder | PackedDecoder,
    *,
    dtype: str,
    device: torch.device,
    threads: int,
    quantize: str | None,
    settings: Settings,
) -> Backend:
    """Load a model, or take one that is in memory, for the best that can compute it here."""
    check_quantize(quantize)
    if quantize is not None and not isinstance(model, Path):
        raise Unsupported(f"quantize={quantize!r} is for models read from files; this one is in memory already")
    if isinstance(model, PackedDecoder):
        if settings.native == "off":
            raise Unsupported(
                "HEADWAY_NATIVE is off, and only the native step computes a packed decoder; unset it, "
                "or give the model's file or a decoder of floats"
            )
        return Backend(model, _team(threads, settings), "")
    reason = why_not_native(model, dtype, device, settings)
    if reason is not None:
        if settings.native == "require":
            raise Unsupported(f"HEADWAY_NATIVE asks for the native step, and {reason}")
        if quantize is not None:
            raise Unsupported(f"quantize={quantize!r} needs the native step, and {reason}")
        return Backend(_torch_model(model, dtype, device), None, reason)
    team = _team(threads, settings)
    if isinstance(model, Decoder):
        return Backend(pack_decoder(model), team, "")
    return Backend(load_packed_model(model, team=team, keep=dtype == "auto", quantize=quantize), team, "")


def _team(threads: int, settings: Settings) -> Team:
    if settings.isa is not None:
        use_isa(settings.isa)
    return Team(threads)


def why_not_native(model: Path | Decoder, dtype: str, device: torch.device, settings: Settings) -> str | None:
    """Why the native step does not serve, in words, or None."""
    if settings.native == "off":
        return "HEADWAY_NATIVE is off"
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device}"
    computed = model.dtype if isinstance(model, Decoder) else pick_dtype(dtype, device)
    if computed != torch.float32:
        return f"it computes in float32, not in {str(computed).removeprefix('torch.')}"
    return open_library().missing or None


def _torch_model(model: Path | Decoder, dtype: str, device: torch.device) -> Decoder:
    if isinstance(model, Decoder):
        return model
    # Rows stay floats here: torch's products round by their shape, and rows coded in 8 bits would tell one batch from
    # another by far more than that.
    return load_model(model, dtype=pick_dtype(dtype, device), device=device)
