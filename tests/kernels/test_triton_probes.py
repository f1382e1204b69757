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
) -> tuple[list[RowStats], np.ndarray, np.ndarray, np.ndarray]:
    """Stats of rows; scores, tokens and ranks of pairs."""
    count = probing.pieces(rows.shape[1])
    rates = np.array([rate for _, _, rate in jobs], np.float32)
    numbers = np.array([(row, mask, 0) for row, mask, _ in jobs], np.int32).reshape(-1, 3)
    numbers[:, 2] = rates.view(np.int32)
    table = np.stack([pack(m) for m in masks]) if masks else np.zeros((1, 1), np.int32)
    named = np.array(pairs, np.int32).reshape(-1, 4)
    drawn = np.array(tokens, np.int32)
    asked = ProbeQueries(*(torch.from_numpy(a).to(DEVICE) for a in (numbers, named, table, drawn)))
    found = ProbeResults(
        torch.full((len(jobs), count, 4), float("nan"), device=DEVICE),
        torch.full((len(pairs), 2 + count), -7, dtype=torch.int32, device=DEVICE),
    )
    probing.run_probes(rows, asked, found)
    placed = found.placed.cpu().numpy()
    measured = probing.combine(found.measured.cpu().numpy(), rates.astype(np.float64)) if jobs else []
    scores = np.ascontiguousarray(placed[:, 0]).view(np.float32)
    return measured, scores, placed[:, 1], 1 + placed[:, 2:].sum(1)


@pytest.mark.parametrize("vocab", [3, 97, 4096, 9001])
def test_log_probabilities_and_entropy(vocab: int) -> None:
    rows = logits(4, vocab)
    ids = [0, vocab - 1, vocab // 2]
    pairs = [(row, id, -1, 0) for row in range(4) for id in ids]
    measured, scores, tokens, _ = run_probes(rows, [(row, -1, 1.0) for row in (2, 0, 3, 1)], pairs)
    assert tokens.tolist() == ids * 4
    for job, row in enumerate((2, 0, 3, 1)):
        expected = reference.logprobs(rows[row], torch.tensor(ids, device=DEVICE)).cpu().numpy()
        np.testing.assert_allclose(measured[job].logs(scores[3 * row : 3 * row + 3]), expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(measured[job].entropy, float(reference.entropy(rows[row])), rtol=5e-6, atol=2e-6)


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
        assert np.exp(measured[job].logs(scores[job : job + 1], temperature))[0] == pytest.approx(expected, rel=1e-5)
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
    assert [m.bad for m in measured] == [False, False, False, True, False]
    for row in (0, 1, 2, 4):
        with np.errstate(invalid="ignore"):
            found = measured[row].logs(scores[row : row + 1])[0]
        assert found == pytest.approx(float(reference.log_softmax(rows[row])[7]), abs=1e-5)
        assert measured[row].entropy == pytest.approx(float(reference.entropy(rows[row])), abs=1e-5)
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
    (alone,), *_ = run_probes(rows[17:18].contiguous(), [(0, -1, 1.0)], [])
    among, *_ = run_probes(rows, [(row, -1, 1.0) for row in range(40)], [])
    assert among[17] == alone
