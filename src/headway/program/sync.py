"""The synchronous API: one sequence, step by step, with profiling and validation. A thin layer over `Engine`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headway.base.checks import check_flag, check_integer
from headway.base.closing import Closing
from headway.base.config import settings
from headway.base.dataclass import dataclass
from headway.base.errors import Closed, ContextLengthExceeded, InvalidInput, WrongType
from headway.base.specs.probes import Hidden, Logits
from headway.base.specs.samplers import Argmax, Sampler, Sampling
from headway.base.text import short_repr
from headway.program.checks.ids import token_ids
from headway.program.context import Context
from headway.program.engine import Engine
from headway.program.model.loaded import EngineInfo
from headway.runtime.profile import Profile
from headway.runtime.validate import Diagnostic, Trace, compare

if TYPE_CHECKING:
    from headway.models.decoder import Decoder
    from headway.models.quantized.cpu import QuantizedDecoder

SCRATCH = 1.1  # pages of the reference engine, as a multiple of one full sequence


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters, shared by the decode loop and the server. Penalties count generated tokens only."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        self.sampling()

    def sampling(self, seed: int | None = None) -> Sampling:
        """The same parameters as a sampler."""
        return Sampling(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=seed,
        )

    def requires_logits_readback(self) -> bool:
        """Whether more than the argmax is needed: temperature, top-p or a penalty is active."""
        penalized = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return self.temperature > 0.0 or self.top_p < 1.0 or penalized


@dataclass(eq=False)
class DecodeState(Closing):
    """The state of one request: its position and what it generated. Close it when done; it cannot be used after."""

    generated_tokens: list[int] = field(default_factory=list)
    layer_outputs: list[np.ndarray] = field(default_factory=list)
    logits: np.ndarray | None = None
    context: Context | None = field(default=None, repr=False)
    mirror: Context | None = field(default=None, repr=False)
    closed: bool = False
    _greedy: tuple[object, int] | None = field(default=None, repr=False)  # the likeliest token, and of what
    _asks_greedy: bool = field(default=False, repr=False)  # then a step draws it too, in the same pass

    @property
    def position(self) -> int:
        """The index of the next token."""
        return 0 if self.context is None else self.context.seq_len

    def close(self) -> None:
        """Release its pages."""
        self.closed = True
        for context in (self.context, self.mirror):
            if context is not None:
                context.release()
        self.context = self.mirror = None


class InferenceEngine(Closing):
    """One model, driven token by token from one thread."""

    def __init__(self, model: str | Path | Decoder | QuantizedDecoder | Engine, **options: Any) -> None:
        if isinstance(model, Engine) and options:
            raise InvalidInput(f"options {sorted(options)} cannot be given with an engine that exists already")
        self._owned = not isinstance(model, Engine)
        self.engine = model if isinstance(model, Engine) else Engine(model, **options)
        self._mirror: Engine | None = None
        self._readback = False
        self._last: DecodeState | None = None
        self.diagnostics: list[Diagnostic] = []

    def __repr__(self) -> str:
        return f"InferenceEngine({self.engine!r})"

    @property
    def info(self) -> EngineInfo:
        return self.engine.info

    # -- stepping --------------------------------------------------------------------------------------------------

    def decode_step(self, state: DecodeState, token: int, collect_output: bool = False) -> None:
        """Run one token through all layers. With collect_output each layer's output is left in state.layer_outputs."""
        collect = check_flag(collect_output, "collect_output")
        self._step(state, self._ids(state, [token]), collect=collect)
        state.generated_tokens.append(int(token))

    def prefill_batched(self, state: DecodeState, tokens: Iterable[int], *, validate: bool = False) -> None:
        """Process a prompt in one batched pass.

        With `validate`, or HEADWAY_BATCHED_PREFILL=validate, the prompt also runs token by token; if the two differ
        beyond tolerance ValidationFailed names the first differing layer and the state is as it was.
        HEADWAY_BATCHED_PREFILL=off takes the serial path instead.
        """
        mode = "validate" if check_flag(validate, "validate") else settings().batched_prefill
        ids = self._ids(state, tokens)
        if not ids:
            return
        if mode == "off":
            self.prefill_batch(state, ids)
        elif mode == "validate":
            self._validated(state, ids)
        else:
            self._step(state, ids)

    def prefill_batch(self, state: DecodeState, tokens: Iterable[int]) -> None:
        """Process prompt tokens one by one; continues a live state, and an empty list does nothing.

        On an error the state is as it was.
        """
        ids, before = self._ids(state, tokens), state.position
        try:
            for token in ids:
                self._step(state, [token])
        except BaseException:
            for context in (state.context, state.mirror):
                if context is not None:
                    context.truncate(max(0, context.seq_len - before))
            raise

    def _step(self, state: DecodeState, ids: list[int], *, collect: bool = False) -> None:
        context = self._context(state)
        traced = collect or self._mirror is not None
        if state._asks_greedy and not traced:
            forward = context.forward().input(ids)
            handle = forward.sample([-1], Argmax())
            token = forward.execute().result().token(handle)
            trace, state._greedy = None, (self._computed(context), token)
        else:
            trace = self._run(context, ids, traced=traced)
        if self._mirror is not None and trace is not None:
            self._diagnose(state, ids, trace)
        if collect and trace is not None:
            state.layer_outputs = list(trace.layers)
        self._last = state
        if self._readback:
            state.logits = self._logits(context)

    @staticmethod
    def _run(context: Context, ids: list[int], *, traced: bool, cached: bool = True) -> Trace | None:
        """One pass; traced, with every layer's output and the logits of its last token.

        Without `cached` every row is computed: pages that stay working are neither taken from the prefix cache nor
        found there by another pass.
        """
        forward = context.forward().input(ids)
        if not cached:
            forward.defer_commit()
        if not traced:
            forward.execute().result()
            return None
        layers = [forward.probe(-1, Hidden(l)) for l in range(1, context.engine.config.layers)]
        logits = forward.probe(-1, Logits())
        out = forward.execute().result()
        last = context._last_residual()  # Hidden(L) is normed; the last layer's own output is what was kept
        return Trace([*(out.hidden(h) for h in layers), last], out.logits(logits))

    def _validated(self, state: DecodeState, ids: list[int]) -> None:
        context = self._context(state)
        scratch = context.fork()
        try:
            serial = None
            for i, token in enumerate(ids):
                serial = self._run(scratch, [token], traced=i == len(ids) - 1, cached=False)
            batched = self._run(context, ids, traced=True, cached=False)
            assert serial is not None
            assert batched is not None
            result = compare(context.seq_len - 1, batched, serial, self.engine._backend.activations)
            if not result.passed:
                context.truncate(len(ids))
            result.check("batched prefill", "token by token")
            raw = context.inner()
            raw.commit_working_pages(context.seq_len // self.engine.page_size - raw.committed_page_count)
        finally:
            scratch.release()
        self._last = state
        if self._readback:
            state.logits = self._logits(context)

    # -- sampling --------------------------------------------------------------------------------------------------

    def sample_greedy(self, state: DecodeState | None = None) -> int:
        """The likeliest next token of a state (by default the one stepped last). Moves one integer."""
        state = self._stepped(state)
        known, state._asks_greedy = state._greedy, True
        if known is None or known[0] != self._computed(self._context(state)):
            token = self._draw(state, Argmax(), ())
            known = state._greedy = self._computed(self._context(state)), token
        return known[1]

    def _computed(self, context: Context) -> object:
        """What is computed, by which weights: equal while nothing about it has changed."""
        with self.engine._lock:
            return context._table.stamp, id(self.engine._backend.decoder), len(context.pending)

    def sample(self, state: DecodeState, params: SamplingParams, random: int | np.random.Generator) -> int:
        """The next token under params: greedy when nothing else is active. `random` is a seed or a numpy Generator."""
        self._stepped(state)
        if not isinstance(params, SamplingParams):
            raise WrongType(f"params is {short_repr(params)}; it must be SamplingParams(temperature=..., top_p=...)")
        if not params.requires_logits_readback():
            return self.sample_greedy(state)
        if isinstance(random, np.random.Generator):
            seed = int(random.integers(1 << 63))
        elif isinstance(random, int | np.integer) and not isinstance(random, bool):
            seed = int(random)
        else:
            raise WrongType(f"random is {short_repr(random)}; give a seed or a numpy.random.Generator")
        return self._draw(state, params.sampling(seed), state.generated_tokens)

    def _draw(self, state: DecodeState, sampler: Sampler, history: Sequence[int]) -> int:
        forward = self._context(state).forward()
        handle = forward.sample([-1], sampler, history=history)
        return forward.execute().result().token(handle)

    def _stepped(self, state: DecodeState | None) -> DecodeState:
        state = state if state is not None else self._last
        if state is not None:
            self._context(state)
        if state is None or state.position == 0:
            raise InvalidInput("nothing was computed yet; prefill a prompt or decode a token before sampling")
        return state

    # -- instruments -----------------------------------------------------------------------------------------------

    def enable_logits_readback(self) -> None:
        """Leave the logits of every step's last token in state.logits."""
        self._readback = True

    def enable_validation_diagnostics(self) -> None:
        """Compute every step a second time by torch, in float32 on the CPU, with activations quantized as the weights'
        format says. Differences go to `diagnostics`; one beyond tolerance raises ValidationFailed, and the state is as
        it was. It takes the memory of a second model, four bytes for each weight, and of one sequence's KV cache."""
        if self._mirror is None:
            backend, size = self.engine._backend.on_torch(), self.engine.page_size
            whole = int(-(-self.engine.config.max_positions // size) * SCRATCH) + 1
            self._mirror = Engine(
                backend,
                page_size=size,
                pages=min(whole, self.engine.pages),
                threads=self.info.threads,
                kv_dtype=self.info.kv_dtype if self.info.device == "cpu" else "auto",
                deterministic=True,  # where torch computes the steps too, this at least sums in another order
            )

    def enable_profiling(self) -> None:
        """Measure every step; `record_profiling_sample` adds what was measured to `profile()`."""
        self.engine.enable_profiling(automatic=False)

    def record_profiling_sample(self) -> None:
        """Add what was measured since the last call to the profile, as one sample."""
        self.engine._profiler.record()

    def profile(self) -> Profile:
        """All recorded samples and their sums."""
        return self.engine.profile()

    def _diagnose(self, state: DecodeState, ids: list[int], trace: Trace) -> None:
        assert self._mirror is not None
        assert state.context is not None
        if state.mirror is None:
            state.mirror = self._mirror.context()
        missed = list(state.context.tokens)[state.mirror.seq_len : -len(ids)]
        if missed:
            self._run(state.mirror, missed, traced=False)
        reference = self._run(state.mirror, ids, traced=True)
        assert reference is not None
        result = compare(state.position - 1, trace, reference, self.engine._backend.activations)
        self.diagnostics.append(result)
        if not result.passed:
            for context in (state.context, state.mirror):
                context.truncate(len(ids))
        result.check("this step", "the reference")

    @staticmethod
    def _logits(context: Context) -> np.ndarray:
        forward = context.forward()
        handle = forward.probe(-1, Logits())
        return forward.execute().result().logits(handle)

    # -- ending ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release what this engine owns."""
        for engine in (self._mirror, self.engine if self._owned else None):
            if engine is not None:
                engine.close()

    # -- checking --------------------------------------------------------------------------------------------------

    def _context(self, state: DecodeState) -> Context:
        if not isinstance(state, DecodeState):
            raise WrongType(f"the state is {short_repr(state)}; it must be a DecodeState()")
        if state.closed:
            raise Closed("this decode state was closed; create a new DecodeState")
        if state.context is None:
            state.context = self.engine.context()
        if state.context.engine is not self.engine:
            raise InvalidInput("this decode state belongs to another engine")
        return state.context

    def _ids(self, state: DecodeState, tokens: Iterable[int]) -> list[int]:
        """Checked ids that still fit the context limit; nothing is computed when one does not."""
        self._context(state)
        ids = token_ids(tokens, self.engine.vocab_size)
        limit, why = self.engine.config.max_positions, self.engine.config.limit_reason
        if state.position + len(ids) > limit:
            raise ContextLengthExceeded(
                f"{len(ids)} more tokens after position {state.position} exceed this model's context limit of {limit}"
                f"{why and f' ({why})'}"
            )
        return ids


def generate(
    engine: InferenceEngine,
    prompt_tokens: Iterable[int],
    max_tokens: int,
    eos_token_id: int | Iterable[int] | None = None,
    *,
    params: SamplingParams | None = None,
    random: int | np.random.Generator = 0,
) -> list[int]:
    """Prefill the prompt, decode greedily unless params say otherwise, return the new ids without the end token.

    `eos_token_id` is by default the model's own; an empty list never stops early.
    """
    if not isinstance(engine, InferenceEngine):
        raise WrongType(f"the engine is {short_repr(engine)}; it must be an InferenceEngine(model)")
    count = check_integer(max_tokens, "max_tokens")
    vocab = engine.engine.vocab_size
    prompt = token_ids(prompt_tokens, vocab, "prompt_tokens")
    if not prompt:
        raise InvalidInput("the prompt is empty; give at least one token (a begin token, for instance)")
    ends = engine.engine.eos_ids if eos_token_id is None else eos_token_id
    stops = set(token_ids([ends] if isinstance(ends, int | np.integer) else ends, vocab, "eos_token_id"))
    generated: list[int] = []
    with DecodeState() as state:
        engine.prefill_batched(state, prompt)
        while len(generated) < count:
            token = engine.sample(state, params or SamplingParams(), random)
            if token in stops:
                break
            generated.append(token)
            if len(generated) < count:
                engine.decode_step(state, token)
    return generated
