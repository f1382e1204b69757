"""`chat_template`: a template that a chat brings, where the server allows it, in the sandbox of the models' own."""

from __future__ import annotations

from pathlib import Path

from support.live import live
from support.small import small_engine

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{{ extra }}{% if add_generation_prompt %}<model>{% endif %}"
)
FIELDS = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0, "return_token_ids": True}
PATH = "/v1/chat/completions"


def test_a_template_of_the_request_makes_the_prompt_where_it_is_allowed(tmp_path: Path) -> None:
    with live(small_engine(tmp_path / "model"), allow_chat_template=True) as served:
        chat = served.post(PATH, **FIELDS, chat_template=TEMPLATE, chat_template_kwargs={"extra": "!"}).json
        ids = served.engine.tokenizer.encode("<user>Hi!<model>")
        assert chat["prompt_token_ids"] == ids
        (plain,) = served.complete(ids, max_tokens=3, temperature=0, return_token_ids=True)["choices"]
        assert chat["choices"][0]["token_ids"] == plain["token_ids"]
        assert served.post(PATH, **FIELDS).json["prompt_token_ids"] != ids  # others have the model's own
        refused = {
            "{% for": "does not parse",
            "{% for i in range(10**9) %}{% for j in range(10**9) %}{% endfor %}{% endfor %}": "stopped",
            "{{ ''.__class__.__mro__ }}": "template",
            "{{ raise_exception('no') }}": "refuses",
            "x" * 40_000: "at most 32768",
        }
        for template, says in refused.items():
            error = served.refused(PATH, **FIELDS, chat_template=template)
            assert says in error["message"], error
        error = served.refused(PATH, **FIELDS, chat_template="x", chat_template_kwargs={"extra": 1})
        assert error["param"] == "chat_template_kwargs.extra"


def test_it_is_refused_unless_the_operator_allows_it(tmp_path: Path) -> None:
    with live(small_engine(tmp_path / "model")) as served:
        error = served.refused(PATH, **FIELDS, chat_template=TEMPLATE)
        assert (error["param"], error["code"]) == ("chat_template", "unsupported")
        assert "--allow-chat-template" in error["message"]
        assert served.post(PATH, **FIELDS, chat_template=None).status == 200
