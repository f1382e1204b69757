"""Beam search for completions and chats, with the fields that vLLM has for it.

    use_beam_search, best_of (the beams; without it `n`), n (the best of them), length_penalty, early_stopping

The search is `ctx.generate(num_beams=...)`, so its results are those of transformers. A found sequence is read like a
generation that has one step.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, Unsupported
from headway.base.specs.generation import PARAMETERS
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.specs.probes import Ranked, Ranking
from headway.base.text import short_repr
from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.program.generation.results import Continuation
from headway.program.generation.steps import Step
from headway.server.api.checks import RequestChecks
from headway.server.api.request_schema import GenerationRequest
from headway.server.errors import bad_request

if TYPE_CHECKING:
    from headway.server.api.plan import RequestPlan

ROWS = 64  # tokens of a sequence that are scored in one pass
FIELD = "use_beam_search"
WITHOUT: dict[str, Sequence[Any]] = {  # fields that a search has no use for, and values that change nothing
    "temperature": (0,),
    "top_k": (0, -1),
    "top_p": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    **{name: (PARAMETERS[name].default,) for name in RULES},
    "stream": (False,),
    "include_stop_str_in_output": (False,),
    "logprobs_mode": ("raw",),
    "tools": ([],),
    "functions": ([],),
}


@dataclass(frozen=True)
class BeamOptions:
    """How a request searches."""

    beams: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


def beam_options(body: GenerationRequest, check: RequestChecks) -> BeamOptions | None:
    """The search that a request asks for, None where it asks for none; a 400 for fields that do not go with it."""
    given = {name: getattr(body, name) for name in ("length_penalty", "early_stopping")}
    given = {name: value for name, value in given.items() if value is not None}
    if not body.use_beam_search:
        for name, value in given.items():
            if value != PARAMETERS[name].default:
                raise bad_request(
                    f"{name} is {short_repr(value)}, which only beams have; set {FIELD}, or remove it", name
                )
        return None
    for name, idle in WITHOUT.items():
        value = getattr(body, name, None)
        if value is not None and not any(value == one for one in idle):
            raise bad_request(f"{name} cannot be combined with {FIELD}; remove one of them", name, "unsupported")
    width = getattr(body, "best_of", None)
    width = check.in_range("best_of", width, 1, check.settings.max_best_of) or body.n or 1
    if width < (body.n or 1):
        raise bad_request(f"best_of is {width} and n is {body.n}; it must be at least that", "best_of")
    return BeamOptions(width, **given)


@dataclass(frozen=True, eq=False)
class FoundSequence:
    """One of the best sequences, read as the steps of a generation: there is one."""

    continuation: Continuation[Any]
    probes: tuple[Ranked, ...] = ()
    stop_string: str | None = None

    @property
    def generated(self) -> tuple[int, ...]:
        return self.continuation.tokens

    async def __aiter__(self) -> AsyncIterator[Step[Any]]:
        yield Step(self.continuation.tokens, self.continuation.text, self.probes, self.continuation.finish)


async def search(plan: RequestPlan, context: Context, grammar: Grammar | None, max_tokens: int) -> list[FoundSequence]:
    """The best continuations of a context, best first; fewer than asked for where no more are possible."""
    assert plan.beams is not None
    own, defaults = plan.beams, plan.engine.generation_defaults
    await context.flush(adapter=plan.adapters)
    with context.fork() as prompt:
        try:
            generations = context.generate(
                plan.sampler,
                max_tokens=max_tokens,
                min_tokens=min(plan.min_tokens, max_tokens),
                stop=plan.stop,
                stop_only=plan.ignore_eos,
                constrain=plan.constraint(grammar),
                no_repeat_ngram_size=plan.no_repeat_ngram_size,
                bad_words_ids=defaults.bad_words_ids,
                sequence_bias=defaults.sequence_bias,
                adapter=plan.adapters,
                num_beams=own.beams,
                num_return_sequences=plan.count,
                length_penalty=own.length_penalty,
                early_stopping=own.early_stopping,
            )
            sequences = await generations.sequences()
        except (InvalidInput, Unsupported) as error:
            raise bad_request(str(error), FIELD, "unsupported") from error
        if plan.top_logprobs is None:
            return [FoundSequence(one) for one in sequences]
        return [FoundSequence(one, await _scores(prompt, one.tokens, plan)) for one in sequences]


async def _scores(prompt: Context, tokens: Sequence[int], plan: RequestPlan) -> tuple[Ranked, ...]:
    """The rank of each token of a sequence, as if it had been drawn, and the likeliest tokens there."""
    ranked: list[Ranked] = []
    if not tokens:
        return ()
    with prompt.fork() as context:
        ranked += await _read(context, (), tokens[:1], plan)  # the row before a token has its probability
        for start in range(1, len(tokens), ROWS):
            ranked += await _read(context, tokens[start - 1 : start + ROWS - 1], tokens[start : start + ROWS], plan)
    return tuple(ranked)


async def _read(context: Context, rows: Sequence[int], tokens: Sequence[int], plan: RequestPlan) -> list[Ranked]:
    """Where tokens stand after each of these rows, or after the context where there are none."""
    rows = rows[: len(tokens)]
    forward = context.forward()
    if rows:
        forward.input(rows)
    for adapter, scale in plan.adapters:
        forward.adapter(adapter, scale)
    at = range(len(rows)) if rows else (-1,)
    handles = [
        forward.probe(row, Ranking(plan.top_logprobs or 0, ids=[token])) for row, token in zip(at, tokens, strict=True)
    ]
    out = await forward.execute()
    ranked = [out.ranking(handle) for handle in handles]
    return [Ranked(one.ids, (), one.best) for one in ranked]
