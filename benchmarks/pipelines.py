"""The speed of pipelines: Headway, Hugging Face's pipeline and sentence-transformers on the all-MiniLM shape.

    python benchmarks/pipelines.py                 # some minutes
    python benchmarks/pipelines.py --device cuda   # and how busy the GPU is
    python benchmarks/pipelines.py --quick         # a tiny random model, seconds: a smoke test

Three workloads: (a) short texts of 10 to 20 words; (b) a long-tailed mix, 6 to 10 words and every 64th text 50 times
longer; (c) the texts of (a) arriving from 64 concurrent tasks, each with one text at a time. Hugging Face's pipeline is
called with batches of 1, 8 and 64; on (c) each task calls it for its own text, as it has no batching across callers,
and in a further row through a queue of our own that collects waiting texts. Every figure is the median of --rounds
rounds, each of which runs all engines in turn. The table and the JSON go to benchmarks/results/, with a description
of the machine.

`--model random` creates a model of the all-MiniLM shape and its tokenizer, for machines without a network. On a GPU
there are more texts, and slower engines get only the first of them; the profiler then measures the share of time that
the GPU is busy with a long-tailed stream, for the all-MiniLM shape and for larger ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, repeat
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
TARGETS = {  # times Hugging Face's best, on a CPU and on a GPU
    "cpu": {
        ("headway", "short"): 1.5,
        ("headway", "mix"): 4.0,
        ("headway", "tasks"): 5.0,
        ("headway int8", "short"): 3.0,
    },
    "cuda": {("headway", "short"): 3.0, ("headway", "mix"): 3.0, ("headway", "tasks"): 3.0},
}
Way = Callable[[list[str]], list[Any]]


@dataclass(frozen=True)
class Plan:
    """Sizes of the benchmark."""

    texts: int = 512
    most: int = 512  # texts of a round for engines other than Headway
    tasks: int = 64
    batches: tuple[int, ...] = (1, 8, 64)
    rounds: int = 5
    layers: int = 6
    hidden: int = 384


GPU = Plan(texts=16384, most=2048, rounds=3)
SHAPES = {"all-MiniLM": (6, 384, 12), "BERT-base": (12, 768, 12), "BERT-large": (24, 1024, 16)}  # layers, width, heads
STREAM = 4  # times the texts in a stream whose utilization is measured
SECTIONS = ("classification", "embedding", "utilization")
QUICK = Plan(texts=70, most=70, tasks=8, batches=(1, 8), rounds=1, layers=1, hidden=48)


@dataclass
class Report:
    """Rows, printed as they are added."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        print("  ".join(f"{name} {_figure(value)}" for name, value in row.items()), flush=True)

    def table(self) -> str:
        """All rows as text."""
        names = list(dict.fromkeys(name for row in self.rows for name in row))
        cells = [names, *([_figure(row.get(name, "")) for name in names] for row in self.rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, "", *self.notes, ""])


# -- texts -------------------------------------------------------------------------------------------------------------


def workloads(tokenizer: Any, plan: Plan) -> dict[str, list[str]]:
    """The texts of (a) and (b); each word is one token."""
    draw = random.Random(0)
    words = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and word.isascii() and len(word) > 2)

    def text(least: int, most: int) -> str:
        return " ".join(draw.choices(words, k=draw.randint(least, most)))

    short = [text(10, 20) for _ in range(plan.texts)]
    mix = [text(6, 10) if i % 64 else text(400, 400) for i in range(plan.texts)]
    return {"short": short, "mix": mix}


# -- engines -----------------------------------------------------------------------------------------------------------


def from_tasks(call: Callable[[str], Any], tasks: int) -> Way:
    """The texts from n concurrent tasks, each of which waits for its result before its next text."""

    def way(texts: list[str]) -> list[Any]:
        results: list[Any] = [None] * len(texts)

        async def task(first: int) -> None:
            for i in range(first, len(texts), tasks):
                results[i] = await call(texts[i])

        async def everyone() -> None:
            await asyncio.gather(*map(task, range(tasks)))

        asyncio.run(everyone())
        return results

    return way


