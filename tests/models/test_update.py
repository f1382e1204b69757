"""New weights for decoders in every layout: what an update makes equals what loading the new weights makes."""

from __future__ import annotations

import pytest
import torch

import headway as hw
from headway.models.quantized.cuda import quantize_decoder
from headway.models.weights.update import checked, updated, weight_shapes
from headway.models.weights.update_tensors import moved
from headway.testing import random_model


def new_weights(decoder: object, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = weight_shapes(decoder.config)  # type: ignore[attr-defined]
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items() if name != "lm_head.weight"}


def leaves(value: object) -> list[torch.Tensor]:
    """Every tensor of a decoder, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [leaf for each in value for leaf in leaves(each)]
    return [leaf for each in vars(value).values() for leaf in leaves(each)] if hasattr(value, "__dict__") else []


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_matrices_for_a_cuda_device_are_quantized_again(kind: str) -> None:
    pytest.importorskip("triton")
    dense = random_model("qwen2", intermediate_size=64)
    given = new_weights(dense)
    ours = updated(quantize_decoder(dense, kind), checked(dense.config, given))  # type: ignore[arg-type]
    theirs = quantize_decoder(updated(dense, checked(dense.config, given)), kind)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(leaves(ours), leaves(theirs), strict=True))
    some = {name: t for name, t in given.items() if "q_proj" in name}
    with pytest.raises(hw.Unsupported, match="give all of q, k, v"):
        updated(quantize_decoder(dense, kind), checked(dense.config, some))  # type: ignore[arg-type]


def test_the_old_decoder_stays_as_it_was_and_shares_what_is_the_same() -> None:
    dense = random_model("qwen3")
    before = [leaf.clone() for leaf in leaves(dense)]
    name = "model.layers.0.mlp.down_proj.weight"
    new = updated(dense, checked(dense.config, {name: new_weights(dense)[name]}))
    assert all(torch.equal(a, b) for a, b in zip(leaves(dense), before, strict=True))
    assert new.layers[0].qkv is dense.layers[0].qkv  # type: ignore[union-attr]
    assert new.layers[0].down is not dense.layers[0].down
    assert new.layers[1].down is dense.layers[1].down


def test_a_decoder_is_moved_whole_and_tied_weights_stay_tied() -> None:
    dense = random_model("qwen2", tied=True)
    there = moved(dense, torch.device("meta"))
    assert all(leaf.device.type == "meta" for leaf in leaves(there))
    assert there.output is there.embedding
    assert there.config is dense.config
