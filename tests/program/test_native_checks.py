"""What the native step is given is checked before its memory is read: weights, saved files, forked processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.kernels.native.library import ThreadPool, open_library
from headway.kv import snapshot as files
from headway.models.decoder import Decoder
from headway.models.layers import Linear
from headway.models.quantized.cpu import QuantizedDecoder, QuantizedLayer
from headway.models.quantized.interleave import interleave_decoder
from headway.program.engine import Engine
from headway.testing import random_model
from support.arrays import interleave_floats, quantize_int8
from support.checks import all_logits, logit_rows, random_tokens
from support.gguf_files import write_gguf
from support.hf import random_hf

pytestmark = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")

V = 97


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The native step, and a cache for snapshots that no other test sees."""
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path / "cache"))


# -- weights -------------------------------------------------------------------------------------------------------


def ones(count: int) -> np.ndarray:
    return np.ones(count, np.float32)


PACKED: dict[str, tuple[Callable[[QuantizedDecoder], Any], str]] = {
    "embedding": (
        lambda d: {"embedding": interleave_floats(torch.zeros(V - 1, 64))},
        r"'embedding' has shape \[96, 64\].*97",
    ),
    "output": (lambda d: {"output": interleave_floats(torch.zeros(V, 60))}, r"'output' has shape \[97, 60\]"),
    "final norm": (lambda d: {"final_norm": ones(65)}, r"'final_norm' has shape \[65\].*\[64\]"),
    "norm in float16": (lambda d: {"final_norm": d.final_norm.astype(np.float16)}, "'final_norm'.*float16"),
    "norm of torch": (lambda d: {"final_norm": torch.ones(64)}, "'final_norm'.*an array"),
    "norm with gaps": (lambda d: {"final_norm": ones(128)[::2]}, "'final_norm' must be contiguous"),
    "frequencies": (lambda d: {"inv_freq": d.inv_freq[1:]}, "'inv_freq'"),
    "a layer less": (lambda d: {"layers": d.layers[:1]}, "has 1 layers and 2 windows; its config says 2"),
}
LAYERS: dict[str, tuple[Callable[[QuantizedLayer], Any], str]] = {
    "a matrix": (
        lambda l: {"up": interleave_floats(torch.zeros(80, 64))},
        r"'layers.1.up' has shape \[80, 64\].*\[84, 64\]",
    ),
    "a norm": (lambda l: {"mlp_norm": ones(3)}, r"'layers.1.mlp_norm' has shape \[3\]"),
    "one head norm": (lambda l: {"k_norm": ones(16)}, "'layers.1' has a norm for one of q and k"),
    "short head norms": (
        lambda l: {"q_norm": ones(16), "k_norm": np.ones(8, np.float32)},
        r"'layers.1.k_norm'",
    ),
    "a bias": (
        lambda l: {"q": replace(l.q, bias=ones(5))},
        r"'layers.1.q' cannot be used: bias are \[5\]",
    ),
    "quants": (
        lambda l: {"o": replace(l.o, quants=l.o.quants[1:])},
        r"'layers.1.o' cannot be used: quants are \[3, 64, 16\]",
    ),
    "quants with gaps": (
        lambda l: {"o": replace(l.o, quants=l.o.quants.swapaxes(1, 2).copy().swapaxes(1, 2))},
        "'layers.1.o' cannot be used: quants must be contiguous",
    ),
    "scales": (
        lambda l: {"v": replace(quantize_int8(torch.ones(32, 64)), scales=None)},
        "'layers.1.v'.*scales are missing",
    ),
}


def refused(model: Decoder | QuantizedDecoder, message: str) -> None:
    with pytest.raises(hw.InvalidInput, match=message):
        Engine(model, pages=4, threads=1)


@pytest.mark.parametrize("name", PACKED)
def test_a_packed_decoder_must_be_what_its_config_says(name: str) -> None:
    decoder = interleave_decoder(random_model(vocab_size=V))
    change, message = PACKED[name]
    refused(replace(decoder, **change(decoder)), message)


