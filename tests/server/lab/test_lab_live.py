"""Your Lab in a browser: its numbers are the engine's, its tree goes back and forth, its links bring all back."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab_models import NASTY, nasty_folder
from lab_serving import lab_live

import headway as hw
from headway.base.rng import uniform
from headway.base.specs.brle import Brle
from headway.base.specs.samplers import Sampling
from headway.kernels.reference import sampling
from headway.server.lab.schema import Base64Array
from support.live import Live
from support.oracle import Oracle

PROMPT = "Once upon a time, there was a little"
OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0}

# Computes one choice as the page does, from logits that are given.
CHOOSE = """async ([logits, cases]) => {
    const lab = await import("./sampling.js");
    const row = new lab.Row(Float32Array.from(logits, (x) => x ?? -Infinity));
    return cases.map(({params, prompt, taken, bias, seed, position}) => {
        const found = lab.stages(row, params, lab.history(prompt, taken), new Map(bias));
        const {ids, probs} = lab.distribution(found);
        return {ids: [...ids], probs: [...probs], drawn: lab.draw(found, seed, position, 16)};
    });
}"""

# Asks the engine for logits and what its sampler makes of them, and computes the same.
COMPARE = """async ({params, prompt, taken, bias, seed}) => {
    const [lab, api, next] = await Promise.all([import("./sampling.js"), import("./api.js"), import("./next.js")]);
    const asked = {...params, seed, draws: 16, logit_bias: Object.fromEntries(bias)};
    const answer = await api.ask("api/trace", {prompt, take: taken, sampling: asked});
    const row = new lab.Row(api.unpack(answer.logits));
    const found = lab.stages(row, params, lab.history(prompt, taken), new Map(bias));
    const {ids, probs, tokens} = answer.sampling;
    const ours = lab.draw(found, seed, answer.position, 16);
    return {...next.difference(lab.distribution(found), api.unpack(ids), api.unpack(probs)), ours, theirs: tokens};
}"""


def params_of(generator: random.Random, vocab: int) -> dict[str, Any]:
    """Sampling parameters of every kind, each off half of the time."""

    def maybe(value: float, off: float) -> float:
        return value if generator.random() < 0.5 else off

    return {
        "temperature": maybe(generator.choice([0.0, 0.05, 0.3, 0.7, 1.5, 3.0]), 1),
        "top_k": int(maybe(generator.choice([1, 2, 7, 50, vocab - 1, vocab, 2 * vocab]), 0)),
        "top_p": maybe(generator.choice([1e-6, 0.1, 0.5, 0.9, 0.999]), 1),
        "min_p": maybe(generator.choice([0.01, 0.2, 1.0]), 0),
        "typical_p": maybe(generator.choice([0.05, 0.5, 0.95]), 1),
        "epsilon_cutoff": maybe(generator.choice([1e-4, 0.003, 0.02, 0.3]), 0),
        "eta_cutoff": maybe(generator.choice([1e-4, 0.01, 0.2, 0.9]), 0),
        "repetition_penalty": maybe(generator.choice([0.8, 1.3]), 1),
        "presence_penalty": maybe(generator.uniform(-2, 2), 0),
        "frequency_penalty": maybe(generator.uniform(-2, 2), 0),
    }


def ties(vocab: int) -> np.ndarray:
    """Logits with many equals and a token that can never come."""
    logits = np.random.default_rng(1).integers(-4, 5, vocab).astype(np.float32)
    logits[7] = -np.inf
    return logits


def cases_of(generator: random.Random, vocab: int, count: int) -> list[dict[str, Any]]:
    """Sampling parameters with histories, biases, seeds and positions."""
    cases = []
    for _ in range(count):
        taken = [generator.randrange(vocab) for _ in range(generator.randrange(6))]
        bias = {generator.randrange(vocab): generator.uniform(-5, 5) for _ in range(generator.randrange(3))}
        result = {"prompt": [3, 5, 8], "taken": taken, "bias": list(bias.items()), "seed": generator.getrandbits(53)}
        cases.append({"params": params_of(generator, vocab), "position": generator.randrange(4000), **result})
    return cases


def test_the_pages_sampling_is_the_kernels_on_ties_and_impossible_tokens(
    lab_server: Live, visit: Callable[..., Any]
) -> None:
    logits = ties(301)
    cases = cases_of(random.Random(1), len(logits), 150)
    page = visit(lab_server.url).page
    response = page.evaluate(CHOOSE, [[float(x) if np.isfinite(x) else None for x in logits], cases])
    for case, mine in zip(cases, response, strict=True):
        how = Sampling(**case["params"], logit_bias=dict(case["bias"]), seed=case["seed"])
        counts = {id: case["taken"].count(id) for id in case["taken"]}
        generated = (torch.tensor(list(counts), dtype=torch.int64), torch.tensor(list(counts.values())))
        seen = torch.tensor(sorted({*case["prompt"], *case["taken"]}), dtype=torch.int64)
        row = torch.from_numpy(logits.copy())
        ids, probs = sampling.sampling_distribution(row, how, seen=seen, generated=generated)
        assert mine["ids"] == ids.tolist(), case
        assert np.abs(np.array(mine["probs"]) - probs.numpy()).max() < 1e-6, case
        draws = [
            sampling.RowSampler(how, uniform(case["seed"], case["position"], n), None, seen, generated)
            for n in range(16)
        ]
        assert mine["drawn"] == sampling.sample(row.repeat(16, 1), draws).tolist(), case


def test_the_pages_sampling_is_the_engines_over_the_whole_vocabulary(
    lab_server: Live, visit: Callable[..., Any]
) -> None:
    page = visit(lab_server.url).page
    for case in cases_of(random.Random(2), 49152, 16):
        case["taken"] = [9, 9, 4, *case["taken"]]
        result = page.evaluate(COMPARE, case)
        assert result["most"] < 1e-6, case
        assert result["missing"] == 0, case
        assert result["ours"] == result["theirs"], case


def settled(page: Any) -> float:
    """How far the page is from the engine, once it has asked."""
    box = page.locator("#engine-check", has_text="Equal to the engine's Sampling")
    box.wait_for()
    assert box.get_attribute("data-draws") == "16"
    return float(box.get_attribute("data-difference"))


def test_sliders_move_the_numbers_and_stay_equal_to_the_engine(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    assert settled(page) < 1e-6
    assert "35.8%" in page.locator("#distribution .bars li").first.inner_text()
    page.get_by_role("button", name="Chat: T 0.7, top-p 0.9").click()
    page.locator(".strip", has_text="2 stay").wait_for()
    assert settled(page) < 1e-6
    page.locator("#param-top_p").focus()
    for _ in range(20):
        page.keyboard.press("ArrowLeft")  # 0.70
    page.fill("#param-min_p-n", "0.01")
    page.locator("#param-typical_p").focus()
    page.keyboard.press("ArrowLeft")
    page.fill("#param-repetition_penalty-n", "1.2")
    page.get_by_role("button", name="Set", exact=True).click()
    assert settled(page) < 1e-6
    page.locator("#stages-summary").click()
    params = {**OFF, "temperature": 0.7, "top_p": 0.7, "min_p": 0.01, "typical_p": 0.99}
    params |= {"repetition_penalty": 1.2, "seed": 7}
    girl = lab_server.engine.tokenizer.encode(" girl")[0]
    kept = lab_server.post("/lab/api/trace", prompt=PROMPT, sampling={**params, "logit_bias": {str(girl): -2}}).json
    ids, probs = (Base64Array(**kept["sampling"][name]).array() for name in ("ids", "probs"))
    wanted = dict(zip(ids.tolist(), probs.tolist(), strict=True))
    for line in page.locator(".stages tbody tr").all():
        cells = line.locator("td").all_inner_texts()
        id = int(re.search(r"(\d+)\s*$", cells[0])[1])
        shown = 0.0 if cells[-1] == "cut" else float(cells[-1].rstrip("%")) / 100
        assert shown == pytest.approx(wanted.get(id, 0.0), abs=6e-4)
    page.fill("#param-temperature-n", "-1")
    assert page.locator("#param-temperature-n").get_attribute("aria-invalid") == "true"
    page.get_by_role("button", name="Evals: T 0").click()
    page.locator(".strip", has_text="T = 0").wait_for()
    assert settled(page) == 0.0


def test_branching_and_back_and_a_link_that_brings_it_all_back(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    page.get_by_role("button", name="Wild: T 1.5").click()
    first = page.locator(".numbers .bars button.chip")
    first.nth(0).click()
    page.locator(".crumbs .taken").nth(0).wait_for()
    page.locator(".numbers .bars button.chip").nth(1).click()
    page.locator(".crumbs .taken").nth(1).wait_for()
    page.locator("#back").click()
    page.locator(".crumbs", has_text="10 tokens").wait_for()
    page.locator(".numbers .bars button.chip").nth(0).click()
    page.locator(".crumbs", has_text="11 tokens").wait_for()
    page.locator("#tab-tree").click()
    page.locator("#grow").click()
    page.locator(".crumbs", has_text="19 tokens").wait_for()
    page.locator(".pages tbody tr").nth(1).wait_for()
    nodes = page.locator(".tree .node")
    assert nodes.count() == 11  # one, its two children, and eight after the second
    page.locator(".tree .node", has_text="%").nth(10).wait_for()
    texts = nodes.all_inner_texts()
    page.locator("#by-entropy").check()
    assert nodes.all_inner_texts() != texts
    page.locator("#by-probability").check()
    page.wait_for_timeout(400)  # the address is written when things are quiet
    address = page.url
    assert "#lab?s=" in address

    other = visit(lab_server.url, address.removeprefix(lab_server.url)).page
    other.locator(".tree .node", has_text="%").nth(10).wait_for()
    assert other.locator(".tree .node").all_inner_texts() == texts
    assert (
        other.locator("[aria-current=true].node").inner_text() == page.locator("[aria-current=true].node").inner_text()
    )
    other.locator("#tab-next").click()
    assert other.locator("#param-temperature-n").input_value() == "1.5"
    assert other.locator("#prompt").input_value() == PROMPT
    lab_server.until(lab_server.is_quiet)


def test_a_broken_link_is_told_and_the_page_stays_usable(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab?s=%25%25").page
    message = page.locator("#lab-message", has_text="This link cannot be read")
    message.wait_for()
    assert settled(page) < 1e-6
    for link in ("eyJ2IjoyfQ", "eyJ2IjoxLCJwcm9tcHQiOjV9", "e30", "A" * 9001, ""):
        page.goto(lab_server.url + "/lab/#home")
        page.locator("#title-output").wait_for()
        page.goto(f"{lab_server.url}/lab/#lab?s={link}")
        page.locator(".strip").wait_for()
        assert message.count() == (link != ""), link
        assert page.locator("#prompt").input_value() == PROMPT
    assert settled(page) < 1e-6


def test_a_link_that_is_written_late_does_not_bring_the_visitor_back(
    lab_server: Live, visit: Callable[..., Any]
) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    page.locator(".crumbs", has_text="tokens").wait_for()
    lab_server.until(lambda: page.evaluate("location.hash").startswith("#lab?s="))
    written = page.evaluate("() => { document.getElementById('tab-tree').click(); return location.hash; }")
    lab_server.until(lambda: page.evaluate("location.hash") != written)  # a change is written, after a while
    page.evaluate("() => { document.getElementById('tab-next').click(); history.pushState(null, '', '#home'); }")
    page.wait_for_timeout(600)
    assert page.evaluate("location.hash") == "#home"


def test_what_a_model_refuses_is_said_and_the_page_stays_usable(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab", may_refuse=True).page
    assert settled(page) < 1e-6
    page.fill("#prompt", "")
    page.click("#run")
    page.locator("#lab-message", has_text="The prompt is empty").wait_for()
    page.fill("#prompt", "word " * 20_000)
    page.click("#run")
    page.locator("#lab-message", has_text="shorten").wait_for()
    assert page.locator(".numbers .bars li").count() > 8  # what was there is there still
    page.fill("#prompt", "The capital of France is")
    page.keyboard.press("Control+Enter")
    page.locator(".crumbs", has_text="5 tokens").wait_for()
    assert page.locator("#lab-message").inner_text() == ""
    page.check("#as-chat")
    page.click("#run")
    page.locator(".crumbs .chip", has_text="<|im_start|>").first.wait_for()


def test_the_inside_of_a_pass(lab_server: Live, visit: Callable[..., Any]) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    page.locator("#tab-next").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    page.locator("h2", has_text="At which layer does the final token take the lead?").wait_for()
    assert page.locator(".lens tbody tr").count() == 31
    trace = lab_server.post("/lab/api/trace", prompt=PROMPT, lens={"k": 1}, attention={"layers": [15]}).json
    tokenizer = lab_server.engine.tokenizer
    for line, layer in zip(page.locator(".lens tbody tr").all(), reversed(trace["lens"]), strict=True):
        shown = line.locator("td .chip").first.inner_text().replace("·", " ").strip()
        assert shown == tokenizer.token_text(layer["ids"][0]).strip().replace("\\n", "↵") or layer["ids"][0] < 260
    page.locator("#tab-attention").click()
    page.locator("h3", has_text="Layer 15, head 0").wait_for()
    scores = Base64Array(**trace["attention"]["array"]).array()[0, 0]
    cells = (
        page.locator(".heat")
        .first.locator("tbody tr")
        .last.locator("td")
        .evaluate_all("all => all.map((e) => e.title)")
    )
    assert np.allclose([float(text.rstrip("%")) / 100 for text in cells], scores, atol=1e-3)
    page.locator("#tab-engine").click()
    context = lab_server.engine.context()
    context.fill(range(200, 240))
    lab_server.engine.run(lambda engine: context.flush())
    with context, context.fork():  # two programs that share two full pages
        page.locator(".legend-list li", has_text=re.compile(r"^\s*2 shared")).wait_for()
    page.locator("#programs").click()
    page.locator("p", has_text="for 4 passes with 4 rows").wait_for()
    page.locator(".legend-list li", has_text=re.compile(r"^\s*0 shared")).wait_for()
    page.locator("#measure").click()
    page.locator("button", has_text="Measure again").wait_for()
    assert "feed-forward" in page.locator("main").inner_text()
    page.locator("#tab-call").click()
    code = page.locator("pre").all_inner_texts()
    assert "curl http://127.0.0.1" in code[0]
    compile(code[2], "call.py", "exec")
    lab_server.until(lab_server.is_quiet)


def test_the_same_call_in_python_runs(lab_server: Live, visit: Callable[..., Any], capsys: Any) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    page.get_by_role("button", name="Evals: T 0").click()
    page.locator("#tab-call").click()
    names: dict[str, Any] = {}
    exec(page.locator("pre").nth(2).inner_text(), names)
    assert capsys.readouterr().out.split()[0] == "girl"
    body = json.loads(re.search(r"-d '(.*)'", page.locator("pre").nth(0).inner_text())[1])
    assert lab_server.complete(body.pop("prompt"), **body)["choices"][0]["text"] == " girl"


def test_exports_hold_what_is_on_the_page(lab_server: Live, visit: Callable[..., Any], tmp_path: Path) -> None:
    page = visit(lab_server.url, "/lab/#lab").page
    page.get_by_role("button", name="Chat: T 0.7, top-p 0.9").click()
    page.locator(".strip", has_text="2 stay").wait_for()
    with page.expect_download() as coming:
        page.get_by_role("button", name="JSON").click()
    data = json.loads(Path(coming.value.path()).read_text())
    assert data["top"][0]["text"] == " girl"
    assert sum(data["final"]["probs"]) == pytest.approx(1, abs=1e-12)
    assert Base64Array(**data["logits"]).array().shape == (49152,)
    with page.expect_download() as coming:
        page.get_by_role("button", name="PNG").click()
    from PIL import Image

    with Image.open(coming.value.path()) as picture:
        assert picture.size[0] == 2000
        assert len(picture.convert("RGB").getcolors(1 << 24) or []) > 20


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Oracle]]:
    folder, config, model = nasty_folder(tmp_path_factory.mktemp("nasty-live"))
    weights = {name: tensor for name, tensor in model.state_dict().items() if "rotary" not in name}
    with lab_live(hw.Engine(folder, dtype="float32", pages=64, threads=1), model="nasty") as server:
        yield server, Oracle(config, weights)


def test_tokens_that_would_break_a_page_are_text(nasty: tuple[Live, Oracle], visit: Callable[..., Any]) -> None:
    server, _ = nasty
    page = visit(server.url, "/lab/#lab").page
    assert settled(page) < 1e-6
    page.fill("#prompt", "".join(NASTY))
    page.click("#run")
    page.locator(".crumbs .chip", has_text="<script>").wait_for()
    assert settled(page) < 1e-6
    body = page.locator("main").inner_text()
    assert "<script>window.broken = 1</script>" in body.replace("·", " ")
    assert "🙂" in body
    for tab in ("tree", "lens", "attention", "call"):
        page.locator(f"#tab-{tab}").click()
        if tab == "tree":
            page.locator("#take-best").click()
            page.locator(".tree .node", has_text="%").wait_for()
    page.goto(server.url + "/lab/#home")
    page.locator("#title-output").wait_for()
    assert page.evaluate("window.broken") is None
    assert page.locator("main script, main img, main b:not(#score)").count() == 0


def test_the_lesson_counts_the_model_at_hand(nasty: tuple[Live, Oracle], visit: Callable[..., Any]) -> None:
    server, _ = nasty
    page = visit(server.url).page
    page.check("#output-1")
    page.locator("input[id^=output-count]").fill("100")
    page.click("#commit-output")
    page.click("#reveal-output")
    assert f"{server.engine.vocab_size:,} raw scores" in page.locator("#answer-output").inner_text()
    assert "no chat template" in page.locator("section[aria-labelledby=teacher-title]").inner_text()
    page.fill("#teacher-question", "How many tokens are in the vocabulary?")
    page.keyboard.press("Enter")
    page.locator(".composed", has_text=f"nasty has {server.engine.vocab_size:,} tokens").wait_for()
    assert page.locator(".generated").count() == 0


def test_a_painted_mask_is_the_oracles(nasty: tuple[Live, Oracle], visit: Callable[..., Any]) -> None:
    server, oracle = nasty
    page = visit(server.url, "/lab/#lab").page
    page.fill("#prompt", "abcdefghijkl")
    page.click("#run")
    page.locator(".crumbs", has_text="12 tokens").wait_for()
    page.locator("#tab-attention").click()
    page.locator("#bind-all").check()
    page.locator("#mask-kind-cells").click()
    page.locator("[role=gridcell]").first.focus()
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "Space", "ArrowRight", "ArrowDown", "Space", "ArrowDown"):
        page.keyboard.press(key)
    box = page.locator("[role=row]").nth(11).locator("[role=gridcell]")

    def is_painted(response: Any) -> bool:
        requested = response.request.post_data_json if response.request.method == "POST" else {}
        return (requested.get("mask") or {"runs": [[]]})["runs"][-1] == [2, 4, 6]

    with page.expect_response(is_painted) as coming:  # a drag over four cells of the last row
        start, end = box.nth(2).bounding_box(), box.nth(5).bounding_box()
        page.mouse.move(start["x"] + 5, start["y"] + 5)
        page.mouse.down()
        page.mouse.move(end["x"] + 5, end["y"] + 5, steps=12)
        page.mouse.up()
    runs = coming.value.request.post_data_json["mask"]["runs"]
    attend = np.zeros((12, 12), bool)
    for i, row in enumerate(runs):
        attend[i, : i + 1] = ~Brle.from_runs(row).to_bool()
    wanted = np.tril(np.ones((12, 12), bool))
    wanted[3, 0] = wanted[4, 1] = False
    wanted[11, 2:6] = False
    assert (attend == wanted).all()
    shown = page.locator("#mask-runs tbody tr").nth(11).locator("td").all_inner_texts()
    assert shown == ["11", "[2, 4, 6]", "[0, 2, 4, 6]"]
    result = coming.value.json()
    tokens = result["tokens"]
    dense = oracle.run(tokens, list(range(12)), torch.from_numpy(attend)).logits[-1]
    logits = Base64Array(**result["logits"]).array()
    assert np.abs(logits - dense.numpy()).max() <= 1e-4 * max(1.0, float(dense.abs().max()))
    page.locator("#mask-result[data-distance]").wait_for()
    probs = torch.softmax(dense.double(), -1)
    shown = page.locator("#mask-result .two > div").nth(1).locator(".num").all_inner_texts()
    best = max(float(text.rstrip("%")) / 100 for text in shown[:-1] if "<" not in text)  # the last is all others
    assert best == pytest.approx(float(probs.max()), abs=2e-3)
    rows = page.locator("#mask-runs").inner_text()
    page.wait_for_timeout(400)  # the address is written when things are quiet
    page.reload()
    page.locator("#mask-result[data-distance]").wait_for()
    assert page.locator("#mask-runs").inner_text() == rows
