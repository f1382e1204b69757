"""What a remote engine offers has the names and the signatures of what a process has; what it lacks is listed here."""

from __future__ import annotations

import gc
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import headway as hw
from headway.program.chat.reply import ChatReply
from headway.program.generation.generator import Generation
from headway.program.generation.sequences.sequences import Generations
from headway.program.kv_cache.pages import RawPages
from headway.remote.chat import RemoteChatReply
from headway.remote.context import OPTIONS, RemoteContext, RemotePages
from headway.remote.engine import RemoteEngine, RemoteTokenizer
from headway.remote.execution import RemoteExecution
from headway.remote.forward import RemoteForward
from headway.remote.generation.generator import RemoteGeneration
from headway.remote.generation.sequences import RemoteGenerations
from headway.text.tokenizer import Tokenizer
from support.through import Served

PAIRS: dict[type, type] = {
    hw.Context: RemoteContext,
    hw.Forward: RemoteForward,
    hw.Execution: RemoteExecution,
    hw.Engine: RemoteEngine,
    Generation: RemoteGeneration,
    Generations: RemoteGenerations,
    RawPages: RemotePages,
    ChatReply: RemoteChatReply,
    Tokenizer: RemoteTokenizer,
}
LACKS = {  # docs/remote.md: what is not there
    RemoteEngine: """
        busy_since cache chat_template chat_writer decoder disable_profiling enable_profiling events fingerprint
        generation_defaults is_asleep is_profiling load_adapter page_map profile sleep stream unload_adapter
        update_weights wake
    """,
    RemoteChatReply: "context",
}
ADDS = {RemoteEngine: "adapters"}
ONE = "accept forced generated prepare resume speculation stop_string"  # refused where there are several sequences


def objects(engine: Any) -> list[Any]:
    """What a program gets from an engine."""
    context = engine.context().fill([1, 2])
    forward, generation = context.forward().input([3]), context.generate(max_tokens=1)
    several = context.fork().generate(num_beams=2, max_tokens=1)
    execution = context.fork().forward().input([1]).execute()
    return [engine, context, forward, execution, execution.result(), generation, several, context.inner()]


def names(thing: Any) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def public(kind: type) -> set[str]:
    return names(kind)


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def test_the_names_are_the_same(served: Served, remote: hw.RemoteEngine) -> None:
    for here, there in zip(objects(served.engine), objects(remote), strict=True):
        kind = type(there)
        assert names(here) - names(there) == set(LACKS.get(kind, "").split()), kind
        more = set(ADDS.get(kind, "").split()) | (set(ONE.split()) if kind is RemoteGenerations else set())
        assert names(there) - names(here) <= more, kind
    gc.collect()


def test_the_guide_names_what_is_not_there() -> None:
    page = (Path(__file__).parents[2] / "docs/remote.md").read_text().partition("## What is not there")[2]
    listed = set(re.findall(r"`(?:engine\.|ctx\.)?(\w+)`", page.partition("\n## ")[0]))
    assert {name for lacking in LACKS.values() for name in lacking.split()} - {"context"} <= listed


@pytest.mark.parametrize("kind", PAIRS, ids=lambda kind: kind.__name__)
def test_the_signatures_are_the_same(kind: type) -> None:
    there = PAIRS[kind]
    for name in sorted(public(kind) & public(there)):
        mine, other = getattr(kind, name), getattr(there, name)
        if isinstance(mine, property) or not callable(mine):
            assert not callable(other), name
        elif (kind, name) == (hw.Context, "generate"):
            assert {each for each, *_ in parameters(mine)} - {"self", "unknown"} == OPTIONS | {"sampler"}
        elif (kind, name) not in ((hw.Engine, "run"), (hw.Forward, "mask_async"), (hw.Context, "execute")):
            assert parameters(mine) == parameters(other), (kind, name)
        assert (other.__doc__ or "").strip(), name