def in_threads(call: Callable[[str], Any], stack: ExitStack) -> Callable[[str], Any]:
    """A blocking call for async tasks: in a thread, one at a time."""
    pool = stack.enter_context(ThreadPoolExecutor(1))

    async def answer(text: str) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call, text)

    return answer


class Queue:
    """The usual queue around a pipeline that batches callers: one thread takes what waits, up to a limit."""

    def __init__(self, call: Way, most: int) -> None:
        self._call, self._most = call, most
        self._waiting: list[tuple[str, asyncio.AbstractEventLoop, asyncio.Future[Any]]] = []
        self._wake = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    async def __call__(self, text: str) -> Any:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._wake:
            self._waiting.append((text, loop, future))
            self._wake.notify()
        return await future

    def close(self) -> None:
        with self._wake:
            self._over = True
            self._wake.notify()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or self._over)
                if self._over:
                    return
                taken, self._waiting = self._waiting[: self._most], self._waiting[self._most :]
            for (_, loop, future), result in zip(taken, self._call([text for text, _, _ in taken])):
                loop.call_soon_threadsafe(future.set_result, result)


@dataclass(frozen=True)
class Engine:
    """One competitor: how it takes a list, and how it takes texts from many tasks."""

    name: str
    many: Way
    tasks: Way | None = None
    most: int | None = None  # texts of a round; None for all


def headway_engines(
    task: str, model: Any, tokenizer: Any, *, options: argparse.Namespace, plan: Plan, stack: ExitStack
) -> list[tuple[Engine, Any]]:
    """Headway in float32 and, on a CPU, in int8."""
    import headway as hw

    ways: list[dict[str, Any]] = [{"name": "headway"}]
    if options.device == "cpu":
        ways.append({"name": "headway int8", "quantize": "int8"})
    found = []
    for way in ways:
        name = way.pop("name")
        pipe = stack.enter_context(
            hw.pipeline(
                task, model, tokenizer=tokenizer, device=options.device, dtype=options.dtype, truncation=True, **way
            )
        )
        found.append((Engine(name, pipe, from_tasks(pipe.submit, plan.tasks)), pipe))
    return found


def settle(pipe: Any, texts: dict[str, list[str]], report: Report, name: str) -> None:
    """Warm up until the pipeline has chosen its token budget."""
    for _ in range(8):
        for some in texts.values():
            pipe(some)
        if not pipe._batcher.budget.searching:
            break
    report.notes.append(f"{name}: batches of {int(pipe.stats()['budget_tokens'])} tokens were fastest")
    if pipe.quantization is not None:
        report.notes.append(
            f"{name}: relative error {pipe.quantization.relative_error:.3g}, cosine {pipe.quantization.cosine:.5f} "
            "of the worst sample"
        )


def hugging_face(model: Any, tokenizer: Any, options: argparse.Namespace, plan: Plan, stack: ExitStack) -> list[Engine]:
    """transformers' pipeline at each batch size."""
    import transformers

    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device=options.device)

    def many(size: int) -> Way:
        return lambda texts: pipe(texts, batch_size=size, truncation=True)

    largest = max(plan.batches)
    queue = Queue(many(largest), largest)
    stack.callback(queue.close)
    one = in_threads(lambda text: pipe(text, truncation=True), stack)
    most = {size: fewer(plan, size / largest) for size in plan.batches}
    found = [Engine(f"hugging face {size}", many(size), most=most[size]) for size in plan.batches]
    found[0] = Engine(found[0].name, found[0].many, from_tasks(one, plan.tasks), found[0].most)
    waiting = Engine(f"hugging face, queue of {largest}", many(largest), from_tasks(queue, plan.tasks), plan.most)
    return [*found, waiting]


