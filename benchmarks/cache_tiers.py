"""Cache tiers: a multi-turn load larger than the pool, with and without host memory and a folder below it.

    python benchmarks/cache_tiers.py                    # the cases for this device
    python benchmarks/cache_tiers.py --shape 8b         # one shape
    python benchmarks/cache_tiers.py --quick            # a tiny random model on any device, seconds: does it run?

`--users` users talk in turn. A user's prompt has everything so far and `--more` new tokens; then `--new` tokens are
generated, and the context is released. The pool holds `--pool` of what all users have at the end, so that without tiers
most of a prompt has left the pool by its user's next turn. Users ask `--clients` at a time.

Each way computes the same prompts with a new engine: without tiers; with host memory for everything; with host memory
for a quarter and a folder for the rest. Prompt tokens computed are counted by the engine, time to first token is taken
at the client, from before `engine.context()`. First turns are not in the times: nobody has a cached page then. Weights
are random: bfloat16 on a CUDA device, int8 on a CPU.

The table and the JSON go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mixed import known_shapes, open_model

import headway as hw
from headway.base.system.machine import read_machine

RESULTS = Path(__file__).parent / "results"
WAYS = ("pool alone", "host memory", "host memory and a folder")
PAGE = 16


@dataclass(frozen=True)
class Case:
    """One load: a model's shape, and what users say."""

    shape: str
    users: int
    turns: int
    first: int  # tokens of a first prompt
    more: int  # tokens that each turn adds
    new: int  # tokens generated for a prompt
    clients: int = 4

    @property
    def name(self) -> str:
        return f"{self.shape}, {self.users} users, {self.turns} turns of {self.first} and {self.more} tokens"

    @property
    def pages(self) -> int:
        """Pages of all users at the end."""
        return self.users * -(-(self.first + (self.turns - 1) * self.more) // PAGE)

    def pool(self, share: float) -> int:
        """Pages of the pool: this share of all, and at least what the clients need at once."""
        one = -(-(self.first + (self.turns - 1) * self.more + self.new) // PAGE) + 1
        return max(int(share * self.pages), one * self.clients)


GPU = (Case("8b", 48, 4, 2048, 512, 16), Case("1b", 96, 4, 1024, 256, 16))
CPU = (Case("smol", 12, 4, 512, 128, 8, clients=1),)
QUICK = Case("quick", 6, 3, 60, 30, 4, clients=2)


def prompts(case: Case) -> list[list[list[int]]]:
    """[turn][user]: each begins with the user's last."""
    rng = np.random.default_rng(0)
    whole = rng.integers(0, 90, (case.users, case.first + case.turns * case.more)).tolist()
    return [[words[: case.first + turn * case.more] for words in whole] for turn in range(case.turns)]


async def talk(engine: hw.Engine, case: Case) -> list[list[float]]:
    """Seconds to the first token, [turn][user]."""
    room = asyncio.Semaphore(case.clients)

    async def ask(prompt: list[int]) -> float:
        async with room:
            began, first = time.perf_counter(), 0.0
            async with engine.context() as context:
                context.fill(prompt)
                async for _ in context.generate(hw.Argmax(), max_tokens=case.new, stop_only=True):
                    first = first or time.perf_counter() - began
            return first

    return [await asyncio.gather(*map(ask, turn)) for turn in prompts(case)]


def run_way(way: str, case: Case, model: Any, options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine, all turns."""
    pool, tiers = case.pool(arguments.pool), {}
    with hw.Engine(model, pages=16, **options) as engine:  # what a page takes, and kernels are compiled
        page = engine.info.kv_bytes_per_token * engine.page_size
    with tempfile.TemporaryDirectory(prefix="headway-tiers-", dir=arguments.folder) as folder:
        if way != WAYS[0]:
            whole = way == WAYS[1]
            tiers["cache_host"] = page * (case.pages if whole else max(1, case.pages // 4))
            tiers |= {} if whole else {"cache_folder": folder, "cache_folder_size": 2 * page * case.pages}
        with hw.Engine(model, pages=pool, **tiers, **options) as engine:
            engine.run(talk, replace(case, users=2, turns=1))  # graphs and kernels
            engine.cache.clear()
            before, began = engine.stats(), time.perf_counter()
            times = engine.run(talk, case)
            seconds, after = time.perf_counter() - began, engine.stats()
    later = np.array(times[1:]).ravel() * 1e3
    generated = case.users * case.turns * (case.new - 1)
    return {
        "way": way,
        "pool pages": pool,
        "prompt tokens": sum(len(prompt) for turn in prompts(case) for prompt in turn),
        "computed": after.tokens - before.tokens - generated,
        "host hits": after.cache_host_hits - before.cache_host_hits,
        "folder hits": after.cache_folder_hits - before.cache_folder_hits,
        "errors": after.cache_tier_errors - before.cache_tier_errors,
        "first token ms p50": round(float(np.percentile(later, 50)), 2),
        "first token ms p99": round(float(np.percentile(later, 99)), 2),
        "seconds": round(seconds, 2),
    }


def cases(arguments: argparse.Namespace, device: torch.device) -> list[Case]:
    known = GPU if device.type == "cuda" else CPU
    if arguments.quick:
        known = (QUICK,)
    elif arguments.shape is not None:
        known = tuple(c for c in known if c.shape == arguments.shape) or (replace(known[-1], shape=arguments.shape),)
    given = {name: getattr(arguments, name) for name in ("users", "turns", "first", "more", "new", "clients")}
    given = {name: value for name, value in given.items() if value is not None}
    return [replace(case, **given) for case in known]


def table(case: Case, rows: list[dict[str, Any]]) -> str:
    """The rows of a case as text."""
    names = list(rows[0])
    cells = [names, *([str(row[name]) for name in names] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(names))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    return "\n".join([f"{case.name}; the pool holds {rows[0]['pool pages']} of {case.pages} pages", *lines])


def main() -> int:
    arguments = _arguments()
    device = torch.device(arguments.device)
    about = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "machine": asdict(read_machine()),
        "system": platform.platform(),
        "packages": {"headway": hw.__version__, "torch": torch.__version__},
        "options": {name: str(value) for name, value in vars(arguments).items()},
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    data: dict[str, Any] = {"about": about, "results": []}
    texts = [f"{about['device']} · {about['machine']['cpu']} · {about['started']}"]
    for case in cases(arguments, device):
        rows = []
        with open_model(case.shape, device) as (model, options):
            for way in WAYS:
                rows.append(run_way(way, case, model, options, arguments))
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()
        data["results"].append({"case": asdict(case), "rows": rows})
        texts.append(table(case, rows))
        print(texts[-1], flush=True)
    name = "cache_tiers-gpu" if device.type == "cuda" else "cache_tiers"
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (arguments.out / f"{name}.txt").write_text("\n\n".join(texts) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--shape", help="8b or 1b on a CUDA device, smol or 1b on a CPU; all cases without it")
    for name, meaning in (
        ("users", "users who talk in turn"),
        ("turns", "turns of each"),
        ("first", "tokens of a first prompt"),
        ("more", "tokens that each turn adds"),
        ("new", "tokens generated for a prompt"),
        ("clients", "users who ask at a time"),
    ):
        parser.add_argument(f"--{name}", type=_count, help=meaning)
    parser.add_argument("--pool", type=float, default=0.35, help="the share of all pages that the pool holds")
    parser.add_argument("--folder", type=Path, help="where the folder is made; the system's own place by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the table and the JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny random model for seconds: does it run?")
    arguments = parser.parse_args()
    known = known_shapes(torch.device(arguments.device))
    if arguments.shape is not None and arguments.shape not in known:
        parser.error(f"--shape: {arguments.shape!r} is not known here; it takes {', '.join(known)}")
    return arguments


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number from 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
