"""Every example runs on the default model, prints, and what it claims holds."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import headway as hw
from support.examples import CLOSE, FOLDER, ROUNDED, cells, gallery, load
from support.recorded import CONTRASTIVE, FILE, GROUPS, PROMPT, dola_logits, write_model


async def scored(engine: hw.Engine, prompt: str, text: str) -> list[float]:
    """The log-probability of each token of a text after a prompt."""
    ids = engine.tokenizer.encode(text)
    async with engine.context().fill(prompt) as ctx:
        fwd = ctx.forward().input(ids)
        handles = [fwd.probe(row - len(ids) - 1, hw.Logprob(token)) for row, token in enumerate(ids)]
        out = await fwd.execute()
    return [float(out.logprobs(handle)[0]) for handle in handles]


def test_every_example_has_a_test_here() -> None:
    here = "".join(file.read_text() for file in Path(__file__).parent.glob("test_*.py"))
    assert {f.stem for f in FOLDER.glob("*.py")} <= set(re.findall(r'run\("(\w+)"', here))


def test_the_gallery_shows_every_example() -> None:
    page = (FOLDER.parent / "docs/gallery.md").read_text()
    assert {f.name for f in FOLDER.glob("*.py")} - {"hello.py"} == set(
        re.findall(r"^\| `(\w+\.py)`", page, re.MULTILINE)
    )


PAPER = re.compile(r"\([^()]*(?:19|20)\d\d")  # as in (Yao et al., 2023)
METHODS = (
    *("tree_of_thoughts", "graph_of_thoughts", "skeleton_of_thought", "recursion_of_thought", "mcts", "reflexion"),
    *("best_of_n", "self_consistency", "diverse_beams", "contrastive_search", "dola", "contrastive_decoding"),
    *("classifier_free_guidance", "context_aware_decoding", "own_samplers", "gumbel_watermark"),
    *("green_list_watermark", "jacobi_decoding", "speculative_decoding", "tree_speculation", "lora_mixing"),
    *("modular_cache", "steering_data", "heavy_hitters", "snapkv", "agent_swarm", "async_calls", "grpo"),
)


@pytest.mark.parametrize("name", METHODS)
def test_a_method_has_its_paper_and_its_output_in_the_gallery(name: str) -> None:
    (line,) = re.findall(
        rf"^\| `{name}\.py` \| (.*) \|$", (FOLDER.parent / "docs/gallery.md").read_text(), re.MULTILINE
    )
    assert PAPER.search(line)
    assert PAPER.search(load(name).__doc__ or "")
    assert gallery()[name].strip()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.stem)
def test_an_example_is_short_and_can_be_started(file: Path) -> None:
    text = file.read_text()
    assert text.startswith('"""')
    assert len(text.splitlines()) <= 75
    assert 'if __name__ == "__main__":' in text


async def contrasted(engine: hw.Engine, module: ModuleType, tokens: int) -> list[int]:
    """Contrastive search by its definition: each candidate in a context of its own, all of it computed again."""
    found: list[int] = []
    ids = engine.tokenizer.encode(module.PROMPT)

    async def read(extra: list[int]) -> tuple[list[np.ndarray], np.ndarray]:
        async with engine.context() as ctx:
            fwd = ctx.forward().input([*ids, *found, *extra])
            rows = [fwd.probe(i, hw.Hidden(engine.config.layers)) for i in range(len(ids) + len(found) + len(extra))]
            last = fwd.probe(-1, hw.Logits())
            out = await fwd.execute()
            return [out.hidden(row) for row in rows], out.logits(last)

    for _ in range(tokens):
        past, logits = await read([])
        probs = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        scores = {}
        for token in np.argsort(-probs)[: module.K].tolist():
            (*_, own), _ = await read([token])
            scores[token] = (1 - module.ALPHA) * probs[token] - module.ALPHA * max(
                float(own @ old / np.linalg.norm(own) / np.linalg.norm(old)) for old in past
            )
        found.append(max(scores, key=scores.__getitem__))
    return found


