"""Hierarchical attention: sections see the heading and themselves, the question at the end sees everything.

A section's keys and values then depend on the heading and itself alone, so one can be rewritten (at the same length,
so that positions stay) without touching the others: the example does it and looks at a neighbor's hidden state.
"""

from itertools import chain

import numpy as np

import headway as hw
from headway import Argmax, Hidden, Mask

HEADING = "Notes on three cities.\n"
OSLO = "Oslo: cold winters, a long fjord, and the painter Munch.\n"
REWRITTEN = "Oslo: mild winters, a big harbour, and the writer Ibsen.\n"
LIMA = "Lima: fog in winter, the Pacific Ocean, and ceviche.\n"
CAIRO = "Cairo: dry heat, the river Nile, and the great pyramids.\n"
QUESTION = "Question: In which city are the great pyramids?\nAnswer: The great pyramids are in"


async def read(engine: hw.Engine, sections: list[str], *, apart: bool) -> tuple[np.ndarray, str, float]:
    """The hidden state at the last section's end, the answer's first token, the share of causal pairs attended."""
    parts = [engine.tokenizer.encode(text) for text in [HEADING, *sections, QUESTION]]
    lengths = [len(part) for part in parts[:-1]]  # what follows, the question, is an open block that sees all
    mask = Mask.blocks(lengths, sees=[(n, 0) for n in range(1, len(lengths))]) if apart else Mask.causal()
    async with engine.context() as ctx:
        fwd = ctx.forward().input(chain(*parts)).attention_mask(mask)
        state = fwd.probe(sum(lengths) - 1, Hidden(engine.config.layers))
        answer = fwd.sample([-1], Argmax())
        out = await fwd.execute()
        n = ctx.seq_len
    share = mask.to_bool(0, n).sum() / (n * (n + 1) / 2)
    return out.hidden(state), engine.tokenizer.decode([out.token(answer)]), share


async def program(engine: hw.Engine) -> dict[str, tuple[float, str]]:
    print("heading in slots 0–1, sections in 2–4, 5–7 and 8–10, question from 11:")
    print(Mask.blocks([2, 3, 3, 3], sees=[(1, 0), (2, 0), (3, 0)]).picture(0, 13))
    found = {}
    for name, apart in [("plain causal", False), ("hierarchical", True)]:
        state, answer, share = await read(engine, [OSLO, LIMA, CAIRO], apart=apart)
        other, _, _ = await read(engine, [REWRITTEN, LIMA, CAIRO], apart=apart)
        moved = float(np.linalg.norm(state - other) / np.linalg.norm(state))
        print(f"{name}: {share:.0%} of the causal pairs attended; the answer starts with {answer!r}")
        print(f"  rewriting the first section moves the hidden state at the end of the last by {moved:.4%}")
        found[name] = (moved, answer)
    return found


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
