"""Images and texts together: the same numbers and words as transformers, whatever shares the batch."""

from __future__ import annotations

import asyncio
import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headway as hw
from headway.base.errors import InvalidInput, UnsupportedModel, WrongType
from support import encoders, senses
from support.senses import same

LABELS = ["film", "great bank", "a", "the dull film was great in london"]


def ours(task: str, made: tuple[Any, Any, Any], **more: Any) -> hw.Pipeline:
    model, processor, words = made
    return hw.pipeline(task, model, image_processor=processor, tokenizer=words, device="cpu", **more)


# -- labels without training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["clip", "siglip"])
class TestZeroShot:
    def test_it_is_transformers_pipeline(self, family: str) -> None:
        made = getattr(senses, family)()
        images = senses.images(7)
        with ours("zero-shot-image-classification", made) as mine:
            peer = transformers.pipeline(
                "zero-shot-image-classification",
                model=made[0],
                image_processor=made[1],
                tokenizer=made[2],
                device="cpu",
            )
            for found, want in zip(mine(images, candidate_labels=LABELS), peer(images, candidate_labels=LABELS)):
                same(found, want)
            more = {"candidate_labels": LABELS[:2], "hypothesis_template": "{} it is"}
            same(mine(images[0], **more), peer(images[0], **more))
            same(mine(images[0], candidate_labels="film, a"), peer(images[0], candidate_labels=["film", "a"]))
            same(mine(images[0], candidate_labels=["film"]), peer(images[0], candidate_labels=["film"]))

    def test_embeds_come_with_the_forward_pass(self, family: str) -> None:
        model, processor, _ = made = getattr(senses, family)()
        images = senses.images(3)
        with ours("zero-shot-image-classification", made) as mine:
            batch = mine.preprocess(images, candidate_labels=LABELS)
            output = mine.forward(batch)
            with torch.no_grad():
                want = model(pixel_values=processor(images=images, return_tensors="pt").pixel_values, **texts(batch))
            assert "vision_model_output={last_hidden_state: float32[3, " in repr(output)
            for name in ("image_embeds", "text_embeds", "logits_per_image"):
                torch.testing.assert_close(output[name], want[name], rtol=1e-4, atol=1e-5)
            one = mine.forward(mine.preprocess(images[0], candidate_labels=LABELS))
            found = mine.postprocess(images[0], one, candidate_labels=LABELS)
            same(found, mine(images[0], candidate_labels=LABELS))

    def test_other_labels_do_not_share_a_batch(self, family: str) -> None:
        images = senses.images(12)
        with ours("zero-shot-image-classification", getattr(senses, family)()) as mine:
            sets = [LABELS, LABELS[:1], LABELS[1:3]]
            alone = [mine(one, candidate_labels=sets[i % 3]) for i, one in enumerate(images)]

            async def ask() -> list[Any]:
                return await asyncio.gather(
                    *(mine.submit(one, candidate_labels=sets[i % 3]) for i, one in enumerate(images))
                )

            for found, want in zip(asyncio.run(ask()), alone):
                same(found, want)


def texts(batch: hw.ModelInputs) -> dict[str, torch.Tensor]:
    return {name: value for name, value in batch.inputs.items() if name in ("input_ids", "attention_mask")}


