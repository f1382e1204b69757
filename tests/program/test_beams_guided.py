"""Beams under constraints, with stop strings and with probes: against transformers, and against every sequence there
is on a small vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedModel

import headway as hw
from headway.testing import random_model
from support.checks import random_tokens
from support.decoders import EOS, decoder_folder
from support.hf import random_hf, save_hf

V = 97
Allows = Callable[[tuple[int, ...]], Sequence[int]]


class Rule:
    """A constraint of one's own: which tokens may follow those so far, and where nothing follows."""

    def __init__(self, vocab: int, allows: Allows, ends: Callable[[tuple[int, ...]], bool] = lambda _: False) -> None:
        self.vocab, self.allows, self.ends, self.seen = vocab, allows, ends, ()

    def mask(self) -> np.ndarray:
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        bits[list(self.allows(self.seen))] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        assert token in self.allows(self.seen)
        self.seen = (*self.seen, token)

    def rollback(self, n: int) -> None:
        self.seen = self.seen[: len(self.seen) - n]

    @property
    def finished(self) -> bool:
        return self.ends(self.seen)

    def copy(self) -> Rule:
        twin = Rule(self.vocab, self.allows, self.ends)
        twin.seen = self.seen
        return twin


def found_by(engine: hw.Engine, prompt: list[int], *args: Any, **options: Any) -> list[hw.Continuation]:
    async def program(engine: hw.Engine) -> list[hw.Continuation]:
        async with engine.context() as context:
            found: Any = context.fill(prompt).generate(*args, **options)
            sequences = await found.sequences()
            assert context.tokens == (*prompt, *sequences[0].tokens)
            return sequences

    found = engine.run(program)
    assert engine.stats().pages_held == 0
    return found


@torch.no_grad()
def reference(model: PreTrainedModel, prompt: list[int], **options: Any) -> list[tuple[tuple[int, ...], float]]:
    """transformers' sequences, end tokens and stop strings included, and their scores."""
    ids = torch.tensor([prompt])
    own: Any = model
    out: Any = own.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True, output_scores=True,
        **{"pad_token_id": 0, **options},
    )  # fmt: skip
    lengths = (out.beam_indices >= 0).sum(dim=1).tolist()
    rows = [tuple(row[len(prompt) : len(prompt) + n].tolist()) for row, n in zip(out.sequences, lengths, strict=True)]
    return [(row, score) for row, score in zip(rows, out.sequences_scores.tolist(), strict=True) if score > -1e8]


# -- constraints ---------------------------------------------------------------------------------------------------


def every_third(seen: tuple[int, ...]) -> list[int]:
    """Depends on all tokens so far; two of them end a text, from the third token on."""
    return [t for t in range(V) if (t + sum(seen)) % 3 == 0 and (t > 3 or len(seen) > 2)]


def narrow(seen: tuple[int, ...]) -> list[int]:
    """So few tokens that there are fewer sequences than beams at first."""
    return [3] if len(seen) > 4 else [(7 * len(seen) + sum(seen)) % 90 + 5, 3 if len(seen) > 2 else 4]


@pytest.mark.parametrize(
    ("allows", "options"),
    [
        (every_third, {"num_beams": 2}),
        (every_third, {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.3}),
        (every_third, {"num_beams": 3, "early_stopping": True, "repetition_penalty": 1.3, "num_return_sequences": 3}),
        (every_third, {"num_beams": 3, "early_stopping": "never", "no_repeat_ngram_size": 1}),
        (narrow, {"num_beams": 4, "num_return_sequences": 4}),
        (narrow, {"num_beams": 6, "num_return_sequences": 6, "length_penalty": -1.0}),
    ],
)
def test_a_constraint_allows_what_transformers_is_told_to_allow(
    tmp_path: Path, allows: Allows, options: dict[str, Any]
) -> None:
    _, model = random_hf("llama", 2, eos_token_id=3)
    with hw.Engine(save_hf(tmp_path, model), pages=128, threads=1) as engine:
        for seed in range(4):
            prompt = random_tokens(V, 4 + 5 * seed, seed)

            def allowed(_: int, ids: torch.Tensor, start: int = len(prompt)) -> Sequence[int]:
                return allows(tuple(ids[start:].tolist())) or [0]

            options = {"repetition_penalty": 1.0, **options}
            theirs = reference(
                model, prompt, max_new_tokens=7, eos_token_id=3, prefix_allowed_tokens_fn=allowed, **options
            )
            rule: Any = Rule(V, allows)
            ours = found_by(engine, prompt, max_tokens=7, stop=[3], constrain=rule, **options)
            ended = [(*one.tokens, *([3] if one.finish == "stop" else [])) for one in ours]
            assert ended == [tokens for tokens, _ in theirs]
            assert [one.score for one in ours] == pytest.approx([score for _, score in theirs], rel=1e-3, abs=1e-4)
            assert rule.seen == ours[0].tokens  # as after a single sequence


