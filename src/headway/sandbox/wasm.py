"""One program in WebAssembly, in this process, which is the program's own: two imports, caps on memory and CPU time.

Learned the hard way: only a `WasmtimeError` may leave an import, as any other exception goes through one global of
wasmtime-py; `time.sleep` waits in the host, out of reach of every epoch, so the clock refuses to be waited for.
"""

from __future__ import annotations

import ctypes
import select
import socket
import threading
import time
from typing import Any

from wasmtime import Engine, Store, WasiConfig, WasmtimeError
from wasmtime import _ffi as ffi  # type: ignore[attr-defined]
from wasmtime.component import Component, Linker

from headway.sandbox.limits import ProgramLimits, receive_frame, send_frame

TICK = 0.02  # seconds between two looks at the CPU time used
CLOCK = "wasi:clocks/monotonic-clock@0.2.9"
HOUR_MS = 3_600_000
GONE = "the server has gone away"
_EPOCH = ctypes.CFUNCTYPE(
    ctypes.c_size_t,
    ctypes.POINTER(ffi.wasmtime_context_t),
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.POINTER(ffi.wasmtime_update_deadline_kind_t),
)
_DROP = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda pointer: None)


class Guest:
    """A program, its session's socket, and what it may use."""

    def __init__(self, engine: Engine, component: Component, session: socket.socket, limits: ProgramLimits) -> None:
        self._engine, self._component = engine, component
        self._session, self._limits = session, limits
        self._poll = select.poll()
        self._poll.register(session, select.POLLIN | getattr(select, "POLLRDHUP", 0))  # which only Linux has
        self._stopped: str | None = None

    def run(self, source: str, args: str) -> dict[str, Any]:
        """Run a program to its end: {"returned": JSON}, {"raised": traceback} or {"stopped": why}."""
        self._began = time.process_time()
        threading.Thread(target=self._tick, daemon=True).start()
        try:
            value = self._call(source, args)
        except WasmtimeError as error:
            return {"stopped": self._stopped or _reason(error)}
        if len(value.payload) > self._limits.message:
            return {"stopped": f"what it returned has more than {self._limits.message} bytes"}
        return {"returned" if value.tag == "ok" else "raised": value.payload}

    def _call(self, source: str, args: str) -> Any:
        callback = _EPOCH(self._epoch)
        linker = Linker(self._engine)
        linker.allow_shadowing = True
        linker.add_wasip2()
        with linker.root() as root:
            root.add_func("send", self._send)
            root.add_func("recv", self._receive)
            with root.add_instance(CLOCK) as clock:
                clock.add_func("now", lambda store: time.monotonic_ns())
                clock.add_func("resolution", lambda store: 1)
                clock.add_func("subscribe-instant", self._refuse)
                clock.add_func("subscribe-duration", self._refuse)
        with Store(self._engine) as store:
            store.set_wasi(WasiConfig())  # no folder, no variable, no address, no standard streams
            store.set_limits(memory_size=self._limits.memory)
            ffi.wasmtime_store_epoch_deadline_callback(store.ptr(), callback, None, _DROP)
            store.set_epoch_deadline(1)
            run = linker.instantiate(store, self._component).get_func(store, "run")
            assert run is not None
            return run(store, source, args)

    def _tick(self) -> None:
        while True:
            time.sleep(TICK)
            self._engine.increment_epoch()

    # -- called by the guest -----------------------------------------------------------------------------------------

    def _stop(self, why: str) -> WasmtimeError:
        self._stopped = self._stopped or why
        return WasmtimeError(self._stopped)

    def _check(self) -> None:
        if time.process_time() - self._began > self._limits.cpu:
            self._stop(f"it used more than {self._limits.cpu:g} seconds of CPU time")
        if self._stopped is not None:
            raise WasmtimeError(self._stopped)

    def _refuse(self, *_: Any) -> None:
        raise self._stop("it waited outside of its event loop; await asyncio.sleep instead of time.sleep")

    def _send(self, store: Any, message: str) -> None:
        self._check()
        try:
            frame = message.encode("latin-1")
        except UnicodeError:
            raise self._stop("it sent a message that is not one") from None
        if len(frame) > self._limits.message:
            raise self._stop(f"it sent a message of {len(frame)} bytes; at most {self._limits.message} are allowed")
        try:
            send_frame(self._session, frame)
        except OSError:
            raise self._stop(GONE) from None

    def _receive(self, store: Any, ms: int) -> str | None:
        self._check()
        if not self._poll.poll(None if ms < 0 else min(ms, HOUR_MS)):
            return None
        try:
            frame = receive_frame(self._session)
        except OSError:
            frame = None
        if frame is None:
            raise self._stop(GONE)
        return frame.decode("latin-1")

    def _epoch(self, context: Any, data: Any, delta: Any, kind: Any) -> int | None:
        """Each tick of a guest that computes: go on for another one, or stop."""
        try:
            self._check()
        except WasmtimeError as error:
            return ctypes.cast(error._consume(), ctypes.c_void_p).value
        delta[0], kind[0] = 1, 0
        return 0


def _reason(error: WasmtimeError) -> str:
    """Why the runtime ended it, in a sentence."""
    text = str(error)
    if (code := getattr(error, "exit_code", None)) is not None or "exit status" in text:
        return f"it exited with status {code}" if code is not None else "it exited"
    text = text.rpartition("Caused by:")[2].strip()
    for known, why in (
        ("call stack exhausted", "its calls were nested too deeply"),
        ("unreachable", "it aborted"),
        ("out of bounds", "it aborted"),
    ):
        if known in text:
            return why
    return f"the sandbox ended it: {text.splitlines()[-1].strip() if text else 'unknown'}"[:500]