def test_contrastive_search_is_what_it_is_by_definition(run: Any, floats: hw.Engine) -> None:
    repeats, _ = run("contrastive_search")
    assert repeats["contrastive"] == 0
    module = load("contrastive_search")
    found = floats.run(module.contrastive, module.PROMPT, module.K, module.ALPHA, 6)
    assert found == floats.run(contrasted, module, 6)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[hw.Engine, dict[str, Any]]]:
    """The model of the recordings, and what transformers gave with it."""
    folder = write_model(tmp_path_factory.mktemp("recorded"))
    with hw.Engine(folder, dtype="float32", pages=64, threads=1) as engine:
        yield engine, json.loads(FILE.read_text())


def test_contrastive_search_is_that_of_transformers(recorded: tuple[hw.Engine, dict[str, Any]]) -> None:
    engine, theirs = recorded
    module = load("contrastive_search")
    for case, expected in zip(CONTRASTIVE, theirs["contrastive"], strict=True):
        assert engine.run(module.contrastive, PROMPT, case["top_k"], case["penalty_alpha"], len(expected)) == expected


def test_diverse_beams_are_those_of_transformers(recorded: tuple[hw.Engine, dict[str, Any]], run: Any) -> None:
    engine, theirs = recorded
    module = load("diverse_beams")

    async def ours(engine: hw.Engine, case: dict[str, Any], ends: set[int]) -> list[tuple[float, tuple[int, ...]]]:
        groups = case["num_beam_groups"]
        how = {"penalty": case["diversity_penalty"], "tokens": case["max_new_tokens"], "ends": ends}
        async with engine.context().fill(PROMPT) as ctx:
            return await module.diverse_beams(ctx, groups, case["num_beams"] // groups, **how)

    for case, expected in zip(GROUPS, theirs["groups"], strict=True):
        eos = case.get("eos_token_id", [])
        ends = {eos} if isinstance(eos, int) else set(eos)
        found = engine.run(ours, case, ends)
        lengths = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in expected["tokens"]]
        assert [tokens for _, tokens in found] == [tuple(r[:n]) for r, n in zip(expected["tokens"], lengths)]
        assert [score for score, _ in found] == pytest.approx(expected["scores"], abs=1e-4)
    assert engine.stats().pages_held == 0
    found, _ = run("diverse_beams")
    together, apart = (set(" ".join(texts).split()) for texts in found.values())
    assert len(apart) > 1.5 * len(together)


def test_dola_contrasts_as_transformers_does(recorded: tuple[hw.Engine, dict[str, Any]]) -> None:
    module = load("dola")
    for case, expected in enumerate(recorded[1]["dola"]):
        final, early = dola_logits(case)
        _, found = module.contrast(module.log_softmax(final), [module.log_softmax(early)])
        assert found == pytest.approx([-np.inf if value is None else value for value in expected], abs=1e-4)


