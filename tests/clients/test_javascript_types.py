"""What the JavaScript client offers: every generation parameter of the table, and every verb of a session."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

import headway as hw
from headway.base.specs.generation import PARAMETERS, parameters_of
from headway.remote.protocol.values import PROBES, SAMPLERS
from headway.server.sessions import session  # noqa: F401  # with every verb
from headway.server.sessions.verbs import VERBS
from support.javascript import FOLDER

SOURCES = {path.stem: path.read_text() for path in (FOLDER / "src").glob("*.ts")}
ABSENT = {  # verbs that the client does not send, and why
    **dict.fromkeys(("context.repr", "generation.repr"), "what Python prints of an object"),
    **dict.fromkeys(("generation.prepare", "generation.take"), "steps by hand are Python's, as its README says"),
    "session.cancel": "a promise cannot be cancelled",
    **{name: "uploaded programs are written in Python" for name in VERBS if name.startswith("program.")},
}
AREAS = {"context": "context", "generation": "generation", "chat": "chat", "pages": "pages"}  # of `ask` in a file


def members(interface: str) -> dict[str, str]:
    """The members of an interface of the sources, by their names in Python: their types."""
    text = "".join(SOURCES.values())
    found = re.search(rf"interface {interface}(?: extends (\w+))? \{{\n(.*?)\n\}}", text, re.DOTALL)
    assert found is not None, interface
    own = re.findall(r"^  (\w+)\?: (.+);$", found[2], re.MULTILINE)
    return {**(members(found[1]) if found[1] else {}), **{snake(name): kind for name, kind in own}}


def snake(name: str) -> str:
    return re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)


@pytest.mark.parametrize(
    ("interface", "face", "pythons"),
    [("GenerateOptions", "generate", {"prepare"}), ("SamplingOptions", "sampler", set())],
)
def test_parameters_are_those_of_the_table(interface: str, face: str, pythons: set[str]) -> None:
    offered = members(interface)
    assert set(offered) == {parameter.name for parameter in parameters_of(face)} - pythons
    for name in offered.keys() - {"seed"}:
        parameter = PARAMETERS[name]
        if parameter.type is not object:
            words = "".join(f' | "{word}"' for word in parameter.words)
            assert offered[name] == ("boolean" if parameter.type is bool else "number") + words, name


def test_every_sampler_and_probe_has_a_function() -> None:
    for kind in (*SAMPLERS, *PROBES):
        assert re.search(rf"^export (const|function) {kind}\b", "".join(SOURCES.values()), re.MULTILINE), kind
    assert {field.name for field in fields(hw.Sampling)} == set(members("SamplingOptions"))


def test_every_verb_is_sent_or_said_to_be_absent() -> None:
    sent = {name for text in SOURCES.values() for name in re.findall(r'"(\w+\.\w+)"', text)} & set(VERBS)
    for file, area in AREAS.items():
        sent |= {f"{area}.{verb}" for verb in re.findall(r'\bask\(\s*"(\w+)"', SOURCES[file])}
    assert set(VERBS) - sent == set(ABSENT)
