"""The engine: what it loads and reports, what it refuses, how programs run, and what deterministic mode promises."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import headway as hw
from headway.testing import random_config, random_model
from support.checks import all_logits, assert_close, logit_rows, random_tokens
from support.hf import save_hf, variant

V = 97


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=64, threads=2, step_ms=60_000) as made:
        yield made


@pytest.fixture(scope="module")
def exact() -> Iterator[hw.Engine]:
    with hw.Engine(random_model("qwen3", layers=3), pages=256, threads=2, deterministic=True, step_ms=60_000) as made:
        yield made


# -- deterministic mode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_deterministic_rows_have_the_same_bits_alone_and_in_any_batch_and_chunking(exact: hw.Engine, seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = random_tokens(V, int(rng.integers(20, 65)), seed)
    alone = all_logits(exact, tokens)
    found, at = [], 0
    with exact.context() as context:
        while at < len(tokens):
            count = int(rng.integers(1, len(tokens) - at + 1))
            found.append(among_neighbors(exact, context, tokens[at : at + count], rng))
            at += count
    np.testing.assert_array_equal(np.concatenate(found), alone)


def among_neighbors(engine: hw.Engine, context: hw.Context, tokens: list[int], rng: np.random.Generator) -> np.ndarray:
    """The logits of the context's next rows, computed in one step with up to seven other sequences, 64 rows in all."""
    left, others = 64 - len(tokens), []
    while left > 0 and len(others) < 7:
        others.append(random_tokens(V, int(rng.integers(1, left + 1)), int(rng.integers(1000))))
        left -= len(others[-1])
    contexts = [engine.context() for _ in others]
    crowd = [c.forward().input(o) for c, o in zip(contexts, others, strict=True)]
    mine = context.forward().input(tokens)
    handles = [mine.probe(i, hw.Logits()) for i in range(len(tokens))]
    crowd.insert(int(rng.integers(len(crowd) + 1)), mine)
    with engine._lock:
        running = [(forward, forward.execute()) for forward in crowd]
    outputs = {id(forward): execution.result() for forward, execution in running}
    out = outputs[id(mine)]
    assert (out.stats.batch_size, out.stats.steps) == (len(crowd), 1)
    for c in contexts:
        c.release()
    return np.stack([out.logits(h) for h in handles])


def test_deterministic_bits_do_not_depend_on_the_token_budget(exact: hw.Engine) -> None:
    tokens = random_tokens(V, 90, 5)
    for budget in (1, 13, 512):
        with hw.Engine(
            exact.decoder, pages=64, threads=2, deterministic=True, max_batch_tokens=budget, step_ms=60_000
        ) as other:
            np.testing.assert_array_equal(all_logits(other, tokens), all_logits(exact, tokens))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    "sizes", [{"heads": 9, "kv_heads": 3, "head_dim": 64}, {"heads": 3, "kv_heads": 1, "head_dim": 10}]
)
def test_deterministic_prompt_and_decode_have_the_same_bits(family: str, sizes: dict[str, int]) -> None:
    tokens = random_tokens(V, 70)
    with hw.Engine(random_model(family, **sizes), pages=32, threads=2, deterministic=True, step_ms=60_000) as engine:
        with engine.context() as context:
            decoded = np.concatenate([logit_rows(context, [t]) for t in tokens])
        np.testing.assert_array_equal(decoded, all_logits(engine, tokens))


def test_both_modes_compute_the_same_model(engine: hw.Engine) -> None:
    tokens = random_tokens(V, 50)
    with hw.Engine(engine.decoder, pages=32, threads=2, deterministic=True, step_ms=60_000) as exact:
        assert_close(all_logits(exact, tokens), all_logits(engine, tokens))


# -- programs ------------------------------------------------------------------------------------------------------


async def greedy(engine: hw.Engine, prompt: list[int], count: int) -> list[int]:
    async with engine.context() as context:
        context.fill(prompt)
        return await context.generate(hw.Argmax(), max_tokens=count).tokens()


def test_run_returns_the_value_of_a_program(engine: hw.Engine) -> None:
    tokens = engine.run(greedy, [1, 2, 3], 5)
    sequence = [1, 2, 3]
    for token in tokens:
        assert token == int(all_logits(engine, sequence)[-1].argmax())
        sequence.append(token)
    assert len(tokens) == 5