def fewer(plan: Plan, share: float) -> int:
    """Texts of a round for an engine of about that share of the best speed: at least 64 if there are many."""
    if plan.most == plan.texts:
        return plan.texts
    return max(int(plan.most * max(share, 1 / 16)) // 64 * 64, 64)


def sentence_transformers(folder: Path, options: argparse.Namespace, plan: Plan, stack: ExitStack) -> list[Engine]:
    """sentence-transformers at its own batch size and at the largest."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device=options.device)

    def many(size: int) -> Way:
        return lambda texts: list(model.encode(texts, batch_size=size))

    one = in_threads(model.encode, stack)
    found = [Engine(f"sentence-transformers {size}", many(size), most=plan.most) for size in (32, max(plan.batches))]
    alone = Engine("sentence-transformers, one by one", many(1), from_tasks(one, plan.tasks), fewer(plan, 0))
    return [*found, alone]


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(section: str, engines: Sequence[Engine], texts: dict[str, list[str]], plan: Plan, report: Report) -> None:
    """Items a second of every engine on every workload, in turns."""
    for work, label in (("short", "(a) short"), ("mix", "(b) long-tailed"), ("tasks", f"(c) {plan.tasks} tasks")):
        some = texts["short"] if work == "tasks" else texts[work]
        callers = ("queue", "one by one")  # engines that are there for (c) alone
        ways = {
            e.name: (e.tasks if work == "tasks" else e.many, some[: e.most])
            for e in engines
            if work == "tasks" or not any(word in e.name for word in callers)
        }
        rates: dict[str, list[float]] = {name: [] for name, (way, _) in ways.items() if way is not None}
        for turn in range(plan.rounds + 1):  # the first is to warm up
            for name in list(rates)[:: -1 if turn % 2 else 1]:
                way, given = ways[name]
                assert way is not None
                began = time.perf_counter()
                found = way(given)
                took = time.perf_counter() - began
                if len(found) != len(given):
                    raise SystemExit(f"{name} gave {len(found)} results for {len(given)} texts")
                if turn:
                    rates[name].append(len(given) / took)
        add_rows(section, work, label, measured=rates, report=report)


def add_rows(section: str, work: str, label: str, *, measured: dict[str, list[float]], report: Report) -> None:
    rates = {name: statistics.median(found) for name, found in measured.items()}
    rivals = {name: rate for name, rate in rates.items() if not name.startswith("headway") and "queue" not in name}
    best = max(rivals.values())
    for name, rate in rates.items():
        spread = f"{min(measured[name]):.4g}–{max(measured[name]):.4g}"
        row: dict[str, Any] = {"task": section, "work": label, "engine": name, "items/s": rate, "least–most": spread}
        if name.startswith("headway"):
            row["ahead"] = f"{rate / best:.2f} ×"
            row["key"] = (name, work)
        report.add(**row)


def judge(report: Report, device: str) -> None:
    """Add to each figure with a target whether it was met."""
    targets = TARGETS.get(device, {})
    for row in report.rows:
        wanted = targets.get(row.pop("key", None))
        if wanted is not None and row["task"] == "classification":
            met = float(row["ahead"].split()[0]) >= wanted
            row["wanted"] = f"{wanted:g} ×: {'met' if met else 'missed'}"


def memory(pipe: Any, texts: list[str], report: Report) -> None:
    """The memory of a stream: the resident size after 2 and after 8 passes over the texts."""

    def resident() -> float:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def stream(times: int) -> Iterator[str]:
        for _ in range(times):
            yield from texts

    sizes = []
    for times in (2, 2, 8):
        for _ in pipe(stream(times)):
            pass
        sizes.append(resident())
    report.notes.append(
        f"resident after {2 * len(texts)} and {8 * len(texts)} texts: {sizes[1]:.0f} and {sizes[2]:.0f} MB"
    )


# -- how busy a GPU is -------------------------------------------------------------------------------------------------


def utilization(options: argparse.Namespace, plan: Plan, report: Report, stack: ExitStack) -> None:
    """The share of a long-tailed stream's time in which the GPU computes, from the profiler, for several shapes."""
    import torch
    import transformers

    import headway as hw

    if options.device == "cpu":
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(_folder(options))
    texts = workloads(tokenizer, plan)["mix"]
    for name, (layers, width, heads) in SHAPES.items():
        config = transformers.BertConfig(
            vocab_size=len(tokenizer),
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=heads,
        )
        with torch.device(options.device):
            model = transformers.BertForSequenceClassification(config).eval().to(getattr(torch, options.dtype))
        with hw.pipeline(
            "text-classification",
            model,
            tokenizer=tokenizer,
            device=options.device,
            dtype=options.dtype,
            truncation=True,
        ) as pipe:
            for _ in range(6):
                if not pipe(texts) or not pipe._batcher.budget.searching:
                    break
            began = time.perf_counter()
            count = sum(1 for _ in pipe(chain.from_iterable(repeat(texts, STREAM))))
            rate = count / (time.perf_counter() - began)
            share, kernels = busy_share(pipe, texts)
            report.add(
                task="utilization",
                work="(b) long-tailed",
                engine=f"headway, {name}",
                **{"items/s": rate, "busy": f"{share:.1%} ({kernels} kernels)"},
                batch=f"{int(pipe.stats()['budget_tokens'])} tokens",
            )


def busy_share(pipe: Any, texts: list[str]) -> tuple[float, int]:
    """Which share of a stream's time, from its first text to its last result, kernels run, and how many run."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        began = time.perf_counter()
        for _ in pipe(chain.from_iterable(repeat(texts, STREAM))):
            pass
        took = time.perf_counter() - began
    found = seen.profiler.kineto_results.events()  # type: ignore[union-attr]
    on_device = [e for e in found if "CUDA" in str(e.device_type()) and not e.name().startswith(("Mem", "gpu_"))]
    spans = sorted((e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_device)
    return covered(spans) / 1e9 / took, len(spans)


def covered(spans: Sequence[tuple[int, int]]) -> int:
    """The length of the union of intervals, sorted by their beginnings."""
    total = reached = 0
    for start, end in spans:
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


# -- the run -----------------------------------------------------------------------------------------------------------


def main() -> None:
    options = _options()
    plan = QUICK if options.quick else GPU if options.device == "cuda" else Plan()
    if options.rounds:
        plan = Plan(**(asdict(plan) | {"rounds": options.rounds}))
    import torch
    import transformers

    if options.threads:
        torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    report, began = Report(), time.time()
    with tempfile.TemporaryDirectory() as scratch:
        if options.quick:
            os.environ["HEADWAY_CACHE"] = scratch  # a tiny model's budget must not be cached
        if options.model == "random":
            options.model = random_model(Path(scratch) / "random", plan)
        for section, run in zip(SECTIONS, (classification, embedding, utilization)):
            if not options.only or section in options.only:
                with ExitStack() as stack:
                    run(options, plan, report, stack)
    judge(report, options.device)
    _write(options.out, report, plan, _about(options, began))


def classification(options: argparse.Namespace, plan: Plan, report: Report, stack: ExitStack) -> None:
    """A random classifier of the all-MiniLM shape: Headway and Hugging Face's pipeline."""
    import torch
    import transformers

    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(_folder(options))
    config = transformers.AutoConfig.from_pretrained(
        _folder(options),
        num_hidden_layers=plan.layers,
        hidden_size=plan.hidden,
        intermediate_size=4 * plan.hidden,
        num_labels=2,
    )
    model = transformers.BertForSequenceClassification(config).eval()
    texts = workloads(tokenizer, plan)
    ours = headway_engines("text-classification", model, tokenizer, options=options, plan=plan, stack=stack)
    rivals = hugging_face(_in(model, options.dtype), tokenizer, options, plan, stack)
    check_twins(ours[0][0], rivals[0], texts["short"], report)
    for engine, pipe in ours:
        settle(pipe, texts, report, engine.name)
    measure("classification", [*(engine for engine, _ in ours), *rivals], texts, plan, report)
    memory(ours[0][1], texts["short"][: plan.most], report)


def embedding(options: argparse.Namespace, plan: Plan, report: Report, stack: ExitStack) -> None:
    """The real all-MiniLM, or a random one: Headway and sentence-transformers."""
    if not (_folder(options) / "model.safetensors").is_file():
        report.notes.append(f"{options.model} has no weights, so embeddings were not measured")
        return
    try:
        rivals = sentence_transformers(_folder(options), options, plan, stack)
    except ImportError as error:
        report.notes.append(f"sentence-transformers was not measured: {error}")
        return
    import transformers

    texts = workloads(transformers.AutoTokenizer.from_pretrained(_folder(options)), plan)
    ours = headway_engines("sentence-embedding", _folder(options), None, options=options, plan=plan, stack=stack)
    for engine, pipe in ours:
        settle(pipe, texts, report, engine.name)
    measure("embedding", [*(engine for engine, _ in ours), *rivals], texts, plan, report)


def check_twins(ours: Engine, rival: Engine, texts: list[str], report: Report) -> None:
    """Whether both compute the same model."""
    pairs = list(zip(ours.many(texts[:32]), rival.many(texts[:32])))
    same = sum(a["label"] == b["label"] for a, b in pairs)
    apart = max(abs(a["score"] - b["score"]) for a, b in pairs)
    report.notes.append(f"{same} of {len(pairs)} labels as Hugging Face's, scores at most {apart:.1e} apart")


def random_model(folder: Path, plan: Plan) -> str:
    """A folder with a model of the all-MiniLM shape and a WordPiece tokenizer of made-up words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    draw = random.Random(1)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = {"".join(draw.choices(letters, k=draw.randint(3, 9))) for _ in range(29_000)}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), *sorted(words)]
    made = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=512, model_input_names=inputs, mask_token="[MASK]", **names
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(pieces),
        num_hidden_layers=plan.layers,
        hidden_size=plan.hidden,
        intermediate_size=4 * plan.hidden,
        num_attention_heads=12,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


def _folder(options: argparse.Namespace) -> Path:
    from headway.models.hub.store import resolve

    return resolve(options.model)


def _in(model: Any, dtype: str) -> Any:
    """A copy of the model in the numbers that Headway computes with."""
    import copy

    import torch

    return copy.deepcopy(model).to(getattr(torch, dtype))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--dtype", help="float32 on a CPU, bfloat16 elsewhere unless told", choices=("float32", "bfloat16")
    )
    parser.add_argument("--model", default="minilm", help="all-MiniLM, or random; config and tokenizer do to classify")
    parser.add_argument("--only", action="append", choices=SECTIONS, help="some of the sections")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, help="rounds of which the median is taken")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, to see that it runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    return options


def _about(options: argparse.Namespace, began: float) -> dict[str, Any]:
    import torch

    from headway.base.system.machine import read_machine

    packages = ("headway", "torch", "transformers", "tokenizers", "sentence-transformers")
    return {
        "machine": asdict(read_machine()),
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(began)),
        "seconds": round(time.time() - began, 1),
    }


def _write(folder: Path, report: Report, plan: Plan, about: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    name = "pipelines" if about["device"] == "cpu" else "pipelines-gpu"
    where = f"{about['machine']['cpu']} · {about['device']} · {about['dtype']}"
    head = f"{where} · {about['threads']} threads · load {about['load']:.1f} · {about['started']}"
    text = f"{head}\n{plan.rounds} rounds in turns, medians\n\n{report.table()}"
    (folder / f"{name}.txt").write_text(text)
    data = {"about": about, "plan": asdict(plan), "results": report.rows, "notes": report.notes}
    (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    print(f"\n{text}\nwritten to {folder}")


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
