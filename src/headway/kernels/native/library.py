"""The native library from Python: loading it, its instruction set, its ctypes structs and calls, its thread pool.

Mirrors api.h field by field. A missing library is not an error here: `open_library` gives the reason, and the torch
reference computes instead.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported

VERSION = 18
ARM = platform.machine().lower() in ("aarch64", "arm64")
ISAS = ("plain", "neon", "i8mm") if ARM else ("plain", "avx2", "avx512", "vnni", "bf16")
ISA_NAMES = {
    "plain": "plain C++",
    "avx2": "AVX2",
    "avx512": "AVX-512",
    "vnni": "AVX-512 VNNI",
    "bf16": "AVX-512 BF16",
    "neon": "NEON with dotprod",
    "i8mm": "NEON with i8mm",
}
KINDS = ("f32", "f16", "bf16", "int8", "groups")
SCALES = ("f16", "f32", "k", "e8")
NORMS = ("rms", "layer")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh")
QK_NORMS = ("head", "each", "row")
ADAPTER_ROLES = ("q", "k", "v", "o", "gate", "up", "down")
ADAPTER_ROLES += ("attention_gate", "mix_in", "mix_qkv", "mix_beta", "mix_step", "mix_gate", "mix_out")
ADAPTER_ROLES += ("q_down", "q_up", "kv_down")
ADAPTER_ROLES += ("router", "shared_gate", "shared_up", "shared_down", "shared_router")
ADAPTER_ROLES += (
    "input_gate",
    "input_out",
    "laurel_down",
    "laurel_up",
    "altup_router",
    "altup_predict",
    "altup_correct",
)
ADAPTER_ROLES += ("input_projection",)  # of the model, as those of streams are
EXPERT_ROLES = ("expert_gate", "expert_up", "expert_down")  # each expert has a matrix of these
HEAD_ROLES = ("key_up", "value_up")  # and each head of these
STREAM_ROLES = ("altup_spread", "altup_gather")  # and each stream but the first of these
RECURRENCES = ("none", "short conv", "gated delta", "mamba-2")
NAME = "_headway.dylib" if sys.platform == "darwin" else "_headway.so"


class MatrixStruct(Structure):
    """hw_matrix."""

    _fields_ = (
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
        ("has_min", c_int32),
        ("scale_kind", c_int32),
        ("quants", c_void_p),
        ("scales", c_void_p),
        ("super", c_void_p),
        ("bias", c_void_p),
    )


class NormStruct(Structure):
    """hw_norm."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class LayerStruct(Structure):
    """hw_layer."""

    _fields_ = (
        *((name, MatrixStruct) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, MatrixStruct) for name in ("router", "expert_gate", "expert_up", "expert_down")),
        *((name, MatrixStruct) for name in ("shared_gate", "shared_up", "shared_down", "shared_router")),
        *((name, MatrixStruct) for name in ("q_down", "q_up", "kv_down", "key_up", "value_up", "attention_gate")),
        *((name, MatrixStruct) for name in ("mix_in", "mix_qkv", "mix_beta", "mix_step", "mix_gate", "mix_out")),
        *((name, MatrixStruct) for name in ("input_gate", "input_out", "laurel_down", "laurel_up")),
        *((name, MatrixStruct) for name in ("altup_router", "altup_predict", "altup_correct")),
        *((name, NormStruct) for name in ("norm_in", "norm_mlp", "post_attention", "post_mlp")),
        *((name, c_void_p) for name in ("q_norm", "k_norm", "sinks", "q_down_norm", "kv_down_norm")),
        *((name, c_void_p) for name in ("router_correction", "conv", "conv_bias", "step_bias", "rate", "skip")),
        *((name, c_void_p) for name in ("mix_norm", "post_input_norm", "layer_scale", "laurel_norm", "altup_norm")),
        *((name, c_void_p) for name in ("altup_scale", "dense_norm", "expert_in_norm", "expert_out_norm")),
        *((name, c_void_p) for name in ("router_scale", "expert_scale")),
        *((name, c_int32) for name in ("mask_set", "rope_set", "kv_heads", "head_dim")),
        ("kv_before", c_int64),
        *((name, c_int32) for name in ("state_layer", "sparse")),
        ("cut", c_float),
    )