@pytest.mark.parametrize("name", LAYERS)
def test_so_must_its_layers(name: str) -> None:
    decoder = interleave_decoder(random_model(vocab_size=V))
    change, message = LAYERS[name]
    refused(
        replace(decoder, layers=(decoder.layers[0], replace(decoder.layers[1], **change(decoder.layers[1])))), message
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv": Linear(torch.zeros(100, 64))}, r"'layers.0.q\+k\+v' has shape \[100, 64\]; 128 rows are needed"),
        ({"qkv": Linear(torch.zeros(128, 64), torch.zeros(9))}, r"'layers.0.q\+k\+v' has shape .* a bias of \[9\]"),
        ({"down": Linear(torch.zeros(64, 90))}, r"'layers.0.gate\+up' has shape \[168, 64\]; 180 rows"),
        ({"input_norm": torch.ones(60)}, r"'layers.0.input_norm' has shape \[60\]"),
        ({"out": Linear(torch.zeros(64, 32))}, r"'layers.0.o' has shape \[64, 32\].*\[64, 64\]"),
    ],
)
def test_a_decoder_of_floats_must_be_what_its_config_says(change: dict[str, Any], message: str) -> None:
    model = random_model(vocab_size=V)
    refused(replace(model, layers=(replace(model.layers[0], **change), *model.layers[1:])), message)


def test_norms_that_lie_apart_in_memory_compute_the_same() -> None:
    model = random_model("qwen3", vocab_size=V)

    def spread(t: torch.Tensor | None) -> torch.Tensor:
        assert t is not None
        return torch.stack([t, t + 7], dim=1)[:, 0]

    layers = tuple(
        replace(l, **{n: spread(getattr(l, n)) for n in ("input_norm", "mlp_norm", "q_norm", "k_norm")})
        for l in model.layers
    )
    apart = replace(model, layers=layers, final_norm=spread(model.final_norm), inv_freq=spread(model.inv_freq))
    tokens = random_tokens(V, 20)
    with Engine(model, pages=8, threads=1) as one, Engine(apart, pages=8, threads=1) as other:
        assert other.info.runner.startswith("native")
        np.testing.assert_array_equal(all_logits(one, tokens), all_logits(other, tokens))


def test_a_decoder_for_the_native_step_is_computed_by_torch_where_native_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens = random_model(vocab_size=V), random_tokens(V, 20)
    decoder = interleave_decoder(model)
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    with Engine(decoder, pages=8) as engine, Engine(model, pages=8) as plain:
        assert engine.info.runner == "torch"
        np.testing.assert_array_equal(all_logits(engine, tokens), all_logits(plain, tokens))
    with pytest.raises(hw.InvalidInput, match="output"):
        Engine(replace(decoder, output=decoder.layers[0].q), pages=4)


# -- saved files ---------------------------------------------------------------------------------------------------


def change_file(path: Path, **changes: Any) -> None:
    saved = files.read(path)
    assert saved is not None
    files.write(path, replace(saved, **changes))


@pytest.mark.parametrize(
    ("state", "size"),
    [(np.zeros(60 * 4, np.uint8), 240), (np.zeros(65 * 4, np.uint8), 260), (np.zeros(64, np.float32), 256)],
)
def test_a_saved_state_of_another_size_is_refused(tmp_path: Path, state: np.ndarray, size: int) -> None:
    with Engine(random_model(vocab_size=V), pages=8, threads=1) as engine:
        with engine.context() as context:
            logit_rows(context, random_tokens(V, 5))
            context.save("kept", durable=True)
        path = tmp_path / "cache" / "snapshots" / "kept.safetensors"
        saved = files.read(path)
        assert saved is not None
        assert saved.state.nbytes == 64 * 4
        change_file(path, state=state)
        with pytest.raises(hw.SnapshotError, match=f"state of {size} bytes and this model's has 256"):
            engine.open("kept")
        change_file(path, state=np.zeros(0, np.uint8))
        assert engine.open("kept") is not None


