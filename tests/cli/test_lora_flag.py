"""`--lora` of `headway run` and `headway chat`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import headway as hw
from headway.base.errors import InvalidInput
from headway.models.adapters.source import AdapterSource
from headway.models.config import read_config
from support.adapter_files import saved_adapter
from support.small import small_folder

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_adapters_change_the_answer_as_in_a_program(headway: Run, tmp_path: Path) -> None:
    model = small_folder(tmp_path / "model")
    folders = [saved_adapter(tmp_path / name, read_config(model), seed=i) for i, name in enumerate(("red", "blue"))]

    adapters = [(hw.Adapter.load(folders[0]), 1.0), (hw.Adapter.load(folders[1]), 0.5)]

    async def program(engine: hw.Engine, chats: bool, uses: list[tuple[hw.Adapter, float]]) -> list[int]:
        async with engine.context() as ctx:
            ctx.user("hi") if chats else ctx.fill("the fox")
            return await ctx.generate(hw.Argmax(), max_tokens=8, adapter=uses).tokens()

    with hw.Engine(model, threads=1, pages=64) as engine:
        continued, replied, plain = (engine.run(program, *how) for how in ((0, adapters), (1, adapters), (0, [])))
    assert continued != plain
    flags = ("--lora", f"red={folders[0]}", "--lora", f"{folders[1]}:0.5")
    command = ("run", "--raw", "--json", "--model", str(model), "--max-tokens", "8", "the fox")
    found = headway(*command, *flags)
    assert found.returncode == 0, found.stdout
    assert json.loads(found.stdout)["tokens"] == continued
    chat = headway("chat", "--json", "--model", str(model), "-n", "8", "-t", "0", *flags, input="hi\n")
    assert json.loads(chat.stdout)["tokens"] == replied
    missing = headway(*command, "--lora", "x=nowhere")
    assert (missing.returncode, "nowhere" in missing.stdout + missing.stderr) == (2, True)


def test_a_folder_from_which_nobody_could_load_is_refused(headway: Run, tmp_path: Path) -> None:
    done = headway("serve", "--lora-dir", str(tmp_path))
    assert (done.returncode, "give --keys FILE too" in done.stderr) == (2, True)


def test_what_the_flag_reads(tmp_path: Path) -> None:
    odd = tmp_path / "a=b:c"
    odd.mkdir()
    assert AdapterSource.of(str(odd)) == AdapterSource("a=b:c", odd)
    assert AdapterSource.of("x=some/where:0.5") == AdapterSource("x", Path("some/where"), 0.5)
    assert AdapterSource.of("some/where.gguf:-2") == AdapterSource("where", Path("some/where.gguf"), -2.0)
    for wrong in ("", "x=", "x y=f", "x=f:much", "x=f:nan", "x=f:inf", "x=f:1e7"):
        with pytest.raises(InvalidInput):
            AdapterSource.of(wrong)
    with pytest.raises(InvalidInput, match=r"the scale -1e7; it must be in \[-1e\+06, 1e\+06\]"):  # as in a pass
        AdapterSource.of("x=f:-1e7")
