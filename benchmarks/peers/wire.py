"""How a worker is spoken to: lines of JSON on its standard input, one line of JSON back for each.

    {"do": "load", "path": "…", "form": "q4_0", "threads": 2, "slots": 64, "sequences": 8,
        "total": 512}
    {"do": "decode", "prompts": [[…], …], "tokens": 128}     {"do": "prefill", "prompt": […]}
    {"do": "fork", "prompt": […], "forks": 32, "tokens": 64}

A worker runs in its peer's own environment, so this file needs Python's library alone. What a peer prints goes to
standard error: the answers have standard output for themselves.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

COMMANDS = ("load", "decode", "prefill", "fork", "trim", "many")
FIRST_PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]  # of a process that is started for its first token


def main(peer: type, tools: dict[str, Callable[..., Any]] | None = None) -> None:
    """Serve a peer until the input ends; or, by the first argument, time its start or use one of its tools."""
    answers = _own_output()
    match sys.argv[1:]:
        case []:
            _serve(peer(), answers)
        case ["startup", options]:
            worker = peer()
            worker.load(**json.loads(options))
            worker.prefill(FIRST_PROMPT)
            _write(answers, {"answered": True})
        case [name, options] if tools and name in tools:
            _write(answers, _answer(lambda: tools[name](**json.loads(options))))
        case other:
            raise SystemExit(f"{other} is not known; it takes nothing, startup, or one of {list(tools or ())}")


def timing(began: float, first: float, ended: float, tokens: int, chosen: list[int]) -> dict[str, Any]:
    """What decoding answers: seconds to the first tokens, then seconds for `tokens` more, and what one text became."""
    return {"prompt_seconds": first - began, "seconds": ended - first, "tokens": tokens, "chosen": chosen}


def now() -> float:
    return time.perf_counter()


def _own_output() -> TextIO:
    """Standard output for this file alone; whatever else is printed, by C libraries too, goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _serve(worker: Any, answers: TextIO) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        name = asked.pop("do")
        known = name in COMMANDS and hasattr(worker, name)
        work = partial(getattr(worker, name), **asked) if known else None
        _write(answers, {"error": f"it cannot {name}"} if work is None else _answer(work))


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _write(answers: TextIO, value: dict[str, Any]) -> None:
    answers.write(json.dumps(value) + "\n")
    answers.flush()
