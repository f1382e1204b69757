"""A swarm of agents on forks, as in multiagent debate (Du et al., 2023): one briefing, several minds, and messages.

Every agent is a fork of the briefing with a role of its own. They write concurrently; what one says is put into the
others' contexts, so each holds the whole talk from its own side and computes only what is new to it. Then they vote,
by the probability that each gives to every proposal.
"""

import asyncio

import headway as hw

ROLES = ["a baker", "a sailor", "a gardener"]
BRIEFING = "Three friends open a small café together and look for a name for it. Each says what they think.\n"
NAME = hw.Grammar.regex(' "(The )?[A-Z][a-z]{2,9} [A-Z][a-z]{2,9}"')


async def vote(ctx: hw.Context, names: list[str]) -> list[float]:
    """The log-probability of each name as the agent's favorite."""

    async def score(name: str) -> float:
        ids = ctx.engine.tokenizer.encode(f' "{name}"')
        async with ctx.fork().fill("My favorite of the three names is") as fork:
            fwd = fork.forward().input(ids[:-1])
            rows = [fwd.probe(row - len(ids), hw.Logprob(token)) for row, token in enumerate(ids)]
            out = await fwd.execute()
            return sum(float(out.logprobs(row)[0]) for row in rows)

    return list(await asyncio.gather(*map(score, names)))


async def program(engine: hw.Engine) -> tuple[list[str], str, int, int]:
    before = engine.stats().tokens
    async with engine.context(salt="swarm").fill(BRIEFING) as root:
        await root.flush()
        agents = [root.fork().fill(f"I am {role}.\n") for role in ROLES]

        async def propose(agent: hw.Context, seed: int) -> str:
            agent.fill("I would call the café")
            return (await agent.generate(hw.Multinomial(0.5, seed=seed), constrain=NAME).text()).strip(' "')

        names = list(await asyncio.gather(*map(propose, agents, range(len(agents)))))
        apart = sum(len(agent.tokens) for agent in agents)
        for agent in agents:
            heard = "".join(f'\n{r} says: "{n}"' for r, n, a in zip(ROLES, names, agents) if a is not agent)
            await agent.fill(f".{heard}\n").flush()
        ballots = await asyncio.gather(*(vote(agent, names) for agent in agents))
        apart += sum(len(agent.tokens) * len(names) for agent in agents)
        for agent, role, name, ballot in zip(agents, ROLES, names, ballots):
            print(f'{role} proposes "{name}" and votes for "{names[ballot.index(max(ballot))]}"')
            agent.release()
    choices = [names[ballot.index(max(ballot))] for ballot in ballots]
    winner = max(names, key=lambda name: (choices.count(name), sum(ballot[names.index(name)] for ballot in ballots)))
    tokens = engine.stats().tokens - before
    print(f'the café is called "{winner}"')
    print(f"{tokens} tokens computed; with all that was said sent again for each answer {apart}")
    return names, winner, tokens, apart


if __name__ == "__main__":
    hw.Engine("smollm2").run(program)
