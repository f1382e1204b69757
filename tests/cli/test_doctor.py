"""The doctor: facts read from a machine's files, hints that follow from them, and the sum that says what fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
import torch

import headway as hw
from headway.base.system.device import CPU
from headway.base.system.machine import Machine, read_machine
from headway.cli.doctor import Gpu, hints
from headway.cli.facts import ModelFacts
from headway.cli.memory_fit import MemoryFit, StoredWeights, memory_fit, weights_with_experts
from headway.kernels.native.library import ThreadPool, open_library
from headway.models.described import bytes_of
from headway.models.files.gguf import KINDS, GgufFile
from headway.models.files.weights import GgufWeights
from headway.models.hub import store
from headway.models.quantized.repack import kept_size, load_matrix
from headway.models.weights.load_tensors import load_model
from support.gguf_families import write_family
from support.gguf_files import random_bytes
from support.gguf_files import write as write_weights
from support.hf import save_hf
from support.hf_families import family_model
from support.quantized_files import mxfp4

GIB = 1 << 30
Run = Callable[..., CompletedProcess[str]]
needs_native = pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


BARE = {
    "proc/cpuinfo": "model name\t: Fast CPU\nflags\t\t: sse avx2 fma avx512f avx512_vnni\n",
    "proc/meminfo": "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n",
}


def test_a_machine_without_limits(tmp_path: Path) -> None:
    machine = read_machine(write(tmp_path, BARE))
    assert machine.cpu == "Fast CPU"
    assert machine.instructions == ("AVX2", "FMA", "AVX-512", "AVX-512 VNNI")
    assert (machine.memory_total, machine.memory_free) == (8 * GIB, 4 * GIB)
    assert machine.cpu_quota is None
    assert machine.memory_limit is None
    assert machine.fair_threads == machine.usable_cores


def test_limits_of_version_2_groups_are_the_tightest_on_the_way_up(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/a/b\n",
        f"{groups}/a/cpu.max": "150000 100000\n",
        f"{groups}/a/b/cpu.max": "max 100000\n",
        f"{groups}/a/memory.max": f"{2 * GIB}\n",
        f"{groups}/a/memory.current": f"{GIB}\n",
        f"{groups}/a/memory.stat": f"anon 5\ninactive_file {GIB // 2}\n",
        f"{groups}/a/b/memory.max": "max\n",
    }
    machine = read_machine(write(tmp_path, BARE | files))
    assert machine.cpu_quota == 1.5
    assert machine.fair_threads == 1
    assert machine.memory_limit == 2 * GIB
    assert machine.memory_free == 2 * GIB - GIB // 2


def test_limits_of_version_1_groups(tmp_path: Path) -> None:
    groups = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "4:memory:/box\n3:cpu,cpuacct:/box\n",
        f"{groups}/cpu/box/cpu.cfs_quota_us": "50000\n",
        f"{groups}/cpu/box/cpu.cfs_period_us": "100000\n",
        f"{groups}/memory/box/memory.limit_in_bytes": f"{GIB}\n",
        f"{groups}/memory/box/memory.usage_in_bytes": f"{GIB // 4}\n",
        f"{groups}/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    machine = read_machine(write(tmp_path, BARE | files))
    assert machine.cpu_quota == 0.5
    assert machine.fair_threads == 1
    assert (machine.memory_limit, machine.memory_free) == (GIB, GIB - GIB // 4)


FAST = Machine("CPU", ("AVX2", "AVX-512", "AVX-512 VNNI", "AVX-512 BF16"), 8, 8, None, 16 * GIB, 8 * GIB, None, None)


@pytest.mark.parametrize(
    ("machine", "gpus", "threads", "words"),
    [
        (FAST, [Gpu("Big GPU", GIB, GIB)], 8, "Big GPU"),
        (FAST, [], 9, "9 threads are more than the 8"),
        (replace(FAST, cpu_quota=2.0), [], 2, "2 of 8 cores"),
        (replace(FAST, instructions=("AVX2", "AVX-512 BF16")), [], 8, "no VNNI"),
        (replace(FAST, instructions=()), [], 8, "no AVX2"),
        (replace(FAST, instructions=("AVX2", "AVX-512 VNNI")), [], 8, "no BF16"),
        (replace(FAST, memory_available=GIB // 2), [], 8, "536.9 MB of memory is free"),
    ],
)
def test_each_hint_follows_from_a_fact(machine: Machine, gpus: list[Gpu], threads: int, words: str) -> None:
    found = hints(machine, gpus, "cpu", threads)
    assert len(found) == 1
    assert words in found[0]


def test_a_machine_that_has_everything_gets_no_hint() -> None:
    assert hints(FAST, [], "cpu", 8) == []


def tiny_model() -> ModelFacts:
    shape = {"layers": 2, "hidden_size": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "intermediate_size": 16}
    shape["kv_values_per_token"] = 2 * 2 * 1 * 4
    return ModelFacts(Path("m"), "GGUF", "llama", 1000, 500, (), "bfloat16", vocab_size=32, max_positions=100, **shape)


def test_the_sum_of_a_fit() -> None:
    fit = MemoryFit(tiny_model(), "float32", 4, 10, 10**6, "float32")
    assert (fit.weights, fit.kv_per_token) == (4000, 2 * 2 * 1 * 4 * 4)
    assert fit.needed == 4000 + 64 * 10 + fit.workspace
    assert fit.fits


def test_what_does_not_fit_says_how_much_context_would() -> None:
    whole = MemoryFit(tiny_model(), "float32", 4, 100, 0, "float32")
    tight = replace(whole, available=whole.weights + whole.workspace + 64 * 7 + 63)
    assert not tight.fits
    assert tight.longest_context == 7
    assert replace(tight, context=7).fits
    assert not replace(tight, context=8).fits
    assert whole.longest_context == 0


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_counted_as_the_native_step_keeps_them(tmp_path: Path, kind: str) -> None:
    for n, spans in ((16, 1), (37, 3)):
        path = write_weights(tmp_path / "m.gguf", {"w": (kind, random_bytes(kind, n, KINDS[kind].block * spans * 4))})
        with GgufWeights(GgufFile.open(path)) as weights:
            kept = load_matrix(weights, "w", thread_pool=ThreadPool(1), keep=True)
            assert kept_size(weights.stored("w"), weights.shape("w")) == (kept.label, kept.nbytes)


def test_what_a_file_keeps_small_fits_where_its_floats_would_not() -> None:
    floats = MemoryFit(tiny_model(), "float32", 4, 10, 0, "float32")
    kept = replace(floats, stored=StoredWeights("int4 in groups of 32", 600))
    assert (floats.weights, kept.weights) == (4000, 600)
    room = 600 + floats.workspace + 64 * 10
    assert not replace(floats, available=room).fits
    assert replace(kept, available=room).fits
    assert not replace(kept, available=room - 1).fits
    assert (floats.to_json()["format"], kept.to_json()["format"]) == ("float32", "int4 in groups of 32")


@needs_native
def test_check_counts_a_file_as_the_engine_loads_it(
    headway: Run, monkeypatch: pytest.MonkeyPatch, smollm2_path: Path
) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")
    options = ("doctor", "--check", str(smollm2_path), "--device", "cpu")
    fit = json.loads(headway(*options, "--json").stdout)
    with hw.Engine(smollm2_path, pages=1, threads=1) as engine:
        assert fit["weights_bytes"] == engine.info.weight_bytes
        assert fit["format"] == f"{engine.info.format}, f32"  # the norms
    assert "as stored (int4 in groups of 32" in headway(*options).stdout
    slow = json.loads(headway(*options, "--json", env={"HEADWAY_NATIVE": "off"}).stdout)
    assert slow["format"] == fit["format"]
    assert slow["weights_bytes"] == fit["weights_bytes"] + 4 * engine.info.parameters  # what torch multiplies by


@needs_native
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next", "deepseek-v3"])
def test_check_knows_what_computes_a_model_and_all_that_it_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts, recurrent state and latent attention, as an engine with as many pages has them."""
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")
    folder, pages = save_hf(tmp_path, family_model(name)[1]), 4
    for dtype in ("auto", "bfloat16"):
        how = {"context": 16 * pages, "fraction": None, "kv_dtype": "auto", "ranks": 1}
        fit = memory_fit(folder, CPU, read_machine(), dtype, **how)
        with hw.Engine(folder, pages=pages, threads=1, dtype=dtype) as engine:
            assert fit.computed_by.startswith("the native step" if dtype == "auto" else "torch: ")
            assert engine.info.runner.startswith("native" if dtype == "auto" else "torch")
            assert fit.weights == pytest.approx(engine.info.weight_bytes, rel=0.02)  # blocks are padded
            assert (fit.kv_per_token, fit.kv_dtype) == (engine.info.kv_bytes_per_token, engine.info.kv_dtype)
            states = engine._states
            assert fit.recurrent == (0 if states is None else states.total * 4 * engine.config.state_values)
    assert "it computes in float32, not in bfloat16" in fit.computed_by


