"""The public protocol: tasks of one's own, the steps by hand, structured outputs, arguments checked by inspection."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headway as hw
from headway.pipelines.backends.torch import TorchBackend, accepted, place, to_device, to_host
from headway.pipelines.inputs.arrays import collate, pad
from headway.pipelines.registry import task_names
from support import encoders


def classifier(family: str = "bert", **more: Any) -> hw.Pipeline:
    model = encoders.model(family, "classify", num_labels=3)
    return hw.pipeline("text-classification", model, tokenizer=encoders.tokenizer(family), device="cpu", **more)


class Lengths(hw.Task):
    """How many tokens a text has, from the model's mask."""

    reads = None

    def preprocess(self, item: Any, options: Any) -> hw.PreparedItem:
        ids = self.loaded.tokenizer(item)["input_ids"]
        return hw.PreparedItem((hw.Row({"input_ids": ids}, len(ids)),), item)

    def reduce(self, output: Any, batch: hw.ModelInputs, options: Any) -> dict[str, Any]:
        return {
            "n": batch.inputs["attention_mask"].sum(1),
            "width": torch.tensor([output[0].shape[-1]] * len(batch.rows)),
        }

    def postprocess(self, prepared: hw.PreparedItem, results: Any, options: Any) -> dict[str, int]:
        return {"text": prepared.facts, "tokens": int(results[0]["n"]), "width": int(results[0]["width"])}


