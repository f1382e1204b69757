"""Chat verbs on a context of the default model: what they write, and when a generation adds the cue."""

from __future__ import annotations

import headway as hw

CUE = "<|im_start|>assistant\n"


def written(context: hw.Context) -> str:
    return context.engine.tokenizer.decode(context.tokens)


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


def test_a_generation_adds_no_cue_behind_what_a_program_wrote_itself(smollm2: hw.Engine) -> None:
    for context in (smollm2.context().user("Hi").fill("Well"), smollm2.context().user("Hi").truncate(3).fill("Well")):
        with context, context.fork() as fork:
            for one in (context, fork):
                one.generate(hw.Argmax(), max_tokens=1)
                assert written(one).endswith("Well")
            fork.user("So?").generate(hw.Argmax(), max_tokens=1)
            assert written(fork).endswith(CUE)