def all_sequences(
    model: PreTrainedModel, prompt: list[int], rule: Rule, length: int, eos: int
) -> dict[tuple[tuple[int, ...], str], float]:
    """Every sequence of a small vocabulary that the rule allows, with its log-probability and why it ends."""
    found: dict[tuple[tuple[int, ...], str], float] = {}
    own: Any = model

    def grow(tokens: tuple[int, ...], total: float) -> None:
        if rule.ends(tokens) or len(tokens) == length:
            found[tokens, "constraint" if rule.ends(tokens) else "length"] = total / len(tokens) ** 0.7
            return
        with torch.no_grad():
            logps = own(torch.tensor([[*prompt, *tokens]])).logits[0, -1].double().log_softmax(-1).tolist()
        for token in rule.allows(tokens):
            if token == eos:
                found[tokens, "stop"] = (total + logps[token]) / (len(tokens) + 1) ** 0.7
            else:
                grow((*tokens, token), total + logps[token])

    grow((), 0.0)
    return found


def test_with_enough_beams_every_allowed_sequence_is_found_in_order(tmp_path: Path) -> None:
    _, model = random_hf("llama", 6, vocab_size=5, bos_token_id=0, eos_token_id=1)
    rule = Rule(
        5,
        lambda seen: [t for t in range(5) if (t + sum(seen)) % 4 != 3 and not (t == 1 and not seen)],
        lambda seen: seen[-2:] == (2, 2) or seen[-1:] == (4,),
    )
    with hw.Engine(save_hf(tmp_path, model), pages=300, threads=1) as engine:
        expected = all_sequences(model, [0, 3, 2], rule, 4, 1)
        ours = found_by(
            engine, [0, 3, 2], num_beams=160, num_return_sequences=160, max_tokens=4, length_penalty=0.7,
            constrain=rule, stop=[1],
        )  # fmt: skip
    assert {finish for _, finish in expected} == {"constraint", "length", "stop"}
    assert {(one.tokens, one.finish) for one in ours} == set(expected)
    for one in ours:
        assert one.score == pytest.approx(expected[one.tokens, one.finish], rel=1e-4, abs=1e-5)
    assert sorted((one.score for one in ours), reverse=True) == [one.score for one in ours]


def test_a_grammar_binds_every_beam_of_the_real_model(smollm2: hw.Engine) -> None:
    pattern = r" [A-Z][a-z]{2,8}(, [A-Z][a-z]{2,8}){2}\."
    grammar = hw.Grammar.regex(pattern)
    prompt = smollm2.tokenizer.encode("Three European capitals:")

    async def log_probability(tokens: tuple[int, ...]) -> float:
        async with smollm2.context() as context:
            forward = context.fill(prompt).forward().input(tokens)
            handles = [forward.probe(i - 1, hw.Logprob(token)) for i, token in enumerate(tokens)]
            handles[0] = forward.probe(-len(tokens) - 1, hw.Logprob(tokens[0]))
            out = await forward.execute()
            return sum(float(out.logprobs(handle)[0]) for handle in handles)

    ours = found_by(smollm2, prompt, num_beams=4, num_return_sequences=4, max_tokens=30, constrain=grammar)
    assert len({one.text for one in ours}) == 4
    for one in ours:
        assert one.finish == "constraint"
        assert re.fullmatch(pattern, one.text), one.text
        expected = smollm2.run(lambda _, tokens=one.tokens: log_probability(tokens)) / len(one.tokens)
        assert one.score == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("sampler", [None, hw.TopP(0.95, temperature=1.5, seed=3)])