def test_run_works_inside_a_running_event_loop_and_from_many_threads(engine: hw.Engine) -> None:
    expected = engine.run(greedy, [4, 5], 6)

    async def outer() -> list[int]:
        return engine.run(greedy, [4, 5], 6)

    assert asyncio.run(outer()) == expected
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(engine.run(greedy, [4, 5], 6))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 6


def test_an_error_of_a_program_comes_out_of_run(engine: hw.Engine) -> None:
    async def broken(engine: hw.Engine) -> None:
        raise KeyError("mine")

    async def outer() -> None:
        engine.run(broken)

    with pytest.raises(KeyError, match="mine"):
        engine.run(broken)
    with pytest.raises(KeyError, match="mine"):
        asyncio.run(outer())


def test_pages_come_back(engine: hw.Engine) -> None:
    context = engine.context()
    context.forward().input(random_tokens(V, 40)).execute().result()
    held = engine.stats()
    assert (held.pages_total, held.pages_held, held.pages_free + held.pages_cached) == (64, 3, 61)
    context.release()
    assert engine.stats().pages_held == 0
    assert held.tokens >= 40
    assert held.batch_size_mean >= 1.0


def test_a_closed_engine_says_so() -> None:
    engine = hw.Engine(random_model(), pages=4, threads=1)
    context = engine.context()
    engine.close()
    engine.close()
    with pytest.raises(hw.Closed, match="closed"):
        engine.context()
    with pytest.raises(hw.Closed, match="closed"):
        context.forward()


# -- what was loaded -----------------------------------------------------------------------------------------------


def test_info_says_what_was_loaded(engine: hw.Engine) -> None:
    info = engine.info
    assert (info.dtype, info.device, info.threads, info.path) == ("float32", "cpu", 2, None)
    assert info.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert engine.vocab_size == V


def test_a_model_without_a_tokenizer_takes_ids_and_refuses_text(engine: hw.Engine) -> None:
    assert not engine.has_tokenizer
    assert engine.eos_ids == ()
    context = engine.context()
    for call in (lambda: context.fill("text"), lambda: context.user("text"), lambda: engine.tokenizer):
        with pytest.raises(hw.Unsupported, match="no tokenizer"):
            call()
    assert context.tokens == ()


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float16", 0.01)])
def test_narrow_dtypes_compute_about_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "off")  # it computes in float32
    _, model = variant("qwen3-headdim24")
    folder = save_hf(tmp_path, model)
    tokens = random_tokens(V, 30)
    with (
        hw.Engine(folder, pages=8, threads=2) as wide,
        hw.Engine(folder, pages=8, threads=2, dtype=dtype) as narrow,
    ):
        assert (narrow.info.dtype, narrow.decoder.dtype) == (dtype, getattr(torch, dtype))
        assert narrow.info.weight_bytes * 2 == wide.info.weight_bytes
        assert_close(all_logits(narrow, tokens), all_logits(wide, tokens), tolerance=tolerance)


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "float8"}, hw.InvalidInput, "'float8'.*float32"),
        ({"dtype": torch.float32}, hw.InvalidInput, "torch.float32.*float32"),
        ({"dtype": []}, hw.InvalidInput, r"\[\]"),
        ({"dtype": None}, hw.InvalidInput, "None"),
        ({"device": "tpu9"}, hw.HeadwayError, "'tpu9'.*cpu"),
        ({"device": "cuda:99"}, hw.Unsupported, "'cuda:99'"),
        ({"device": ""}, hw.InvalidInput, "''.*cpu"),
        ({"device": None}, hw.InvalidInput, "None.*cpu"),
        ({"device": 7}, hw.InvalidInput, "7.*cpu"),
        ({"threads": 0}, hw.InvalidInput, r"threads is 0.*\[1, 1024\]"),
        ({"threads": -1}, hw.InvalidInput, "threads is -1"),
        ({"threads": 1025}, hw.InvalidInput, "1025"),
        ({"threads": 2.0}, hw.WrongType, r"2\.0"),
        ({"threads": True}, hw.WrongType, "True"),
        ({"pages": 0}, hw.InvalidInput, "pages is 0.*at least 1"),
        ({"pages": -3}, hw.InvalidInput, "-3"),
        ({"pages": 1.5}, hw.WrongType, r"1\.5"),
        ({"pages": 1 << 40}, hw.OutOfPages, "MiB are free; at most"),
        ({"page_size": 0}, hw.InvalidInput, r"page_size is 0.*\[1, 1024\]"),
        ({"page_size": -16}, hw.InvalidInput, "-16"),
        ({"page_size": 4096}, hw.InvalidInput, "4096"),
        ({"page_size": "16"}, hw.WrongType, "'16'"),
        ({"max_batch_tokens": 0}, hw.InvalidInput, "max_batch_tokens is 0"),
        ({"max_batch_tokens": -1}, hw.InvalidInput, "-1"),
        ({"max_batch_tokens": 1 << 30}, hw.InvalidInput, "1048576"),
        ({"quantize": "int4"}, hw.Unsupported, "int4"),
        ({"deterministic": "no"}, hw.WrongType, "deterministic is 'no'.*True or False"),
        ({"trim": 0}, hw.WrongType, "trim is 0.*True or False"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], error: type[Exception], message: str) -> None:
    before = set(threading.enumerate())  # those of earlier tests may end meanwhile
    with pytest.raises(error, match=message):
        hw.Engine(random_model(), **options)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("model", [None, 3, b"smollm2", ["smollm2"], random_model])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(hw.WrongType, match=r"the model is .*a name, a folder, a .gguf file"):
        hw.Engine(model)


