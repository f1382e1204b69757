"""Experts in Triton against torch: routing with ties, the order of pairs, matmuls of each expert's rows, their sum."""

from __future__ import annotations

import os

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from headway.kernels.reference.experts import route  # noqa: E402
from headway.kernels.reference.mlp import activate  # noqa: E402
from headway.kernels.triton.experts import matmul as experts  # noqa: E402
from headway.kernels.triton.experts import rows as expert_rows  # noqa: E402
from headway.kernels.triton.experts.matmul import ExpertBlocks, ExpertGate, ExpertOperand, Routes  # noqa: E402
from headway.kernels.triton.experts.rows import Router  # noqa: E402
from headway.kernels.triton.matmul import MatmulTile  # noqa: E402
from headway.kernels.triton.matvec import RmsNorm  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
TILE = MatmulTile(16, 32, 32, stages=2)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def empty_routes(rows: int, count: int) -> Routes:
    chosen = torch.full((rows, count), -1, dtype=torch.int32, device=DEVICE)
    return Routes(chosen, torch.full((rows, count), float("nan"), device=DEVICE))


def ordered(chosen: torch.Tensor, count: int, rows: int) -> ExpertBlocks:
    pairs = chosen.numel()
    order = torch.full((pairs,), -1, dtype=torch.int32, device=DEVICE)
    blocks = torch.full((experts.most_blocks(pairs, count, rows), 3), -1, dtype=torch.int32, device=DEVICE)
    experts.sort_by_expert(chosen, count, into := ExpertBlocks(order, blocks), rows)
    return into


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("count", "chosen"), [(9, 4), (5, 1), (33, 8), (4, 4)])
def test_routing_takes_the_highest_and_of_equals_the_lower(normalize: bool, count: int, chosen: int) -> None:
    logits = torch.randint(0, 4, (20, count), generator=torch.Generator().manual_seed(0)).float().to(DEVICE)
    logits[0], logits[1, ::2] = 0, float("-inf")
    routes = empty_routes(20, chosen)
    experts.route(logits, routes, normalize=normalize)
    ids, weights = route(logits, chosen, normalize=normalize)
    assert torch.equal(routes.chosen.long(), ids)
    torch.testing.assert_close(routes.weights, weights)
    experts.route(logits, routes, normalize=False, sigmoid=True)
    assert torch.equal(routes.chosen.long(), ids)
    torch.testing.assert_close(routes.weights, logits.gather(1, ids).sigmoid())


def test_rows_that_are_not_numbers_go_to_some_experts() -> None:
    """Padded rows of a graph hold anything; what they read must be there."""
    routes = empty_routes(3, 2)
    experts.route(torch.full((3, 5), float("nan"), device=DEVICE), routes, normalize=True)
    assert ((routes.chosen >= 0) & (routes.chosen < 5)).all()


@pytest.mark.parametrize(
    ("rows", "count", "chosen", "tile"), [(1, 4, 2, 16), (40, 3, 2, 16), (37, 9, 4, 32), (9, 64, 3, 16)]
)
def test_pairs_are_put_in_the_order_of_their_experts(rows: int, count: int, chosen: int, tile: int) -> None:
    ids = torch.randint(0, count, (rows, chosen), generator=torch.Generator().manual_seed(1)).int()
    ids[:, 0] = min(2, count - 1)  # one expert has every row
    into = ordered(ids.to(DEVICE), count, tile)
    assert torch.equal(into.order.cpu().long(), ids.flatten().sort(stable=True).indices)
    covered = []
    for expert, first, held in into.blocks.tolist():
        if held:
            assert 0 < held <= tile
            covered += range(first, first + held)
            assert {ids.flatten()[i].item() for i in into.order[first : first + held].tolist()} == {expert}
    assert covered == list(range(rows * chosen))