def test_dola_subtracts_the_early_layer_that_differs_most(run: Any, floats: hw.Engine) -> None:
    (tokens, _), printed = run("dola")
    assert "Africa" in printed
    module = load("dola")

    async def first(engine: hw.Engine) -> tuple[int, int]:
        layers = [*range(2, engine.config.layers // 2, 2)]
        async with engine.context().fill(module.PROMPT) as ctx:
            fwd = ctx.forward()
            last, lens = fwd.probe(-1, hw.Distribution()), fwd.probe(-1, hw.LogitLens(layers, 0))
            out = await fwd.execute()
        final, *early = ([*zip(*sorted(zip(*pair)))][1] for pair in (out.distribution(last), *out.lens(lens)))
        mixed = [(np.array(final) + one) / 2 for one in early]
        apart = [np.sum(final * np.log(final / m)) + np.sum(one * np.log(one / m)) for one, m in zip(early, mixed)]
        best = int(np.argmax(apart))
        scores = np.where(np.array(final) >= 0.1 * max(final), np.log(final) - np.log(early[best]), -np.inf)
        return int(np.argmax(scores)), layers[best]

    (ours, *_), (layer, *_) = floats.run(module.program)
    assert (ours, layer) == floats.run(first)
    assert ours == tokens[0]


def test_hello(run: Any) -> None:
    run("hello")


def test_next_token_table(run: Any) -> None:
    favorites, printed = run("next_token")
    assert favorites["The capital of France is"] == " Paris"
    assert "' Paris'" in printed
    assert "nats" in printed


def test_scores_rank_the_right_candidate_first_and_compute_the_question_once(run: Any) -> None:
    scores, printed = run("score_candidates")
    assert max(scores, key=scores.__getitem__) == " Jupiter"
    assert min(scores, key=scores.__getitem__) == " a very large onion"
    computed, apart = map(int, re.findall(r"\d+", printed.splitlines()[-1]))
    assert computed < apart


def test_a_window_holds_a_bounded_number_of_pages(run: Any) -> None:
    sizes, _ = run("windowed_attention")
    module = load("windowed_attention")
    most = module.SINK // 16 + module.WINDOW // 16 + 2  # the window may start inside a page, and end in a new one
    assert max(held for _, held in sizes) <= most < -(-sizes[-1][0] // 16)


def test_a_sink_rescues_the_window(run: Any) -> None:
    found, printed = run("attention_sink")
    assert found["Mask.causal()"] < found["Mask.sink(4, 20)"] < found["Mask.window(48)"] < found["Mask.window(24)"]
    assert found["Mask.sink(4, 44)"] < 1.1 * found["Mask.causal()"]
    assert "██····████" in printed
    page = (FOLDER.parent / "docs/gallery.md").read_text()
    shown = dict(re.findall(r"│ (Mask\.[^│]*?) +│ ([\d.]+)", page))
    assert {name: float(value) for name, value in shown.items()} == pytest.approx(found, rel=0.03)


def test_the_best_pages_answer_and_the_ends_alone_do_not(run: Any) -> None:
    found, _ = run("sparse_attention")
    assert {name: "marigold" in text for name, (text, _) in found.items()} == {"all": True, "best": True, "ends": False}
    assert found["all"][1] == 0
    assert found["best"][1] >= 5


def test_sections_apart_do_not_move_each_other(run: Any) -> None:
    found, _ = run("hierarchical_attention")
    assert found["plain causal"][0] > 0.01
    assert found["hierarchical"][0] < 1e-4


def test_documents_in_their_own_positions_have_no_order(run: Any, floats: hw.Engine) -> None:
    spread, printed = run("own_positions", engine=floats)
    assert spread["one after the other"] > 0.1
    assert spread["position spaces of their own"] < CLOSE
    assert printed.count(" blue") >= 3


def test_shared_and_spread_position_ids_cost_quality(run: Any) -> None:
    found, printed = run("position_interpolation")
    trained, half, quarter, double, fourfold = found.values()
    assert trained < half < quarter
    assert trained < double < fourfold
    assert "16384" in printed


def test_drafts_at_one_position_are_judged_as_if_alone(run: Any, floats: hw.Engine) -> None:
    (oven, bath), apart = run("competing_drafts", engine=floats)[0]
    assert oven > bath
    assert apart < CLOSE


def test_trim_lands_on_whole_pages_and_changes_nothing(run: Any) -> None:
    (trimmed, apart), _ = run("page_trim", 320)
    assert trimmed == {
        ("whole pages", "on"): 18,
        ("scattered", "on"): 0,
        ("whole pages", "off"): 0,
        ("scattered", "off"): 0,
    }
    assert apart < CLOSE


def test_a_tree_of_forks_shares_its_pages(run: Any) -> None:
    (held, alone), printed = run("prefix_tree")
    assert held < alone / 2
    assert "reading room" in printed


def test_parallel_forks_share_steps_and_draw_the_same(run: Any) -> None:
    (apart, together, batch), _ = run("parallel_forks")
    assert apart == together
    assert len(set(together)) > 1
    assert batch > 1.5


def test_a_fan_out_of_forks_answers_the_same_from_fewer_pages(run: Any) -> None:
    (texts, pages), printed = run("fan_out")
    assert texts["forks"] == texts["apart"]
    assert "six" in texts["forks"][-1]
    assert pages["forks"] < pages["apart"] / 2
    forks, apart = (int(n) for n in re.findall(r"│ (?:forks|apart) │ (\d+)", printed))
    assert forks < apart / 4


def test_a_map_reduce_shares_the_rules_that_every_part_opens_with(run: Any) -> None:
    (summaries, whole, shared), printed = run("map_reduce")
    assert "1821" in summaries[0]
    assert whole
    rules = 16  # pages: the rules fill four, and four of five contexts find them
    assert shared >= rules
    assert f"{shared} pages of 16 tokens were shared" in printed


def test_tenants_share_nothing(run: Any) -> None:
    (hits, (one, two, three, four)), printed = run("tenants")
    assert hits == [0, one - 1, 0, one - 1]
    assert (two - one, three - two, four - three) == (1, one, 1)
    assert "between the tenants 0" in printed


def test_bids_decide_who_is_done_first_and_ageing_bounds_the_wait(run: Any) -> None:
    finished, longest, shared = run("priorities")[0]
    assert finished == sorted(finished, reverse=True)
    assert longest[0] <= 8 + len(finished)
    assert shared > 0


def test_the_lens_ends_with_the_models_answer(run: Any) -> None:
    favorites, _ = run("logit_lens")
    assert favorites[0] == " of"  # the embedding knows only its own token
    assert favorites[-1] == " Paris"


def test_a_conversation_goes_on_in_another_process(run: Any, smollm2: hw.Engine) -> None:
    name = f"test-{uuid.uuid4().hex}"
    again = "import sys, headway as hw, conversation as c; print(hw.Engine('smollm2').run(c.program, sys.argv[1]))"
    try:
        (asked, _, answer), _ = run("conversation", name)
        assert (asked, "Rome" in answer) == (1, True)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(FOLDER), *filter(None, sys.path)])}
        command = [sys.executable, "-c", again, name]
        shown = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=300, check=True).stdout
        assert "opened" in shown
        assert answer in shown, "the second process has the first one's messages"
        assert "Paris" in shown.splitlines()[-1], "the question means nothing without the first one"
        (asked, _, _), printed = run("conversation", name)
        assert asked == 3
        assert "Paris" in printed
        assert smollm2.open(name) is None
    finally:
        smollm2.delete(name)