@pytest.mark.parametrize("gguf_file", [False, True])
def test_check_counts_experts_that_stay_in_mxfp4_with_triton_kernels(gguf_file: bool, tmp_path: Path) -> None:
    _, model = family_model("gpt-oss", intermediate_size=96)
    path = tmp_path / "m.gguf" if gguf_file else tmp_path
    mxfp4(tmp_path, model)
    if gguf_file:
        write_family(path, save_hf(tmp_path / "whole", model), model, kind="MXFP4")
    dtype, device = torch.bfloat16, torch.device("cpu")
    decoder = load_model(path, dtype=dtype, device=device, keep_experts=True)
    fit = weights_with_experts(path, "bfloat16", 2)
    assert fit is not None
    assert fit.bytes == pytest.approx(bytes_of(decoder), rel=0.001)
    assert fit.format == "MXFP4, bfloat16"
    assert weights_with_experts(path, "float16", 2) is None
    assert weights_with_experts(save_hf(tmp_path / "floats", model), "bfloat16", 2) is None


def test_the_report(headway: Run, empty_cache: dict[str, str]) -> None:
    done = headway("doctor", "--json", "--threads", "1", env=empty_cache)
    assert done.returncode == 0
    report = json.loads(done.stdout)
    assert report["versions"]["torch"]
    assert report["cpu"]["threads"] == 1
    assert report["memory"]["bandwidth_bytes_per_second"] > 1e8
    assert report["cache"] == {"path": empty_cache["HEADWAY_CACHE"], "bytes": 0}
    assert (report["models"], report["hub_offline"]) == ([], True)
    assert not Path(empty_cache["HEADWAY_CACHE"]).exists()


