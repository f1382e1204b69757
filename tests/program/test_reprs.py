"""Public objects tell what they are: model, device, lengths, state."""

from __future__ import annotations

import re

import headway as hw
from headway.testing import random_model


def test_an_engine_and_its_objects_show_their_state() -> None:
    async def program(engine: hw.Engine) -> None:
        assert repr(engine) == "<Engine 'llama in memory': float32 on cpu, 16 of 16 pages free, open>"
        async with engine.context() as context:
            assert repr(context) == "<Context: 0 tokens computed, 0 pending, idle>"
            context.fill([1, 2, 3])
            forward = context.forward().input([4])
            forward.sample([-1], hw.Argmax())
            handle = forward.probe(-1, hw.Entropy())
            assert repr(forward) == "<Forward: 1 input tokens, 1 samples, 1 probes, not executed>"
            assert "probe=Entropy" in repr(handle)
            with engine._lock:
                execution = forward.execute()
                assert repr(execution) == "<Execution: running>"
                assert repr(context) == "<Context: 0 tokens computed, 3 pending, busy>"
            output = await execution
            assert repr(execution) == "<Execution: done>"
            assert re.fullmatch(r"<Output: 2 values of 1 rows, [\d.]+ ms>", repr(output))
            assert repr(forward).endswith("executed>")
            assert repr(context) == "<Context: 4 tokens computed, 0 pending, idle>"
            several = context.generate(num_beams=2, max_tokens=2)
            assert repr(several) == "<Generations of 1, num_beams=2, max_tokens=2, not run yet>"
            await several.sequences()
            assert repr(several) == "<Generations of 1, num_beams=2, max_tokens=2, finish='length'>"
        assert repr(context).endswith("released>")

    with hw.Engine(random_model(), pages=16, threads=1) as engine:
        engine.run(program)
    assert repr(engine).endswith("closed>")


def test_looking_at_a_context_takes_nothing_back() -> None:
    """A repr is read by debuggers: it must not take back the pass that a generation runs ahead."""

    async def program(engine: hw.Engine) -> None:
        async with engine.context() as context:
            generation = context.fill([1, 2, 3]).generate(hw.Argmax(), max_tokens=8)
            assert repr(generation) == "<Generation: 0 of 8 tokens, not begun>"
            await anext(generation)
            ahead = context._retract
            assert ahead is not None
            assert repr(generation) == "<Generation: 1 of 8 tokens, running>"
            repr(context)
            assert context._retract is ahead
            await generation.tokens()
            assert repr(generation) == "<Generation: 8 of 8 tokens, ended (length)>"

    with hw.Engine(random_model(), pages=16, threads=1) as engine:
        engine.run(program)


def test_a_tokenizer_shows_its_size_and_ends(smollm2: hw.Engine) -> None:
    assert re.fullmatch(r"<Tokenizer: 49152 tokens, bos_id=\d+, eos_ids=\([\d, ]+\)>", repr(smollm2.tokenizer))
    with smollm2.context() as context:
        reply = context.chat("Hello", max_tokens=1)
        assert repr(reply) == "<ChatReply: 0 characters, 0 calls in 0 rounds, running>"
