"""Several small models with random weights, served by one process."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import headway as hw
from headway.models.weights.load import LoadProgress
from headway.server import lab
from headway.server.app import create_app
from headway.server.models import ModelFolder, ModelSource, ModelSources, ServedModels
from headway.server.models.sources import read_sizes
from headway.server.settings import ServerSettings
from support.big_tokenizer import big_tokenizer
from support.live import Asker, serving
from support.small import PROMPT, small_folder

MIB = 1 << 20
POSITIONS = 16_384  # so that a stream lasts as long as a test wants
PAGES = POSITIONS // 16 + 16
ASKED = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class Loader:
    """Opens engines of folders, counts them, and holds or fails a load when a test wants that."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.failing: dict[str, Exception] = {}
        self.gates: dict[str, threading.Event] = {}

    def opener(self, path: Path) -> Callable[[int | None, LoadProgress], hw.Engine]:
        def open(memory: int | None, progress: LoadProgress) -> hw.Engine:
            name = path.name
            progress(1, 4)
            if (gate := self.gates.get(name)) is not None:
                assert gate.wait(120)
            if name in self.failing:
                raise self.failing[name]
            self.opened.append(name)
            return hw.Engine(path, threads=1, pages=PAGES, progress=progress)

        return open

    def source(self, path: Path, **more: Any) -> ModelSource:
        return ModelSource((path.name,), self.opener(path), lambda: read_sizes(path), path=path, **more)

    def folder(self, root: Path, **more: Any) -> ModelFolder:
        return ModelFolder(root, self.opener, **{"limit": 16, **more})


class Many(Asker):
    """A server of several models, and what opens them."""

    def __init__(self, port: int, models: ServedModels, loader: Loader) -> None:
        super().__init__(port)
        self.models, self.loader = models, loader

    def said(self, model: str | None, **more: Any) -> str:
        """What a model says after the prompt."""
        named = {} if model is None else {"model": model}
        return self.complete(**(ASKED | named | more))["choices"][0]["text"]

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.get("/v1/models").json["data"]}

    def loaded(self) -> set[str]:
        return {name for name, state in self.states().items() if state == "ready"}

    def settled(self) -> None:
        """Wait until nothing loads, drains or is used."""
        self.until(lambda: all(m.state in ("absent", "ready") and not m.requests for m in self.models.all()))


def model_folders(root: Path, *names: str) -> dict[str, Path]:
    """A folder for each name, each with other weights."""
    first = small_folder(root / names[0], max_position_embeddings=POSITIONS).rename(root / "made")
    (root / names[0]).rmdir()
    first = first.rename(root / names[0])
    for seed, name in enumerate(names[1:], 1):
        shutil.copytree(first, root / name)
        _reseed(root / name / "model.safetensors", seed)
    return {name: root / name for name in names}


def _reseed(path: Path, seed: int) -> None:
    """Other random weights of the same shapes."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    generator, tensors = np.random.default_rng(seed), load_file(path)
    save_file(
        {name: generator.permutation(tensor.ravel()).reshape(tensor.shape) for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def enlarge(folder: Path, count: int) -> None:
    """Give a model a vocabulary of `count` tokens and more, with merges, and weights for them."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    made = big_tokenizer(count)
    (folder / "tokenizer.json").write_text(json.dumps(made, ensure_ascii=False))
    config = json.loads((folder / "config.json").read_text())
    rows, size = count + len(made["added_tokens"]), config["vocab_size"]
    path = folder / "model.safetensors"
    tensors = {
        name: np.resize(tensor, (rows, *tensor.shape[1:])) if len(tensor) == size else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": rows}))


@contextmanager
def many(sources: ModelSources, loader: Loader, **settings: Any) -> Iterator[Many]:
    """Serve several models; their engines are closed at the end."""
    how = ServerSettings(**{"port": 0, **settings})
    app = create_app(how, sources, routers=[lab.router])
    with serving(how, app) as port:
        yield Many(port, app.state.serving.models, loader)
    assert all(model.loaded is None for model in app.state.serving.models.all())


def alone(path: Path) -> str:
    """What a model says after the prompt, in an engine of its own."""
    with hw.Engine(path, threads=1, pages=PAGES) as engine:

        async def program(engine: hw.Engine) -> str:
            async with engine.context() as ctx:
                generation = ctx.fill(PROMPT).generate(hw.Argmax(), max_tokens=8, stop_only=True)
                return await generation.text()

        return engine.run(program)


def wait_until(condition: Callable[[], Any], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
