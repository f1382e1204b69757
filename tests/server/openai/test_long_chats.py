"""Chats of many messages: rendered once, whatever is asked; and who said what reaches the template or is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import headway as hw
from headway.text.templates.chat_template import ChatTemplate
from support.live import live
from support.small import small_folder
from support.speaker import TEMPLATES

NAMED = """
{%- for m in messages %}{{ '<|im_start|>' + m.role }}
{%- if m.name and m.role == 'user' %}{{ ' ' + m.name }}{% endif %}{{ '\n' + m.content + '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


@pytest.fixture
def renderings(monkeypatch):
    """How many messages each rendering had; all are done as ever."""
    result, render = [], ChatTemplate.render

    def counted(self, messages, **options):
        result.append(len(messages))
        return render(self, messages, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    return result


@pytest.mark.parametrize("cue", [True, False])
def test_a_long_chat_is_rendered_once(served, renderings, cue):
    messages = [{"role": ("user", "assistant")[i % 2], "content": f"{i}"} for i in range(301)]
    result = served.post("/tokenize", messages=messages, add_generation_prompt=cue)
    assert result.status == 200, result.body
    assert renderings == [301]


def test_without_the_cue_a_chat_has_the_same_tokens_before_it(served):
    messages = [{"role": "user", "content": "héllo 🦜"}, {"role": "assistant", "content": "<|im_end|>"}]
    whole, bare = (
        served.post("/tokenize", messages=messages, add_generation_prompt=cue).json["tokens"] for cue in (True, False)
    )
    assert len(bare) < len(whole)
    assert whole[: len(bare)] == bare


def test_every_result_finds_its_call(served):
    calls = [{"id": f"c{i}", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(200)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "1", "name": f"f{i}"} for i in range(200)]
    request_body = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}, *results]
    assert served.post("/tokenize", messages=request_body).status == 200
    assert "'c0'" in served.refused("/tokenize", messages=[request_body[0], results[0], request_body[1]])["message"]


def test_a_name_that_the_template_writes_reaches_the_model(tmp_path: Path):
    folder = small_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(NAMED)
    with live(hw.Engine(folder, threads=1, pages=64)) as server:
        plain, named = (
            server.post("/tokenize", messages=[{"role": "user", "content": "a"} | more]).json["count"]
            for more in ({}, {"name": "ada"})
        )
        assert named > plain
        system = {"role": "system", "content": "b", "name": "bob"}  # which this template leaves out
        response = server.post("/tokenize", messages=[system, {"role": "user", "content": "a", "name": "ada"}])
        assert response.status == 200, response.body


def test_reasoning_goes_to_a_template_that_knows_it(tmp_path: Path):
    folder = small_folder(tmp_path / "model", template="qwen")
    assert "reasoning_content" in (TEMPLATES / "qwen.jinja").read_text()
    with live(hw.Engine(folder, threads=1, pages=64)) as server:
        said, counts = {"role": "assistant", "content": "a"}, []
        for more in ({}, {"reasoning_content": "b"}, {"reasoning": "b"}, {"reasoning": "b", "reasoning_content": "b"}):
            response = server.post("/tokenize", messages=[{"role": "user", "content": "a"}, said | more])
            assert response.status == 200, response.body
            counts.append(response.json["count"])
        assert counts[0] < counts[1] == counts[2] == counts[3]
