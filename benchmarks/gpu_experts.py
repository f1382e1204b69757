"""Steps of models with experts, of published shapes with random weights, beside what reading their weights takes.

    python benchmarks/gpu_experts.py [qwen3-30b-a3b gpt-oss-20b] [--layers N]

A step reads every weight but those of experts that no row goes to: of random routing so many are expected. Nothing else
is counted: neither keys and values nor activations.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
import torch
from gpu_models import measure
from gpu_steps import decode_batch, runner_for, step_seconds
from torch import Tensor

from headway.kernels.host.rope import Rope, frequencies
from headway.models.config import ModelConfig
from headway.models.description import Description, Experts
from headway.models.weights.load_described import build_described
from headway.runtime.batch import Batch

CONTEXT = 512
SHAPES = {  # hidden, layers, heads, key heads, head size, vocabulary, biases, norms of queries and keys
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 151936, False, True),
    "gpt-oss-20b": (2880, 24, 64, 8, 64, 201088, True, False),
}
DESCRIPTIONS = {
    "qwen3-30b-a3b": Description(experts=Experts(128, 8, 768)),
    "gpt-oss-20b": Description(
        sinks=True, experts=Experts(32, 4, 2880, router_bias=True, bias=True, clamp=7.0, alpha=1.702)
    ),
}


class DeviceWeights:
    """Random weights, drawn on the device."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        self.last: dict[str, Tensor] = {}

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        drawn = torch.randn(shape, dtype=self.dtype, device=self.device)
        return drawn * shape[-1] ** -0.5 if len(shape) > 1 else drawn * 0.1 + ("norm" in role)

    def fp4(self, roles: tuple[str, ...], layer: int) -> None:
        """Weights are floats."""

    def frequencies(self) -> Tensor:
        row = torch.from_numpy(frequencies(self.config.rope)).to(self.device)
        return row.expand(self.config.layers, -1)


def config_of(name: str, layers: int | None) -> ModelConfig:
    hidden, all_layers, heads, kv_heads, dim, vocab, biased, normed = SHAPES[name]
    count = layers or all_layers
    windows = tuple(128 if name.startswith("gpt-oss") and i % 2 == 0 else None for i in range(count))
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=count,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=64,  # of no layer
        max_positions=1 << 15,
        norm_eps=1e-6,
        rope=Rope(dim),
        tied=False,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=False,
        qk_norm=normed,
        windows=windows,
        description=DESCRIPTIONS[name],
    )


def read_bytes(c: ModelConfig, rows: int) -> float:
    """Bytes of weights that a step of so many rows reads."""
    what = c.description.experts
    assert what is not None
    experts = 3 * c.layers * what.count * what.size * c.hidden_size
    used = 1 - (1 - what.per_token / what.count) ** rows
    return 2 * (c.parameters - experts - c.vocab_size * c.hidden_size + used * experts)


def batch_of(rows: int) -> Batch:
    """A decode batch whose rows know the positions of their slots, as models with windows want it."""
    batch = decode_batch(rows, CONTEXT)
    known = tuple(s._replace(slot_positions=np.arange(CONTEXT + 1)) for s in batch.segments)
    return replace(batch, segments=known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SHAPES), metavar="NAME")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    given = parser.parse_args()
    device = torch.device("cuda")
    speed = measure(device).bandwidth
    print(f"{torch.cuda.get_device_name(device)}, {speed / 1e12:.2f} TB/s", flush=True)
    for name in given.names:
        with torch.inference_mode():
            decoder = build_described(DeviceWeights(config_of(name, given.layers), torch.bfloat16, device))
            for rows in (1, 8, 64):
                runner = runner_for(decoder, rows, CONTEXT)
                took = step_seconds(runner, batch_of(rows))
                least = read_bytes(decoder.config, rows) / speed
                print(
                    f"{name}, {decoder.config.layers} layers, {rows} rows: {took * 1e3:.3f} ms a step, "
                    f"weights alone {least * 1e3:.3f} ms, {took / least:.2f} of that",
                    flush=True,
                )
                del runner
            del decoder
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
