"""Many programs at once, measured: throughput, fan-out, latency under long prompts, cache hits; and other engines.

    python benchmarks/concurrency.py                 # the default model, some minutes
    python benchmarks/concurrency.py --quick         # a tiny random model, seconds: does it run?

Every figure is the median of --repeats runs. Throughput is measured in the same run for transformers' continuous
batching and llama.cpp's server where they are installed, in turns, so that a machine that slows down slows all of them.
The table and the JSON go to benchmarks/results/, with a description of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import random
import shutil
import socket
import statistics
import subprocess
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any

import headway as hw
from headway.base.specs.samplers import Sampling
from headway.base.system.machine import read_machine
from headway.models.decoder import Decoder

RESULTS = Path(__file__).parent / "results"
SERVER_SECONDS = 60.0  # to wait for a server to come up


@dataclass(frozen=True)
class Plan:
    """How much of everything."""

    programs: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    prompt: int = 32  # tokens of each program's prompt
    tokens: int = 32  # tokens each program generates
    forks: int = 32
    document: int = 512  # tokens of the prompt that is shared
    branch: int = 16  # tokens each fork generates
    decodes: int = 8  # programs that run while long prompts arrive
    long: int = 4000  # tokens of such a prompt
    chunks: tuple[int, ...] = (512, 128)  # max_batch_tokens
    repeats: int = 3


QUICK = Plan((1, 2, 4), 8, 6, forks=4, document=64, branch=3, decodes=2, long=300, chunks=(64,), repeats=2)


@dataclass
class Report:
    """Sections of rows, as they come."""

    sections: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, section: str, **row: Any) -> None:
        self.sections.setdefault(section, []).append(row)
        print(f"{section}: {'  '.join(f'{k} {_figure(v)}' for k, v in row.items())}", flush=True)

    def table(self) -> str:
        """All sections as text tables."""
        parts = [_text_table(name, rows) for name, rows in self.sections.items()]
        return "\n".join([*parts, *self.notes, ""])


class Work:
    """New random prompts, and the ways to compute them with the engine."""

    def __init__(self, engine: hw.Engine, plan: Plan) -> None:
        self.engine, self.plan, self._random = engine, plan, random.Random(0)
        ends = dict.fromkeys(engine.eos_ids, -1e9)  # every program runs to its full length
        self.greedy = Sampling(temperature=0.0, logit_bias=ends) if ends else hw.Argmax()

    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self.engine.vocab_size), k=tokens)

    def prompts(self, n: int) -> list[list[int]]:
        return [self.prompt(self.plan.prompt) for _ in range(n)]

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """What each prompt is continued with, all at once."""

        async def one(prompt: list[int]) -> list[int]:
            async with self.engine.context() as ctx:
                return await ctx.fill(prompt).generate(self.greedy, max_tokens=self.plan.tokens).tokens()

        async def everyone(_: hw.Engine) -> list[list[int]]:
            return await asyncio.gather(*map(one, prompts))

        return self.engine.run(everyone)


# -- throughput --------------------------------------------------------------------------------------------------------


def throughput(work: Work, rivals: dict[str, Callable], report: Report) -> None:
    """Tokens a second at 1, 2, 4 … programs, for every engine in turn."""
    plan = work.plan
    ways: dict[str, Callable] = {"headway": work.generate, **rivals}
    for n in plan.programs:
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        batch = 0.0
        for repeat in range(plan.repeats + 1):  # the first is to warm up
            prompts = work.prompts(n)
            for name, way in list(ways.items())[:: -1 if repeat % 2 else 1]:
                before, began = work.engine.stats(), time.perf_counter()
                texts = way(prompts)
                took, after = time.perf_counter() - began, work.engine.stats()
                _check_lengths(name, texts, n, plan.tokens)
                if repeat:
                    seconds[name].append(took)
                if name == "headway":
                    batch = (after.passes - before.passes) / (after.steps - before.steps)
        rates = {f"{name} tokens/s": n * plan.tokens / statistics.median(s) for name, s in seconds.items()}
        report.add("throughput", programs=n, **rates, **{"headway passes a step": batch})


def _check_lengths(name: str, texts: list[list[int]], n: int, tokens: int) -> None:
    if [len(text) for text in texts] != [tokens] * n:
        raise SystemExit(f"{name} gave {[len(t) for t in texts]} tokens where {n} times {tokens} were asked for")


# -- fan-out and cache -------------------------------------------------------------------------------------------------


def fan_out(work: Work, report: Report) -> None:
    """Forks of one prompt against as many contexts whose salts keep the cache from helping."""
    engine, plan = work.engine, work.plan

    async def branch(ctx: hw.Context) -> list[int]:
        return await ctx.generate(work.greedy, max_tokens=plan.branch).tokens()

    async def forks(_: hw.Engine, prompt: list[int]) -> int:
        async with engine.context() as ctx:
            await ctx.fill(prompt).flush()
            twins = [ctx.fork() for _ in range(plan.forks)]
            await asyncio.gather(*map(branch, twins))
            return engine.stats().pages_held

    async def apart(_: hw.Engine, prompt: list[int]) -> int:
        fresh = [engine.context(salt=f"{i}").fill(prompt) for i in range(plan.forks)]
        await asyncio.gather(*map(branch, fresh))
        return engine.stats().pages_held

    runs: dict[str, list[tuple[float, int, int]]] = {"forks": [], "apart": []}
    for _ in range(plan.repeats):
        for name, way in (("forks", forks), ("apart", apart)):
            prompt = work.prompt(plan.document)
            before, began = engine.stats(), time.perf_counter()
            held = engine.run(way, prompt)
            took = time.perf_counter() - began
            runs[name].append((took, engine.stats().tokens - before.tokens, held - before.pages_held))
            engine.cache.clear()
    for name, found in runs.items():
        seconds, tokens, pages = (statistics.median(column) for column in zip(*found))
        label = f"{plan.forks} {'forks of one prompt' if name == 'forks' else 'separate prompts'}"
        report.add("fan-out", how=label, prompt_tokens=plan.document, seconds=seconds, computed=tokens, pages=pages)


def cache_hits(work: Work, report: Report) -> None:
    """The first token of a prompt, and of the same prompt again."""
    engine, plan = work.engine, work.plan

    async def first_token(_: hw.Engine, prompt: list[int]) -> tuple[float, int]:
        async with engine.context() as ctx:
            began = time.perf_counter()
            fwd = ctx.fill(prompt).forward()
            fwd.sample([-1], work.greedy)
            out = await fwd.execute()
            return time.perf_counter() - began, out.stats.cache_hits

    runs: dict[str, list[tuple[float, int]]] = {"first time": [], "again": []}
    for _ in range(plan.repeats):
        prompt = work.prompt(plan.document)
        for times in runs.values():
            times.append(engine.run(first_token, prompt))
    for name, found in runs.items():
        seconds, hits = (statistics.median(column) for column in zip(*found))
        report.add("cache", prompt=name, tokens=plan.document, ms_to_first_token=1e3 * seconds, page_hits=hits)


# -- latency -----------------------------------------------------------------------------------------------------------


def latency(work: Work, report: Report, chunk: int) -> None:
    """Times between tokens of running programs, by themselves and while a long prompt arrives."""
    plan = work.plan
    pages = 8 + -(-(plan.long + 1) // work.engine.page_size) + plan.decodes * 64
    info = work.engine.info
    decoder = work.engine.decoder
    gaps: dict[str, list[float]] = {"alone": [], "long prompt": []}
    arrivals = []
    for _ in range(plan.repeats):
        with hw.Engine(decoder, threads=info.threads, max_batch_tokens=chunk, pages=pages) as engine:
            alone, during, arrival = engine.run(_decode_and_disturb, work)
        gaps["alone"] += alone
        gaps["long prompt"] += during
        arrivals.append(arrival)
    for name, found in gaps.items():
        found.sort()
        row = {f"p{p} ms": 1e3 * found[min(len(found) - 1, p * len(found) // 100)] for p in (50, 95)}
        extra = {} if name == "alone" else {"prompt seconds": statistics.median(arrivals)}
        label = f"{plan.decodes} decodes{'' if name == 'alone' else f' + {plan.long} tokens'}"
        report.add("latency", **{"rows a step": chunk}, load=label, **row, **{"max ms": 1e3 * found[-1]}, **extra)


async def _decode_and_disturb(engine: hw.Engine, work: Work) -> tuple[list[float], list[float], float]:
    plan, times = work.plan, [list[float]() for _ in range(work.plan.decodes)]
    over = asyncio.Event()

    async def decode(stamps: list[float]) -> None:
        async with engine.context() as ctx:
            async for _ in ctx.fill(work.prompt(plan.prompt)).generate(hw.Argmax(), max_tokens=10_000):
                stamps.append(time.perf_counter())
                if over.is_set():
                    return

    tasks = [asyncio.create_task(decode(stamps)) for stamps in times]
    while min(map(len, times)) < plan.tokens:
        await asyncio.sleep(0.01)
    came = time.perf_counter()
    async with engine.context() as ctx:
        await ctx.fill(work.prompt(plan.long)).flush()
    went = time.perf_counter()
    over.set()
    await asyncio.gather(*tasks)
    pairs = [(a, b) for stamps in times for a, b in pairwise(stamps[2:])]
    alone = [b - a for a, b in pairs if b < came]
    return alone, [b - a for a, b in pairs if came < b and a < went], went - came


# -- others ------------------------------------------------------------------------------------------------------------


def transformers_batching(engine: hw.Engine, plan: Plan, stack: ExitStack) -> Callable:
    """transformers' continuous batching over the same weights: one manager that keeps running."""
    import torch
    import transformers

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    torch.set_num_threads(engine.info.threads)
    model = _twin(engine)
    generation = transformers.GenerationConfig(
        max_new_tokens=plan.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    blocks = max(plan.programs) * (2 + (plan.prompt + plan.tokens) // engine.page_size)
    batching = transformers.ContinuousBatchingConfig(
        page_size=engine.page_size, num_blocks=max(blocks, 64), max_batch_tokens=512
    )
    manager = model.init_continuous_batching(generation_config=generation, continuous_batching_config=batching)
    manager.start()
    stack.callback(manager.stop, block=True, timeout=10)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        ids = manager.add_requests(inputs=prompts, max_new_tokens=plan.tokens)
        done: dict[str, list[int]] = {}
        while len(done) < len(ids):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = list(result.generated_tokens)
            elif result is None and not manager.is_running():
                raise SystemExit("transformers' generation thread ended by itself")
        return [done[name] for name in ids]

    return generate


def _twin(engine: hw.Engine) -> Any:
    """A transformers model with the engine's own weights."""
    import torch
    import transformers

    c, d = engine.config, _floats(engine)
    if c.family != "llama" or c.rope.kind != "default":
        raise LookupError(f"no transformers twin of a {c.family} model with {c.rope.kind} positions is built here")
    config = transformers.LlamaConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        intermediate_size=c.intermediate_size,
        max_position_embeddings=c.max_positions,
        rms_norm_eps=c.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope.theta},
        tie_word_embeddings=False,
    )
    weights = {"model.embed_tokens": d.embedding, "model.norm": d.final_norm, "lm_head": d.output}
    for i, layer in enumerate(d.layers):
        q, k, v = layer.qkv.weight.split([n * c.head_dim for n in (c.heads, c.kv_heads, c.kv_heads)])
        gate, up = layer.gate_up.weight.chunk(2)
        parts = {"input_layernorm": layer.input_norm, "post_attention_layernorm": layer.mlp_norm}
        parts |= {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "mlp.gate_proj": gate}
        parts |= {"self_attn.o_proj": layer.out.weight, "mlp.up_proj": up, "mlp.down_proj": layer.down.weight}
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in parts.items()}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device=d.device)
    model.to(dtype=d.dtype)  # type: ignore[call-arg]
    model.load_state_dict({f"{name}.weight": tensor for name, tensor in weights.items()}, strict=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its frequencies are not weights
    return model.eval()


def _floats(engine: hw.Engine) -> Decoder:
    """The engine's weights as floats; from its file where the engine keeps them packed."""
    import torch

    from headway.models.weights.load_tensors import load_model

    if isinstance(engine.decoder, Decoder):
        return engine.decoder
    if engine.info.path is None:
        raise LookupError("packed weights in memory have no transformers twin")
    return load_model(Path(engine.info.path), dtype=torch.float32, device=torch.device("cpu"))


def llama_server(engine: hw.Engine, plan: Plan, stack: ExitStack) -> Callable:
    """llama.cpp's server on the same file, over HTTP, with as many slots as there are programs."""
    command, file = shutil.which("llama-server"), engine.info.path
    if command is None:
        raise LookupError("llama-server is not installed")
    if file is None or not file.endswith(".gguf"):
        raise LookupError("llama.cpp needs a .gguf file")
    slots = max(plan.programs)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    context = slots * 2 * (plan.prompt + plan.tokens)
    options = ["-m", file, "-np", slots, "-c", context, "-t", engine.info.threads, "--port", port]
    process = subprocess.Popen([command, *map(str, options)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    _wait_for(f"{address}/health", process)

    def one(prompt: list[int]) -> list[int]:
        asked = {"prompt": prompt, "n_predict": plan.tokens, "temperature": 0, "ignore_eos": True}
        asked |= {"cache_prompt": False, "return_tokens": True}
        request = urllib.request.Request(f"{address}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)["tokens"]

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(one, prompts))

    return generate


def _wait_for(address: str, process: subprocess.Popen) -> None:
    end = time.monotonic() + SERVER_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with suppress(OSError), urllib.request.urlopen(address, timeout=1):
            return
        time.sleep(0.2)
    raise LookupError("llama-server did not come up")


def find_rivals(
    engine: hw.Engine, plan: Plan, names: list[str], stack: ExitStack, report: Report
) -> dict[str, Callable]:
    """The engines that can be measured here; a note for each that cannot."""
    makers: dict[str, Callable] = {
        "transformers": lambda: transformers_batching(engine, plan, stack),
        "llama.cpp": lambda: llama_server(engine, plan, stack),
    }
    found: dict[str, Callable] = {}
    for name in names:
        try:
            found[name] = makers[name]()
        except (ImportError, LookupError, AttributeError) as error:
            report.notes.append(f"{name} was not measured: {error}")
    return found


# -- the run -----------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    plan = QUICK if options.quick else Plan()
    if options.repeats:
        plan = Plan(**(vars(plan) | {"repeats": options.repeats}))
    report, began = Report(), time.time()
    with _engine(options, plan) as engine:
        work = Work(engine, plan)
        with ExitStack() as stack:
            rivals = find_rivals(engine, plan, options.against, stack, report)
            _check_twins(work, rivals, report)
            throughput(work, rivals, report)
        fan_out(work, report)
        cache_hits(work, report)
        for chunk in plan.chunks:
            latency(work, report, chunk)
        _write(options.out, report, plan, _about(engine, began))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, help="runs of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, to see that it runs")
    parser.add_argument("--against", default="transformers,llama.cpp", help="other engines, or nothing: ''")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.against = [name for name in options.against.split(",") if name]
    unknown = set(options.against) - {"transformers", "llama.cpp"}
    if unknown:
        parser.error(f"--against has {unknown.pop()!r}; it takes transformers and llama.cpp")
    return options


def _engine(options: argparse.Namespace, plan: Plan) -> hw.Engine:
    separate = plan.forks * (2 + (plan.document + plan.branch) // 16)
    together = max(plan.programs) * (2 + (plan.prompt + plan.tokens) // 16)
    pages = 64 + max(separate, together)
    if not options.quick:
        return hw.Engine(options.model, threads=options.threads, pages=pages)
    from headway.testing import random_model

    return hw.Engine(random_model("llama", max_positions=20_000), threads=options.threads, pages=pages)


def _check_twins(work: Work, rivals: dict[str, Callable], report: Report) -> None:
    """Whether the others compute the same model: how many greedy tokens they agree on."""
    prompts = work.prompts(2)
    ours = work.generate(prompts)
    for name, way in rivals.items():
        same = sum(a == b for mine, other in zip(ours, way(prompts)) for a, b in zip(mine, other))
        note = " (it computes with the file's quantized weights)" if name == "llama.cpp" else ""
        report.notes.append(f"{name} gave {same} of {sum(map(len, ours))} greedy tokens as Headway did{note}")


def _about(engine: hw.Engine, began: float) -> dict[str, Any]:
    return {
        "machine": asdict(read_machine()),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in ("headway", "torch", "transformers")},
        "engine": asdict(engine.info) | {"path": None},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.time() - began, 1),
    }


def _write(folder: Path, report: Report, plan: Plan, about: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine, engine = about["machine"], about["engine"]
    threads = f"{engine['threads']} threads of {machine['usable_cores']} cores"
    head = f"{engine['name']} · {engine['dtype']} · {threads} · {machine['cpu']} · {about['started']}"
    text = f"{head}\n\n{report.table()}"
    (folder / "concurrency.txt").write_text(text)
    data = {"about": about, "plan": asdict(plan), "results": report.sections, "notes": report.notes}
    (folder / "concurrency.json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"\n{text}\nwritten to {folder}")


def _text_table(title: str, rows: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_figure(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells]
    return "\n".join([title, *lines, ""])


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