def test_the_report_for_people(headway: Run, empty_cache: dict[str, str]) -> None:
    text = headway("doctor", env=empty_cache).stdout
    for words in ("Versions", "instruction sets", "container limit", "memory bandwidth", "Hints"):
        assert words in text


def test_check_shows_the_arithmetic(headway: Run) -> None:
    store.resolve("smollm2")
    text = headway("doctor", "--check", "smollm2", "--device", "cpu", "--dtype", "float32", "--context", "1000").stdout
    assert "134,515,008 × 4 bytes (float32) = 538.1 MB" in text
    assert "46,080 bytes per token (float32) × 1,000 = 46.1 MB" in text
    text = headway("doctor", "--check", "smollm2", "--device", "cpu", "--context", "1000", "--memory", "1G").stdout
    assert "23,040 bytes per token (float16) × 1,000 = 23.0 MB" in text
    assert "available    1.1 GB" in text
    assert "computed by" in text
    assert "--kv-dtype needs --check" in headway("doctor", "--kv-dtype", "float16").stderr
    fit = json.loads(headway("doctor", "--check", "smollm2", "--device", "cpu", "--dtype", "bfloat16", "--json").stdout)
    assert (fit["weights_bytes"], fit["kv_bytes_per_token"], fit["context"]) == (269_030_016, 23_040, 8192)
    assert fit["fits"] is (fit["needed_bytes"] <= fit["available_bytes"])


def test_check_refuses_a_context_the_model_does_not_have(headway: Run) -> None:
    store.resolve("smollm2")
    done = headway("doctor", "--check", "smollm2", "--context", "8193")
    assert done.returncode == 2
    assert "--context is 8193; it must be an integer in [1, 8192] for this model" in done.stderr


def test_check_keeps_to_a_fraction_of_the_memory(headway: Run) -> None:
    store.resolve("smollm2")
    options = ("doctor", "--check", "smollm2", "--device", "cpu", "--json")
    whole, part = (json.loads(headway(*options, *more).stdout) for more in ((), ("--memory-fraction", "0.001")))
    machine = read_machine()
    total = min(machine.memory_total, machine.memory_limit or machine.memory_total)
    assert part["available_bytes"] == int(0.001 * total) < whole["available_bytes"]
    assert not part["fits"]
