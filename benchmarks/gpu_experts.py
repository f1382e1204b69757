"""Steps of models with experts, of published shapes with random weights, beside what reading their weights takes.

    python benchmarks/gpu_experts.py [qwen3-30b-a3b gpt-oss-20b deepseek-v2-lite] [--layers N] [--against '']
                                     [--experts q4_k]

A step reads every weight but those of experts that no row goes to: of random routing so many are expected. Nothing
else is counted: neither keys and values nor activations. GPT-OSS has its experts in MXFP4, as it is published.
With `--experts` those of the others are quantized, as files or `quantize=` have them: in another table.
transformers takes eager steps of the same shape in bfloat16, over as many slots: it has MXFP4 only with kernels
that it downloads. Table and JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_models import measure
from gpu_steps import decode_batch, runner_for, step_seconds
from torch import Tensor

from headway.kernels.host.expert_form import FP4, ExpertForm
from headway.kernels.host.rope import Rope, frequencies
from headway.models.config import ModelConfig
from headway.models.description import Description, ExpertGroups, Experts, LatentAttention
from headway.models.quantized.fp4 import Fp4Experts
from headway.models.quantized.int_experts import GroupedMatrix, IntExperts
from headway.models.weights.kept_forms import FORMS
from headway.models.weights.load_described import build_described
from headway.models.weights.shapes import layer_shapes
from headway.runtime.batch import Batch

RESULTS = Path(__file__).parent / "results"
CONTEXT = 512
ROWS = (1, 8, 64)
SHAPES = {  # hidden, layers, heads, key heads, head size, vocabulary, biases, norms of queries and keys
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 151936, False, True),
    "gpt-oss-20b": (2880, 24, 64, 8, 64, 201088, True, False),
    "deepseek-v2-lite": (2048, 27, 16, 1, 576, 102400, False, False),
}
DESCRIPTIONS = {
    "qwen3-30b-a3b": Description(experts=Experts(128, 8, 768)),
    "gpt-oss-20b": Description(
        sinks=True, experts=Experts(32, 4, 2880, router_bias=True, bias=True, clamp=7.0, alpha=1.702)
    ),
    "deepseek-v2-lite": Description(
        latent=LatentAttention(512, 64, 128, 128),
        attention_scale=192**-0.5,
        experts=Experts(
            *(64, 6, 1408, False),
            shared_size=2816,
            shared_gated=False,
            groups=ExpertGroups("softmax"),
            dense_layers=frozenset({0}),
        ),
    ),
}
DENSE_WIDTH = 10944  # of the layers without experts, which DeepSeek alone has


class DeviceWeights:
    """Random weights, drawn on the device; experts of floats, or in a form."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: torch.device, form: ExpertForm | None = None
    ) -> None:
        self.config, self.dtype, self.device, self.form = config, dtype, device, form
        self.last: dict[str, Tensor] = {}

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        drawn = torch.randn(shape, dtype=self.dtype, device=self.device)
        return drawn * shape[-1] ** -0.5 if len(shape) > 1 else drawn * 0.1 + ("norm" in role)

    def kept(self, roles: tuple[str, ...], layer: int) -> Fp4Experts | IntExperts | None:
        """GPT-OSS has its experts in MXFP4."""
        shapes = layer_shapes(self.config, layer)
        count, _, k = shapes[roles[0]]
        n = sum(shapes[role][1] for role in roles)
        if self.form is not None and self.form != FP4:
            matrices = (self._integers(self.form, n, k) for _ in range(count))
            return IntExperts.of(self.form, matrices, self.dtype, gated=len(roles) > 1)
        if self.form is None:
            return None
        codes = torch.randint(0, 256, (count, n, k // 2), dtype=torch.uint8, device=self.device)
        scales = torch.randint(118, 122, (count, n, k // 32), dtype=torch.uint8, device=self.device)
        bias = torch.cat([self.read(f"{role}_bias", shapes[f"{role}_bias"], layer) for role in roles], 1)
        return Fp4Experts.of(codes, scales, bias, self.dtype, gated=len(roles) > 1)

    def _integers(self, form: ExpertForm, n: int, k: int) -> GroupedMatrix:
        """Any integers, with scales of which weights are about as large as floats are."""
        most = 16 if form.kind == "int4" else 256
        quants = torch.randint(0, most, (n, k), dtype=torch.uint8, device=self.device)
        numbers: dict[str, Tensor] = {}
        for name in ("scale", "minimum")[: 1 + form.minimum]:
            size = (n, k // 256) if form.steps else (n, k // form.group)
            numbers[name] = torch.full(size, k**-0.5 / most / (16 if form.steps else 1), device=self.device).half()
            if form.steps:
                steps = torch.randint(0, 32, (n, k // form.group), dtype=torch.int8, device=self.device)
                numbers["steps" if name == "scale" else "minimum_steps"] = steps
        return GroupedMatrix(quants, **numbers, zero=form.zero)

    def frequencies(self) -> Tensor:
        row = torch.from_numpy(frequencies(self.config.rope)).to(self.device)
        return row.expand(self.config.layers, -1)


def config_of(name: str, layers: int | None) -> ModelConfig:
    hidden, all_layers, heads, kv_heads, dim, vocab, biased, normed = SHAPES[name]
    count = layers or all_layers
    latent = DESCRIPTIONS[name].latent
    windows = tuple(128 if name.startswith("gpt-oss") and i % 2 == 0 else None for i in range(count))
    return ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=hidden,
        layers=count,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        intermediate_size=DENSE_WIDTH,
        max_positions=1 << 15,
        norm_eps=1e-6,
        rope=Rope(dim if latent is None else latent.rotated),
        tied=False,
        qkv_bias=biased,
        o_bias=biased,
        mlp_bias=False,
        qk_norm=normed,
        windows=windows,
        description=DESCRIPTIONS[name],
    )


def form_of(name: str, kind: str | None) -> ExpertForm | None:
    """How a shape's experts are quantized."""
    if name.startswith("gpt-oss"):
        return FP4
    form, what = None if kind is None else FORMS[kind.upper()], DESCRIPTIONS[name].experts
    if form is not None and form.steps and what is not None and what.size % 256:
        raise SystemExit(f"{kind} has blocks of 256 inputs, and experts of {name} have {what.size}; take q4_0 or q8_0")
    return form


def read_bytes(c: ModelConfig, rows: int, form: ExpertForm | None) -> float:
    """Bytes of weights that a step of so many rows reads."""
    what = c.description.experts
    assert what is not None
    experts = 3 * (c.layers - len(what.dense_layers)) * what.count * what.size * c.hidden_size
    used = 1 - (1 - what.per_token / what.count) ** rows
    width = 2 if form is None else form.strip_bytes(256) / (16 * 256)
    return 2 * (c.parameters - experts - c.vocab_size * c.hidden_size) + width * used * experts


def batch_of(rows: int) -> Batch:
    """A decode batch whose rows know the positions of their slots, as models with windows want it."""
    batch = decode_batch(rows, CONTEXT)
    known = tuple(s._replace(slot_positions=np.arange(CONTEXT + 1)) for s in batch.segments)
    return replace(batch, segments=known)


@dataclass(frozen=True)
class Row:
    """A step of one shape: milliseconds, and how often that is the time of reading its weights."""

    shape: str
    rows: int
    ms: float
    weights_ms: float
    transformers_ms: float | None = None

    def line(self) -> str:
        found = (
            f"{self.shape:<15}{self.rows:>3} rows {self.ms:8.3f} ms a step, weights alone {self.weights_ms:7.3f} ms: "
        )
        found += f"{self.ms / self.weights_ms:.2f} of that"
        return found if self.transformers_ms is None else f"{found}; transformers {self.transformers_ms:.1f} ms"


def own_steps(name: str, layers: int | None, speed: float, form: ExpertForm | None) -> list[Row]:
    """Headway's steps."""
    decoder = build_described(DeviceWeights(config_of(name, layers), torch.bfloat16, torch.device("cuda"), form))
    found = []
    for rows in ROWS:
        runner = runner_for(decoder, rows, CONTEXT)
        took, least = step_seconds(runner, batch_of(rows)), read_bytes(decoder.config, rows, form) / speed
        found.append(Row(name, rows, took * 1e3, least * 1e3))
        print(found[-1].line(), flush=True)
        del runner
    return found


def published(name: str, layers: int | None) -> Any:
    """The shape as transformers' config."""
    from transformers import DeepseekV2Config, GptOssConfig, Qwen3MoeConfig

    c = config_of(name, layers)
    what = c.description.experts
    assert what is not None
    same: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.layers,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "num_experts_per_tok": what.per_token,
        "tie_word_embeddings": False,
    }
    if name == "gpt-oss-20b":
        return GptOssConfig(**same, num_local_experts=what.count, intermediate_size=what.size)
    if (latent := c.description.latent) is not None:
        own: dict[str, Any] = {"num_key_value_heads": c.heads, "head_dim": latent.rotated, "q_lora_rank": None}
        own |= {"kv_lora_rank": latent.size, "qk_rope_head_dim": latent.rotated, "qk_nope_head_dim": latent.key_dim}
        own |= {"v_head_dim": latent.value_dim, "n_routed_experts": what.count, "moe_intermediate_size": what.size}
        own |= {"n_shared_experts": what.shared_size // what.size, "intermediate_size": DENSE_WIDTH}
        return DeepseekV2Config(**(same | own), first_k_dense_replace=len(what.dense_layers))
    return Qwen3MoeConfig(**same, num_experts=what.count, moe_intermediate_size=what.size, norm_topk_prob=True)


def their_steps(name: str, layers: int | None) -> dict[int, float]:
    """Milliseconds of transformers' eager decode steps after a prompt of as many tokens, by rows."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(published(name, layers), dtype=torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    for weight in model.parameters():
        weight.normal_(0.0, weight.shape[-1] ** -0.5)
    for each in model.modules():  # rotations are computed, not drawn
        if hasattr(each, "inv_freq"):
            each.inv_freq.copy_(torch.linspace(1.0, 1e-4, len(each.inv_freq), device="cuda"))
    found = {}
    for rows in ROWS:
        tokens = torch.randint(0, 1000, (rows, CONTEXT), device="cuda")
        cache = model(tokens, use_cache=True, logits_to_keep=1).past_key_values
        times = []
        for _ in range(8):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            model(tokens[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end))
        found[rows] = statistics.median(times[2:])
    return found


def clear() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SHAPES), metavar="NAME")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--experts", choices=sorted(map(str.lower, FORMS.keys() - {"MXFP4"})), help="quantized so")
    parser.add_argument("--against", default="transformers", help="'' leaves it out")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the JSON")
    given = parser.parse_args()
    speed = measure(torch.device("cuda")).bandwidth
    head = f"{torch.cuda.get_device_name()} · torch {torch.__version__} · {speed / 1e12:.2f} TB/s"
    print(head, flush=True)
    found: list[Row] = []
    with torch.inference_mode():
        for name in given.names:
            own = own_steps(name, given.layers, speed, form_of(name, given.experts))
            clear()
            if given.against:
                theirs = their_steps(name, given.layers)
                own = [replace(row, transformers_ms=theirs[row.rows]) for row in own]
                clear()
            found += own
    table = "\n".join([head, *(row.line() for row in found)]) + "\n"
    print(table, end="")
    file = "gpu-experts" if given.experts is None else f"gpu-experts-{given.experts}"
    (given.out / f"{file}.txt").write_text(table)
    (given.out / f"{file}.json").write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
