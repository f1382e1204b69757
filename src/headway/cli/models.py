"""`headway models`: list, fetch, show and delete models in the store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from headway.base.errors import InvalidInput
from headway.cli.facts import ModelFacts, read_model
from headway.cli.options import Json, Quiet
from headway.cli.render import counted, emit_json, fetching, note, show_pairs, show_table, size
from headway.models.hub import store
from headway.models.hub.registry import DEFAULT_MODEL, KNOWN

app = typer.Typer(help="List, fetch, show and remove models.", pretty_exceptions_enable=False)

Name = Annotated[str | None, typer.Argument(metavar="MODEL", help="A known name or a hub id org/name.")]
Anything = Annotated[str | None, typer.Argument(metavar="MODEL", help="A known name, a path or a hub id org/name.")]
Flag = Annotated[str | None, typer.Option("--model", "-m", metavar="MODEL", help="The same, as a flag.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """List the known models and those pulled from the hub."""
    models = store.list_models()
    if json:
        emit_json([asdict(model) | {"path": str(model.path)} for model in models])
        return
    rows = [(m.name, "yes" if m.installed else "no", size(m.bytes), m.source, str(m.path)) for m in models]
    show_table(("name", "installed", "size", "source", "path"), rows, numbers=(2,))


@app.command()
def pull(name: Name = None, model: Flag = None, quiet: Quiet = False, json: Json = False) -> None:
    """Fetch a model into the cache, or verify the one that is there."""
    wanted = _one(name, model, default=DEFAULT_MODEL)
    with fetching() as progress:
        path = store.pull(wanted, progress=progress)
    if json:
        emit_json({"name": wanted, "path": str(path)})
    else:
        print(path)


@app.command()
def show(name: Anything = None, model: Flag = None, json: Json = False) -> None:
    """Show a model's family, size, shape and types. Nothing is fetched or loaded."""
    wanted = _one(name, model, default=DEFAULT_MODEL)
    facts = read_model(store.resolve(wanted, download=False))
    if json:
        emit_json(
            {"name": wanted} | asdict(facts) | {"path": str(facts.path), "stored_types": dict(facts.stored_types)}
        )
        return
    kv = facts.kv_values_per_token
    pairs: list[tuple[str, Any]] = [
        ("name", wanted),
        *([("title", KNOWN[wanted].title)] if wanted in KNOWN else []),
        ("path", facts.path),
        ("format", facts.format),
        ("family", facts.family),
        ("parameters", _parameters(facts)),
        ("weights on disk", size(facts.file_bytes)),
        ("stored as", ", ".join(f"{kind} ({counted(count, 'tensor')})" for kind, count in facts.stored_types)),
        ("computed in", f"float32 on a CPU, {facts.gpu_dtype} on a GPU, unless --dtype says otherwise"),
        ("layers", facts.layers),
        ("hidden size", facts.hidden_size),
        ("heads", f"{facts.heads} queries, {facts.kv_heads} keys, {facts.head_dim} wide"),
        ("feed-forward size", facts.intermediate_size),
        ("vocabulary", f"{facts.vocab_size:,}"),
        ("context", f"{facts.max_positions:,} positions{_windows(facts)}"),
        ("memory of 1,000 tokens", f"{size(4000 * kv)} in float32, {size(2000 * kv)} in {facts.gpu_dtype}"),
        ("computed by", _runner(facts)),
        ("not supported", "; ".join(facts.missing) or "nothing is left out"),
    ]
    show_pairs((key, str(value)) for key, value in pairs)


def _parameters(facts: ModelFacts) -> str:
    if facts.experts is None:
        return f"{facts.parameters:,}"
    count, each = facts.experts
    return f"{facts.parameters:,}, of which a token uses {facts.active_parameters:,} ({each} of {count} experts)"


def _windows(facts: ModelFacts) -> str:
    layers, widest = facts.windows
    return f"; {counted(layers, 'layer')} see{'s' if layers == 1 else ''} the last {widest:,}" if layers else ""


def _runner(facts: ModelFacts) -> str:
    if facts.why_not_fast is None:
        return "the native step on a CPU, Triton kernels on a CUDA device"
    return f"torch, the reference: a faster path does not serve; {facts.why_not_fast}"


@app.command()
def rm(name: Name = None, model: Flag = None, json: Json = False) -> None:
    """Delete a model from the cache."""
    wanted = _one(name, model, default=None)
    freed = store.remove(wanted)
    if json:
        emit_json({"name": wanted, "bytes_freed": freed})
    else:
        note(f"removed {wanted}, {size(freed)} freed")


def _one(argument: str | None, flag: str | None, *, default: str | None) -> str:
    if argument is not None and flag is not None and argument != flag:
        raise InvalidInput(f"two models were given, {argument!r} and {flag!r}; leave one of them out")
    name = argument if argument is not None else flag if flag is not None else default
    if name is None:
        raise InvalidInput("no model was given; `headway models list` shows what can be removed")
    return name
