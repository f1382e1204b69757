"""Adapters of what a family does not have, or does not adapt: refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway as hw
from headway.models.adapters.bound import target_shapes
from headway.testing import random_adapter, random_config
from support.hf import save_hf
from support.hf_families import family_model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "mixtral",
            r"layers.0.mlp.gate_proj.*mixtral model has its experts.*train it on q, k, v, o, router, .*down$",
        ),
        ("starcoder2", r"layers.0.mlp.gate_proj.*feed-forward without a gate.*train it on q, k, v, o, up, down$"),
    ],
)
def test_an_adapter_of_what_a_layer_does_not_have_is_refused_by_name(name: str, message: str, tmp_path: Path) -> None:
    llama = random_config("llama", hidden_size=64, intermediate_size=84)
    _, model = family_model(name)
    with hw.Engine(save_hf(tmp_path, model), pages=8, threads=1) as engine:
        assert set(engine.capabilities.adapters) == set(target_shapes(engine.config))
        with pytest.raises(hw.Unsupported, match=message):
            engine.load_adapter(random_adapter(llama, roles=("gate",)))
