"""Beam search against transformers, token for token; its pages, its batches, and what it leaves behind."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor, NoRepeatNGramLogitsProcessor, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import headway as hw
from headway.base.errors import TokenBudgetExceeded
from headway.base.events import StepEvent
from headway.program.generation.ngrams import banned_by_ngrams
from headway.program.generation.sequences.beam_choice import drawn
from headway.program.generation.sequences.beams import Continuation, beam_search
from headway.program.generation.sequences.topk import topk
from headway.testing import random_model
from support.checks import random_tokens
from support.hf import random_hf, save_hf, variant
from support.properties import examples
from support.sweeps import swept

V = 97
LENGTH = 10
WORST = -1e8  # transformers' scores of sequences that have no probability are below

MANY = tuple(range(0, V, 2))  # so many end tokens that beams end all the time

# (num_beams, length_penalty, early_stopping, num_return_sequences, min_tokens, repetition_penalty, n-gram, end tokens)
SETTINGS = [
    (2, 1.0, False, 1, 0, 1.0, 0, (11,)),
    (2, 1.0, False, 2, 0, 1.0, 0, MANY),
    (4, 1.0, False, 4, 0, 1.0, 0, MANY),
    (2, 1.0, "never", 2, 0, 1.0, 0, MANY),
    (3, 1.0, "never", 3, 2, 1.0, 0, MANY),
    (4, 2.0, "never", 2, 0, 1.0, 3, (3, 4, 5, 6, 7, 8, 9)),
    (3, 0.0, "never", 3, 0, 1.0, 0, (3, 4, 5, 6, 7, 8, 9)),
    (4, 1.5, True, 4, 0, 1.0, 0, MANY),
    (4, -1.0, True, 4, 3, 1.0, 0, MANY),
    (5, 0.6, True, 5, 0, 1.4, 0, (1, 2, 3)),
    (3, 1.0, False, 2, 5, 0.7, 2, MANY),
    (4, 1.5, True, 3, 0, 1.2, 1, ()),
]
MODELS = [
    "llama-gqa-tied",
    "mistral-window",
    "llama3-rope",
    "llama-biases",
    "mistral-window-1",
    "qwen2-mqa",
    "qwen2-layer-types",
    "qwen3-tied-headdim10",
    "qwen3-window-layers",
]


@pytest.fixture
def engine() -> Iterator[hw.Engine]:
    with hw.Engine(random_model(), pages=128, threads=1) as made:
        yield made


def searched(engine: hw.Engine, prompt: list[int], **options: Any) -> list[Continuation]:
    async def program(engine: hw.Engine) -> list[Continuation]:
        async with engine.context() as context:
            return await beam_search(context.fill(prompt), **options)

    return engine.run(program)


@torch.no_grad()
def reference(
    model: PreTrainedModel, prompt: list[int], eos: tuple[int, ...], **options: Any
) -> list[tuple[tuple[int, ...], float, str]]:
    """What transformers finds: tokens without the end token, score, finish."""
    out: Any = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        pad_token_id=0,
        eos_token_id=list(eos) or None,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for ids, score, indices in zip(out.sequences, out.sequences_scores.tolist(), out.beam_indices):
        tokens = tuple(ids[len(prompt) : len(prompt) + int((indices >= 0).sum())].tolist())
        ended = bool(tokens) and tokens[-1] in eos
        found.append((tokens[:-1] if ended else tokens, score, "eos" if ended else "length"))
    return found


def assert_same(ours: list[Continuation], theirs: list[tuple[tuple[int, ...], float, str]]) -> None:
    assert [(b.tokens, b.finish) for b in ours] == [(tokens, finish) for tokens, _, finish in theirs]
    assert [b.score for b in ours] == pytest.approx([score for _, score, _ in theirs], rel=1e-3, abs=1e-4)


def compare(engine: hw.Engine, model: PreTrainedModel, prompt: list[int], setting: tuple[Any, ...], n: int) -> None:
    beams, penalty, early, returned, least, repetition, ngram, eos = setting
    both: dict[str, Any] = {
        "num_beams": beams,
        "length_penalty": penalty,
        "early_stopping": early,
        "num_return_sequences": returned,
        "repetition_penalty": repetition,
        "no_repeat_ngram_size": ngram,
    }
    # Without its cache: with a window of one token transformers' cache keeps all of them.
    theirs = reference(model, prompt, eos, max_new_tokens=n, min_new_tokens=least or None, use_cache=False, **both)
    assert_same(searched(engine, prompt, max_tokens=n, min_tokens=least, eos_ids=eos, **both), theirs)


# -- the same tokens -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", swept(MODELS, 2))
def test_a_search_finds_what_transformers_finds(name: str, tmp_path: Path) -> None:
    _, model = variant(name)
    with hw.Engine(save_hf(tmp_path, model), pages=128, threads=1) as engine:
        for i, setting in enumerate(SETTINGS):
            compare(engine, model, random_tokens(engine.vocab_size, 3 + 3 * i, i), setting, LENGTH)
            compare(engine, model, random_tokens(engine.vocab_size, 8, 50 + i), setting, LENGTH)
        assert engine.stats().pages_held == 0


class Shifted(LogitsProcessor):
    """Something of its own for each beam: away from the last token, by an amount that the sequence's length decides."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        rows = [changed(row.numpy(), tokens) for row, tokens in zip(scores, input_ids.tolist())]
        return torch.from_numpy(np.stack(rows))


