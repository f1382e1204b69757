"""GRPO (Shao et al., 2024) on a LoRA of the default model: the engine draws, torch and peft train, on one CPU.

After every update the adapter goes to the engine with `Adapter.from_tensors`, without a file. The log-probability of
each drawn token comes from the pass that drew it and is the trainer's own to float rounding, so the ratio of the two
policies needs no correction. The task is tiny: write many digits. It needs the packages `torch`, `transformers` and
`peft` (`pip install 'headway[test]'`).
"""

import asyncio
from pathlib import Path
from typing import Any

import headway as hw

try:
    import peft
    import torch
    import transformers
except ImportError as missing:
    raise SystemExit(f"this example trains with torch, transformers and peft; {missing.name} is missing") from missing

GROUP, NEW_TOKENS, UPDATES = 8, 12, 4
PROMPT = "My favorite numbers are"


def reward(text: str) -> float:
    return sum(letter.isdigit() for letter in text) / len(text)


async def draw(ctx: hw.Context, adapter: hw.Adapter, seed: int) -> tuple[list[int], list[float]]:
    """Tokens, and the log-probability of each in the pass that drew it."""
    logps: list[float] = []
    async with ctx.fork() as fork:
        how, probe = hw.Multinomial(seed=seed), hw.Ranking()
        gen = fork.generate(how, max_tokens=NEW_TOKENS, stop_only=True, adapter=adapter, probe=probe)
        async for step in gen:
            logps += [ranked.drawn[0].logprob for ranked in step.probes]
    return list(gen.generated), logps


def trainer(engine: hw.Engine) -> Any:
    """The same weights as a torch model, dequantized, with a LoRA of rank 8."""
    path = Path(str(engine.info.path))
    base = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    return peft.get_peft_model(base, lora)


async def program(engine: hw.Engine, updates: int = UPDATES) -> tuple[list[float], list[float]]:
    model, prompt = trainer(engine), engine.tokenizer.encode(PROMPT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    rewards, apart = [], []
    for update in range(updates):
        tensors = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
        adapter = hw.Adapter.from_tensors(tensors, model.peft_config["default"].to_dict())
        async with engine.context().fill(prompt) as ctx:
            await ctx.flush(adapter=adapter)
            group = await asyncio.gather(*(draw(ctx, adapter, update * GROUP + i) for i in range(GROUP)))
        got = torch.tensor([reward(engine.tokenizer.decode(tokens)) for tokens, _ in group])
        ours = torch.tensor([logps for _, logps in group])
        rows = torch.tensor([prompt + tokens for tokens, _ in group])
        logits = model(rows[:, :-1]).logits[:, len(prompt) - 1 :]
        theirs = logits.log_softmax(-1).gather(-1, rows[:, len(prompt) :, None])[..., 0]
        advantage = (got - got.mean()) / (got.std() + 1e-4)
        (-(advantage[:, None] * torch.exp(theirs - ours)).mean()).backward()  # one step on these draws: nothing to clip
        optimizer.step()
        optimizer.zero_grad()
        rewards, apart = [*rewards, float(got.mean())], [*apart, float((theirs.detach() - ours).abs().max())]
        print(f"update {update + 1}: reward {rewards[-1]:.2f}, log-probabilities differ by {apart[-1]:.1e} at most")
    return rewards, apart


if __name__ == "__main__":
    hw.Engine("smollm2", dtype="float32").run(program)
