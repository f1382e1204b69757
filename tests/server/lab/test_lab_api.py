"""The Lab's API: traces are what the engine computes, masks are what the oracle computes, and limits hold."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_models import nasty_folder
from lab_serving import lab_live

import headway as hw
from headway.base.specs.brle import Brle
from headway.server.home.page_files import PAGE_HEADERS, TYPES
from headway.server.lab.page import STATIC, files
from headway.server.lab.schema import Base64Array
from support.live import Live
from support.oracle import Oracle

PROMPT = "Once upon a time, there was a little"


def unpacked(value: dict[str, Any]) -> np.ndarray:
    return Base64Array(**value).array()


def traced(server: Live, prompt: Any = PROMPT, **fields: Any) -> dict[str, Any]:
    """A trace that must succeed."""
    response = server.post("/lab/api/trace", prompt=prompt, **fields)
    assert response.status == 200, response.body
    return response.json


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Oracle]]:
    """A served random model, and the oracle of the same weights."""
    folder, config, model = nasty_folder(tmp_path_factory.mktemp("nasty"))
    weights = {name: tensor for name, tensor in model.state_dict().items() if "rotary" not in name}
    engine = hw.Engine(folder, dtype="float32", pages=64, threads=1)
    with lab_live(engine, model="nasty") as server:
        yield server, Oracle(config, weights)


def dense(oracle: Oracle, tokens: list[int], attend: np.ndarray) -> Any:
    return oracle.run(tokens, list(range(len(tokens))), torch.from_numpy(attend))


def check_close(result: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(result - wanted).max() <= 1e-4 * max(1.0, np.abs(wanted).max())


def test_a_trace_has_the_logits_of_the_same_pass_in_process(lab_server: Live) -> None:
    result = traced(lab_server)

    async def passed(engine: hw.Engine) -> np.ndarray:
        async with engine.context() as ctx:
            ctx.fill(PROMPT)
            forward = ctx.forward()
            handle = forward.probe(-1, hw.Logits())
            return (await forward.execute()).logits(handle)

    wanted = lab_server.engine.run(passed)
    logits = unpacked(result["logits"])
    assert logits.dtype == np.float32
    assert logits.shape == (lab_server.engine.vocab_size,)
    check_close(logits, wanted)
    assert "".join(result["texts"]) == PROMPT
    assert result["position"] == len(result["tokens"]) - 1
    assert "lens" not in result
    assert "attention" not in result


def test_what_a_sampler_keeps_adds_up_and_its_draws_are_the_engines(lab_server: Live) -> None:
    params = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "draws": 32}
    result = traced(lab_server, take=[3, 3, 5], sampling=params)
    ids, probs = unpacked(result["sampling"]["ids"]), unpacked(result["sampling"]["probs"])
    assert probs.dtype == np.float64
    assert probs.sum() == pytest.approx(1.0, abs=1e-12)
    assert (np.diff(ids) > 0).all()
    assert set(result["sampling"]["tokens"]) <= set(ids.tolist())
    assert result["sampling"]["tokens"] == traced(lab_server, take=[3, 3, 5], sampling=params)["sampling"]["tokens"]


def test_lens_and_attention_are_the_oracles(small: tuple[Live, Oracle]) -> None:
    server, oracle = small
    tokens = list(range(40, 70))
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    wanted = dense(oracle, tokens, causal)
    result = traced(server, tokens, lens={"k": 4}, attention={}, scores=5)
    check_close(unpacked(result["logits"]), wanted.logits[-1].numpy())
    for layer, scores in zip(wanted.attention, unpacked(result["attention"]["array"]), strict=True):
        assert np.allclose(scores, layer[:, -1].numpy(), atol=1e-5)
    matrix = unpacked(traced(server, tokens, attention={"layers": [1], "rows": len(tokens)})["attention"]["array"])
    assert np.allclose(matrix[0], wanted.attention[1].transpose(0, 1).numpy(), atol=1e-5)
    assert matrix.shape[:2] == (1, len(tokens))
    for one in result["lens"][:-1]:
        lens = torch.softmax(oracle.unembed(wanted.hidden[one["layer"]][-1]).double(), -1)
        assert np.allclose(one["probs"], lens.sort(descending=True).values[:4].numpy(), atol=1e-5)
    logs = torch.log_softmax(wanted.logits.double(), -1)
    for row, score in zip(range(len(tokens) - 6, len(tokens) - 1), result["scores"], strict=True):
        assert score["id"] == tokens[row + 1]
        assert score["logprob"] == pytest.approx(float(logs[row, tokens[row + 1]]), abs=1e-3)
        assert score["entropy"] == pytest.approx(float(-(logs[row].exp() * logs[row]).sum()), abs=1e-3)


@pytest.mark.parametrize(
    ("rule", "rows"),
    [
        ({"window": 3}, None),
        ({"window": 2, "sink": 4}, None),
        ({"window": 5, "rows": 1}, 1),
        ({"sink": 2, "window": 1, "rows": 7}, 7),
    ],
)
def test_a_masked_trace_is_the_oracles(small: tuple[Live, Oracle], rule: dict[str, int], rows: int | None) -> None:
    server, oracle = small
    tokens = list(range(30, 75))
    n = len(tokens)
    attend = np.tril(np.ones((n, n), bool))
    for i in range(0 if rows is None else n - rows, n):
        attend[i] = [i - rule["window"] < j <= i or j < min(rule.get("sink", 0), i + 1) for j in range(n)]
    result = traced(server, tokens, mask=rule)
    check_close(unpacked(result["logits"]), dense(oracle, tokens, attend).logits[-1].numpy())
    assert len(result["mask"]["trimmed"]) == result["stats"]["pages_trimmed"]
    first = result["mask"]["first"]
    for i, row in enumerate(result["mask"]["rows"]):
        wanted = attend[first + i, : first + i + 1]
        assert Brle.from_runs(row["attend"]).to_bool().tolist() == wanted.tolist()
        assert Brle.from_runs(row["raw"]).to_bool().tolist() == (~wanted).tolist()


def test_painted_cells_are_the_oracles_and_spare_pages(small: tuple[Live, Oracle]) -> None:
    server, oracle = small
    tokens = list(range(20, 84))
    n = len(tokens)
    generator = np.random.default_rng(5)
    attend = np.tril(np.ones((n, n), bool))
    attend[-2:] &= generator.random((2, n)) < 0.5
    attend[-2:, 16:48] = False  # two pages that neither row sees
    attend[-2, n - 2] = attend[-1, n - 1] = True
    runs = [list((~Brle.from_bool(attend[i, : i + 1])).runs) for i in (n - 2, n - 1)]
    result = traced(server, tokens, mask={"runs": runs})
    check_close(unpacked(result["logits"]), dense(oracle, tokens, attend).logits[-1].numpy())
    assert result["mask"]["trimmed"] == [1, 2]
    assert result["stats"]["pages_trimmed"] == 2


def test_branches_share_full_pages_and_are_scored_as_traces_are(lab_server: Live) -> None:
    prompt = list(range(500, 540))
    branches = [[7, 8, 9], [7, 8, 10, 11], [12]]
    response = lab_server.post("/lab/api/branches", prompt=prompt, branches=branches)
    assert response.status == 200, response.body
    result = response.json
    tables = [[page["page"] for page in branch["pages"]] for branch in result["branches"]]
    assert [table[:2] for table in tables] == [tables[0][:2]] * 3  # 40 tokens fill two pages
    assert len({table[2] for table in tables}) == 3
    assert result["pages"] == len({page for table in tables for page in table})
    assert result["pages_alone"] == sum(map(len, tables))
    for branch, take in zip(result["branches"], branches, strict=True):
        alone = traced(lab_server, prompt, take=take, scores=len(take))["scores"]
        for mine, other in zip(branch["scores"], alone, strict=True):
            assert mine["id"] == other["id"]
            assert mine["logprob"] == pytest.approx(other["logprob"], abs=1e-3)
            assert mine["entropy"] == pytest.approx(other["entropy"], abs=1e-3)
    lab_server.until(lab_server.is_quiet)


def test_branches_share_what_they_have_in_common_after_the_prompt_too(lab_server: Live) -> None:
    prompt, stem = list(range(600, 620)), list(range(700, 716))
    branches = [[*stem, 5], [*stem, 6, 7], stem, [9], [*stem, 5]]
    result = lab_server.post("/lab/api/branches", prompt=prompt, branches=branches).json
    tables = [[page["page"] for page in branch["pages"]] for branch in result["branches"]]
    assert len({tuple(tables[i][:2]) for i in (0, 1, 2, 4)}) == 1  # 36 tokens fill two pages
    assert tables[3][0] == tables[0][0]
    assert tables[3][1] != tables[0][1]
    assert [[score["id"] for score in branch["scores"]] for branch in result["branches"]] == branches
    assert result["branches"][0]["scores"] == result["branches"][4]["scores"]
    lab_server.until(lab_server.is_quiet)


def test_the_page_map_counts_what_the_engine_counts(lab_server: Live) -> None:
    engine = lab_server.engine
    context = engine.context()
    context.fill(range(100, 140))
    engine.run(lambda engine: context.flush())
    twin = context.fork()
    result = lab_server.get("/lab/api/pages").json
    counts, stats = result["counts"], engine.stats()
    context.release()
    twin.release()
    assert counts["shared"] == 2  # two full pages of 40 tokens
    assert counts["working"] == 2
    assert counts["free"] == stats.pages_free
    assert counts["cached"] == stats.pages_cached
    assert sum(length for _, length in result["runs"]) == result["total"] == sum(counts.values())
    lab_server.until(lab_server.is_quiet)


def test_steps_are_told_once_to_who_asks_for_those_after(lab_server: Live) -> None:
    lab_server.get("/lab/api/steps")
    traced(lab_server)
    result = lab_server.get("/lab/api/steps").json["steps"]
    assert result[-1]["rows"] >= 1
    assert lab_server.get(f"/lab/api/steps?after={result[-1]['step']}").json["steps"] == []


def test_a_measured_pass_says_where_its_time_went_and_leaves_nothing_behind(lab_server: Live) -> None:
    result = traced(lab_server, profile=True, logits=False)["time"]
    assert {"attention", "feed-forward", "head"} <= {phase["name"] for phase in result["phases"]}
    assert result["bandwidth_limit"] > 0
    assert lab_server.engine.profile().samples == ()
    assert not lab_server.engine.is_profiling


@pytest.mark.parametrize(
    ("body", "param", "word"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": "word " * 20_000}, "prompt", "tokens"),
        ({"prompt": [49152]}, "prompt", "vocabulary"),
        ({"prompt": "a", "take": [-1]}, "take", "vocabulary"),
        ({"prompt": "a", "lens": {"k": 0}}, "lens.k", "[1, 256]"),
        ({"prompt": "a", "lens": {"layers": [31]}}, "lens.layers", "[0, 30]"),
        ({"prompt": "a", "attention": {"layers": [30]}}, "attention.layers", "[0, 29]"),
        ({"prompt": [5] * 8000, "attention": {"layers": [3] * 400}}, "attention.layers", "pass fewer"),
        ({"prompt": [5, 6], "attention": {"rows": 3}}, "attention.rows", "[1, 2]"),
        ({"prompt": [5] * 2000, "attention": {"rows": 500}}, "attention.layers", "pass fewer"),
        ({"prompt": "a b c", "mask": {"window": 0}}, "mask", "at least 1"),
        ({"prompt": "a b c", "mask": {"rows": 9}}, "mask.rows", "[1, 3]"),
        ({"prompt": "a b c", "mask": {"runs": [[0, 3]]}}, "mask", "at least 1"),
        ({"prompt": "a b c", "mask": {"runs": [[7]]}}, "mask", "slots"),
        ({"prompt": "a b c", "mask": {"runs": [[-1, 3]]}}, "mask", "-1"),
        ({"prompt": "a b c", "mask": {"runs": [[3]], "window": 2}}, "mask.runs", "one of them"),
        ({"prompt": "a", "sampling": {"top_p": 0}}, "sampling", "top_p is 0"),
        ({"prompt": "a", "sampling": {"draws": 5000}}, "sampling.draws", "1024"),
        ({"prompt": "a", "sampling": {"logit_bias": {"x": 1}}}, "logit_bias", "token ids"),
        ({"prompt": "a", "scores": 1}, "scores", "[0, 0]"),
        ({"prompt": "a", "colour": "red"}, "colour", "unknown"),
        ({}, "prompt", "required"),
    ],
)
def test_what_cannot_be_traced_is_refused_by_name(
    lab_server: Live, body: dict[str, Any], param: str, word: str
) -> None:
    error = lab_server.refused("/lab/api/trace", **body)
    assert error["param"] == param, error
    assert word in error["message"]


def test_branches_have_limits_too(lab_server: Live) -> None:
    assert "at most 64" in lab_server.refused("/lab/api/branches", prompt="a", branches=[[1]] * 65)["message"]
    assert "empty" in lab_server.refused("/lab/api/branches", prompt="a", branches=[[]])["message"]
    assert "empty" in lab_server.refused("/lab/api/branches", prompt="a", branches=[])["message"]
    assert "vocabulary" in lab_server.refused("/lab/api/branches", prompt="a", branches=[[49152]])["message"]
    error = lab_server.refused("/lab/api/branches", prompt=[5] * 400, branches=[[1] * 500] * 60)
    assert error["code"] == "context_length_exceeded"
    assert lab_server.post("/lab/api/trace", prompt="a", model="other").status == 404


def test_the_vocabulary_has_every_token_as_text(small: tuple[Live, Oracle], lab_server: Live) -> None:
    server, _ = small
    texts = server.get("/lab/api/vocab").json
    assert len(texts) == server.engine.vocab_size
    assert "<script>window.broken = 1</script>" in texts
    assert "🙂" in texts
    assert len(lab_server.get("/lab/api/vocab").json) == 49152


def test_files_are_served_with_a_strict_policy_and_nothing_else_is(lab_server: Live) -> None:
    assert lab_server.get("/lab").status == 308
    for name in ["", *files()]:
        response = lab_server.get(f"/lab/{name}")
        assert response.status == 200, name
        headers = {key.lower(): value for key, value in response.headers.items()}
        for header, value in PAGE_HEADERS.items():
            assert headers[header.lower()] == value, name
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["content-type"] == TYPES[Path(name or "x.html").suffix]
    assert "unsafe" not in PAGE_HEADERS["Content-Security-Policy"]
    for path in ("/lab/none.js", "/lab/..%2fpage.py", "/lab/static/main.js", "/lab/%2e%2e/wire.py", "/lab/main.js/"):
        assert lab_server.get(path).status == 404, path


def test_the_page_names_no_other_place() -> None:
    for path in STATIC.iterdir():
        if path.suffix in (".js", ".css", ".html"):
            text = path.read_text().replace("http://www.w3.org/2000/svg", "")
            assert "http://" not in text, path.name
            assert "https://" not in text, path.name
            assert "innerHTML" not in text, path.name


def test_what_is_recorded_is_a_real_distribution() -> None:
    import gzip
    import json

    result = json.loads(gzip.decompress((STATIC / "recorded.bin").read_bytes()))
    logits = unpacked(result["trace"]["logits"])
    assert logits.shape == (len(result["vocab"]),) == (result["model"]["vocab_size"],)
    probs = np.exp(logits.astype(np.float64) - logits.max())
    assert 1 < -(probs / probs.sum() * np.log(probs / probs.sum())).sum() < math.log(len(logits))
    assert "".join(result["trace"]["texts"]) == result["prompt"] == PROMPT
    assert len(result["greedy"]) == 96


def test_the_model_route_has_the_format_of_the_weights_in_memory(lab_server: Live) -> None:
    result = lab_server.get("/lab/api/model").json
    assert result["format"] == lab_server.engine.info.format == "int4 in groups of 32, int8 in groups of 32"


def test_a_path_below_the_lab_that_does_not_exist_denies_no_lab(lab_server: Live) -> None:
    assert lab_server.get("/").json["links"]["lab"] == "/lab/"
    for path in ("/lab/no/such", "/labx"):
        reply = lab_server.get(path)
        assert (reply.status, "no Lab" in reply.error["message"]) == (404, False)
