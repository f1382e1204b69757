"""The results of `cpu.py` against rivals, limits and targets, as JSON and as a table."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from cpu_plan import BF16_KV, Entry

from headway.bench.models import SHAPES

INTEGER = ("q4_0", "q8_0", "q4_k", "int8", "int4", "ov-int4", "ov-int8")


@dataclass
class Measured:
    """One engine's runs."""

    engine: str
    form: str
    facts: dict[str, Any]
    bytes: int | None  # of weights that a step reads
    values: list[float] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)
    chosen: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass
class Outcome:
    """One entry: Headway first, then whoever else could do it."""

    entry: Entry
    label: str
    unit: str
    measured: list[Measured]
    wanted: dict[tuple[str, str], float | None]
    notes: list[str] = field(default_factory=list)

    @property
    def ours(self) -> Measured:
        return self.measured[0]

    def ratio(self, other: Measured) -> float:
        """How many times as good Headway is."""
        ours, theirs = self.ours.median, other.median
        return ours / theirs if self.unit == "tokens/s" else theirs / ours

    def share(self, one: Measured, limits: dict[str, Any]) -> float | None:
        """How much of what the machine allows: of its memory at one sequence, of its arithmetic over a prompt."""
        work = self.entry.work
        if work.kind == "decode" and work.sequences == 1 and one.bytes:
            return one.median * one.bytes / limits["read_memory"]["best"]
        if work.kind == "prefill":
            products, attention = SHAPES[self.entry.shape].prefill_flops(work.prompt)
            kind = "int8_product" if one.form.removesuffix(BF16_KV) in INTEGER else "float32_product"
            least = products / limits[kind]["best"] + attention / limits["float32_product"]["best"]
            return one.median / work.prompt * least
        return None

    def fell_back(self, required: str) -> str | None:
        """Which path computed Headway's part, if it is not the one that was required."""
        others = [path for path in sorted(self.ours.paths) if required not in path]
        return None if required == "any" or not others else others[0]

    def to_json(self, limits: dict[str, Any], required: str) -> dict[str, Any]:
        engines = [self._engine(one, limits) for one in self.measured]
        missed = [e["engine"] for e in engines if e.get("met") is False]
        share = engines[0]["share_of_limit"]
        return {
            "work": self.label,
            "shape": self.entry.shape,
            "form": self.entry.form,
            "unit": self.unit,
            "share_wanted": self.entry.share,
            "share_met": None if self.entry.share is None or share is None else share >= self.entry.share,
            "missed": missed,
            "fell_back": self.fell_back(required),
            "engines": engines,
            "notes": self.notes,
        }

    def _engine(self, one: Measured, limits: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {
            "engine": one.engine,
            "form": one.form,
            "median": one.median,
            "least": min(one.values),
            "most": max(one.values),
            "values": one.values,
            "share_of_limit": self.share(one, limits),
            "weight_bytes": one.bytes,
            "path": ", ".join(sorted(one.paths)),
            "facts": one.facts,
        }
        if one is self.ours:
            return found
        wanted, ratio = self.wanted.get((one.engine, one.form)), self.ratio(one)
        found |= {"ratio": ratio, "wanted": wanted, "met": None if wanted is None else ratio >= wanted}
        if one.chosen and self.ours.chosen:
            found["same_tokens"] = _common(one.chosen, self.ours.chosen)
        return found


HEADERS = ("work", "engine", "median", "least–most", "of limit", "ahead", "wanted", "path")


def table(found: list[dict[str, Any]]) -> str:
    """All outcomes: one line for each engine, Headway's first."""
    rows: list[tuple[str, ...]] = [HEADERS]
    for outcome in found:
        for number, one in enumerate(outcome["engines"]):
            rows.append(_row(outcome, one, first=number == 0))
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADERS) - 1)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)) + f"  {row[-1]}" for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _row(outcome: dict[str, Any], one: dict[str, Any], *, first: bool) -> tuple[str, ...]:
    share, ratio = one["share_of_limit"], one.get("ratio")
    if first:
        wanted, met = outcome["share_wanted"], outcome["share_met"]
        aim = "" if wanted is None else f"{wanted:.0%} of limit: {_verdict(met)}"
    else:
        aim = "" if one["wanted"] is None else f"{one['wanted']:.2g} ×: {_verdict(one['met'])}"
    path = one["path"] if len(one["path"]) <= 60 else f"{one['path'][:57]}…"
    return (
        f"{outcome['work']}, {outcome['unit']}" if first else "",
        f"{one['engine']} {one['form']}",
        f"{one['median']:.4g}",
        f"{one['least']:.4g}–{one['most']:.4g}",
        "" if share is None else f"{share:.0%}",
        "" if ratio is None else f"{ratio:.2f} ×",
        aim,
        f"{path} FELL BACK" if first and outcome["fell_back"] else path,
    )


def _verdict(met: bool | None) -> str:
    return {True: "met", False: "missed", None: "not judged"}[met]


def _common(a: list[int], b: list[int]) -> int:
    """How many tokens two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
