"""The guides name every field of every result: each has a table there, with one row a field."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import headway as hw
from headway.base.events import StepEvent
from headway.models.capabilities import Capabilities
from headway.program.engine import EngineStats
from headway.program.model.loaded import EngineInfo
from headway.runtime.passes import PassStats
from headway.runtime.profile import Profile

DOCS = Path(__file__).parents[1] / "docs"
# What heads the table, its page, and whose fields it has.
TABLES: list[tuple[str, str, type]] = [
    ("Step", "generation", hw.Step),
    ("Generation", "generation", hw.Generation),
    ("Prepared", "generation", hw.Prepared),
    ("Generations", "beams", hw.Generations),
    ("Continuation", "beams", hw.Continuation),
    ("gen.speculation", "generation", hw.SpeculationStats),
    ("Ranked", "samplers-and-probes", hw.Ranked),
    ("Rank", "samplers-and-probes", hw.Rank),
    ("out.stats", "forward", PassStats),
    ("engine.stats()", "scheduling", EngineStats),
    ("StepEvent", "scheduling", StepEvent),
    ("ChatReply", "chat", hw.ChatReply),
    ("engine.info", "cpu", EngineInfo),
    ("engine.capabilities", "models", Capabilities),
    ("DecodeState", "sync", hw.DecodeState),
    ("engine.profile()", "sync", Profile),
]
SET_IN_INIT = {hw.Generation: {"finish"}, hw.ChatReply: {"calls", "bad", "rounds", "limits", "finish"}}
PARTS: list[type] = [
    hw.Content, hw.Reasoning, hw.ToolCallStart, hw.ToolCallArguments, hw.ToolCallEnd, hw.BadToolCall, hw.ToolResult,
    hw.ToolCall,
]  # fmt: skip


def fields(kind: type) -> set[str]:
    """The public fields of a dataclass or a named tuple, and the properties of any class."""
    own = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else []
    own += getattr(kind, "_fields", ())
    properties = [name for name, value in vars(kind).items() if isinstance(value, property)]
    return {name for name in (*own, *properties, *SET_IN_INIT.get(kind, ())) if not name.startswith("_")}


def rows(page: str, heading: str) -> list[str]:
    """The names in the first column of the table with this heading."""
    text = (DOCS / f"{page}.md").read_text()
    found = re.findall(rf"^\| `{re.escape(heading)}` \| \|\n\| --- \| --- \|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert len(found) == 1, f"docs/{page}.md has {len(found)} tables headed {heading}"
    return re.findall(r"^\| `(\w+)` \| \S", found[0], re.MULTILINE)


@pytest.mark.parametrize(("heading", "page", "kind"), TABLES, ids=[heading for heading, _, _ in TABLES])
def test_a_table_has_every_field_once(heading: str, page: str, kind: type) -> None:
    named = rows(page, heading)
    assert len(named) == len(set(named))
    assert set(named) == fields(kind)


@pytest.mark.parametrize("kind", PARTS, ids=[kind.__name__ for kind in PARTS])
def test_the_parts_of_a_reply_have_their_fields_in_order(kind: type) -> None:
    (row,) = re.findall(rf"^\| `{kind.__name__}`[^|]*\| (.*) \|$", (DOCS / "chat.md").read_text(), re.MULTILINE)
    assert re.findall(r"`(\w+)`", row) == [field.name for field in dataclasses.fields(kind)]


def test_the_counts_of_a_pipeline_are_all_named() -> None:
    code = (Path(hw.__file__).parent / "pipelines/pipeline.py").read_text()
    body = code[code.index("def stats(self)") : code.index("def close(self)")]
    assert rows("pipelines", "pipeline.stats()") == re.findall(r'^ +"(\w+)": ', body, re.MULTILINE)