def test_a_completion_ends_before_its_stop_and_keeps_nothing_of_it(run: Any) -> None:
    (text, finish, kept), _ = run("completion")
    assert finish == "stop"
    assert not any(stop in text for stop in load("completion").STOPS)
    assert kept


def test_a_chat_turn_computes_only_what_is_new(run: Any) -> None:
    turns, printed = run("chat_completion")
    assert all(city in printed for city in ("Rome", "Paris", "Madrid"))
    for (before, _), (length, computed) in pairwise(turns):
        assert computed <= length - before + 3  # the last turn's seal waits; a pass ahead may be taken back
    assert turns[-1][1] < turns[-1][0] / 2


def test_an_extraction_fits_its_schema_in_fewer_passes_than_tokens(run: Any) -> None:
    (found, tokens, passes), _ = run("json_extraction")
    assert list(found) == list(load("json_extraction").FIELDS)
    assert found["full_name"] == "Anna Berg"
    assert found["age_in_years"] == 34
    assert found["spoken_languages"] == ["Norwegian", "German"]
    assert passes < 0.6 * tokens


def test_every_field_of_the_form_fits_its_pattern(run: Any) -> None:
    found, _ = run("regex_form")
    patterns = load("regex_form").FIELDS
    assert all(re.fullmatch(patterns[field], text) for field, (text, _) in found.items())
    assert not all(re.fullmatch(patterns[field], free) for field, (_, free) in found.items())
    assert found["Number of nights"][0] == "three"


def test_a_template_costs_a_pass_only_for_its_blanks(run: Any) -> None:
    (text, tokens, passes), _ = run("template_filling")
    module = load("template_filling")
    pattern = re.escape(module.TEMPLATE).replace(r"\{", "{").replace(r"\}", "}").format(**module.BLANKS)
    assert re.fullmatch(pattern, text)
    assert all(word in text for word in ("Brandt", "wool blankets", "Bremen", "Friday", "4711"))
    assert passes < tokens / 2


