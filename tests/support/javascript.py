"""What clients/js/test/program.mjs does, in Python: the values that the JavaScript client must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headway as hw

FOLDER = Path(__file__).parents[2] / "clients" / "js"
V = 97


class Even:
    def mask(self) -> np.ndarray:
        return np.full((V + 31) // 32, 0x55555555, np.uint32)

    def accept(self, token: int) -> None:
        if token % 2:
            raise LookupError(token)

    def rollback(self, n: int) -> None: ...


async def program(engine: hw.Engine) -> dict[str, Any]:
    """What clients/js/test/program.mjs does."""
    found: dict[str, Any] = {}
    async with engine.context(seed=5) as ctx:
        ctx.fill(range(30))
        fwd = ctx.forward().input([7, 8]).input_at([9], [40])
        fwd.mask(forbid=[3]).mask(allow=range(0, V, 2), rows=[-1])
        fwd.attention_mask(hw.Mask.window(20) | hw.Mask.sink(2, 1))
        drawn = fwd.sample([0, -1], hw.Sampling(temperature=0.9, top_k=20, repetition_penalty=1.2))
        logits, top = fwd.probe(-1, hw.Logits()), fwd.probe(-1, hw.Distribution(k=3))
        entropy, scores = fwd.probe(0, hw.Entropy()), fwd.probe(1, hw.AttentionScores(0))
        lens, ranking = fwd.probe(1, hw.LogitLens([0, 1], 2)), fwd.probe(-1, hw.Ranking(2, [5]))
        out = await fwd.execute()
        ids, probs = out.distribution(top)
        found["drawn"], found["logits"] = out.tokens(drawn), out.logits(logits).tolist()
        found["top"], found["entropy"] = [ids.tolist(), probs.tolist()], out.entropy(entropy)
        weights = out.attention(scores)
        found["scores"] = [list(weights.shape), weights.ravel().tolist()]
        found["lens"] = [each.tolist() for each, _ in out.lens(lens)]
        found["ranks"] = [[each.id, each.rank] for each in out.ranking(ranking).best]
        found["seeds"] = [str(seed) for seed in out.stats.seeds]
        found["state"] = [ctx.seq_len, ctx.next_position, ctx.inner().committed_page_count]
        with ctx.fork() as fork:
            found["fed"] = (await fork.generate(hw.Argmax(), max_tokens=2).tokens())[1]
        with ctx.fork() as fork:
            ruled = fork.forward().input([5, 6])
            ruled.attention_mask(hw.Mask.rule(lambda row, slots: (slots < 3) | ((row - slots) % 4 == 0)))
            seen = ruled.probe(-1, hw.Logits())
            found["ruled"] = (await ruled.execute()).logits(seen).tolist()
        generation = ctx.generate(hw.TopP(0.9, seed=3), max_tokens=40, probe=[hw.Entropy(), hw.Logprob(4)])
        found["steps"] = []
        for _ in range(7):
            step = await anext(generation)
            probes = [[float(nats), float(np.ravel(logprob)[0])] for nats, logprob in step.probes]
            found["steps"].append([list(step.tokens), probes])
        found["after"] = [list(ctx.tokens), list(generation.generated)]
        ctx.truncate(2)
        found["rest"], found["finish"] = await generation.tokens(), generation.finish
        with ctx.fork() as fork:
            beams = await fork.generate(num_beams=3, num_return_sequences=2, max_tokens=5).sequences()
            found["beams"] = [list(one.tokens) for one in beams]
        with ctx.fork() as fork:
            found["even"] = await fork.generate(hw.Multinomial(seed=4), max_tokens=9, constrain=Even()).tokens()

        def liked(logits: np.ndarray, generation: object) -> None:
            logits[17] += 3

        with ctx.fork() as fork:
            found["liked"] = await fork.generate(hw.TopP(0.9, seed=1), max_tokens=6, logits=liked).tokens()
        dry = hw.Sampling(
            seed=6, dry_multiplier=2, dry_allowed_length=1, dry_penalty_last_n=40, dry_sequence_breakers=(),
            mirostat=2, mirostat_tau=3,
        )  # fmt: skip
        with ctx.fork() as fork:
            found["ruledBy"] = await fork.generate(dry, max_tokens=12).tokens()
        with ctx.fork() as fork:
            xtc = fork.generate(do_sample=True, xtc_probability=0.5, xtc_threshold=0.01, min_p=0.001, max_tokens=12)
            found["excluded"] = await xtc.tokens()
        found["opened"], found["deleted"] = len(ctx.tokens), [True, None]
        with pytest.raises(hw.InvalidInput) as refused:
            ctx.truncate(1_000_000)
        found["refused"] = ["InvalidInput", str(refused.value)]
    return found