def test_what_is_no_program_is_refused(engine: hw.Engine) -> None:
    with pytest.raises(hw.WrongType, match=r"the program is None.*async function"):
        engine.run(None)  # type: ignore[arg-type]
    with pytest.raises(hw.WrongType, match=r"the program returned 97, which cannot be awaited.*async def"):
        engine.run(lambda engine: engine.vocab_size)  # type: ignore[arg-type, return-value]


def test_a_dtype_or_device_that_a_decoder_in_memory_does_not_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")
    with pytest.raises(hw.InvalidInput, match=r"bfloat16.*float32"):
        hw.Engine(random_model(), dtype="bfloat16", pages=4)
    hw.Engine(random_model(dtype="bfloat16"), dtype="bf16", pages=4).close()


@pytest.mark.parametrize("token", [-1, V, 1 << 31, 1 << 63, 1 << 70])
def test_a_token_id_outside_the_vocabulary_is_refused(engine: hw.Engine, token: int) -> None:
    context = engine.context()
    context.fill([1, 2])
    calls = [
        lambda: context.fill([3, token]),
        lambda: context.forward().input([token]),
        lambda: context.forward().input_at([token], [0]),
        lambda: context.forward().probe(-1, hw.Logprobs([0, token])) if token >= 0 else context.fill([token]),
        lambda: context.forward().sample([-1], hw.Argmax(), history=[token]),
        lambda: context.generate(hw.Argmax(), stop=[token]),
    ]
    for call in calls:
        with pytest.raises(hw.InvalidToken, match=rf"\[\d\] is {token}; .* 0 to {V - 1}"):
            call()
    assert context.tokens == (1, 2)


@pytest.mark.parametrize(
    "tokens", ["text", b"ids", [1.0], [True], [[1]], [None], np.array([1.0]), np.zeros((1, 1), int), 5]
)
def test_what_is_no_list_of_integers_is_refused(engine: hw.Engine, tokens: Any) -> None:
    with pytest.raises(hw.WrongType, match="integer"):
        engine.context().forward().input(tokens)


@pytest.mark.parametrize(
    "tokens", [np.array([1, 2], np.uint16), torch.tensor([1, 2]), (1, 2), iter([1, 2]), [np.int8(1), torch.tensor(2)]]
)
def test_ids_come_in_any_obvious_form(engine: hw.Engine, tokens: Any) -> None:
    assert engine.context().fill(tokens).tokens == (1, 2)


def test_generate_from_nothing_is_refused(engine: hw.Engine) -> None:
    with pytest.raises(hw.OutOfRange, match="empty"):
        engine.run(greedy, [], 4)