def test_saved_pages_that_are_no_bytes_or_not_all_there_are_refused(tmp_path: Path) -> None:
    with Engine(random_model(vocab_size=V), pages=8, threads=1, page_size=4) as engine:
        with engine.context() as context:
            logit_rows(context, random_tokens(V, 12))
            context.inner().discard_pages(0, 2)
            context.save("kept", durable=True)
        path = tmp_path / "cache" / "snapshots" / "kept.safetensors"
        saved = files.read(path)
        assert saved is not None
        for change in ({"kv": saved.kv.view(np.int8)}, {"discarded": (0, 0)}):
            files.write(path, replace(saved, **change))
            with pytest.raises(hw.SnapshotError, match=r"do not have this model's shape|out of order"):
                engine.open("kept")
            files.write(path, saved)
        assert engine.open("kept") is not None
        assert engine.stats().pages_held == 0


def test_pages_of_coded_rows_are_computed_again_where_rows_are_floats(tmp_path: Path) -> None:
    """The same file, so the same fingerprint; its keys and values differ by what 8 bits leave of a row."""
    _, hf = random_hf("llama", 5, hidden_size=64, intermediate_size=96, head_dim=16)
    path = write_gguf(tmp_path / "m.gguf", hf, kind="Q4_0")
    words = hf.config.vocab_size
    tokens, after = random_tokens(words, 20), random_tokens(words, 3, seed=1)
    with Engine(path, pages=16, threads=1) as quantized, Engine(path, pages=16, threads=1, dtype="float32") as floats:
        assert quantized.fingerprint == floats.fingerprint
        for maker, user in ((quantized, floats), (floats, quantized), (quantized, quantized)):
            expected = next_rows(user, tokens, after)
            with maker.context() as context:
                logit_rows(context, tokens)
                context.save("kept", durable=True)
            user.cache.clear()
            steps, opened = user.stats().steps, user.open("kept")
            assert opened is not None
            assert (user.stats().steps > steps) == (maker is not user)
            with opened:
                np.testing.assert_array_equal(logit_rows(opened, after), expected)
        assert np.abs(next_rows(quantized, tokens, after) - next_rows(floats, tokens, after)).max() > 1e-4


def next_rows(engine: hw.Engine, tokens: list[int], after: list[int]) -> np.ndarray:
    with engine.context() as context:
        logit_rows(context, tokens)
        return logit_rows(context, after)


# -- forked processes ----------------------------------------------------------------------------------------------


def in_a_fork(work: Callable[[], str]) -> str:
    """What `work` says in a forked child; a child that hangs is ended, and says nothing."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writes, work().encode())
        finally:
            os._exit(0)
    os.close(writes)
    ending = threading.Timer(30, os.kill, (child, 9))
    ending.start()
    with os.fdopen(reads) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    ending.cancel()
    return said


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_is_told_that_it_has_no_threads_and_ends() -> None:
    thread_pool, holder = ThreadPool(3), [ThreadPool(2)]

    def child() -> str:
        holder.clear()  # frees nothing, waits for nobody
        try:
            return f"got {thread_pool.handle}"
        except hw.Unsupported as error:
            return str(error)

    said = in_a_fork(child)
    assert f"the native threads of process {os.getpid()} do not exist in its forked child" in said
    assert '"spawn"' in said
    assert thread_pool.handle


@pytest.mark.filterwarnings("ignore:This process")
def test_an_engine_of_the_parent_is_refused_in_a_forked_child_and_lives_on_in_the_parent() -> None:
    tokens = random_tokens(V, 9)
    with Engine(random_model(vocab_size=V), pages=8, threads=2) as engine:
        before = all_logits(engine, tokens)

        def child() -> str:
            try:
                return str(all_logits(engine, tokens))
            except hw.Closed as error:
                return str(error)

        assert "a forked child has its parent's engine and none of the threads" in in_a_fork(child)
        engine.cache.clear()
        np.testing.assert_array_equal(all_logits(engine, tokens), before)
