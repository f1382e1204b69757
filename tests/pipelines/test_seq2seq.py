"""Encoder-decoders: the results of `model.generate` on an item alone, whatever is in its batch."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headway as hw
from headway.pipelines.generation.encoder_decoder import Seq2SeqPipeline
from headway.pipelines.generation.options import GenerationOptions
from support import encoders, writers

TEXTS = [*encoders.texts(5, seed=5), "a", "the film was great in paris and dull in london at the bank of anna"]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, no cache": {"use_cache": False},
    "penalized": {"repetition_penalty": 1.7, "no_repeat_ngram_size": 2, "min_length": 5},
    "by total length": {"max_length": 7, "max_new_tokens": None},
    "another start": {"decoder_start_token_id": 5},
    "forced": {"forced_bos_token_id": 7, "forced_eos_token_id": 1},
    "bad words": {"bad_words_ids": [[3], [4, 5]], "suppress_tokens": [6, 7]},
    "source held against it": {"encoder_no_repeat_ngram_size": 2, "encoder_repetition_penalty": 1.4},
    "other ends": {"eos_token_id": [1, 9, 20]},
    "beams": {"num_beams": 4},
    "greedy, beams off": {"length_penalty": 1.0, "early_stopping": False},
    "beams, short preferred": {"num_beams": 3, "length_penalty": -1.0, "early_stopping": True},
    "beams, never early": {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    "several beams": {"num_beams": 4, "num_return_sequences": 3, "no_repeat_ngram_size": 3},
    "drawn": {"do_sample": True, "seed": 11},
    "drawn, warmed": {"do_sample": True, "temperature": 0.7, "top_k": 9, "top_p": 0.9, "seed": 3},
    "drawn, other filters": {"do_sample": True, "min_p": 0.02, "typical_p": 0.9, "top_k": 0, "seed": 2**40},
    "drawn several times": {"do_sample": True, "num_return_sequences": 3, "seed": 0},
    "drawn beams": {"do_sample": True, "num_beams": 3, "num_return_sequences": 2, "top_k": 30, "seed": 8},
}


def ours(model: Any, task: str = "text2text-generation", **more: Any) -> Seq2SeqPipeline:
    made = hw.pipeline(task, model, tokenizer=writers.tokenizer(), device="cpu", **more)
    assert isinstance(made, Seq2SeqPipeline)
    return made


def alone(model: Any, text: str, more: dict[str, Any], prefix: str = "") -> list[list[int]]:
    """What transformers gives for this text by itself, each sequence up to its end."""
    given = {"max_new_tokens": 8, **more}
    if (seed := given.pop("seed", None)) is not None:
        torch.manual_seed(seed)
    found = model.generate(**writers.tokenizer()(prefix + text, return_tensors="pt"), **given)
    ends = given.get("eos_token_id", [1])
    return [until_end(row, ends) for row in found.tolist()]


def until_end(row: list[int], ends: list[int]) -> list[int]:
    places = [i for i, id in enumerate(row) if i and id in ends]
    return row[: places[0] + 1] if places else row


def ids(result: Any) -> list[list[int]]:
    return [one["generated_token_ids"].tolist() for one in (result if isinstance(result, list) else [result])]


def pairs() -> Iterator[Any]:
    """Every way of decoding with one family, and two of them with the others; the rest is slow."""
    first, *_ = writers.FAMILIES
    for family, way in product(writers.FAMILIES, WAYS):
        quick = family == first or way in ("greedy", "several beams")
        yield pytest.param(family, way, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("family", "way"), pairs())
def test_every_way_of_decoding_is_that_of_generate(family: str, way: str) -> None:
    model, more = writers.model(family), WAYS[way]
    with ours(model) as mine:
        found = mine(TEXTS, return_tensors=True, **{"max_new_tokens": 8, **more})
        assert mine.stats()["batches"] < len(TEXTS)
    want = [alone(model, text, more) for text in TEXTS]
    assert [ids(one) for one in found] == want
    assert len({tuple(map(tuple, one)) for one in want}) > 2  # the model does not say the same of everything


@pytest.mark.parametrize("family", writers.FAMILIES)
class TestAgainstGenerate:
    def test_text_is_the_tokenizers_own(self, family: str) -> None:
        model, words = writers.model(family), writers.tokenizer()
        with ours(model, max_new_tokens=8) as mine:
            found = mine(TEXTS)
            several = mine(TEXTS[0], num_beams=2, num_return_sequences=2)
        want = [words.decode(alone(model, text, {})[0], skip_special_tokens=True) for text in TEXTS]
        assert found == [{"generated_text": text} for text in want]
        assert [set(one) for one in several] == [{"generated_text"}] * 2

    def test_everything_that_generate_can_return(self, family: str) -> None:
        model = writers.model(family)
        asked = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
        asked |= {"output_attentions": True, "output_hidden_states": True, "max_new_tokens": 6}
        model.set_attn_implementation("eager")
        for more in ({}, {"num_beams": 3, "num_return_sequences": 2}):
            batch = writers.tokenizer()(TEXTS[:3], return_tensors="pt", padding=True)
            want = model.generate(**batch, **asked, **more)
            with ours(model) as mine:
                found = mine.generate(TEXTS[:3], **asked, **more)
            for name in set(want) - {"past_key_values"}:
                same(found[name], want[name])
            cache = found["past_key_values"]
            assert [len(layer) for layer in cache] == [4, 4]

    def test_the_source_is_read_once(self, family: str) -> None:
        model = writers.model(family)
        calls: list[int] = []
        with ours(model, max_new_tokens=8) as mine:
            read = mine.encode(TEXTS[:4])
            hook = model.get_encoder().register_forward_hook(lambda *_: calls.append(1))
            again = mine.generate(encoder_outputs=read)
            as_tuple = mine.generate({"attention_mask": read.attention_mask}, encoder_outputs=(read.last_hidden_state,))
            beams = mine.generate(encoder_outputs=read, num_beams=2)
            one_pass = mine.forward(encoder_outputs=read).logits
            hook.remove()
            assert not calls
            assert torch.equal(again, mine.generate(TEXTS[:4]))
            assert torch.equal(again, as_tuple)
            assert torch.equal(beams, mine.generate(TEXTS[:4], num_beams=2))
            torch.testing.assert_close(one_pass, mine.forward(TEXTS[:4]).logits)

    def test_one_pass_by_hand(self, family: str) -> None:
        model, words = writers.model(family), writers.tokenizer()
        batch = words(TEXTS[:2], return_tensors="pt", padding=True)
        labels = torch.tensor([[3, 4, 1], [5, 6, 1]])
        with ours(model) as mine, torch.no_grad():
            want = model(**batch, labels=labels)
            found = mine.forward(TEXTS[:2], labels=labels)
            torch.testing.assert_close(found.loss, want.loss)
            torch.testing.assert_close(found.logits, want.logits)
            given = mine.forward(TEXTS[:2], decoder_input_ids=[[0, 5], [0, 6]], output_hidden_states=True)
            want = model(**batch, decoder_input_ids=torch.tensor([[0, 5], [0, 6]]), output_hidden_states=True)
            same(given.decoder_hidden_states, want.decoder_hidden_states)
            assert mine.forward(TEXTS[:2], return_dict=False)[0].shape == (2, 1, len(words))


def same(found: Any, want: Any) -> None:
    if want is None or isinstance(want, (tuple, list)):
        assert (found is None) == (want is None)
        for a, b in zip(found or (), want or (), strict=True):
            same(a, b)
    else:
        torch.testing.assert_close(found, want)


class TestDraws:
    def test_every_item_has_draws_of_its_own(self) -> None:
        model = writers.model("t5")
        with ours(model, max_new_tokens=8, do_sample=True, return_tensors=True) as mine:
            fresh = [ids(one) for one in mine([TEXTS[0]] * 6)]
            assert len({str(one) for one in fresh}) > 1  # no seed: items differ
            seeded = [ids(one) for one in mine([TEXTS[0]] * 6, seed=4)]
            assert len({str(one) for one in seeded}) == 1  # a seed belongs to the item, not to its place
            before = torch.get_rng_state()
            mine(TEXTS, seed=4)
            assert torch.equal(torch.get_rng_state(), before)  # nobody else's random numbers are used up

    def test_callers_with_other_wishes_are_not_mixed(self) -> None:
        model = writers.model("bart")

        async def all_at_once(mine: hw.Pipeline) -> list[Any]:
            wishes = [{"num_beams": 2}, {}, {"do_sample": True, "seed": 5}, {"max_new_tokens": 3}]
            jobs = [mine.submit(text, **wishes[i % 4]) for i, text in enumerate(TEXTS * 3)]
            return await asyncio.gather(*jobs)

        with ours(model, max_new_tokens=8, return_tensors=True) as mine:
            found = asyncio.run(all_at_once(mine))
        wishes = [{"num_beams": 2}, {}, {"do_sample": True, "seed": 5}, {"max_new_tokens": 3}]
        for i, text in enumerate(TEXTS * 3):
            assert ids(found[i]) == alone(model, text, {"max_new_tokens": 8, **wishes[i % 4]})


class TestTasks:
    def test_names_of_results(self) -> None:
        model = writers.model("bart")
        for task, key in (("summarization", "summary"), ("translation", "translation"), ("translation_en_to_fr", None)):
            with ours(model, task, max_new_tokens=4) as mine:
                assert set(mine("the film")[0]) == {f"{key or 'translation'}_text"}
                assert mine.task == task

    def test_a_models_own_settings_for_a_task(self, tmp_path: Path) -> None:
        said = {
            "summarization": {"prefix": "film ", "num_beams": 2, "max_length": 6, "early_stopping": True},
            "translation_en_to_fr": {"prefix": "paris ", "max_length": 5},
        }
        model = writers.model("t5", task_specific_params=said)
        model.save_pretrained(tmp_path)
        writers.tokenizer().save_pretrained(tmp_path)
        cases = [
            ("summarization", {}, "film ", {"num_beams": 2, "max_length": 6, "early_stopping": True}),
            ("summarization", {"max_new_tokens": 8}, "film ", {"num_beams": 2, "early_stopping": True}),
            ("translation_en_to_fr", {}, "paris ", {"max_length": 5}),
            ("translation", {"src_lang": "en", "tgt_lang": "fr"}, "paris ", {"max_length": 5}),
            ("translation_en_to_fr", {"prefix": ""}, "", {"max_length": 5}),
        ]
        for task, asked, prefix, settings in cases:
            key = "summary" if task == "summarization" else "translation"
            length = {"max_new_tokens": asked.get("max_new_tokens")}
            with hw.pipeline(task, str(tmp_path), device="cpu") as mine:
                found = mine(TEXTS[0], return_tensors=True, **asked)[f"{key}_token_ids"].tolist()
            assert found == alone(model, TEXTS[0], {**length, **settings}, prefix)[0]

    def test_t5_is_told_the_languages_in_words(self) -> None:
        model = writers.model("t5")
        with ours(model, "translation_en_to_de", max_new_tokens=8) as mine:
            rows = mine.preprocess(["film"]).inputs["input_ids"].tolist()
            assert rows == writers.tokenizer()(["translate English to German: film"])["input_ids"]
            with pytest.raises(hw.InvalidInput, match="language 'xx'"):
                mine("film", src_lang="en", tgt_lang="xx")

    def test_models_that_name_languages_by_code(self) -> None:
        words = transformers.MBart50Tokenizer(
            vocab=[("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"▁{w}", -2.0) for w in encoders.WORDS)]
        )
        words.model_max_length = writers.LIMIT
        torch.manual_seed(0)
        shape = writers.config("mbart", vocab_size=len(words), pad_token_id=1, eos_token_id=2, decoder_start_token_id=2)
        model: Any = transformers.MBartForConditionalGeneration(shape).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0, 0.3)
        text = "the film was great"
        with hw.pipeline("translation", model, tokenizer=words, device="cpu", max_new_tokens=6) as mine:
            for source, target in (("en_XX", "fr_XX"), ("de_DE", "ro_RO"), ("de", "fr")):
                own = {"de": "de_DE", "fr": "fr_XX"}
                words.src_lang = own.get(source, source)
                first = words.convert_tokens_to_ids(own.get(target, target))
                want = model.generate(**words(text, return_tensors="pt"), forced_bos_token_id=first, max_new_tokens=6)
                found = mine(text, src_lang=source, tgt_lang=target, return_tensors=True)["translation_token_ids"]
                assert found.tolist() == until_end(want[0].tolist(), [2])
                assert found[1] == first
            with pytest.raises(hw.InvalidInput, match="the language 'zz'"):
                mine(text, tgt_lang="zz")

    def test_models_of_one_pair_take_no_languages(self) -> None:
        with ours(writers.model("marian"), "translation") as mine, pytest.raises(hw.InvalidInput, match="src_lang"):
            mine("film", src_lang="en")

    def test_long_texts(self) -> None:
        model, words, text = writers.model("bart"), writers.tokenizer(), " ".join(encoders.WORDS * 6)
        with ours(model, max_new_tokens=5) as mine:
            with pytest.raises(hw.InvalidInput, match=f"85 tokens and the limit is {writers.LIMIT}"):
                mine(text)
            cut = words(text, truncation=True, max_length=writers.LIMIT, return_tensors="pt")
            want = words.decode(model.generate(**cut, max_new_tokens=5)[0], skip_special_tokens=True)
            assert mine(text, truncation=True) == [{"generated_text": want}]
            pieces = mine(text, stride=0, max_input_length=29)["generated_text"]
            parts = [" ".join(encoders.WORDS * 2)] * 3
            assert pieces == " ".join(mine(part)["generated_text"] for part in parts)

    def test_an_empty_text_is_its_end_token(self) -> None:
        for family in writers.FAMILIES:
            model = writers.model(family)
            with ours(model) as mine:
                found = mine(["", "the film", ""], return_tensors=True, max_new_tokens=8)
            assert ids(found[0]) == ids(found[2]) == alone(model, "", {})

    def test_int8(self) -> None:
        with ours(writers.model("bart"), max_new_tokens=5, quantize="int8") as mine:
            assert mine.quantization.layers > 10
            assert mine.quantization.cosine > 0.9
            assert set(mine("the film")[0]) == {"generated_text"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be an integer of at least 1"),
    ({"max_new_tokens": True}, "max_new_tokens is True"),
    ({"max_new_tokens": 5, "max_length": 9}, "max_new_tokens is 5 and max_length is 9; pass one"),
    ({"max_new_tokens": 48}, "the model's decoder has 48 positions.*at most 47"),
    ({"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens is 4 and max_new_tokens is 3"),
    ({"temperature": 0.5}, "temperature is 0.5 and do_sample is not set; pass do_sample=True"),
    ({"temperature": 0, "do_sample": True}, "temperature is 0; it must be a number above 0"),
    ({"top_p": 1.5, "do_sample": True}, "top_p is 1.5"),
    ({"seed": 1}, "seed is 1 and do_sample is not set"),
    ({"length_penalty": 2.0}, "length_penalty is 2.0 and num_beams is 1"),
    ({"num_return_sequences": 2}, "num_return_sequences is 2 and num_beams is 1; pass num_beams=2 or do_sample=True"),
    ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3 and num_beams is 2"),
    ({"decoder_start_token_id": 1000}, "the token 1000; the model's ids are 0 to"),
    ({"bad_words_ids": [[]]}, "bad_words_ids is"),
    ({"early_stopping": "soon", "num_beams": 2}, "early_stopping is 'soon'"),
    ({"num_beam": 2}, "'num_beam' is not an option of this task; it takes"),
    ({"return_dict_in_generate": True}, "call .generate"),
    ({"output_attentions": True}, "call .generate"),
    ({"truncation": True, "stride": 2}, "only one of them"),
    ({"max_input_length": 0}, "max_input_length is 0"),
]


class TestRefusals:
    @pytest.mark.parametrize(("more", "message"), REFUSED)
    def test_options(self, more: dict[str, Any], message: str) -> None:
        with ours(writers.model("bart")) as mine, pytest.raises(hw.InvalidInput, match=message):
            mine("the film", **more)

    def test_by_hand(self) -> None:
        with ours(writers.model("t5")) as mine:
            with pytest.raises(hw.InvalidInput, match=r"Generation\.generate takes no argument 'beams'"):
                mine.generate("film", beams=2)
            with pytest.raises(hw.InvalidInput, match="'pixels'"):
                mine.forward("film", pixels=2)
            with pytest.raises(hw.InvalidInput, match="takes no argument 'head'"):
                mine.encode("film", head=2)
            with pytest.raises(hw.InvalidInput, match="output_scores needs return_dict_in_generate"):
                mine.generate("film", output_scores=True)
            with pytest.raises(hw.InvalidInput, match="no input"):
                mine.generate()
            with pytest.raises(TypeError, match="encoder_outputs is a str"):
                mine.generate(encoder_outputs="film")

    def test_items_and_models(self) -> None:
        with ours(writers.model("t5"), max_new_tokens=3) as mine:
            with pytest.raises(TypeError, match="got None"):
                mine(None)
            found = mine(["film", 3, "the bank"], on_error="return")
            assert [isinstance(one, TypeError) for one in found] == [False, True, False]
            assert mine("")["generated_text"] is not None
        with pytest.raises(hw.UnsupportedModel, match="is not an encoder-decoder model"):
            ours(encoders.model("bert", "fill"))
        with pytest.raises(hw.Unsupported, match="compile=True"):
            ours(writers.model("t5"), compile=True)

    def test_a_default_gives_way_to_its_rival(self) -> None:
        model = writers.model("t5")
        with ours(model, max_length=6, return_tensors=True) as mine:
            assert ids(mine(TEXTS[0], max_new_tokens=9)) == alone(model, TEXTS[0], {"max_new_tokens": 9})

    def test_options_are_what_generate_takes(self) -> None:
        known = set(vars(transformers.GenerationConfig())) | {"seed"}
        assert set(inspect.signature(GenerationOptions).parameters) <= known
