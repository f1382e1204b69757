"""The plan of a request: every field checked against the model and the server's limits, and every default resolved.

    GenerationRequest ──▶ RequestPlan ──▶ one Generation for each choice, in a context that holds its prompt

Sampling parameters that a request does not set come from the model's generation_config.json, and then from OpenAI's
defaults: temperature 1 and everything else off. A choice samples as `ctx.generate` does with the same seed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from headway.base.dataclass import dataclass
from headway.base.errors import GrammarTooSlow, InvalidInput, Unsupported, WrongType
from headway.base.json_text import written_size
from headway.base.rng import fresh_seed
from headway.base.specs.logits_rules import NAMES as RULES
from headway.base.specs.logits_rules import LogitsRuleValues
from headway.base.specs.probes import Ranking
from headway.base.specs.samplers import Sampling
from headway.models.adapters.adapter import Adapter
from headway.program.constraints.budget import GrammarBudget
from headway.program.constraints.constraint import Constraint, compile_async
from headway.program.constraints.grammar import Grammar
from headway.program.context import Context
from headway.program.engine import Engine
from headway.program.generation.generator import Generation
from headway.program.generation.sequences.sequences import derived_seed
from headway.program.generation.speculation.drafter import Drafter
from headway.program.sync import SamplingParams
from headway.server import telemetry
from headway.server.api.beams import BeamOptions, beam_options
from headway.server.api.checks import RequestChecks
from headway.server.api.request_schema import ChatRequest, GenerationRequest, StructuredOutputs, ToolDefinition
from headway.server.api.token_bounds import BadWords, TokenBounds
from headway.server.errors import bad_request
from headway.server.keys import Tenant
from headway.server.models import ModelLease
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.server.threads import WorkerThreads

GBNF_RULE = re.compile(r"^[ \t]*[A-Za-z_][\w-]{0,100}[ \t]{0,100}::=", re.MULTILINE)
RARE_FIELDS = ("typical_p", "epsilon_cutoff", "eta_cutoff")  # those that the synchronous API does not have
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", *RARE_FIELDS, "repetition_penalty")


@dataclass(frozen=True, eq=False)
class RequestPlan:
    """What all choices of a request share."""

    engine: Engine
    settings: ServerSettings
    writers: WorkerThreads  # where long responses are serialized
    tenant: Tenant
    sampler: Sampling  # with a seed
    count: int = 1  # sequences generated for each prompt
    min_tokens: int = 0
    stop: tuple[str | int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    allowed: tuple[int, ...] | None = None
    words: BadWords | None = None
    top_logprobs: int | None = None  # how many of the likeliest tokens to return for each token; None: no logprobs
    prompt_logprobs: int | None = None  # the same for prompt tokens
    processed: bool = False
    priority: float = 0.0
    salt: str = ""  # of the prefix cache
    show_special: bool = False  # special tokens are in the text
    show_stop: bool = False  # the stop string is in the text
    no_repeat_ngram_size: int | None = None
    adapters: tuple[tuple[Adapter, float], ...] = ()  # what the prompt and all choices are computed under
    penalize_prompt: bool = False  # the repetition penalty counts it
    drafter: Drafter | None = None
    rules: Mapping[str, Any] = field(default_factory=dict)  # of DRY, XTC and mirostat
    beams: BeamOptions | None = None  # the choices are the best of a search
    constraints: dict[Grammar, Any] = field(default_factory=dict)  # compiled grammars, in their initial state
    grammar_budget: GrammarBudget = field(default_factory=GrammarBudget)  # of all of them, in all choices

    @property
    def width(self) -> int:
        """Sequences that are computed for each prompt."""
        return self.count if self.beams is None else max(self.count, self.beams.beams)

    def context(self) -> Context:
        """An empty context for one prompt."""
        return self.engine.context(priority=self.priority, salt=self.salt)

    async def prepare(self, grammars: Iterable[Grammar], where: str) -> None:
        """Compile the grammars of a field before anything is computed, within the server's time limit."""
        for grammar in grammars:
            try:
                self.constraints[grammar] = await compile_async(
                    grammar,
                    self.engine.tokenizer,
                    self.engine.vocab_size,
                    budget=self.grammar_budget,
                    seconds=self.settings.max_grammar_seconds,
                )
            except (InvalidInput, Unsupported) as error:
                code = "grammar_too_slow" if isinstance(error, GrammarTooSlow) else "invalid_grammar"
                raise bad_request(str(error), where, code) from error

    def generation(
        self,
        context: Context,
        number: int,
        grammar: Grammar | None,
        max_tokens: int,
        *,
        free: bool = True,
        wrap: Callable[[Constraint], Constraint] | None = None,
        drafts: bool = True,
    ) -> Generation:
        """The generation of the choice with this number. One that is not `free` ends only by its grammar.

        `wrap` makes a constraint from that of the grammar. Without `drafts` every step has one token of text.
        """
        assert self.sampler.seed is not None
        return context.generate(
            replace(self.sampler, seed=derived_seed(self.sampler.seed, number)),
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens) if free else 0,
            stop=self.stop if free else (),
            stop_only=self.ignore_eos and free,
            constrain=self.constraint(grammar, wrap),
            probe=None if self.top_logprobs is None else Ranking(self.top_logprobs, processed=self.processed),
            no_repeat_ngram_size=self.no_repeat_ngram_size,
            bad_words_ids=self.engine.generation_defaults.bad_words_ids,
            sequence_bias=self.engine.generation_defaults.sequence_bias,
            penalize_prompt=self.penalize_prompt,
            adapter=self.adapters,
            speculate=self.drafter if drafts and not self.rules else None,
            **self.rules,
        )

    async def first_token(self, context: Context, number: int) -> int:
        """The token that a choice with this number would begin with here, without any constraint."""
        assert self.sampler.seed is not None
        forward = context.forward()
        for adapter, scale in self.adapters:
            forward.adapter(adapter, scale)
        token = forward.sample([-1], replace(self.sampler, seed=derived_seed(self.sampler.seed, number)))
        return (await forward.execute()).token(token)

    def constraint(
        self, grammar: Grammar | None, wrap: Callable[[Constraint], Constraint] | None = None
    ) -> Constraint | None:
        """A new constraint of a grammar and the tokens that are allowed; None where everything is."""
        bounded = self.allowed is not None or self.words is not None
        other = None if grammar is None else self.constraints[grammar].copy()
        if not bounded and wrap is None and (other is None or self.top_logprobs is None):
            return other
        if other is not None and wrap is not None:
            other = wrap(other)
        return TokenBounds(self.engine.vocab_size, self.allowed, self.words, other)


