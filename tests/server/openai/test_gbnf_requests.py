"""`grammar` of llama-server's clients: on completions, on chats, and where it cannot be."""

from __future__ import annotations

import re

from support.live import Live

GRAMMAR = 'root ::= "(" [a-c]{2,4} ")"'


def test_completions_and_chats_follow_a_gbnf_grammar(served: Live) -> None:
    (first,) = served.complete("Letters: ", grammar=GRAMMAR, max_tokens=20)["choices"]
    messages = [{"role": "user", "content": "Letters?"}]
    second = served.post("/v1/chat/completions", messages=messages, grammar=GRAMMAR, max_tokens=20).json
    (third,) = served.complete("Letters: ", structured_outputs={"grammar": GRAMMAR}, max_tokens=20)["choices"]
    for text in (first["text"], second["choices"][0]["message"]["content"], third["text"]):
        assert re.fullmatch(r"\([abc]{2,4}\)", text)
    assert served.complete("x", grammar="", max_tokens=1)["choices"]
    assert served.complete("x", grammar='start: "b"', max_tokens=2)["choices"][0]["text"] == "b"


def test_a_grammar_that_cannot_be_followed_is_refused_by_name(served: Live) -> None:
    error = served.refused("/v1/completions", prompt="x", grammar="root ::= nothing")
    assert (error["param"], error["code"]) == ("grammar", "invalid_grammar")
    assert "'nothing'" in error["message"]
    error = served.refused("/v1/completions", prompt="x", grammar=GRAMMAR, structured_outputs={"regex": "a"})
    assert error["param"] == "grammar"
    error = served.refused("/v1/completions", prompt="x", grammar='root ::= root "a"')
    assert error["code"] == "invalid_grammar"