def test_models_whose_towers_meet_otherwise_are_computed_whole() -> None:
    words = encoders.tokenizer("bert")
    text = {**senses.TEXT, "vocab_size": len(words), "max_position_embeddings": 64, "pad_token_id": 0}
    config = transformers.BlipConfig(text_config=text, vision_config=senses.VISION, projection_dim=16)
    made = senses.enliven(transformers.BlipModel(config)), senses.square("Blip"), words
    image = senses.images(1)[0]
    with ours("zero-shot-image-classification", made) as mine:
        found = mine(image, candidate_labels=["film", "bank"])
        sentences = [f"This is a photo of {label}." for label in ("film", "bank")]
        encoded = words(sentences, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = (
                made[0](
                    input_ids=encoded.input_ids,
                    attention_mask=encoded.attention_mask,
                    pixel_values=made[1](images=image, return_tensors="pt").pixel_values,
                )
                .logits_per_image[0]
                .softmax(-1)
            )
        assert sorted(one["score"] for one in found) == pytest.approx(sorted(logits.tolist()), rel=1e-4)


def test_zero_shot_refuses_in_words() -> None:
    image = senses.images(1)[0]
    with ours("zero-shot-image-classification", senses.clip()) as mine:
        for given, words in [
            ({}, "candidate_labels is missing"),
            ({"candidate_labels": []}, "candidate_labels is empty"),
            ({"candidate_labels": ["a"], "hypothesis_template": "none"}, "hypothesis_template is 'none'"),
            ({"candidate_labels": ["a " * 60]}, "the limit is 40"),
        ]:
            with pytest.raises(InvalidInput, match=words):
                mine(image, **given)
        with pytest.raises(WrongType, match="expected a label, got 3"):
            mine(image, candidate_labels=["a", 3])
        assert mine(image, candidate_labels=["a " * 60, "film"], truncation=True)
        with pytest.raises(InvalidInput, match="is a URL"):
            mine("http://example.com/a.png", candidate_labels=["a"])


# -- captions ----------------------------------------------------------------------------------------------------------


def caption(made: tuple[Any, Any, Any], image: Any, **more: Any) -> list[str]:
    model, processor, words = made
    pixels = processor(images=image, return_tensors="pt").pixel_values
    found = model.generate(pixel_values=pixels, **{"max_new_tokens": 12, **more})
    return [words.decode(ids, skip_special_tokens=True) for ids in found]


@pytest.mark.parametrize("family", ["blip", "vision_encoder_decoder", "git"])
class TestCaptions:
    def made(self, family: str) -> tuple[Any, Any, Any]:
        return senses.blip("ConditionalGeneration") if family == "blip" else getattr(senses, family)()

    def test_they_are_the_models_alone(self, family: str) -> None:
        made, images = self.made(family), senses.images(10)
        with ours("image-to-text", made, max_new_tokens=12) as mine:
            found = mine(images)
            assert [one[0]["generated_text"] for one in found] == [caption(made, one)[0] for one in images]
            assert len({one[0]["generated_text"] for one in found}) > 3, "the images matter"
            assert mine(images[0]) == found[0]

    def test_beams_and_several_texts(self, family: str) -> None:
        made, image = self.made(family), senses.images(1)[0]
        with ours("image-to-text", made) as mine:
            more = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 12}
            assert [one["generated_text"] for one in mine(image, **more)] == caption(made, image, **more)
            in_a_dict = mine(image, generate_kwargs=more)
            assert in_a_dict == mine(image, **more)

    def test_draws_are_an_items_own(self, family: str) -> None:
        made, images = self.made(family), senses.images(6)
        with ours("image-to-text", made, do_sample=True, seed=5, max_new_tokens=12, temperature=2.0) as mine:
            found = mine(images)
            for image, one in zip(images, found):
                torch.manual_seed(5)
                assert [one[0]["generated_text"]] == caption(made, image, do_sample=True, temperature=2.0)

    def test_what_cannot_be_is_refused(self, family: str) -> None:
        with ours("image-to-text", self.made(family)) as mine:
            image = senses.images(1)[0]
            for given, words in [
                ({"max_new_tokens": 0}, "max_new_tokens is 0"),
                ({"max_new_tokens": 64}, "decoder has 64 positions"),
                ({"temperature": 0.5}, "do_sample is not set"),
                ({"generate_kwargs": {"top_p": 2}}, "top_p is 2"),
                ({"num_beams": 2, "generate_kwargs": {"num_beams": 2}}, "num_beams is given both directly and in"),
                ({"speed": 3}, "'speed' is not an option"),
            ]:
                with pytest.raises(InvalidInput, match=words):
                    mine(image, **given)


def test_a_prompt_goes_on() -> None:
    model, processor, words = made = senses.blip("ConditionalGeneration")
    images = senses.images(4)
    with ours("image-to-text", made, max_new_tokens=8) as mine:
        for image, one in zip(images, mine(images, prompt="the film")):
            encoded = words("the film", return_tensors="pt")
            found = model.generate(
                pixel_values=processor(images=image, return_tensors="pt").pixel_values,
                input_ids=encoded.input_ids,
                attention_mask=encoded.attention_mask,
                max_new_tokens=8,
            )
            assert one == [{"generated_text": words.decode(found[0], skip_special_tokens=True)}]
        with pytest.raises(InvalidInput, match=r"has 53 tokens, 12 new ones may follow.* pass max_new_tokens=11"):
            mine(images[0], prompt="the film was " * 17 + "a", max_new_tokens=12)
        assert mine(images[0], prompt="the film was " * 17 + "a", max_new_tokens=11)
        with pytest.raises(InvalidInput, match="fixed by BLIP models"):
            mine(images[0], eos_token_id=3)
    with (
        ours("image-to-text", senses.vision_encoder_decoder()) as mine,
        pytest.raises(InvalidInput, match="models take no prompt"),
    ):
        mine(images[0], prompt="the film")


