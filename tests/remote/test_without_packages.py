"""The client where nothing is installed but itself and websockets: no numpy, no torch, no package of the engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import headway as hw
from headway.testing import random_model
from support.live import live

BLOCKED = """
import sys

class NoPackages:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"headway", "websockets", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(f"{name} is not installed")

sys.meta_path.insert(0, NoPackages())
"""
PROGRAM = """
import headway as hw

async def program(engine):
    async with engine.context(seed=3) as ctx:
        fwd = ctx.fill([1, 2, 3]).forward().input([5, 6]).attention_mask(hw.Mask.sink(2, 8))
        token = fwd.sample([-1], hw.Multinomial())
        top, logits = fwd.probe(-1, hw.Distribution(k=3)), fwd.probe(-1, hw.Logits())
        out = await fwd.execute()
        fork = ctx.fork()
        grown = await fork.generate(hw.TopP(0.9), max_tokens=6).tokens()
        fork.release()
        return [out.token(token), [int(id) for id in out.distribution(top)[0]], len(out.logits(logits)), list(grown)]
"""
CONNECTS = """
import json
for url in sys.argv[1:]:
    with hw.connect(url) as engine:
        print(json.dumps(engine.run(program)))
assert not {"numpy", "torch", "tokenizers", "pydantic"} & set(sys.modules)
"""


def test_a_program_gives_what_it_gives_with_every_package(tmp_path: Path) -> None:
    module: dict[str, Any] = {}
    exec(PROGRAM, module)
    with live(hw.Engine(random_model(), pages=64, threads=1), session_socket=tmp_path / "socket") as server:
        expected = json.loads(json.dumps(server.engine.run(module["program"]), default=int))
        command = [sys.executable, "-c", BLOCKED + PROGRAM + CONNECTS, f"unix:{tmp_path / 'socket'}", server.url]
        environment = {**os.environ, "PYTHONPATH": str(Path(hw.__file__).parents[1])}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert [json.loads(line) for line in done.stdout.splitlines()] == [expected, expected]
        server.until(server.is_quiet)
