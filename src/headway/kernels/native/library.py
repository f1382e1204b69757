"""Headway's native library as Python sees it: where it is, what it can do here, its structs and calls.

Mirrors api.h field by field. It never raises for a library that is not there: `open_library` says why instead, and the
torch reference serves.
"""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from headway.base.errors import InvalidInput, Unsupported

VERSION = 6
ISAS = ("plain", "avx2", "avx512", "vnni")
ISA_NAMES = {"plain": "plain C++", "avx2": "AVX2", "avx512": "AVX-512", "vnni": "AVX-512 VNNI"}
KINDS = ("f32", "f16", "bf16", "int8", "groups")
SCALES = ("f16", "f32", "k")
NAME = "_headway.dylib" if sys.platform == "darwin" else "_headway.so"


class Matrix(Structure):
    """hw_matrix."""

    _fields_ = (
        ("kind", c_int32),
        ("n", c_int32),
        ("k", c_int32),
        ("bits", c_int32),
        ("group", c_int32),
        ("zero", c_int32),
        ("has_least", c_int32),
        ("scale_kind", c_int32),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("super", c_void_p),
        ("bias", c_void_p),
    )


class Layer(Structure):
    """hw_layer."""

    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        ("norm_in", c_void_p),
        ("norm_mlp", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("mask_set", c_int32),
    )


class Model(Structure):
    """hw_model."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "layers",
                "hidden",
                "inner",
                "heads",
                "kv_heads",
                "head_dim",
                "vocab",
                "rope_half",
                "page_size",
            )
        ),
        ("eps", c_float),
        ("scale", c_float),
        ("rope_scale", c_float),
        ("inv_freq", c_void_p),
        ("final_norm", c_void_p),
        ("layer", POINTER(Layer)),
        ("embedding", Matrix),
        ("output", Matrix),
        ("kv", c_void_p),
        ("kv_pages", c_int64),
    )


class Step(Structure):
    """hw_step."""

    _fields_ = (
        *((name, c_int32) for name in ("rows", "segments", "mask_sets", "taps", "query_taps", "reads")),
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
                "tap_layers",
                "tap_rows",
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
    )


class Draw(Structure):
    """hw_draw."""

    _fields_ = (
        *((name, c_void_p) for name in ("logits", "allowed", "changed", "scores")),
        *((name, c_double) for name in ("temperature", "top_p", "min_p", "uniform")),
        *((name, c_int64) for name in ("vocab", "top_k", "changes", "token")),
    )


@dataclass(frozen=True)
class Library:
    """The loaded library, or why there is none."""

    calls: ctypes.CDLL | None
    missing: str = ""  # why it cannot be used, in words for people

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        assert self.calls is not None
        return ISAS[self.calls.hw_isa()]


@lru_cache(maxsize=1)
def open_library() -> Library:
    """The native library of this installation, found once."""
    path = Path(__file__).with_name(NAME)
    if not path.is_file():
        return Library(None, "this installation was built without a C++ compiler, so it has no native library")
    try:
        calls = ctypes.CDLL(str(path))
        found = calls.hw_version()
    except (OSError, AttributeError) as error:
        return Library(None, f"the native library cannot be loaded: {error}")
    if found != VERSION:
        return Library(
            None, f"the native library has version {found} and this package needs {VERSION}; install it again"
        )
    return Library(_declare(calls))


def use_isa(name: str) -> None:
    """Keep to one instruction set; one that this machine lacks raises."""
    calls = open_library().calls
    if name not in ISAS:
        raise InvalidInput(f"the instruction set {name!r} is not known; it takes one of {', '.join(ISAS)}")
    if calls is None or calls.hw_use_isa(ISAS.index(name)) != 0:
        best = "none" if calls is None else ISAS[calls.hw_best_isa()]
        raise Unsupported(f"the instruction set {name!r} was asked for and this machine's best is {best!r}")


def _declare(calls: ctypes.CDLL) -> ctypes.CDLL:
    calls.hw_threads_new.restype = c_void_p
    calls.hw_threads_new.argtypes = (c_int32,)
    calls.hw_threads_free.restype = None
    calls.hw_threads_free.argtypes = (c_void_p,)
    calls.hw_use_isa.argtypes = (c_int32,)
    calls.hw_run.argtypes = (c_void_p, POINTER(Model), POINTER(Step))
    calls.hw_head.argtypes = (c_void_p, POINTER(Model), c_void_p, c_int32, c_int32, c_void_p, c_int64)
    calls.hw_linear.argtypes = (c_void_p, POINTER(Matrix), c_void_p, c_int32, c_void_p, c_int64)
    calls.hw_gather.argtypes = (c_void_p, POINTER(Matrix), c_void_p, c_int32, c_void_p)
    calls.hw_draw_all.argtypes = (c_void_p, POINTER(Draw), c_int32)
    calls.hw_choose.argtypes = (c_void_p, c_void_p, c_int32, c_int64, c_int64, c_void_p, c_void_p)
    calls.hw_pack.argtypes = (c_void_p, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p, c_void_p, c_void_p)
    return calls


class Team:
    """Threads and working memory of one user of the library. Used by one thread at a time; freed with its last user.

    They belong to the process that made them: a forked child has a copy of the memory and none of the threads.
    """

    def __init__(self, threads: int) -> None:
        library = open_library()
        if library.calls is None:
            raise Unsupported(library.missing)
        self.calls, self.threads, self.isa = library.calls, threads, library.isa
        self._process, self._handle = os.getpid(), library.calls.hw_threads_new(threads)
        if not self._handle:
            raise Unsupported(f"{threads} threads could not be started; give fewer with threads=")

    @property
    def handle(self) -> int:
        """What the calls take; raises in a forked child."""
        if os.getpid() != self._process:
            raise Unsupported(
                f"the native threads of process {self._process} do not exist in its forked child {os.getpid()}; "
                'make the engine in the child, or start the child with "spawn"'
            )
        return self._handle

    def __del__(self) -> None:
        # In a child the threads can be neither told to end nor joined; the memory goes with the process.
        # When Python ends modules go first, and the process is about to take everything with it.
        if getattr(self, "_handle", None) and os is not None and os.getpid() == self._process:
            self.calls.hw_threads_free(self._handle)


def check(code: int) -> None:
    """Raise for what a call returned."""
    if code == 1:
        raise MemoryError("no memory for the working arrays of this step; lower max_batch_tokens")
    if code == 3:
        raise RuntimeError("the native library cannot repack this kind of block")
    if code:
        raise RuntimeError("the native step failed")
