"""Loading a safetensors folder onto the device, from the page cache: bytes a second, and process start to first token.

gpu.py writes the folder and starts this file as a process of its own, which prints one line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_models import config, published

SHARD = 4 << 30  # bytes of a file


def write_folder(folder: Path, shape: str, device: torch.device) -> int:
    """Random weights of a shape, bfloat16, as a Hugging Face folder without a tokenizer; how many bytes they have."""
    c = config(shape)
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, dims in _shapes(shape):
        nbytes = 2 * torch.Size(dims).numel()
        if size % SHARD + nbytes > SHARD:
            shards.append({})
        shards[-1][name] = dims
        size += nbytes
    files = {name: f"model-{i:05d}.safetensors" for i, shard in enumerate(shards) for name in shard}
    for i, shard in enumerate(shards):
        _write(folder / f"model-{i:05d}.safetensors", shard, device)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    about = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **published(c),
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(about))
    return size


def _shapes(shape: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    c = config(shape)
    e, f, q, kv = c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.kv_heads * c.head_dim
    yield "model.embed_tokens.weight", (c.vocab_size, e)
    for i in range(c.layers):
        at = f"model.layers.{i}."
        for name, rows, width in (("q", q, e), ("k", kv, e), ("v", kv, e), ("o", e, q)):
            yield f"{at}self_attn.{name}_proj.weight", (rows, width)
        for name, rows, width in (("gate", f, e), ("up", f, e), ("down", e, f)):
            yield f"{at}mlp.{name}_proj.weight", (rows, width)
        yield f"{at}input_layernorm.weight", (e,)
        yield f"{at}post_attention_layernorm.weight", (e,)
    yield "model.norm.weight", (e,)
    if not c.tied:
        yield "lm_head.weight", (c.vocab_size, e)


def _write(path: Path, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
    header, at = dict[str, object](), 0
    for name, dims in shapes.items():
        end = at + 2 * torch.Size(dims).numel()
        header[name] = {"dtype": "BF16", "shape": list(dims), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dims in shapes.values():
            drawn = torch.randn(dims, device=device, dtype=torch.bfloat16) * dims[-1] ** -0.5
            file.write(drawn.view(-1).view(torch.uint8).cpu().numpy())


def measure(folder: Path, pages: int) -> dict[str, float]:
    """Seconds of each phase, in a new process."""
    command = [sys.executable, __file__, str(folder), str(pages), repr(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"loading failed: {done.stderr.splitlines()[-1] if done.stderr else 'no reason given'}")
    return json.loads(done.stdout.splitlines()[-1])


def main(folder: str, pages: str, started: str) -> None:
    import headway as hw

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.zeros(1, device=device)  # the driver's own start is not loading
    imported = time.time()
    with hw.Engine(folder, device=device, pages=int(pages)) as engine:
        loaded = time.time()

        async def first(engine: hw.Engine) -> list[int]:
            async with engine.context() as ctx:
                return await ctx.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=1, stop_only=True).tokens()

        engine.run(first)
        print(
            json.dumps(
                {"start": imported - float(started), "load": loaded - imported, "first": time.time() - float(started)}
            )
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
