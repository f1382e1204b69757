"""Samplers, probes, masks and inputs of the wrong type. Each marked line must be an error; nothing else may be."""

from __future__ import annotations

import headway as hw


async def program(engine: hw.Engine, ctx: hw.Context) -> None:
    fwd = ctx.forward()
    fwd.sample([-1], hw.Entropy())  # expect: reportArgumentType
    fwd.sample([-1], hw.Argmax)  # expect: reportArgumentType
    fwd.sample([-1], "greedy")  # expect: reportArgumentType
    fwd.sample(-1, hw.Argmax())  # expect: reportArgumentType
    fwd.probe(-1, hw.Argmax())  # expect: reportArgumentType
    fwd.probe([-1], hw.Entropy())  # expect: reportArgumentType
    hw.TopK("forty")  # expect: reportArgumentType
    hw.TopP()  # expect: reportCallIssue
    hw.Logprob()  # expect: reportCallIssue
    hw.AttentionScores(0, reduce="sum")  # expect: reportArgumentType

    fwd.input("text")  # expect: reportArgumentType
    fwd.input_at([1, 2])  # expect: reportCallIssue
    fwd.attention_mask([4, 2])  # expect: reportArgumentType
    hw.Mask.window("wide")  # expect: reportArgumentType
    hw.Mask.window(3) & True  # expect: reportOperatorIssue

    ctx.generate(  # expect: reportCallIssue
        "argmax",  # expect: reportArgumentType
    )
    ctx.fill(3)  # expect: reportArgumentType
    engine.open("draft").fork()  # expect: reportOptionalMemberAccess
    (await fwd.execute()).stats.rows = 3  # expect: reportAttributeAccessIssue
    ctx.generate(  # expect: reportCallIssue
        probe=hw.Argmax(),  # expect: reportArgumentType
    )
    ctx.generate(  # expect: reportCallIssue
        probe=[hw.Entropy(), 3],  # expect: reportArgumentType
    )
    async for step in ctx.generate(probe=(hw.Entropy(), hw.Ranking(1))):
        print(step.probes[0][1].entropy)  # expect: reportAttributeAccessIssue
    (await ctx.generate(probe=hw.Entropy()).prepare()).token = 3  # expect: reportAttributeAccessIssue
