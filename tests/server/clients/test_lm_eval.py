"""`lm-eval` over HTTP on two small local tasks: the same numbers as the same tasks on the engine in this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager

import headway as hw

TASKS = Path(__file__).with_name("tasks")
CHOOSING: dict[str, Any] = {
    "task": "capitals",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "capitals.jsonl")}},
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "target_delimiter": " ",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
WRITING: dict[str, Any] = {
    "task": "counting",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "counting.jsonl")}},
    "test_split": "test",
    "output_type": "generate_until",
    "doc_to_text": "{{start}}",
    "doc_to_target": "{{next}}",
    "generation_kwargs": {"until": ["\n", ",", "."], "max_gen_toks": 8, "do_sample": False},
    "metric_list": [{"metric": "exact_match", "ignore_case": True, "ignore_punctuation": True}],
}
ROLLING: dict[str, Any] = {
    "task": "perplexity",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": str(TASKS / "counting.jsonl")}},
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{start}}",
    "metric_list": [{"metric": "bits_per_byte"}],
}


class InProcess(TemplateLM):
    """The same model without a server."""

    def __init__(self, engine: hw.Engine) -> None:
        super().__init__()
        self.engine = engine

    @property
    def eot_token_id(self) -> int:
        return self.engine.tokenizer.eos_ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it, as the client over HTTP has it."""
        begin = self.engine.tokenizer.bos_id
        assert begin is not None
        return begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.engine.tokenizer.encode(string)

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        return [self.engine.run(self._score, context, target) for _, context, target in requests]

    async def _score(self, engine: hw.Engine, context: list[int], target: list[int]) -> tuple[float, bool]:
        ids = [*context, *target]
        rows = range(len(context) - 1, len(ids) - 1)
        async with engine.context() as ctx:
            forward = ctx.forward().input(ids)
            scores = [forward.probe(row, hw.Logprob(ids[row + 1])) for row in rows]
            best = forward.sample(rows, hw.Argmax())
            out = await forward.execute()
            return sum(float(out.logprobs(one)[0]) for one in scores), out.tokens(best) == target

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        return [self.engine.run(self._score, [self.prefix_token_id], self.tok_encode(text))[0] for text in texts]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [self.engine.run(self._write, *request.args) for request in requests]

    async def _write(self, engine: hw.Engine, prompt: str, how: dict[str, Any]) -> str:
        async with engine.context() as ctx:
            generation = ctx.fill(prompt).generate(hw.Argmax(), max_tokens=how["max_gen_toks"], stop=how["until"])
            return await generation.text()


def evaluated(model: Any, arguments: dict[str, Any] | None = None, batch_size: int | None = None) -> Any:
    return simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[CHOOSING, WRITING, ROLLING],
        task_manager=TaskManager(include_defaults=False, include_path=str(TASKS)),
        bootstrap_iters=0,
        batch_size=batch_size,
    )


@pytest.fixture(scope="module")
def expected(served):
    return evaluated(InProcess(served.engine))


@pytest.mark.parametrize(("concurrent", "batch"), [(3, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_scores_over_http_are_those_in_process(served, expected, concurrent, batch):
    """The tokenizer is the server's own, over HTTP; prompts go as token ids."""
    address = {"model": "smollm2", "base_url": f"{served.url}/v1/completions", "tokenizer_backend": "remote"}
    result = evaluated("local-completions", {**address, "num_concurrent": concurrent, "max_retries": 1}, batch)
    assert set(result["results"]) == {"capitals", "counting", "perplexity"}
    for task, scores in result["results"].items():
        for name, value in scores.items():
            if isinstance(value, float):
                assert value == pytest.approx(expected["results"][task][name], abs=1e-5), (task, name)
    assert result["results"]["capitals"]["acc,none"] >= 0.6
    for task in ("capitals", "counting"):
        for mine, theirs in zip(result["samples"][task], expected["samples"][task]):
            assert _plain(mine["filtered_resps"]) == _plain(theirs["filtered_resps"])


def _plain(responses: list[Any]) -> list[Any]:
    """Scores to the digits that two ways of computing them share, and texts."""
    return [(round(float(one[0]), 3), str(one[1])) if isinstance(one, (tuple, list)) else one for one in responses]


@pytest.mark.slow
def test_text_prompts_score_alike(served, expected):
    """Without token ids: the server writes the texts as tokens itself."""
    address = {"model": "smollm2", "base_url": f"{served.url}/v1/completions", "tokenizer_backend": "remote"}
    result = evaluated("local-completions", {**address, "tokenized_requests": False, "max_retries": 1})
    assert result["results"]["counting"] == expected["results"]["counting"]
    assert result["results"]["capitals"]["acc,none"] == expected["results"]["capitals"]["acc,none"]


def test_chats(served):
    """The chat interface, which can only generate: the template is applied by the server."""
    result = simple_evaluate(
        model="local-chat-completions",
        model_args={"model": "smollm2", "base_url": f"{served.url}/v1/chat/completions", "max_retries": 1},
        tasks=[WRITING],
        task_manager=TaskManager(include_defaults=False, include_path=str(TASKS)),
        bootstrap_iters=0,
        apply_chat_template=True,
    )
    assert result is not None
    for sample in result["samples"]["counting"]:
        text = sample["doc"]["start"]
        expected = served.chat(text, max_tokens=8, temperature=0, stop=["\n", ",", "."])
        assert sample["resps"] == [[expected["choices"][0]["message"]["content"]]]
