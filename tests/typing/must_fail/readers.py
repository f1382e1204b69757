"""Readers given handles of another kind. Each marked line must be an error; nothing else may be."""

from __future__ import annotations

import headway as hw


async def program(ctx: hw.Context) -> None:
    fwd = ctx.forward()
    sample = fwd.sample([-1], hw.Argmax())
    entropy = fwd.probe(-1, hw.Entropy())
    distribution = fwd.probe(-1, hw.Distribution(k=8))
    logprob = fwd.probe(-1, hw.Logprob(17))
    hidden = fwd.probe(-1, hw.Hidden(0))
    out = await fwd.execute()

    out.entropy(sample)  # expect: reportArgumentType
    out.distribution(sample)  # expect: reportArgumentType
    out.logits(sample)  # expect: reportArgumentType
    out.logprobs(sample)  # expect: reportArgumentType
    out.hidden(sample)  # expect: reportArgumentType
    out.attention(sample)  # expect: reportArgumentType
    out.lens(sample)  # expect: reportArgumentType

    out.token(entropy)  # expect: reportArgumentType
    out.tokens(distribution)  # expect: reportArgumentType

    out.distribution(entropy)  # expect: reportArgumentType
    out.entropy(distribution)  # expect: reportArgumentType
    out.logits(distribution)  # expect: reportArgumentType
    out.logits(hidden)  # expect: reportArgumentType
    out.hidden(logprob)  # expect: reportArgumentType
    out.attention(hidden)  # expect: reportArgumentType
    out.lens(hidden)  # expect: reportArgumentType
    out.logprobs(entropy)  # expect: reportArgumentType
    out.logprob(logprob)  # expect: reportAttributeAccessIssue

    wrong: str = out.entropy(entropy)  # expect: reportAssignmentType
    print(wrong)
