"""Examples that move memory, mix or train weights, and think in trees, graphs and swarms."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import headway as hw
from support.examples import load


def sums(text: str) -> list[bool]:
    """Whether each line of arithmetic is right."""
    return [eval(line.replace("=", "==")) for line in text.splitlines()]  # what a grammar of digits and signs allows


def test_a_tree_of_drafts_takes_fewer_passes_than_a_line(run: Any, floats: hw.Engine) -> None:
    found, _ = run("tree_speculation", engine=floats)
    (plain, most, _), (line, passes, _), (tree, fewest, _) = found.values()
    assert plain == line == tree
    assert fewest < passes < most


def test_prompts_of_cached_parts_are_answered_from_them(run: Any) -> None:
    (answers, tokens, apart), _ = run("modular_cache")
    assert [answer.split()[0].strip(",") for answer in answers.values()] == ["Winter", "cents", "Sundays", "five"]
    assert tokens < 0.8 * apart


def test_eviction_gives_pages_back_and_the_text_goes_on(run: Any) -> None:
    found, _ = run("heavy_hitters")
    (plain, full, none), (tokens, small, evictions) = found.values()
    assert len(plain) == len(tokens) == load("heavy_hitters").NEW_TOKENS
    assert none == 0 < evictions
    assert small < full


def test_the_slots_that_the_question_looks_at_hold_the_answer(run: Any) -> None:
    found, _ = run("snapkv")
    everything, best, _ = found.values()
    assert "marigold" in everything[0]
    assert "marigold" in best[0]
    assert best[2] < everything[2] / 2


def test_a_direction_between_moods_orders_texts_it_was_not_made_of(run: Any) -> None:
    found, _ = run("steering_data")
    assert max(found.values()) == 1.0


def test_a_mixture_of_adapters_fits_better_and_shares_its_steps(run: Any) -> None:
    (plain, mixed, steps), _ = run("lora_mixing")
    assert mixed > plain + 0.02
    assert steps < load("lora_mixing").TRIED


@pytest.mark.slow
def test_the_trainer_has_the_engines_log_probabilities(run: Any, floats: hw.Engine) -> None:
    (rewards, apart), _ = run("grpo", 2, engine=floats)
    assert len(rewards) == 2
    assert max(apart) < 1e-3


def test_the_trainer_says_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SystemExit, match="peft is missing"):
        load("grpo")


@pytest.mark.slow
def test_training_raises_the_reward(run: Any, floats: hw.Engine) -> None:
    (rewards, apart), _ = run("grpo", 6, engine=floats)
    assert rewards[-1] > rewards[0] + 0.1
    assert max(apart) < 1e-3


def test_a_tree_of_thoughts_finds_24(run: Any) -> None:
    (answers, tokens, apart), _ = run("tree_of_thoughts")
    assert answers
    assert all(all(sums(text)) and text.endswith("= 24\n") for text in answers)
    assert tokens < apart / 4


def test_a_tree_search_finds_24_and_computes_no_move_twice(run: Any) -> None:
    (text, visits, tokens, apart), _ = run("mcts")
    assert all(sums(text))
    assert text.endswith("= 24\n")
    assert visits == 1 or tokens < apart / 2


def test_a_graph_of_thoughts_counts_the_countries(run: Any) -> None:
    (counts, tokens, apart), _ = run("graph_of_thoughts")
    assert counts == {"Spain": 2, "Italy": 1, "Turkey": 1, "Japan": 1, "Norway": 1}
    assert tokens < apart / 2


def test_points_of_a_skeleton_share_their_steps(run: Any) -> None:
    (outline, details, tokens, steps), _ = run("skeleton_of_thought")
    assert len(outline) == len(details) == load("skeleton_of_thought").POINTS
    assert all(details)
    assert steps < 0.8 * tokens


def test_subproblems_are_solved_in_contexts_of_their_own(run: Any) -> None:
    (answers, sizes), _ = run("recursion_of_thought")
    assert answers == ["Rome", "London"]
    assert len(sizes) == 3 * len(answers)
    assert max(sizes) < sum(sizes) / 2


def test_reflections_lead_to_a_right_answer(run: Any) -> None:
    (tried, tokens, apart), _ = run("reflexion")
    reflect = load("reflexion").reflect
    assert [reflect(word) == "right!" for word in tried] == [False] * (len(tried) - 1) + [True]
    assert len(set(tried)) == len(tried) > 1
    assert tokens < apart


def test_a_swarm_computes_only_what_is_new_to_each_agent(run: Any) -> None:
    (names, winner, tokens, apart), _ = run("agent_swarm")
    assert winner in names
    assert len(names) == len(load("agent_swarm").ROLES)
    assert tokens < apart / 2


def test_calls_run_while_the_model_writes(run: Any) -> None:
    (text, done, apart), printed = run("async_calls")
    assert all(str(degrees) in text for degrees in load("async_calls").WEATHER.values())
    assert printed.count("(put in)") == 3
    assert done < apart
