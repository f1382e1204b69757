"""generation_config.json: what is read from it, what is refused, and what becomes of it."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import headway as hw
from headway.program.generation.defaults import UNSUPPORTED, GenerationDefaults
from support.hf import save_hf, variant


def written(folder: Path, said: Mapping[str, Any] | str) -> GenerationDefaults:
    text = said if isinstance(said, str) else json.dumps(said)
    (folder / "generation_config.json").write_text(text)
    return GenerationDefaults.from_folder(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hf(tmp_path_factory.mktemp("defaults"), variant("qwen2-gqa-tied")[1])


def theirs(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    """What transformers generates by the folder's file."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()  # type: ignore[operator,call-overload]


# -- reading -------------------------------------------------------------------------------------------------------


def test_every_option_is_read(tmp_path: Path) -> None:
    said: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "min_p": 0.05,
        "typical_p": 0.9,
        "repetition_penalty": 1.05,
        "no_repeat_ngram_size": 3,
        "num_beams": 4,
        "length_penalty": -0.5,
        "early_stopping": "never",
        "num_return_sequences": 2,
        "max_length": 2048,
        "max_new_tokens": 100,
        "min_length": 10,
        "min_new_tokens": 5,
    }
    others = {"transformers_version": "4.37.0", "chat_format": "chatml", "use_cache": True}
    found = written(tmp_path, {**said, **others, "eos_token_id": [2, 7], "bos_token_id": 1, "pad_token_id": 0})
    assert {name: getattr(found, name) for name in said} == said
    assert (found.eos_ids, found.bos_id, found.pad_id) == ((2, 7), 1, 0)
    assert found.unknown == others
    hash(found)


def test_no_file_says_nothing(tmp_path: Path, smollm2_path: Path) -> None:
    nothing = GenerationDefaults()
    assert GenerationDefaults.from_folder(tmp_path) == nothing
    assert GenerationDefaults.from_folder(None) == nothing
    assert GenerationDefaults.from_folder(smollm2_path) == nothing
    assert nothing.eos_ids is None
    assert nothing.sampler() == hw.Sampling(temperature=0)


def test_only_the_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"temperature": 0.5, "do_sample": True}))
    assert GenerationDefaults.from_folder(tmp_path) == GenerationDefaults()


def test_nulls_say_nothing_and_one_id_is_a_list(tmp_path: Path) -> None:
    found = written(tmp_path, {"temperature": None, "eos_token_id": 2, "pad_token_id": -1, "eos_ids": 5})
    assert found == GenerationDefaults(eos_ids=(2,), unknown={"eos_ids": 5})


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("[1]", "holds a list; it should hold an object"),
        ('{"temperature": NaN}', "temperature is nan"),
        ({"temperature": -1}, "temperature is -1.0; it must be at least 0"),
        ({"temperature": "0.7"}, "temperature is '0.7'"),
        ({"temperature": True}, "temperature is True"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 1.2}, "top_p is 1.2"),
        ({"min_p": -0.1}, "min_p is -0.1"),
        ({"typical_p": 0}, "typical_p is 0.0"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0.0"),
        ({"do_sample": "yes"}, "do_sample is 'yes'; it must be true or false"),
        ({"num_beams": 0}, "num_beams is 0"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"length_penalty": [1]}, "length_penalty is"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
        ({"max_length": 0}, "max_length is 0"),
        ({"max_new_tokens": -5}, "max_new_tokens is -5"),
        ({"min_length": -1}, "min_length is -1"),
        ({"min_new_tokens": "3"}, "min_new_tokens is"),
        ({"no_repeat_ngram_size": -3}, "no_repeat_ngram_size is -3"),
        ({"eos_token_id": [2, "x"]}, "eos_ids is 'x'"),
        ({"eos_token_id": -2}, "eos_ids is -2"),
        ({"bos_token_id": [1]}, "bos_id is"),
    ],
)
def test_a_broken_file_is_a_bad_model_file(tmp_path: Path, said: Any, says: str) -> None:
    with pytest.raises(hw.BadModelFile, match=says) as caught:
        written(tmp_path, said)
    assert "generation_config.json" in str(caught.value)


# -- what cannot be done -------------------------------------------------------------------------------------------

TELLING: dict[str, Any] = {
    "begin_suppress_tokens": [1],
    "constraints": ["x"],
    "diversity_penalty": 0.5,
    "dola_layers": "high",
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.1,
    "exponential_decay_length_penalty": [5, 1.1],
    "force_words_ids": [[1]],
    "forced_bos_token_id": 1,
    "forced_eos_token_id": 1,
    "guidance_scale": 1.5,
    "max_time": 1.0,
    "num_beam_groups": 2,
    "penalty_alpha": 0.6,
    "renormalize_logits": True,
    "stop_strings": ["END"],
    "suppress_tokens": [1],
    "token_healing": True,
    "top_h": 0.4,
    "watermarking_config": {"bias": 2.5},
}


@pytest.mark.parametrize("key", sorted(UNSUPPORTED))
def test_a_key_that_changes_the_tokens_is_refused_when_it_would(tmp_path: Path, key: str) -> None:
    found = written(tmp_path, {key: TELLING[key]})
    assert found.unknown == {key: TELLING[key]}
    ways = [{}, {"do_sample": True}, {"num_beams": 2}, {"do_sample": True, "num_beams": 2}]
    refused = [way for way in ways if found.overridden(**way).unsupported()]
    if key == "top_h":
        assert refused == [ways[1], ways[3]]
    elif key in ("diversity_penalty", "num_beam_groups", "renormalize_logits"):
        assert refused == ways[2:]
    elif key == "penalty_alpha":
        assert refused == ways[:1]
    else:
        assert refused == ways
    for way in refused:
        with pytest.raises(hw.Unsupported, match=f"asks for {key}=.*, which is not supported"):
            found.sampler(**way)


