"""A server with two keys that runs programs in the sandbox, beside a small model. The guest is built if need be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import headway as hw
from headway.server.keys import add_key
from support.live import Live, live
from support.programs import ProgramServer, left_over, settled, workers
from support.small import small_engine

CPU = 1.0  # seconds that a program may compute
MEMORY = 96 << 20


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    return file, add_key(file, "ann"), add_key(file, "bob")


@pytest.fixture(scope="module")
def served(guest: Path, keys: tuple[Path, str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    engine = small_engine(tmp_path_factory.mktemp("small") / "model")
    limits = {"max_program_cpu": CPU, "max_program_memory": MEMORY, "max_programs": 8, "max_program_output": 64 << 10}
    folder = tmp_path_factory.mktemp("installed")
    with live(engine, key_file=keys[0], programs="sandbox", program_dir=folder, **limits) as server:
        yield server
    assert workers() == []


@pytest.fixture(scope="module")
def ann(served: Live, keys: tuple[Path, str, str]) -> ProgramServer:
    return ProgramServer(served, keys[1])


@pytest.fixture(scope="module")
def bob(served: Live, keys: tuple[Path, str, str]) -> ProgramServer:
    return ProgramServer(served, keys[2])


@pytest.fixture(scope="module")
def alone(served: Live) -> list[int]:
    """What the bystander gets while nobody else is there."""
    return served.engine.run(bystander)


@pytest.fixture
def unharmed(served: Live, alone: list[int]) -> Iterator[None]:
    """While the test runs, a bystander gets the tokens that it gets alone; after it, nothing is left."""
    before, over, seen = left_over(), threading.Event(), []

    def watch() -> None:
        while not over.is_set() or not seen:
            seen.append(served.engine.run(bystander))
            over.wait(0.02)

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    over.set()
    thread.join()
    assert all(tokens == alone for tokens in seen)
    settled(before, served)


async def bystander(engine: hw.Engine) -> list[int]:
    async with engine.context(seed=7) as ctx:
        ctx.fill(range(40))
        return await ctx.generate(hw.Multinomial(), max_tokens=24, stop_only=True).tokens()
