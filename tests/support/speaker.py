"""A model that speaks: real pages, a real tokenizer with one token a byte and a real template of some family, but a
runner that says what the test wants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

import headway as hw
from headway.base.specs.samplers import Sampling
from headway.kv.allocator import Edit
from headway.kv.tensor_pool import TensorPool
from headway.runtime.passes import Readout
from headway.testing import ScriptedRunner
from headway.text.tokenizer import byte_of_character
from support.hf import random_hf, save_hf

TEMPLATES = Path(__file__).parents[1] / "text" / "templates"
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<|eom_id|>", "<|python_tag|>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[THINK]", "[/THINK]", "<|start|>", "<|end|>"),
    *("<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>"),
]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]  # added tokens that are not special, as Qwen has them
V = 256 + len(SPECIAL) + len(PLAIN)


class Speaker(ScriptedRunner):
    """Says the given texts, one after the other, each followed by an end token."""

    def __init__(self) -> None:
        super().__init__(V, 16)
        self.replies: list[list[int]] = []
        self.pool: TensorPool | None = None
        self._start = 0

    def edit(self, edits: Sequence[Edit]) -> None:
        """Of the engine's own pool, if it is known: its pages are what durable snapshots hold."""
        if self.pool is None:
            super().edit(edits)
        else:
            self.pool.apply(edits)

    def say(self, *replies: Sequence[int]) -> None:
        self.replies, self._start = [list(reply) for reply in replies], -1

    def _value(self, readout: Readout, result: int, position: int) -> object:
        if not isinstance(readout.what, Sampling):
            return super()._value(readout, result, position)
        if self._start < 0 or not self.replies:
            self._start = position
        elif not 0 <= position - self._start <= len(self.replies[0]):  # beyond the pass ahead of an end token
            self.replies.pop(0)
            self._start = position
        token = self.replies[0][min(position - self._start, len(self.replies[0]) - 1)] if self.replies else 0
        return token if readout.allowed is None or readout.allowed[token] else super()._value(readout, result, position)


class Stage:
    """An engine on one family's template, and its speaker."""

    def __init__(self, folder: Path) -> None:
        self.runner = Speaker()
        self.engine = hw.Engine(folder, runner=self.runner, threads=1, pages=2000)
        self.runner.pool = self.engine._pool

    def say(self, *texts: str, end: str = "") -> None:
        """What the model says from now on; passes ahead of an end that still run are waited for."""
        replies = [self.engine.tokenizer.encode(text + end, special=True) for text in texts]
        self.engine._loop.call(lambda: self.runner.say(*replies))

    def decode(self, ctx: hw.Context) -> str:
        return self.engine.tokenizer.decode(ctx.tokens)


def backend() -> Backend:
    """One token a byte, and the special tokens of every family."""
    letters = sorted(byte_of_character())
    made = Backend(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    made.decoder = decoders.ByteLevel()  # pyright: ignore
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_tokens([AddedToken(name, special=False, normalized=False) for name in PLAIN])
    return made


def speaking_folder(folder: Path) -> Path:
    """A tiny model with that tokenizer; add a chat_template.jinja to it."""
    sizes: dict[str, Any] = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    more: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 8}
    _, model = random_hf("llama", 0, **sizes, **more, max_position_embeddings=1 << 16)
    folder = save_hf(folder, model)
    backend().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return folder
