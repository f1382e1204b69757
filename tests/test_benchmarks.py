"""The benchmarks run, on a tiny model, and write what they say they write; whole runs are slow tests."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

import headway as hw
from headway.bench.models import SHAPES
from headway.kernels.native.library import open_library
from headway.models.files.gguf import GgufFile
from support.forked import forked

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from cpu_files import CannotWrite, Files, weight_bytes  # noqa: E402
from cpu_models import EXPERTS, GEMMA, Shape  # noqa: E402
from cpu_models import write as write_model  # noqa: E402
from cpu_plan import Entry, Rival, Work, plan, quick  # noqa: E402
from cpu_report import Measured, Outcome, table  # noqa: E402
from cpu_runner import Command, PeerFailed, Runner  # noqa: E402
from large_bodies import Gaps  # noqa: E402
from mixed import Request, Window, summarize  # noqa: E402
from scale import report, write  # noqa: E402


def _benchmark(script: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        forked(f"benchmarks/{script}", *options), cwd=ROOT, text=True, capture_output=True, timeout=500, check=False
    )


@pytest.mark.slow
def test_concurrency_measures_every_section_and_describes_the_machine(tmp_path: Path) -> None:
    done = _benchmark("concurrency.py", "--quick", "--threads", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "concurrency.json").read_text())
    assert data["about"]["machine"]["cpu"]
    assert "transformers gave 12 of 12 greedy tokens as Headway did" in data["notes"]
    found = data["results"]
    assert [row["programs"] for row in found["throughput"]] == [1, 2, 4]
    assert all(row[f"{name} tokens/s"] > 0 for row in found["throughput"] for name in ("headway", "transformers"))
    forks, apart = found["fan-out"]
    assert forks["computed"] < apart["computed"] / 3
    assert forks["pages"] < apart["pages"]
    first, again = found["cache"]
    assert (first["page_hits"], again["page_hits"]) == (0, 3)  # of four: the last holds the row that is read
    alone, disturbed = found["latency"]
    assert 0 < alone["p50 ms"] <= alone["max ms"]
    assert disturbed["prompt seconds"] > 0
    table = (tmp_path / "concurrency.txt").read_text()
    assert all(section in table for section in found)


@pytest.mark.slow
def test_cache_tiers_computes_less_with_tiers(tmp_path: Path) -> None:
    done = _benchmark("cache_tiers.py", "--quick", "--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "cache_tiers.json").read_text())["results"]
    alone, host, files = found["rows"]
    assert host["computed"] < alone["computed"]
    assert (alone["host hits"], alone["folder hits"], host["folder hits"]) == (0, 0, 0)
    assert all(row["errors"] == 0 and row["first token ms p50"] > 0 for row in (alone, host, files))
    assert "host memory and a folder" in (tmp_path / "cache_tiers.txt").read_text()


def test_the_text_about_clusters_is_what_its_numbers_say() -> None:
    results = ROOT / "benchmarks/results"
    assert (results / "scale.txt").read_text() == report(results)


def test_times_of_a_busy_machine_are_not_written(tmp_path: Path) -> None:
    rows = [{"rule": "warm", "computed": 7, "hit_rate": 0.5, "seconds": 3.0}]
    for load, seconds in ((0.4, 3.0), (6.0, None)):
        write("routing", rows, {"replicas": 4, "count": 8, "turns": 4}, load, tmp_path)
        assert json.loads((tmp_path / "scale-routing.json").read_text())["routing"] == [{**rows[0], "seconds": seconds}]


@pytest.mark.slow
def test_large_bodies_are_measured_beside_a_stream(tmp_path: Path, smollm2_path: Path) -> None:
    few = ("--bytes", "100000", "--posts", "1", "--tokens", "60", "--limit", "1e9", "--out", str(tmp_path))
    done = _benchmark("large_bodies.py", *few)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "large_bodies.json").read_text())
    assert {row["kind"]: row["statuses"] for row in found["rows"]} == {
        "one long prompt": [400],
        "a list of ids": [400],
        "a long chat": [400],
        "text to tokenize": [200],
        "broken JSON": [400],
        "an unknown field": [400],
    }
    assert all(row["beside"]["count"] and row["alone"]["longest"] > 0 for row in found["rows"])
    assert "no stall is longer than 1e+09 ms" in (tmp_path / "large_bodies.txt").read_text()


@pytest.mark.parametrize(
    ("shape", "form"), [(EXPERTS, "q4_0"), (EXPERTS, "q8_0"), (GEMMA, "gguf-f16")], ids=["q4_0", "q8_0", "gemma"]
)
def test_files_of_other_architectures_are_models(shape: Shape, form: str, tmp_path: Path) -> None:
    small = replace(shape, layers=2, hidden=64, heads=2, kv_heads=1, head_dim=32, inner=32, vocab=49_152)
    write_model(replace(small, experts=4, used=2) if shape.experts else small, form, tmp_path / "model.gguf")
    with hw.Engine(tmp_path / "model.gguf", pages=8, threads=1) as engine:
        assert engine.config.family == {"qwen3moe": "qwen3-moe"}.get(shape.architecture, shape.architecture)
        assert len(engine.run(_three_tokens)) == 3


async def _three_tokens(engine: hw.Engine) -> list[int]:
    async with engine.context() as ctx:
        return await ctx.fill([5, 6, 7]).generate(hw.Argmax(), max_tokens=3, stop=[]).tokens()


def test_gaps_between_two_completions_do_not_count() -> None:
    nan = float("nan")
    found = Gaps.of([nan, 1.0, 1.01, 1.03, nan, 9.0, 9.01])
    assert (found.count, round(found.median), round(found.longest)) == (3, 10, 20)


@pytest.mark.slow
def test_servers_are_measured_as_their_clients_see_them(tmp_path: Path, smollm2_path: Path) -> None:
    few = ("--requests", "2", "--clients", "1,2", "--tokens", "4", "--words", "4", "--rounds", "1", "--threads", "1")
    done = _benchmark("serve_peers.py", str(smollm2_path), *few, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "serve_peers.json").read_text())["results"]
    assert [(row["server"], row["clients"]) for row in rows] == [("headway", 1), ("headway", 2)]
    assert all(row[name] > 0 for row in rows for name in ("tokens/s", "first token ms", "between tokens ms"))


@pytest.mark.slow
@pytest.mark.usefixtures("guest")
def test_programs_are_measured_in_every_way_and_give_the_same_tokens(tmp_path: Path) -> None:
    sizes = ("--tokens", "4", "--calls", "2", "--rounds", "1", "--delay", "5", "--threads", "1")
    done = _benchmark("programs.py", *sizes, "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "programs.json").read_text())
    assert data["about"]["machine"]["cpu"]
    near, far = data["results"].values()
    assert list(near) == ["in process", "sandbox", "Unix socket", "WebSocket", "HTTP"]
    assert list(far) == ["sandbox", "WebSocket", "HTTP"]
    assert all(figure > 0 for found in (near, far) for way in found.values() for figure in way.values())
    table = (tmp_path / "programs.txt").read_text()
    assert all(name in table for name in near)


@pytest.mark.slow
def test_tensor_parallel_counts_the_bytes_of_its_formula(tmp_path: Path) -> None:
    done = _benchmark("tensor_parallel.py", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "tensor_parallel.json").read_text())
    assert [row["rows"] for row in data["bytes"]] == [1, 16]
    assert all(row["us"] > 0 for row in data["gloo"])
    (row,) = [r for r in data["nvlink"] if (r["model"], r["devices"], r["rows"]) == ("Llama-3-70B", 8, 2048)]
    assert row["MiB a link and step"] == 161 * 32 * 2 * 7 / 8  # as docs/tensor-parallel.md says
    assert "NVLink, worked out" in (tmp_path / "tensor_parallel.txt").read_text()


def test_an_unknown_engine_is_refused() -> None:
    done = _benchmark("concurrency.py", "--quick", "--against", "abacus")
    assert done.returncode == 2
    assert "'abacus'" in done.stderr


@pytest.mark.slow
def test_adapters_are_held_against_the_same_without(tmp_path: Path) -> None:
    done = _benchmark("lora.py", "--quick", "--threads", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads((tmp_path / "lora.json").read_text())["results"]
    assert row["adapter_bytes"] > 0
    assert all(row[name] > 0 for name in ("plain tokens/s", "adapted tokens/s", "ratio", "peft tokens/s"))
    assert (tmp_path / "lora.txt").read_text() == done.stdout
    refused = _benchmark("lora.py", "--shape", "abacus")
    assert (refused.returncode, "'abacus'" in refused.stderr) == (2, True)


# -- mixed load --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mixed_load_reports_throughput_and_latency_at_the_client(tmp_path: Path) -> None:
    done = _benchmark("mixed.py", "--quick", "--requests", "12", "--temperature", "0.8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "mixed.json").read_text())
    assert data["about"]["machine"]["cpu"]
    (row,) = data["results"]
    assert row["requests"] >= 12
    assert min(row["output_tokens_per_s"], row["prompt_tokens_per_s"], row["steps"]) > 0
    assert 1 <= row["mean_batch"] <= row["clients"] == 3
    assert all(row[name]["p50"] <= row[name]["p99"] for name in ("first_token_ms", "between_tokens_ms"))
    assert (tmp_path / "mixed.txt").read_text() == done.stdout
    refused = _benchmark("mixed.py", "--shape", "abacus")
    assert (refused.returncode, "'abacus'" in refused.stderr) == (2, True)


def test_mixed_load_counts_only_what_arrives_in_the_window() -> None:
    before = SimpleNamespace(steps=10, batch_size_mean=1.0, tokens=100)
    after = SimpleNamespace(steps=14, batch_size_mean=1.5, tokens=140)
    requests = [
        Request(0.0, 3, [9.0, 10.5, 11.0]),  # begun before the window: two tokens count
        Request(10.0, 2, [10.25, 11.75]),
        Request(11.0, 2, [11.5, 12.5]),  # goes on after it
    ]
    found = summarize(requests, Window(10.0, 12.0, before, after, 10.0), prompt=8)
    assert (found["output_tokens_per_s"], found["prompt_tokens_per_s"], found["requests"]) == (2.5, 8.0, 2)
    assert (found["first_token_ms"]["p50"], found["first_token_ms"]["max"]) == (375.0, 500.0)
    assert (found["between_tokens_ms"]["p50"], found["between_tokens_ms"]["max"]) == (1500.0, 1500.0)
    assert (found["steps"], found["mean_batch"], found["mean_tokens"]) == (4, 2.75, 10.0)


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_bandwidth_measures_every_limit(tmp_path: Path) -> None:
    quick = ("--threads", "1", "--megabytes", "16", "--tries", "2", "--cube", "128")
    done = _benchmark("bandwidth.py", *quick, "--out", str(tmp_path / "l.json"))
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "l.json").read_text())
    rates = [value for value in data["limits"].values() if isinstance(value, dict)]
    assert len(rates) == 6
    assert all(0 < rate["median"] <= rate["best"] for rate in rates)
    assert data["machine"]["cpu"]


# -- accuracy ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(open_library().calls is None, reason=open_library().missing or "-")
def test_accuracy_holds_the_file_against_its_floats(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADWAY_NATIVE", "auto")
    options = ["--tokens", "96", "--context", "48", "--threads", "1", "--out", str(tmp_path)]
    done = _benchmark("accuracy.py", *options, "--kinds", "int8", "Q8_0", "Q2_K")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "accuracy.json").read_text())
    assert data["about"]["tokens"] == 96
    assert data["about"]["engines"]["reference"]["format"] == "f32"
    assert list(data["results"]) == ["file", "int8", "Q8_0", "Q2_K"]
    for kind, bound in (("file", 0.5), ("int8", 0.5), ("Q8_0", 0.5), ("Q2_K", 20)):
        assert data["about"]["kinds"][kind]["headway"]["runner"].startswith("native")
        found = data["results"][kind]["headway"]
        assert 0 < found["kl_median"] <= found["kl_mean"] <= found["kl_largest"] < bound
        assert (found["agreement"] > 0.8) == (bound < 1)
    found = data["results"]["file"]["headway"]
    assert abs(found["perplexity"] / data["reference"]["perplexity"] - 1) < 0.1
    assert (tmp_path / "accuracy.txt").read_text() in done.stdout
    monkeypatch.setenv("HEADWAY_NATIVE", "off")
    assert _benchmark("accuracy.py", *options).returncode == 1
    assert _benchmark("accuracy.py", "--peer", "abacus=python").returncode == 2


# -- Headway and others ------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_engines_run_in_turns_on_the_same_model(tmp_path: Path) -> None:
    options = ["--quick", "--threads", "1", "--rounds", "2", "--path", "any", "--out", str(tmp_path)]
    works = [f"--only=tiny f32 {work}" for work in ("decode 1", "prompt 24")] + ["--only=tiny bf16 decode 1"]
    done = _benchmark("cpu.py", *options, *works, "--peer", "transformers=python")
    assert done.returncode == 0, done.stdout + done.stderr
    data = json.loads((tmp_path / "cpu.json").read_text())
    assert [outcome["work"] for outcome in data["results"]] == [
        "tiny f32 decode 1",
        "tiny f32 prompt 24",
        "tiny bf16 decode 1",
    ]
    decode = data["results"][0]
    ours, theirs = decode["engines"]
    assert (ours["engine"], theirs["engine"]) == ("headway", "transformers")
    assert all(len(engine["values"]) == 2 for engine in decode["engines"])
    assert theirs["same_tokens"] == 7  # both compute the same model
    assert theirs["ratio"] == pytest.approx(ours["median"] / theirs["median"])
    assert ours["path"] == ours["facts"]["path"]
    assert ours["weight_bytes"] == theirs["weight_bytes"] == theirs["facts"]["weight_bytes"]
    assert "llama was not given with --peer" in data["notes"]
    assert data["about"]["machine"]["cpu"]
    assert "transformers f32" in (tmp_path / "cpu.txt").read_text()


@pytest.mark.slow
def test_a_figure_from_another_path_is_a_failure(tmp_path: Path) -> None:
    options = ["--quick", "--threads", "1", "--rounds", "1", "--out", str(tmp_path), "--only", "tiny f32 decode 1"]
    done = _benchmark("cpu.py", *options, "--path", "abacus")
    assert done.returncode == 1
    assert "FAILED: tiny f32 decode 1 ran on" in done.stdout
    assert "FELL BACK" in (tmp_path / "cpu.txt").read_text()


@pytest.mark.slow
def test_forks_windows_and_fresh_processes_are_measured(tmp_path: Path) -> None:
    options = ["--quick", "--threads", "1", "--rounds", "1", "--path", "any", "--out", str(tmp_path)]
    works = [f"--only=tiny q4_0 {work}" for work in ("3 forks", "window", "process start", "first token")]
    done = _benchmark("cpu.py", *options, *works)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {o["work"]: o for o in json.loads((tmp_path / "cpu.json").read_text())["results"]}
    assert {o["unit"] for o in found.values()} == {"tokens/s", "ms", "s", "ms a token"}
    window = found["tiny q4_0 window 32 of 300, whole step"]
    assert [engine["engine"] for engine in window["engines"]] == ["headway", "no trim", "no window"]
    assert "tiny q4_0 window 32 of 300, attention by profile" in found
    assert found["tiny q4_0 process start to first token"]["engines"][0]["median"] > 0.1


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--peer", "abacus=python"], "'abacus'"),
        (["--peer", "llama=/nowhere/python"], "/nowhere/python"),
        (["--only", "abacus"], "abacus"),
        (["--threads", "0"], "whole numbers from 1"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], why: str) -> None:
    done = _benchmark("cpu.py", "--quick", *options)
    assert done.returncode != 0
    assert why in done.stderr


def test_one_model_stands_behind_every_file(tmp_path: Path) -> None:
    files = Files(tmp_path, {}, 1)
    prompt = list(range(20, 40))
    texts = {form: _continued(files.get(SHAPES["tiny"], form), prompt) for form in ("f32", "gguf-f32", "gguf-f16")}
    assert texts["f32"] == texts["gguf-f32"] == texts["gguf-f16"]
    assert files.get(SHAPES["tiny"], "f32") == tmp_path / "tiny-f32"  # not written again
    weights = SHAPES["tiny"].layer_weights + SHAPES["tiny"].head_weights
    norms = 4 * 64 * 5
    assert weight_bytes(files.get(SHAPES["tiny"], "q4_0")) == weights * 18 // 32 + norms
    assert weight_bytes(files.get(SHAPES["tiny"], "q8_0")) == weights * 34 // 32 + norms
    with GgufFile.open(tmp_path / "tiny-q4_0.gguf") as file:
        assert len(file.metadata["tokenizer.ggml.tokens"]) == SHAPES["tiny"].vocab  # type: ignore[arg-type]
        assert {t.kind for t in file.tensors.values()} == {"Q4_0", "F32"}
    with pytest.raises(CannotWrite, match="written by llama"):
        files.get(SHAPES["tiny"], "q4_k")


def _continued(path: Path, prompt: list[int]) -> list[int]:
    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as ctx:
            return await ctx.fill(prompt).generate(hw.Argmax(), max_tokens=8, stop_only=True).tokens()

    with hw.Engine(path, threads=1, pages=16) as engine:
        return engine.run(program)


def test_a_worker_that_cannot_says_why(tmp_path: Path) -> None:
    load = {"form": "f32", "threads": 1, "slots": 64, "sequences": 1, "total": 64}
    with pytest.raises(PeerFailed, match="nothing-here"):
        Runner(Command("headway", sys.executable, 1), load | {"path": str(tmp_path / "nothing-here.gguf")})
    with pytest.raises(PeerFailed, match=r"^llama\b"):
        Runner(Command("llama", sys.executable, 1), load | {"path": "x"})


def test_the_plan_has_every_aim_once_and_keeps_files_together() -> None:
    entries = plan()
    assert len({(e.shape, e.form, e.work) for e in entries}) == len(entries)
    groups = [(e.shape, e.form) for e in entries]
    changes = sum(a != b for a, b in pairwise(groups))
    assert changes == len(set(groups)) - 1
    aims = {e.label: ({(r.peer, r.form): r.wanted for r in e.rivals}, e.share) for e in entries}
    assert aims["smol q4_0 decode 1"] == ({("llama", "q4_0"): 1.5, ("openvino", "ov-int4"): 1.5}, 0.75)
    assert aims["1b q8_0 decode 1"] == ({("llama", "q8_0"): 1.0, ("openvino", "ov-int8"): 1.0}, 0.80)
    assert {e.work.kind for e in quick()} == {e.work.kind for e in entries}
    assert all(r.wanted is None for e in quick() for r in e.rivals)


LIMITS = {"read_memory": {"best": 1e9}, "float32_product": {"best": 1e12}, "int8_product": {"best": 4e12}}


def _outcome(work: Work, ours: list[float], theirs: list[float], wanted: float, path: str = "native, AVX2") -> Outcome:
    entry = Entry("smol", "q4_0", work, (Rival("llama", "q4_0", wanted),), share=0.5)
    one = Measured("headway", "q4_0", {}, 10_000_000, ours, {path}, [1, 2, 3])
    other = Measured("llama", "q4_0", {}, 10_000_000, theirs, {"repack"}, [1, 2, 4])
    return Outcome(entry, entry.label, work.unit, [one, other], {("llama", "q4_0"): wanted})


def test_rates_and_times_are_both_held_against_the_aim() -> None:
    found = _outcome(Work("decode", 8, 16), [60.0, 40.0, 50.0], [20.0, 25.0, 30.0], 2.0).to_json(LIMITS, "native")
    ours, theirs = found["engines"]
    assert (ours["median"], ours["least"], ours["most"]) == (50.0, 40.0, 60.0)
    assert (theirs["ratio"], theirs["met"], theirs["same_tokens"]) == (2.0, True, 2)
    assert (ours["share_of_limit"], found["share_met"]) == (0.5, True)  # 10 MB at 1 GB/s: 100 tokens a second
    late = _outcome(Work("first", 8), [10.0], [19.0], 2.0).to_json(LIMITS, "native")
    assert (late["engines"][1]["ratio"], late["missed"]) == (1.9, ["llama"])
    assert late["share_met"] is None
    assert "1.90 ×  2 ×: missed" in table([found, late])


def test_a_prompts_limit_is_its_products_and_its_attention() -> None:
    work = Work("prefill", 512)
    products, attention = SHAPES["smol"].prefill_flops(512)
    fastest = 512 / (products / 4e12 + attention / 1e12)
    found = _outcome(work, [fastest / 4], [1.0], 1.0).to_json(LIMITS, "native")
    assert found["engines"][0]["share_of_limit"] == pytest.approx(0.25)


def test_only_the_required_path_is_no_fallback() -> None:
    assert _outcome(Work("decode", 8, 16), [1.0], [1.0], 1.0).fell_back("native") is None
    torch = _outcome(Work("decode", 8, 16), [1.0], [1.0], 1.0, path="torch; float32")
    assert torch.fell_back("native") == "torch; float32"
    assert torch.fell_back("any") is None


@pytest.mark.slow
def test_speculation_compares_an_engine_with_itself(tmp_path: Path) -> None:
    done = _benchmark("speculation.py", "--quick", "--threads", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "speculation.json").read_text())["results"]
    assert [row["text"] for row in results] == ["replay", "wrong", "story"]
    assert all(row["same"] and row["ratio"] > 0 for row in results)
