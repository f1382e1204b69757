"""Quantized experts on tensor cores against their floats: every form and tile, pair by pair, in blocks, for one row.

Without a GPU the kernels run in Triton's interpreter, and numpy computes their inline assembly (`support.ptx`).
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.kernels.host.expert_form import FP4, ExpertForm  # noqa: E402
from headway.kernels.triton.experts import matmul as experts  # noqa: E402
from headway.kernels.triton.experts.matmul import ExpertBlocks, ExpertGate, ExpertOperand, Routes  # noqa: E402
from headway.kernels.triton.experts.quantized import (  # noqa: E402
    StripTile,
    pick_strip_tile,
    strip_add_down,
    strip_matmul,
    takes,
)
from headway.kernels.triton.matmul import MatmulTile  # noqa: E402
from headway.models.quantized.fp4 import Fp4Experts  # noqa: E402
from headway.models.quantized.int_experts import GroupedMatrix, IntExperts  # noqa: E402
from support.ptx import run_inline_assembly  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
GATE = ExpertGate("silu", 7.0, 1.702)
COUNT = 5
Q4_0, Q4_1, Q8_0 = ExpertForm("int4"), ExpertForm("int4", minimum=True), ExpertForm("int8")
Q4_K, Q5_K = (ExpertForm(kind, 32, steps=True, minimum=True) for kind in ("int4", "int8"))
Q3_K, Q6_K = (ExpertForm(kind, 16, steps=True) for kind in ("int4", "int8"))
Q2_K, Q5_1, IQ4_XS = ExpertForm("int4", 16, True, True), ExpertForm("int8", minimum=True), ExpertForm("int8", 32, True)
FORMS = (FP4, Q4_0, Q4_1, Q8_0, Q5_1, Q4_K, Q5_K, IQ4_XS, Q3_K, Q6_K, Q2_K)
QUICK = (FP4, Q8_0, Q4_K, Q6_K)
CASES = [f if f in QUICK or DEVICE == "cuda" else pytest.param(f, marks=pytest.mark.slow) for f in FORMS]
TILES = [
    (1, None),
    (3, StripTile(1, 2, 1, warps=2)),
    (9, StripTile(1, 1, 1, wide=True)),
    (17, StripTile(2, 1, 2, warps=2, wide=True)),
]


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE == "cpu":
        run_inline_assembly(monkeypatch)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def integers(form: ExpertForm, n: int, k: int, seed: int) -> GroupedMatrix:
    """A matrix of any integers that the form has, with scales of both signs."""
    generator = torch.Generator().manual_seed(seed)
    quants = torch.randint(0, 16 if form.kind == "int4" else 256, (n, k), generator=generator, dtype=torch.uint8)
    parts: dict[str, Any] = {}
    for at, name in enumerate(("scale", "minimum")[: 1 + form.minimum]):
        width = k // 256 if form.steps else k // form.group
        parts[name] = (torch.randn(n, width, generator=generator) * (1, 9)[at]).half()
        if form.steps:
            steps = torch.randint(-128, 128, (n, k // form.group), generator=generator, dtype=torch.int8)
            parts["minimum_steps" if at else "steps"] = steps
    return GroupedMatrix(**{"quants": quants} | parts, zero=form.zero)


def kept(form: ExpertForm, n: int, k: int, *, gated: bool) -> Fp4Experts | IntExperts:
    if form == FP4:
        generator = torch.Generator().manual_seed(n + k)
        codes = torch.randint(0, 256, (COUNT, n, k // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(118, 130, (COUNT, n, k // 32), generator=generator, dtype=torch.uint8)
        return Fp4Experts.of(codes.to(DEVICE), scales.to(DEVICE), draw(COUNT, n, seed=1), torch.float32, gated=gated)
    matrices = [integers(form, n, k, seed=x) for x in range(COUNT)]
    on_device = [
        GroupedMatrix(**{a: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for a, v in vars(m).items()})
        for m in matrices
    ]
    made = IntExperts.of(form, on_device, torch.float32, gated=gated, exponent=-3)
    return replace(made, bias=draw(COUNT, n, seed=1))


def operand(form: ExpertForm, n: int, k: int, *, gated: bool) -> tuple[ExpertOperand, torch.Tensor]:
    """Experts, and their floats."""
    w = kept(form, n, k, gated=gated)
    halves = w.halves if isinstance(w, IntExperts) else None
    return ExpertOperand(w.words, w.bias, form, w.scales, halves, w.exponent, gated), w.weight


def routes_of(rows: int, chosen: int) -> Routes:
    generator = torch.Generator().manual_seed(rows)
    ids = torch.stack([torch.randperm(COUNT, generator=generator)[:chosen] for _ in range(rows)])
    return Routes(ids.int().to(DEVICE), torch.rand(rows, chosen, generator=generator).to(DEVICE))


def in_order(routes: Routes, rows: int) -> ExpertBlocks:
    pairs = routes.chosen.numel()
    order = torch.empty(pairs, dtype=torch.int32, device=DEVICE)
    blocks = torch.empty(experts.most_blocks(pairs, COUNT, rows), 3, dtype=torch.int32, device=DEVICE)
    experts.sort_by_expert(routes.chosen, COUNT, into := ExpertBlocks(order, blocks), rows)
    return into


def expected(x: torch.Tensor, w: ExpertOperand, floats: torch.Tensor, routes: Routes) -> torch.Tensor:
    """What each pair's expert makes of its row, before any gate."""
    ids = routes.chosen.flatten().long()
    rows = x.double().repeat_interleave(len(ids) // len(x), 0)
    assert w.bias is not None
    return torch.einsum("pnk,pk->pn", floats[ids].double(), rows) + w.bias[ids].double()


def gated(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, 1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def near(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want.float(), atol=2e-4 * want.abs().max().item(), rtol=1e-3)


def widths(form: ExpertForm) -> tuple[int, ...]:
    """Those of halves are for 256 inputs."""
    return (256, 768) if form.steps else (96, 576)


@pytest.mark.parametrize("form", CASES, ids=str)
@pytest.mark.parametrize(("rows", "tile"), TILES)
def test_every_pair_is_multiplied_by_its_expert(rows: int, tile: StripTile | None, form: ExpertForm) -> None:
    for k, dtype in zip(widths(form), (torch.bfloat16, torch.float16), strict=True):
        dtype = dtype if takes(form, dtype) else torch.bfloat16
        routes, x = routes_of(rows, 2), draw(rows, k, seed=2, dtype=dtype)
        used = tile or pick_strip_tile(0.0, form)
        by = None if tile is None else in_order(routes, tile.rows)
        for paired, gate in ((True, GATE), (True, None), (False, None)):
            w, floats = operand(form, 24, k, gated=paired)
            want = expected(x, w, floats, routes)
            want = want if gate is None else gated(want)
            found = torch.full(want.shape, float("nan"), device=DEVICE)
            strip_matmul(x, w, found, routes, used, by=by, gate=gate)
            near(found, want)


@pytest.mark.parametrize("form", CASES, ids=str)
@pytest.mark.parametrize(("n", "chosen"), [(40, 3), (24, 2), (32, 4)])
def test_the_experts_of_a_row_are_summed_where_they_are_computed(n: int, chosen: int, form: ExpertForm) -> None:
    k = {3: widths(form)[0], 2: widths(form)[1], 4: 1024 if form.steps else 1088}[chosen]
    (w, floats), routes, x = operand(form, n, k, gated=False), routes_of(1, chosen), draw(chosen, k, seed=3)
    residual = draw(n, seed=4).float()
    want = residual + (expected(x, w, floats, routes) * routes.weights[0][:, None]).sum(0)
    found = residual.clone()
    strip_add_down(x, w, found, routes)
    near(found, want)


@pytest.mark.parametrize("form", CASES, ids=str)
@pytest.mark.parametrize("by_block", [False, True])
def test_rows_in_float32_are_multiplied_one_number_at_a_time(by_block: bool, form: ExpertForm) -> None:
    """Matrices that are stored for a gate also without it, for what adapters add."""
    k, routes = widths(form)[0], routes_of(9, 2)
    x, tile = draw(9, k, seed=2).float(), MatmulTile(16, 32, 32, stages=2)
    by = in_order(routes, tile.rows) if by_block else None
    for paired, gate in ((True, GATE), (True, None), (False, None)):
        w, floats = operand(form, 24, k, gated=paired)
        want = expected(x, w, floats, routes)
        want = want if gate is None else gated(want)
        found = torch.full(want.shape, float("nan"), device=DEVICE)
        experts.expert_matmul(x, w, found, routes, tile, by=by, gate=gate)
        near(found, want)


@pytest.mark.parametrize("form", FORMS[1:], ids=str)
@pytest.mark.parametrize("paired", [True, False])
def test_integers_and_scales_come_back(paired: bool, form: ExpertForm) -> None:
    k = widths(form)[1]
    matrices = [integers(form, 40, k, seed=x) for x in range(2)]

    def wide(scale: torch.Tensor, steps: torch.Tensor | None) -> torch.Tensor:
        scale = scale.float().repeat_interleave(k // scale.shape[1], 1)
        return scale if steps is None else scale * steps.float().repeat_interleave(form.group, 1)

    for found, m in zip(IntExperts.of(form, matrices, torch.float32, gated=paired).weight, matrices, strict=True):
        values = (m.quants.float() - form.zero) * wide(m.scale, m.steps)
        assert torch.equal(found, values if m.minimum is None else values + wide(m.minimum, m.minimum_steps))


@pytest.mark.parametrize("paired", [True, False])
def test_codes_and_scales_come_back(paired: bool) -> None:
    """Scales beyond those whose floats a kernel could make are kept too."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (2, 40, 48), generator=generator, dtype=torch.uint8)
    scales = torch.randint(90, 160, (2, 40, 3), generator=generator, dtype=torch.uint8)
    made = Fp4Experts.of(codes, scales, None, torch.float32, gated=paired)
    assert made.exponent == int(scales.max()) - 128
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = torch.cat((values, -values))[torch.stack((codes & 15, codes >> 4), -1).flatten(2).int()]
    assert torch.equal(made.weight, values * torch.exp2(scales.float() - 127).repeat_interleave(32, 2))
