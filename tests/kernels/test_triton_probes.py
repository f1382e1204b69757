"""What the device says about rows of logits, against the reference: log-probabilities, entropy, ranks, masks."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from test_triton_sampling import pack  # noqa: E402

from headway.kernels.reference import sampling as reference  # noqa: E402
from headway.kernels.triton import probes as probing  # noqa: E402
from headway.kernels.triton.probes import ProbeQueries, ProbeResults, RowStats  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
INF = float("inf")


def logits(rows: int, vocab: int, *, scale: float = 4.0, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(DEVICE)


def run_probes(
    rows: torch.Tensor,
    jobs: list[tuple[int, int, float]],
    pairs: list[tuple[int, int, int, int]],
    masks: tuple[np.ndarray, ...] = (),
    tokens: tuple[int, ...] = (0,),
) -> tuple[RowStats, np.ndarray, np.ndarray, np.ndarray]:
    """Stats of rows; scores, tokens and ranks of pairs."""
    measured, scores, names, ranks, _ = run_all(rows, jobs, pairs, masks, tokens=tokens)
    return measured, scores, names, ranks


def run_all(
    rows: torch.Tensor,
    jobs: list[tuple[int, int, float]],
    pairs: list[tuple[int, int, int, int]],
    masks: tuple[np.ndarray, ...],
    *,
    tokens: tuple[int, ...] = (0,),
    best: list[tuple[int, int, int]] | None = None,
    most: int = 16,
) -> tuple[RowStats, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """The same, and the best scores and ids of rows [B, 2, most]."""
    count = probing.pieces(rows.shape[1])
    rates = np.array([rate for _, _, rate in jobs], np.float32)
    numbers = np.array([(row, mask, 0) for row, mask, _ in jobs], np.int32).reshape(-1, 3)
    numbers[:, 2] = rates.view(np.int32)
    table = np.stack([pack(m) for m in masks]) if masks else np.zeros((1, 1), np.int32)
    named = np.array(pairs, np.int32).reshape(-1, 4)
    drawn, ranked = np.array(tokens, np.int32), np.array(best or [], np.int32).reshape(-1, 3)
    asked = ProbeQueries(*(torch.from_numpy(a).to(DEVICE) for a in (numbers, named, table, drawn, ranked)))
    found = ProbeResults(
        torch.full((len(jobs), count, 4), float("nan"), device=DEVICE),
        torch.full((len(pairs), 2 + count), -7, dtype=torch.int32, device=DEVICE),
        torch.full((len(ranked), 2, most), -7, dtype=torch.int32, device=DEVICE),
        torch.full((len(jobs), probing.block_count(rows.shape[1])), float("nan"), device=DEVICE),
    )
    probing.run_probes(rows, asked, found)
    placed = found.placed.cpu().numpy()
    measured = probing.combine(found.measured.cpu().numpy(), rates.astype(np.float64))
    scores = np.ascontiguousarray(placed[:, 0]).view(np.float32)
    return measured, scores, placed[:, 1], 1 + placed[:, 2:].sum(1), found.best.cpu().numpy()


@pytest.mark.parametrize("vocab", [3, 97, 4096, 9001])
def test_log_probabilities_and_entropy(vocab: int) -> None:
    rows = logits(4, vocab)
    ids = [0, vocab - 1, vocab // 2]
    pairs = [(row, id, -1, 0) for row in range(4) for id in ids]
    measured, scores, tokens, _ = run_probes(rows, [(row, -1, 1.0) for row in (2, 0, 3, 1)], pairs)
    assert tokens.tolist() == ids * 4
    for job, row in enumerate((2, 0, 3, 1)):
        expected = reference.logprobs(rows[row], torch.tensor(ids, device=DEVICE)).cpu().numpy()
        (logs,) = measured.logs([job], scores[None, 3 * row : 3 * row + 3])
        np.testing.assert_allclose(logs, expected, rtol=2e-6, atol=2e-6)
        entropy = measured.entropies()[job]
        np.testing.assert_allclose(entropy, float(reference.entropy(rows[row])), rtol=5e-6, atol=2e-6)


@pytest.mark.parametrize("temperature", [0.05, 0.7, 3.0, 1e20])
def test_temperatures_and_masks(temperature: float) -> None:
    rows = logits(2, 5000, seed=3)
    allowed = np.random.default_rng(0).random(5000) < 0.01
    allowed[4999] = True
    jobs = [(1, 0, 1 / temperature), (1, -1, 1 / temperature)]
    measured, scores, _, ranks = run_probes(rows, jobs, [(1, 4999, 0, 1), (1, 4999, -1, 1)], (allowed,))
    line = rows[1].masked_fill(~torch.from_numpy(allowed).to(DEVICE), -INF)
    for job, row in enumerate((line, rows[1])):
        ids, probs = reference.distribution(row, temperature)
        expected = float(probs[ids == 4999])
        (logs,) = measured.logs([job], scores[None, job : job + 1], [temperature])
        assert np.exp(logs)[0] == pytest.approx(expected, rel=1e-5)
        assert ranks[job] == 1 + int((row > rows[1, 4999]).sum())


def test_infinities_ties_and_what_is_not_a_number() -> None:
    rows = logits(5, 4500, seed=5)
    rows[0, :] = -INF
    rows[1, 7] = INF
    rows[2, 10:] = -INF
    rows[3, 4400] = float("nan")
    rows[4, :] = rows[4, 0].item()
    measured, scores, _, ranks = run_probes(
        rows, [(row, -1, 1.0) for row in range(5)], [(row, 7, -1, 1) for row in range(5)]
    )
    assert measured.bad.tolist() == [False, False, False, True, False]
    logs, entropies = measured.logs(range(5), scores[:, None])[:, 0], measured.entropies()
    for row in (0, 1, 2, 4):
        assert logs[row] == pytest.approx(float(reference.log_softmax(rows[row])[7]), abs=1e-5)
        assert entropies[row] == pytest.approx(float(reference.entropy(rows[row])), abs=1e-5)
        assert ranks[row] == 1 + int((rows[row] > rows[row, 7]).sum())


def test_tokens_that_the_device_has_sampled_are_placed_without_coming_back_first() -> None:
    rows = logits(3, 97, seed=6)
    _, scores, tokens, ranks = run_probes(
        rows, [], [(2, -1, -1, 1), (0, -3, -1, 1), (-1, 0, -1, 1)], tokens=(40, 0, 96)
    )
    assert tokens[:2].tolist() == [40, 96]
    np.testing.assert_array_equal(scores[:2], [float(rows[2, 40]), float(rows[0, 96])])
    assert ranks[0] == 1 + int((rows[2] > rows[2, 40]).sum())
    assert tokens[2] == -7  # nothing is asked there


def test_bits_do_not_depend_on_other_rows() -> None:
    rows = logits(40, 9001, seed=8)
    alone, *_ = run_probes(rows[17:18].contiguous(), [(0, -1, 1.0)], [])
    among, *_ = run_probes(rows, [(row, -1, 1.0) for row in range(40)], [])
    for name in ("peaks", "masses", "moments"):
        assert getattr(among, name)[17] == getattr(alone, name)[0]


@pytest.mark.parametrize(("vocab", "most"), [(97, 16), pytest.param(4500, 32, marks=pytest.mark.slow)])
def test_the_best_of_a_row_come_in_order_and_ties_by_lower_id(vocab: int, most: int) -> None:
    rows = logits(5, vocab, seed=11)
    rows[1] = (rows[1] / 4).round()  # ties everywhere, the last place among them
    rows[2] = -INF
    rows[2, [5, vocab - 1]] = 1.0
    rows[3] = 0.0
    rows[3, ::2] = -0.0
    rows[4, 7] = INF
    allowed = np.random.default_rng(0).random(vocab) < 0.5
    line = rows[0].masked_fill(~torch.from_numpy(allowed).to(DEVICE), -INF)
    jobs = [*((row, -1, 1.0) for row in range(5)), (0, 0, 2.0)]
    best = [*((row, row, -1) for row in (4, 3, 2, 1, 0)), (5, 0, 0), (0, -1, -1)]
    *_, found = run_all(rows, jobs, [], (allowed,), best=best, most=most)
    scores, ids = np.ascontiguousarray(found[:, 0]).view(np.float32), found[:, 1]
    for at, row in enumerate((*rows.flip(0), line)):
        numbers = row.cpu().numpy()
        expected = np.lexsort((np.arange(vocab), -numbers))[:most]
        np.testing.assert_array_equal(ids[at], expected)
        np.testing.assert_array_equal(scores[at], numbers[expected])
    assert (found[6] == -7).all()  # nothing is asked there
