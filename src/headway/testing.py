"""For your tests: small random models, and a runner that needs no weights.

    engine = hw.Engine(random_model("qwen3", layers=3))   # a real decoder
    engine = scripted_engine(pages=64)                     # a stand-in that still checks every page and mask

Needs torch and numpy only: no model files, no tokenizer, no network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import numpy as np

from headway.base.arrays import from_tensor
from headway.base.errors import HeadwayError, InvalidInput, Unsupported
from headway.base.rng import uniform
from headway.base.specs.adapters import OUTSIDE
from headway.base.specs.probes import Logits, Probe
from headway.base.specs.samplers import Sampling
from headway.base.system.extras import explain_missing
from headway.kernels.host.rope import Rope, frequencies
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, Import, Load, Save
from headway.models.adapters.adapter import Adapter
from headway.models.adapters.bound import BoundAdapter, head_shape, layer_targets, matrices_of, target_shapes
from headway.models.adapters.low_rank import HEAD, ROLES, LowRank, Target
from headway.models.config import ModelConfig
from headway.models.description import PLAIN, Description, Recurrence
from headway.models.families import FAMILIES
from headway.program.engine import Engine
from headway.runtime.adapters import DeviceWeights
from headway.runtime.batch import Batch, Segment
from headway.runtime.device import pick_device, pick_dtype
from headway.runtime.passes import BEFORE, Readout
from headway.runtime.runners.attention_groups import dense_mask, segment_slots
from headway.runtime.runners.base import DECODE_LIMIT, Deferred, InFlight, SegmentResult

try:
    import torch
    from torch import Tensor

    from headway.kernels.reference.quantized import tensor
    from headway.models.decoder import Decoder
    from headway.models.layers import DecoderLayer, Linear
    from headway.models.weights.load_described import build_described
except ModuleNotFoundError as error:
    explain_missing(error, "headway.testing")
    raise

WINDOW = 8  # default sliding window, for families that have one


def random_model(
    family: str = "llama", *, seed: int = 0, dtype: str = "float32", device: str = "cpu", **overrides: Any
) -> Decoder:
    """A small random decoder for `Engine(...)`. `overrides` are fields of `ModelConfig`: with a `description`, layers
    of any kind.

    The same seed and config give the same weights on every device, up to the rounding of the dtype.
    """
    where, config = pick_device(device), random_config(family, **overrides)
    draw = _RandomTensors(seed, getattr(torch, pick_dtype(dtype, where)), torch.device(str(where)))
    return _build(config, draw) if config.description == PLAIN else build_described(_RandomWeights(config, draw))


def random_config(family: str = "llama", **overrides: Any) -> ModelConfig:
    """The small config that `random_model` uses."""
    entry = next((f for f in FAMILIES if f.name == family), None)
    if entry is None or entry.describe is not None:
        plain = ", ".join(f.name for f in FAMILIES if f.describe is None)
        raise InvalidInput(f"family {family!r} is not known here; it must be one with Llama's layers: {plain}")
    known = {f.name for f in fields(ModelConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise InvalidInput(f"{unknown[0]!r} is not a field of ModelConfig; its fields are {', '.join(sorted(known))}")
    layers, head_dim = overrides.get("layers", 2), overrides.get("head_dim", 16)
    defaults: dict[str, Any] = {
        "family": family,
        "vocab_size": 97,
        "hidden_size": 64,
        "layers": layers,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": head_dim,
        "intermediate_size": 84,
        "max_positions": 1024,
        "norm_eps": 1e-5,
        "rope": Rope(head_dim),
        "tied": False,
        "qkv_bias": entry.qkv_bias is True,
        "o_bias": entry.o_bias is True,
        "mlp_bias": entry.mlp_bias is True,
        "qk_norm": entry.qk_norm,
        "windows": (WINDOW if entry.window == "all" else None,) * layers,
    }
    config = ModelConfig(**(defaults | overrides))
    if len(config.windows) != config.layers:
        raise InvalidInput(f"windows has {len(config.windows)} entries; {config.layers} layers need one each")
    return config


def random_adapter(
    config: ModelConfig,
    *,
    rank: int = 4,
    seed: int = 0,
    roles: Sequence[str] = ROLES,
    strength: float = 0.5,
    dtype: torch.dtype = torch.float32,
    head: bool = False,
) -> Adapter:
    """A random LoRA adapter for a model of this config, on these of its linear layers, of a given strength."""
    if missing := [role for role in roles if role not in target_shapes(config)]:
        has = ", ".join(target_shapes(config))
        raise InvalidInput(f"{missing[0]!r} is not a linear layer of this model that adapters change; it has {has}")
    generator = torch.Generator().manual_seed(seed)
    pairs: dict[Target, LowRank] = {}
    places = [
        (Target(layer, role), shape)
        for layer in (*range(config.layers), OUTSIDE)
        for shapes in [layer_targets(config, layer)]
        for role in roles
        if (shape := shapes.get(role)) is not None
    ]
    for target, (n, k) in [*places, *([(HEAD, head_shape(config))] if head else [])]:
        each = (count,) if (count := matrices_of(config, target.part)) else ()
        a, b = (torch.randn(*each, *shape, generator=generator) for shape in ((rank, k), (n, rank)))
        a, b = (a / math.sqrt(k)).to(dtype), (b * strength / math.sqrt(rank)).to(dtype)
        pairs[target] = LowRank(from_tensor(a), from_tensor(b), 1.0)
    return Adapter(pairs, name=f"random {seed}", in_order=True)


class _RandomTensors:
    """Random tensors from one seed, drawn in float32 on the CPU and then moved to the device."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device

    def normal(self, *shape: int, scale: float, mean: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=self._generator) * scale + mean).to(self.device, self.dtype)

    def norm(self, size: int) -> Tensor:
        return self.normal(size, scale=0.3, mean=1.0)

    def matrix(self, rows: int, width: int) -> Tensor:
        """A matrix with weights large enough for peaked attention and distinct logits."""
        return self.normal(rows, width, scale=1.5 / math.sqrt(width))

    def linear(self, rows: int, width: int, bias: bool) -> Linear:
        return Linear(self.matrix(rows, width), self.normal(rows, scale=0.3) if bias else None)