async def plan_request(
    body: GenerationRequest,
    serving: Serving,
    tenant: Tenant,
    lease: ModelLease,
    *,
    top_logprobs: int | None,
    grammar: Grammar | None,
) -> RequestPlan:
    """The plan of a request; `top_logprobs` and `grammar` come from fields that differ between routes."""
    check, adapter = RequestChecks(serving, lease.engine), lease.adapter
    if (trace := telemetry.request_trace.get()) is not None:
        trace.asked(body)
    engine, settings, threads = check.engine, check.settings, check.threads
    given = {"response_format": grammar, "structured_outputs": body.structured_outputs, "grammar": body.grammar or None}
    formats = [name for name, value in given.items() if value is not None]
    if len(formats) > 1:
        raise bad_request(f"{formats[0]} and {formats[1]} are both set; pass one of them", formats[1])
    if body.structured_outputs is not None:
        grammar = await threads.run(structured_grammar, body.structured_outputs, settings)
    elif body.grammar:
        grammar = await threads.run(written_grammar, body.grammar, "grammar", settings)
    beams = beam_options(body, check)
    priority = check.priority(body.priority, tenant)
    prompt_logprobs = check.top_logprobs("prompt_logprobs", body.prompt_logprobs)
    if prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs cannot be combined with stream; remove one of them", "prompt_logprobs")
    plan = RequestPlan(
        engine=engine,
        settings=settings,
        writers=serving.writers,
        tenant=tenant,
        sampler=sampler(body, check, draws=beams is None),
        beams=beams,
        count=check.in_range("n", body.n, 1, settings.max_n) or 1,
        min_tokens=check.in_range("min_tokens", body.min_tokens, 0, engine.config.max_positions) or 0,
        stop=(*check.stops(body.stop), *check.ids("stop_token_ids", body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        grammar=grammar,
        allowed=check.allowed(body.allowed_token_ids),
        words=await threads.run(check.words, body.bad_words or ()),
        top_logprobs=check.top_logprobs("top_logprobs" if isinstance(body, ChatRequest) else "logprobs", top_logprobs),
        prompt_logprobs=prompt_logprobs,
        processed=body.logprobs_mode == "processed",
        priority=priority,
        salt=tenant.salt if body.cache_salt is None else f"{tenant.salt}\0{body.cache_salt}",
        show_special=body.skip_special_tokens is False,
        show_stop=bool(body.include_stop_str_in_output),
        no_repeat_ngram_size=engine.generation_defaults.no_repeat_ngram_size,
        adapters=() if adapter is None else ((adapter.adapter, adapter.scale),),
        grammar_budget=GrammarBudget(settings.max_grammar_seconds),
        drafter=lease.drafter,
        rules=_rules(body),
    )
    if grammar is not None:
        await plan.prepare([grammar], formats[0])
    return plan


def sampler(body: GenerationRequest, check: RequestChecks, *, draws: bool = True) -> Sampling:
    """The sampler of a request: its own parameters, then the model's file, then OpenAI's defaults."""
    file = check.engine.generation_defaults
    file.check()
    base: dict[str, Any] = {"temperature": 1.0 if draws else 0.0}
    for name in SAMPLING_FIELDS if draws and file.do_sample is not False else SAMPLING_FIELDS[-1:]:
        if (value := getattr(file, name)) is not None:
            base[name] = value
    base |= {name: value for name in SAMPLING_FIELDS if (value := getattr(body, name)) is not None}
    if body.repeat_penalty is not None:
        if body.repetition_penalty not in (None, body.repeat_penalty):
            raise bad_request(
                f"repetition_penalty is {body.repetition_penalty:g} and repeat_penalty is {body.repeat_penalty:g}; "
                "pass one of them",
                "repeat_penalty",
            )
        base["repetition_penalty"] = body.repeat_penalty
    if base.get("top_k") == -1:  # off, as other servers write it
        base["top_k"] = 0
    rare = {name: base.pop(name) for name in RARE_FIELDS if name in base}
    seed = check.seed(body.seed)
    try:
        params = SamplingParams(
            **base, presence_penalty=body.presence_penalty or 0.0, frequency_penalty=body.frequency_penalty or 0.0
        )
        sampling = params.sampling(fresh_seed() if seed is None else seed)
        return replace(sampling, **rare, logit_bias=check.bias(body.logit_bias or {}))
    except (InvalidInput, WrongType) as error:
        match = re.match(r"(\w+) is ", str(error))
        raise bad_request(str(error), match[1] if match else None) from error


def _rules(body: GenerationRequest) -> dict[str, Any]:
    """The parameters of DRY, XTC and mirostat; none where all of them are off."""
    given = {name: value for name in RULES if (value := getattr(body, name)) is not None}
    try:
        values = LogitsRuleValues.of(given)
        if values.mirostat and body.temperature == 0:
            raise InvalidInput("mirostat is set and temperature is 0, which draws nothing; use a temperature above 0")
    except (InvalidInput, WrongType) as error:
        raise bad_request(str(error), str(error).split(" ")[0]) from error
    return {} if values.is_off else given


def structured_grammar(body: StructuredOutputs, settings: ServerSettings) -> Grammar:
    """The grammar of `structured_outputs`."""
    given = {
        name.removesuffix("_"): value
        for name in StructuredOutputs.model_fields
        if (value := getattr(body, name)) is not None
    }
    if len(given) != 1:
        named = ", ".join(given) or "none"
        raise bad_request(
            f"structured_outputs has {named}; pass exactly one of json, regex, choice and grammar", "structured_outputs"
        )
    ((kind, value),) = given.items()
    where = f"structured_outputs.{kind}"
    if kind == "grammar":
        return written_grammar(value, where, settings)
    check_size(value, where, settings)
    make = {"json": Grammar.json_schema, "regex": Grammar.regex, "choice": Grammar.choices}
    return grammar_of(lambda: make[kind](value), where)


def written_grammar(text: str, where: str, settings: ServerSettings) -> Grammar:
    """The grammar of a text in GBNF, if it has a rule `name ::= …`, or else in Lark."""
    check_size(text, where, settings)
    return grammar_of(lambda: (Grammar.gbnf if GBNF_RULE.search(text) else Grammar.lark)(text), where)


def grammar_of(make: Any, where: str) -> Grammar:
    """The grammar that `make` returns, or a 400 that names its field."""
    try:
        return make()
    except (InvalidInput, WrongType, Unsupported) as error:
        raise bad_request(str(error), where, "invalid_grammar") from error


def check_tools(tools: Sequence[ToolDefinition], settings: ServerSettings) -> None:
    """Raise if a tool, or all tools together, are larger than the server's limits."""
    for i, tool in enumerate(tools):
        check_size(tool.function.parameters or {}, f"tools[{i}].function.parameters", settings)
    size = sum(len(tool.model_dump_json()) for tool in tools)
    if size > settings.max_tools_bytes:
        raise bad_request(
            f"tools have {size} bytes; at most {settings.max_tools_bytes} are allowed", "tools", "schema_too_large"
        )


def check_size(value: Any, where: str, settings: ServerSettings) -> None:
    """Raise if a schema or grammar is larger than the server's limit."""
    size = len(value.encode()) if isinstance(value, str) else written_size(value)
    if size > settings.max_schema_bytes:
        raise bad_request(
            f"{where} has {size} bytes; at most {settings.max_schema_bytes} are allowed", where, "schema_too_large"
        )