def test_a_choice_is_scored_by_the_product_of_its_conditionals(run: Any, smollm2: hw.Engine) -> None:
    (greedy, scores, (held, alone)), _ = run("scored_choice")
    assert max(scores, key=lambda text: sum(scores[text])) == " negative"
    assert greedy == " not negative"
    assert held < alone

    async def one_at_a_time(engine: hw.Engine, prompt: str, text: str) -> list[float]:
        """The conditionals, each read in a pass of its own from a context that never saw the next token."""
        found = []
        async with engine.context().fill(prompt) as ctx:
            for token in engine.tokenizer.encode(text):
                fwd = ctx.forward()
                handle = fwd.probe(-1, hw.Logits())
                logits = (await fwd.execute()).logits(handle).astype(np.float64)
                found.append(float(logits[token] - np.log(np.exp(logits - logits.max()).sum()) - logits.max()))
                ctx.fill([token])
        return found

    prompt = load("scored_choice").PROMPT
    for text, parts in scores.items():
        assert smollm2.run(one_at_a_time, prompt, text) == pytest.approx(parts, abs=ROUNDED)


def test_the_agent_answers_from_the_database(run: Any) -> None:
    found, printed = run("agent")
    assert [result for result, _ in found] == ["17 pears", "365 nuts", "8 plums"]
    assert all(result.split()[0] in answer for result, answer in found)
    assert "stock({'item': 'pears'})" in printed


def test_healing_finishes_the_word(run: Any) -> None:
    found, _ = run("token_healing")
    ends = {"Sta": "tes", " sum": "mer", " c": "old", " m": "uch", "is ": "Paris"}
    for prompt, (plain, healed) in found.items():
        end = next(end for cut, end in ends.items() if prompt.endswith(cut))
        assert healed.startswith(end)
        assert not plain.startswith(end)
    _, *rows = cells(gallery()["token_healing"].splitlines())
    shown = [(plain, healed) for _, plain, healed, _ in rows if healed]
    assert len(shown) == len(ends)
    for (plain, healed), end in zip(shown, ends.values(), strict=True):
        assert healed.startswith(end)
        assert not plain.startswith(end)


def test_rewinding_keeps_the_right_lines_and_what_was_computed(run: Any, smollm2: hw.Engine) -> None:
    (good, bad, _, again), _ = run("verifier_rewind")
    module = load("verifier_rewind")
    assert len(good) == module.LINES
    assert all(module.right(line, good[:i]) for i, line in enumerate(good))
    assert bad
    assert not any(module.right(line, good) for line in bad)
    assert again >= len(bad) * len(smollm2.tokenizer.encode(module.PROMPT))


def test_the_best_of_n_is_the_one_of_the_highest_mean(run: Any, smollm2: hw.Engine) -> None:
    (drawn, (tokens, apart), (held, alone)), _ = run("best_of_n")
    assert drawn[0][0] == max(score for score, _ in drawn)
    assert len({text for _, text in drawn}) == load("best_of_n").N
    assert tokens < apart / 2
    assert held < alone

    score, text = drawn[0]
    assert np.mean(smollm2.run(scored, load("best_of_n").PROMPT, text)) == pytest.approx(score, abs=ROUNDED)


def test_beams_find_a_likelier_text_on_shared_pages(run: Any, smollm2: hw.Engine) -> None:
    ((greedy, _), *beams), tokens, pages = run("beam_search")[0]
    scores = [score for score, _ in beams]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > greedy
    assert tokens[0] < tokens[1]
    assert pages[0] < pages[1]
    again = smollm2.run(scored, load("beam_search").PROMPT, beams[0][1])
    assert sum(again) == pytest.approx(scores[0], abs=ROUNDED * len(again))


def test_the_chains_vote_for_the_right_answer_and_share_their_prompt(run: Any) -> None:
    (votes, tokens, prompt), _ = run("self_consistency")
    assert votes.most_common(1)[0][0] == "13"
    assert len(votes) > 1, "chains that all agree need no vote"
    assert tokens < 4 * prompt
