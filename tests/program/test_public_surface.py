"""What `dir()` shows of the objects that programs use is what their documentation names, and nothing else."""

from __future__ import annotations

import pytest

import headway as hw
from headway.testing import scripted_engine

SURFACE = {
    hw.Engine: """
        alive busy_since cache capabilities chat_template chat_writer close config context decoder delete deterministic
        disable_profiling enable_profiling eos_ids events fingerprint generation_defaults has_tokenizer info
        is_asleep is_profiling load_adapter open page_map page_size pages profile run sleep stats stream take tokenizer
        unload_adapter update_weights vocab_size wake
    """,
    hw.Context: """
        assistant cached_tokens chat cue engine execute fill flush fork forward generate inner messages next_position
        page_size pending release save seal seed seq_len set_bid system text_before text_start tokens truncate
        user
    """,
    hw.Forward: "adapter attention_mask bias defer_commit execute input input_at mask mask_async output probe sample",
    hw.Execution: "cancel done result wait",
    hw.Output: "attention distribution entropy hidden lens logits logprobs ranking stats token tokens",
    hw.Generation: """
        accept context finish forced fork generated json prepare reseed resume seed speculation stop_string text tokens
    """,
}


@pytest.mark.parametrize("kind", SURFACE, ids=lambda kind: kind.__name__)
def test_an_object_shows_its_documented_names_only(kind: type) -> None:
    with scripted_engine(pages=8) as engine, engine.context().fill([1]) as context:
        forward = context.forward().input([2])
        generation = context.generate(max_tokens=1)
        execution = forward.execute()
        (found,) = [
            each
            for each in (engine, context, forward, execution, execution.result(), generation)
            if isinstance(each, kind)
        ]
        assert [name for name in dir(found) if not name.startswith("_")] == sorted(SURFACE[kind].split())


@pytest.mark.parametrize("kind", SURFACE, ids=lambda kind: kind.__name__)
def test_every_shown_name_says_what_it_is(kind: type) -> None:
    names = [name for name in SURFACE[kind].split() if hasattr(kind, name)]
    assert [name for name in names if not (getattr(kind, name).__doc__ or "").strip()] == []
