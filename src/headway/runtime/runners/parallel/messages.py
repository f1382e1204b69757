"""What ranks are told, as plain values and arrays: batches, edits of pages, adapters, a model's config and weights.

A rank computes the same rows as the controller on the same pages, so a batch is sent as it is: rows, slots, page tables
and masks as runs. Samplers, probes and logit masks stay with the controller, which alone reads the results; of probes
the ranks learn which attention they must bring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from headway.base.arrays import widen
from headway.base.dataclass import dataclass
from headway.base.specs.adapters import AdapterMix, LoadedWeights
from headway.base.specs.brle import Brle
from headway.kernels.host.attention import Window
from headway.kernels.host.rope import Rope
from headway.kv.allocator import Clear, Copy, Edit, Export, Gather, HostPages, Import
from headway.models.adapters.bound import BoundAdapter
from headway.models.adapters.low_rank import LowRank
from headway.models.config import ModelConfig
from headway.models.description import Description, Experts
from headway.models.hooks import Hooks
from headway.runtime.adapters import LoadedAdapter
from headway.runtime.batch import Batch, Segment
from headway.runtime.runners.attention_groups import score_group
from headway.runtime.runners.parallel.channel import RankMessage

HEADS = 4  # the dimension of heads in pages [L, 2, pages, page, Hkv, D]
NumberOf = Callable[[LoadedWeights], int]  # the number under which ranks know an adapter


@dataclass(frozen=True, eq=False)
class RankStep:
    """A batch as a rank computes it, and the attention that is read: (layer, segment, row)."""

    batch: Batch
    scores: Sequence[tuple[int, int, int]]

    def hooks(self, windows: Sequence[Window], page_size: int) -> Hooks:
        """What the forward must look at on its way."""
        scores: dict[int, list[Any]] = {}
        for layer, segment, row in self.scores:
            group = score_group(self.batch.segments[segment], row, windows[layer], page_size)
            scores.setdefault(layer, []).append(group)
        return Hooks(scores=scores)


# -- batches ---------------------------------------------------------------------------------------------------------


def step_message(batch: Batch, scores: Sequence[tuple[int, int, int]], number_of: NumberOf) -> RankMessage:
    """A batch without decode rows; `scores` as `RankStep` has them."""
    segments = batch.segments
    masks = [mask for segment in segments for mask in segment.masks]
    runs = [() if mask is None else mask.runs for mask in masks]
    mixes, which = _mixes(batch, number_of)
    arrays = [
        batch.tokens,
        batch.positions,
        batch.write_rows,
        batch.write_slots,
        _ints([(len(s.rows), len(s.pages), len(s.slot_positions)) for s in segments], 3),
        _joined([s.slots for s in segments]),
        _joined([s.pages for s in segments]),
        _joined([s.numbers for s in segments]),
        _joined([s.slot_positions for s in segments]),
        _ints([-1 if mask is None else len(mask.runs) for mask in masks]),
        _ints([run for row in runs for run in row]),
        _ints(scores, 3),
        _ints(which),
    ]
    return RankMessage("step", {"mixes": mixes}, arrays)


def read_step(message: RankMessage, adapters: Mapping[int, LoadedAdapter]) -> RankStep:
    """What `step_message` sent; `adapters` by their numbers."""
    tokens, positions, write_rows, write_slots, counts, slots, pages, numbers, known, runs, flat, scores, which = (
        message.arrays
    )
    mixes = [AdapterMix.of([(adapters[number], scale) for number, scale in mix]) for mix in message.values["mixes"]]
    masks = _masks(runs.tolist(), flat.tolist())
    segments, row, page, slot = [], 0, 0, 0
    for rows, count, positions_known in counts.tolist():
        own = which[row : row + rows].tolist() if len(which) else []
        segments.append(
            Segment(
                rows=range(row, row + rows),
                slots=slots[row : row + rows],
                pages=pages[page : page + count],
                numbers=numbers[page : page + count],
                masks=masks[row : row + rows],
                slot_positions=known[slot : slot + positions_known],
                readouts=(),
                keep_last=False,
                kept=None,
                before_position=-1,
                adapters=tuple([None if i < 0 else mixes[i] for i in own]) if any(i >= 0 for i in own) else None,
            )
        )
        row, page, slot = row + rows, page + count, slot + positions_known
    batch = Batch(tokens, positions, write_rows, write_slots, tuple(segments))
    return RankStep(batch, [(l, s, r) for l, s, r in scores.tolist()])


def _mixes(batch: Batch, number_of: NumberOf) -> tuple[list[list[tuple[int, float]]], list[int]]:
    """The mixes of a batch as (adapter's number, scale), and which of them each row has; -1 for none."""
    rows = batch.adapters
    if rows is None:
        return [], []
    numbers: dict[bytes, int] = {}
    mixes, which = [], []
    for mix in rows:
        if mix is None:
            which.append(-1)
            continue
        if mix.key not in numbers:
            numbers[mix.key] = len(mixes)
            mixes.append([(number_of(adapter), scale) for adapter, scale in mix.uses])
        which.append(numbers[mix.key])
    return mixes, which


def _masks(counts: list[int], runs: list[int]) -> tuple[Brle | None, ...]:
    masks, at = [], 0
    for count in counts:
        masks.append(None if count < 0 else Brle._from_canonical(tuple(runs[at : at + count])))
        at += max(0, count)
    return tuple(masks)


def _ints(values: Sequence[Any], width: int = 0) -> np.ndarray:
    array = np.array(values, np.int64)
    return array.reshape(-1, width) if width else array


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64, copy=False) if arrays else np.empty(0, np.int64)


# -- edits of pages --------------------------------------------------------------------------------------------------


