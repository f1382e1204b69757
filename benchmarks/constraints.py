"""The cost of a constraint per token with SmolLM2's vocabulary of 49,152, and how much of it overlaps with the device.

    python benchmarks/constraints.py              # the default model
    python benchmarks/constraints.py --quick      # a few tokens: does it run?

`alone` walks each grammar with random allowed tokens, from fresh copies: µs per token for mask() + accept(). `first`
is compiling it once, `copy` is a fork. The claim: under 1,000 µs.

`together` advances the grammars of many rows by one token each, as the thread next to the device does: µs per row
for accept() + mask() one by one and batched, and the calling thread's part of the latter.

`generating` is the default model under the grammar with `rows` concurrent sequences: the constraint's time per token;
the part of it in the thread that overlaps with the device (for masks that leave much open); how long the device
waited for that thread; and the hidden share, the overlapped time less the wait, of the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import headway as hw
from headway.base.system.machine import read_machine
from headway.program.constraints import async_mask
from headway.program.constraints.async_mask import GrammarMask
from headway.program.constraints.batched_masks import accept_all, masks_of
from headway.program.constraints.constraint import GrammarMatcher, compile
from headway.program.constraints.grammar import Grammar
from headway.text import Tokenizer

RESULTS = Path(__file__).parent / "results"
TEXT = {"type": "string", "maxLength": 40}
ITEM = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
        "count": {"type": "integer"},
        "note": TEXT,
    },
    "required": ["sku", "count"],
    "additionalProperties": False,
}
WIDE = {"type": "object", "properties": {f"p{i}": TEXT for i in range(200)}}
TREE = {
    "type": "object",
    "properties": {"v": TEXT, "c": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["v", "c"],
}
GRAMMARS = {
    "any JSON object": Grammar.json_object(),
    "person": Grammar.json_schema(
        {"type": "object", "properties": {"name": TEXT, "age": {"type": "integer"}}, "required": ["name", "age"]}
    ),
    "order of items": Grammar.json_schema({"type": "array", "items": ITEM, "minItems": 3}),
    "200 optional properties": Grammar.json_schema(
        {"type": "object", "properties": {f"p{i}": TEXT for i in range(200)}}
    ),
    "tree by reference": Grammar.json_schema(TREE),
    "free text (regex)": Grammar.regex("(?s).{1,2000}"),
    "e-mail (regex)": Grammar.regex(r"[a-z0-9._]{1,30}@[a-z0-9-]{1,30}\.(com|org|net)"),
    "10,000 choices": Grammar.choices(f"choice number {i * 7919}" for i in range(10_000)),
    "arithmetic (Lark)": Grammar.lark('start: t (("+"|"*") t)*\nt: /[0-9]+/ | "(" start ")"'),
}
GENERATED = ("any JSON object", "person", "order of items", "free text (regex)", "e-mail (regex)")


def main() -> None:
    options = _options()
    tokens, drawn, rows, names = (40, 12, (2,), GENERATED[2:4]) if options.quick else (2000, 96, (1, 8, 32), GENERATED)
    with hw.Engine("smollm2", threads=options.threads, pages=2048) as engine:
        compile(Grammar.regex("a"), engine.tokenizer, engine.vocab_size)  # the vocabulary itself is prepared once
        alone = [walked(name, engine.tokenizer, tokens) for name in GRAMMARS]
        show("alone", alone)
        together = [moved(name, engine.tokenizer, count, drawn) for name in names for count in (1, 8, 64)]
        show("together", together)
        generating = [generated(engine, name, count, drawn) for name in names for count in rows]
        show("generating", generating)
    options.out.mkdir(parents=True, exist_ok=True)
    data = {
        "machine": asdict(read_machine()),
        "results": {"alone": alone, "together": together, "generating": generating},
    }
    (options.out / "constraints.json").write_text(json.dumps(data, indent=1, default=str) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quick", action="store_true", help="a few tokens, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def show(title: str, table: list[dict[str, Any]]) -> None:
    names = list(table[0])
    print(f"\n{title}\n{names[0]:26}" + "".join(f"{name:>14}" for name in names[1:]))
    for row in table:
        print(f"{row[names[0]]:26}" + "".join(f"{row[name]:14.1f}" for name in names[1:]))


def walked(name: str, tokenizer: Tokenizer, tokens: int) -> dict[str, Any]:
    """One grammar by itself."""
    began = time.perf_counter()
    compile(GRAMMARS[name], tokenizer, tokenizer.vocab_size)
    first = (time.perf_counter() - began) * 1e3
    costs, copies = measure(GRAMMARS[name], tokenizer, tokens)
    return {
        "grammar": name,
        "first ms": first,
        "copy µs": copies.mean(),
        "mean µs": costs.mean(),
        "p99 µs": float(np.percentile(costs, 99)),
        "worst µs": costs.max(),
    }


def measure(grammar: Grammar, tokenizer: Tokenizer, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each mask() + accept(), and of each fresh copy."""
    rng, costs, copies = np.random.default_rng(0), [], []
    while len(costs) < tokens:
        began = time.perf_counter()
        constraint = compile(grammar, tokenizer, tokenizer.vocab_size)
        copies.append((time.perf_counter() - began) * 1e6)
        for _ in range(200):
            began = time.perf_counter()
            constraint.mask()
            asked = time.perf_counter() - began
            token = _any(constraint, tokenizer, rng)
            if token is None:
                break
            began = time.perf_counter()
            constraint.accept(token)
            costs.append((asked + time.perf_counter() - began) * 1e6)
    return np.array(costs), np.array(copies)


