"""Prompts of completions: parsed, tokenized and scored.

A prompt is a text, a list of texts, a list of token ids or a list of such lists. Text gets a BOS token if the model
uses one, as with `ctx.fill`; token ids are used as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.json_text import PIECE
from headway.base.specs.probes import Ranked, Ranking
from headway.base.text import short_repr
from headway.models.adapters.adapter import Adapter
from headway.program.context import Context
from headway.program.engine import Engine
from headway.server.api.checks import RequestChecks, unknown_token
from headway.server.api.tokens import ScoredToken
from headway.server.errors import bad_request
from headway.text.stream import TextStream

ROWS = 64  # of a prompt scored in one pass, so that other requests do not wait long
INFILL_TOKENS = (  # as Qwen, StarCoder, Granite and Code Llama name them
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
FORMS = "a text, a list of texts, a list of token ids, or a list of lists of token ids"


@dataclass(frozen=True)
class Prompt:
    """One prompt; `text` is what `echo` returns."""

    ids: tuple[int, ...]
    text: str
    from_text: bool  # it was sent as text, so its text does not include special tokens


async def read_prompts(
    given: Any,
    check: RequestChecks,
    *,
    truncate: int | None = None,
    max_tokens: int | None = None,
    suffix: str | None = None,
) -> list[Prompt]:
    """The prompts of a request, tokenized in a thread; `truncate` is `truncate_prompt_tokens`.

    With a `suffix` the model fills in what is between a prompt and it.
    """
    return await check.threads.run(_read_prompts, given, check, truncate, max_tokens, suffix)


def _read_prompts(
    given: Any, check: RequestChecks, truncate: int | None, max_tokens: int | None, suffix: str | None
) -> list[Prompt]:
    listed = given if isinstance(given, list) else [given]
    types = _types(listed)
    if types == {int}:
        listed, types = [listed], {list}
    if not listed:
        raise bad_request(f"prompt is empty; pass {FORMS}", "prompt")
    check.size("prompt", len(listed), check.settings.max_prompts)
    if types not in ({str}, {list}):
        names = ", ".join(sorted(type.__name__ for type in types))
        raise bad_request(f"prompt is a list of {names}; pass {FORMS}", "prompt", "invalid_value")
    if suffix and types != {str}:
        raise bad_request("suffix needs prompts that are texts; pass texts, or remove it", "suffix")

    def read(one: Any, number: int) -> Prompt:
        if suffix:
            return _infilling(one, suffix, check)
        if isinstance(one, str):
            return _text_prompt(one, check, truncate, max_tokens)
        return _ids_prompt(one, number, check, truncate, max_tokens)

    return [read(one, i) for i, one in enumerate(listed)]


def _types(listed: list[Any]) -> set[type]:
    """The types of a list's entries, in short calls."""
    types: set[type] = set()
    for at in range(0, len(listed), PIECE):
        types |= set(map(type, listed[at : at + PIECE]))
    return types


def _text_prompt(given: str, check: RequestChecks, truncate: int | None, max_tokens: int | None) -> Prompt:
    if truncate is None:
        check.text([given], "prompt")
    whole = encode(given, check.engine)
    ids = check.truncated(whole, truncate, max_tokens)
    text = given if len(ids) == len(whole) else decode(ids, check.engine)
    while len(whole) > len(ids):  # freeing megabytes of ids holds the GIL
        del whole[-min(PIECE, len(whole) - len(ids)) :]
    return Prompt(ids, text, True)


def _ids_prompt(
    given: list[Any], number: int, check: RequestChecks, truncate: int | None, max_tokens: int | None
) -> Prompt:
    if truncate is None or not given:
        check.max_new_tokens(len(given), None, 0, "prompt")
    vocab = check.engine.vocab_size
    for i, id in enumerate(given):
        if type(id) is not int:
            raise bad_request(f"prompt[{number}][{i}] is {short_repr(id)}; a token id must be an integer", "prompt")
        if not 0 <= id < vocab:
            raise unknown_token(f"prompt[{number}][{i}]", id, vocab, "prompt")
    ids = check.truncated(given, truncate, max_tokens)
    return Prompt(ids, decode(ids, check.engine), False)


def _infilling(prefix: str, suffix: str, check: RequestChecks) -> Prompt:
    """A prompt for what is between two texts, as models for code are trained: prefix, suffix, middle."""
    check.text([prefix, suffix], "prompt")
    tokenizer = check.engine.tokenizer
    before, after, middle = infill_ids(check.engine, "suffix")
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = (*bos, before, *tokenizer.encode(prefix), after, *tokenizer.encode(suffix), middle)
    return Prompt(ids, prefix, True)


def infill_ids(engine: Engine, what: str) -> tuple[int, int, int]:
    """The tokens that mark what comes before, after and in the middle; raises for a model without them.

    `what` needs them: the field `suffix`, or a route.
    """
    if (found := find_infill_ids(engine)) is not None:
        return found
    raise bad_request(
        f"{what} needs a model with tokens for infilling, such as {', '.join(INFILL_TOKENS[0])}, which this one lacks; "
        "use another model, or plain completions",
        "suffix" if what == "suffix" else "model",
        "unsupported",
    )


def find_infill_ids(engine: Engine) -> tuple[int, int, int] | None:
    """The same, and None for a model without them."""
    for names in INFILL_TOKENS:
        before, after, middle = (engine.tokenizer.token_to_id(name) for name in names)
        if before is not None and after is not None and middle is not None:
            return before, after, middle
    return None


def encode(text: str, engine: Engine, *, begin: bool = True, special: bool = False) -> list[int]:
    """The token ids of a text at the start of a context."""
    tokenizer = engine.tokenizer
    ids = tokenizer.encode(text, special=special)
    if begin and tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def decode(ids: Sequence[int], engine: Engine) -> str:
    """The text of token ids; ids that the tokenizer does not have are skipped."""
    if not engine.has_tokenizer:
        return ""
    known = engine.tokenizer.vocab_size
    return engine.tokenizer.decode([id for id in ids if id < known])


async def score_prompt(
    context: Context, ids: Sequence[int], k: int, adapters: Sequence[tuple[Adapter, float]] = ()
) -> list[Ranked | None]:
    """Prefill a prompt in an empty context and return the rank of each token; None for the first.

    The last token is left pending for the generation.
    """
    result: list[Ranked | None] = [None]
    for start in range(0, len(ids) - 1, ROWS):
        rows = ids[start : min(start + ROWS, len(ids) - 1)]
        forward = context.forward().input(rows)
        for adapter, scale in adapters:
            forward.adapter(adapter, scale)
        handles = [forward.probe(i, Ranking(k, ids=[ids[start + i + 1]])) for i in range(len(rows))]
        out = await forward.execute()
        result += [out.ranking(handle) for handle in handles]
    context.fill(ids[-1:])
    return result


def scored_tokens(prompt: Prompt, scores: Sequence[Ranked | None], k: int, engine: Engine) -> list[ScoredToken]:
    """A prompt's tokens with their offsets in its text and the `k` likeliest tokens at each."""
    tokens, offset = [], 0
    stream = TextStream(engine.tokenizer, skip_special=prompt.from_text) if engine.has_tokenizer else None
    for id, score in zip(prompt.ids, scores, strict=True):
        rank = (None, ()) if score is None else (score.ids[0], score.best[:k])
        tokens.append(ScoredToken(id, offset, *rank))
        if stream is not None and id < engine.tokenizer.vocab_size:
            offset += len(stream.push([id]))
    return tokens
