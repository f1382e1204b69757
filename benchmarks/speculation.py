"""Speculation against the same engine without it: one sequence, in turns, the median of the ratios.

    python benchmarks/speculation.py                                  # the default model, and the 1b shape on a CPU
    python benchmarks/speculation.py --model some.gguf                # one model that quotes its prompt
    python benchmarks/speculation.py --shape 8b --acceptance 0.8      # random weights, drafts right 8 times of 10
    python benchmarks/speculation.py --quick                          # a tiny random model, seconds: does it run?

- *quote*: the prompt has a source file twice and begins it again, so the text repeats the prompt. *story*: text that
  does not repeat, drawn with a seed, because a small model that takes the likeliest token soon repeats itself. Both
  with prompt lookup as a user has it, drafting as much as it finds to pay.
- *replay*: random weights never quote a prompt. So the tokens are recorded once, and a drafter says them again, each
  right with the probability --acceptance. *wrong*: never right, which is what a useless drafter costs. *story* is drawn
  from random weights, too, with prompt lookup. On a CUDA device
  the weights are random but sure of themselves: with plain random ones the likeliest token leads by less than the
  rounding of bfloat16, and a step of several rows would continue another text.
- All but the story is greedy, to the same number of tokens, which must be the same tokens. Prompts are computed before
  the clock starts.
- Beside it, where installed: transformers' `prompt_lookup_num_tokens` on the same prompts (its own weights in float32),
  and with --llama the prompt lookup of llama-cpp-python for a GGUF file; each as a ratio to itself without.

The table and the JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import headway as hw
from headway.base.system.machine import read_machine
from headway.models.hub.store import resolve

RESULTS = Path(__file__).parent / "results"
SOURCE = """def mean(values):
    total = 0
    for value in values:
        total += value
    return total / len(values)


def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def variance(values):
    center = mean(values)
    return mean([(value - center) ** 2 for value in values])
"""
TEXTS = {
    "quote": 2 * f"A file:\n```python\n{SOURCE}```\n" + "A file:\n```python\n",
    "story": "Once upon a time, in a village between two rivers, there lived an old clockmaker who",
}


@dataclass(frozen=True)
class Result:
    """One comparison: seconds without drafts and with, and the median of the ratios of pairs."""

    engine: str
    model: str
    text: str
    tokens: int
    plain: float
    drafted: float
    ratio: float
    acceptance: float | None = None
    same: bool = True


class Replay:
    """Says recorded tokens again, each right with a probability; each copy errs elsewhere."""

    def __init__(self, known: Sequence[int], right: float, vocab: int, seed: int = 0) -> None:
        self._known, self._right, self._vocab = known, right, vocab
        self._random = np.random.default_rng(seed)

    def draft(self, tokens: Sequence[int], limit: int) -> list[int]:
        ahead = self._known[len(tokens) : len(tokens) + limit]
        wrong = self._random.random(len(ahead)) >= self._right
        return [(token + 1) % self._vocab if miss else token for token, miss in zip(ahead, wrong.tolist())]

    def accept(self, tokens: Sequence[int]) -> None:
        """It knows them."""

    def copy(self) -> Replay:
        return Replay(self._known, self._right, self._vocab, int(self._random.integers(1 << 31)))


async def timed(
    engine: hw.Engine, prompt: Sequence[int], how: tuple[hw.Sampler, int], drafter: hw.Drafter | None
) -> tuple[float, list[int], hw.SpeculationStats | None]:
    """Seconds to generate so many tokens like that, after a prompt that is computed already."""
    sampler, count = how
    async with engine.context().fill(prompt) as context:
        await context.flush()
        context.truncate(1).fill(prompt[-1:])
        generation = context.generate(sampler, max_tokens=count, stop_only=True, speculate=drafter)
        began = time.perf_counter()
        tokens = await generation.tokens()
        return time.perf_counter() - began, tokens, generation.speculation


def compared(engine: hw.Engine, name: str, text: str, prompt: Sequence[int], *, drafter: Any, options: Any) -> Result:
    """Without drafts and with, in turns."""
    count, pairs = options.tokens, []
    how = (hw.Multinomial(seed=1) if text == "story" else hw.Argmax(), count)
    plain, tokens, _ = engine.run(timed, prompt, how, None)  # warm, and what a replay knows
    if drafter is None:
        right = 0.0 if text == "wrong" else options.acceptance
        drafter = Replay([*prompt, *tokens], right, engine.vocab_size)
    engine.run(timed, prompt, how, drafter)
    same, stats = True, None
    for _ in range(options.repeats):
        plain, expected, _ = engine.run(timed, prompt, how, None)
        drafted, found, stats = engine.run(timed, prompt, how, drafter)
        same &= found == expected
        pairs.append((plain, drafted))
    acceptance = stats.acceptance if stats is not None and stats.drafted else None
    return Result(
        "headway", name, text, count, median(p for p, _ in pairs), median(d for _, d in pairs),
        median(p / d for p, d in pairs), acceptance, same,
    )  # fmt: skip


def of_model(name: str, options: Any) -> list[Result]:
    """Texts of a model that has a tokenizer."""
    with hw.Engine(name, threads=options.threads) as engine:
        prompts = {text: engine.tokenizer.encode(words) for text, words in TEXTS.items()}
        how: dict[str, Any] = {"drafter": hw.PromptLookup(), "options": options}
        return [compared(engine, name, text, prompt, **how) for text, prompt in prompts.items()]


def of_shape(shape: str, options: Any) -> list[Result]:
    """Replays of random weights."""
    prompt = np.random.default_rng(1).integers(0, 200, options.prompt).tolist()
    drafters = {"replay": None, "wrong": None, "story": hw.PromptLookup()}
    with random_engine(shape, options) as engine:
        return [compared(engine, shape, t, prompt, drafter=d, options=options) for t, d in drafters.items()]


@contextmanager
def random_engine(shape: str, options: Any) -> Iterator[hw.Engine]:
    """Random weights: bfloat16 on a CUDA device, int8 on a CPU."""
    if torch.cuda.is_available():
        from gpu_models import make_certain, random_decoder

        decoder = make_certain(random_decoder(shape, torch.device("cuda"), torch.bfloat16))
        with hw.Engine(decoder, pages=1024) as engine:
            yield engine
        return
    from headway.bench.models import find_shape, write_folder

    with tempfile.TemporaryDirectory() as folder:
        write_folder(find_shape(shape), Path(folder), "f16")
        with hw.Engine(folder, quantize="int8", pages=256, threads=options.threads) as engine:
            yield engine


def of_transformers(name: str, options: Any) -> list[Result]:
    """transformers on the same prompts, with `prompt_lookup_num_tokens`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(name)
    given: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    place = str(path.parent) if given else name
    tokenizer = AutoTokenizer.from_pretrained(place, **given)
    model: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **given).eval()
    results = []
    for text, words in TEXTS.items():
        inputs, pairs, same = tokenizer(words, return_tensors="pt"), [], True
        common = {"do_sample": False, "max_new_tokens": options.tokens, "min_new_tokens": options.tokens}
        for _ in range(options.repeats):
            seconds, outputs = [], []
            for extra in ({}, {"prompt_lookup_num_tokens": 10}):
                began = time.perf_counter()
                outputs.append(model.generate(**inputs, **common, **extra))
                seconds.append(time.perf_counter() - began)
            pairs.append(seconds)
            same &= bool(torch.equal(*outputs))
        ratio = median(p / d for p, d in pairs)
        found = median(p for p, _ in pairs), median(d for _, d in pairs)
        results.append(Result("transformers", name, text, options.tokens, *found, ratio, None, same))
    return results


