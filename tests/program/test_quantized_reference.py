"""Quantized models on the native step and on torch: a format fixes activations and sums, so both have the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway import Mask
from headway.kernels.native.library import ISAS, available_isas, open_library, use_isa
from headway.models.files.gguf import KINDS
from headway.testing import random_adapter
from support.checks import assert_close, logit_rows, random_tokens, reference_logits
from support.gguf_files import round_weights, write_gguf
from support.hf import random_hf, save_hf
from support.sweeps import swept

pytestmark = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")

V = 97
QUANTIZED = tuple(kind for kind in KINDS if kind.startswith("Q"))
FORMATS = (*QUANTIZED, "int8", "int4", "mixed", "float layers")
ROWS = (1, 2, 7, 33, 1, 150, 1)  # more than a chunk of 128 slots in the end
Files = Callable[[str], tuple[Path, dict[str, Any]]]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A random model in one format: its path, and the options of its engine."""

    def kind_of(format: str) -> Callable[[str], str]:
        def kind(name: str) -> str:
            if format == "float layers":
                return "Q8_0" if name == "output.weight" else "F16"
            return "F16" if "attn_k" in name else QUANTIZED[sum(map(ord, name)) % len(QUANTIZED)]

        return kind

    def made(format: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp("quantized")
        sizes: dict[str, Any] = {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_attention_heads": 8,
            "vocab_size": V,
        }
        _, model = random_hf("qwen3" if format == "Q5_0" else "llama", 5, head_dim=32, **sizes)
        if format in ("int8", "int4"):
            return save_hf(folder, model), {"quantize": format}
        return write_gguf(folder / "m.gguf", model, kind=format if format in KINDS else kind_of(format)), {}

    return made


def opened(runner: str, path: Path, **options: Any) -> hw.Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", "require" if runner == "native" else "off")
        engine = hw.Engine(path, **{"pages": 64, "threads": 2, **options})
    assert engine.info.runner.startswith(runner)
    return engine


def rows_of(engine: hw.Engine, counts: tuple[int, ...] = ROWS) -> list[np.ndarray]:
    """The logits of passes of these many rows, one after the other in a context."""
    tokens = random_tokens(V, sum(counts))
    with engine.context() as context:
        return [logit_rows(context, tokens[context.seq_len : context.seq_len + n]) for n in counts]


@pytest.mark.parametrize("format", FORMATS)
def test_native_and_torch_agree_to_the_bit_on_every_format_and_row_count(files: Files, format: str) -> None:
    path, options = files(format)
    with opened("native", path, **options) as ours, opened("torch", path, **options) as theirs:
        assert (ours.info.format, ours.info.stored) == (theirs.info.format, theirs.info.stored)
        for one, other in zip(rows_of(ours), rows_of(theirs), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_has_the_bits_of_the_reference(files: Files, isa: str) -> None:
    calls, before = open_library().calls, open_library().isa
    assert calls is not None
    if isa not in available_isas():
        pytest.skip(f"this machine has no {isa}")
    path, options = files("mixed")
    try:
        use_isa(isa)
        with opened("native", path, **options) as ours:
            found = rows_of(ours)
    finally:
        use_isa(before)
    with opened("torch", path, **options) as theirs:
        for one, other in zip(found, rows_of(theirs), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("format", swept(["Q4_K", "int8", "mixed"]))
def test_masks_forks_holes_and_probes_have_the_same_bits(files: Files, format: str) -> None:
    path, options = files(format)
    found = []
    for runner in ("native", "torch"):
        with opened(runner, path, page_size=8, **options) as engine, engine.context() as stem:
            logit_rows(stem, random_tokens(V, 180, 1))
            stem.inner().discard_pages(3, 2)
            with stem.fork() as context:
                forward = context.forward().input_at(random_tokens(V, 5, 2), [200, 180, 181, 181, 300])
                forward.attention_mask(Mask.sink(2, 150) & ~Mask.window(2) | Mask.window(1))
                hidden = [forward.probe(3, hw.Hidden(l)) for l in range(engine.config.layers + 1)]
                logits, scores = forward.probe(-1, hw.Logits()), forward.probe(2, hw.AttentionScores(1))
                out = forward.execute().result()
                found.append(([out.hidden(h) for h in hidden], out.logits(logits), out.attention(scores)))
    for one, other in zip(*(f[0] for f in found), strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0][1], found[1][1])
    assert_close(found[0][2], found[1][2], "attention")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_row_on_torch_has_the_same_bits_alone_and_in_any_batch(
    files: Files, deterministic: bool, adapted: bool
) -> None:
    """8-bit activations would turn a rounding that depends on the shape of a matmul into other logits."""
    path, options = files("Q4_1")
    tokens = random_tokens(V, 60)
    with opened("torch", path, deterministic=deterministic, **options) as engine:
        adapter = random_adapter(engine.config) if adapted else None
        with engine.context(salt="whole") as context:
            whole = adapted_rows(context, tokens, adapter)
        with engine.context(salt="parts") as context:
            cuts = ((0, 1), (1, 2), (3, 7), (10, 50))
            parts = [adapted_rows(context, tokens[i : i + n], adapter) for i, n in cuts]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def adapted_rows(context: hw.Context, tokens: list[int], adapter: hw.Adapter | None) -> np.ndarray:
    """The logits of every row of one pass [n, V], under an adapter."""
    forward = context.forward().input(tokens)
    if adapter is not None:
        forward.adapter(adapter)
    handles = [forward.probe(i, hw.Logits()) for i in range(len(tokens))]
    out = forward.execute().result()
    return np.stack([out.logits(h) for h in handles])


@pytest.mark.parametrize("runner", ["native", "torch"])
def test_float32_asks_for_the_floats_of_a_quantized_file(tmp_path: Path, runner: str) -> None:
    """The promise of the reference implementation's logits is for floats, and so for activations as they are."""
    _, model = random_hf("llama", 3, hidden_size=64, intermediate_size=96, head_dim=16)
    round_weights(model, "Q8_0")
    tokens = random_tokens(V, 40)
    path, expected = write_gguf(tmp_path / "m.gguf", model, kind="Q8_0"), reference_logits(model, tokens)
    with opened(runner, path, dtype="float32") as floats, opened(runner, path) as quantized:
        assert (floats.info.format, quantized.info.format) == (
            "f32" if runner == "native" else "float32",
            "int8 in groups of 32",
        )
        with floats.context() as one, quantized.context() as other:
            assert_close(logit_rows(one, tokens), expected)
            apart = np.abs(logit_rows(other, tokens) - expected).max() / np.abs(expected).max()
            assert 1e-4 < apart < 0.1  # the approximation that the format makes


def test_a_snapshot_of_one_runner_opens_on_the_other(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    path, options = files("Q8_0")
    tokens = random_tokens(V, 40)
    with opened("native", path, **options) as ours, ours.context() as context:
        logit_rows(context, tokens[:35])
        context.save("here", durable=True)
        expected = logit_rows(context, tokens[35:])
    with opened("torch", path, **options) as theirs:
        context = theirs.open("here")
        assert context is not None
        np.testing.assert_array_equal(logit_rows(context, tokens[35:]), expected)


@pytest.mark.slow
def test_the_default_model_computes_the_same_bits_on_both(smollm2_path: Path) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    found = []
    for runner in ("native", "torch"):
        with opened(runner, smollm2_path) as engine, engine.context() as context:
            found.append(logit_rows(context, engine.tokenizer.encode(text)[:150]))
    np.testing.assert_array_equal(*found)
    assert torch.from_numpy(found[0]).isfinite().all()