def changed(row: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    bias = np.random.default_rng([len(tokens), tokens[-1]]).normal(0, 1, len(row)).astype(np.float32)
    return row + bias - 3 * (np.arange(len(row)) == tokens[-1])


def test_hooks_and_biases_are_those_of_transformers(tmp_path: Path) -> None:
    _, model = variant("llama-gqa-tied")
    words: dict[str, Any] = {
        "bad_words_ids": [[7], [3, 9]],
        "sequence_bias": {(11,): 2.5, (40, 2): -4.0, (60, 61): 3.0},
    }
    both: dict[str, Any] = {"num_beams": 4, "num_return_sequences": 4, "repetition_penalty": 1.3}
    awaited = list[int]()

    async def hook(row: np.ndarray, beam: hw.RunningBeam) -> np.ndarray:
        await asyncio.sleep(0)
        assert beam.context.tokens[len(prompt) :] == beam.generated
        awaited.append(len(beam.generated))
        return changed(row, beam.context.tokens)

    async def ours(engine: hw.Engine, **options: Any) -> list[Continuation]:
        async with engine.context().fill(prompt) as context:
            how = context.generate(max_tokens=LENGTH, stop=[5], stop_only=True, **{**both, **options})
            return await how.sequences()

    with hw.Engine(save_hf(tmp_path, model), pages=128, threads=1) as engine:
        for seed in range(4):
            prompt = random_tokens(V, 6 + seed, seed)
            theirs = reference(model, prompt, (5,), max_new_tokens=LENGTH, **both, **words)
            assert_same(replaced(engine.run(partial(ours, **words))), theirs)
            how = {**both, "repetition_penalty": 1.0}
            theirs = reference(model, prompt, (5,), max_new_tokens=LENGTH, logits_processor=[Shifted()], **how)
            assert_same(replaced(engine.run(partial(ours, logits=hook, repetition_penalty=1.0))), theirs)
        assert set(awaited) == set(range(LENGTH))
        assert engine.stats().pages_held == 0


def replaced(found: list[Continuation]) -> list[Continuation]:
    """As `reference` calls an end by one of its end tokens."""
    return [replace(one, finish="eos" if one.finish == "stop" else one.finish) for one in found]


BAD_HOOKS: dict[str, tuple[Callable[[np.ndarray, Any], Any], type[Exception], str]] = {
    "raises": (lambda row, beam: 1 / 0, ZeroDivisionError, "division"),
    "another shape": (lambda row, beam: row[1:], hw.InvalidInput, "shape"),
    "not numbers": (lambda row, beam: row * np.nan, hw.InvalidInput, "not a number"),
    "nothing possible": (lambda row, beam: row - np.inf, hw.InvalidMask, "-inf"),
    "changes the context": (lambda row, beam: beam.context.fill([1]) and None, hw.InvalidInput, "changed the context"),
}


@pytest.mark.parametrize("case", BAD_HOOKS)
def test_a_bad_hook_leaves_the_context_as_it_was(case: str) -> None:
    hook, error, says = BAD_HOOKS[case]

    async def program(engine: hw.Engine) -> tuple[int, ...]:
        async with engine.context().fill(range(9)) as context:
            with pytest.raises(error, match=says):
                await context.generate(num_beams=3, max_tokens=4, logits=hook).tokens()
            await context.generate(num_beams=3, max_tokens=4).tokens()
            return context.tokens[:9]

    with hw.Engine(random_model(), pages=64, threads=1) as engine:
        assert engine.run(program) == tuple(range(9))
        assert engine.stats().pages_held == 0
        with engine.context().fill([1]) as context, pytest.raises(hw.Unsupported, match="draws nothing"):
            context.generate(num_beams=2, prepare=lambda prepared: None)


def test_endings_are_of_both_kinds_in_these_settings(tmp_path: Path) -> None:
    _, model = variant("llama-gqa-tied")
    kinds: Counter[str] = Counter()
    for i, (beams, penalty, early, returned, _, _, _, eos) in enumerate(SETTINGS):
        options = {"num_beams": beams, "length_penalty": penalty, "early_stopping": early}
        prompt = random_tokens(V, 3 + 4 * i, i)
        found = reference(model, prompt, eos, max_new_tokens=LENGTH, num_return_sequences=returned, **options)
        kinds.update(finish for _, _, finish in found)
    assert min(kinds["eos"], kinds["length"]) > 3


@pytest.mark.parametrize("lively", [(), (4, 30, 51)])
def test_exact_ties_fall_as_they_do_in_transformers(tmp_path: Path, lively: tuple[int, ...]) -> None:
    """Every token outside `lively` has a logit of exactly 0, so that each choice is one among equals."""
    _, model = random_hf("llama", 3)
    head: Any = model.lm_head
    with torch.no_grad():
        head.weight[[i for i in range(V) if i not in lively]] = 0.0
    with hw.Engine(save_hf(tmp_path, model), pages=128, threads=1) as engine:
        for beams in range(2, 8):
            for eos in ((5,), MANY):
                compare(engine, model, random_tokens(V, 6, beams), (beams, 1.0, False, beams, 0, 1.0, 0, eos), 5)


def test_more_beams_than_there_are_tokens(tmp_path: Path) -> None:
    """transformers fills up with sequences that have no probability; they are no results here."""
    _, model = random_hf("llama", 1, vocab_size=3, bos_token_id=0, eos_token_id=1)
    with hw.Engine(save_hf(tmp_path, model), pages=64, threads=1) as engine:
        theirs = reference(model, [0, 1, 2], (1,), max_new_tokens=1, num_beams=6, num_return_sequences=6)
        real = [found for found in theirs if found[1] > WORST]
        assert len(real) == 3
        ours = searched(engine, [0, 1, 2], num_beams=6, num_return_sequences=6, max_tokens=1, eos_ids=[1])
        assert_same(ours, real)


@pytest.fixture(scope="module")
def real_model(smollm2_path: Path) -> PreTrainedModel:
    """transformers reading the default model's file, in float32."""
    with torch.device("meta"):  # names only: the reader wants a model with as many layers
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30, hidden_size=64, num_attention_heads=1))
    read = load_gguf_checkpoint(smollm2_path, return_tensors=True, model_to_load=names)
    model = LlamaForCausalLM(LlamaConfig(**read["config"])).float().eval()
    model.load_state_dict(read["tensors"], strict=False)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("The three primary colours are", {"num_beams": 4, "num_return_sequences": 2}),
        ("Once upon a time, in a village by the sea,", {"num_beams": 3, "no_repeat_ngram_size": 2}),
        (
            "Q: What is the capital of Italy?\nA:",
            {"num_beams": 3, "early_stopping": True, "repetition_penalty": 1.2},
        ),
    ],
)
def test_the_real_model_says_what_transformers_says(
    smollm2_float: hw.Engine, real_model: PreTrainedModel, text: str, options: dict[str, Any]
) -> None:
    prompt, eos = smollm2_float.tokenizer.encode(text), smollm2_float.eos_ids
    plain = {"repetition_penalty": 1.0, **options}
    theirs = reference(real_model, prompt, eos, max_new_tokens=8, **plain)
    assert_same(searched(smollm2_float, prompt, max_tokens=8, **options), theirs)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"no_repeat_ngram_size": 3}, {"repetition_penalty": 1.3}, {"num_beams": 2}])