def test_other_families_are_named() -> None:
    model, processor, words = senses.clip()
    with pytest.raises(UnsupportedModel, match="clip model; image-to-text takes blip, vision-encoder-decoder, git"):
        hw.pipeline("image-to-text", captioner_of("clip"), image_processor=processor, tokenizer=words, device="cpu")
    with pytest.raises(UnsupportedModel, match="clip model; visual question answering takes vilt, blip"):
        hw.pipeline("vqa", model, image_processor=processor, tokenizer=words, device="cpu")


def captioner_of(family: str) -> Any:
    """A model that writes, under another family's name."""
    model = copy.deepcopy(senses.blip("ConditionalGeneration")[0])
    model.config.model_type = family
    return model


# -- questions ---------------------------------------------------------------------------------------------------------


def test_chosen_answers_are_vilts() -> None:
    model, processor, words = made = senses.vilt()
    items = [{"image": one, "question": text} for one, text in zip(senses.images(9), encoders.texts(9))]
    with ours("visual-question-answering", made) as mine:
        for item, found in zip(items, mine(items)):
            encoded = words(item["question"], return_tensors="pt")
            with torch.no_grad():
                scores = model(**encoded, **processor(images=item["image"], return_tensors="pt")).logits[0].sigmoid()
            best = scores.sort(descending=True)
            assert [one["score"] for one in found] == pytest.approx(best.values[:5].tolist(), rel=1e-4)
            assert [one["answer"] for one in found] == [f"LABEL_{i}" for i in best.indices[:5].tolist()]
            same(mine(item, top_k=2), found[:2])  # its batch mates are gone


def test_written_answers_do_not_depend_on_other_questions() -> None:
    model, processor, words = made = senses.blip("QuestionAnswering")
    items = [{"image": one, "question": text} for one, text in zip(senses.images(9), encoders.texts(9))]
    with ours("visual-question-answering", made, max_new_tokens=8) as mine:
        found = mine(items)
        for item, one in zip(items, found):
            encoded = words(item["question"], return_tensors="pt")
            ids = model.generate(
                input_ids=encoded.input_ids,
                attention_mask=encoded.attention_mask,
                pixel_values=processor(images=item["image"], return_tensors="pt").pixel_values,
                max_new_tokens=8,
            )
            assert one == [{"answer": words.decode(ids[0], skip_special_tokens=True).strip()}]


def test_ways_to_ask() -> None:
    images = senses.images(2)
    with ours("vqa", senses.vilt()) as mine:
        want = mine({"image": images[0], "question": "the film"})
        assert mine(images[0], question="the film") == want
        assert mine(image=images[0], question="the film") == want
        assert mine(image=np.asarray(images[0]), question="the film") == want
        same(mine(images, question="the film")[0], want)
        same(next(mine(iter(images), question="the film")), want)
        for given, words in [
            (images[0], 'expected {"image": ..., "question": ...}'),
            ("image.png", "got 'image.png' (str)"),
            ({"image": images[0]}, 'an item has "image" and "question"'),
            ({"image": images[0], "question": " "}, "the question is empty"),
            ({"image": images[0], "question": None}, "expected a question, got None"),
            ({"image": None, "question": "the film"}, "expected an image: a PIL image"),
            ({"image": images[0], "question": "the " * 70}, "the limit is 64"),
        ]:
            with pytest.raises((InvalidInput, WrongType), match=re.escape(words)):
                mine(given)
        with pytest.raises(InvalidInput, match="the image was given twice"):
            mine(images[0], image=images[1], question="the film")
        assert mine({"image": images[0], "question": "the " * 70}, truncation=True)


def test_folders_are_enough(tmp_path: Path) -> None:
    for name, made, task in [
        ("blip", senses.blip("QuestionAnswering"), "visual-question-answering"),
        ("vilt", senses.vilt(), "visual-question-answering"),
        ("ved", senses.vision_encoder_decoder(), "image-to-text"),
        ("clip", senses.clip(), "zero-shot-image-classification"),
    ]:
        for part in made:
            part.save_pretrained(tmp_path / name)
        item: Any = senses.images(1)[0]
        if task == "visual-question-answering":
            item = {"image": item, "question": "the film was great"}
        more = {"candidate_labels": LABELS} if name == "clip" else {}
        with hw.pipeline(task, str(tmp_path / name), device="cpu") as mine, ours(task, made) as other:
            same(mine(item, **more), other(item, **more))