def test_constraints_bind_sampled_beams_and_penalties(sampler: hw.Sampler | None) -> None:
    with hw.Engine(random_model(), pages=128, threads=1) as engine:
        rule = Rule(V, lambda seen: [t for t in range(V) if t % 2 == len(seen) % 2])
        ours = found_by(
            engine, random_tokens(V, 9, 1), sampler, num_beams=4, num_return_sequences=4, max_tokens=8,
            constrain=rule, repetition_penalty=1.2,
        )  # fmt: skip
        assert len(ours) == 4
        for one in ours:
            assert [t % 2 for t in one.tokens] == [i % 2 for i in range(len(one.tokens))]


def test_a_constraint_that_ends_before_the_first_token_and_one_that_allows_nothing() -> None:
    with hw.Engine(random_model(), pages=32, threads=1) as engine:
        (only,) = found_by(engine, [1, 2], num_beams=3, max_tokens=4, constrain=Rule(V, lambda _: [5], lambda _: True))
        assert (only.tokens, only.finish, only.score) == ((), "constraint", 0.0)
        with pytest.raises(hw.InvalidInput, match=r"no sequence is possible: after \d tokens .* the constraint"):
            found_by(engine, [1, 2], num_beams=3, max_tokens=4, constrain=Rule(V, lambda seen: [] if seen else [5]))
        assert engine.stats().pages_held == 0


def test_a_constraint_that_cannot_be_copied_is_refused() -> None:
    class Anything:
        def mask(self) -> None:
            return None

        def accept(self, token: int) -> None:
            pass

        def rollback(self, n: int) -> None:
            pass

    with hw.Engine(random_model(), pages=32, threads=1) as engine:
        with pytest.raises(hw.Unsupported, match=r"Anything has no copy\(\), so two texts cannot follow it"):
            found_by(engine, [1, 2], num_beams=2, max_tokens=4, constrain=Anything())
        assert engine.stats().pages_held == 0


# -- stop strings --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[hw.Engine, Any, Any]]:
    """A decoder whose tokens are bytes, here and in transformers."""
    folder = decoder_folder(tmp_path_factory.mktemp("bytes"))
    with hw.Engine(str(folder), dtype="float32", pages=256, threads=1) as engine:
        model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        yield engine, model, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"num_beams": 4, "num_return_sequences": 4},
        {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "length_penalty": 0.2},
        {"num_beams": 3, "num_return_sequences": 2, "early_stopping": "never", "length_penalty": 1.5},
    ],
)
def test_stop_strings_end_beams_where_they_end_those_of_transformers(
    spoken: tuple[hw.Engine, Any, Any], options: dict[str, Any]
) -> None:
    """Under a constraint as well, which leaves letters: stop strings have other bounds there in broken characters."""
    engine, model, tokenizer = spoken
    letters = sorted({*engine.tokenizer.encode("abcdefghijklmnopqrstuvwxyz", special=False), EOS})
    ends = set()
    for seed in range(6):
        prompt = engine.tokenizer.encode("THE QUICK BROWN FOX"[seed:])
        rule = Rule(engine.vocab_size, lambda _: letters)
        common = {**options, "repetition_penalty": 1.0}
        plain = found_by(engine, prompt, max_tokens=8, constrain=rule, num_beams=4, num_return_sequences=4)
        # Two letters of a beam each, so that many stop, and early.
        stops = [one.text[at : at + 2] for one, at in zip(plain, (2, 4, 1, 3)) if len(one.text) > at + 1]
        theirs = reference(
            model, prompt, max_new_tokens=8, stop_strings=stops, tokenizer=tokenizer, eos_token_id=EOS,
            prefix_allowed_tokens_fn=lambda *_: letters, **common,
        )  # fmt: skip
        ours = found_by(engine, prompt, max_tokens=8, stop=stops, constrain=rule.copy(), **common)
        assert len(ours) == len(theirs)
        for one, (tokens, score) in zip(ours, theirs, strict=True):
            whole = tokenizer.decode(tokens, skip_special_tokens=True)
            cut = min((at for stop in stops if (at := whole.find(stop)) >= 0), default=len(whole))
            assert one.score == pytest.approx(score, rel=1e-3, abs=1e-4)
            assert one.text == engine.tokenizer.decode(one.tokens) == whole[:cut]
            ends.add(one.finish)
            assert (one.finish == "stop") == (cut < len(whole))
    assert {"stop", "length"} <= ends