def test_generate_has_the_words_of_transformers_on_the_real_model(
    smollm2_float: hw.Engine, real_model: PreTrainedModel, options: dict[str, Any]
) -> None:
    prompt = smollm2_float.tokenizer.encode("The cat sat on the mat. The cat sat on the mat. The cat sat")
    limit = len(prompt) + 8

    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            return await context.fill(prompt).generate(max_length=limit, **options).tokens()

    ids = torch.tensor([prompt])
    with torch.no_grad():
        found: Any = real_model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            eos_token_id=list(smollm2_float.eos_ids),
            max_length=limit,
            do_sample=False,
            **options,
        )
    assert smollm2_float.run(program) == found[0, len(prompt) :].tolist()


def test_a_stop_id_ends_a_beam_and_is_told_from_an_end_token(engine: hw.Engine) -> None:
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_tokens": 8}
    plain = searched(engine, [1, 2, 3], eos_ids=[*MANY], **options)
    named = searched(engine, [1, 2, 3], eos_ids=MANY[:20], stop_ids=MANY[15:], **options)
    assert [(b.tokens, b.score) for b in named] == [(b.tokens, b.score) for b in plain]
    assert {b.finish for b in plain} == {"eos"}
    assert {b.finish for b in named} <= {"eos", "stop"}
    only = searched(engine, [1, 2, 3], eos_ids=[], stop_ids=MANY, **options)
    assert {b.finish for b in only} == {"stop"}


