"""`headway serve --lora … --speculate …`: each adapter is a model name, and the text is the same with any drafter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server_process import Server

import headway as hw
from support.adapter_files import saved_adapter
from support.forked import forked

ASKED: dict[str, Any] = {"prompt": 3 * "One fish, two fish, red fish.\n", "max_tokens": 8, "temperature": 0}


@pytest.mark.parametrize("drafter", ["prompt-lookup", "layers:28", "smollm2"])
def test_adapters_are_model_names_under_any_drafter(smollm2: hw.Engine, drafter: str, tmp_path: Path) -> None:
    folder = saved_adapter(tmp_path / "red", smollm2.config, seed=1)
    adapter = hw.Adapter.load(folder)

    async def program(engine: hw.Engine, scale: float) -> str:
        async with engine.context().fill(ASKED["prompt"]) as ctx:
            return await ctx.generate(hw.Argmax(), max_tokens=8, adapter=(adapter, scale)).text()

    names = {"smollm2": 0.0, "red": 1.0, "half": 0.5}
    expected = {name: smollm2.run(program, scale) for name, scale in names.items()}
    flags = ("--lora", f"red={folder}", "--lora", f"half={folder}:0.5", "--speculate", drafter)
    command = forked("-m", "headway.cli.main", "serve", "--model", "smollm2", "--port", "0", "--json", "--pages", "128")
    server = Server([*command, *flags])
    try:
        server.ready()
        json = {"Content-Type": "application/json"}
        for name, text in expected.items():
            found = server.ask("POST", "/v1/completions", {"model": name, **ASKED}, json).json
            assert (found["model"], found["choices"][0]["text"]) == (name, text)
        assert {card["id"] for card in server.get("/v1/models").json["data"]} == {*names}
        counts = dict(
            re.findall(r"^headway_(\w*draft_tokens_total)\{.*\} (.+)$", server.get("/metrics").body.decode(), re.M)
        )
        assert counts.keys() == {"draft_tokens_total", "accepted_draft_tokens_total"}
    finally:
        server.stop()