def edit_message(edits: Sequence[Edit]) -> RankMessage:
    """Edits in order. What is imported goes along with all its heads."""
    listed: list[Any] = []
    arrays: list[np.ndarray] = []
    for edit in edits:
        match edit:
            case Clear(page, start):
                listed.append(["clear", page, start])
            case Copy(source, target, slots):
                listed.append(["copy", source, target, slots])
            case Gather():
                parts = [list(edit.pages), list(edit.places), edit.target, edit.start, list(edit.positions), edit.shift]
                listed.append(["gather", *parts])
            case Export(pages):
                listed.append(["export", list(pages)])
            case Import(source, places, pages):
                assert isinstance(source.data, np.ndarray)
                listed.append(["import", list(pages), len(arrays)])
                arrays.append(source.data[:, :, list(places)])
    return RankMessage("edit", {"edits": listed}, arrays)


def read_edits(message: RankMessage, rank: int, size: int) -> list[Edit]:
    """What `edit_message` sent, with this rank's heads of what is imported."""
    edits: list[Edit] = []
    for kind, *parts in message.values["edits"]:
        match kind:
            case "clear":
                edits.append(Clear(*parts))
            case "copy":
                edits.append(Copy(*parts))
            case "gather":
                pages, places, target, start, positions, shift = parts
                edits.append(Gather(tuple(pages), tuple(places), target, start, tuple(positions), shift))
            case "export":
                edits.append(Export(tuple(parts[0]), HostPages(())))
            case "import":
                pages, at = parts
                edits.append(
                    own_heads(Import(HostPages((), message.arrays[at]), _all(pages), tuple(pages)), rank, size)
                )
            case _:
                raise AssertionError(kind)
    return edits


def own_heads(edit: Import, rank: int, size: int) -> Import:
    """The import of a rank's own heads."""
    data = edit.source.data
    assert isinstance(data, np.ndarray)
    data = data[:, :, list(edit.places)]
    count = data.shape[HEADS] // size
    own = np.ascontiguousarray(data[:, :, :, :, rank * count : (rank + 1) * count])
    return Import(HostPages(edit.source.numbers, own), _all(edit.pages), edit.pages)


def _all(pages: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(len(pages)))


WHOLE = ("router", "shared_router")  # matrices that every rank has


# -- adapters --------------------------------------------------------------------------------------------------------


def adapter_message(adapter: BoundAdapter, number: int) -> RankMessage:
    """The layers' matrices of an adapter, whole; the head's stay with the controller."""
    assert not adapter.outer, "models with such matrices are not split"
    listed: list[Any] = []
    arrays: list[np.ndarray] = []
    for layer, pairs in enumerate(adapter.layers):
        for role, pair in pairs.items():
            listed.append([layer, role, pair.scaling])
            arrays += [widen(pair.a), widen(pair.b)]
    values = {"number": number, "digest": adapter.digest, "layers": len(adapter.layers), "pairs": listed}
    return RankMessage("adapter", values, arrays)


def read_adapter(message: RankMessage) -> BoundAdapter:
    """What `adapter_message` sent."""
    layers: list[dict[str, LowRank]] = [{} for _ in range(message.values["layers"])]
    for i, (layer, role, scaling) in enumerate(message.values["pairs"]):
        layers[layer][role] = LowRank(message.arrays[2 * i], message.arrays[2 * i + 1], scaling)
    return BoundAdapter(message.values["digest"], "", tuple(layers))


def own_adapter(adapter: BoundAdapter, rank: int, size: int, experts: Experts | None) -> BoundAdapter:
    """A rank's share of an adapter: B's rows where a matmul's outputs are split, A's columns where its inputs are; the
    pairs of its own experts and of routers whole."""
    each = 0 if experts is None else experts.count // size
    layers = []
    for pairs in adapter.layers:
        own = {}
        for role, pair in pairs.items():
            a, b = widen(pair.a), widen(pair.b)
            if role in WHOLE:
                own[role] = pair
                continue
            if "." in role:  # of one expert, which a rank has whole
                own |= {role: pair} if int(role.partition(".")[2]) // each == rank else {}
                continue
            if role in ("o", "down", "shared_down"):
                count = a.shape[1] // size
                a = np.ascontiguousarray(a[:, rank * count : (rank + 1) * count])
            else:
                count = b.shape[0] // size
                b = np.ascontiguousarray(b[rank * count : (rank + 1) * count])
            own[role] = LowRank(a, b, pair.scaling)
        layers.append(own)
    return BoundAdapter(adapter.digest, adapter.name, tuple(layers), adapter.head if rank == 0 else None)


# -- a model's config ------------------------------------------------------------------------------------------------


def config_values(config: ModelConfig) -> dict[str, Any]:
    """A config as plain values. Recurrent layers are not split, so that a config has none."""
    assert config.description.recurrence is None
    values = asdict(config)
    del values["description"]["recurrence"], values["description"]["recurrent_layers"]
    experts = values["description"]["experts"]
    if experts is not None:
        experts["dense_layers"] = sorted(experts["dense_layers"])
    return values


def read_config_values(values: Mapping[str, Any]) -> ModelConfig:
    """What `config_values` gave, through json."""
    given = dict(values)
    description = dict(given["description"])
    if description["ropes"] is not None:
        description["ropes"] = tuple([_rope(each) for each in description["ropes"]])
    if description["experts"] is not None:
        experts: dict[str, Any] = dict(description["experts"])
        experts["dense_layers"] = frozenset(experts["dense_layers"])
        description["experts"] = Experts(**experts)
    given["description"] = Description(**description)
    given["rope"], given["windows"] = _rope(given["rope"]), tuple(given["windows"])
    return ModelConfig(**given)


def _rope(values: Mapping[str, Any]) -> Rope:
    factors = values["factors"]
    return Rope(**{**values, "factors": None if factors is None else tuple(factors)})
