"""The ranks of a tensor-parallel engine: processes that this one starts, tells what to compute, watches and ends.

Rank 0 is this process. A rank that ends, in whatever way, ends the engine: the watching thread reads the end of its
socket, ends the others (so that nobody waits for them) and tells the engine. A controller that ends takes its ranks
along: their sockets end, and they look for their parent. Nothing has a name in the file system but a folder in which
ranks meet; NCCL goes on looking there, so it stays until the ranks have ended.
"""

from __future__ import annotations

import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import headway
from headway.base.errors import HeadwayError, RankLost
from headway.base.specs.adapters import LoadedWeights
from headway.models.config import ModelConfig
from headway.models.decoder import Decoder
from headway.models.described import DescribedDecoder
from headway.models.shards import Split
from headway.models.weights.load import LoadProgress
from headway.models.weights.load_tensors import load_model
from headway.models.weights.update import GivenWeights
from headway.runtime.runners.parallel.channel import RankMessage, Sender, new_buffer
from headway.runtime.runners.parallel.collectives import Collectives
from headway.runtime.runners.parallel.messages import config_values
from headway.runtime.runners.parallel.weights import part_messages, update_messages

PATIENCE = 5.0  # seconds that a rank has to end by itself
CAUSE = 3.0  # seconds to learn why a call failed: a rank that has ended is known at once
HEARD = 0.5  # seconds to see that a rank was killed, after another has failed
MAX_LINE = 1 << 16  # bytes of an answer
START = "import sys; sys.path.insert(0, sys.argv[1]); from headway.runtime.runners.parallel.rank import main; main()"


class Processes:
    """The processes of ranks 1 to N - 1, and what the watching thread knows of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lost: RankLost | None = None
        self.ready: dict[int, int] = {}  # bytes of weights, by rank
        self.changed = threading.Condition()
        self.on_lost: Callable[[RankLost], None] = lambda error: None
        self.abort: Callable[[], None] = lambda: None
        self.leave: Callable[[], None] = lambda: None
        self.closing = False
        self.sockets: list[socket.socket] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.memory = new_buffer()
        self.folder = Path(tempfile.mkdtemp(prefix="headway-ranks-"))
        try:
            for rank in range(1, size):
                self._start(rank)
        except BaseException:
            self.close()
            raise
        self.sender = Sender(self.memory, self.sockets, self.check)
        self._watch = threading.Thread(target=self._watching, name="headway-ranks", daemon=True)
        self._watch.start()

    def _start(self, rank: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            root = str(Path(headway.__file__).resolve().parent.parent)
            numbers = (rank, self.size, theirs.fileno(), self.memory, os.getpid())
            self.sockets.append(ours)
            self.started.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-c", START, root, *map(str, numbers)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), self.memory),
                    start_new_session=True,  # ctrl-C is for this process, which ends them
                )
            )

    def check(self) -> None:
        """Raise if a rank has ended."""
        if self.lost is not None:
            raise self.lost

    # -- watching ------------------------------------------------------------------------------------------------------

    def _watching(self) -> None:
        """Read what ranks answer, until one ends."""
        buffers = [b""] * len(self.sockets)
        with selectors.DefaultSelector() as selector:
            for i, each in enumerate(self.sockets):
                selector.register(each, selectors.EVENT_READ, i)
            while not self.closing:
                for key, _ in selector.select(timeout=1.0):
                    i = key.data
                    try:
                        part = self.sockets[i].recv(1 << 14)
                    except OSError:
                        part = b""
                    if self.closing:
                        return
                    buffers[i] = (buffers[i] + part)[-MAX_LINE:]
                    *lines, buffers[i] = buffers[i].split(b"\n")
                    error = self._answers(i + 1, lines)
                    if error is not None or not part:
                        self.end(self._why(i + 1, error))
                        return

    def _answers(self, rank: int, lines: list[bytes]) -> str | None:
        """Take a rank's answers; the error that it has met, if there is one."""
        for line in lines:
            values = json.loads(line)
            if "error" in values:
                return str(values["error"])
            with self.changed:
                self.ready[rank] = int(values["ready"])
                self.changed.notify_all()
        return None

    def _why(self, rank: int, error: str | None) -> RankLost:
        if error is not None and (killed := self._killed()) is not None:
            rank, error = killed, None
        what = f"failed: {error}" if error is not None else _ended(self.started[rank - 1])
        return RankLost(f"rank {rank} of {self.size} of the tensor-parallel engine {what}; create the engine again")

    def _killed(self) -> int | None:
        """The rank that a signal has ended, if there is one: others fail without it, and may be heard first."""
        end = time.monotonic() + HEARD
        while True:
            for rank, process in enumerate(self.started, 1):
                if (process.poll() or 0) < 0:
                    return rank
            if time.monotonic() > end:
                return None
            time.sleep(0.01)

    def end(self, error: RankLost) -> RankLost:
        """The engine is over: end every rank, and tell whoever waits. The first error counts."""
        with self.changed:
            first = self.lost is None
            error = self.lost = self.lost or error
            self.changed.notify_all()
        for each in self.started:
            each.kill()
        if first:
            self.abort()
            self.on_lost(error)
        return error

    def wait_ready(self) -> None:
        """Until every rank has loaded its share."""
        with self.changed:
            while len(self.ready) < self.size - 1:
                self.check()
                self.changed.wait()

    # -- ending --------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End every rank, and wait for them."""
        if self.closing:
            return
        self.closing = True
        for each in self.sockets:
            with suppress(OSError):  # it has ended
                each.shutdown(socket.SHUT_RDWR)
        if self.lost is not None:
            for each in self.started:
                each.kill()
        deadline = time.monotonic() + PATIENCE
        for process in self.started:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.leave()
        watch = getattr(self, "_watch", None)
        if watch is not None and watch is not threading.current_thread():
            watch.join()
        for each in self.sockets:
            each.close()
        sender = getattr(self, "sender", None)
        if sender is not None:
            sender.close()
        os.close(self.memory)
        shutil.rmtree(self.folder, ignore_errors=True)