class ModelStruct(Structure):
    """hw_model."""

    _fields_ = (
        *((name, c_int32) for name in ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocab")),
        *((name, c_int32) for name in ("rope_half", "rope_sets", "page_size")),
        *((name, c_int32) for name in ("norm", "activation", "qk_norm", "parallel")),
        *((name, c_int32) for name in ("experts", "per_token", "expert_inner", "shared_inner", "normalize")),
        *((name, c_int32) for name in ("route_groups", "route_kept", "route_best", "route_sigmoid", "weighted_inputs")),
        *((name, c_int32) for name in ("latent", "rotated", "key_dim", "value_dim", "query_latent", "paired")),
        *((name, c_int32) for name in ("gated_attention", "recurrence", "taps", "mix_heads", "mix_groups")),
        *((name, c_int32) for name in ("mix_key_dim", "mix_value_dim", "norm_values", "token_size", "streams")),
        *((name, c_int32) for name in ("active", "cycled", "gate_first")),
        *((name, c_float) for name in ("eps", "scale", "attention_cap", "qkv_clip", "residual_scale")),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_cap", "clamp", "alpha")),
        *((name, c_float) for name in ("route_scale", "latent_eps", "temperature_floor", "temperature_scale")),
        *((name, c_float) for name in ("step_least", "step_most", "hidden_root", "hidden_inverse", "token_root")),
        *((name, c_void_p) for name in ("inv_freq", "rope_scales", "rope_halves", "positions")),
        ("final_norm", NormStruct),
        ("layer", POINTER(LayerStruct)),
        ("embedding", MatrixStruct),
        ("output", MatrixStruct),
        ("token_inputs", MatrixStruct),
        ("input_projection", MatrixStruct),
        ("input_projection_norm", c_void_p),
        ("altup_spread", MatrixStruct),
        ("altup_gather", MatrixStruct),
        ("kv", c_void_p),
        ("kv_pages", c_int64),
        ("kv_kind", c_int32),
        ("states", c_void_p),
        ("state_layers", c_int32),
        ("state_numbers", c_int64),
    )


class LowRankStruct(Structure):
    """hw_low_rank."""

    _fields_ = (("rank", c_int32), ("kind", c_int32), ("factor", c_float), ("a", c_void_p), ("b", c_void_p))


class AdapterLayerStruct(Structure):
    """hw_adapter_layer."""

    _fields_ = (
        *((name, LowRankStruct) for name in ADAPTER_ROLES),
        *((name, POINTER(LowRankStruct)) for name in (*EXPERT_ROLES, *HEAD_ROLES, *STREAM_ROLES)),
    )


class AdapterStruct(Structure):
    """hw_adapter."""

    _fields_ = (("layers", POINTER(AdapterLayerStruct)), ("first", c_int32), ("count", c_int32))


class StepStruct(Structure):
    """hw_step."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "segments", "mask_sets", "hidden_count", "query_count", "reads")),
        *(
            (name, c_void_p)
            for name in (
                "tokens",
                "positions",
                "write_slots",
                "segment_rows",
                "segment_pages",
                "pages",
                "numbers",
                "runs_at",
                "runs",
                "hidden_layers",
                "hidden_rows",
                "hidden_out",
                "query_layers",
                "query_rows",
                "query_out",
                "out",
                "phases",
                "read_rows",
                "logits",
            )
        ),
        ("logits_stride", c_int64),
        ("best", c_void_p),
        ("bad", c_void_p),
        *((name, c_int32) for name in ("unfinished", "adapter_count", "adapter_uses")),
        ("adapters", POINTER(AdapterStruct)),
        ("adapter_rows", c_void_p),
        ("adapter_scales", c_void_p),
        ("sequences", c_int32),
        ("sequence_runs", c_void_p),
        ("state_runs", c_void_p),
    )


class SamplingStruct(Structure):
    """hw_sampling."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "allowed", "changed", "scores")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "uniform")),
        *((name, c_int64) for name in ("vocab", "top_k", "changes", "token")),
    )


@dataclass(frozen=True)
class Library:
    """The loaded library, or why there is none."""

    calls: ctypes.CDLL | None
    missing: str = ""  # the reason it cannot be used, for messages

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        assert self.calls is not None
        return ISAS[self.calls.hw_isa()]


@lru_cache(maxsize=1)
def open_library() -> Library:
    """The native library of this installation, loaded once."""
    path = Path(__file__).with_name(NAME)
    if not path.is_file():
        return Library(None, "this installation was built without a C++ compiler, so it has no native library")
    try:
        calls = ctypes.CDLL(str(path))
        version = calls.hw_version()
    except (OSError, AttributeError) as error:
        return Library(None, f"the native library cannot be loaded: {error}")
    if version != VERSION:
        return Library(
            None, f"the native library has version {version} and this package needs {VERSION}; install it again"
        )
    return Library(_declare(calls))


