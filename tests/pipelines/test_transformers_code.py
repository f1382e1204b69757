"""Code written for transformers' pipelines: it runs here when only its import changes, and returns the same.

Each snippet is run twice, with transformers' `pipeline` and with ours under that name; what it leaves in `result` is
compared. Models are small and random, in folders that both load.
"""

from __future__ import annotations

import shutil
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import headway as hw
from headway.pipelines.infer_task import task_of
from support import encoders, senses, writers
from support.decoders import EOS, decoder_folder
from support.senses import same

ENTAILS = {"id2label": {0: "contradiction", 1: "entailment"}, "label2id": {"contradiction": 0, "entailment": 1}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Names that snippets use: model folders, an image, a recording."""
    root = tmp_path_factory.mktemp("models")

    def saved(name: str, model: Any, *parts: Any) -> str:
        for part in (model, *parts):
            part.save_pretrained(root / name)
        return str(root / name)

    words = encoders.tokenizer("bert")
    wave = senses.wave_extractor()
    clip = senses.clip()
    return {
        "classifier": saved("classifier", encoders.model("bert", "classify", num_labels=3), words),
        "nli": saved("nli", encoders.model("bert", "classify", **ENTAILS), words),
        "tagger": saved("tagger", encoders.model("bert", "tag"), words),
        "masked": saved("masked", encoders.model("bert", "fill"), words),
        "body": saved("body", encoders.model("bert", "base"), words),
        "vit": saved("vit", senses.classifier("vit"), senses.square("ViT")),
        "clip": saved("clip", *clip),
        "ctc": saved("ctc", senses.wav2vec2("CTC"), wave, senses.letters()),
        "audio": saved("audio", senses.wav2vec2("SequenceClassification", num_labels=7), wave),
        "decoder": str(decoder_folder(root / "decoder")),
        "image": senses.images(1)[0],
        "tone": senses.tone(0.7),
        "torch": torch,
        "transformers": transformers,
    }


SNIPPETS = {
    "sentiment": """
        classifier = pipeline("sentiment-analysis", model=classifier, device=-1)
        result = [classifier("the film was great"), classifier(["the film", "a bank"])]
        result += [label["label"] for label in classifier("the film")]
    """,
    "a list of one": """
        pipe = pipeline("text-classification", model=classifier, device="cpu", torch_dtype=torch.float32)
        result = [pipe(["the film"]), pipe("the film", top_k=None), pipe({"text": "the film", "text_pair": "a bank"})]
    """,
    "all scores as a default": """
        pipe = pipeline("text-classification", model=classifier, top_k=None, device=torch.device("cpu"))
        result = [pipe("the film"), pipe(["the film", "a bank"])]
    """,
    "truncation": """
        pipe = pipeline(task="text-classification", model=classifier, tokenizer=classifier, framework=None, device=-1)
        result = pipe(["the film " * 90, "a bank"], padding=True, truncation=True, max_length=16, batch_size=2)
    """,
    "a limit of the tokenizer's": """
        pipe = pipeline("text-classification", model=classifier, device=-1)
        pipe.tokenizer.model_max_length = 8
        result = [pipe("the film was great in paris and anna works at a bank", truncation=True)]
        pipe.tokenizer.model_max_length = 10
        result.append(pipe("the film was great in paris and anna works at a bank", truncation=True))
    """,
    "a generator": """
        pipe = pipeline("text-classification", model=classifier, device=-1, use_fast=True)
        def data():
            for text in ("the film", "a bank", "in paris"):
                yield text
        result = [out["score"] for out in pipe(data(), batch_size=8, num_workers=0)]
    """,
    "the model and tokenizer": """
        model = transformers.AutoModelForSequenceClassification.from_pretrained(classifier)
        tokenizer = transformers.AutoTokenizer.from_pretrained(classifier)
        pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device=-1)
        result = [pipe("the film was great"), pipe.predict(["the film"]), pipe.transform(["the film"])]
    """,
    "zero-shot": """
        pipe = pipeline("zero-shot-classification", model=nli, device=-1)
        result = [pipe("the film was great", candidate_labels=["film", "bank"]), pipe("the film", ["film", "bank"]),
                  pipe(["the film", "a bank"], candidate_labels="film, bank", multi_label=True)]
    """,
    "entities": """
        pipe = pipeline("ner", model=tagger, device=-1)
        result = [pipe("anna works at a bank in paris"), pipe("anna works", aggregation_strategy="simple")]
    """,
    "entities as a default": """
        pipe = pipeline("token-classification", model=tagger, aggregation_strategy="max", device=-1)
        result = pipe(["anna works at a bank in paris", "the film"])
    """,
    "masks": """
        pipe = pipeline("fill-mask", model=masked, device=-1)
        text = f"the film was {pipe.tokenizer.mask_token} great"
        result = [pipe(text), pipe(text, top_k=2), pipe([text, text], targets=["film", "bank"]),
                  pipe(text, tokenizer_kwargs={"truncation": True})]
    """,
    "features": """
        pipe = pipeline("feature-extraction", model=body, tokenizer=body, device=-1)
        result = [pipe("the film"), pipe("the film", tokenize_kwargs={"truncation": True, "max_length": 3})]
        result += [pipe("the film", return_tensors=True).shape, pipe(["the film", "a bank"])]
    """,
    "an image": """
        pipe = pipeline("image-classification", model=vit, device=-1)
        result = [pipe(image), pipe(inputs=image), pipe([image], top_k=2), pipe(image, timeout=5)]
    """,
    "an image's features": """
        pipe = pipeline(task="image-feature-extraction", model=vit, device=-1)
        result = np.shape(pipe(image))
    """,
    "an image and labels": """
        pipe = pipeline("zero-shot-image-classification", model=clip, device=-1)
        result = [pipe(image, candidate_labels=["film", "bank"]), pipe(image, ["film", "bank"])]
    """,
    "a recording": """
        pipe = pipeline("audio-classification", model=audio, device=-1)
        result = [pipe(tone), pipe({"raw": tone, "sampling_rate": 16000}, top_k=2)]
    """,
    "speech": """
        pipe = pipeline("automatic-speech-recognition", model=ctc, device=-1)
        result = [pipe(tone), pipe(tone, return_timestamps="char"), pipe([tone, tone], batch_size=2)]
    """,
    "text": """
        generator = pipeline("text-generation", model=decoder, device=-1, dtype=torch.float32, do_sample=False)
        result = [generator("the quick brown", max_new_tokens=8),
                  generator(["the quick", "brown <|im_end|> fox"], max_new_tokens=8, batch_size=2),
                  generator("the quick", max_new_tokens=8, return_full_text=False)[0]["generated_text"],
                  generator("the quick", max_new_tokens=4, return_tensors=True), generator("the", max_length=12),
                  generator(text_inputs="the quick", max_new_tokens=3, return_text=True)]
    """,
    "text with options": """
        pipe = pipeline("text-generation", model=decoder, model_kwargs={"torch_dtype": torch.float32}, device=-1)
        greedy = {"do_sample": False, "max_new_tokens": 9}
        result = [pipe("the quick", **greedy, pad_token_id=pipe.tokenizer.eos_token_id),
                  pipe("the quick", **greedy, eos_token_id=pipe.tokenizer.encode("=")[0]),
                  pipe("the quick", **greedy, stop_strings=["zz", "9="], tokenizer=pipe.tokenizer),
                  pipe("the quick", **greedy, stop_sequence="=9", repetition_penalty=1.1),
                  pipe("the quick", **greedy, num_beams=3, num_return_sequences=2, use_cache=True),
                  pipe("the quick", generation_config=transformers.GenerationConfig(max_new_tokens=3, do_sample=False)),
                  pipe("the quick", **greedy, prefix="well, ", min_new_tokens=2, no_repeat_ngram_size=2)]
    """,
    "a chat": """
        pipe = pipeline("text-generation", model=decoder, device=-1, torch_dtype="float32")
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello there"}]
        greedy = {"do_sample": False, "max_new_tokens": 6}
        prompt = pipe.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        result = [pipe(messages, **greedy)[0]["generated_text"][-1], pipe([messages, messages[1:]], **greedy),
                  pipe([*messages, {"role": "assistant", "content": "well"}], **greedy), pipe(prompt, **greedy)]
    """,
    "a decoder in memory": """
        model = transformers.AutoModelForCausalLM.from_pretrained(decoder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(decoder)
        pipe = pipeline("text-generation", model=model, tokenizer=tokenizer, device=-1)
        result = [pipe("the quick", do_sample=False, max_new_tokens=5), pipe.model.config.eos_token_id]
    """,
}  # fmt: skip


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_returns_the_same_with_either_import(name: str, folders: dict[str, Any]) -> None:
    results = []
    for pipeline in (hw.pipeline, transformers.pipeline):
        names = {**folders, "np": np, "pipeline": pipeline}
        exec(textwrap.dedent(SNIPPETS[name]), names)
        results.append(names["result"])
        if hasattr(names.get("pipe"), "close"):
            names["pipe"].close()
    same(*results, rel=1e-3, abs=1e-5)


# -- arguments ---------------------------------------------------------------------------------------------------------


def test_a_task_is_read_from_the_config(folders: dict[str, Any]) -> None:
    want = {
        "classifier": "text-classification",
        "tagger": "token-classification",
        "masked": "fill-mask",
        "body": "feature-extraction",
        "vit": "image-classification",
        "clip": "zero-shot-image-classification",
        "ctc": "automatic-speech-recognition",
        "audio": "audio-classification",
        "decoder": "text-generation",
    }
    assert {name: task_of(folders[name]) for name in want} == want
    assert task_of(writers.model("t5")) == "text2text-generation"
    with hw.pipeline(model=folders["tagger"], device="cpu") as p:
        assert p.task == "token-classification"
    with pytest.raises(hw.InvalidInput, match="neither a task nor a model"):
        hw.pipeline()
    with pytest.raises(hw.UnsupportedModel, match="cannot be told from its config; pass the task too"):
        hw.pipeline(model=torch.nn.Linear(1, 1))


REFUSED = {
    "trust_remote_code": ({"trust_remote_code": True}, "code from a model's folder never runs"),
    "in model_kwargs": ({"model_kwargs": {"trust_remote_code": True}}, "code from a model's folder never runs"),
    "8 bits": ({"model_kwargs": {"load_in_8bit": True}}, "quantize='int8'"),
    "unknown": ({"model_kwargs": {"variant": "fp16"}}, r"model_kwargs\['variant'\] is not supported.*model=\.\.\."),
    "framework": ({"framework": "tf"}, "models run in torch"),
    "use_fast": ({"use_fast": False}, r"tokenizer=AutoTokenizer\.from_pretrained"),
    "two devices": ({"device_map": {"a": 0, "b": "cpu"}}, "over cpu, cuda:0; a pipeline runs on one"),
    "both devices": ({"device_map": "auto", "device": "cpu"}, "both given; pass one"),
    "both dtypes": ({"dtype": "float32", "torch_dtype": "float16"}, "pass dtype alone"),
    "revision": ({"revision": "v1"}, "has no revisions: only a hub id"),
    "an array as revision": ({"revision": np.zeros(0)}, "revision is .*; it must be a branch"),
    "config": ({"config": "x"}, r"pass that \(model=\.\.\.\)"),
    "pipeline_class": ({"pipeline_class": dict}, r"hw\.register_task"),
    "num_workers": ({"num_workers": -1}, "num_workers is -1"),
    "device": ({"device": -2}, "device is -2"),
    "no GPU": ({"device": 99}, "cuda:99"),
    "token": ({"token": 5}, "token is a int"),
    "a tuple": ({"tokenizer": ("name", {"use_fast": False})}, "tokenizer is a tuple; make it with its options first"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_had_is_refused_with_the_way_out(case: str, folders: dict[str, Any]) -> None:
    arguments, words = REFUSED[case]
    with pytest.raises(hw.HeadwayError, match=words):
        hw.pipeline("text-classification", folders["classifier"], **arguments)


def test_arguments_have_their_meaning(folders: dict[str, Any]) -> None:
    given: dict[str, Any] = {"device_map": "auto", "model_kwargs": {"attn_implementation": "eager"}, "revision": "main"}
    if not torch.cuda.is_available():
        with hw.pipeline("text-classification", folders["classifier"], **given) as p:
            assert (p.device, p.dtype) == (torch.device("cpu"), torch.float32)
    given = {"device": torch.device("cpu"), "torch_dtype": torch.float16, "trust_remote_code": False, "token": None}
    with hw.pipeline("text-classification", folders["classifier"], **given) as p:
        assert p.dtype == torch.float16


def test_a_revision_is_a_folder_of_its_own(
    folders: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADWAY_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    shutil.copytree(folders["classifier"], tmp_path / "hub" / "org" / "name@refs--pr--1")
    with hw.pipeline("text-classification", "org/name", revision="refs/pr/1", device=-1) as p:
        assert p("the film")[0]["label"]
    for arguments in ({}, {"revision": "v2"}, {"local_files_only": True}, {"token": "hf_x"}):
        with pytest.raises(hw.ModelError, match="org/name is not in the cache"):
            hw.pipeline("text-classification", "org/name", **arguments)


def test_a_saved_pipeline_loads_again(folders: dict[str, Any], tmp_path: Path) -> None:
    with hw.pipeline("text-classification", folders["classifier"], device="cpu") as p:
        p.save_pretrained(tmp_path / "a")
        want = p("the film")
    with hw.pipeline("text-classification", tmp_path / "a", device="cpu") as p:
        same(p("the film"), want)
    with hw.pipeline("text-generation", folders["decoder"], do_sample=False, max_new_tokens=3) as p:
        p.save_pretrained(tmp_path / "b")
        want = p("the film")
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "b").config.eos_token_id == EOS
    with hw.pipeline(model=tmp_path / "b", do_sample=False, max_new_tokens=3) as p:
        assert p("the film") == want


@pytest.mark.parametrize("task", ["text-classification", "text-generation"])
def test_a_lone_surrogate_is_our_error(task: str, folders: dict[str, Any]) -> None:
    model = folders["classifier" if task == "text-classification" else "decoder"]
    with hw.pipeline(task, model, device="cpu") as p:
        with pytest.raises(hw.InvalidInput, match=r"lone surrogate U\+D83D at character 4"):
            p("the \ud83d film")
        found = p(["fine", "\ud83d"], on_error="return")
        assert isinstance(found[1], hw.InvalidInput)


# -- decoders ----------------------------------------------------------------------------------------------------------


def test_a_temperature_alone_draws(folders: dict[str, Any]) -> None:
    with hw.pipeline("text-generation", folders["decoder"], max_new_tokens=8) as p:
        drawn = {p("the quick", temperature=1.5)[0]["generated_text"] for _ in range(4)}
        assert len(drawn) > 1
        assert p("the quick", temperature=0.9, seed=3) == p("the quick", temperature=0.9, seed=3)
        with pytest.warns(UserWarning, match=r"temperature=0\.9 has no effect with do_sample=False"):
            p.generate("the quick", do_sample=False, temperature=0.9)


@pytest.fixture(scope="module")
def decoder(folders: dict[str, Any]) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["decoder"], attn_implementation="eager")
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folders["decoder"], padding_side="left")


def close(mine: Any, other: Any, mask: Any = None) -> None:
    """Nested tensors alike, at the tokens that are not padding."""
    if isinstance(mine, tuple):
        assert len(mine) == len(other)
        for a, b in zip(mine, other):
            close(a, b, mask)
        return
    assert mine.shape == other.shape
    keep = torch.ones_like(mine, dtype=torch.bool)
    if mask is not None and mask.shape[1] in mine.shape[1:3]:
        keep &= (mask[:, None, :, None] if mine.ndim == 4 else mask[..., None]).bool()
    torch.testing.assert_close(mine[keep], other[keep], rtol=1e-3, atol=1e-4)


def test_forward_gives_the_output_of_a_causal_lm(folders: dict[str, Any], decoder: Any) -> None:
    model, tokenizer = decoder
    asked = {"output_hidden_states": True, "output_attentions": True}
    with hw.pipeline("text-generation", folders["decoder"]) as p:
        batch = p.preprocess(["the quick brown", "fox"])
        inputs = tokenizer(["the quick brown", "fox"], return_tensors="pt", padding=True)
        assert torch.equal(batch.inputs["input_ids"], inputs["input_ids"])
        assert torch.equal(batch.inputs["attention_mask"], inputs["attention_mask"])
        with torch.no_grad():
            want = model(**inputs, **asked)
        out = p.forward(batch, **asked)
        assert list(out.keys()) == ["logits", "hidden_states", "attentions"]
        logits, states, weights = out
        for mine, other in ((logits, want.logits), (states, want.hidden_states), (weights, want.attentions)):
            close(mine, other, inputs["attention_mask"])
        one = tokenizer("the quick", return_tensors="pt")
        labels = one["input_ids"].clone()
        labels[0, 2] = -100
        with torch.no_grad():
            want = model(**one, labels=labels)
        loss, logits = p.forward(dict(one), labels=labels, return_dict=False)
        torch.testing.assert_close(loss, want.loss, rtol=1e-4, atol=1e-5)
        assert p.forward("the quick", logits_to_keep=1).logits.shape == (1, 1, want.logits.shape[-1])
        for wrong, words in (
            ({"past_key_values": 1}, "takes no argument 'past_key_values'; it takes labels"),
            ({"use_cache": True}, "use hw.Engine and a Context"),
            ({"labels": [[1]]}, r"labels is \[1, 1\] and input_ids \[1, 9\]"),
            ({"labels": [[9999] * 9]}, "must be token ids"),
        ):
            with pytest.raises(hw.HeadwayError, match=words):
                p.forward("the quick", **wrong)
        with pytest.raises(hw.Unsupported, match="zeros between its ones"):
            p.forward({"input_ids": [[1, 2, 3]], "attention_mask": [[1, 0, 1]]})


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.2, "no_repeat_ngram_size": 2, "min_new_tokens": 3}])
def test_generate_gives_what_transformers_generate_gives(
    more: dict[str, Any], folders: dict[str, Any], decoder: Any
) -> None:
    model, tokenizer = decoder
    texts = ["the quick", "brown"] if not more else ["the quick"]  # transformers penalizes padding too
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    flags = ("output_scores", "output_logits", "output_hidden_states", "output_attentions", "return_dict_in_generate")
    asked = {**dict.fromkeys(flags, True), "do_sample": False, "max_new_tokens": 5, **more}
    want = model.generate(**inputs, **asked)
    with hw.pipeline("text-generation", folders["decoder"]) as p:
        out = p.generate(texts, **asked)
        assert torch.equal(out.sequences, want.sequences)
        close(out.scores, want.scores)
        close(out.logits, want.logits)
        close(out.hidden_states, want.hidden_states, inputs["attention_mask"])
        close(out.attentions, want.attentions, inputs["attention_mask"])
        assert torch.equal(p.generate(p.preprocess(texts), do_sample=False, max_new_tokens=5, **more), want.sequences)
        drawn = p.generate("the quick", do_sample=True, temperature=0.5, top_k=4, max_new_tokens=3, output_scores=True,
                           return_dict_in_generate=True)  # fmt: skip
        assert [int((scores > -torch.inf).sum()) for scores in drawn.scores] == [4, 4, 4]
        with pytest.raises(hw.InvalidInput, match="output_scores needs return_dict_in_generate=True"):
            p.generate("the quick", output_scores=True)


def test_parameters_of_generate_that_cannot_be_had_name_what_to_use(folders: dict[str, Any]) -> None:
    greedy: dict[str, Any] = {"do_sample": False, "max_new_tokens": 3}
    with hw.pipeline("text-generation", folders["decoder"]) as p:
        for wrong, words in (
            ({"suppress_tokens": [4, 5]}, r"bad_words_ids=\[\[id\]"),
            ({"forced_eos_token_id": 2}, r"logits=hook"),
            ({"prefix_allowed_tokens_fn": len}, r"constrain="),
            ({"max_time": 2.5}, "steps of"),
            ({"prompt_lookup_num_tokens": 2}, "speculate="),
            ({"num_beam_groups": 2}, "diverse beams"),
        ):
            for call in (p, p.generate):
                with pytest.raises(hw.Unsupported, match=words):
                    call("the quick", **greedy, **wrong)
        off = {"suppress_tokens": None, "guidance_scale": 1.0, "num_beam_groups": 1, "renormalize_logits": False}
        off |= {"streamer": None, "assistant_model": None, "synced_gpus": False, "penalty_alpha": 0, "low_memory": True}
        off |= {"output_scores": False, "return_dict_in_generate": False, "cache_implementation": "static"}
        off |= {"negative_prompt_ids": None, "custom_generate": None, "remove_invalid_values": False}
        assert p("the quick", **greedy, **off) == p("the quick", **greedy)
        for wrong, words in (
            ({"streamer": print}, "print the texts"),
            ({"return_dict_in_generate": True}, r"call \.generate"),
            ({"custom_generate": "a/b"}, "program of your own"),
        ):
            with pytest.raises(hw.Unsupported, match=words):
                p("the quick", **greedy, **wrong)


def test_options_of_other_tasks_may_be_off(folders: dict[str, Any]) -> None:
    with hw.pipeline("ner", folders["tagger"]) as p:
        plain = p("anna works at a bank")
        assert p("anna works at a bank", is_split_into_words=False, offset_mapping=None) == plain
        with pytest.raises(hw.InvalidInput, match="join the words with spaces"):
            p("anna works", is_split_into_words=True)
        with pytest.raises(hw.InvalidInput, match="is not an option"):
            p("anna works", offset_mapping=np.zeros(2))
    with hw.pipeline("automatic-speech-recognition", folders["ctc"]) as p:
        assert p(folders["tone"], generate_kwargs={}, return_language=None) == p(folders["tone"])
    with (
        hw.pipeline("zero-shot-classification", folders["nli"]) as p,
        pytest.raises(hw.InvalidInput, match="multi_label"),
    ):
        p("the film", ["film"], multi_class=True)


@pytest.mark.parametrize(
    ("name", "hint"),
    [("max_new_tokens", "give max_tokens"), ("temprature", "did you mean temperature"), ("zz", "it takes max_tokens")],
)
def test_names_of_elsewhere_get_a_hint(name: str, hint: str, folders: dict[str, Any]) -> None:
    with hw.Engine(folders["decoder"], threads=1, pages=16) as engine, engine.context() as ctx:
        unknown: dict[str, Any] = {name: 3}
        with pytest.raises(hw.WrongType, match=f"generate takes no argument '{name}'; {hint}"):
            ctx.fill([1, 2]).generate(**unknown)
