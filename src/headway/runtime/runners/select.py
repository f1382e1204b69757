"""What computes: the native step on interleaved weights, Triton kernels on a CUDA device, else torch; and why.

A file's quantized matrices stay what they are on a CPU, whoever computes: torch then takes the reference of the native
step, with the same bits. On other devices, and with a dtype that was asked for, they become floats.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.base.arrays import is_tensor
from headway.base.config import Settings
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.files import read_json
from headway.base.system.device import CPU, AnyDevice
from headway.base.system.extras import need_torch
from headway.base.system.log import log_event
from headway.base.text import short_repr
from headway.kernels import triton
from headway.kernels.native.library import ISA_NAMES, ThreadPool, open_library, use_isa
from headway.kv.pool import HostPool, Pool
from headway.models.capabilities import (
    check_split,
    why_llama_alone,
    why_no_native_layers,
    why_no_triton_layers,
    why_not_quantized,
)
from headway.models.config import ModelConfig, read_config
from headway.models.nested import outer_family
from headway.models.quantized.cache import WeightCache
from headway.models.quantized.cpu import QuantizedDecoder
from headway.models.quantized.repack import check_quantize
from headway.models.weights.load import LoadProgress, has_quantized, load_quantized_model, stored_dtype
from headway.runtime.device import DTYPES, dtype_name, pick_dtype
from headway.runtime.profile import Profiler
from headway.runtime.runners.base import Runner

if TYPE_CHECKING:
    from headway.models.decoder import Decoder
    from headway.runtime.runners.parallel.launch import Ranks

REFERENCE = "the reference was asked for"
NATIVE, TRITON = "the native step", "Triton kernels"


@dataclass(frozen=True, eq=False)
class Backend:
    """A loaded model and how its batches are computed. `reason` says why it is not native, if it is not.

    `reference` is the decoder that torch computes for quantized weights.
    """

    decoder: Decoder | QuantizedDecoder
    thread_pool: ThreadPool | None
    reason: str
    triton: bool = False
    reference: Decoder | None = None
    stored: str | None = None  # the float type of the file's matrices, if they have one
    ranks: Ranks | None = None  # the other processes, where `decoder` is rank 0's share of a model
    whole: ModelConfig | None = None  # the config of the whole model, then

    def use_threads(self, count: int) -> None:
        """Set the threads of torch in this thread, where it computes."""
        if self.thread_pool is None:
            import torch

            torch.set_num_threads(max(1, count // self.tensor_parallel))

    @property
    def config(self) -> ModelConfig:
        """The model's config."""
        return self.decoder.config if self.whole is None else self.whole

    @property
    def tensor_parallel(self) -> int:
        """How many ranks compute."""
        return 1 if self.ranks is None else self.ranks.size

    @property
    def name(self) -> str:
        if self.ranks is not None:
            return f"{'triton' if self.triton else 'torch'}, {self.ranks.size} ranks"
        if self.thread_pool is not None:
            return f"native, {ISA_NAMES[self.thread_pool.isa]}"
        return "triton" if self.triton else "torch"

    def new_pool(self, *, pages: int, page_size: int, dtype: str, places: int = 0) -> Pool:
        """The KV cache in memory, all zeros, its numbers in one of `kv_dtype`'s types, and with `places` for recurrent
        state."""
        decoder: Any = self.decoder
        if self.ranks is not None:
            from headway.runtime.runners.parallel.runner import RankPool

            how: dict[str, Any] = {"pages": pages, "page_size": page_size, "dtype": dtype}
            return RankPool(decoder, self.ranks, **how, by_head=self.triton)
        c = decoder.config
        sizes: dict[str, Any] = {"layers": len(c.kv_layers), "pages": pages, "page_size": page_size}
        shapes = [c.kv_shape(layer) for layer in c.kv_layers]
        sizes |= {"kv_heads": c.kv_heads, "head_dim": c.head_dim}
        if self.thread_pool is None:
            decoder = self.reference or decoder
        latent, inv_freq = c.description.latent, decoder.inv_freq
        if latent is not None:
            sizes["value_dim"] = latent.size
        if recurrent := len(c.recurrent_layers):
            sizes["states"] = (places, recurrent, c.state_values // recurrent)
        if len(c.kv_layers) < c.layers:
            inv_freq = inv_freq[list(c.kv_layers)] if inv_freq.ndim == 2 else inv_freq
        own: dict[str, Any] = {}
        if any((shape.heads, shape.dim) != (c.kv_heads, c.head_dim) for shape in shapes):
            assert c.description.ropes is not None
            own = {"shapes": [(shape.heads, shape.dim) for shape in shapes], "pages": pages, "page_size": page_size}
            own["rotated"] = [c.description.ropes[layer].dim for layer in c.kv_layers]
        if self.thread_pool is not None:
            if own:
                from headway.kv.layer_pool import LayerPool

                return LayerPool(**own, inv_freq=inv_freq, dtype=dtype)
            return HostPool(**sizes, inv_freq=inv_freq, dtype=dtype)
        import torch

        from headway.kv.tensor_pool import TensorPool

        where = {"dtype": getattr(torch, dtype), "device": decoder.device, "inv_freq": inv_freq}
        if own:
            from headway.kv.slot_pool import SlotPool

            return SlotPool(**own, **where)
        return TensorPool(**sizes, **where, by_head=self.triton)

    def release_pool(self) -> None:
        """Nobody computes over the pages any more: other processes give up theirs."""
        if self.ranks is not None:
            self.ranks.give_up_pages()

    @property
    def format(self) -> str:
        """How the weights are kept."""
        if isinstance(self.decoder, QuantizedDecoder):
            return ", ".join(self.decoder.formats())
        if self.ranks is not None:
            return dtype_name(self.decoder.dtype)
        matrices = (self.decoder.layers[0].qkv, self.decoder.output)
        labels = [getattr(m, "label", None) for m in matrices]  # a quantized matrix has one
        found = ", ".join(dict.fromkeys(filter(None, labels))) or dtype_name(self.decoder.dtype)
        layers = [getattr(layer, "beside", None) or layer for layer in self.decoder.layers]
        own = {getattr(w, "label", "") for layer in layers for w in (layer.gate_up, layer.down)}  # experts that stay so
        return ", ".join((found, *(label for label in sorted(own) if label and label not in found)))

    @property
    def activations(self) -> str:
        """The narrowest type that activations are rounded to; quantized formats of CUDA devices take float16 or fp8."""
        dtype = dtype_name(self.decoder.dtype)
        floats = self.ranks is not None or is_tensor(self.decoder.output)
        if not floats and self.format.startswith("fp8"):
            return "fp8"
        halved = not isinstance(self.decoder, QuantizedDecoder) and not floats
        return "float16" if halved and dtype == "float32" else dtype

    def kv_dtype(self, name: str) -> str:
        """What keys and values are stored in: `name`. Auto is float16 for quantized weights on a CPU, whose own error
        is far larger, and else what the model computes in."""
        own, cpu = dtype_name(self.decoder.dtype), self.decoder.device.type == "cpu" and not self.triton
        if isinstance(name, str) and name == "auto":
            return "float16" if isinstance(self.decoder, QuantizedDecoder) and self.decoder.is_quantized else own
        if not isinstance(name, str) or name not in DTYPES:
            raise InvalidInput(f"kv_dtype {short_repr(name)} is not known; it takes auto, float32, bfloat16 or float16")
        if DTYPES[name] != own and not (cpu and own == "float32"):
            where = f"{self.decoder.device}{' with Triton kernels' if self.triton else ''}"
            raise Unsupported(
                f"kv_dtype={name!r} is for CPUs that compute in float32; on {where} in {own} keys and "
                f"values are {own} too; leave out kv_dtype="
            )
        return DTYPES[name]

    def on_torch(self) -> Backend:
        """The same model as torch computes it in float32 on the CPU: the reference of every runner.

        Weights are dequantized, and activations quantized where the format says so.
        """
        need_torch("the reference")
        if self.ranks is not None:
            raise Unsupported(
                "validation computes a model whole, and this process has a share of it; leave out "
                "tensor_parallel= to validate"
            )
        from headway.models.quantized.reference import float_decoder, reference_decoder

        if isinstance(self.decoder, QuantizedDecoder):
            return Backend(self.decoder, None, REFERENCE, reference=self.reference or reference_decoder(self.decoder))
        here = self.decoder.device.type == "cpu" and dtype_name(self.decoder.dtype) == "float32"
        floats = here and is_tensor(self.decoder.output)
        return Backend(self.decoder if floats else float_decoder(self.decoder), None, REFERENCE)

    @property
    def reference_bytes(self) -> int:
        """What the torch reference takes in addition to the quantized weights."""
        if self.reference is None:
            return 0
        from headway.models.quantized.reference import reference_bytes

        return reference_bytes(self.reference)

    def runner(self, pool: Any, page_size: int, *, deterministic: bool, profiler: Profiler) -> Runner:
        """What computes batches over the pages of this pool, which is one of `new_pool`."""
        decoder = self.reference or self.decoder
        if self.ranks is not None:
            from headway.runtime.runners.parallel.runner import ParallelRunner

            assert not isinstance(decoder, QuantizedDecoder)
            how: dict[str, Any] = {"deterministic": deterministic, "profiler": profiler, "ranks": self.ranks}
            if self.triton:
                from headway.runtime.runners.parallel.cuda import ParallelCudaRunner

                return ParallelCudaRunner(decoder, pool, page_size, **how)
            return ParallelRunner(decoder, pool, page_size, **how)
        if isinstance(decoder, QuantizedDecoder):
            from headway.runtime.runners.cpu.runner import NativeRunner

            assert self.thread_pool is not None
            return NativeRunner(decoder, pool, page_size, thread_pool=self.thread_pool, profiler=profiler)
        if self.triton:
            from headway.runtime.runners.cuda.runner import CudaRunner

            return CudaRunner(decoder, pool, page_size, profiler=profiler, deterministic=deterministic)
        from headway.runtime.runners.torch import TorchRunner

        return TorchRunner(decoder, pool, page_size, deterministic=deterministic, profiler=profiler)


def open_backend(
    model: Path | Decoder | QuantizedDecoder,
    *,
    dtype: str,
    device: AnyDevice,
    threads: int,
    quantize: str | None,
    settings: Settings,
    progress: LoadProgress | None = None,
    tensor_parallel: int = 1,
) -> Backend:
    """Load a model, or take one that is in memory, for the best that can compute it here; or a share of it on each of
    several ranks."""
    check_quantize(quantize)
    if isinstance(model, Path):
        note_left_out(model)
    if tensor_parallel > 1:
        how: dict[str, Any] = {"dtype": dtype, "device": device, "threads": threads, "quantize": quantize}
        return open_ranks(model, tensor_parallel, **how, settings=settings, progress=progress)
    if quantize is not None and not isinstance(model, Path):
        raise Unsupported(f"quantize={quantize!r} is for models read from files; this one is in memory already")
    if quantize == "fp8" and device.type != "cuda" and settings.native != "triton":
        raise Unsupported(f"quantize='fp8' is for CUDA devices, not for {device}; use int8, which is as small")
    if isinstance(model, QuantizedDecoder):
        reason = why_not_native(model, dtype, device, settings)
        if settings.native == "require" and reason is not None:
            raise Unsupported(f"HEADWAY_NATIVE asks for the native step, and {reason}")
        return Backend(model, _thread_pool(threads, settings), "") if reason is None else _reference(model, reason)
    reason = why_not_native(model, dtype, device, settings)
    if reason is not None:
        need_torch(f"computing this model without the native step ({reason})", _extra(device))
        config = read_config(model) if isinstance(model, Path) else model.config
        fast = why_not_triton(device, settings)
        fast = fast or (why_no_triton_layers(config) if quantize is None else why_not_quantized(config, quantize))
        if settings.native == "triton" and fast is not None:
            raise Unsupported(f"HEADWAY_NATIVE asks for Triton kernels, and {fast}")
        if settings.native == "require" and fast is not None:
            why = reason if device.type == "cpu" else fast
            raise Unsupported(f"HEADWAY_NATIVE asks for the native step, and {why}")
        if quantize is not None and fast is None:
            assert isinstance(model, Path)
            stored = stored_dtype(model)
            how: dict[str, Any] = {"quantize": quantize, "llama": config.description.experts is None}
            decoder = _quantized_model(model, pick_dtype(dtype, device, stored), device, progress, **how)
            return Backend(decoder, None, "", triton=True, stored=stored)
        if fast and device.type == "cpu" and isinstance(model, Path) and _stays_quantized(model, dtype, quantize):
            keep = dtype == "auto"
            held = load_quantized_model(model, thread_pool=None, keep=keep, quantize=quantize, progress=progress)
            return _reference(held, reason, stored_dtype(model))
        if quantize is not None:
            needs, why = ("Triton kernels", fast) if device.type == "cuda" else ("the native step", reason)
            raise Unsupported(f"quantize={quantize!r} needs {needs}, and {why}")
        stored = stored_dtype(model) if isinstance(model, Path) else None
        decoder = _torch_model(model, pick_dtype(dtype, device, stored), device, progress, keep_experts=fast is None)
        return Backend(decoder, None, reason if fast else "", triton=fast is None, stored=stored)
    thread_pool = _thread_pool(threads, settings)
    if not isinstance(model, Path):
        from headway.models.quantized.interleave import interleave_decoder

        return Backend(interleave_decoder(model), thread_pool, "")
    packed = load_quantized_model(
        model, thread_pool=thread_pool, keep=dtype == "auto", quantize=quantize, progress=progress,
        cache=WeightCache(settings.cache / "weights", settings.weight_cache) if settings.weight_cache else None,
    )  # fmt: skip
    return Backend(packed, thread_pool, "", stored=stored_dtype(model))


def note_left_out(model: Path) -> None:
    """Log what of a folder with more than a text model is not loaded."""
    if model.is_dir() and outer_family(config := read_json(model / "config.json")) is not None:
        kind = config["architectures"][0]
        log_event(f"{kind}: the text model alone is loaded; what is for images and sound is left out", path=str(model))


def open_ranks(
    model: Path | Decoder | QuantizedDecoder,
    size: int,
    *,
    dtype: str,
    device: AnyDevice,
    threads: int,
    quantize: str | None,
    settings: Settings,
    progress: LoadProgress | None = None,
) -> Backend:
    """A model split over ranks. What cannot be split is refused before any process starts."""
    need_torch(f"tensor_parallel={size}", _extra(device))
    import torch

    from headway.runtime.runners.parallel.collectives import why_no_collectives
    from headway.runtime.runners.parallel.launch import Ranks

    setting = f"tensor_parallel={size}"
    config = read_config(model) if isinstance(model, Path) else model.config
    check_split(config, size)
    if (missing := why_no_collectives(device.type)) is not None:
        raise Unsupported(f"{setting}: {missing}; install another torch")
    if device.type not in ("cpu", "cuda"):
        raise Unsupported(f"{setting} is for CPUs and CUDA devices, not for {device}; leave it out")
    if device.type == "cuda" and (count := torch.cuda.device_count()) < (device.index or 0) + size:
        raise Unsupported(f"{setting} needs {size} CUDA devices from {device} on, and this machine has {count}")
    quantized = has_quantized(model) if isinstance(model, Path) else isinstance(model, QuantizedDecoder)
    check_float_ranks(size, device, dtype if isinstance(model, Path) else "auto", quantize, quantized=quantized)
    if isinstance(model, Path):
        stored = stored_dtype(model)
        kept = pick_dtype(dtype, device, stored)
    else:
        stored, kept = None, dtype_name(model.dtype)
    fast = why_not_triton(device, settings) or why_llama_alone(config)
    ranks = Ranks(size, torch.device(device.type, device.index or 0) if device.type == "cuda" else torch.device("cpu"))
    try:
        assert not isinstance(model, QuantizedDecoder)
        each = max(1, threads // size)
        torch.set_num_threads(each)
        own = ranks.load(model, config, dtype=kept, threads=each, triton=fast is None, progress=progress)
    except BaseException:
        ranks.close()
        raise
    reason = f"tensor_parallel is {size}" + ("" if device.type == "cpu" or fast is None else f", and {fast}")
    return Backend(own, None, reason, triton=fast is None, stored=stored, ranks=ranks, whole=config)


def check_float_ranks(size: int, device: AnyDevice, dtype: str, quantize: str | None, *, quantized: bool) -> None:
    """Raise if ranks would have quantized weights: of a file that stays as it is on a CPU, or by `quantize`."""
    setting = f"tensor_parallel={size} computes float weights"
    if quantize is not None:
        raise Unsupported(f"{setting}: leave out quantize={quantize!r}, or tensor_parallel")
    if quantized and device.type == "cpu" and dtype == "auto":
        raise Unsupported(f"{setting}, and this model's are quantized; add dtype='float32' to dequantize them")


def _extra(device: AnyDevice) -> str:
    return "cuda" if device.type == "cuda" else "torch"


def _stays_quantized(model: Path, dtype: str, quantize: str | None) -> bool:
    """Whether a model on the CPU has quantized matrices: its file's own, or those that `quantize` makes."""
    if why_no_native_layers(read_config(model)) is not None:
        return False  # they become floats
    if quantize is not None:
        return pick_dtype(dtype, CPU) == "float32"
    return dtype == "auto" and has_quantized(model)


def _reference(model: QuantizedDecoder, reason: str, stored: str | None = None) -> Backend:
    need_torch(f"computing this model without the native step ({reason})")
    from headway.models.quantized.reference import reference_decoder

    return Backend(model, None, reason, stored=stored, reference=reference_decoder(model))


def _thread_pool(threads: int, settings: Settings) -> ThreadPool:
    if settings.isa is not None:
        use_isa(settings.isa)
    return ThreadPool(threads)


def why_not_native(
    model: Path | Decoder | QuantizedDecoder, dtype: str, device: AnyDevice, settings: Settings
) -> str | None:
    """Why the native step does not serve, in words, or None."""
    if settings.native in ("off", "triton"):
        return f"HEADWAY_NATIVE is {settings.native}"
    if device.type != "cpu":
        return f"it runs on the CPU, not on {device}"
    computed = pick_dtype(dtype, device) if isinstance(model, Path) else dtype_name(model.dtype)
    if computed != "float32":
        return f"it computes in float32, not in {computed}"
    return why_no_native_layers(read_config(model) if isinstance(model, Path) else model.config) or (
        open_library().missing or None
    )


def what_computes(model: Path, dtype: str, device: AnyDevice, settings: Settings, ranks: int = 1) -> str:
    """What would compute a model, and why nothing faster does, in words."""
    reason = f"it is not for {ranks} ranks" if ranks > 1 else why_not_native(model, dtype, device, settings)
    if reason is None:
        return NATIVE
    why_no_layers = why_llama_alone if ranks > 1 else why_no_triton_layers
    if (fast := why_not_triton(device, settings) or why_no_layers(read_config(model))) is None:
        return TRITON
    names = ("Triton kernels do", fast) if device.type == "cuda" else ("the native step does", reason)
    return f"torch: {names[0]} not serve; {names[1]}"


def why_not_triton(device: AnyDevice, settings: Settings) -> str | None:
    """Why the Triton kernels do not serve, in words, or None."""
    if settings.native == "off":
        return "HEADWAY_NATIVE is off"
    if device.type != "cuda" and settings.native != "triton":
        return f"it runs on CUDA devices, not on {device}"
    return triton.missing()


def _quantized_model(
    model: Path, dtype: str, device: AnyDevice, progress: LoadProgress | None, *, quantize: str, llama: bool
) -> Decoder:
    """A model whose layers' matrices are quantized for a CUDA device; of layers that are not Llama's, the experts."""
    import torch

    from headway.kernels.triton.quantized import as_kind
    from headway.models.quantized.cuda import load_cuda_quantized_model
    from headway.models.weights.load_tensors import load_model

    how: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": torch.device(str(device)), "progress": progress}
    if llama:
        return load_cuda_quantized_model(model, as_kind(quantize), **how)
    return load_model(model, **how, keep_experts=True, quantize_experts=quantize)


def _torch_model(
    model: Path | Decoder, dtype: str, device: AnyDevice, progress: LoadProgress | None, *, keep_experts: bool
) -> Decoder:
    """A model of floats; with `keep_experts` those that can stay quantized do."""
    if not isinstance(model, Path):
        return model
    import torch

    from headway.models.weights.load_tensors import load_model

    how: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": torch.device(str(device)), "progress": progress}
    return load_model(model, **how, keep_experts=keep_experts)