def available_isas() -> tuple[str, ...]:
    """The instruction sets that this installation was compiled for and this machine has, the best one last."""
    calls = open_library().calls
    return () if calls is None else tuple(name for level, name in enumerate(ISAS) if calls.hw_has_isa(level))


def use_isa(name: str) -> None:
    """Use one instruction set. Raises if this machine lacks it, or this installation."""
    calls = open_library().calls
    if name not in ISAS:
        raise InvalidInput(f"the instruction set {name!r} is unknown; use one of {', '.join(ISAS)}")
    if calls is None or calls.hw_use_isa(ISAS.index(name)) != 0:
        there = ", ".join(available_isas()) or "none"
        more = "an installation with HEADWAY_NATIVE_BUILD=all has every one that this machine has"
        raise Unsupported(f"the instruction set {name!r} is not available; those that are: {there}; {more}")


def _declare(calls: ctypes.CDLL) -> ctypes.CDLL:
    calls.hw_pool_new.restype = c_void_p
    calls.hw_pool_new.argtypes = (c_int32,)
    calls.hw_pool_free.restype = None
    calls.hw_pool_free.argtypes = (c_void_p,)
    calls.hw_use_isa.argtypes = (c_int32,)
    calls.hw_forward.argtypes = (c_void_p, POINTER(ModelStruct), POINTER(StepStruct))
    calls.hw_logits.argtypes = (c_void_p, POINTER(ModelStruct), c_void_p, *(c_int32,) * 3, c_void_p, c_int64)
    calls.hw_finish_logits.argtypes = (c_void_p, POINTER(ModelStruct), c_void_p, c_int32, c_int64)
    calls.hw_matmul.argtypes = (c_void_p, POINTER(MatrixStruct), c_void_p, c_int32, c_void_p, c_int64)
    calls.hw_dequantize_rows.argtypes = (c_void_p, POINTER(MatrixStruct), c_void_p, c_int32, c_void_p)
    calls.hw_sample.argtypes = (c_void_p, POINTER(SamplingStruct), c_int32)
    calls.hw_argmax.argtypes = (c_void_p, c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p)
    calls.hw_repack.argtypes = (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
    calls.hw_strings_size.restype = c_int64
    calls.hw_strings_size.argtypes = (c_void_p, c_int64, c_int64)
    calls.hw_bpe_new.restype = c_void_p
    calls.hw_bpe_new.argtypes = (c_char_p, c_int64, c_char_p, c_int64, c_int64)
    calls.hw_bpe_free.restype = None
    calls.hw_bpe_free.argtypes = (c_void_p,)
    calls.hw_bpe_token.restype = c_void_p
    calls.hw_bpe_token.argtypes = (c_void_p, c_int64, POINTER(c_int64))
    calls.hw_bpe_find.restype = c_int64
    calls.hw_bpe_find.argtypes = (c_void_p, c_char_p, c_int64)
    calls.hw_bpe_encode.restype = c_int64
    calls.hw_bpe_encode.argtypes = (c_void_p, c_char_p, c_int64, c_int32, c_void_p)
    return calls


class ThreadPool:
    """A native thread pool and its workspace. Used by one Python thread at a time; freed with its last reference.

    It belongs to the process that created it: a forked child has a copy of the memory and none of the threads.
    """

    def __init__(self, threads: int) -> None:
        library = open_library()
        if library.calls is None:
            raise Unsupported(library.missing)
        self.calls, self.threads, self.isa = library.calls, threads, library.isa
        self._process, self._handle = os.getpid(), library.calls.hw_pool_new(threads)
        if not self._handle:
            raise Unsupported(f"{threads} threads could not be started; give fewer with threads=")

    @property
    def handle(self) -> int:
        """The pool's address, for calls. Raises in a forked child."""
        if os.getpid() != self._process:
            raise Unsupported(
                f"the native threads of process {self._process} do not exist in its forked child {os.getpid()}; "
                'create the engine in the child, or start the child with "spawn"'
            )
        return self._handle

    def __del__(self) -> None:
        # In a forked child the threads can be neither stopped nor joined; the memory goes with the process.
        # At interpreter shutdown modules may be gone already, and the process is about to end.
        if getattr(self, "_handle", None) and os is not None and os.getpid() == self._process:
            self.calls.hw_pool_free(self._handle)


def check(code: int) -> None:
    """Raise for a call's error code."""
    if code == 1:
        raise MemoryError("not enough memory for the workspace of this step; lower max_batch_tokens")
    if code == 3:
        raise RuntimeError("the native library cannot repack this kind of block")
    if code:
        raise RuntimeError("the native step failed")
