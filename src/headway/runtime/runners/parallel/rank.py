"""A rank's process: it computes what the controller tells it, and ends when it is told nothing more.

It has a share of the weights and of every page, and no tables, queues, samplers or users' objects.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from headway.kv.tensor_pool import TensorPool
from headway.models.config import read_config
from headway.models.decoder import Decoder
from headway.models.layers import tensors_of
from headway.models.shards import Split
from headway.models.weights.load_tensors import load_model
from headway.runtime.adapters import LoadedAdapter
from headway.runtime.profile import Profiler
from headway.runtime.runners.parallel.channel import RankMessage, Receiver
from headway.runtime.runners.parallel.collectives import Collectives
from headway.runtime.runners.parallel.messages import (
    own_adapter,
    read_adapter,
    read_config_values,
    read_edits,
    read_step,
)
from headway.runtime.runners.parallel.runner import RankRunner, new_own_pool
from headway.runtime.runners.parallel.weights import PartReader, WeightReader

LOOK = 0.5  # seconds between two looks for the parent
MAX_ERROR = 2000  # characters of an error that is reported


def main() -> None:
    """Serve the controller whose numbers are the arguments: rank, ranks, socket, memory, parent's process."""
    rank, size, connection, memory, parent = map(int, sys.argv[2:7])
    threading.Thread(target=_stay_with, args=(parent,), daemon=True).start()
    receiver = Receiver(rank, memory, socket.socket(fileno=connection))
    try:
        RankServer(rank, size, receiver).serve()
    except Exception as error:
        with suppress(OSError):  # the controller has ended
            receiver.answer(error=f"{type(error).__name__}: {error}"[:MAX_ERROR])
        os._exit(1)
    os._exit(0)  # threads of libraries may wait for ranks that have ended


def _stay_with(parent: int) -> None:
    """End with the controller, even in the middle of a call."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


class RankServer:
    """What a rank has: its share of the model, of the pages and of adapters."""

    link: Collectives
    decoder: Decoder
    _weights: WeightReader

    def __init__(self, rank: int, size: int, receiver: Receiver) -> None:
        self.rank, self.size, self._receiver = rank, size, receiver
        self._pool: TensorPool | None = None
        self._runner: Any = None  # a `RankRunner`, or that of CUDA devices
        self._triton = False
        self._parts: PartReader | None = None
        self._left = 0  # parts that are still to come
        self._adapters: dict[int, LoadedAdapter] = {}

    def serve(self) -> None:
        """Do what is told, in order, until the controller ends."""
        while (message := self._receiver.receive()) is not None:
            with torch.inference_mode():
                self._do(message)

    def _do(self, message: RankMessage) -> None:
        values = message.values
        match message.kind:
            case "step":
                self.runner.follow(read_step(message, self._adapters))
            case "head":
                self.runner.follow_head(values["rows"])
            case "graph head":
                self.runner.follow_graph_head(values["rows"])
            case "edit":
                self.runner.edit(read_edits(message, self.rank, self.size))
            case "adapter":
                experts = self.decoder.config.description.experts
                own = own_adapter(read_adapter(message), self.rank, self.size, experts)
                self._adapters[values["number"]] = LoadedAdapter(own, self.runner.load_own_adapter(own))
            case "drop":
                for number in values["numbers"]:
                    self._adapters.pop(number, None)
            case "give_back":
                self.runner.pool.give_back(values["pages"])
            case "pool":
                self._runner = self._pool = None  # the old pages go before the new ones come
                self._pool = new_own_pool(self.decoder, **values)
            case "no pool":
                self._runner = self._pool = None
            case "runner":
                self._open_runner(values["page_size"], values["deterministic"])
            case "load" | "parts":
                self._begin(message)
            case "outside" | "layer":
                self._take(message)
            case "weight":
                self._weights.take(message, self.decoder.config)
            case "update":
                self._runner = None  # its graphs go before the new weights come; another is opened
                self.decoder = self._weights.updated(self.decoder)
            case "connect":
                self.link.connect(Path(values["folder"]))
            case kind:
                raise AssertionError(kind)

    @property
    def runner(self) -> Any:
        assert self._runner is not None
        return self._runner

    # -- loading -------------------------------------------------------------------------------------------------------

    def _begin(self, message: RankMessage) -> None:
        """Load this rank's share from files, or wait for the parts of a model in memory."""
        values = message.values
        torch.set_num_threads(values["threads"])
        device, self._triton = torch.device(values["device"]), values["triton"]
        if device.type == "cuda":
            device = torch.device("cuda", (device.index or 0) + self.rank)
            torch.cuda.set_device(device)
        self.link = Collectives(self.rank, self.size, device)
        config = read_config_values(values["config"]) if message.kind == "parts" else read_config(Path(values["model"]))
        split = Split(self.link, config, device)
        self._weights = WeightReader(split)
        if message.kind == "parts":
            self._parts = PartReader(config, split, described=values["described"])
            self._left = values["layers"] + 1
            return
        path = Path(values["model"])
        self._loaded(load_model(path, dtype=getattr(torch, values["dtype"]), device=device, split=split))

    def _take(self, message: RankMessage) -> None:
        assert self._parts is not None
        self._parts.take(message)
        self._left -= 1
        if self._left == 0:
            decoder, self._parts = self._parts.decoder(), None
            self._loaded(decoder)

    def _loaded(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._receiver.answer(ready=sum(tensor.nbytes for tensor in tensors_of(decoder)))

    # -- computing -----------------------------------------------------------------------------------------------------

    def _open_runner(self, page_size: int, deterministic: bool) -> None:
        assert self._pool is not None
        self._adapters.clear()  # they are loaded again
        profiler = Profiler(lambda: None, str(self.link.device))
        how: dict[str, Any] = {"deterministic": deterministic, "profiler": profiler, "link": self.link}
        if self._triton:
            from headway.runtime.runners.parallel.cuda import RankCudaRunner

            self._runner = RankCudaRunner(self.decoder, self._pool, page_size, **how)
        else:
            self._runner = RankRunner(self.decoder, self._pool, page_size, **how)
