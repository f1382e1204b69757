"""What the pages about the server list is what the code has: options, limits, metrics, paths, fields, codes, tests."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import typer
from prometheus_client.parser import text_string_to_metric_families

from headway.cli.main import build_app
from headway.program.engine import EngineStats
from headway.server.anthropic.request_schema import MessagesRequest
from headway.server.api.request_schema import (
    IGNORED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    RequestSchema,
    SamplingFields,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
)
from headway.server.app import create_app
from headway.server.keys import TenantLimits
from headway.server.metrics import VLLM_NAMES, Metrics
from headway.server.ollama.request_schema import LOADING, OllamaChatRequest, OllamaGenerateRequest, OllamaOptions
from headway.server.responses.request_schema import ResponseRequest
from headway.server.serving import Serving
from headway.server.settings import ServerSettings

ROOT = Path(__file__).parents[2]
SERVING, CLIENTS, SECURITY = (ROOT / "docs" / f"{name}.md" for name in ("serving", "clients", "security"))
SERVER = ROOT / "src/headway/server"
APIS = ("openai", "responses", "anthropic", "ollama", "batches", "audio")
FOLDERS = ("", *(f"{name}/" for name in APIS), "api/", "chats/", "middleware/", "models/")
NAME = re.compile(r"`([^`]+)`")
STATES = {
    state
    for part in ("state", "_state")
    for state in re.findall(r'"(\w+)"', inspect.getsource(vars(Serving)[part].fget))
}


def section(page: Path, heading: str) -> str:
    """The text under a heading, up to the next one of any level."""
    result = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert result is not None, heading
    return result[1]


def rows(text: str, first: str) -> list[list[str]]:
    """The rows of the table whose first column has this head."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in _table(lines[start + 2 :])]


def _table(lines: list[str]) -> Iterator[str]:
    for line in lines:
        if not line.startswith("|"):
            return
        yield line


def named(table: list[list[str]], column: int = 0) -> list[str]:
    return [name for row in table for name in NAME.findall(row[column])]


def field_names(model: type[RequestSchema]) -> set[str]:
    return {info.alias or name for name, info in model.model_fields.items()}


# -- serving -----------------------------------------------------------------------------------------------------------


def test_every_option_is_listed_with_its_default() -> None:
    command = typer.main.get_command(build_app()).commands["serve"]  # type: ignore[attr-defined]
    options = {option.opts[0]: option.default for option in command.params if "--help" not in option.opts}
    table = rows(section(SERVING, "Options"), "option")
    assert sorted(named(table)) == sorted(options)
    for row in table:
        for name in NAME.findall(row[0]):
            default = options[name]
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert row[1] == ("" if default in (None, False) else shown), name


def test_every_limit_is_listed_with_its_default() -> None:
    limits = {field.name: field.default for field in fields(ServerSettings) if field.type in ("int", "float")}
    del limits["port"]
    listed = {NAME.findall(name)[0]: float(default) for name, default, _ in rows(section(SERVING, "Limits"), "limit")}
    assert listed == limits


def test_every_limit_of_a_key_is_listed() -> None:
    assert named(rows(section(SERVING, "Keys"), "limit of a key")) == [field.name for field in fields(TenantLimits)]


def test_every_path_is_listed() -> None:
    def nothing() -> None:
        raise AssertionError("no engine is opened")

    app = create_app(ServerSettings(), nothing)  # type: ignore[arg-type]
    paths = {f"{method.upper()} {path}" for path, about in app.openapi()["paths"].items() for method in about}
    listed = {name for name in named(rows(section(SERVING, "Serving"), "path")) if "/lab" not in name}
    assert listed == paths | {f"GET {app.openapi_url}"}


def test_every_metric_is_listed_under_both_names() -> None:
    stats = EngineStats(**{field.name: 1 for field in fields(EngineStats)})
    model = SimpleNamespace(name="m", state="ready", bytes=1, stats=lambda: stats)
    models: Any = SimpleNamespace(default=model, all=lambda: (model,), budget=1, loads=1, unloads=1, failed_loads=1)
    table = rows(section(SERVING, "Monitoring"), "metric")
    assert set(named(table)) == _exposed(Metrics("headway", models))
    other = {NAME.findall(ours)[0]: (NAME.findall(theirs) or NAME.findall(ours))[0] for ours, theirs, _ in table}
    assert set(other.values()) == _exposed(Metrics("vllm", models))
    for name, theirs in VLLM_NAMES.items():
        assert (name, theirs) in other.items() or (f"{name}_total", f"{theirs}_total") in other.items()


