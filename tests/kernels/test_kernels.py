"""The torch reference kernels against plain arithmetic, and the exact attention against the fused one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headway.kernels.host.attention import AttentionGroup
from headway.kernels.host.rope import Rope
from headway.kernels.reference import kv
from headway.kernels.reference.attention import attend, attend_exact, scores
from headway.kernels.reference.linear import by_rows, linear
from headway.kernels.reference.mlp import gated_silu
from headway.kernels.reference.norm import rms_norm
from headway.kernels.reference.rope import rotate, rotation
from support.arrays import frequencies
from support.checks import assert_close

PAGE = 8


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# -- norm, matmul, activation ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1, 7), (5, 64), (3, 4, 10)])
@pytest.mark.parametrize("eps", [1e-6, 0.1])
def test_rms_norm_divides_by_the_root_of_the_mean_square(shape: tuple[int, ...], eps: float) -> None:
    x, weight = 3 * randn(*shape), randn(shape[-1], seed=1)
    wide = x.double().numpy()
    expected = weight.numpy() * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps)
    assert_close(rms_norm(x, weight, eps), expected, tolerance=1e-6)
    assert torch.equal(rms_norm(torch.zeros(*shape), weight, eps), torch.zeros(*shape))


def test_rms_norm_works_in_float32_inside_and_keeps_the_dtype() -> None:
    x = (300 * randn(4, 64)).to(torch.float16)  # squares overflow float16
    result = rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-6)
    assert result.dtype == torch.float16
    assert_close(result.float(), rms_norm(x.float(), torch.ones(64), 1e-6), tolerance=1e-3)


def test_linear_is_a_matmul_with_the_transposed_weight_plus_bias() -> None:
    x, weight, bias = randn(5, 7), randn(3, 7, seed=1), randn(3, seed=2)
    expected = np.einsum("rk,nk->rn", x.numpy(), weight.numpy())
    assert_close(linear(x, weight), expected, tolerance=1e-6)
    assert_close(linear(x, weight, bias), expected + bias.numpy(), tolerance=1e-6)


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 11])
def test_by_rows_shows_a_function_only_whole_tiles(rows: int) -> None:
    seen = []

    def double(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((tuple(x.shape), tuple(y.shape)))
        return 2 * x, y + 1

    x, y = randn(rows, 3), randn(rows, 2, 2)
    one, other = by_rows(4, double, x, y)
    assert torch.equal(one, 2 * x)
    assert torch.equal(other, y + 1)
    assert set(seen) == ({((4, 3), (4, 2, 2))} if rows else {((0, 3), (0, 2, 2))})
    assert len(seen) == max(1, -(-rows // 4))
    seen.clear()
    by_rows(None, double, x, y)
    assert seen == [((rows, 3), (rows, 2, 2))]


def test_gated_silu_is_the_same_in_both_spellings() -> None:
    gate_up = 20 * randn(9, 30)
    gate, up = gate_up.double().numpy()[:, :15], gate_up.double().numpy()[:, 15:]
    expected = gate / (1 + np.exp(-gate)) * up
    for exact in (True, False):
        assert_close(gated_silu(gate_up, exact=exact), expected, tolerance=1e-6)
    assert gated_silu(torch.tensor([[-200.0, 1.0]]), exact=True).item() == 0.0


# -- rotary positions ----------------------------------------------------------------------------------------------


ROPES = {
    "default": (Rope(16, 10_000.0), {}),
    "linear": (Rope(16, 10_000.0, "linear", factor=2.5), {"factor": 2.5}),
    "llama3": (
        Rope(16, 5000.0, "llama3", factor=8.0, original_positions=64),
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "llama3 without a band": (  # as Llama 4 Scout is published
        Rope(16, 5000.0, "llama3", factor=16.0, original_positions=64, high_freq_factor=1.0),
        {"factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0, "original_max_position_embeddings": 64},
    ),
    "yarn": (
        Rope(16, 1000.0, "yarn", factor=8.0, original_positions=128),
        {"factor": 8.0, "original_max_position_embeddings": 128},
    ),
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    rope, keys = ROPES[name]
    parameters = {"rope_type": rope.kind, "rope_theta": rope.theta, **keys}
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, max_position_embeddings=1024, rope_parameters=parameters
    )
    theirs = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(frequencies(rope), theirs.inv_freq, rtol=1e-6, atol=0)
    assert rope.scale == pytest.approx(theirs.attention_scaling)


def test_rotation_turns_pairs_like_complex_numbers() -> None:
    positions = torch.tensor([0, 1, 17, 1000])
    inv_freq = frequencies(Rope(16))
    x = randn(4, 3, 16)
    cos, sin = rotation(inv_freq, positions, 1.0, torch.float32)
    turned = rotate(x, cos, sin)
    pairs = torch.complex(x[..., :8], x[..., 8:]).numpy()
    angles = positions[:, None, None].numpy() * inv_freq.numpy()
    expected = pairs * np.exp(1j * angles)
    assert_close(turned, np.concatenate([expected.real, expected.imag], -1), tolerance=1e-5)
    assert torch.equal(turned[0], x[0])
    assert_close(turned.norm(dim=-1), x.norm(dim=-1), tolerance=1e-5)


def test_dimensions_past_the_rotated_ones_stay() -> None:
    x = randn(2, 3, 16)
    cos, sin = rotation(frequencies(Rope(6)), torch.tensor([5, 9]), 1.0, torch.float32)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    assert torch.equal(turned[..., :6], rotate(x[..., :6].contiguous(), cos, sin))


# -- pages ---------------------------------------------------------------------------------------------------------


def test_rows_are_written_at_physical_slots() -> None:
    pages = torch.zeros(4, PAGE, 2, 3)
    rows = randn(3, 2, 3)
    kv.write(pages, torch.tensor([9, 31, 0]), rows)
    for slot, row in zip((9, 31, 0), rows, strict=True):
        assert torch.equal(pages[slot // PAGE, slot % PAGE], row)
    assert int(pages.count_nonzero()) == rows.numel()


def test_copying_takes_the_first_slots_in_every_layer_and_clearing_takes_all() -> None:
    pool = randn(2, 2, 5, PAGE, 2, 3)
    before = pool.clone()
    kv.copy(pool[:, 1], 1, 3, 5)
    assert torch.equal(pool[:, 1, 3, :5], before[:, 1, 1, :5])
    assert torch.equal(pool[:, 1, 3, 5:], before[:, 1, 3, 5:])
    assert torch.equal(pool[:, 0], before[:, 0])
    kv.clear(pool, torch.tensor([1, 4]))
    assert int(pool[:, :, [1, 4]].count_nonzero()) == 0
    assert torch.equal(pool[:, :, [0, 2]], before[:, :, [0, 2]])


# -- attention -----------------------------------------------------------------------------------------------------


class Paged:
    """Random keys and values on scattered pages, queries, masks, and what plain arithmetic makes of them."""

    def __init__(self, heads: int, kv_heads: int, dim: int, sequences: list[tuple[int, int]], seed: int = 0) -> None:
        """`sequences` are (rows, slots): the rows are the last ones, under a random mask that lets each see itself."""
        rng = np.random.default_rng(seed)
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.scale = dim**-0.5
        count = [-(-slots // PAGE) for _, slots in sequences]
        order = rng.permutation(np.arange(1, sum(count) + 1))
        self.k = randn(sum(count) + 1, PAGE, kv_heads, dim, seed=seed + 1)
        self.v = randn(sum(count) + 1, PAGE, kv_heads, dim, seed=seed + 2)
        self.k[0] = self.v[0] = 0
        self.q = 2 * randn(sum(rows for rows, _ in sequences), heads, dim, seed=seed + 3)
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # rows, pages, mask
        row = page = 0
        for (rows, slots), pages in zip(sequences, count, strict=True):
            mask = np.zeros((rows, pages * PAGE), bool)
            for i in range(rows):
                own = slots - rows + i
                mask[i, :own] = rng.random(own) < 0.6
                mask[i, own] = True
            self.parts.append((np.arange(row, row + rows), order[page : page + pages], mask))
            row, page = row + rows, page + pages

    def group(self, *members: int) -> AttentionGroup:
        """These sequences in one call; all must have as many rows."""
        wide = max(len(self.parts[i][1]) for i in members)
        count = len(self.parts[members[0]][0])
        pages, numbers = np.zeros((len(members), wide), np.int64), np.full((len(members), wide), -1)
        mask = np.zeros((len(members), count, wide * PAGE), bool)
        for n, i in enumerate(members):
            _, own, bits = self.parts[i]
            pages[n, : len(own)], numbers[n, : len(own)] = own, np.arange(len(own))
            mask[n, :, : bits.shape[1]] = bits
        rows = np.stack([self.parts[i][0] for i in members])
        return AttentionGroup(*(torch.from_numpy(a) for a in (rows, pages, numbers, mask)))

    def expected(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Outputs [T, H, D] and each sequence's probabilities [M, H, S], in float64 and with loops."""
        out, probabilities = np.zeros(self.q.shape), []
        for rows, pages, mask in self.parts:
            k = self.k[pages].flatten(0, 1).double().numpy()  # [S, Hkv, D]
            v = self.v[pages].flatten(0, 1).double().numpy()
            found = np.zeros((len(rows), self.heads, mask.shape[1]))
            for i, row in enumerate(rows):
                for h in range(self.heads):
                    g = h // (self.heads // self.kv_heads)
                    raw = np.array([float(self.q[row, h].double().numpy() @ k[s, g]) for s in range(len(k))])
                    raw = np.where(mask[i], raw * self.scale, -math.inf)
                    weight = np.exp(raw - raw.max())
                    found[i, h] = weight / weight.sum()
                    out[row, h] = found[i, h] @ v[:, g]
            probabilities.append(found)
        return out, probabilities


