"""Headway beside llama.cpp on this CPU, on GGUF files of other architectures than Llama's: experts, Gemma 3, any file.

    python benchmarks/cpu_models.py --llama /venvs/llama/bin/python --models /tmp/models
    python benchmarks/cpu_models.py --llama … --only q4_0      # some of it
    python benchmarks/cpu_models.py --llama … --only mine --file mine=model.gguf

Models with random weights are written: a Qwen3-MoE (2.8 billion, 0.98 of them active) in Q4_0 and Q8_0, and Gemma 3
270M's shape in Q4_K_M, by llama.cpp's quantizer. Each engine has a process of its own, frozen while the other one runs;
both do the same work on the same random prompts, greedy and to the same length, in turns, after one run to warm up. The
table and the JSON go to benchmarks/results/cpu-models.*.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from cpu_files import TYPES, CannotWrite, Files, copy_tokenizer, weight_bytes
from cpu_plan import Work
from cpu_runner import Command, PeerFailed, Runner

from headway.base.system.machine import read_machine
from headway.models.files.gguf import GgufFile

RESULTS = Path(__file__).parent / "results"
WORKS = (
    Work("decode", 32, 129),
    Work("decode", 32, 65, sequences=8),
    Work("decode", 32, 33, sequences=32),
    Work("prefill", 512),
)
WANTED = {1: 1.3, 8: 1.3}  # × llama.cpp, by sequences
PEER = "llama"
POSITIONS = 8192


Size = tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder whose output is its embedding."""

    name: str
    architecture: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocab: int
    experts: int = 0
    used: int = 0
    window: int = 0  # of all layers but each sixth
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")

    def tensors(self) -> Iterator[tuple[str, Size]]:
        e, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, Size] = dict.fromkeys(self.norms, (e,))
        layer |= {"attn_q_norm": (self.head_dim,), "attn_k_norm": (self.head_dim,)}
        layer |= {"attn_q": (q, e), "attn_k": (kv, e), "attn_v": (kv, e), "attn_output": (e, q)}
        each, suffix = ((self.experts,), "_exps") if self.experts else ((), "")
        if self.experts:
            layer["ffn_gate_inp"] = (self.experts, e)
        for name, size in {"gate": (self.inner, e), "up": (self.inner, e), "down": (e, self.inner)}.items():
            layer[f"ffn_{name}{suffix}"] = (*each, *size)
        yield "token_embd.weight", (self.vocab, e)
        for number in range(self.layers):
            yield from ((f"blk.{number}.{name}.weight", size) for name, size in layer.items())
        yield "output_norm.weight", (e,)


EXPERTS = Shape("experts", "qwen3moe", 16, 2048, 16, 4, 128, 768, 100_352, experts=32, used=8)
GEMMA = Shape(
    "gemma3-270m",
    "gemma3",
    *(18, 640, 4, 1, 256, 2048, 262_144),
    window=512,
    norms=("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"),
)
FILES = ((EXPERTS, "q4_0"), (EXPERTS, "q8_0"), (GEMMA, "q4_k"))


def write(shape: Shape, form: str, path: Path) -> None:
    """A GGUF file of this shape: matrices in the form's type, norms and routers in float32."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(f"random {shape.name}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.used)
        writer.add_expert_feed_forward_length(shape.inner)
    if shape.window:
        writer.add_sliding_window(shape.window)
    writer.add_vocab_size(shape.vocab)
    copy_tokenizer(writer, shape.vocab)
    for name, size in shape.tensors():
        kind = _kind(name, size, form)
        stored = gguf.quant_shape_to_byte_shape(size, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    draws = np.random.default_rng(0)
    for name, size in shape.tensors():
        writer.write_tensor_data(_drawn(draws, size, _kind(name, size, form)))
    writer.close()


def _kind(name: str, size: tuple[int, ...], form: str) -> gguf.GGMLQuantizationType:
    plain = len(size) == 1 or "gate_inp" in name
    return gguf.GGMLQuantizationType.F32 if plain else TYPES[form]


def _drawn(draws: np.random.Generator, size: tuple[int, ...], kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Random weights; each further expert of a layer has the rows of the first one in another order."""
    if len(size) == 1:
        return (1 + 0.2 * draws.standard_normal(size)).astype(np.float32)
    rows = draws.standard_normal(size[-2:], dtype=np.float32) / np.float32(math.sqrt(size[-1]))
    stored = gguf.quants.quantize(rows, kind)
    return stored if len(size) == 2 else np.stack([np.roll(stored, 7 * expert, axis=0) for expert in range(size[0])])


# -- the run -----------------------------------------------------------------------------------------------------------


@dataclass
class Row:
    """One work on one file: what Headway and llama.cpp did in each round."""

    name: str
    work: Work
    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.name} {self.work.label}"

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.theirs)

    @property
    def wanted(self) -> float | None:
        return WANTED.get(self.work.sequences) if self.work.kind == "decode" else None

    def line(self) -> str:
        ours, theirs = statistics.median(self.ours), statistics.median(self.theirs)
        aim = "" if self.wanted is None else f"  {self.wanted} ×: {'met' if self.ratio >= self.wanted else 'missed'}"
        spread = f"{min(self.ours):.4g}–{max(self.ours):.4g}"
        return f"{self.label:<36} {ours:>8.4g}  {spread:<16} {theirs:>8.4g}  {self.ratio:.2f} ×{aim}"


