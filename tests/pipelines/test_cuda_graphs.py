"""The computation of a CUDA graph without a GPU: padded inputs whose row boundaries only tensors know."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import headway as hw
from headway.pipelines.backends.cuda_graphs import GraphSize, HostBuffers, round_up_quarters, stage
from headway.pipelines.backends.unpadded import DeviceLayout, RowLayout, UnpaddedEncoder
from headway.pipelines.inputs.arrays import by_token, concatenate, pooled
from headway.pipelines.stream import GC_THRESHOLD, gc_relaxed
from headway.pipelines.task import ModelInputs, Row
from support import encoders

BEFORE = (500, 9, 9)
LENGTHS = (3, 7, 7, 1, 12)


class ByEnds:
    """Attention between boundaries, row by row; what is after them is left as it is in a captured pass: anything."""

    def all(self, qkv: Tensor, layout: RowLayout, heads: int) -> Tensor:
        q, k, v = qkv.unflatten(1, (3, heads, -1)).unbind(1)
        return self._mixed(q, k, v, layout.cu_seqlens, layout)

    def one(self, query: Tensor, kv: Tensor, layout: RowLayout, heads: int) -> Tensor:
        k, v = kv.unflatten(1, (2, heads, -1)).unbind(1)
        return self._mixed(query.unflatten(1, (heads, -1)), k, v, layout.query_cu_seqlens, layout)

    def _mixed(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, layout: RowLayout) -> Tensor:
        found = torch.full_like(q, float("nan"))
        for i in range(layout.rows):
            a, b = slice(*cu_seqlens[i : i + 2].tolist()), slice(*layout.cu_seqlens[i : i + 2].tolist())
            assert b.stop - b.start <= layout.longest
            parts = (part.transpose(0, 1) for part in (q[a], k[b], v[b]))
            found[a] = scaled_dot_product_attention(*parts).transpose(0, 1)
        return found.flatten(1)


def rows(*, types: bool) -> list[Row]:
    draw = np.random.default_rng(0)
    made = []
    for n in LENGTHS:
        ids = {"input_ids": draw.integers(5, 60, n).tolist()}
        made.append(Row(ids | ({"token_type_ids": draw.integers(0, 2, n).tolist()} if types else {}), n))
    return made


def laid_out(some: list[Row], size: GraphSize, first: int) -> Tensor:
    buffers = HostBuffers(size, pinned=False)
    buffers.flat.fill_(77)  # what another batch left there
    stage(some, buffers, first)
    return buffers.flat


def test_sizes_are_few_and_have_room() -> None:
    assert [round_up_quarters(n, 8) for n in (1, 8, 9, 16, 17, 20, 21, 33, 100, 129)] == [
        8, 8, 10, 16, 20, 20, 24, 40, 112, 160,
    ]  # fmt: skip
    assert len({round_up_quarters(n, 128) for n in range(1, 65537)}) <= 4 * 9 + 1
    for n in range(1, 5000):
        assert n <= round_up_quarters(n, 8) <= max(8, 1.25 * n + 1)
    assert GraphSize.of([3, 400]) == GraphSize(448, 8, 512)


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("types", [True, False])
def test_an_array_holds_what_a_packed_batch_holds(types: bool, first: int) -> None:
    some, size = rows(types=types), GraphSize.of(LENGTHS)
    inputs, cu_seqlens = size.views(laid_out(some, size, first))
    want = concatenate(some, True, first).inputs
    for name, value in want.items():
        assert inputs[name][: sum(LENGTHS)].tolist() == value.tolist()
    assert cu_seqlens.tolist() == [0, 3, 10, 17, 18, 30, *[30] * (size.rows - len(LENGTHS))]
    assert inputs["input_ids"][30:].eq(0).all()
    assert len(inputs["input_ids"]) == size.tokens


@pytest.mark.parametrize("reads", ["first", "all"])
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
def test_a_pass_with_room_to_spare_is_the_pass_of_its_rows(family: str, reads: str) -> None:
    model = encoders.model(family, "base")
    with hw.pipeline("sentence-embedding", model, tokenizer=encoders.tokenizer(family), device="cpu") as p:
        backend = p.implementation.loaded.backend
    some, encoder = rows(types=family == "bert"), UnpaddedEncoder(backend)
    roomy = UnpaddedEncoder(backend)
    roomy._attend, roomy._pads_rows = ByEnds(), False
    with backend.context():
        want = encoder(encoder.batch(some), reads).last_hidden_state
        size = GraphSize.of(LENGTHS)
        inputs, cu_seqlens = size.views(laid_out(some, size, encoder.first_position))
        at = cu_seqlens[:-1].clamp(max=size.tokens - 1).long() if reads == "first" else None
        got = roomy.read(inputs, DeviceLayout(cu_seqlens, size.longest), at, reads).last_hidden_state
    got = got[: len(LENGTHS)] if reads == "first" else got[:, : sum(LENGTHS)]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["mean", "cls", "last", "max"])
def test_pooling_between_boundaries_is_pooling_of_rows(how: str) -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 40, 6)
    values[:, sum(LENGTHS) :] = float("nan")
    some: Any = tuple(Row({}, n) for n in LENGTHS)
    want = pooled(values[:, : sum(LENGTHS)], ModelInputs({}, some, True), how)
    cu_seqlens = torch.tensor([0, *np.cumsum(LENGTHS), *[sum(LENGTHS)] * 3], dtype=torch.int32)
    got = pooled(values, ModelInputs({}, (), True, None, cu_seqlens), how)
    torch.testing.assert_close(got[: len(LENGTHS)], want)
    assert by_token(values, ModelInputs({}, (), True, None, cu_seqlens)).values.shape == (40, 6)


@pytest.fixture
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*BEFORE)
    yield
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thresholds")
class TestCollecting:
    def test_it_is_rare_until_the_last_stream_is_over(self) -> None:
        with gc_relaxed():
            with gc_relaxed():
                assert gc.get_threshold() == (GC_THRESHOLD, 9, 9)
            assert gc.get_threshold() == (GC_THRESHOLD, 9, 9)
        assert gc.get_threshold() == BEFORE

    @pytest.mark.parametrize("own", [(0, 9, 9), (2 * GC_THRESHOLD, 5, 5)])
    def test_one_that_is_off_or_as_rare_is_left_alone(self, own: tuple[int, int, int]) -> None:
        gc.set_threshold(*own)
        with gc_relaxed():
            assert gc.get_threshold() == own
        assert gc.get_threshold() == own

    def test_what_was_changed_meanwhile_stays(self) -> None:
        with gc_relaxed():
            gc.set_threshold(77)
        assert gc.get_threshold()[0] == 77