SHAPES = [(4, 2, 16), (6, 1, 10), (3, 3, 24)]
SEQUENCES = [(1, 5), (7, 20), (1, 70), (1, 64), (12, 12), (1, 1)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("kernel", [attend, attend_exact])
def test_attention_is_the_softmax_weighted_mean_of_the_values(kernel, heads: int, kv_heads: int, dim: int) -> None:  # type: ignore[no-untyped-def]
    case = Paged(heads, kv_heads, dim, SEQUENCES)
    groups = [case.group(0, 2, 3, 5), case.group(1), case.group(4)]
    assert_close(kernel(case.q, case.k, case.v, groups, case.scale), case.expected()[0], "attention", 1e-5)


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
def test_scores_are_the_probabilities_by_absolute_slot(heads: int, kv_heads: int, dim: int) -> None:
    case = Paged(heads, kv_heads, dim, SEQUENCES)
    for i, expected in enumerate(case.expected()[1]):
        found = scores(case.q, case.k, case.group(i), case.scale).numpy()
        width = expected.shape[2]
        assert_close(found[..., :width], expected, "scores", 1e-5)
        assert not found[..., width:].any()
        assert (found[..., :width][expected == 0] == 0).all()


def test_masked_slots_and_filler_pages_do_not_matter() -> None:
    case = Paged(4, 2, 16, [(1, 30), (1, 3)])
    groups = [case.group(0, 1)]
    before = [kernel(case.q, case.k, case.v, groups, case.scale) for kernel in (attend, attend_exact)]
    for _, pages, mask in case.parts:
        hidden = ~mask[0].reshape(-1, PAGE)
        for page, slots in zip(pages, hidden, strict=True):
            case.k[page, slots] = 1e4
            case.v[page, slots] = -1e4
    after = [kernel(case.q, case.k, case.v, groups, case.scale) for kernel in (attend, attend_exact)]
    assert_close(after[0], before[0], tolerance=1e-6)
    assert torch.equal(after[1], before[1])


def test_exact_attention_has_the_same_bits_however_rows_are_grouped() -> None:
    case = Paged(9, 3, 64, [(1, 200), (1, 9), (1, 77), (1, 130)], seed=4)
    together = attend_exact(case.q, case.k, case.v, [case.group(0, 1, 2, 3)], case.scale)
    alone = attend_exact(case.q, case.k, case.v, [case.group(i) for i in range(4)], case.scale)
    pairs = attend_exact(case.q, case.k, case.v, [case.group(3, 1), case.group(2, 0)], case.scale)
    assert torch.equal(together, alone)
    assert torch.equal(together, pairs)


def test_exact_attention_has_the_same_bits_for_a_row_among_many_and_alone() -> None:
    case = Paged(9, 3, 64, [(40, 150)], seed=5)
    whole = case.group(0)
    together = attend_exact(case.q, case.k, case.v, [whole], case.scale)
    for i in (0, 1, 17, 39):
        one = AttentionGroup(whole.rows[:, i : i + 1], whole.pages, whole.numbers, whole.mask[:, i : i + 1])
        out = attend_exact(case.q, case.k, case.v, [one], case.scale)
        assert torch.equal(out[i], together[i])


def test_exact_attention_has_the_same_bits_without_the_pages_that_every_row_masks() -> None:
    case = Paged(4, 2, 16, [(3, 100)], seed=6)
    whole = case.group(0)
    gone = [0, 3, 4, 9]
    for page in gone:
        whole.mask[:, :, page * PAGE : (page + 1) * PAGE] = False
    keep = [p for p in range(whole.pages.shape[1]) if p not in gone]
    mask = whole.mask.unflatten(2, (-1, PAGE))[:, :, keep].flatten(2)
    trimmed = AttentionGroup(whole.rows, whole.pages[:, keep], whole.numbers[:, keep], mask.contiguous())
    for kernel, same in ((attend_exact, torch.equal), (attend, torch.allclose)):
        full, less = (kernel(case.q, case.k, case.v, [g], case.scale) for g in (whole, trimmed))
        assert same(full, less)