def test_keys_at_values_that_do_nothing_are_no_obstacle(tmp_path: Path) -> None:
    idle = {"num_beam_groups": 1, "diversity_penalty": 0.0, "encoder_repetition_penalty": 1.0, "guidance_scale": None}
    found = written(tmp_path, {**idle, "suppress_tokens": [], "epsilon_cutoff": 0.0, "cache_implementation": "static"})
    assert found.sampler(do_sample=True) == hw.Sampling()


# -- samplers ------------------------------------------------------------------------------------------------------

SAMPLED = GenerationDefaults(do_sample=True, temperature=0.6, top_k=20, top_p=0.95, min_p=0.0, repetition_penalty=1.1)


def test_a_sampler_is_what_the_file_says() -> None:
    assert SAMPLED.sampler() == hw.Sampling(0.6, top_k=20, top_p=0.95, repetition_penalty=1.1)
    assert GenerationDefaults(temperature=0.6, top_p=0.5, repetition_penalty=1.1).sampler() == hw.Sampling(
        temperature=0, repetition_penalty=1.1
    )


def test_each_option_can_be_overridden() -> None:
    found = SAMPLED.sampler(temperature=1.5, top_p=None, top_k=0, typical_p=0.9, presence_penalty=0.5, seed=3)
    assert found == hw.Sampling(1.5, top_p=0.95, typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, seed=3)
    assert SAMPLED.sampler(do_sample=False, repetition_penalty=1.0) == hw.Sampling(temperature=0)
    assert SAMPLED.sampler(temperature=0) == hw.Sampling(0, top_k=20, top_p=0.95, repetition_penalty=1.1)
    assert GenerationDefaults().sampler(temperature=0) == hw.Sampling(temperature=0)
    assert GenerationDefaults().sampler(do_sample=True, logit_bias={3: 1.0}).bias == ((3, 1.0),)


def test_overrides_that_mean_nothing_are_refused() -> None:
    with pytest.raises(hw.InvalidInput, match=r"temperature=0\.7 has no effect without sampling; give do_sample=True"):
        GenerationDefaults().sampler(temperature=0.7)
    with pytest.raises(
        hw.InvalidInput, match="'temprature' is not a generation parameter; expected bad_words_ids, bos_id, do_sample"
    ):
        SAMPLED.sampler(temprature=1.0)
    with pytest.raises(hw.InvalidInput, match="top_p is 2"):
        SAMPLED.sampler(top_p=2)


def test_greedy_text_by_the_file_is_transformers_own(folder: Path) -> None:
    found = written(folder, {"repetition_penalty": 1.3, "max_length": 24, "temperature": 0.7, "eos_token_id": 96})
    prompt = [5, 6, 7, 5, 6]

    async def program(engine: hw.Engine) -> list[int]:
        async with engine.context() as context:
            limit = found.max_tokens(len(prompt))
            assert limit is not None
            return await context.fill(prompt).generate(found.sampler(), max_tokens=limit, stop=[96]).tokens()

    with hw.Engine(folder, pages=16, threads=1) as engine:
        assert engine.run(program) == theirs(folder, prompt)


# -- lengths -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "given"),
    [
        ({"max_length": 12}, {}),
        ({"max_new_tokens": 3}, {}),
        ({"max_length": 6, "max_new_tokens": 9}, {}),
        ({"max_length": 12}, {"max_new_tokens": 2}),
        ({"max_new_tokens": 2}, {"max_length": 12}),
        ({"max_length": 12}, {"max_length": 9}),
        ({"max_length": 14, "min_length": 14}, {}),
        ({"max_length": 14, "min_length": 14}, {"min_new_tokens": 2}),
        ({"max_length": 14, "min_new_tokens": 4, "min_length": 14}, {}),
    ],
)
def test_lengths_mean_what_they_mean_to_transformers(folder: Path, said: dict[str, Any], given: dict[str, Any]) -> None:
    """With every token but one an end token, a text ends as soon as it may."""
    prompt, ends = [3, 1, 4, 1, 5], list(range(1, 97))
    chosen = written(folder, said).overridden(**given)
    longest = theirs(folder, prompt, pad_token_id=0, **given)
    assert chosen.max_tokens(len(prompt)) == len(longest)
    shortest = theirs(folder, prompt, eos_token_id=ends, pad_token_id=0, **given)
    ended = next((i for i, token in enumerate(shortest) if token in ends), len(shortest))
    assert min(chosen.min_tokens(len(prompt)), len(longest)) == ended


def test_a_prompt_that_fills_max_length_is_refused() -> None:
    with pytest.raises(hw.InvalidInput, match="max_length is 5 and counts the prompt, which has 5 tokens already"):
        GenerationDefaults(max_length=5).max_tokens(5)
    assert GenerationDefaults(max_length=5, max_new_tokens=1).max_tokens(5) == 1
    assert GenerationDefaults().max_tokens(5) is None
    assert GenerationDefaults(min_length=3).min_tokens(5) == 0


def test_defaults_can_be_pickled_and_copied_and_their_unknown_keys_cannot_be_changed(tmp_path: Path) -> None:
    found = written(tmp_path, {"temperature": 0.5, "eos_token_id": [1, 2], "bad_words_ids": [[3, 4]], "mine": {"a": 1}})
    for twin in (
        pickle.loads(pickle.dumps(found)),
        copy.deepcopy(found),
        found.overridden(top_k=3).overridden(top_k=4),
    ):
        assert (twin.given | {"top_k": 4}, twin.unknown) == (found.given | {"top_k": 4}, found.unknown)
        with pytest.raises(TypeError):
            twin.unknown["mine"] = 2