def test_tokens_that_hold_any_part_of_a_stop_leave(smollm2: hw.Engine) -> None:
    prompt = smollm2.tokenizer.encode("Q: What is the capital of Italy?\nA:")
    ours = found_by(
        smollm2, prompt, num_beams=3, num_return_sequences=3, max_tokens=10, stop=["ital of", "aly"], length_penalty=0.0
    )
    stopped = [one for one in ours if one.finish == "stop"]
    assert {one.text for one in stopped} >= {" The cap", " It"}
    for one in stopped:  # " capital" and " Italy" are tokens
        assert smollm2.tokenizer.decode(one.tokens) == one.text.removesuffix(" cap").removesuffix(" It")


# -- probes --------------------------------------------------------------------------------------------------------


def test_a_beam_has_what_was_read_before_each_of_its_tokens() -> None:
    prompt = random_tokens(V, 20, 4)
    kinds = (hw.Logits(), hw.Entropy(), hw.Hidden(1), hw.Ranking(2, ids=[5]), hw.Logits(masked=True))
    even = Rule(V, lambda _: range(0, V, 2))
    with hw.Engine(random_model(), pages=128, threads=1) as engine:
        options: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "max_tokens": 6, "stop": [4, 8, 12, 16]}
        ours = found_by(engine, prompt, probe=kinds, constrain=even, **options)
        plain = found_by(engine, prompt, constrain=even, **options)
        assert [one.tokens for one in ours] == [one.tokens for one in plain]

        async def by_hand(engine: hw.Engine, tokens: list[int]) -> tuple[np.ndarray, float, np.ndarray]:
            async with engine.context() as context:
                forward = context.fill(tokens).forward()
                handles = forward.probe(-1, hw.Logits()), forward.probe(-1, hw.Entropy()), forward.probe(-1, kinds[2])
                out = await forward.execute()
                return out.logits(handles[0]), out.entropy(handles[1]), out.hidden(handles[2])

        for one in ours:
            assert len(one.probes) == len(one.tokens) + (one.finish == "stop")
            for i, (logits, entropy, hidden, ranked, masked) in enumerate(one.probes):
                theirs = engine.run(by_hand, [*prompt, *one.tokens[:i]])
                np.testing.assert_allclose(logits, theirs[0], rtol=1e-4, atol=1e-5)
                assert entropy == pytest.approx(theirs[1], rel=1e-4)
                np.testing.assert_allclose(hidden, theirs[2], rtol=1e-4, atol=1e-5)
                assert [rank.id for rank in ranked.best] == np.argsort(-logits, kind="stable")[:2].tolist()
                assert (ranked.drawn, ranked.ids[0].id) == ((), 5)
                assert np.isneginf(masked[1::2]).all()
                np.testing.assert_array_equal(masked[::2], logits[::2])


def test_one_probe_of_a_sampled_search_and_one_that_needs_a_sampler() -> None:
    with hw.Engine(random_model(), pages=128, threads=1) as engine:
        ours = found_by(engine, [1, 2, 3], hw.Multinomial(seed=1), num_beams=2, max_tokens=4, probe=hw.Entropy())
        assert [type(value) for value in ours[0].probes] == [float] * 4
        with pytest.raises(hw.Unsupported, match=r"Ranking\(processed=True\) ranks tokens as a sampler sees them"):
            found_by(engine, [1, 2], num_beams=2, max_tokens=4, probe=[hw.Entropy(), hw.Ranking(processed=True)])