def moved(name: str, tokenizer: Tokenizer, rows: int, tokens: int) -> dict[str, Any]:
    """One grammar in `rows` rows, each with its own text: medians of interleaved steps of both ways."""
    rng, grammars = np.random.default_rng(0), list[GrammarMatcher]()
    spent: dict[str, list[float]] = defaultdict(list)
    for turn in range(2 * tokens):
        if turn % 24 == 0:  # texts that have come to their end begin anew with the others
            grammars = [compile(GRAMMARS[name], tokenizer, tokenizer.vocab_size) for _ in range(rows)]
        drawn = [(grammar, _any(grammar, tokenizer, rng)) for grammar in grammars]
        steps = [(grammar, token) for grammar, token in drawn if token is not None]
        wall, own = time.perf_counter(), time.thread_time()
        if turn % 2:
            accept_all(steps)
            masks_of([grammar for grammar, _ in steps])
            spent["own"].append((time.thread_time() - own) / max(1, len(steps)))
        else:
            for grammar, token in steps:
                grammar.accept(token)
                grammar.mask()
        spent["at once" if turn % 2 else "one by one"].append((time.perf_counter() - wall) / max(1, len(steps)))
    costs = {f"{what} µs": float(np.median(spent[what])) * 1e6 for what in ("one by one", "at once", "own")}
    return {"grammar": name, "rows": rows, **costs}


def _any(grammar: GrammarMatcher, tokenizer: Tokenizer, rng: np.random.Generator) -> int | None:
    """A token that the grammar allows, if there is one that does not end it."""
    allowed = np.flatnonzero(np.unpackbits(grammar.mask().view(np.uint8), bitorder="little"))
    allowed = allowed[~np.isin(allowed, tokenizer.eos_ids)]
    return int(rng.choice(allowed)) if len(allowed) else None


def generated(engine: hw.Engine, name: str, rows: int, tokens: int) -> dict[str, Any]:
    """The model under a grammar, `rows` sequences at once."""

    async def one(number: int) -> int:
        async with engine.context().fill(f"Text number {number}:") as context:
            sampler = hw.Multinomial(temperature=1.0, seed=number)
            return len(await context.generate(sampler, max_tokens=tokens, constrain=GRAMMARS[name]).tokens())

    async def all_of_them(_: hw.Engine) -> int:
        return sum(await asyncio.gather(*(one(number) for number in range(rows))))

    with clocks() as spent:
        began = time.perf_counter()
        count = engine.run(all_of_them)
        seconds = time.perf_counter() - began
    whole, beside = spent["own"] + spent["beside"], spent["beside"]
    return {
        "grammar": name,
        "rows": rows,
        "tokens": count,
        "tokens/s": count / seconds,
        "own µs": whole / count * 1e6,
        "beside µs": beside / count * 1e6,
        "waited µs": spent["waited"] / count * 1e6,
        "hidden %": 100 * max(0.0, beside - spent["waited"]) / whole,
    }


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Seconds of all constraints, in the thread beside the device and elsewhere, and of the device waiting for it."""
    spent: dict[str, float] = defaultdict(float)
    own = [(GrammarMatcher, name, "own") for name in ("accept", "_compute", "forced")]
    parts: list[tuple[Any, str, str]] = [*own, (async_mask, "compute", "beside"), (GrammarMask, "result", "waited")]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in parts]
    for owner, name, what in parts:
        setattr(owner, name, _timed(getattr(owner, name), spent, what))
    try:
        yield spent
    finally:
        for owner, name, plain in before:
            setattr(owner, name, plain)


def _timed(call: Callable[..., Any], spent: dict[str, float], what: str) -> Callable[..., Any]:
    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return call(*args)
        finally:
            if what != "own" or threading.current_thread().name != "headway-masks":  # what that one calls is a part
                spent[what] += time.perf_counter() - began

    return timed


if __name__ == "__main__":
    main()