class TestTasks:
    def test_a_task_of_ones_own(self) -> None:
        hw.register_task("lengths", Lengths, replace=True)
        words = encoders.tokenizer("bert")
        with hw.pipeline("lengths", encoders.model("bert", "base"), tokenizer=words, device="cpu") as p:
            texts = encoders.texts(20)
            assert p("the film") == {"text": "the film", "tokens": 4, "width": 32}
            assert [one["tokens"] for one in p(texts)] == [len(words(text)["input_ids"]) for text in texts]
        assert "lengths" in task_names()

    def test_names_that_are_taken_need_replace(self) -> None:
        for name in ("text-classification", "sentiment-analysis"):
            with pytest.raises(hw.InvalidInput, match="replace=True"):
                hw.register_task(name, Lengths)
        with pytest.raises(hw.WrongType, match=r"not a subclass of headway\.Task"):
            hw.register_task("x", dict)  # type: ignore[arg-type]
        with pytest.raises(hw.InvalidInput, match="the name of a task is ' '"):
            hw.register_task(" ", Lengths)

    def test_an_unknown_task_names_the_nearest(self) -> None:
        with pytest.raises(hw.Unsupported, match=r"no task 'text-clasification'; did you mean text-classification"):
            hw.pipeline("text-clasification", "x")
        with pytest.raises(hw.WrongType, match="a name such as"):
            hw.pipeline(3, "x")  # type: ignore[arg-type]

    def test_aliases(self) -> None:
        model = encoders.model("bert", "classify", num_labels=2)
        with hw.pipeline("sentiment-analysis", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
            assert p.task == "text-classification"
            shown = f"BertForSequenceClassification of {p.implementation.loaded.name}, cpu float32"
            assert repr(p) == f"Pipeline('text-classification', {shown})"
            assert repr(p.implementation) == f"TextClassification({shown})"

    def test_a_task_without_a_default_model_says_so(self) -> None:
        with pytest.raises(hw.InvalidInput, match="no default model"):
            hw.pipeline("text-classification")


class TestForward:
    def test_the_whole_answer_is_the_models_own(self) -> None:
        with classifier() as p:
            words = encoders.tokenizer("bert")
            texts = ["the film was great", "dull"]
            out = p.forward(texts, output_hidden_states=True, output_attentions=True)
            with torch.no_grad():
                want = p.model(**words(texts, padding=True, return_tensors="pt"), output_hidden_states=True)
        torch.testing.assert_close(out.logits, want.logits, rtol=1e-4, atol=1e-5)
        assert len(out.hidden_states) == 3
        assert out.attentions[0].shape == (2, 4, 6, 6)
        torch.testing.assert_close(out.hidden_states[2], want.hidden_states[2], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("labels", [[2], torch.tensor([0])])
    def test_labels_give_a_loss(self, labels: Any) -> None:
        with classifier() as p:
            out = p.forward("the film", labels=labels)
            want = nn.functional.cross_entropy(out.logits, torch.as_tensor(labels))
            assert float(out.loss) == pytest.approx(float(want), rel=1e-5)
            assert out[0] is out.loss
            loss, logits = p.forward("the film", labels=labels, return_dict=False)
            assert float(loss) == pytest.approx(float(want), rel=1e-5)
            assert logits.shape == (1, 3)

    def test_a_regression_head_has_a_squared_loss(self) -> None:
        model = encoders.model("bert", "classify", num_labels=1, problem_type="regression")
        with hw.pipeline("text-classification", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
            out = p.forward("the film", labels=[0.5])
            assert float(out.loss) == pytest.approx((float(out.logits[0, 0]) - 0.5) ** 2, rel=1e-4)
            assert p("the film")["score"] == pytest.approx(float(out.logits[0, 0]), rel=1e-4)

    def test_the_steps_by_hand_give_the_same_result(self) -> None:
        with classifier() as p:
            batch = p.preprocess("the film was dull")
            assert set(batch.inputs) == {"input_ids", "token_type_ids", "attention_mask"}
            output = p.forward(batch)
            found = p.postprocess("the film was dull", output)
            whole = p("the film was dull")
            assert found["label"] == whole["label"]
            assert found["score"] == pytest.approx(whole["score"], rel=1e-5)
            assert p.forward(batch.inputs).logits.equal(output.logits)
            with pytest.raises(hw.InvalidInput, match=r"p\.postprocess\(item, output\)"):
                p.postprocess(output)

    @pytest.mark.parametrize("family", encoders.FAMILIES)
    def test_an_argument_the_model_does_not_take_is_an_error(self, family: str) -> None:
        with classifier(family) as p:
            for name in ("pixel_values", "frames", "max_new_tokens"):
                with pytest.raises(hw.InvalidInput, match=rf"forward takes no argument '{name}'; it takes .*input_ids"):
                    p.forward("the film", **{name: 1})
            ids = p.preprocess("the film").inputs["input_ids"]
            with pytest.raises(hw.InvalidInput, match="'pixels'"):
                p.forward({"input_ids": ids, "pixels": ids})

    def test_forward_parameters_of_a_call_point_to_forward(self) -> None:
        with classifier() as p, pytest.raises(hw.InvalidInput, match=r"call \.forward\(\.\.\., output_hidden_states"):
            p("the film", output_hidden_states=True)

    def test_names_are_found_by_inspection(self) -> None:
        class Odd(nn.Module):
            def forward(self, pixels: Any, *, scale: float = 1.0, **kwargs: Any) -> Any:
                return pixels * scale

        assert {"pixels", "scale"} <= accepted(Odd)
        assert "input_ids" not in accepted(Odd)
        backend = TorchBackend(Odd(), place("cpu", "float32"))
        assert backend.takes("pixels")
        assert float(backend({"pixels": torch.ones(1)}, scale=3.0)) == 3.0
        with pytest.raises(hw.InvalidInput, match=r"Odd\.forward takes no argument 'zoom'; it takes pixels, scale"):
            backend({"pixels": torch.ones(1)}, zoom=2)

    def test_the_pass_is_in_eval_and_inference_mode(self) -> None:
        class Watch(nn.Module):
            def forward(self, x: Any) -> Any:
                return torch.is_inference_mode_enabled(), self.training, x.dtype, torch.is_autocast_enabled("cpu")

        plain = TorchBackend(Watch(), place("cpu", "float32"))
        assert plain({"x": torch.ones(1)}) == (True, False, torch.float32, False)
        assert TorchBackend(Watch(), place("cpu", "bfloat16"))({"x": torch.ones(1)})[2] == torch.bfloat16
        assert TorchBackend(Watch(), place("cpu", "autocast"))({"x": torch.ones(1)})[2:] == (torch.float32, True)

    def test_a_module_in_training_is_not_touched(self) -> None:
        model = encoders.model("bert", "classify", num_labels=2).train()
        with hw.pipeline("text-classification", model, tokenizer=encoders.tokenizer("bert"), device="cpu") as p:
            assert p("the film") == p("the film")
        assert model.training
        assert all(parameter.requires_grad for parameter in model.parameters())


class TestMoving:
    def test_nested_inputs_move_and_floats_are_cast(self) -> None:
        tree = {"a": torch.ones(2), "b": [torch.ones(1, dtype=torch.int64), "x"], "c": ({"d": torch.zeros(1)}, 3)}
        moved = to_device(tree, torch.device("cpu"), torch.bfloat16)
        assert moved["a"].dtype == torch.bfloat16
        assert moved["b"][0].dtype == torch.int64
        assert moved["b"][1] == "x"
        assert isinstance(moved["c"], tuple)
        assert moved["c"][0]["d"].dtype == torch.bfloat16
        assert moved["c"][1] == 3
        assert to_host({"x": (torch.ones(1), [torch.zeros(1)])})["x"][1][0].tolist() == [0.0]

    def test_rows_are_padded_on_the_tokenizers_side(self) -> None:
        assert pad([[1, 2], [3]], 9).tolist() == [[1, 2], [3, 9]]
        assert pad([[1, 2], [3]], 9, side=0).tolist() == [[1, 2], [9, 3]]
        rows = [hw.Row({"input_ids": [1, 2, 3]}, 3), hw.Row({"input_ids": [4]}, 1)]
        right = collate(rows, {"input_ids": 7, "side": 1}, lambda name: True)
        left = collate(rows, {"input_ids": 7, "side": 0}, lambda name: True)
        assert right["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
        assert left["input_ids"].tolist() == [[1, 2, 3], [7, 7, 4]]
        assert left["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]

    def test_arrays_are_stacked_dicts_entered_and_odd_shapes_refused(self) -> None:
        rows = [hw.Row({"x": {"y": np.full((2, 2), i)}}, 4) for i in range(3)]
        assert collate(rows, {}, lambda name: False)["x"]["y"].shape == (3, 2, 2)
        odd = [hw.Row({"x": np.zeros((2, 2))}, 4), hw.Row({"x": np.zeros((3, 2))}, 6)]
        with pytest.raises(hw.InvalidInput, match=r"x of shapes \[\(2, 2\), \(3, 2\)\] cannot share a batch"):
            collate(odd, {}, lambda name: False)
        with pytest.raises(hw.InvalidInput, match="cannot share a batch"):
            collate([hw.Row({"x": [1]}, 1), hw.Row({"y": [1]}, 1)], {}, lambda name: False)


class TestOutputs:
    def output(self) -> hw.ModelOutput:
        return hw.ModelOutput(
            logits=torch.randn(2, 3),
            loss=None,
            states=(torch.ones(1, 2, dtype=torch.bfloat16), torch.arange(3)),
            array=np.arange(4, dtype=np.float64).reshape(2, 2),
            label="good",
            score=0.5,
            nested={"a": torch.zeros(1), "n": 3},
        )

    def test_attribute_item_and_tuple_access(self) -> None:
        out = self.output()
        assert out.logits is out["logits"] is out[0]
        assert "loss" not in out
        assert len(out) == len(out.to_tuple()) == 6
        assert out[:2] == out.to_tuple()[:2]
        logits, states, *_ = out
        assert logits is out.logits
        assert states is out["states"]
        assert list(out.keys())[:2] == ["logits", "states"]
        assert dict(out)["label"] == {**out}["label"] == "good"
        assert ("label", "good") in out.items()
        assert "logits" in out
        assert "logits" in dir(out)
        assert "float32[2, 3]" in repr(out)
        with pytest.raises(AttributeError, match=r"no 'loss'; it has logits, states"):
            out.loss  # noqa: B018
        with pytest.raises(KeyError):
            out["loss"]
        with pytest.raises(AttributeError, match="immutable"):
            out.label = "bad"
        with pytest.raises(hw.WrongType, match="field 'f' holds a function"):
            hw.ModelOutput(f=lambda: 0)

    def test_json_and_safetensors_give_it_back(self, tmp_path: Path) -> None:
        out = self.output()
        assert hw.ModelOutput.from_json(out.to_json()) == out
        json.loads(out.to_json())
        out.save(tmp_path / "out.safetensors")
        again = hw.ModelOutput.load(tmp_path / "out.safetensors")
        assert again == out
        assert again.states[0].dtype == torch.bfloat16
        assert hw.ModelOutput(logits=torch.zeros(1)) != out

    def test_what_is_no_output_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(hw.InvalidInput, match="not the JSON of an output"):
            hw.ModelOutput.from_json("[1")
        (tmp_path / "x").write_bytes(b"garbage")
        with pytest.raises(hw.BadModelFile, match="cannot be read"):
            hw.ModelOutput.load(tmp_path / "x")

    def test_a_forward_answer_can_be_kept(self, tmp_path: Path) -> None:
        with classifier() as p:
            out = p.forward("the film", output_hidden_states=True)
        out.save(tmp_path / "answer.safetensors")
        assert hw.ModelOutput.load(tmp_path / "answer.safetensors") == out


class TestLoading:
    def test_a_folder_is_loaded_with_its_tokenizer(self, tmp_path: Path) -> None:
        model = encoders.model("bert", "classify", num_labels=3)
        model.save_pretrained(tmp_path)
        encoders.tokenizer("bert").save_pretrained(tmp_path)
        with classifier() as want, hw.pipeline("text-classification", tmp_path, device="cpu") as p:
            text = "the film was great"
            assert p(text)["label"] == want(text)["label"]
            assert p(text)["score"] == pytest.approx(want(text)["score"], rel=1e-5)

    def test_pickles_and_missing_heads_are_refused(self, tmp_path: Path) -> None:
        encoders.model("bert", "base").save_pretrained(tmp_path)
        encoders.tokenizer("bert").save_pretrained(tmp_path)
        with pytest.raises(hw.BadModelFile, match=r"no weights for classifier\.bias, classifier\.weight.*not trained"):
            hw.pipeline("text-classification", tmp_path, device="cpu")
        (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
        with pytest.raises(hw.BadModelFile, match=r"pytorch_model\.bin, pickles, which are never loaded"):
            hw.pipeline("feature-extraction", tmp_path, device="cpu")

    def test_a_module_needs_its_tokenizer(self) -> None:
        with pytest.raises(hw.ModelError, match=r"pass its tokenizer too \(tokenizer=\.\.\.\)"):
            hw.pipeline("text-classification", encoders.model("bert", "classify"), device="cpu")
        with pytest.raises(hw.WrongType, match="model is a int"):
            hw.pipeline("text-classification", 3)

    def test_a_decoder_file_is_pointed_to_the_engine(self, smollm2_path: Path) -> None:
        with pytest.raises(hw.UnsupportedModel, match="text-generation"):
            hw.pipeline("text-classification", smollm2_path)

    def test_without_transformers_the_extra_is_named(self) -> None:
        program = """
import sys
sys.modules["transformers"] = None
import headway as hw
try:
    hw.pipeline("sentence-embedding")
except hw.Unsupported as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert "pip install 'headway[pipelines]'" in done.stdout, done.stderr
