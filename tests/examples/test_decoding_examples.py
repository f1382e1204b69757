"""Examples that change how tokens are drawn or how many a pass gives: guidance, watermarks, samplers, speculation."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

import headway as hw
from support.checks import random_tokens
from support.examples import load
from support.hf import save_hf, variant


def test_guidance_follows_the_instruction_and_is_that_of_transformers(run: Any, tmp_path: Path) -> None:
    found, printed = run("classifier_free_guidance")
    asked = [sum(word in found[scale] for word in ("dark", "sad")) for scale in (0.0, 2.0)]
    assert asked[0] == 0 < asked[1]
    assert "144 passes for 72 tokens" in printed

    _, model = variant("llama-gqa-tied")
    prompt, without = random_tokens(97, 9, 1), random_tokens(97, 4, 2)
    other: Any = torch.tensor([without])
    guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.5, model, unconditional_ids=other)
    generate: Any = model.generate
    theirs = generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, logits_processor=[guide], eos_token_id=None
    )

    async def ours(engine: hw.Engine) -> list[int]:
        async with engine.context().fill(prompt) as ctx, engine.context().fill(without) as other:
            return await load("classifier_free_guidance").guided(ctx, other, 2.5, hw.Argmax(), 12)

    with hw.Engine(save_hf(tmp_path, model), dtype="float32", pages=16, threads=1) as engine:
        assert engine.run(ours) == theirs[0, len(prompt) :].tolist()


def test_contrast_repeats_less_and_takes_only_plausible_tokens(run: Any) -> None:
    found, _ = run("contrastive_decoding")
    module = load("contrastive_decoding")
    assert module.repeated(found["contrastive"]) < module.repeated(found["greedy"])
    scores = module.contrast(np.log([0.5, 0.3, 0.15, 0.05]), np.log([0.5, 0.1, 0.1, 0.01]))
    assert scores == pytest.approx(np.log([1, 3, 1.5, 5]))
    assert module.contrast(np.log([0.6, 0.36, 0.04]), np.log([0.9, 0.09, 0.01]))[2] == -np.inf


def test_the_given_text_wins_over_what_was_learned(run: Any) -> None:
    found, _ = run("context_aware_decoding")
    assert [text for text, _ in found.values()] == [" Paris", " Paris", " Lyon", " Lyon"]
    odds = [odd for _, odd in found.values()]
    assert odds == sorted(odds)


@pytest.mark.slow
def test_the_detectors_find_marked_text_only(run: Any) -> None:
    scores, _ = run("green_list_watermark")
    assert scores["plain"] < 4 < scores["marked"]
    values, _ = run("gumbel_watermark")
    assert values["marked"] < 1e-6
    assert values["plain"] > 1e-3
    found = [load("gumbel_watermark").p_value(random_tokens(49152, 40, seed), 49152) for seed in range(20)]
    assert 0.2 < np.mean(found) < 0.8, "p-values of text without a mark are uniform"
    zs = [load("green_list_watermark").z_score(random_tokens(49152, 40, seed), 49152) for seed in range(20)]
    assert abs(np.mean(zs)) < 1


def test_own_samplers_do_what_they_say(run: Any, smollm2: hw.Engine) -> None:
    found, _ = run("own_samplers")
    assert len({tuple(tokens) for tokens in found.values()}) > 3
    module = load("own_samplers")
    logits = np.full(smollm2.vocab_size, -np.inf)
    logits[:4] = np.log([0.5, 0.3, 0.15, 0.05])
    with smollm2.context().fill([1, 2, 3, 0, 1, 2, 3]) as ctx:
        gen = ctx.generate(hw.Multinomial(seed=0))
        assert np.isfinite(module.top_a(logits, gen, a=0.7))[:4].tolist() == [True, True, False, False]  # 0.7 · 0.5²
        assert module.edt(logits, gen)[:4] == pytest.approx(logits[:4] / (1.2 * 0.8 ** (0.5 / 1.1421)), rel=1e-3)
        kept = [np.flatnonzero(np.isfinite(module.xtc(logits.copy(), gen, probability=p))).tolist() for p in (0, 1)]
        assert kept == [[0, 1, 2, 3], [2, 3]]  # the least likely of three good choices stays, and what was not good
        changed = logits.copy()
        module.dry(changed, gen)
    assert changed[:4] == pytest.approx(logits[:4] - [1.5 * 1.75, 0, 0, 0])  # 0 followed the last three tokens before


def test_jacobi_decoding_is_greedy_decoding_in_fewer_passes(run: Any) -> None:
    (found, greedy, passes), _ = run("jacobi_decoding")
    assert found == greedy
    assert passes < 0.6 * len(found)


def test_drafters_change_the_passes_and_not_the_text(run: Any) -> None:
    found, _ = run("speculative_decoding")
    plain, most, _ = found.pop("none")
    assert most == len(plain) == load("speculative_decoding").NEW_TOKENS
    for name, (tokens, passes, stats) in found.items():
        assert tokens == plain, name
        assert passes == most - stats.accepted
    assert found["PromptLookup()"][1] < most / 3
    assert found["DraftModel(4 bits)"][1] < most / 3


def test_drafts_under_a_grammar_save_more_passes_than_forced_tokens_alone(run: Any) -> None:
    found, _ = run("grammar_speculation")
    (text, tokens, forced), (again, _, drafted) = found.values()
    assert text == again
    assert list(json.loads(text)) == list(load("grammar_speculation").FIELDS)
    assert drafted < forced < tokens


def test_pairs_that_repeat_are_counted() -> None:
    tokens = [1, 2, 1, 2, 3]
    assert load("contrastive_decoding").repeated(tokens) == 1 - len(set(pairwise(tokens))) / 4
