"""`headway models`: list, fetch, show and delete models in the store."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from headway.base.errors import InvalidInput
from headway.cli.facts import ModelFacts, read_model
from headway.cli.flags.declare import Argument, Option
from headway.cli.flags.shared import Json, Quiet
from headway.cli.terminal.render import counted, emit_json, fetching, note, show_pairs, show_table, size
from headway.models.hub import store
from headway.models.hub.registry import DEFAULT_MODEL, KNOWN

HELP = "List, fetch, show and remove models."

Name = Annotated[str | None, Argument(metavar="MODEL", help="A known name or a hub id org/name.")]
Anything = Annotated[str | None, Argument(metavar="MODEL", help="A known name, a path or a hub id org/name.")]
Flag = Annotated[str | None, Option("--model", "-m", metavar="MODEL", help="The same, as a flag.")]


def list_(json: Json = False) -> None:
    """List the known models and those pulled from the hub."""
    models = store.list_models()
    if json:
        emit_json([asdict(model) | {"path": str(model.path)} for model in models])
        return
    rows = [(m.name, "yes" if m.installed else "no", size(m.bytes), m.source, str(m.path)) for m in models]
    show_table(("name", "installed", "size", "source", "path"), rows, numbers=(2,))


def pull(name: Name = None, model: Flag = None, quiet: Quiet = False, json: Json = False) -> None:
    """Fetch a model into the cache, or verify the one that is there."""
    wanted = _one(name, model, default=DEFAULT_MODEL)
    with fetching() as progress:
        path = store.pull(wanted, progress=progress)
    if json:
        emit_json({"name": wanted, "path": str(path)})
    else:
        print(path)


def show(name: Anything = None, model: Flag = None, json: Json = False) -> None:
    """Show a model's family, size, shape and types. Nothing is fetched or loaded."""
    wanted = _one(name, model, default=DEFAULT_MODEL)
    facts = read_model(store.resolve(wanted, download=False))
    if json:
        emit_json(
            {"name": wanted} | asdict(facts) | {"path": str(facts.path), "stored_types": dict(facts.stored_types)}
        )
        return
    pairs: list[tuple[str, Any]] = [
        ("name", wanted),
        *([("title", KNOWN[wanted].title)] if wanted in KNOWN else []),
        ("path", facts.path),
        ("format", facts.format),
        ("family", facts.family),
        ("parameters", _parameters(facts)),
        ("weights on disk", size(facts.file_bytes)),
        ("stored as", ", ".join(f"{kind} ({counted(count, 'tensor')})" for kind, count in facts.stored_types)),
        *([("in memory", facts.in_memory)] if facts.in_memory else []),
        ("memory of weights", _weights(facts)),
        ("computed in", f"float32 on a CPU, {facts.gpu_dtype} on a GPU, unless --dtype says otherwise"),
        ("layers", f"{facts.layers}{f', {facts.recurrent_layers} of them recurrent' * bool(facts.recurrent_layers)}"),
        ("hidden size", facts.hidden_size),
        ("heads", _heads(facts)),
        ("feed-forward size", facts.intermediate_size),
        ("vocabulary", f"{facts.vocab_size:,}"),
        (
            "context",
            f"{facts.max_positions:,} positions{_windows(facts)}{facts.limit_reason and '; '}{facts.limit_reason}",
        ),
        ("memory of 1,000 tokens", _memory(facts)),
        ("computed by", _runner(facts)),
        ("not supported", "; ".join(facts.missing) or "nothing is left out"),
    ]
    show_pairs((key, str(value)) for key, value in pairs)


def _parameters(facts: ModelFacts) -> str:
    if facts.experts is None:
        return f"{facts.parameters:,}"
    count, each = facts.experts
    return f"{facts.parameters:,}, of which a token uses {facts.active_parameters:,} ({each} of {count} experts)"


def _weights(facts: ModelFacts) -> str:
    item = 4 if facts.gpu_dtype == "float32" else 2
    return (
        f"{size(facts.memory_bytes)} on a CPU, {size(item * facts.parameters)} on a GPU, unless --quantize makes less"
    )


def _heads(facts: ModelFacts) -> str:
    if facts.latent:
        return f"{facts.heads} queries; latent attention, with one vector of {facts.head_dim} numbers a slot"
    keys = f", {facts.kv_heads} keys, {facts.head_dim} wide"
    if facts.head_shapes:
        parts = (f"{keys} keys, {dim} wide, in {counted(layers, 'layer')}" for layers, keys, dim in facts.head_shapes)
        keys = f"; {'; '.join(parts)}"
    shared = facts.sharing_layers
    return f"{facts.heads} queries{keys}" + (f"; {counted(shared, 'layer')} with keys of another" if shared else "")


def _windows(facts: ModelFacts) -> str:
    layers, widest = facts.windows
    seen = f"a chunk of {widest:,}" if facts.chunked else f"the last {widest:,}"
    return f"; {counted(layers, 'layer')} see{'s' if layers == 1 else ''} {seen}" if layers else ""


def _memory(facts: ModelFacts) -> str:
    kv = facts.kv_values_per_token
    pages = f"{size(4000 * kv)} in float32, {size(2000 * kv)} in {facts.gpu_dtype}"
    if not facts.recurrent_layers:
        return pages
    return f"{pages}; and {size(4 * facts.state_values)} of recurrent state a sequence, at least"


def _runner(facts: ModelFacts) -> str:
    if facts.why_not_native is not None:
        return f"torch, on any device: the native step does not serve; {facts.why_not_native}"
    if facts.why_not_triton is None:
        return "the native step on a CPU, Triton kernels on a CUDA device"
    return f"the native step on a CPU, torch on a CUDA device: Triton kernels do not serve; {facts.why_not_triton}"


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


COMMANDS = {"list": list_, "pull": pull, "show": show, "rm": rm}