def _ended(process: subprocess.Popen[bytes]) -> str:
    """How a process has ended, in words."""
    try:
        code = process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was killed by signal {-code}"


class Ranks:
    """What the controlling process has of its ranks: messages to them, and the link of rank 0."""

    split: Split  # takes rank 0's share of weights, once a model is loaded

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self._processes = Processes(size)
        self._numbers = itertools.count(1)
        self._known: dict[str, int] = {}  # the number of each adapter, by its hash
        self.dropped: deque[int] = deque()  # adapters that nobody needs; a finalizer only appends here
        me = weakref.ref(self)  # the watching thread must not keep this alive

        def begin_head(rows: int) -> None:
            if (ranks := me()) is not None:
                ranks.send(RankMessage("head", {"rows": rows}, ()))

        def failed(error: Exception) -> Exception:
            return error if (ranks := me()) is None else ranks._failed(error)

        self.link = Collectives(0, size, device, on_head=begin_head, on_error=failed)
        self._processes.abort, self._processes.leave = self.link.abort, self.link.leave
        self.close = weakref.finalize(self, self._processes.close)  # as Python exits, too

    @property
    def pids(self) -> list[int]:
        """The processes of ranks 1 to N - 1."""
        return [process.pid for process in self._processes.started]

    @property
    def weight_bytes(self) -> int:
        """Of ranks 1 to N - 1."""
        return sum(self._processes.ready.values())

    def next_number(self, digest: str) -> int:
        """The number by which ranks know an adapter from now on."""
        self._known[digest] = next(self._numbers)
        return self._known[digest]

    def number_of(self, adapter: LoadedWeights) -> int:
        """The number of an adapter that was loaded."""
        return self._known[adapter.digest]

    def send(self, message: RankMessage) -> None:
        """Tell every rank. It may be at work on what it was told before."""
        self._processes.check()
        dropped = []
        while self.dropped:
            dropped.append(self.dropped.popleft())
        with self.together():
            if dropped:
                self._processes.sender.send(RankMessage("drop", {"numbers": dropped}, ()))
            self._processes.sender.send(message)

    def update(self, given: GivenWeights) -> None:
        """Have every rank put its share of new weights in place of old ones; a new runner is to be opened."""
        for message in update_messages(given):
            self.send(message)

    def give_up_pages(self) -> None:
        """Have every rank give the memory of its pages back."""
        self.send(RankMessage("no pool", {}, ()))

    @contextmanager
    def together(self) -> Iterator[None]:
        """What fails in here has left ranks in the middle of a step, waiting: it ends the engine."""
        try:
            yield
        except RankLost:
            raise
        except Exception as error:
            raise self._failed(error) from None

    def _failed(self, error: Exception) -> RankLost:
        with self._processes.changed:
            self._processes.changed.wait_for(lambda: self._processes.lost is not None, CAUSE)
        what = str(error) if isinstance(error, HeadwayError) else f"{type(error).__name__}: {error}"
        return self._processes.end(
            RankLost(f"rank 0 of {self.size} of the tensor-parallel engine failed: {what}; create the engine again")
        )

    def tell(self, on_lost: Callable[[RankLost], None]) -> None:
        """Have a function called, from another thread, when the ranks have ended before their time."""
        self._processes.on_lost = on_lost
        if self._processes.lost is not None:
            on_lost(self._processes.lost)

    def load(
        self,
        model: Path | Decoder,
        config: ModelConfig,
        *,
        dtype: str,
        threads: int,
        triton: bool,
        progress: LoadProgress | None,
    ) -> Decoder:
        """Have every rank load its share of a model, and return that of rank 0. A model in memory is sent to them."""
        link = self.link
        split = self.split = Split(link, config, link.device)
        values: dict[str, Any] = {"threads": threads, "device": str(link.device), "dtype": dtype}
        values["triton"] = triton
        if isinstance(model, Path):
            self.send(RankMessage("load", values | {"model": str(model)}, ()))
            kind = getattr(torch, dtype)
            own = load_model(model, dtype=kind, device=link.device, progress=progress, split=split)
        else:
            described = isinstance(model, DescribedDecoder)
            sent = {"config": config_values(config), "described": described, "layers": config.layers}
            self.send(RankMessage("parts", values | sent, ()))
            for message in part_messages(model):
                self.send(message)
            own = split.decoder(model)
        self._processes.wait_ready()
        self.send(RankMessage("connect", {"folder": str(self._processes.folder)}, ()))
        with self.together():
            link.connect(self._processes.folder)
        if link.device.type != "cuda":  # NCCL goes on looking there
            shutil.rmtree(self._processes.folder, ignore_errors=True)
        return own