@pytest.mark.parametrize("count", [0, -1, 1.5, "9", True])
def test_an_absurd_number_of_tokens_is_refused(engine: hw.Engine, count: Any) -> None:
    with pytest.raises(hw.HeadwayError, match="max_tokens"):
        engine.run(greedy, [1], count)


def test_a_prompt_longer_than_the_context_is_refused_with_numbers() -> None:
    with hw.Engine(random_model(max_positions=20), pages=8, threads=1) as engine:
        context = engine.context()
        with pytest.raises(hw.ContextLengthExceeded, match=r"position is 20; .*limit is 20"):
            context.forward().input([1] * 21).execute()
        with pytest.raises(hw.ContextLengthExceeded, match="limit is 20"):
            engine.run(greedy, [1] * 21, 1)
        assert context.seq_len == 0
        logit_rows(context, [1] * 20)
        assert len(engine.run(greedy, [1] * 18, 50)) == 3  # the last is read at position 19 and ends it


def test_a_prompt_that_can_never_fit_the_pages_is_refused_with_numbers(engine: hw.Engine) -> None:
    with hw.Engine(engine.decoder, pages=2, threads=1) as small:
        context = small.context()
        with pytest.raises(hw.OutOfPages, match="needs 3 pages of 16 slots; the pool has 2"):
            context.forward().input([1] * 33).execute()
        assert small.stats().pages_free == 2
        logit_rows(context, [1] * 32)


def test_a_bad_seed_is_refused(engine: hw.Engine) -> None:
    for seed in (-1, 1 << 64, 1.0, True):
        with pytest.raises((hw.InvalidInput, hw.WrongType), match="seed"):
            engine.context(seed=seed)  # type: ignore[arg-type]


# -- models in memory ----------------------------------------------------------------------------------------------


def test_random_models_follow_their_seed_and_config() -> None:
    tokens = random_tokens(V, 9)

    def logits(**options: Any) -> np.ndarray:
        with hw.Engine(random_model(**options), pages=4, threads=1) as engine:
            return all_logits(engine, tokens)

    np.testing.assert_array_equal(logits(seed=3), logits(seed=3))
    assert np.abs(logits(seed=3) - logits(seed=4)).max() > 0.1
    assert random_model("mistral", layers=3).config.windows == (8, 8, 8)
    assert random_model("qwen2").layers[0].qkv.bias is not None
    assert random_model(tied=True).output is not None
    assert random_config("llama", heads=6, kv_heads=3).parameters == sum(
        t.numel() for t in tensors(random_model(heads=6, kv_heads=3))
    )


def tensors(decoder: Any) -> list[torch.Tensor]:
    found = [decoder.embedding, decoder.output, decoder.final_norm]
    for layer in decoder.layers:
        found += [layer.input_norm, layer.mlp_norm]
        found += [w.weight for w in (layer.qkv, layer.out, layer.gate_up, layer.down)]
    return found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"family": "gpt9"}, "'gpt9'.*llama"),
        ({"size": 3}, "'size'.*hidden_size"),
        ({"layers": 2, "windows": (None,)}, "1 entries; 2 layers"),
        ({"heads": 3}, "3 heads cannot share 2"),
        ({"dtype": "int8"}, "'int8'"),
    ],
)
def test_random_models_that_cannot_be_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(hw.HeadwayError, match=message):
        random_model(**arguments)


def test_an_engine_in_memory_needs_torch_and_numpy_alone() -> None:
    blocked = [
        "safetensors",
        "transformers",
        "tokenizers",
        "gguf",
        "huggingface_hub",
        "jinja2",
        "typer",
        "rich",
        "llguidance",
    ]
    program = f"""
import sys
sys.modules.update(dict.fromkeys({json.dumps(blocked)}))
import headway as hw
from headway.testing import random_model
with hw.Engine(random_model(), pages=8, threads=1) as engine:
    with engine.context() as context:
        forward = context.forward().input([1, 2, 3])
        handle = forward.sample([-1], hw.Argmax())
        print(forward.execute().result().token(handle))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with hw.Engine(random_model(), pages=8, threads=1) as engine:
        assert int(done.stdout) == int(all_logits(engine, [1, 2, 3])[-1].argmax())