def of_llama(path: str, options: Any) -> list[Result]:
    """llama.cpp on the same prompts, with the prompt lookup of llama-cpp-python, in a Python that has it."""
    asked = {"texts": TEXTS, "tokens": options.tokens, "repeats": options.repeats}
    asked["threads"] = options.threads or read_machine().usable_cores
    worker = Path(__file__).parent / "peers" / "llama_lookup.py"
    done = subprocess.run(
        [options.llama, str(worker), path, json.dumps(asked)], stdout=subprocess.PIPE, text=True, check=True
    )
    results = []
    for text, found in json.loads(done.stdout.splitlines()[-1]).items():
        pairs = found["pairs"]
        plain, drafted = (median(pair[i] for pair in pairs) for i in (0, 1))
        ratio = median(p / d for p, d in pairs)
        results.append(Result("llama.cpp", path, text, options.tokens, plain, drafted, ratio, None, found["same"]))
    return results


def table(results: Sequence[Result]) -> str:
    lines = [f"{'engine':14}{'model':24}{'text':8}{'plain s':>9}{'drafts s':>9}{'ratio':>7}{'kept':>7}"]
    for r in results:
        kept = "" if r.acceptance is None else f"{r.acceptance:.2f}"
        line = (
            f"{r.engine:14}{Path(r.model).name[:23]:24}{r.text:8}{r.plain:9.2f}{r.drafted:9.2f}{r.ratio:7.2f}{kept:>7}"
        )
        lines.append(line + ("" if r.same else "  OTHER TOKENS"))
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", action="append", help="a model with a tokenizer; may be repeated")
    parser.add_argument("--shape", action="append", help="random weights of this shape; may be repeated")
    parser.add_argument("--acceptance", type=float, default=0.8, help="how often a replayed draft is right")
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--prompt", type=int, default=256, help="tokens before a replay")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--against", default="transformers", help="'' leaves it out")
    parser.add_argument("--llama", help="a Python with llama-cpp-python, whose prompt lookup runs beside it")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    if options.quick:
        options.shape, options.model, options.tokens, options.repeats, options.prompt = ["tiny"], [], 24, 2, 32
    elif options.model is None and options.shape is None:
        options.model, options.shape = ["smollm2"], ["8b" if torch.cuda.is_available() else "1b"]
    return options


def main() -> int:
    options = parsed()
    results: list[Result] = []
    for name in options.model or ():
        results += of_model(name, options)
        path = str(resolve(name))
        if "transformers" in options.against:
            results += of_transformers(path, options)
        if options.llama is not None and path.endswith(".gguf"):
            results += of_llama(path, options)
    for shape in options.shape or ():
        results += of_shape(shape, options)
    about = {"machine": asdict(read_machine()), "python": platform.python_version(), "torch": torch.__version__}
    options.out.mkdir(exist_ok=True)
    (options.out / "speculation.json").write_text(
        json.dumps({"about": about, "results": [asdict(result) for result in results]}, indent=1) + "\n"
    )
    text = table(results)
    (options.out / "speculation.txt").write_text(text + "\n")
    print(text)
    return 0 if all(result.same or result.engine != "headway" for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
