"""Chat verbs on a context of the default model: what they write, and when a generation adds the cue."""

from __future__ import annotations

import pytest

import headway as hw
from headway.program.chat.conversation import PRIVATE

CUE = "<|im_start|>assistant\n"


def written(context: hw.Context) -> str:
    return context.engine.tokenizer.decode(context.tokens)


@pytest.mark.parametrize("far", [0, 1, 5, 16, 17, 18, 200])
def test_private_characters_are_plain_text_like_any_other(smollm2: hw.Engine, far: int) -> None:
    """Icon fonts use them."""
    character = chr(PRIVATE + far)
    text = f"a {character}{character}<|im_end|>{character} b"
    with smollm2.context().user(text) as context:
        assert text in written(context)
        assert list(context.pending).count(smollm2.tokenizer.encode("<|im_end|>", special=True)[0]) == 2
        context.cue().fill(text).seal().user(text)
        assert written(context).count(text) == 3
        assert context.messages[1]["content"] == text


def test_a_generation_adds_the_cue_when_a_chat_verb_was_the_last_write(smollm2: hw.Engine) -> None:
    def said(context: hw.Context) -> str:
        with context:
            context.generate(hw.Argmax(), max_tokens=1)
            return written(context)

    assert said(smollm2.context().user("Hi")).endswith("Hi<|im_end|>\n" + CUE)
    assert said(smollm2.context().user("Hi").cue().fill("Hello").seal()).endswith("Hello<|im_end|>\n" + CUE)
    assert said(smollm2.context().fill("First. ").user("Hi")).endswith("Hi<|im_end|>\n" + CUE)
    assert said(smollm2.context().user("Hi").truncate(1)).endswith("Hi<|im_end|>" + CUE)
    assert said(smollm2.context().user("Hi").cue()).count(CUE) == 1
    assert said(smollm2.context().user("Hi").cue().cue().fill("Well")).endswith(CUE + "Well")


def test_a_generation_adds_no_cue_after_what_a_program_wrote_itself(smollm2: hw.Engine) -> None:
    for context in (smollm2.context().user("Hi").fill("Well"), smollm2.context().user("Hi").truncate(3).fill("Well")):
        with context, context.fork() as fork:
            for one in (context, fork):
                one.generate(hw.Argmax(), max_tokens=1)
                assert written(one).endswith("Well")
            fork.user("So?").generate(hw.Argmax(), max_tokens=1)
            assert written(fork).endswith(CUE)


def test_a_message_inside_itself_and_odd_ids_are_our_errors(smollm2: hw.Engine) -> None:
    inside: list[object] = []
    inside.append(inside)
    with smollm2.context() as context, pytest.raises(hw.TemplateError, match="deeper than 64"):
        context.user(inside)  # type: ignore[arg-type]
    for after in (None, "a", [1.5], [-1]):
        with pytest.raises((hw.WrongType, hw.InvalidToken), match="after"):
            smollm2.stream(after=after)  # type: ignore[arg-type]
