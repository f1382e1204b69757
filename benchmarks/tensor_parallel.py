"""What tensor parallel costs: bytes that ranks sum, the time of a sum with gloo, and the same worked out for NVLink.

    python benchmarks/tensor_parallel.py                 # two CPU ranks; tables for 2, 4 and 8 devices
    python benchmarks/tensor_parallel.py --ranks 4 --model FOLDER --dtype float32
    python benchmarks/tensor_parallel.py --quick         # a tiny model, seconds: does it run?

1. **Bytes.** An engine of CPU ranks computes passes of several sizes, and its link counts what it puts into sums and
   gathers. The count must be that of the formula: (2 L + 1) sums of rows × hidden size, and the logits that are read.
2. **gloo.** Two processes sum tensors of these sizes over the loopback device: the median of `--repeats`.
3. **NVLink, worked out.** A ring all-reduce of B bytes takes 2 (N - 1) rounds of latency and moves 2 (N - 1) / N × B
   over each link. With it stands the time in which each device reads its share of the weights. Nothing of this is
   measured: `--bandwidth`, `--latency` and `--memory` say what is assumed.

The table and the JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

import headway as hw
from headway.base.system.machine import read_machine
from headway.runtime.runners.parallel.collectives import Collectives
from headway.testing import random_model

RESULTS = Path(__file__).parent / "results"
# layers, hidden size, parameters: what the table of devices is for
MODELS = {"Llama-3-8B": (32, 4096, 8.03e9), "Llama-3-70B": (80, 8192, 70.6e9)}
WIDTH = 2  # bytes of a bfloat16


def main() -> None:
    if sys.argv[1:2] == ["--peer"]:
        peer(Path(sys.argv[2]), *map(int, sys.argv[3:5]), json.loads(sys.argv[5]), int(sys.argv[6]))
        return
    options = _options()
    counted = count_bytes(options)
    timed = time_sums(options, sorted({row["bytes of a sum"] for row in counted}))
    worked = [work_out(name, rows, n, options) for name in MODELS for rows in (1, 64, 2048) for n in (2, 4, 8)]
    text = "\n\n".join(
        f"{title}\n{table(rows)}"
        for title, rows in (
            (f"Bytes, counted in an engine of {options.ranks} CPU ranks", counted),
            (f"gloo, {options.ranks} processes on this machine", timed),
            (f"NVLink, worked out: {options.bandwidth:g} GB/s and {options.latency:g} us a link", worked),
        )
    )
    print(text)
    chosen = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    about = {"machine": asdict(read_machine()), "torch": torch.__version__, "options": chosen | {"out": ""}}
    options.out.mkdir(parents=True, exist_ok=True)
    data = {"about": about, "bytes": counted, "gloo": timed, "nvlink": worked}
    (options.out / "tensor_parallel.json").write_text(json.dumps(data, indent=2) + "\n")
    (options.out / "tensor_parallel.txt").write_text(text + "\n")


# -- bytes -----------------------------------------------------------------------------------------------------------


def count_bytes(options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the link of a running engine puts into sums and gathers, for passes of several sizes."""
    model: Any = options.model
    if model is None:
        model = random_model(heads=4, kv_heads=4, layers=2) if options.quick else random_model(
            heads=8, kv_heads=8, layers=8, head_dim=64, hidden_size=512, intermediate_size=2048, vocab_size=32_000
        )  # fmt: skip
    found = []
    how: dict[str, Any] = {} if options.model is None else {"dtype": options.dtype}
    sizes = (1, 16) if options.quick else (1, 16, 256)
    with hw.Engine(model, device="cpu", tensor_parallel=options.ranks, pages=64, **how) as engine:
        assert engine._backend.ranks is not None
        link, c, width = engine._backend.ranks.link, engine.config, engine._backend.decoder.dtype.itemsize
        for rows in sizes:
            ids = np.random.default_rng(rows).integers(c.vocab_size, size=rows).tolist()
            before = link.bytes_sent
            with_context(engine, ids)
            one = rows * c.hidden_size * width
            read = -(-c.vocab_size // options.ranks) * width
            sent, formula = link.bytes_sent - before, (2 * c.layers + 1) * one + read
            if sent != formula:
                raise SystemExit(f"{rows} rows: {sent} bytes were counted, and the formula says {formula}")
            found.append({"rows": rows, "bytes of a sum": one, "bytes a layer": 2 * one, "bytes a step": sent})
    return found


def with_context(engine: hw.Engine, ids: list[int]) -> None:
    context = engine.context()
    forward = context.forward().input(ids)
    forward.sample([-1], hw.Argmax())
    forward.execute().result()
    context.release()


# -- gloo ------------------------------------------------------------------------------------------------------------


def time_sums(options: argparse.Namespace, sizes: list[int]) -> list[dict[str, Any]]:
    """The median time of one sum of each size, over processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [sys.executable, __file__, "--peer", folder]
        numbers = [json.dumps(sizes), str(options.repeats)]
        others = [
            subprocess.Popen([*arguments, str(rank), str(options.ranks), *numbers], stdout=subprocess.DEVNULL)
            for rank in range(1, options.ranks)
        ]
        first = [*arguments, "0", str(options.ranks), *numbers]
        done = subprocess.run(first, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        for other in others:
            other.wait()
    rows = json.loads(done.stdout)
    return [
        {"bytes of a sum": size, "us": round(1e6 * seconds, 1), "MB/s": round(size / seconds / 1e6, 1)}
        for size, seconds in zip(sizes, rows, strict=True)
    ]


def peer(folder: Path, rank: int, size: int, sizes: list[int], repeats: int) -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    link = Collectives(rank, size, torch.device("cpu"))
    link.connect(folder)
    found = []
    for nbytes in sizes:
        part, taken = torch.ones(nbytes // 4), []
        for _ in range(repeats + 3):
            start = time.perf_counter()
            link.sum(part)
            taken.append(time.perf_counter() - start)
        found.append(statistics.median(taken[3:]))
    if rank == 0:
        print(json.dumps(found))


# -- NVLink ----------------------------------------------------------------------------------------------------------


def work_out(name: str, rows: int, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What the sums of a step would take over NVLink, beside the time in which a device reads its weights."""
    layers, hidden, parameters = MODELS[name]
    sums, one = 2 * layers + 1, rows * hidden * WIDTH
    moved = 2 * (ranks - 1) / ranks * one
    seconds = sums * (2 * (ranks - 1) * options.latency * 1e-6 + moved / (options.bandwidth * 1e9))
    weights = parameters * WIDTH / ranks / (options.memory * 1e12)
    return {
        "model": name,
        "devices": ranks,
        "rows": rows,
        "KiB a layer": round(2 * one / 1024, 1),
        "MiB a link and step": round(sums * moved / 2**20, 2),
        "sums ms": round(1e3 * seconds, 3),
        "weights ms": round(1e3 * weights, 3),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as aligned columns."""
    cells = [[f"{value:,}" if isinstance(value, int) else str(value) for value in row.values()] for row in rows]
    lines = [list(rows[0]), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What tensor parallel costs.")
    parser.add_argument("--ranks", type=int, default=2, help="CPU processes")
    parser.add_argument("--model", type=Path, help="a model's folder; by default random weights")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--bandwidth", type=float, default=450.0, help="GB/s of a device's NVLink, one way")
    parser.add_argument("--latency", type=float, default=3.0, help="microseconds of one round of a ring")
    parser.add_argument("--memory", type=float, default=4.8, help="TB/s of a device's memory")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.repeats = 3
    return options


if __name__ == "__main__":
    main()
