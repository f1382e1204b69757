"""The examples as modules, what the gallery shows of them, and what of that is the same on every machine."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parents[2] / "examples"
CLOSE = 1e-3  # of a logit, for what is equal to float rounding
ROUNDED = 0.3  # of a log-probability, where kernels round activations to few bits: float rounding is then magnified
DRAWN = {
    "completion",
    "verifier_rewind",
    "best_of_n",
    "self_consistency",
    "beam_search",
    "diverse_beams",
    "dola",
    "contrastive_search",
    "classifier_free_guidance",
    "contrastive_decoding",
    "green_list_watermark",
    "gumbel_watermark",
    "own_samplers",
    "jacobi_decoding",
    "speculative_decoding",
    "grammar_speculation",
    "tree_speculation",
    "heavy_hitters",
    "snapkv",
    "lora_mixing",
    "async_calls",
    "steering_data",
    "skeleton_of_thought",
    "recursion_of_thought",
    "reflexion",
    "agent_swarm",
    "tree_of_thoughts",
    "mcts",
    "grpo",
}

EVERYWHERE = (  # in process, over a WebSocket and a Unix socket, in the sandbox
    *("hello", "reflexion", "completion", "json_extraction", "template_filling", "tree_of_thoughts", "mcts"),
    *("graph_of_thoughts", "skeleton_of_thought", "recursion_of_thought", "self_consistency", "modular_cache"),
    *("jacobi_decoding", "tree_speculation", "async_calls", "agent_swarm"),
)


def load(name: str) -> ModuleType:
    """An example as a module."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gallery() -> dict[str, str]:
    """What the gallery shows of each example's output."""
    page = (FOLDER.parent / "docs/gallery.md").read_text()
    return dict(re.findall(r"^### `(\w+)\.py`\n.*?^```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))


def words(lines: list[str]) -> list[str]:
    """The words of an output: numbers, which may move a little, and the lines around tables left out."""
    return re.sub(r"[-\d.%]*\d[-\d.%]*|[─━┏┓┡┩└┘┬┴┳╇╈]+", " ", "\n".join(lines)).split()


def cells(lines: list[str]) -> list[list[str]]:
    """The rows of a table."""
    rows = [re.split("[│┃]", line) for line in lines]
    return [[cell.strip() for cell in row[1:-1]] for row in rows if len(row) > 2]


def fixed(name: str, lines: list[str]) -> list[Any]:
    """What of an output is the same on every machine: what is drawn differs with its kernels, the sum below not."""
    if name == "token_healing":
        return [(prompt, allowed) for prompt, _, _, allowed in cells(lines)]
    return words(lines[-1:] if name in DRAWN else lines)