def measure(name: str, path: Path, options: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Every work on one file, both engines loaded once."""
    works = [work for work in WORKS if any(text in f"{name} {work.label}" for text in options.only or [""])]
    rows = [Row(name, work) for work in works]
    if not rows:
        return [], {}
    with GgufFile.open(path) as file:
        words = file.tensors["token_embd.weight"].shape[0]
    load = {
        "path": str(path),
        "form": "file",
        "threads": options.threads,
        "slots": max(work.slots for work in works),
        "sequences": max(work.sequences for work in works),
        "total": max(work.total for work in works),
    }
    draws = random.Random(0)
    commands = (Command("headway", sys.executable, options.threads), Command(PEER, options.llama, options.threads))
    headway = Runner(commands[0], load)
    try:
        llama = Runner(commands[1], load)
        try:
            for row in rows:
                for number in range(options.rounds + 1):
                    prompts = [draws.choices(range(100, words), k=row.work.prompt) for _ in range(row.work.sequences)]
                    turns = ((headway, row.ours), (llama, row.theirs))
                    for runner, into in turns[:: -1 if number % 2 else 1]:
                        value = row.work.value(_ask(runner, row.work, prompts))
                        if number:
                            into.append(value)
                print(row.line(), flush=True)
            return rows, {"headway": headway.facts, PEER: llama.facts, "weight_bytes": weight_bytes(path)}
        finally:
            llama.close()
    finally:
        headway.close()


def _ask(runner: Runner, work: Work, prompts: list[list[int]]) -> dict[str, Any]:
    if work.kind == "decode":
        return runner.ask("decode", prompts=prompts, tokens=work.tokens)
    return runner.ask("prefill", prompt=prompts[0])


def main() -> int:
    options = _options()
    machine, load = read_machine(), os.getloadavg()[0]
    rows, facts, failures = [], {}, []
    with tempfile.TemporaryDirectory(prefix="headway-models-") as scratch:
        for name, path in [*_written(options, Path(scratch)), *options.files.items()]:
            try:
                found, facts[name] = measure(name, path, options)
                rows += found
            except (PeerFailed, CannotWrite) as error:
                failures.append(f"FAILED: {name}: {error}")
                print(failures[-1], flush=True)
    head = (
        f"{machine.cpu}, {', '.join(machine.instructions)}; {options.threads} of {machine.usable_cores} cores\n"
        f"{options.rounds} rounds in turns, medians; load before {load:.1f}\n\n"
        f"{'tokens/s':<36} {'headway':>8}  {'least–most':<16} {'llama':>8}  ahead"
    )
    text = "\n".join([head, *(row.line() for row in rows), *failures, ""])
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cpu-models.txt").write_text(text)
    data = {
        "machine": asdict(machine),
        "threads": options.threads,
        "load_before": load,
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "files": facts,
        "results": [{"work": row.label, "headway": row.ours, PEER: row.theirs, "ratio": row.ratio} for row in rows],
        "failures": failures,
    }
    (options.out / "cpu-models.json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"\n{text}\nwritten to {options.out}")
    return 1 if failures else 0


def _written(options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Path]]:
    folder = options.models or scratch
    folder.mkdir(parents=True, exist_ok=True)
    files = Files(folder, {PEER: options.llama}, options.threads)
    for shape, form in FILES:
        name = f"{shape.name} {form}"
        if not any(text in f"{name} {work.label}" for work in WORKS for text in options.only or [""]):
            continue
        path = folder / f"{shape.name}-{form}.gguf"
        if not path.exists():
            print(f"writing {path.name}", flush=True)
            partial = path.with_name(f"partial-{path.name}")
            if form in TYPES:
                write(shape, form, partial)
            else:
                source = path.with_name(f"source-{path.name}")
                write(shape, "gguf-f16", source)
                files.by_llama(source, form, partial)
                source.unlink()
            partial.rename(path)
        yield name, path


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--llama", required=True, metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH", help="a GGUF file to measure too")
    parser.add_argument("--models", type=Path, help="a folder that keeps the files that are written, for the next time")
    parser.add_argument("--threads", type=int, default=read_machine().fair_threads)
    parser.add_argument("--rounds", type=int, default=5, help="runs of each engine, after one to warm up")
    parser.add_argument("--only", action="append", default=[], help="works whose name has this in it; may be repeated")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.rounds < 1 or options.threads < 1:
        parser.error("--rounds and --threads take whole numbers from 1")
    options.files = {}
    for text in options.file:
        name, _, path = text.partition("=")
        if not name or not Path(path).is_file():
            parser.error(f"--file has {text!r}; it must be NAME=PATH with a GGUF file that is there")
        options.files[name] = Path(path)
    return options


if __name__ == "__main__":
    sys.exit(main())