class _RandomWeights:
    """Random weights by role."""

    def __init__(self, config: ModelConfig, draw: _RandomTensors) -> None:
        self.config, self._draw, self.dtype, self.device = config, draw, draw.dtype, draw.device
        self.last: dict[str, Tensor] = {}

    def read(self, role: str, shape: tuple[int, ...], layer: int | None) -> Tensor:
        if "norm" in role and not role.endswith("_bias"):
            return self._draw.normal(*shape, scale=0.3, mean=0.0 if self.config.description.norm == "rms+1" else 1.0)
        is_matrix = len(shape) > 1 and not role.endswith("_bias") and role != "positions"
        return self._draw.normal(*shape, scale=1.5 / math.sqrt(max(shape[-1:])) if is_matrix else 0.3)

    def kept(self, roles: tuple[str, ...], layer: int) -> None:
        """Weights are floats."""

    def frequencies(self) -> Tensor:
        ropes = self.config.description.ropes or (self.config.rope,) * self.config.layers
        rows = np.zeros((len(ropes), self.config.rope.dim // 2), np.float32)
        for row, rope in zip(rows, ropes, strict=True):
            row[: rope.dim // 2] = frequencies(rope) if rope.dim else 0
        return tensor(rows).to(self.device)


def _build(c: ModelConfig, draw: _RandomTensors) -> Decoder:
    embedding = draw.matrix(c.vocab_size, c.hidden_size)
    return Decoder(
        config=c,
        embedding=embedding,
        layers=tuple(_layer(c, draw) for _ in range(c.layers)),
        final_norm=draw.norm(c.hidden_size),
        output=embedding if c.tied else draw.matrix(c.vocab_size, c.hidden_size),
        inv_freq=tensor(frequencies(c.rope)).to(embedding.device),
    )


def _layer(c: ModelConfig, draw: _RandomTensors) -> DecoderLayer:
    e, f, d = c.hidden_size, c.intermediate_size, c.head_dim
    return DecoderLayer(
        input_norm=draw.norm(e),
        qkv=draw.linear((c.heads + 2 * c.kv_heads) * d, e, c.qkv_bias),
        q_norm=draw.norm(d) if c.qk_norm else None,
        k_norm=draw.norm(d) if c.qk_norm else None,
        out=draw.linear(e, c.heads * d, c.o_bias),
        mlp_norm=draw.norm(e),
        gate_up=draw.linear(2 * f, e, c.mlp_bias),
        down=draw.linear(e, f, c.mlp_bias),
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=d,
        eps=c.norm_eps,
    )


def scripted_model(
    *, vocab_size: int = 97, max_positions: int = 1 << 20, recurrence: Recurrence | None = None
) -> Decoder:
    """The model of an engine with a `ScriptedRunner`. With a `recurrence` its results depend on recurrent state too, of
    the size that this says."""
    config: dict[str, Any] = {"layers": 1, "hidden_size": 2, "heads": 1, "kv_heads": 1, "head_dim": 2}
    model = random_model(vocab_size=vocab_size, max_positions=max_positions, intermediate_size=1, **config)
    if recurrence is None:
        return model
    description = Description(recurrence=recurrence, recurrent_layers=frozenset((0,)), both=True)
    return replace(model, config=replace(model.config, description=description))


def scripted_engine(
    *, vocab_size: int = 97, max_positions: int = 1 << 20, recurrence: Recurrence | None = None, **options: Any
) -> Engine:
    """An engine with a `ScriptedRunner`, whose passes cost almost nothing; options are those of `Engine`."""
    model = scripted_model(vocab_size=vocab_size, max_positions=max_positions, recurrence=recurrence)
    options.setdefault("threads", 1)
    runner = ScriptedRunner(vocab_size, options.setdefault("page_size", 16))
    return Engine(model, runner=runner, **options)


class ScriptedRunner:
    """A runner with a hash for a model, over real pages.

    A slot holds two numbers: a hash of its token and position, and a hash of that and of the first numbers of all slots
    it attends to. A row's result is a hash of the second numbers it attends to. So a wrong page, slot, position or mask
    anywhere changes the token, as with a real model; `scripted_result` computes the expected one. Recurrent state is a
    hash of all tokens in order, and then part of the result.
    """

    def __init__(self, vocab_size: int, page_size: int) -> None:
        self.vocab_size, self.page_size = vocab_size, page_size
        self._pages: dict[int, np.ndarray] = {}  # page → [2, page_size]
        self._states: dict[int, int] = {0: 0}  # place → recurrent state

    overlaps = False
    decode_limit = DECODE_LIMIT

    def reads(self, what: Probe, how: Sampling) -> bool:
        return False

    def samples(self, how: Sampling) -> bool:
        return not how.penalizes

    def load_adapter(self, adapter: BoundAdapter) -> DeviceWeights:
        raise Unsupported("the scripted runner has no weights, so it cannot add an adapter's; use random_model()")

    def edit(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            self._edit(edit)

    def begin(self, batch: Batch) -> InFlight:
        return Deferred(batch, self.page_size, self.execute)

    def execute(self, batch: Batch) -> list[SegmentResult]:
        """The values of every segment."""
        written = dict(zip(batch.write_rows.tolist(), batch.write_slots.tolist(), strict=True))
        return [self._segment(batch, segment, written) for segment in batch.segments]

    def _segment(self, batch: Batch, segment: Segment, written: dict[int, int]) -> SegmentResult:
        rows = segment.rows
        if len(rows) == 0:
            return SegmentResult(self._values(segment, batch, {}), None)
        mask, slots = dense_mask(segment, self.page_size), segment_slots(segment, self.page_size)
        first = [_hash(int(batch.tokens[r]) * 3 + 1, int(batch.positions[r])) for r in rows]
        self._write(0, rows, first, written)
        seen = self._read(0, segment)
        second = [_hash(a, _sum(seen, slots, m)) for a, m in zip(first, mask, strict=True)]
        self._write(1, rows, second, written)
        seen = self._read(1, segment)
        results = {r: _hash(b, _sum(seen, slots, m)) for r, b, m in zip(rows, second, mask, strict=True)}
        if segment.states is not None:
            tokens = [int(batch.tokens[r]) for r in rows]
            states = self._recur(tokens, segment.states.source, dict(segment.states.saves))
            results = {r: _hash(results[r], state) for r, state in zip(rows, states, strict=True)}
        return SegmentResult(self._values(segment, batch, results), results[rows[-1]] if segment.keep_last else None)

    def _recur(self, tokens: Sequence[int], source: int, saves: Mapping[int, int]) -> list[int]:
        """The recurrent state after each token, kept at the places in `saves` after so many."""
        outputs, state = [], self._states[source]
        for count, token in enumerate(tokens, 1):
            state = _hash(state, token * 5 + 2)
            outputs.append(state)
            if count in saves:
                self._states[saves[count]] = state
        assert len(tokens) in saves, "the state after the last row is kept"
        return outputs

    def _values(self, segment: Segment, batch: Batch, results: dict[int, int]) -> dict[int, object]:
        values = {}
        for index, row, readout in segment.readouts:
            if row == BEFORE:
                assert isinstance(segment.kept, int)
                values[index] = self._value(readout, segment.kept, segment.before_position)
            else:
                values[index] = self._value(readout, results[row], int(batch.positions[row]))
        return values

    def _value(self, readout: Readout, result: int, position: int) -> object:
        match readout.what:
            case Sampling() if readout.is_biased:
                raise Unsupported("the scripted runner has no logits to add a bias to; use a random model")
            case Sampling(temperature=temperature):
                if temperature > 0:
                    result = _hash(result, int(uniform(readout.seed, position, readout.ordinal) * (1 << 53)))
                try:
                    mask = readout.permitted()
                except HeadwayError as error:
                    return error
                allowed = np.arange(self.vocab_size) if mask is None else np.flatnonzero(mask)
                return int(allowed[result % len(allowed)])
            case Logits():
                return np.random.default_rng(result).standard_normal(self.vocab_size).astype(np.float32)
        raise Unsupported(f"the scripted runner does not support {type(readout.what).__name__}; use samplers or Logits")

    def _page(self, page: int) -> np.ndarray:
        return self._pages.setdefault(page, np.zeros((2, self.page_size), np.uint64))

    def _write(self, part: int, rows: range, numbers: list[int], written: dict[int, int]) -> None:
        for row, number in zip(rows, numbers, strict=True):
            if row in written:
                page, offset = divmod(written[row], self.page_size)
                self._page(page)[part, offset] = number

    def _read(self, part: int, segment: Segment) -> np.ndarray:
        return np.concatenate([self._page(int(p))[part] for p in segment.pages])

    def _edit(self, edit: Edit) -> None:
        match edit:
            case Clear(page, start):
                self._page(page)[:, start:] = 0
            case Copy(source, target, slots):
                self._page(target)[:, :slots] = self._page(source)[:, :slots]
            case Gather(pages, places, target, start, _, shift):
                if shift:
                    raise Unsupported("the scripted runner has no keys to rotate; append pages without a shift")
                moved = [self._page(page)[:, place].copy() for page, place in zip(pages, places, strict=True)]
                self._page(target)[:, start : start + len(moved)] = np.stack(moved, 1)
            case Export(pages, target):
                target.data = [self._page(p).copy() for p in pages]
            case Import(source, places, pages):
                assert isinstance(source.data, list)
                for place, page in zip(places, pages, strict=True):
                    self._page(page)[:] = source.data[place]
            case Save(pages, store, places, names):
                store.save(places, names, pages, lambda pages: [self._page(p).copy() for p in pages])
            case Load(source, places, names, pages):
                for page, data in zip(pages, source.load(places, names), strict=True):
                    self._page(page)[:] = data


def scripted_result(tokens: Any, positions: Any, attend: np.ndarray, row: int, *, recurrent: bool = False) -> int:
    """The expected result of a row of a whole sequence; attend [n, n] is its attention mask."""
    slots = np.arange(len(tokens))
    first = np.array([_hash(int(t) * 3 + 1, int(p)) for t, p in zip(tokens, positions, strict=True)], np.uint64)
    second = np.array([_hash(int(a), _sum(first, slots, m)) for a, m in zip(first, attend, strict=True)], np.uint64)
    result = _hash(int(second[row]), _sum(second, slots, attend[row]))
    if not recurrent:
        return result
    state = 0
    for token in tokens[: row + 1]:
        state = _hash(state, int(token) * 5 + 2)
    return _hash(result, state)


@contextmanager
def stepping(engine: Engine, *, ahead: bool = False) -> Iterator[Callable[[], None]]:
    """Take the engine's steps by hand: its worker rests, and each call of what this yields takes one step, if any.

    With `ahead` a step may be in flight between two calls, as it is when the worker takes them.
    """
    loop = engine._loop

    def step() -> None:
        with loop.lock:
            idle = not (loop._has_work() or loop._calls or loop._in_flight)
        if not idle:
            loop._next()
        loop._deliver(now=True)

    with loop.lock:
        loop._paused, loop._one_by_one = True, not ahead
    loop.call(lambda: None)  # the worker is past whatever it was doing
    try:
        yield step
    finally:
        with loop.lock:
            loop._paused = loop._one_by_one = False
            loop._changed.notify_all()


def _sum(numbers: np.ndarray, slots: np.ndarray, seen: np.ndarray) -> int:
    weights = slots[seen].astype(np.uint64) * np.uint64(2) + np.uint64(1)
    return int((numbers[seen] * weights).sum(dtype=np.uint64))


def _hash(a: int, b: int) -> int:
    """A hash of two numbers, below 2**63."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 31)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    return (x ^ (x >> 29)) >> 1
