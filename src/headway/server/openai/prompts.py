"""Prompts of completions: told apart, turned into tokens, and scored.

A text, a list of texts, a list of token ids or a list of such lists. Text gets the tokenizer's begin token if the model
wants one, as `ctx.fill` gives it; token ids are taken as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headway.base.probes import Ranked, Ranking
from headway.program.context import Context
from headway.program.engine import Engine
from headway.server.errors import ApiError, bad_request
from headway.server.openai.checks import Check, outside
from headway.server.openai.tokens import Token
from headway.text.stream import TextStream

ROWS = 64  # of a prompt that are read in one pass, so that nobody waits long for its turn
FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True)
class Prompt:
    """One prompt; `text` is what it says, for those who want it back."""

    ids: tuple[int, ...]
    text: str
    written: bool  # it came as text, so special tokens in it are not part of what was said


async def read_prompts(given: Any, check: Check) -> list[Prompt]:
    """The prompts of a request, encoded beside the event loop."""
    listed = given if isinstance(given, list) else [given]
    if set(map(type, listed)) == {int}:
        listed = [listed]
    if not listed:
        raise bad_request(f"prompt is empty; give {FORMS}", "prompt")
    check.size("prompt", len(listed), check.settings.max_prompts)
    kinds = {type(one) for one in listed}
    if kinds not in ({str}, {list}):
        raise _strange(listed)
    return await check.threads.run(lambda: [_prompt(one, i, check) for i, one in enumerate(listed)])


def _strange(listed: list[Any]) -> ApiError:
    found = ", ".join(sorted({type(one).__name__ for one in listed}))
    return bad_request(f"prompt has {found}; give {FORMS}", "prompt", "invalid_value")


def _prompt(given: str | list[Any], number: int, check: Check) -> Prompt:
    engine = check.engine
    if isinstance(given, str):
        check.text([given], "prompt")
        return Prompt(encode(given, engine), given, True)
    check.length(len(given), None, 0, "prompt")
    vocab = engine.vocab_size
    for i, id in enumerate(given):
        if type(id) is not int:
            raise bad_request(f"prompt[{number}][{i}] is {id!r:.60}; a token id is a whole number", "prompt")
        if not 0 <= id < vocab:
            raise outside(f"prompt[{number}][{i}]", id, vocab, "prompt")
    return Prompt(tuple(given), decode(given, engine), False)


def encode(text: str, engine: Engine, *, begin: bool = True, special: bool = False) -> tuple[int, ...]:
    """The ids of a text that opens a context."""
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(text, special=special)
    if begin and tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    return tuple(ids)


def decode(ids: Sequence[int], engine: Engine) -> str:
    """The text of ids; those that the tokenizer lacks have none."""
    if not engine.has_tokenizer:
        return ""
    words = engine.tokenizer.vocab_size
    return engine.tokenizer.decode([id for id in ids if id < words])


async def score(context: Context, ids: Sequence[int], k: int) -> list[Ranked | None]:
    """Compute a prompt in an empty context and say where each token stands; nothing is known about the first.

    The last token is left pending: what follows it is for the generation to read.
    """
    found: list[Ranked | None] = [None]
    for start in range(0, len(ids) - 1, ROWS):
        rows = ids[start : min(start + ROWS, len(ids) - 1)]
        forward = context.forward().input(rows)
        handles = [forward.probe(i, Ranking(k, ids=[ids[start + i + 1]])) for i in range(len(rows))]
        out = await forward.execute()
        found += [out.ranking(handle) for handle in handles]
    context.fill(ids[-1:])
    return found


def spelled(prompt: Prompt, scores: Sequence[Ranked | None], k: int, engine: Engine) -> list[Token]:
    """A prompt's tokens with their places in its text and the `k` likeliest at each."""
    tokens, known = [], 0
    stream = TextStream(engine.tokenizer, skip_special=prompt.written) if engine.has_tokenizer else None
    for id, score in zip(prompt.ids, scores, strict=True):
        rank = (None, ()) if score is None else (score.ids[0], score.best[:k])
        tokens.append(Token(id, known, *rank))
        if stream is not None and id < engine.tokenizer.vocab_size:
            known += len(stream.push([id]))
    return tokens
