"""What a request leaves out: the model's generation_config.json says it, as it does in process."""

from __future__ import annotations

import json

import pytest

import headway as hw
from support.live import live
from support.speaker import speaking_folder

PROMPT = [5, 17, 3, 44, 5, 60, 2, 9]


@pytest.fixture(scope="module")
def recommended(tmp_path_factory):
    """A small random model whose publisher recommends how to draw."""
    folder = speaking_folder(tmp_path_factory.mktemp("recommended"))
    said = {"do_sample": True, "temperature": 0.6, "top_k": 7, "top_p": 0.9, "max_new_tokens": 11}
    (folder / "generation_config.json").write_text(json.dumps(said))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    with live(hw.Engine(folder, pages=64, threads=1)) as server:
        yield server


def tokens(server, seed, *sampler, **options):
    async def program(engine):
        async with engine.context(seed=seed) as ctx:
            return await ctx.fill(PROMPT).generate(*sampler, **options).tokens()

    result = server.engine.run(program)
    return server.engine.tokenizer.decode(result, skip_special=True)


def test_a_request_that_says_nothing_draws_as_the_file_says(recommended):
    for seed in range(4):
        response = recommended.complete(PROMPT, seed=seed, max_tokens=11, ignore_eos=True, echo=False)
        expected = tokens(recommended, seed, stop_only=True)
        assert response["choices"][0]["text"] == expected


def test_a_request_that_says_something_keeps_the_rest(recommended):
    response = recommended.complete(PROMPT, seed=3, max_tokens=11, ignore_eos=True, temperature=1.1)
    expected = tokens(recommended, 3, hw.Sampling(1.1, top_k=7, top_p=0.9), stop_only=True, max_tokens=11)
    assert response["choices"][0]["text"] == expected


def test_a_chat_is_as_long_as_the_file_says(recommended):
    request_body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    assert recommended.chat(**request_body)["usage"]["completion_tokens"] == 11
    assert recommended.chat(**request_body, max_tokens=13)["usage"]["completion_tokens"] == 13


def test_a_model_without_a_template_says_what_to_use(tmp_path):
    with live(hw.Engine(speaking_folder(tmp_path), pages=64, threads=1)) as server:
        error = server.refused("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
        assert "/v1/completions" in error["message"]


def test_a_model_without_a_tokenizer_takes_and_gives_tokens():
    """Texts are refused; the tokens of an answer are in its log-probabilities."""
    from headway.testing import random_model

    with live(hw.Engine(random_model(), pages=64, threads=1)) as server:
        assert "no tokenizer" in server.refused("/v1/completions", prompt="hello")["message"]
        response = server.complete(PROMPT, max_tokens=4, temperature=0, logprobs=1)
        expected = server.engine.run(_greedy)
        assert response["choices"][0]["logprobs"]["tokens"] == [f"<{id}>" for id in expected]
        assert response["usage"]["completion_tokens"] == 4
        assert "no tokenizer" in server.refused("/detokenize", tokens=[1])["message"]


async def _greedy(engine):
    async with engine.context() as ctx:
        return await ctx.fill(PROMPT).generate(hw.Argmax(), max_tokens=4).tokens()