def test_an_attention_mask_binds_every_pass(engine: hw.Engine) -> None:
    """Under a window of the model's own width the tokens are those of a model that has the window."""
    prompt = random_tokens(V, 20, 8)
    windowed = random_model(windows=(8, 8))
    options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_tokens": 10, "eos_ids": []}
    ours = searched(engine, prompt, attention_mask=hw.Mask.window(8), **options)
    with hw.Engine(windowed, pages=64, threads=1) as other:
        theirs = searched(other, prompt, **options)
    assert [b.tokens for b in ours] == [b.tokens for b in theirs]
    assert [b.tokens for b in ours] != [b.tokens for b in searched(engine, prompt, **options)]


# -- pages, batches, the context -----------------------------------------------------------------------------------


def watched(engine: hw.Engine, prompt: list[int], **options: Any) -> list[StepEvent]:
    with engine.events() as stream:
        searched(engine, prompt, **options)
        return list(iter(stream.poll, None))


def test_beams_share_the_pages_of_the_prompt_and_one_batch(engine: hw.Engine) -> None:
    prompt = random_tokens(V, 160, 1)  # 10 pages
    steps = watched(engine, prompt, num_beams=8, max_tokens=20, eos_ids=[])
    assert [step.passes for step in steps] == [1] + [8] * 19
    assert all(step.rows == step.passes for step in steps[1:])
    held = [step.pages_held for step in steps]
    assert max(held) <= 10 + 8 * 2  # each beam writes two pages
    assert engine.stats().pages_held == 0


def test_a_search_with_few_pages_finds_the_same(engine: hw.Engine) -> None:
    prompt, options = random_tokens(V, 40, 2), {"num_beams": 6, "num_return_sequences": 6, "max_tokens": 12}
    plenty = searched(engine, prompt, eos_ids=[5], **options)
    with hw.Engine(engine.decoder, pages=8, threads=1) as tight:
        few = searched(tight, prompt, eos_ids=[5], **options)
        assert tight.stats().preemptions > 0
        assert tight.stats().pages_held == 0
    assert [beam.tokens for beam in few] == [beam.tokens for beam in plenty]


