"""Matmuls and attention of deterministic mode: the values of torch, and bits that depend on the row alone.

Without a GPU the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from test_triton_attention import Case, Sequence, by_rows, causal, close, make, reference  # noqa: E402

from headway.kernels.triton import attention, layout  # noqa: E402
from headway.kernels.triton import deterministic as exact  # noqa: E402

pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
FIXED = attention.Splits(4, 32, fixed=True)
DTYPES = [torch.float32, torch.bfloat16, torch.float16] if DEVICE == "cuda" else [torch.float32]
COUNTS = (1, 2, 7, 40, 130) if DEVICE == "cuda" else (1, 2, 19)
SLOWER = () if DEVICE == "cuda" else pytest.mark.slow  # in the interpreter


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(5, 16), (48, 84), (97, 256)] + [(1000, 4096)] * (DEVICE == "cuda"))
def test_a_matmul_is_that_of_torch_and_its_bits_those_of_the_row_alone(n: int, k: int, dtype: torch.dtype) -> None:
    x, w, bias = draw(130, k, seed=0, dtype=dtype), draw(n, k, seed=1, dtype=dtype), draw(n, seed=2, dtype=dtype)
    among = torch.full((130, n), float("nan"), device=DEVICE, dtype=torch.float32)
    exact.matmul(x, w, among, bias=bias)
    expected = F.linear(x.double(), w.double(), bias.double()).float()
    torch.testing.assert_close(among, expected, atol=1e-3 * k**0.5, rtol=1e-3 if dtype == torch.float32 else 1e-2)
    for count in COUNTS:
        for start in (0, 3, 61):
            rows = x[start : start + count].contiguous()
            found = torch.full((len(rows), n), float("nan"), device=DEVICE, dtype=torch.float32)
            exact.matmul(rows, w, found, bias=bias)
            assert torch.equal(found, among[start : start + count])
    narrow = torch.empty(130, n, device=DEVICE, dtype=dtype)
    exact.matmul(x, w, narrow)
    torch.testing.assert_close(narrow.float(), expected - bias.float(), atol=0.05 * k**0.5, rtol=0.05)


@pytest.mark.skipif(DEVICE == "cpu", reason="float32 has one tile")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_wide_tile_is_taken_where_it_gives_the_same_bits(dtype: torch.dtype) -> None:
    x, w = draw(700, 4096, seed=0, dtype=dtype), draw(6144, 4096, seed=1, dtype=dtype)
    narrow, wide = torch.empty(700, 6144, device=DEVICE), torch.empty(700, 6144, device=DEVICE)
    exact.matmul(x, w, narrow)
    exact.matmul(x, w, wide, tile=exact.WIDE)
    assert torch.equal(narrow, wide) == exact.wide_tile_is_exact(w)
    torch.testing.assert_close(narrow, wide, atol=1e-2, rtol=1e-3)


def test_a_row_that_is_no_number_spoils_no_other() -> None:
    x, w = draw(20, 84, seed=0), draw(33, 84, seed=1)
    clean, spoilt = torch.empty(20, 33, device=DEVICE), torch.empty(20, 33, device=DEVICE)
    exact.matmul(x, w, clean)
    x[7] = float("nan")
    exact.matmul(x, w, spoilt)
    kept = torch.arange(20) != 7
    assert torch.equal(clean[kept], spoilt[kept])
    assert bool(spoilt[7].isnan().all())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"), [(4, 2, 16, 16), (6, 1, 80, 5), pytest.param(9, 3, 64, 16, marks=SLOWER)]
)
def test_fixed_splits_equal_the_reference(heads: int, kv_heads: int, dim: int, page: int) -> None:
    sequences = [Sequence(causal(1, n)) for n in (1, 31, 32, 33, 128, 129, 300)]
    sequences += [Sequence(causal(1, 300, 40)), Sequence(causal(1, 150, 40, 4)), Sequence(causal(3, 70))]
    case = make(sequences, heads=heads, kv_heads=kv_heads, dim=dim, page=page)
    close(by_rows(case, FIXED), reference(case, dim**-0.5))
    sinks = torch.linspace(-2, 3, heads).to(DEVICE)
    torch.testing.assert_close(
        by_rows(case, FIXED, sinks=sinks),
        by_rows(case, attention.Splits(1, 64), sinks=sinks),
        atol=1e-5,
        rtol=1e-4,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [40, 130, 333])
def test_a_row_has_the_same_bits_however_it_is_said_what_it_sees(slots: int, dtype: torch.dtype) -> None:
    """One run over pages with holes is the same as a run for every stretch between them, and as itself among others."""
    gone = (0, 1) if slots > 100 else (1,)
    seen = causal(1, slots)
    whole = make([Sequence(seen, gone)], heads=4, kv_heads=2, dim=32, page=16, dtype=dtype)
    found = by_rows(whole, FIXED)
    without = seen.copy()
    for page in gone:
        without[:, page * 16 : (page + 1) * 16] = False
    said = make([Sequence(without)], heads=4, kv_heads=2, dim=32, page=16, dtype=dtype)
    _same_pages(said, whole, slots)
    assert torch.equal(by_rows(said, FIXED), found)
    others = [Sequence(causal(2, n)) for n in (5, 170)] * 3
    among = make([Sequence(without), *others], heads=4, kv_heads=2, dim=32, page=16, dtype=dtype)
    _same_pages(among, whole, slots)
    assert torch.equal(by_rows(among, FIXED)[0], found[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_prompt_have_the_bits_of_rows_alone(dtype: torch.dtype) -> None:
    rows = 70 if DEVICE == "cuda" else 18
    prompt = make([Sequence(causal(rows, 200))], heads=4, kv_heads=2, dim=32, page=16, dtype=dtype)
    found = by_rows(prompt, FIXED)
    for i in (0, 1, rows // 2, rows - 1):
        alone = make([Sequence(causal(rows, 200)[i : i + 1])], heads=4, kv_heads=2, dim=32, page=16, dtype=dtype)
        _same_pages(alone, prompt, 200)
        alone.q[0] = prompt.q[i]
        assert torch.equal(by_rows(alone, FIXED)[0], found[i])


def _same_pages(case: Case, other: Case, slots: int) -> None:
    """Give the first sequence of a case the keys, values and first query of another's; a page that is not there any."""
    count = -(-slots // 16)
    mine, theirs = (c.ints[int(c.ints[layout.PAGE_AT * c.rows]) :][:count].long() for c in (case, other))
    here = (mine > 0) & (theirs > 0)
    case.keys[mine[here]], case.values[mine[here]] = other.keys[theirs[here]], other.values[theirs[here]]
    case.q[0] = other.q[0]
