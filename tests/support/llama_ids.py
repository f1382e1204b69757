"""The ids of texts by llama.cpp: `PYTHON llama_ids.py MODEL TEXTS OUT`. That Python has llama-cpp-python.

TEXTS and OUT are JSON files: a list of texts, and a list of lists of ids, without BOS, names of special tokens as text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import llama_cpp  # type: ignore[import-not-found]


def ids(path: str, texts: list[str]) -> list[list[int]]:
    model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(ids(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()))))
