"""Runs every Triton kernel family on tiny models under compute-sanitizer: addresses first, then races in shared memory.

Called by `make gpu-sanitize`; ends with 1 when one of them finds something, or when there is no GPU or no
compute-sanitizer, which comes with the CUDA toolkit. Engines launch kernel by kernel, each tensor in memory of its own,
so that what reads past its end is seen.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("memcheck", "racecheck")
OPTIONS = ("--error-exitcode", "9", "--target-processes", "application-only", "--print-limit", "20")
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/nvidia/cuda/bin")
SECONDS = 300  # one tool on all kernels
V = 97


def main() -> int:
    """Compile, then run under both tools side by side; 1 when one of them found something."""
    tool = shutil.which("compute-sanitizer", path=os.pathsep.join((os.environ.get("PATH", ""), *PLACES)))
    if tool is None:
        print("compute-sanitizer is not installed; it comes with the CUDA toolkit (package cuda-sanitizer)")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        # Compiled once, with no tool watching the compiler.
        environment = os.environ | {"TRITON_CACHE_DIR": folder, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        if _run("without a tool", [], environment):
            return 1
        with ThreadPoolExecutor() as pool:
            found = list(pool.map(lambda name: _run(name, [tool, "--tool", name, *OPTIONS], environment), TOOLS))
    return int(any(found))


def _run(name: str, prefix: list[str], environment: dict[str, str]) -> bool:
    """Whether all kernels, run so, found something to say."""
    start = time.perf_counter()
    command = [*prefix, sys.executable, __file__, "kernels"]
    told = subprocess.run(
        command, env=environment, cwd=ROOT, check=False, timeout=SECONDS, text=True, capture_output=True
    )
    ended = "clean" if told.returncode == 0 else f"ended with {told.returncode}"
    print(f"== {name}: {ended}, {time.perf_counter() - start:.0f} s\n{told.stdout}{told.stderr}", flush=True)
    return told.returncode != 0


def kernels() -> None:
    """Passes that launch every kernel: prompts, decodes, masks, samplers, probes, every format of weights."""
    import torch

    import headway as hw

    if not torch.cuda.is_available():
        sys.exit("no CUDA device is here")
    for name, model, options in _models():
        with ExitStack() as stack:
            stack.callback(torch.cuda.synchronize)
            engine = stack.enter_context(hw.Engine(model, device="cuda", pages=64, **options))
            engine._loop._runner._graphs.enabled = False  # type: ignore[attr-defined]
            engine.run(_several)
            print(f"   {name}: {engine.info.runner}, {engine.info.format}", flush=True)


def _models() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    from headway.kernels.triton.quantized import KINDS
    from headway.models.quantized.cuda import quantize_decoder
    from headway.testing import random_model

    small = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "device": "cuda"}
    wide = {"hidden_size": 512, "intermediate_size": 512, "heads": 8, "head_dim": 64, "device": "cuda"}
    yield "float32", random_model("qwen3", **small), {}
    yield "bfloat16", random_model("mistral", dtype="bfloat16", **small), {}
    yield "float16", random_model("qwen2", dtype="float16", **small), {}
    for kind in KINDS:
        yield kind, quantize_decoder(random_model("llama", dtype="bfloat16", **wide), kind), {}
    for dtype in ("float32", "bfloat16"):
        yield f"deterministic {dtype}", random_model("llama", dtype=dtype, **small), {"deterministic": True}


async def _several(engine: Any) -> None:
    await _one(engine, 0)  # one row at a time
    await asyncio.gather(*(_one(engine, i) for i in range(1, 4)))


async def _one(engine: Any, seed: int) -> None:
    import headway as hw

    async with engine.context() as context:
        forward = context.fill([(7 * seed + 3 * i) % V for i in range(75)]).forward().input([1, 2])
        forward.probe(1, hw.Logits())
        forward.probe(1, hw.Hidden(1))
        forward.sample([0], hw.Sampling(temperature=0.7, top_k=20, repetition_penalty=1.3, logit_bias={3: 2.0}, seed=3))
        forward.probe(0, hw.Entropy())
        await forward.execute()
        forward = context.forward().input([3])
        forward.attention_mask(hw.Mask.sink(4, 20)).mask(forbid=[5, 6])
        forward.sample([-1], hw.Sampling(temperature=0.9, top_p=0.9, min_p=0.01, seed=seed))
        forward.probe(-1, hw.Logprobs([1, 2, 96]))
        forward.probe(-1, hw.Distribution(0.5, k=4))
        await forward.execute()
        await context.forward().input([(5 * seed + i) % V for i in range(20)]).execute()
        await context.generate(hw.Multinomial(0.8, seed=seed), max_tokens=3, stop_only=True).tokens()


if __name__ == "__main__":
    sys.exit(kernels() if sys.argv[1:] == ["kernels"] else main())
