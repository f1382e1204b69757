"""A program in the page: it runs in the browser, and its passes on the live engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lab_serving import lab_live

import headway as hw
from headway.server.keys import add_key
from headway.testing import random_model
from support.javascript import FOLDER, V, program


async def three_ways(engine: hw.Engine, prompt: list[int]) -> list[list[int]]:
    async with engine.context() as ctx:
        fwd = ctx.fill(prompt).forward()
        best = fwd.probe(-1, hw.Distribution(k=3))
        ids, _ = (await fwd.execute()).distribution(best)
        found = []
        for id in ids.tolist():
            with ctx.fork() as fork:
                found.append([id, *await fork.fill([id]).generate(hw.Argmax(), max_tokens=12).tokens()])
        return found


def test_a_program_runs_in_the_browser_on_the_live_engine(visit: Callable[..., Any], tmp_path: Path) -> None:
    engine = hw.Engine(random_model(vocab_size=97), pages=64, threads=1)
    expected = engine.run(three_ways, [5, 6, 7])
    secret = add_key(tmp_path / "keys.json", "someone")
    with lab_live(engine, model="small", key_file=tmp_path / "keys.json") as server:
        page = visit(server.url, "/lab/#program", may_refuse=True).page
        page.fill("#key", secret)
        page.keyboard.press("Enter")
        page.fill("#program-prompt", "5 6 7")
        page.click("#run-branches")
        page.locator("#result-branches li").nth(2).wait_for()
        shown = page.locator("#result-branches li span:first-child").all_inner_texts()
        assert sorted([int(id) for id in line.split()] for line in shown) == sorted(expected)
        page.click("#run-unsure")
        page.locator("#run-unsure:not([disabled])").wait_for()
        page.goto(f"{server.url}/lab/#glossary")  # the program's session ends with its page
        server.until(server.is_quiet)


@pytest.mark.slow
def test_the_client_gives_in_a_browser_what_python_gives(visit: Callable[..., Any]) -> None:
    engine = hw.Engine(random_model(vocab_size=V), pages=128, threads=1)
    expected = engine.run(program)
    source = (FOLDER / "test" / "program.mjs").read_text().replace("export ", "")
    with lab_live(engine, model="small") as server:
        page = visit(server.url, "/lab/#program").page
        page.locator("#program-prompt").wait_for()
        found = page.evaluate(f"""async () => {{
            {source}
            const hw = await import("./client/index.js");
            const engine = await hw.connect(location.origin);
            const found = await program(hw, engine);
            engine.close();
            return found;
        }}""")
        for name, value in expected.items():
            if name in ("logits", "ruled", "entropy"):
                np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-4)
            elif name not in ("top", "scores", "steps"):
                assert found[name] == value, name
        assert [tokens for tokens, _ in found["steps"]] == [tokens for tokens, _ in expected["steps"]]
        server.until(server.is_quiet)
