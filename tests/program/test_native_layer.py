"""One layer of any shape: the native step's norm, rotation, attention and gate against the torch kernels.

A part is looked at alone by setting the other's last matrix to zero: what the layer adds to the residual is then the
attention's output or the feed-forward's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import headway as hw
from headway import Mask
from headway.kernels.host.rope import Rope
from headway.kernels.native.library import ISA_NAMES, available_isas, open_library, use_isa
from headway.models.decoder import Decoder
from headway.models.layers import Linear
from headway.testing import random_model
from support.checks import assert_close, random_tokens
from support.properties import examples
from support.sweeps import instruction_sets

V = 53
TOLERANCE = 3e-5  # of the largest; one layer rounds less than the whole models that 1e-4 is for
quick = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
long = settings(quick, max_examples=examples(250))


@dataclass(frozen=True)
class Case:
    """A layer, pages and two passes over it."""

    shape: dict[str, Any]
    part: str
    gate: float  # what the gate and up matrices are multiplied with
    page: int
    past: int
    rows: int
    mask: int | None
    threads: int
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, dim = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 40))
    turned = draw(st.sampled_from((dim, 2, max(2, dim // 4 * 2))))
    rope = draw(st.sampled_from((Rope(turned), Rope(turned, 500.0, "yarn", factor=4.0, original_positions=64))))
    sizes = st.one_of(st.integers(1, 140), st.sampled_from((16, 32, 64, 128)))
    shape = {
        "vocab_size": V,
        "layers": 1,
        "hidden_size": draw(sizes),
        "intermediate_size": draw(sizes),
        "kv_heads": kv_heads,
        "heads": kv_heads * draw(st.integers(1, 5)),
        "head_dim": dim,
        "rope": rope,
        "norm_eps": draw(st.sampled_from((1e-6, 1e-5, 1e-2))),
        "windows": (draw(st.sampled_from((None, None, 1, 7, 40))),),
        **{name: draw(st.booleans()) for name in ("qk_norm", "qkv_bias", "o_bias", "mlp_bias", "tied")},
    }
    return Case(
        shape,
        draw(st.sampled_from(("attention", "feed-forward", "both"))),
        draw(st.sampled_from((1e-3, 1.0, 30.0))),
        draw(st.sampled_from((1, 3, 16, 40, 128, 1024))),
        draw(st.one_of(st.integers(0, 40), st.sampled_from((127, 128, 129, 260)))),
        draw(st.one_of(st.integers(1, 3), st.integers(1, 40))),
        draw(st.sampled_from((None, None, 5, 20))),
        draw(st.integers(1, 4)),
        draw(st.integers(0, 1 << 20)),
    )


def built(case: Case) -> Decoder:
    model = random_model(seed=case.seed, **case.shape)
    layer = model.layers[0]

    def nothing(linear: Linear) -> Linear:
        bias = None if linear.bias is None else torch.zeros_like(linear.bias)
        return Linear(torch.zeros_like(linear.weight), bias)

    wide = Linear(layer.gate_up.weight * case.gate, layer.gate_up.bias)
    layer = replace(layer, gate_up=wide)
    if case.part == "attention":
        layer = replace(layer, down=nothing(layer.down))
    elif case.part == "feed-forward":
        layer = replace(layer, out=nothing(layer.out))
    return replace(model, layers=(layer,))


def looked_at(model: Decoder, case: Case, native: str | None) -> dict[str, np.ndarray]:
    """What every row of the second pass is before and after the layer, its attention and its logits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", "off" if native is None else "require")
        if native is not None:
            patch.setenv("HEADWAY_ISA", native)
        pages = -(-(case.past + case.rows) // case.page) + 1
        with hw.Engine(model, pages=pages, page_size=case.page, threads=case.threads) as engine:
            assert engine.info.runner == ("torch" if native is None else f"native, {ISA_NAMES[native]}")
            return passes(engine, case)


def passes(engine: hw.Engine, case: Case) -> dict[str, np.ndarray]:
    tokens = random_tokens(V, case.past + case.rows, case.seed)
    with engine.context() as context:
        if case.past:
            context.forward().input(tokens[: case.past]).execute().result()
        forward = context.forward().input(tokens[case.past :])
        if case.mask is not None:
            forward.attention_mask(Mask.window(case.mask))
        rows = range(case.rows)
        before, after = ([forward.probe(i, hw.Hidden(l)) for i in rows] for l in (0, 1))
        logits = [forward.probe(i, hw.Logits()) for i in rows]
        attention = forward.probe(case.rows // 2, hw.AttentionScores(0))
        out = forward.execute().result()
        final, embedded = (np.stack([out.hidden(h) for h in some]) for some in (after, before))
        return {
            "embedded": embedded,
            "normed": final,
            "attention": np.asarray(out.attention(attention)),
            "logits": np.stack([out.logits(h) for h in logits]),
        }


def assert_same_layer(case: Case, isa: str) -> None:
    model, before = built(case), open_library().isa
    try:
        ours, theirs = looked_at(model, case, isa), looked_at(model, case, None)
    finally:
        use_isa(before)
    np.testing.assert_array_equal(ours["embedded"], theirs["embedded"])
    # Between wide gates and ups rounding grows as they do: torch is then as far from the exact values.
    tolerances = {
        "attention": TOLERANCE,
        "normed": TOLERANCE * max(1, case.gate),
        "logits": TOLERANCE * max(1, case.gate),
    }
    for name, tolerance in tolerances.items():
        assert_close(ours[name], theirs[name], f"{name} of {case}", tolerance)


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest) -> str:
    if request.param not in available_isas():
        pytest.skip(open_library().missing or f"this machine has no {request.param}")
    return request.param


@given(case=cases())
@settings(quick, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_a_layer_of_any_shape_is_that_of_the_torch_kernels(isa: str, case: Case) -> None:
    assert_same_layer(case, isa)


@pytest.mark.slow
@given(case=cases())
@settings(long, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_many_layers_of_any_shape_are_those_of_the_torch_kernels(isa: str, case: Case) -> None:
    assert_same_layer(case, isa)
