"""Every family and every way its config can differ: logits against transformers, however the rows arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

import headway as hw
from support.checks import all_logits, assert_close, logit_rows, random_tokens, reference_logits
from support.hf import NAMES, save_hf, variant

N = 37  # longer than two pages and every small window, and a multiple of nothing
PAGES = 64


@dataclass(frozen=True, eq=False)
class Case:
    """One variant: transformers' model, its folder, Headway's engine and what transformers says about one prompt."""

    model: PreTrainedModel
    folder: Path
    engine: hw.Engine
    tokens: list[int]
    expected: np.ndarray  # [N, V]


CASES = [*NAMES, *(pytest.param(f"{name}, torch", marks=pytest.mark.slow) for name in NAMES)]


@pytest.fixture(autouse=True)
def path(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a test are of its case's path."""
    monkeypatch.setenv("HEADWAY_NATIVE", "off" if case.engine.info.runner == "torch" else "require")


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    name, _, path = request.param.partition(", ")
    _, model = variant(name)
    folder = save_hf(tmp_path_factory.mktemp(name), model)
    tokens = random_tokens(model.config.vocab_size, N)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEADWAY_NATIVE", "off" if path else "require")
        engine = hw.Engine(folder, pages=PAGES, threads=2, step_ms=60_000)
    with engine:
        assert engine.info.runner.startswith(path or "native")
        yield Case(model, folder, engine, tokens, reference_logits(model, tokens))


def test_a_whole_prompt(case: Case) -> None:
    assert_close(all_logits(case.engine, case.tokens), case.expected)


def test_token_by_token(case: Case) -> None:
    with case.engine.context() as context:
        rows = [logit_rows(context, [token])[0] for token in case.tokens]
    assert_close(np.stack(rows), case.expected)


def test_in_chunks_of_a_small_budget(case: Case) -> None:
    with hw.Engine(case.folder, pages=PAGES, threads=2, max_batch_tokens=7, page_size=5) as engine:
        with engine.context() as context:
            forward = context.forward().input(case.tokens)
            handles = [forward.probe(i, hw.Logits()) for i in range(N)]
            out = forward.execute().result()
        assert out.stats.steps == 6
        assert_close(np.stack([out.logits(h) for h in handles]), case.expected)


def test_two_prompts_of_different_lengths_in_one_ragged_batch(case: Case) -> None:
    other = random_tokens(case.model.config.vocab_size, 11, seed=1)
    mine, theirs = ragged(case.engine, [([], case.tokens), ([], other)])
    assert_close(mine, case.expected, "the long prompt")
    assert_close(theirs, reference_logits(case.model, other), "the short prompt")


def test_a_decode_row_beside_a_prompt_in_one_ragged_batch(case: Case) -> None:
    other = random_tokens(case.model.config.vocab_size, 21, seed=2)
    last, prompt = ragged(case.engine, [(case.tokens[:-1], case.tokens[-1:]), ([], other)])
    assert_close(last, case.expected[-1:], "the decode row")
    assert_close(prompt, reference_logits(case.model, other), "the prompt")


def test_the_old_spelling_of_the_config_and_sharded_weights(case: Case, tmp_path: Path) -> None:
    folder = save_hf(tmp_path, case.model, shards=True, old=True)
    assert len(list(folder.glob("*.safetensors"))) > 1
    with hw.Engine(folder, pages=PAGES, threads=2, step_ms=60_000) as engine:
        assert engine.config == case.engine.config
        np.testing.assert_array_equal(all_logits(engine, case.tokens), all_logits(case.engine, case.tokens))


def test_the_exact_path_agrees_too(case: Case) -> None:
    with hw.Engine(case.folder, pages=PAGES, threads=2, deterministic=True, step_ms=60_000) as engine:
        assert_close(all_logits(engine, case.tokens), case.expected)


def test_hidden_states_and_attention_are_those_of_the_reference(case: Case) -> None:
    import torch

    layers = case.engine.config.layers
    with torch.no_grad():
        theirs = case.model(
            input_ids=torch.tensor([case.tokens]), output_hidden_states=True, output_attentions=True, use_cache=False
        )
    with case.engine.context() as context:
        forward = context.forward().input(case.tokens)
        hidden = [forward.probe(20, hw.Hidden(l)) for l in range(layers + 1)]
        attention = [forward.probe(20, hw.AttentionScores(l)) for l in range(layers)]
        out = forward.execute().result()
    for l, handle in enumerate(hidden):
        assert_close(out.hidden(handle), theirs.hidden_states[l][0, 20].numpy(), f"hidden state {l}")
    for l, handle in enumerate(attention):
        assert_close(out.attention(handle), theirs.attentions[l][0, :, 20, :21].numpy(), f"attention {l}")


def test_the_sizes_that_are_reported_are_those_of_the_weights(case: Case) -> None:
    """Packed matrices have whole blocks of 16 outputs."""
    info, engine = case.engine.info, case.engine
    assert info.parameters == sum(p.numel() for p in case.model.parameters())
    filler = 0
    if info.runner != "torch":
        matrices = [m for m in case.model.parameters() if m.ndim == 2]
        filler = sum(-len(m) % 16 * m.shape[1] for m in matrices)
    assert info.weight_bytes == 4 * (info.parameters + filler)
    assert engine.config.tied == case.model.config.tie_word_embeddings


def ragged(engine: hw.Engine, work: list[tuple[list[int], list[int]]]) -> list[np.ndarray]:
    """The logits of each (context, rows) pair, all rows computed in one step."""
    contexts = [engine.context() for _ in work]
    for context, (before, _) in zip(contexts, work, strict=True):
        if before:
            context.forward().input(before).execute().result()
    forwards = [context.forward().input(rows) for context, (_, rows) in zip(contexts, work, strict=True)]
    handles = [
        [forward.probe(i, hw.Logits()) for i in range(len(rows))]
        for forward, (_, rows) in zip(forwards, work, strict=True)
    ]

    async def together() -> list[hw.Output]:
        with engine._lock:  # the worker forms no batch before all are queued
            running = [forward.execute() for forward in forwards]
        return list(await asyncio.gather(*running))

    outputs = asyncio.run(together())
    assert [out.stats.batch_size for out in outputs] == [len(work)] * len(work)
    assert [out.stats.steps for out in outputs] == [1] * len(work)
    for context in contexts:
        context.release()
    return [np.stack([out.logits(h) for h in hs]) for out, hs in zip(outputs, handles, strict=True)]
