"""ctx.generate's parameters: who decides, what contradicts, and what transformers makes of the same words."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

import headway as hw
from headway.program.generation.ngrams import NoRepeat, banned_by_ngrams
from headway.testing import random_model
from support.checks import random_tokens
from support.hf import save_hf, variant
from support.properties import examples

V = 97
PROMPT = [5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("parameters"), variant("qwen2-gqa-tied")[1])


@pytest.fixture(scope="module")
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=128, threads=1) as made:
        yield made


def said(folder: Path, options: Mapping[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(options))
    return folder


def theirs(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """What transformers generates with these options and the folder's file."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)  # type: ignore[operator,call-overload]
    return out[0, len(prompt) :].tolist()


def ours(model: Path | hw.Engine, prompt: list[int], sampler: hw.Sampler | None = None, **options: Any) -> list[int]:
    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            return await context.fill(prompt).generate(sampler, **options).tokens()

    if isinstance(model, hw.Engine):
        return model.run(program)
    with hw.Engine(model, pages=64, threads=1) as engine:
        found = engine.run(program)
        assert engine.stats().pages_held == 0
        return found


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "call"),
    [
        ({}, {"max_length": 20}),
        ({"max_length": 20}, {}),
        ({"max_length": 24, "repetition_penalty": 1.4}, {}),
        ({"max_length": 24, "repetition_penalty": 1.4}, {"repetition_penalty": 1.0}),
        ({"max_length": 24, "no_repeat_ngram_size": 2}, {}),
        ({"max_length": 24, "no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 1}),
        ({"max_length": 24, "no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 0}),
        ({"max_length": 30, "do_sample": True, "temperature": 0.7}, {"do_sample": False}),
        ({"max_length": 30}, {"no_repeat_ngram_size": 3, "repetition_penalty": 0.6}),
        ({"max_length": 24, "bad_words_ids": [[n] for n in range(0, 97, 3)]}, {}),
        ({"max_length": 24, "sequence_bias": [[[n], 2.5] for n in range(1, 97, 5)]}, {"repetition_penalty": 1.2}),
        ({"max_length": 24}, {"bad_words_ids": [[a, b] for a in range(97) for b in range(0, 97, 2)]}),
        ({"max_length": 24}, {"sequence_bias": {(a, b): 1.5 for a in range(97) for b in range(0, 97, 7)}}),
        ({"max_length": 18, "num_beams": 3}, {}),
        ({"max_length": 18, "num_beams": 3, "length_penalty": -1.0, "early_stopping": True}, {}),
        ({"max_length": 18, "num_beams": 4, "no_repeat_ngram_size": 2}, {"num_beams": 2, "repetition_penalty": 1.3}),
        ({"max_length": 18, "num_beams": 4}, {"num_beams": 1}),
        ({"max_length": 18}, {"length_penalty": 1.0, "early_stopping": False}),
        ({"max_new_tokens": 9, "max_length": 7, "num_beams": 2}, {"length_penalty": 2.0, "early_stopping": "never"}),
    ],
)
def test_the_words_mean_what_they_mean_to_transformers(
    folder: Path, file: dict[str, Any], call: dict[str, Any]
) -> None:
    said(folder, file)
    assert ours(folder, PROMPT, **call) == theirs(folder, PROMPT, eos_token_id=None, **call)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("least", [0, 9, 14])
def test_min_length_counts_the_prompt_as_in_transformers(folder: Path, beams: int, least: int) -> None:
    """With so many end tokens a text ends as soon as it may."""
    ends = list(range(1, V, 2))
    said(folder, {"max_length": 24, "num_beams": beams})
    expected = theirs(folder, PROMPT, eos_token_id=ends, min_length=least)
    cut = next((i for i, token in enumerate(expected) if token in ends), len(expected))
    found = ours(folder, PROMPT, min_length=least, stop=ends)
    assert found == expected[:cut]
    assert len(found) >= least - len(PROMPT)


def test_min_tokens_and_max_tokens_do_not_count_the_prompt(engine: hw.Engine) -> None:
    ends = list(range(1, V, 2))
    assert len(ours(engine, PROMPT, hw.Argmax(), max_tokens=7)) == 7
    assert len(ours(engine, PROMPT, hw.Argmax(), max_length=7)) == 2
    assert ours(engine, PROMPT, hw.Argmax(), min_tokens=6, max_tokens=20, stop=ends) == ours(
        engine, PROMPT, hw.Argmax(), min_length=11, max_length=25, stop=ends
    )


def test_an_argument_goes_before_the_file_whichever_word_it_uses(folder: Path) -> None:
    said(folder, {"max_new_tokens": 3, "min_new_tokens": 2})
    assert len(ours(folder, PROMPT)) == 3
    assert len(ours(folder, PROMPT, max_tokens=6)) == 6
    assert len(ours(folder, PROMPT, max_length=12, min_length=6)) == 7


def test_a_sampler_puts_the_file_aside(folder: Path) -> None:
    said(folder, {"max_length": 8, "no_repeat_ngram_size": 1, "repetition_penalty": 1.9, "num_beams": 3, "top_k": 1})
    with hw.Engine(folder, pages=64, threads=1) as engine:
        plain = ours(engine, PROMPT, hw.Argmax())
        assert len(plain) == 256
        said(folder, {})
    assert ours(folder, PROMPT, max_tokens=256) == plain


def test_the_file_can_draw(folder: Path) -> None:
    said(folder, {"do_sample": True, "temperature": 1.3, "top_k": 7, "repetition_penalty": 1.2, "max_new_tokens": 9})

    async def program(engine: hw.Engine) -> tuple[list[int], list[int]]:
        async with engine.context(seed=11) as one, engine.context() as other:
            sampler = hw.Sampling(1.3, top_k=7, repetition_penalty=1.2, seed=11)
            by_file = await one.fill(PROMPT).generate().tokens()
            return by_file, await other.fill(PROMPT).generate(sampler, max_tokens=9).tokens()

    with hw.Engine(folder, pages=64, threads=1) as engine:
        by_file, by_hand = engine.run(program)
        assert by_file == by_hand
        assert engine.generation_defaults.sampler(temperature=0.5) == hw.Sampling(0.5, top_k=7, repetition_penalty=1.2)


@pytest.mark.parametrize(
    ("argument", "parameters"),
    [
        ({"temperature": 0.4}, {"temperature": 0.4, "top_k": 7}),
        ({"top_k": 3}, {"temperature": 1.3, "top_k": 3}),
        ({"top_k": 0, "top_p": 0.5}, {"temperature": 1.3, "top_p": 0.5}),
        ({"min_p": 0.2}, {"temperature": 1.3, "top_k": 7, "min_p": 0.2}),
        ({"typical_p": 0.6}, {"temperature": 1.3, "top_k": 7, "typical_p": 0.6}),
        ({"temperature": 0.0}, {"temperature": 0.0}),
    ],
)
def test_an_argument_overrules_one_thing_the_file_says(
    folder: Path, argument: dict[str, Any], parameters: dict[str, Any]
) -> None:
    said(folder, {"do_sample": True, "temperature": 1.3, "top_k": 7, "no_repeat_ngram_size": 2, "max_new_tokens": 19})

    async def program(engine: hw.Engine) -> tuple[list[int], list[int]]:
        async with engine.context(seed=11) as one, engine.context() as other:
            by_file = await one.fill(PROMPT).generate(**argument).tokens()
            sampler = hw.Sampling(**parameters, seed=11)
            by_hand = other.fill(PROMPT).generate(sampler, no_repeat_ngram_size=2, max_tokens=19)
            return by_file, await by_hand.tokens()

    with hw.Engine(folder, pages=64, threads=1) as engine:
        by_file, by_hand = engine.run(program)
        assert by_file == by_hand
        assert len(by_file) == 19


def test_end_tokens_of_the_file_end_a_text_without_a_tokenizer(folder: Path) -> None:
    said(folder, {"max_length": 30})
    expected = ours(folder, PROMPT)
    end = expected[6]
    said(folder, {"max_length": 30, "eos_token_id": end})
    assert ours(folder, PROMPT) == expected[: expected.index(end)]
    assert ours(folder, PROMPT, stop_only=True) == expected
    assert ours(folder, PROMPT, hw.Argmax(), max_length=30) == expected


def test_where_nobody_says_anything_it_is_greedy(engine: hw.Engine) -> None:
    assert engine.generation_defaults == hw.GenerationDefaults()
    assert ours(engine, PROMPT) == ours(engine, PROMPT, hw.Argmax(), max_tokens=256)
    assert ours(engine, PROMPT, hw.Argmax(), do_sample=False, max_tokens=4) == ours(engine, PROMPT, max_tokens=4)
    drawn = hw.Multinomial(seed=3)
    assert ours(engine, PROMPT, drawn, max_tokens=9) == ours(engine, PROMPT, drawn, do_sample=True, max_tokens=9)


def test_an_argument_goes_before_the_sampler(engine: hw.Engine) -> None:
    one = ours(engine, PROMPT, hw.Sampling(0, repetition_penalty=1.1), repetition_penalty=1.8, max_tokens=20)
    assert one == ours(engine, PROMPT, hw.Sampling(0, repetition_penalty=1.8), max_tokens=20)
    assert one != ours(engine, PROMPT, hw.Sampling(0, repetition_penalty=1.1), max_tokens=20)


# -- what contradicts ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "options", "says"),
    [
        (None, {"max_tokens": 3, "max_length": 9}, "max_tokens=3 and max_length=9 were both given"),
        (None, {"min_tokens": 3, "min_length": 9}, "min_tokens=3 and min_length=9 were both given"),
        (hw.TopP(0.9), {"do_sample": False}, "do_sample=False was given with a sampler of temperature 1, which draws"),
        (hw.Argmax(), {"do_sample": True}, "do_sample=True was given with a sampler of temperature 0, which takes"),
        (None, {"temperature": 0.5}, "temperature=0.5 has no effect without sampling; give do_sample=True"),
        (None, {"top_p": 0.5, "do_sample": False}, "top_p=0.5 has no effect without sampling"),
        (None, {"temperature": 0, "do_sample": True}, "temperature 0 draws nothing"),
        (hw.TopP(0.9), {"top_k": 5}, "top_k=5 was given with a sampler"),
        (None, {"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        (None, {"max_length": 5}, "max_length is 5 and counts the prompt, which has 5 tokens already"),
        (None, {"max_tokens": 3, "min_length": 9}, "min_tokens is 4 and max_tokens is 3"),
        (None, {"length_penalty": 2.0}, "length_penalty=2.0 has no effect with one beam; give num_beams"),
        (None, {"early_stopping": True}, "early_stopping=True has no effect with one beam"),
        (None, {"num_return_sequences": 2}, "num_return_sequences is 2 and nothing is drawn"),
        (None, {"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3; with num_beams=2"),
        (None, {"num_beams": 2, "stop": ["x"]}, "has no tokenizer; give token ids"),
        (None, {"num_beams": 2, "penalize_prompt": False}, "penalize_prompt=False cannot be given with num_beams=2"),
        (None, {"num_beams": 2, "speculate": hw.PromptLookup()}, "speculate cannot be given with num_beams=2"),
        (hw.MinP(0.1), {"num_beams": 2}, "min_p=0.1 is not supported with num_beams=2"),
        (hw.Typical(0.1), {"num_beams": 2}, "typical_p=0.1 is not supported with num_beams=2"),
        (hw.Sampling(presence_penalty=1), {"num_beams": 2}, "presence_penalty=1.0 is not supported with num_beams=2"),
        (hw.Sampling(logit_bias={1: 1.0}), {"num_beams": 2}, "logit_bias=.* is not supported with num_beams=2"),
        (None, {"num_beams": 0}, "num_beams is 0"),
        (None, {"num_beams": 2000}, r"num_beams is 2000; it must be an integer in \[1, 1024\]"),
        (None, {"repetition_penalty": 0}, "repetition_penalty is 0.0"),
        (None, {"no_repeat_ngram_size": -1}, "no_repeat_ngram_size is -1"),
        (None, {"max_tokens": 0}, "max_tokens is 0"),
        (None, {"min_tokens": -1}, "min_tokens is -1"),
        (None, {"early_stopping": "always"}, "early_stopping is 'always'"),
    ],
)
def test_contradictions_name_both_and_change_nothing(
    engine: hw.Engine, sampler: hw.Sampler | None, options: dict[str, Any], says: str
) -> None:
    with engine.context().fill(PROMPT) as context:
        with pytest.raises(hw.HeadwayError, match=says):
            context.generate(sampler, **options)
        assert list(context.pending) == PROMPT


def test_a_file_that_asks_for_too_much_is_named(folder: Path) -> None:
    said(folder, {"min_length": 50})
    with pytest.raises(hw.InvalidInput, match=r"min_tokens is 45 \(by generation_config.json\) and max_tokens is 10"):
        ours(folder, PROMPT, max_tokens=10)
    said(folder, {"forced_bos_token_id": 1})
    with pytest.raises(hw.Unsupported, match=r"asks for forced_bos_token_id=.*generate with a sampler of your own"):
        ours(folder, PROMPT)
    assert len(ours(folder, PROMPT, hw.Argmax(), max_tokens=3)) == 3


def test_a_refused_call_takes_its_cue_back(smollm2: hw.Engine) -> None:
    with smollm2.context().user("Hello") as context:
        before = context.tokens
        for options in ({"max_length": 3}, {"num_beams": 2, "penalize_prompt": False}, {"stop": [""]}):
            with pytest.raises(hw.HeadwayError):
                context.generate(**options)  # type: ignore[arg-type]
            assert context.tokens == before
        context.generate(max_tokens=3)
        assert len(context.tokens) > len(before)


# -- n-grams -------------------------------------------------------------------------------------------------------


@given(data=st.data(), n=st.integers(1, 4))
@settings(max_examples=examples(60), deadline=None)
def test_no_run_comes_twice_whatever_is_cut_and_written(data: st.DataObject, n: int, engine: hw.Engine) -> None:
    """The constraint against a look at all tokens, through accepts, rollbacks, copies and a program's own writing."""
    with engine.context().fill(data.draw(st.lists(st.integers(0, 3), min_size=1))) as context:
        rule, accepted = NoRepeat(n, context), 0
        for act in data.draw(st.lists(st.sampled_from(["accept", "cut", "fill", "copy"]), max_size=25)):
            banned = banned_by_ngrams(context.tokens, n)
            mask = rule.mask()
            forbidden = set() if mask is None else {t for t in range(V) if not mask[t // 32] >> (t % 32) & 1}
            assert forbidden == banned
            token = data.draw(st.integers(0, 3))
            if act == "accept" and token in banned:
                with pytest.raises(hw.InvalidInput, match=f"token {token} would repeat a run of {n} tokens"):
                    rule.accept(token)
            elif act == "accept":
                rule.accept(token)
                context.fill([token])
                accepted += 1
            elif act == "cut" and accepted:
                context.truncate(1)
                rule.rollback(1)
                accepted -= 1
            elif act == "fill":
                context.fill([token])
                accepted = 0
            elif act == "copy":
                rule = rule.copy()


class OnlyLow:
    """A constraint of a program's own: ids below 8, ended after 20, forced at the third token."""

    def __init__(self, tokens: list[int] | None = None) -> None:
        self.tokens: list[int] = tokens or []

    def mask(self) -> np.ndarray:
        words = np.zeros(-(-V // 32), np.uint32)
        words[0] = 0xFF
        return words

    def accept(self, token: int) -> None:
        assert token < 8
        self.tokens.append(token)

    def rollback(self, n: int) -> None:
        del self.tokens[len(self.tokens) - n :]

    def copy(self) -> OnlyLow:
        return OnlyLow(list(self.tokens))

    def forced(self) -> list[int]:
        return [1, 2, 1, 2] if len(self.tokens) == 2 else []

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= 20


def test_ngrams_and_a_constraint_bind_together(engine: hw.Engine) -> None:
    rule = OnlyLow()
    tokens = ours(engine, [90, 91], hw.Argmax(), max_tokens=40, no_repeat_ngram_size=2, constrain=rule)
    assert tokens == rule.tokens
    assert len(tokens) == 20
    assert max(tokens) < 8
    assert tokens[2:5] == [1, 2, 1]  # the fourth forced token would repeat a run
    pairs = list(zip([91, *tokens], tokens))
    assert len(set(pairs)) == len(pairs)


def test_when_both_forbid_everything_it_says_so(engine: hw.Engine) -> None:
    with pytest.raises(hw.InvalidInput, match="no_repeat_ngram_size=1 forbids every token that the constraint allows"):
        ours(engine, [90], hw.Argmax(), max_tokens=40, no_repeat_ngram_size=1, constrain=OnlyLow())
    with pytest.raises(hw.InvalidInput, match="no_repeat_ngram_size=1 forbids every token here; give a larger one"):
        ours(engine, list(range(V)), hw.Argmax(), max_tokens=40, no_repeat_ngram_size=1)
    assert engine.stats().pages_held == 0


def test_ngrams_follow_forks_cuts_and_what_a_program_writes(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            generation = context.fill(random_tokens(V, 40, 1)).generate(
                hw.Argmax(), max_tokens=30, no_repeat_ngram_size=1
            )
            for _ in range(4):
                await anext(generation)
            twin = generation.fork()
            async with twin.context:
                twin.context.truncate(2)
                twin.context.fill([next(t for t in range(V) if t not in twin.context.tokens)])
                await twin.tokens()
                assert len(set(twin.context.tokens)) == len(set(twin.context.tokens[:40])) + len(
                    twin.context.tokens[40:]
                )
            await generation.tokens()
            new = context.tokens[40:]
            assert len(new) == 30
            assert len({*new}) == 30
            assert not {*new} & {*context.tokens[:40]}

    engine.run(program)


def test_a_grammar_and_ngrams(smollm2: hw.Engine) -> None:
    grammar = hw.Grammar.regex("[a-e]( [a-e]){7}")

    async def program(engine: hw.Engine, n: int) -> tuple[str, int]:
        async with engine.context() as context:
            generation = context.fill("Answer:").generate(hw.Argmax(), constrain=grammar, no_repeat_ngram_size=n)
            tokens = await generation.tokens()
            return await generation.text(), len(tokens) - 1 - len(set(pairwise(tokens)))

    async def schema(engine: hw.Engine) -> Any:
        async with engine.context() as context:
            one: dict[str, Any] = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
            one["additionalProperties"] = False
            return await context.fill("JSON:").generate(hw.Multinomial(seed=2), no_repeat_ngram_size=4).json(one)

    text, repeated = smollm2.run(program, 2)
    assert re.fullmatch("[a-e]( [a-e]){7}", text)
    assert repeated == 0
    assert smollm2.run(program, 0)[1] > 0
    assert smollm2.run(schema)["a"] in (1, 2)
