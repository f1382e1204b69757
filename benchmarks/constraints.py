"""What a constraint costs: microseconds per token and sequence for mask() + accept(), over SmolLM2's 49,152 words.

    python benchmarks/constraints.py

Each grammar is walked with random allowed tokens, from fresh copies, as generation would. `first` is compiling it once;
`copy` is a fork. The claim: under 1,000 µs per token.
"""

from __future__ import annotations

import time

import gguf
import numpy as np

from headway.models.store import resolve
from headway.program.constraints import compile
from headway.program.grammar import Grammar
from headway.text import Tokenizer

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
TOKENS = 2000  # per grammar


def main() -> None:
    fields = gguf.GGUFReader(resolve("smollm2")).fields
    tokenizer = Tokenizer.from_gguf({n: f.contents() for n, f in fields.items() if n.startswith("tokenizer.")})
    assert tokenizer is not None
    compile(Grammar.regex("a"), tokenizer, tokenizer.vocab_size)  # the vocabulary itself is prepared once
    print(f"{'grammar':26} {'first ms':>9} {'copy µs':>8} {'mean µs':>8} {'p99 µs':>8} {'worst µs':>9}")
    for name, grammar in GRAMMARS.items():
        began = time.perf_counter()
        compile(grammar, tokenizer, tokenizer.vocab_size)
        first = (time.perf_counter() - began) * 1e3
        costs, copies = measure(grammar, tokenizer)
        print(
            f"{name:26} {first:9.1f} {copies.mean():8.0f} {costs.mean():8.0f} "
            f"{np.percentile(costs, 99):8.0f} {costs.max():9.0f}"
        )


def measure(grammar: Grammar, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Microseconds of each mask() + accept(), and of each fresh copy."""
    rng, costs, copies = np.random.default_rng(0), [], []
    while len(costs) < TOKENS:
        began = time.perf_counter()
        constraint = compile(grammar, tokenizer, tokenizer.vocab_size)
        copies.append((time.perf_counter() - began) * 1e6)
        for _ in range(200):
            began = time.perf_counter()
            mask = constraint.mask()
            asked = time.perf_counter() - began
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            allowed = allowed[~np.isin(allowed, tokenizer.eos_ids)]
            if not len(allowed):
                break
            token = int(rng.choice(allowed))
            began = time.perf_counter()
            constraint.accept(token)
            costs.append((asked + time.perf_counter() - began) * 1e6)
    return np.array(costs), np.array(copies)


if __name__ == "__main__":
    main()
