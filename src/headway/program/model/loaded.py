"""The model of an engine: where it comes from, its weights as they are computed, its tokenizer and chat template."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from headway.base.arrays import STORED
from headway.base.config import settings
from headway.base.errors import InvalidInput, WrongType
from headway.base.system.device import AnyDevice
from headway.base.system.gc_paused import gc_paused
from headway.base.system.notebook import NotebookBar, in_notebook
from headway.base.text import short_repr
from headway.models.any_decoder import AnyDecoder
from headway.models.config import ModelConfig
from headway.models.hub.store import resolve
from headway.models.quantized.cpu import QuantizedDecoder
from headway.models.weights.fingerprint import fingerprint
from headway.models.weights.load import LoadProgress
from headway.program.figures import EngineInfo
from headway.program.generation.defaults import GenerationDefaults
from headway.program.kv_cache.pool_size import weight_bytes
from headway.program.model.text import ModelText
from headway.runtime.device import dtype_name, pick_device, pick_dtype
from headway.runtime.memory import running_out
from headway.runtime.runners.select import Backend, open_backend

if TYPE_CHECKING:
    from headway.models.decoder import Decoder


class EngineModel:
    """Found when it is created, loaded once by `load`. `decoder` is what was loaded or given, `backend` computes it."""

    backend: Backend
    decoder: Decoder | QuantizedDecoder

    def __init__(
        self,
        model: str | Path | Decoder | QuantizedDecoder | Backend,
        *,
        dtype: str,
        device: str,
        quantize: str | None,
        tensor_parallel: int = 1,
    ) -> None:
        where = pick_device(device)
        self._given_backend, model = (model, model.decoder) if isinstance(model, Backend) else (None, model)
        self._dtype, self.quantize, self._ranks = dtype, quantize, tensor_parallel
        self._owns_ranks = False  # a backend that was given keeps its own
        self._home: AnyDevice | None = None  # where the weights belong, while they are elsewhere
        self.in_memory = isinstance(model, AnyDecoder)
        self.device: AnyDevice
        if isinstance(model, AnyDecoder):
            self.path, self.name = None, f"{model.config.family} in memory"
            self._source = _unchanged(model, dtype, device)
            self.device = model.device
        else:
            self.path = self._source = resolve(model)
            self.name, self.device = str(model), where
        self.text = ModelText(self.path)

    def load(self, *, threads: int, has_runner: bool, progress: LoadProgress | None) -> None:
        """Load the weights; nothing is loaded for a decoder in memory that another runner computes."""
        source = self._source
        if progress is not None and not callable(progress):
            raise WrongType(f"progress is {short_repr(progress)}; it must be a function of two numbers")
        if self._given_backend is not None:
            self.backend = self._given_backend
        elif has_runner and not isinstance(source, Path | QuantizedDecoder):
            self.backend = Backend(source, None, "another runner was given")
        else:
            with running_out(self.device, "loading the weights"), gc_paused():
                self.backend = open_backend(
                    source,
                    dtype=self._dtype,
                    device=self.device,
                    threads=threads,
                    quantize=self.quantize,
                    settings=settings(),
                    progress=progress or _notebook_progress(self.name),
                    tensor_parallel=self._ranks,
                )
                self._owns_ranks = True
        self.decoder = self.backend.decoder if isinstance(source, Path | QuantizedDecoder) else source
        del self._source, self._given_backend  # weights that are replaced later must not stay

    @property
    def config(self) -> ModelConfig:
        return self.backend.config

    def close(self) -> None:
        """End the ranks, if there are any and they are this model's own."""
        if self._owns_ranks and self.backend.ranks is not None:
            self.backend.ranks.close()

    @cached_property
    def fingerprint(self) -> str:
        """A strong hash of the weights."""
        return fingerprint(self.path, self.decoder, self.quantize)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        """The model's generation_config.json; all values are None if it has no such file."""
        return GenerationDefaults.from_folder(self.path)

    def info(self, threads: int, kv_dtype: str) -> EngineInfo:
        """Name, dtype, device, sizes."""
        backend, decoder = self.backend, self.backend.decoder
        return EngineInfo(
            name=self.name,
            path=None if self.path is None else str(self.path),
            dtype=dtype_name(decoder.dtype),
            device=str(decoder.device),
            threads=threads,
            parameters=self.config.parameters,
            weight_bytes=weight_bytes(decoder) + (0 if backend.ranks is None else backend.ranks.weight_bytes),
            tensor_parallel=backend.tensor_parallel,
            kv_bytes_per_token=self.config.kv_values_per_token * STORED[kv_dtype].itemsize,
            kv_dtype=kv_dtype,
            runner=backend.name,
            format=backend.format,
            stored=dtype_name(backend.stored),
        )

    # -- weights that change or move -----------------------------------------------------------------------------------

    def update(self, decoder: Decoder | QuantizedDecoder, fingerprint: str) -> None:
        """Other weights from now on."""
        self._replace(decoder)
        self.fingerprint = fingerprint

    def leave_device(self) -> None:
        """Keep the weights in host memory until `return_to_device`."""
        import torch

        from headway.models.weights.update_tensors import moved

        self._home = self.backend.decoder.device
        self._replace(moved(self.backend.decoder, torch.device("cpu")))

    def return_to_device(self) -> None:
        """Take the weights back to their device, if they have left it."""
        if self._home is not None:
            import torch

            from headway.models.weights.update_tensors import moved

            with running_out(self._home, "taking the weights back"):
                self._replace(moved(self.backend.decoder, torch.device(str(self._home))))
            self._home = None

    def _replace(self, decoder: Decoder | QuantizedDecoder) -> None:
        self.backend, self.decoder = replace(self.backend, decoder=decoder), decoder


def _unchanged(decoder: Decoder | QuantizedDecoder, dtype: str, device: str) -> Decoder | QuantizedDecoder:
    """A decoder in memory, used as it is: another dtype or device than its own is refused."""
    where = decoder.device if _is_auto(device) else pick_device(device)
    if where.type != decoder.device.type or where.index not in (None, decoder.device.index):
        raise InvalidInput(
            f"device {short_repr(device)} was asked for and this decoder is on {decoder.device}; move it first"
        )
    if not _is_auto(dtype) and pick_dtype(dtype, where) != dtype_name(decoder.dtype):
        has = dtype_name(decoder.dtype)
        raise InvalidInput(f"dtype {short_repr(dtype)} was asked for and this decoder is in {has}; convert it first")
    return decoder


def _is_auto(name: object) -> bool:
    return isinstance(name, str) and name == "auto"  # an array would be compared element by element


def _notebook_progress(name: str) -> LoadProgress | None:
    """A bar of the layers loaded, where this is a notebook."""
    if not in_notebook():
        return None
    bar = NotebookBar()
    return lambda done, total: bar(done, total, f"loading the layers of {name}")
