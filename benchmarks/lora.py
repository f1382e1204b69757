"""The cost of LoRA adapters: many sequences under several adapters against the same without, in one batch each.

    python benchmarks/lora.py                        # the shapes smol and 1b on a CPU, 8b on a CUDA device
    python benchmarks/lora.py --shape smol --rank 64
    python benchmarks/lora.py --quick                # a tiny model, seconds: does it run?

Every sequence continues a short random prompt by `--tokens` tokens (end tokens are ordinary ones); sequence i is under
adapter i modulo `--adapters`, each with random weights on every linear layer. Plain and adapted runs take turns, and a
figure is the median of `--repeats`. Weights are random: int8 on a CPU, bfloat16 on a CUDA device.

peft runs the same shape beside it, in float32 on a CPU, with the same number of sequences and adapters in one batch
(`adapter_names`), where it is installed; `--against ''` leaves it out.

The table and the JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_models import random_decoder

import headway as hw
from headway.base.system.machine import read_machine
from headway.bench.models import SHAPES, find_shape, write_folder
from headway.testing import random_adapter

RESULTS = Path(__file__).parent / "results"
AIMS = {"smol": 0.7, "1b": 0.8, "8b": 0.85}  # adapted tokens/s over plain
PROMPT = 16


def main() -> None:
    options = _options()
    rows = []
    for name in options.shape:
        rows.append(measure(name, options))
        print(line(rows[-1]), flush=True)
    data = {"about": {"machine": asdict(read_machine()), "options": _plain(vars(options))}, "results": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "lora.json").write_text(json.dumps(data, indent=2) + "\n")
    (options.out / "lora.txt").write_text("".join(line(row) + "\n" for row in rows))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One shape: tokens/s without adapters and with them, and peft's."""
    row: dict[str, Any] = {"shape": name, "sequences": options.sequences, "adapters": options.adapters}
    row |= {"rank": options.rank, "aim": AIMS.get(name)}
    with tempfile.TemporaryDirectory() as folder:
        model = None if options.device == "cuda" else write_folder(find_shape(name), Path(folder), "f16")
        with open_engine(name, model, options) as engine:
            adapters = [random_adapter(engine.config, rank=options.rank, seed=i) for i in range(options.adapters)]
            row |= compare(engine, adapters, options)
            row["adapter_bytes"] = engine.stats().adapter_bytes
        if "peft" in options.against and model is not None:
            with suppress(ImportError):
                row |= peft_rates(model, options)
    return row


def open_engine(name: str, model: Path | None, options: argparse.Namespace) -> hw.Engine:
    pages = options.sequences * (2 + (PROMPT + options.tokens) // 16)
    if model is None:
        decoder = random_decoder(name, torch.device("cuda"), torch.bfloat16)
        return hw.Engine(decoder, pages=pages)
    return hw.Engine(model, threads=options.threads, quantize=options.quantize, pages=pages)


def compare(engine: hw.Engine, adapters: list[hw.Adapter], options: argparse.Namespace) -> dict[str, Any]:
    plain: list[float] = []
    adapted: list[float] = []
    for turn in range(options.repeats + 1):
        for rates, mixes in ((plain, [None] * options.sequences), (adapted, _assigned(adapters, options.sequences))):
            rate = engine.run(generate, mixes, options.tokens)
            if turn:  # the first compiles kernels, captures graphs and loads adapters
                rates.append(rate)
    before, after = statistics.median(plain), statistics.median(adapted)
    return {"plain tokens/s": round(before, 1), "adapted tokens/s": round(after, 1), "ratio": round(after / before, 3)}


async def generate(engine: hw.Engine, mixes: list[hw.Adapter | None], tokens: int) -> float:
    """Tokens per second of all sequences together, after their prompts."""
    contexts = [engine.context() for _ in mixes]
    for i, (context, mix) in enumerate(zip(contexts, mixes, strict=True)):
        await context.fill([(7 * i + j) % 250 for j in range(PROMPT)]).flush(adapter=mix)
    start = time.perf_counter()
    await asyncio.gather(
        *(
            context.generate(hw.Argmax(), max_tokens=tokens, stop_only=True, adapter=mix).tokens()
            for context, mix in zip(contexts, mixes, strict=True)
        )
    )
    seconds = time.perf_counter() - start
    for context in contexts:
        context.release()
    engine.cache.clear()
    return len(mixes) * tokens / seconds


def peft_rates(model: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same with transformers and peft, in float32."""
    import peft
    import transformers

    torch.set_num_threads(options.threads or torch.get_num_threads())
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    roles = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=options.rank, target_modules=roles, task_type="CAUSAL_LM", init_lora_weights=False)
    ids = torch.tensor([[(7 * i + j) % 250 for j in range(PROMPT)] for i in range(options.sequences)])

    def rate(run: Callable[..., Any], **more: Any) -> float:
        size = min(options.tokens, 16)
        start = time.perf_counter()
        run(input_ids=ids, max_new_tokens=size, min_new_tokens=size, do_sample=False, **more)
        return options.sequences * size / (time.perf_counter() - start)

    plain = rate(base.generate)
    wrapped = peft.get_peft_model(base, config, adapter_name="0")
    for i in range(1, options.adapters):
        wrapped.add_adapter(str(i), config)
    names = [str(i % options.adapters) for i in range(options.sequences)]
    adapted = rate(wrapped.eval().generate, adapter_names=names)
    return {"peft plain tokens/s": round(plain, 1), "peft tokens/s": round(adapted, 1)}


def line(row: dict[str, Any]) -> str:
    aim = "" if row["aim"] is None else f" (aim {row['aim']})"
    peft = f" · peft {row['peft tokens/s']}, plain {row['peft plain tokens/s']}" if "peft tokens/s" in row else ""
    return (
        f"{row['shape']}: {row['sequences']} sequences, {row['adapters']} adapters of rank {row['rank']}: "
        f"{row['adapted tokens/s']} tokens/s, plain {row['plain tokens/s']}, ratio {row['ratio']}{aim}{peft}"
    )


def _assigned(adapters: list[hw.Adapter], count: int) -> list[hw.Adapter | None]:
    return [adapters[i % len(adapters)] for i in range(count)]


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if not isinstance(value, Path)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", help="tiny, smol, 1b, or on a CUDA device 8b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--quantize", default="int8", help="of the CPU's weights")
    parser.add_argument("--against", default="peft", help="what else runs: peft, or nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the JSON")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    if options.quick:
        options.shape, options.sequences, options.adapters, options.tokens = ["tiny"], 4, 2, 8
        options.rank, options.repeats = 4, 2
    options.shape = options.shape or (["8b"] if cuda else ["smol", "1b"])
    options.sequences = options.sequences or (64 if cuda else 32)
    unknown = [name for name in options.shape if name not in (("tiny", "1b", "8b") if cuda else SHAPES)]
    if unknown:
        parser.error(f"the shape {unknown[0]!r} is not known on this device")
    return options


if __name__ == "__main__":
    sys.exit(main())
