"""How a request is answered, settled: every field read against the model and the server's limits, nothing left open.

    wire.Knobs ──▶ Plan ──▶ one Generation for every choice, in a context that holds its prompt

What a request does not say about drawing, the model's generation_config.json says; what neither says is OpenAI's
default: temperature 1 and everything else off. A choice draws as `ctx.generate` does with the same seed.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.probes import Ranking
from headway.base.rng import fresh_seed
from headway.base.samplers import Sampling
from headway.program.constraints.constraint import Constraint, compile_async
from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.program.engine import Engine
from headway.program.generation.generator import Generation
from headway.program.generation.sequences import derived_seed
from headway.program.sync import SamplingParams
from headway.server.auth import Tenant
from headway.server.errors import bad_request
from headway.server.openai.checks import Check
from headway.server.openai.request_schema import Knobs, StructuredOutputs, Tool
from headway.server.openai.token_bounds import Bounded, Words
from headway.server.serving import Serving
from headway.server.settings import Settings
from headway.server.threads import Threads

DRAWN = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")


@dataclass(frozen=True, eq=False)
class Plan:
    """What all choices of a request have in common."""

    engine: Engine
    settings: Settings
    writing: Threads  # where answers are put together that take long
    tenant: Tenant
    sampler: Sampling  # with a seed
    count: int = 1  # sequences drawn for each prompt
    min_tokens: int = 0
    stop: tuple[str | int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    allowed: tuple[int, ...] | None = None
    words: Words | None = None
    top: int | None = None  # how many of the likeliest tokens come with each token; None for no log-probabilities
    prompt_top: int | None = None  # the same for the tokens of the prompt
    processed: bool = False
    priority: float = 0.0
    no_repeat_ngram_size: int | None = None
    made: dict[Grammar, Any] = field(default_factory=dict)  # grammars as constraints, at their beginning

    def context(self) -> Context:
        """An empty context for one prompt."""
        return self.engine.context(priority=self.priority, salt=self.tenant.salt)

    async def prepare(self, grammars: Iterable[Grammar], where: str) -> None:
        """Compile the grammars of a field before anything is computed, within the time there is for it."""
        limit = self.settings.max_grammar_seconds
        for grammar in grammars:
            work = compile_async(grammar, self.engine.tokenizer, self.engine.vocab_size)
            try:
                self.made[grammar] = await asyncio.wait_for(work, limit)
            except TimeoutError:
                raise bad_request(
                    f"the grammar or schema was not ready within {limit:g} s; simplify it", where, "grammar_too_slow"
                ) from None
            except (InvalidInput, Unsupported) as error:
                raise bad_request(str(error), where, "invalid_grammar") from error

    def generation(
        self, context: Context, number: int, grammar: Grammar | None, max_tokens: int, *, free: bool = True
    ) -> Generation:
        """The generation of the choice with this number. What is not `free` ends by its grammar alone."""
        assert self.sampler.seed is not None
        return context.generate(
            replace(self.sampler, seed=derived_seed(self.sampler.seed, number)),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens) if free else 0,
            stop=self.stop if free else (),
            stop_only=self.ignore_eos and free,
            constrain=self._constraint(grammar),
            probe=None if self.top is None else Ranking(self.top, processed=self.processed),
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            penalize_prompt=False,
        )

    def _constraint(self, grammar: Grammar | None) -> Grammar | Constraint | None:
        bounded = self.allowed is not None or self.words is not None
        if not bounded and (grammar is None or self.top is None):
            return grammar
        other = None if grammar is None else self.made[grammar].copy()
        return Bounded(self.engine.vocab_size, self.allowed, self.words, other)


async def plan(asked: Knobs, serving: Serving, tenant: Tenant, *, top: int | None, grammar: Grammar | None) -> Plan:
    """The plan of a request; `top` and `grammar` come from fields that differ between routes."""
    check = Check(serving)
    engine, settings, threads = check.engine, check.settings, check.threads
    if grammar is not None and asked.structured_outputs is not None:
        raise bad_request("response_format and structured_outputs were both given; give one", "structured_outputs")
    if asked.structured_outputs is not None:
        grammar = await threads.run(structured, asked.structured_outputs, settings)
    priority = check.priority(asked.priority, tenant)
    prompt_top = check.between("prompt_logprobs", asked.prompt_logprobs, 0, settings.max_logprobs)
    if prompt_top is not None and asked.stream:
        raise bad_request("prompt_logprobs cannot be given with stream; leave one of them out", "prompt_logprobs")
    made = Plan(
        engine=engine,
        settings=settings,
        writing=serving.writing,
        tenant=tenant,
        sampler=sampler(asked, check),
        count=check.between("n", asked.n, 1, settings.max_n) or 1,
        min_tokens=check.between("min_tokens", asked.min_tokens, 0, engine.config.max_positions) or 0,
        stop=(*check.stops(asked.stop), *check.ids("stop_token_ids", asked.stop_token_ids or ())),
        ignore_eos=bool(asked.ignore_eos),
        grammar=grammar,
        allowed=check.allowed(asked.allowed_token_ids),
        words=await threads.run(check.words, asked.bad_words or ()),
        top=check.between("logprobs", top, 0, settings.max_logprobs),
        prompt_top=prompt_top,
        processed=asked.logprobs_mode == "processed",
        priority=priority,
        no_repeat_ngram_size=engine.generation_defaults.no_repeat_ngram_size,
    )
    if grammar is not None:
        await made.prepare([grammar], "response_format" if asked.structured_outputs is None else "structured_outputs")
    return made


def sampler(asked: Knobs, check: Check) -> Sampling:
    """How tokens are drawn: the request, then the model's file, then OpenAI's defaults."""
    file = check.engine.generation_defaults
    file.check()
    base: dict[str, Any] = {"temperature": 1.0}
    for name in DRAWN if file.do_sample is not False else DRAWN[-1:]:
        if (value := getattr(file, name)) is not None:
            base[name] = value
    base |= {name: value for name in DRAWN if (value := getattr(asked, name)) is not None}
    if base.get("top_k") == -1:  # how other servers turn it off
        base["top_k"] = 0
    typical, seed = base.pop("typical_p", 1.0), check.seed(asked.seed)
    try:
        params = SamplingParams(
            **base, presence_penalty=asked.presence_penalty or 0.0, frequency_penalty=asked.frequency_penalty or 0.0
        )
        what = params.sampling(fresh_seed() if seed is None else seed)
        return replace(what, typical_p=typical, logit_bias=check.bias(asked.logit_bias or {}))
    except (InvalidInput, WrongType) as error:
        found = re.match(r"(\w+) is ", str(error))
        raise bad_request(str(error), found[1] if found else None) from error


def structured(asked: StructuredOutputs, settings: Settings) -> Grammar:
    """The grammar of `structured_outputs`."""
    given = {
        name.removesuffix("_"): value
        for name in StructuredOutputs.model_fields
        if (value := getattr(asked, name)) is not None
    }
    if len(given) != 1:
        named = ", ".join(given) or "none"
        raise bad_request(
            f"structured_outputs has {named}; give exactly one of json, regex, choice and grammar", "structured_outputs"
        )
    ((kind, value),) = given.items()
    where = f"structured_outputs.{kind}"
    check_size(value, where, settings)
    make = {"json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choices, "grammar": Grammar.lark}
    return grammar_of(lambda: make[kind](value), where)


def grammar_of(make: Any, where: str) -> Grammar:
    """A grammar, or a 400 that names its field."""
    try:
        return make()
    except (InvalidInput, WrongType, Unsupported) as error:
        raise bad_request(str(error), where, "invalid_grammar") from error


def check_tools(tools: Sequence[Tool], settings: Settings) -> None:
    """Raise unless tools are as small as the server wants them, each and together."""
    for i, tool in enumerate(tools):
        check_size(tool.function.parameters or {}, f"tools[{i}].function.parameters", settings)
    size = sum(len(tool.model_dump_json()) for tool in tools)
    if size > settings.max_tools_bytes:
        raise bad_request(
            f"tools have {size} bytes; at most {settings.max_tools_bytes} are allowed", "tools", "schema_too_large"
        )


def check_size(value: Any, where: str, settings: Settings) -> None:
    """Raise unless a schema or grammar is as small as the server wants it."""
    size = len(value.encode() if isinstance(value, str) else json.dumps(value, ensure_ascii=False).encode())
    if size > settings.max_schema_bytes:
        raise bad_request(
            f"{where} has {size} bytes; at most {settings.max_schema_bytes} are allowed", where, "schema_too_large"
        )