def _exposed(metrics: Metrics) -> set[str]:
    families = text_string_to_metric_families(metrics.text().decode())
    return {_with_end(one.name, "_total" if one.type == "counter" else "") for one in families} - _created(metrics)


def _created(metrics: Metrics) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+_created) ", metrics.text().decode(), re.MULTILINE))


def _with_end(name: str, like: str) -> str:
    return name if not like.endswith("_total") or name.endswith("_total") else f"{name}_total"


def test_every_state_is_listed() -> None:
    assert set(named(rows(section(SERVING, "Health"), "status"))) == STATES


# -- clients -----------------------------------------------------------------------------------------------------------


def test_fields_without_effect_are_those_of_the_list() -> None:
    listed = section(CLIENTS, "Accepted without effect").strip().splitlines()[-1]
    assert tuple(NAME.findall(listed)) == IGNORED


def test_every_field_has_its_meaning() -> None:
    common = {*named(rows(section(CLIENTS, "Of completions and chats"), "field")), *IGNORED}
    assert common == field_names(GenerationRequest)
    for heading, model in (("Of completions", CompletionRequest), ("Of chats", ChatRequest)):
        own = named(rows(section(CLIENTS, heading), "field"))
        assert len(own) == len(set(own))
        assert set(own) == field_names(model) - common


def test_every_field_of_responses_has_its_meaning() -> None:
    page = section(CLIENTS, "The Responses API")
    listed = {*named(rows(page, "field")), *IGNORED}
    assert field_names(ResponseRequest) - field_names(SamplingFields) <= listed
    assert field_names(SamplingFields) <= field_names(GenerationRequest)


def test_every_field_of_other_apis_has_its_meaning() -> None:
    listed = set(named(rows(section(CLIENTS, "anthropic"), "field")))
    assert field_names(MessagesRequest) - field_names(SamplingFields) == listed
    table = rows(section(CLIENTS, "ollama"), "field")
    assert field_names(OllamaChatRequest) | field_names(OllamaGenerateRequest) == set(named(table))
    options = next(set(NAME.findall(row[1])) for row in table if row[0] == "`options`")
    assert field_names(OllamaOptions) - set(LOADING) == options - {"max_tokens", "repetition_penalty"}


def test_every_field_of_tokens_has_its_meaning() -> None:
    table = rows(section(CLIENTS, "Of tokens"), "field")
    for path, model in (("/tokenize", TokenizeRequest), ("/detokenize", DetokenizeRequest)):
        listed = [name for row in table if path in row[1] or row[1] == "both" for name in NAME.findall(row[0])]
        assert set(listed) == field_names(model)


def test_fields_inside_fields_are_named() -> None:
    text = section(CLIENTS, "Of completions and chats")
    for model in (StreamOptions, StructuredOutputs):
        assert field_names(model) <= set(NAME.findall(text))
    sent_back = {"annotations", "audio", "parsed"}  # what the classes of clients add
    assert field_names(ChatMessage) - sent_back <= set(NAME.findall(section(CLIENTS, "Of chats")))


def test_every_code_of_an_error_is_listed() -> None:
    """Those that stand in the code, and a server's states, which are codes too."""
    created = {(status, code) for status, code in _codes() if code is not None}
    created |= {(503, state) for state in (STATES | {"absent"}) - {"ready"}}  # a model may be absent
    table = rows(section(CLIENTS, "Errors"), "status")
    assert {(int(row[0]), code) for row in table for code in NAME.findall(row[1])} == created


def _codes() -> Iterator[tuple[int, str | None]]:
    """Status and code of every error that is made with both written out."""
    for path in sorted(path for folder in FOLDERS for path in SERVER.glob(f"{folder}*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                code = next((word.value for word in node.keywords if word.arg == "code"), None)
                match node.func.id, node.args:
                    case "ApiError", [ast.Constant(value=int(status)), *_]:
                        yield status, _text(code)
                    case "bad_request", [_, _, third]:
                        yield 400, _text(third)
                    case "bad_request", _:
                        yield 400, _text(code)
                    case "_queue_full", [_, second, *_]:
                        yield 429, _text(second)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


# -- security ----------------------------------------------------------------------------------------------------------


def test_every_guarantee_names_tests_that_exist() -> None:
    text = SECURITY.read_text()
    guarantees = re.findall(r"^\| (?!guarantee|---).*", text, re.MULTILINE)
    assert len(guarantees) > 20
    assert [line for line in guarantees if not re.search(r"`test_\w+`", line)] == []
    defined = [name for path in (ROOT / "tests").rglob("test_*.py") for name in _functions(path)]
    assert [name for name in re.findall(r"`(test_\w+)`", text) if defined.count(name) != 1] == []


def _functions(path: Path) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
