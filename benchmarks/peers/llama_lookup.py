"""llama.cpp's prompt lookup as llama-cpp-python offers it: seconds without and with, in turns, as a line of JSON.

python llama_lookup.py MODEL.gguf '{"texts": {"quote": "…"}, "tokens": 192, "repeats": 7, "threads": 2}'
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding


def timed(model: Llama, prompt: list[int], count: int) -> tuple[float, list[int]]:
    """Seconds to continue a prompt that is computed already, greedily."""
    model.reset()
    model.eval(prompt[:-1])
    found: list[int] = []
    began = time.perf_counter()
    for token in model.generate(prompt, temp=0.0, reset=True):  # it keeps the prefix that it has
        found.append(token)
        if len(found) == count:
            break
    return time.perf_counter() - began, found


def main() -> int:
    path, asked = sys.argv[1], json.loads(sys.argv[2])
    common: dict[str, Any] = {"model_path": path, "n_ctx": 2048, "n_threads": asked["threads"], "verbose": False}
    plain = Llama(**common)
    drafted = Llama(**common, logits_all=True, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=10))
    results = {}
    for name, text in asked["texts"].items():
        prompt = plain.tokenize(text.encode())
        pairs, same = [], True
        for _ in range(asked["repeats"] + 1):
            one, expected = timed(plain, prompt, asked["tokens"])
            other, found = timed(drafted, prompt, asked["tokens"])
            pairs.append((one, other))
            same = same and expected == found
        results[name] = {"pairs": pairs[1:], "same": same}
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