@pytest.mark.parametrize("computed", [0, 16, 21, 32])
@pytest.mark.parametrize("adopt", [False, True])
def test_the_context_is_left_as_it_was_or_holds_the_best(engine: hw.Engine, computed: int, adopt: bool) -> None:
    prompt = random_tokens(V, 32, 3)

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            if computed:
                await context.fill(prompt[:computed]).flush()
            context.fill(prompt[computed:])
            before = (context.tokens, context.pending, context.seq_len)
            best, *_ = await beam_search(context, num_beams=3, max_tokens=20, eos_ids=[], adopt=adopt)
            if not adopt:
                assert (context.tokens, context.pending, context.seq_len) == before
            else:
                assert context.tokens == (*prompt, *best.tokens)
                assert (context.seq_len, context.pending) == (52, ())
            assert engine.stats().pages_held == (-(-context.seq_len // 16))
            follow = await context.generate(hw.Argmax(), max_tokens=4).tokens()
        async with engine.context() as fresh:
            fresh.fill([*prompt, *(best.tokens if adopt else ())])
            assert await fresh.generate(hw.Argmax(), max_tokens=4).tokens() == follow

    engine.run(program)


def test_adopting_takes_the_beams_full_pages_over(engine: hw.Engine) -> None:
    prompt = random_tokens(V, 32, 4)

    async def program(engine: hw.Engine) -> tuple[int, int]:
        async with engine.context() as context:
            before = engine.stats()
            await beam_search(context.fill(prompt), num_beams=3, max_tokens=20, eos_ids=[], adopt=True)
            after = engine.stats()
            return after.cache_hits - before.cache_hits, after.tokens - before.tokens

    hits, computed = engine.run(program)
    assert hits == 3  # 52 tokens: three full pages
    assert computed == 32 + 19 * 3 + 4


# -- what is left behind -------------------------------------------------------------------------------------------


def test_an_error_in_the_middle_leaves_nothing(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context(token_budget=30) as context:
            context.fill(random_tokens(V, 20, 5))
            held = engine.stats().pages_held
            with pytest.raises(TokenBudgetExceeded):
                await beam_search(context, num_beams=4, max_tokens=50, eos_ids=[])
            assert (engine.stats().pages_held, engine.stats().queued) == (held, 0)
            assert len(context.pending) == 20

    engine.run(program)
    assert engine.stats().pages_held == 0


@pytest.mark.parametrize("moment", [0, 1, 2, 5, 9])
def test_a_cancelled_search_leaves_nothing(engine: hw.Engine, moment: int) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            await context.fill(random_tokens(V, 20, 6)).flush()
            held, start = engine.stats().pages_held, engine.stats().steps
            task = asyncio.create_task(beam_search(context, num_beams=4, max_tokens=900, eos_ids=[]))
            while engine.stats().steps < start + moment:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (engine.stats().pages_held, engine.stats().queued) == (held, 0)
            assert context.seq_len == 20
            await context.forward().input([1]).execute()  # it is not busy

    engine.run(program)
    assert engine.stats().pages_held == 0


def test_logits_that_are_no_numbers_end_the_search(tmp_path: Path) -> None:
    _, model = random_hf("llama", 0)
    with torch.no_grad():
        model.lm_head.weight[7] = float("nan")  # type: ignore[union-attr,operator]
    with hw.Engine(save_hf(tmp_path, model), pages=16, threads=1) as engine:
        with pytest.raises(hw.PassFailed, match="are NaN"):
            searched(engine, [1, 2, 3], num_beams=2, max_tokens=3)
        assert engine.stats().pages_held == 0


def test_when_every_token_is_forbidden_it_says_so(engine: hw.Engine) -> None:
    with pytest.raises(hw.InvalidInput, match=r"no sequence is possible: after 1 tokens .* relax no_repeat_ngram_size"):
        searched(engine, list(range(V)), num_beams=2, max_tokens=3, no_repeat_ngram_size=1, eos_ids=[])
    assert engine.stats().pages_held == 0


# -- sampling ------------------------------------------------------------------------------------------------------


def test_draws_without_replacement_have_their_exact_distribution() -> None:
    probs = np.array([0.5, 0.1, 0.0, 0.25, 0.15])
    scores = np.log(probs, where=probs > 0, out=np.full(5, -np.inf)).astype(np.float32)
    runs = 4000
    found = Counter(tuple(drawn(scores, 3, seed, 7).tolist()) for seed in range(runs))
    orders = list(itertools.permutations((0, 1, 3, 4), 3))
    assert set(found) <= set(orders)
    expected = [probs[a] * probs[b] / (1 - probs[a]) * probs[c] / (1 - probs[a] - probs[b]) for a, b, c in orders]
    assert stats.chisquare([found[o] for o in orders], np.array(expected) * runs).pvalue > 1e-4


def test_what_has_no_probability_is_drawn_last_by_index() -> None:
    scores = np.array([-np.inf, 0.0, -np.inf, -1e9, 1.0], np.float32)
    assert sorted(drawn(scores, 2, 1, 1).tolist()) == [1, 4]
    assert drawn(scores, 5, 1, 1).tolist()[2:] == [0, 2, 3]
    assert drawn(np.full(3, -np.inf, np.float32), 2, 1, 1).tolist() == [0, 1]


@pytest.mark.parametrize("filters", swept([{"temperature": 2.0, "top_k": 1}, {"temperature": 2.0, "top_p": 0.3}]))
def test_a_sampled_search_has_transformers_distribution(tmp_path: Path, filters: dict[str, Any]) -> None:
    """Few tokens are asked for, so that it shows how many are kept at least: one more than there are end tokens."""
    _, model = random_hf("llama", 5, vocab_size=11, bos_token_id=0, eos_token_id=1)
    ends = [1, 2, 3]
    prompt, ours, theirs = [6, 7, 4, 5], Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()
    torch.manual_seed(0)
    many = torch.tensor([prompt] * 4000)
    options: dict[str, Any] = {"num_beams": 2, "do_sample": True, **filters}
    with torch.no_grad():
        ids: Any = model.generate(
            many,
            attention_mask=torch.ones_like(many),
            max_new_tokens=3,
            eos_token_id=ends,
            pad_token_id=1,
            **{"top_k": 0, **options},
        )
    for row in ids[:, len(prompt) :].tolist():
        theirs[tuple(itertools.takewhile(lambda token: token not in ends, row))] += 1
    with hw.Engine(save_hf(tmp_path, model), pages=64, threads=1) as engine:

        async def program(engine: hw.Engine) -> None:
            async with engine.context() as context:
                await context.fill(prompt).flush()
                for seed in range(600):
                    (best,) = await beam_search(context, max_tokens=3, eos_ids=ends, seed=seed, **options)
                    assert best.seed == seed
                    ours[best.tokens] += 1

        engine.run(program)
    assert set(ours) <= set(theirs)
    common = [path for path, count in theirs.items() if count >= 20]
    table = [[counts[path] for path in common] for counts in (ours, theirs)]
    for line, counts in zip(table, (ours, theirs)):
        line.append(counts.total() - sum(line) + 1)
    assert len(common) > 5
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_a_seed_gives_the_same_beams_again(engine: hw.Engine) -> None:
    options: dict[str, Any] = {"num_beams": 3, "max_tokens": 6, "do_sample": True, "num_return_sequences": 3}
    first = searched(engine, [1, 2, 3], seed=9, **options)
    assert searched(engine, [1, 2, 3], seed=9, **options) == first
    free = searched(engine, [1, 2, 3], **options)
    assert free[0].seed is not None
    assert free != first
    assert searched(engine, [1, 2, 3], seed=free[0].seed, **options) == free


# -- n-grams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_ngrams_ban_what_transformers_bans(n: int) -> None:
    for seed in range(60):
        tokens = random_tokens(4, seed % 20 + 1, seed)
        scores = NoRepeatNGramLogitsProcessor(n)(torch.tensor([tokens]), torch.zeros(1, 4))
        assert banned_by_ngrams(tokens, n) == set(torch.nonzero(scores[0] == -torch.inf).flatten().tolist())


def test_ngrams_of_size_0_ban_nothing_and_negative_ones_are_refused() -> None:
    assert banned_by_ngrams([1, 1, 1], 0) == set()
    assert banned_by_ngrams([], 1) == set()
    with pytest.raises(hw.InvalidInput, match="n is -1; it must be an integer of at least 0"):
        banned_by_ngrams([1], -1)


# -- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_beams": 0}, r"num_beams is 0; it must be an integer in \[1, 1024\]"),
        ({"num_beams": 1}, "num_beams is 1; beam search takes 2 or more"),
        ({"num_beams": 4000}, "num_beams is 4000"),
        ({"num_return_sequences": 3}, "num_return_sequences is 3; with num_beams=2 it is at most 2"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": 2000}, "max_tokens is 2000; after the 3 tokens .* limit of 1024 leaves 1021"),
        ({"min_tokens": -1}, "min_tokens is -1"),
        ({"min_tokens": 9}, "min_tokens is 9 and max_tokens 4"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": -1e6}, "length_penalty is -1000000.0; 4 to that power"),
        ({"early_stopping": "always"}, "early_stopping is 'always'; it must be true, false or"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0; it must be above 0"),
        ({"no_repeat_ngram_size": -2}, "no_repeat_ngram_size is -2"),
        ({"eos_ids": [97]}, r"eos_ids\[0\] is 97; this model's token ids are 0 to 96"),
        ({"eos_ids": range(97)}, "eos_ids has 97 of 97 tokens"),
        ({"temperature": 0.7}, "temperature=0.7 has no effect without sampling; give do_sample=True"),
        ({"seed": 3}, "seed=3 has no effect without sampling"),
        ({"do_sample": True, "temperature": 0.0}, "temperature is 0.0; it must be above 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p is 1.5"),
        ({"do_sample": True, "top_k": -1}, "top_k is -1"),
        ({"do_sample": True, "seed": -1}, "seed is -1"),
    ],
)
def test_bad_values_are_refused_in_a_sentence(engine: hw.Engine, options: dict[str, Any], says: str) -> None:
    with pytest.raises(hw.InvalidInput, match=says):
        searched(engine, [1, 2, 3], **{"num_beams": 2, "max_tokens": 4, **options})
    assert (engine.stats().pages_held, engine.stats().passes) == (0, 0)


@pytest.mark.parametrize("options", [{"num_beams": 2.5}, {"do_sample": 1}, {"length_penalty": "1"}, {"eos_ids": "x"}])
def test_values_of_the_wrong_type_are_refused(engine: hw.Engine, options: dict[str, Any]) -> None:
    with pytest.raises(hw.WrongType):
        searched(engine, [1, 2, 3], **{"num_beams": 2, "max_tokens": 4, **options})


def test_an_empty_context_has_nothing_to_continue(engine: hw.Engine) -> None:
    with pytest.raises(hw.InvalidInput, match="the context is empty"):
        searched(engine, [], num_beams=2, max_tokens=4)


def test_a_busy_context_is_refused(engine: hw.Engine) -> None:
    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            context.fill(random_tokens(V, 900, 0))
            with engine._lock:
                running = context.forward().input([1]).execute()
                with pytest.raises(hw.ContextBusy):
                    await beam_search(context, num_beams=2, max_tokens=4)
            await running

    engine.run(program)


@given(
    count=st.one_of(st.integers(1, 40), st.sampled_from((97, 300, 1000, 9000))),
    levels=st.sampled_from((1, 2, 3, 20, 10**6)),
    share=st.floats(0, 1),
    seed=st.integers(0, 1 << 30),
)
@settings(deadline=None, max_examples=examples(80))
def test_ties_fall_as_torchs_topk_lets_them_fall(count: int, levels: int, share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, levels, count).astype(np.float32)
    scores[rng.random(count) < 0.1] = -np.inf
    k = max(1, min(count, int(share * min(count, 60))))
    assert topk(scores, k).tolist() == torch.topk(torch.from_numpy(scores), k).indices.tolist()