@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("gate", [ExpertGate("silu"), ExpertGate("gelu_tanh"), ExpertGate("silu", 0.8, 1.7)])
def test_every_pair_is_multiplied_by_the_matrices_of_its_expert(by_block: bool, gate: ExpertGate) -> None:
    rows, count, k, wide, inner = 11, 4, 2, 50, 40
    x, up, down = draw(rows, wide), draw(count, 2 * inner, wide, seed=1), draw(count, wide, inner, seed=2)
    up_bias, down_bias = draw(count, 2 * inner, seed=3), draw(count, wide, seed=4)
    routes = empty_routes(rows, k)
    experts.route(draw(rows, count, seed=5), routes, normalize=True)
    by = ordered(routes.chosen, count, TILE.rows) if by_block else None
    hidden, parts = (torch.full((rows * k, n), float("nan"), device=DEVICE) for n in (inner, wide))
    experts.expert_matmul(x, ExpertOperand(up, up_bias), hidden, routes, TILE, by=by, gate=gate, weighted=True)
    experts.expert_matmul(hidden, ExpertOperand(down, down_bias), parts, routes, TILE, by=by)
    shared, shared_gate, out = draw(rows, wide, seed=6), draw(rows, 1, seed=7), torch.empty(rows, wide, device=DEVICE)
    experts.combine(parts, routes, out, weighted=True, shared=shared, shared_gate=shared_gate)
    for row in range(rows):
        total = shared[row] * shared_gate[row].sigmoid()
        for j, expert in enumerate(routes.chosen[row].tolist()):
            both = up[expert] @ (x[row] * routes.weights[row, j]) + up_bias[expert]
            first, second = both.chunk(2)
            if gate.clamp is None:
                middle = activate(first, gate.activation, exact=True) * second
            else:
                first, second = first.clamp(max=gate.clamp), second.clamp(-gate.clamp, gate.clamp)
                middle = (second + 1) * first * torch.sigmoid(gate.alpha * first)
            torch.testing.assert_close(hidden[row * k + j], middle, atol=1e-3, rtol=1e-3)
            total = total + (down[expert] @ middle + down_bias[expert]) * routes.weights[row, j]
        torch.testing.assert_close(out[row], total, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("count", "chosen"), [(9, 4), (5, 1), (4, 4), (200, 3)])
def test_a_row_is_normed_and_routed_in_one_kernel(normalize: bool, count: int, chosen: int) -> None:
    wide = 40
    x, weight, scale, bias = draw(wide), draw(count, wide, seed=1), draw(wide, seed=2), draw(count, seed=3)
    weight[3], bias[3] = weight[1], bias[1]  # ties
    logits, arrived = torch.empty(count, device=DEVICE), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    h, routes = torch.empty_like(x), empty_routes(1, chosen)
    router = Router(weight, bias, logits, arrived, normalize)
    for _ in range(2):
        expert_rows.norm_and_route(x, RmsNorm(scale, 1e-5), h, router, routes)
        normed = x * torch.rsqrt((x * x).mean() + 1e-5) * scale
        torch.testing.assert_close(h, normed)
        torch.testing.assert_close(logits, weight @ normed + bias, atol=1e-4, rtol=1e-4)
        ids, weights = route(logits[None], chosen, normalize=normalize)
        assert torch.equal(routes.chosen.long(), ids)
        torch.testing.assert_close(routes.weights, weights)
    expert_rows.norm_and_route(x * float("nan"), RmsNorm(scale, 1e-5), h, router, routes)
    assert ((routes.chosen >= 0) & (routes.chosen < count)).all()


@pytest.mark.parametrize(("wide", "inner", "chosen"), [(50, 37, 3), (256, 64, 4)])
@pytest.mark.parametrize("gate", [ExpertGate("silu"), ExpertGate("silu", 0.8, 1.7)])
def test_experts_of_one_row_give_what_its_pairs_give(wide: int, inner: int, chosen: int, gate: ExpertGate) -> None:
    count = 6
    x, residual = draw(1, wide), draw(wide, seed=9)
    up = ExpertOperand(draw(count, 2 * inner, wide, seed=1), draw(count, 2 * inner, seed=3))
    down = ExpertOperand(draw(count, wide, inner, seed=2), draw(count, wide, seed=4))
    routes = empty_routes(1, chosen)
    experts.route(draw(1, count, seed=5), routes, normalize=True)
    inners = torch.empty(2, chosen, inner, device=DEVICE)
    expert_rows.gate_times_up(x, up, inners[0], routes, gate)
    experts.expert_matmul(x, up, inners[1], routes, TILE, gate=gate)
    torch.testing.assert_close(inners[0], inners[1], atol=1e-4, rtol=1e-4)
    parts, total = torch.empty(chosen, wide, device=DEVICE), torch.empty(1, wide, device=DEVICE)
    experts.expert_matmul(inners[1], down, parts, routes, TILE)
    experts.combine(parts, routes, total, weighted=True)
    found = residual.clone()
    expert_rows.add_down(inners[1], down, found, routes)
    torch.testing.assert_close(found, residual + total[0], atol=1e-4, rtol=1e-4)
