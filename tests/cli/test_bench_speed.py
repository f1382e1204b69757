"""`headway bench decode | prefill | batch | startup`: they measure what they say, and refuse what makes no sense."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch
import transformers

import headway as hw
from headway.base.errors import InvalidInput
from headway.bench.models import SHAPES, ModelShape, tensors, write_folder
from headway.bench.speed import DecodeTiming, SpeedTest, Summary, pages_for
from headway.testing import random_model, scripted_engine

Run = Callable[..., CompletedProcess[str]]
TINY = ("--shape", "tiny", "--threads", "1", "--repeat", "2")


@pytest.mark.slow
def test_decode_counts_tokens_after_the_first_and_holds_them_against_the_memory(headway: Run) -> None:
    found = json.loads(headway("bench", "decode", *TINY, "--tokens", "6", "--prompt", "5", "--json").stdout)
    assert [run["tokens"] for run in found["runs"]] == [5, 5]
    assert found["machine"]["cpu"]
    assert found["path"].startswith(found["model"]["runner"])
    limit = found["limit"]
    weights = 4 * (SHAPES["tiny"].layer_weights + SHAPES["tiny"].head_weights + 5 * SHAPES["tiny"].hidden)
    assert limit["bytes_per_token"] == weights
    assert limit["tokens_per_second"] == pytest.approx(limit["bytes_per_second"] / weights)
    rate = found["tokens_per_second"]
    assert rate["min"] <= rate["median"] <= rate["max"]
    assert found["share_of_limit"] == pytest.approx(rate["median"] / limit["tokens_per_second"])


def test_a_batch_counts_all_sequences_and_its_limit_is_theirs(headway: Run) -> None:
    options = ("--sequences", "3", "--tokens", "6", "--prompt", "5")
    found = json.loads(headway("bench", "batch", *TINY, *options, "--json").stdout)
    assert all(0 < run["tokens"] <= 15 for run in found["runs"])  # those after every sequence had its first
    most = 3 * found["limit"]["tokens_per_second"]
    assert found["share_of_limit"] == pytest.approx(found["tokens_per_second"]["median"] / most)


def test_a_pipe_gets_plain_lines(headway: Run) -> None:
    done = headway("bench", "prefill", *TINY, "--prompt", "40", "--format", "bf16")
    assert done.returncode == 0, done.stderr
    title, headers, rate, first, memory = done.stdout.splitlines()
    assert title.startswith("prefill · random tiny in bf16 · ")
    assert " · 1 thread · prompt 40, 2 runs" in title
    assert headers.split("\t") == ["what", "median", "min", "max", "spread", "of limit"]
    assert rate.startswith("tokens/s\t")
    assert first.startswith("ms to the first token\t")
    assert memory.startswith("memory: ")


def test_startup_times_a_fresh_process_in_order(headway: Run) -> None:
    found = json.loads(headway("bench", "startup", "--repeat", "1", "--json").stdout)
    (run,) = found["runs"]
    phases = ("command", "imported", "loaded", "prompt", "answered", "exited")
    assert run["command"] > 0
    assert list(run) == list(phases)
    assert sorted(run.values()) == list(run.values())


def test_any_folder_can_be_measured(headway: Run, tmp_path: Path) -> None:
    write_folder(SHAPES["tiny"], tmp_path / "model", "f16")
    options = ("--tokens", "3", "--repeat", "1", "--threads", "1", "--json")
    found = json.loads(headway("bench", "decode", "-m", str(tmp_path / "model"), *options).stdout)
    assert found["model"]["name"] == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("decode", "--shape", "huge"), "'huge'"),
        (("decode", "--shape", "tiny", "--format", "q9"), "--format is 'q9'"),
        (("decode", "--format", "f16"), "it needs --shape"),
        (("decode", "--shape", "tiny", "--tokens", "1"), "--tokens is 1"),
        (("batch", "--shape", "tiny", "--sequences", "0"), "--sequences is 0"),
        (("prefill", "--shape", "tiny", "--prompt", "9000"), "this model has 8192"),
        (("startup", "--shape", "tiny", "--repeat", "0"), "--repeat is 0"),
        (("startup", "--shape", "tiny", "--repeat", "1"), "has no tokenizer"),
        (("decode", "--shape", "tiny", "--quantize", "int3"), "int3"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_sentence(headway: Run, arguments: tuple[str, ...], why: str) -> None:
    done = headway("bench", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
    assert "Traceback" not in done.stderr


# -- parts -------------------------------------------------------------------------------------------------------------


def test_a_shapes_folder_is_a_model_that_transformers_computes_alike(tmp_path: Path) -> None:
    folder = write_folder(SHAPES["tiny"], tmp_path, "f32")
    prompt = list(range(3, 30))
    with hw.Engine(folder, threads=1, pages=16) as engine:

        async def logits(engine: hw.Engine) -> torch.Tensor:
            async with engine.context() as ctx:
                forward = ctx.fill(prompt).forward()
                handle = forward.probe(-1, hw.Logits())
                return torch.as_tensor((await forward.execute()).logits(handle))

        ours = engine.run(logits)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        theirs = model(torch.tensor([prompt])).logits[0, -1]
    torch.testing.assert_close(ours.float(), theirs, rtol=1e-3, atol=1e-3)


def test_float16_and_float32_folders_hold_the_same_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    narrow = load_file(write_folder(SHAPES["tiny"], tmp_path / "a", "f16") / "model.safetensors")
    wide = load_file(write_folder(SHAPES["tiny"], tmp_path / "b", "f32") / "model.safetensors")
    assert set(narrow) == set(wide) == {name for name, _ in tensors(SHAPES["tiny"])}
    assert all(torch.equal(narrow[name].float(), wide[name]) for name in wide)
    with pytest.raises(InvalidInput, match="'q4_0'"):
        write_folder(SHAPES["tiny"], tmp_path / "c", "q4_0")


def test_the_operations_of_a_prompt_are_those_of_its_products_and_its_attention() -> None:
    shape = ModelShape("one", 1, 2, 1, 1, 2, 3, 5, 64, 1e4)
    weights = 4 * 2 * 2 + 3 * 2 * 3
    assert shape.layer_weights == weights
    products, attention = shape.prefill_flops(3)
    assert products == 2 * (3 * weights + 10)
    assert attention == 2 * 2 * 2 * (1 + 2 + 3)  # two products of two wide vectors for each slot a row sees


def test_forks_compute_the_prompt_once() -> None:
    with scripted_engine(pages=200) as engine:
        watch = SpeedTest(engine)
        before = engine.stats().tokens
        timing = watch.fork(watch.prompt(64), 4, 6)
        computed = engine.stats().tokens - before
        assert engine.stats().pages_held == 0
    assert computed == 63 + 4 * 6
    assert 0 < timing.tokens <= 20


def test_no_run_meets_the_cache() -> None:
    with hw.Engine(random_model(), threads=1, pages=pages_for(1, 64)) as engine:
        watch = SpeedTest(engine)
        for _ in range(3):
            watch.prefill(watch.prompt(60))
        assert engine.stats().cache_hits == 0
        assert engine.stats().tokens == 180


def test_a_summary_has_the_median_and_the_ends() -> None:
    assert Summary.of([3.0, 1.0, 2.0, 9.0]) == Summary(2.5, 1.0, 9.0)
    assert Summary.of([1.0, 2.0, 3.0]).spread == 1.0
    assert DecodeTiming(0.5, 2.0, 10).rate == 5.0
