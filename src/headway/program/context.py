"""A context: one sequence, the tokens waiting to be computed, and the verbs that change it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, Unpack, overload

import numpy as np

from headway.base.arrays import from_tensor, widen
from headway.base.errors import (
    Closed,
    ContextBusy,
    InvalidInput,
    PassFailed,
    Unsupported,
)
from headway.base.specs.adapters import AdapterMix
from headway.base.specs.generation import PARAMETERS, unknown_parameter
from headway.base.specs.masks import Mask
from headway.base.specs.probes import ProbeOf
from headway.base.specs.samplers import Sampler
from headway.base.text import short_repr
from headway.kv.table import PageTable
from headway.program.adapters import AdapterArgument, mix_of
from headway.program.chat.conversation import Conversation
from headway.program.chat.messages import Messages
from headway.program.chat.reply import ChatLimits, ChatReply, Choice
from headway.program.checks.ids import integers, token_ids
from headway.program.checks.passes import check_pass
from headway.program.constraints.async_mask import check_may_look
from headway.program.constraints.constraint import Constraint
from headway.program.constraints.grammar import Grammar
from headway.program.execution import Execution
from headway.program.forward import Forward
from headway.program.generation.generator import Generation
from headway.program.generation.hooks import LogitsHook, PrepareHook
from headway.program.generation.parameters import OneSequence, Several, settle
from headway.program.generation.sequences.sequences import Generations, start
from headway.program.generation.speculation.drafter import Drafter
from headway.program.kv_cache.pages import RawPages
from headway.program.view import ContextView
from headway.runtime.job import Job
from headway.runtime.passes import Pass, PassResult
from headway.runtime.scheduler.order import BID_LIMIT

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # with defaults, which typing has from Python 3.13

    from headway.program.engine import Engine

    A = TypeVar("A", default=None)  # the values of probes; None without any
    B = TypeVar("B", default=None)
    C = TypeVar("C", default=None)


class Context:
    """One sequence's state. Verbs are synchronous; only passes are awaited. One pass is in flight at a time."""

    def __init__(self, engine: Engine, table: PageTable, seed: int | None = None) -> None:
        self.engine, self._table, self.seed = engine, engine._loop.adopt(table), seed
        self._pending: list[int] = []
        self._conversation = Conversation()
        self._retract: Callable[[], None] | None = None  # takes back a pass that a generation runs ahead
        self._written = 0  # tokens in the context after the last chat verb, to tell what was written since
        self._generations: weakref.WeakSet[Generation] = weakref.WeakSet()  # those that follow this context
        self.cached_tokens = 0  # taken from the prefix cache instead of computed
        self._queue_seconds: float | None = None  # that its first pass waited for a step
        self._finalizer = weakref.finalize(self, engine._loop.release_later, table)

    def __repr__(self) -> str:
        with self.engine._lock:  # and not through seq_len and pending, which take back a pass that runs ahead
            computed, pending = self._table.length, len(self._pending)
            busy = self.engine._loop.last_job(self._table) is not None
            state = "released" if self._table.closed else "lost" if self._table.lost else "busy" if busy else "idle"
        return f"<Context: {computed} tokens computed, {pending} pending, {state}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            "a context cannot be pickled or copied: fork() gives a second one, save(name, durable=True) writes it to "
            "disk"
        )

    # -- reading ---------------------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """The number of computed slots, discarded ones included."""
        self._come_back()
        return self._table.length

    @property
    def pending(self) -> tuple[int, ...]:
        """The tokens that are not computed yet."""
        self._come_back()
        return tuple(self._pending)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the sequence, pending ones last."""
        with self.engine._lock:
            self._come_back()
            return (*self._table.tokens, *self._pending)

    @property
    def next_position(self) -> int:
        """The position that the next token gets, after the pending ones."""
        with self.engine._lock:
            self._come_back()
            return self._table.next_position + len(self._pending)

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self._table.page_size

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The chat so far."""
        return self._conversation.messages

    # -- writing ---------------------------------------------------------------------------------------------------

    def fill(self, text_or_ids: str | Iterable[int], *, special: bool = False) -> Self:
        """Append text or token ids to the pending buffer; nothing is computed yet.

        Text that opens an empty context gets the tokenizer's begin token if the model expects one. Names of special
        tokens inside text are plain text unless `special=True`.
        """
        with self._changing():
            if isinstance(text_or_ids, str):
                tokenizer = self.engine.tokenizer
                ids = tokenizer.encode(text_or_ids, special=special)
                opens = self._table.length == 0 and not self._pending
                if opens and tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
                    ids = [tokenizer.bos_id, *ids]
                ids = token_ids(ids, self.engine.vocab_size, "encoded text")
            else:
                ids = token_ids(text_or_ids, self.engine.vocab_size)
            self._written = min(self._written, self._total())  # tokens of a verb may have been truncated
            self._pending += ids
        return self

    def system(self, text: str) -> Self:
        """Append a system message through the model's chat template."""
        return self._say({"role": "system", "content": text})

    def user(self, text: str) -> Self:
        """Append a user message."""
        return self._say({"role": "user", "content": text})

    def assistant(self, text: str) -> Self:
        """Append an assistant message, closed."""
        return self._say({"role": "assistant", "content": text})

    def cue(self) -> Self:
        """Append the generation prompt; twice in a row adds one."""
        with self._changing():
            self._conversation, ids = self.engine.chat_writer.cue(self._conversation)
            if ids:
                self._pending += ids
            self._written = self._total()
        return self

    def seal(self) -> Self:
        """Append what the template puts after an assistant text: the text after the cue becomes a message."""
        with self._changing():
            written = [*self._table.tokens, *self._pending][self._written :]
            text = self.engine.tokenizer.decode(written, skip_special=True)
            self._conversation, ids = self.engine.chat_writer.seal(self._conversation, text)
            self._pending += ids
            self._written = self._total()
        return self

    def _say(self, message: Mapping[str, Any]) -> Self:
        with self._changing(), self._all_or_nothing():
            if self._conversation.cued and self._total() > self._written:
                self.seal()
            self._conversation, ids = self.engine.chat_writer.add(self._conversation, message)
            self._pending += ids
            self._written = self._total()
        return self

    def _room(self) -> int:
        """How many more tokens the model's context limit allows at the positions that follow."""
        return self.engine.config.max_positions - self.next_position

    def _total(self) -> int:
        return self._table.length + len(self._pending)

    def set_bid(self, bid: float) -> Self:
        """The priority of this context's passes, from -1000 to 1000; each step of waiting adds 1."""
        with self.engine._lock:
            self._check_open()
            self._table.bid = checked_bid(bid)
        return self

    # -- computing -------------------------------------------------------------------------------------------------

    def forward(self) -> Forward:
        """A new pass over this context."""
        self._check_open()
        return Forward(self)

    async def flush(
        self,
        attention_mask: Mask | Sequence[Sequence[int]] | None = None,
        adapter: AdapterArgument | None = None,
    ) -> None:
        """Compute the pending tokens. Raw mask rows apply to the pending tokens, one row each.

        `adapter` is a LoRA adapter, a pair with its scale, or a list of these.
        """
        mix = mix_of(self.engine, adapter)
        if not self.pending:
            if attention_mask is not None:
                raise InvalidInput(
                    "flush was given an attention mask and there are no pending tokens for it to apply to"
                )
            return
        with self._changing():
            execution = self._flush(attention_mask, mix).execute()
        await execution

    def _flush(self, attention_mask: Mask | Sequence[Sequence[int]] | None, mix: AdapterMix | None) -> Forward:
        """The pass that computes the pending tokens."""
        forward = self.forward()._under(mix)
        if attention_mask is not None:
            forward.attention_mask(attention_mask)
        return forward._flushing(len(self._pending))

    # The type of a result: one sequence or several, and what their probes read. The first that fits decides.
    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, sampler: Sampler | None = None, *, probe: ProbeOf[A] | None = None, **options: Unpack[OneSequence]
    ) -> Generation[A]: ...

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self, sampler: Sampler | None = None, *, probe: tuple[ProbeOf[A], ProbeOf[B]], **options: Unpack[OneSequence]
    ) -> Generation[tuple[A, B]]: ...

    @overload
    def generate(  # pyright: ignore[reportOverlappingOverload]
        self,
        sampler: Sampler | None = None,
        *,
        probe: tuple[ProbeOf[A], ProbeOf[B], ProbeOf[C]],
        **options: Unpack[OneSequence],
    ) -> Generation[tuple[A, B, C]]: ...

    @overload
    def generate(
        self, sampler: Sampler | None = None, *, probe: Iterable[ProbeOf[A]], **options: Unpack[OneSequence]
    ) -> Generation[tuple[A, ...]]: ...

    @overload
    def generate(
        self, sampler: Sampler | None = None, *, probe: ProbeOf[A] | None = None, **options: Unpack[Several]
    ) -> Generations[A]: ...

    @overload
    def generate(
        self, sampler: Sampler | None = None, *, probe: tuple[ProbeOf[A], ProbeOf[B]], **options: Unpack[Several]
    ) -> Generations[tuple[A, B]]: ...

    @overload
    def generate(
        self,
        sampler: Sampler | None = None,
        *,
        probe: tuple[ProbeOf[A], ProbeOf[B], ProbeOf[C]],
        **options: Unpack[Several],
    ) -> Generations[tuple[A, B, C]]: ...

    @overload
    def generate(
        self, sampler: Sampler | None = None, *, probe: Iterable[ProbeOf[A]], **options: Unpack[Several]
    ) -> Generations[tuple[A, ...]]: ...

    def generate(
        self,
        sampler: Sampler | None = None,
        *,
        max_tokens: int | None = None,
        max_length: int | None = None,
        min_tokens: int | None = None,
        min_length: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        typical_p: float | None = None,
        epsilon_cutoff: float | None = None,
        eta_cutoff: float | None = None,
        repetition_penalty: float | None = None,
        dry_multiplier: float | None = None,
        dry_base: float | None = None,
        dry_allowed_length: int | None = None,
        dry_penalty_last_n: int | None = None,
        dry_sequence_breakers: Iterable[str] | None = None,
        xtc_probability: float | None = None,
        xtc_threshold: float | None = None,
        mirostat: int | None = None,
        mirostat_tau: float | None = None,
        mirostat_eta: float | None = None,
        no_repeat_ngram_size: int | None = None,
        bad_words_ids: Iterable[Iterable[int]] | None = None,
        sequence_bias: Mapping[tuple[int, ...], float] | Iterable[tuple[Iterable[int], float]] | None = None,
        num_beams: int | None = None,
        length_penalty: float | None = None,
        early_stopping: bool | Literal["never"] | None = None,
        num_return_sequences: int | None = None,
        stop: str | Iterable[str | int] = (),
        stop_only: bool = False,
        constrain: Grammar | Constraint | None = None,
        probe: ProbeOf[Any] | Iterable[ProbeOf[Any]] | None = None,
        attention_mask: Mask | None = None,
        penalize_prompt: bool = True,
        prepare: PrepareHook | None = None,
        logits: LogitsHook | None = None,
        adapter: AdapterArgument | None = None,
        speculate: Drafter | None = None,
        verify: Literal["match", "rejection"] = "match",
        **unknown: object,
    ) -> Generation[Any] | Generations[Any]:
        """Many passes: an async iterator of steps; `await gen.text()` collects. Adds the cue after a chat verb.

            text = await ctx.generate(hw.TopP(0.9), max_tokens=64, stop=["\\n"]).text()
            best, second = await ctx.generate(num_beams=4, num_return_sequences=2, max_tokens=20).texts()

        Without a sampler the model's generation_config.json says how to choose tokens and how many. A sampler replaces
        that file; an argument overrides both. How to draw (`temperature`, `top_k`, …) is given in one of these places.
        The default is the likeliest token, 256 times at most.
        `max_length` and `min_length` count the prompt, `max_tokens` and `min_tokens` do not.

        Stops add to the model's own end tokens, unless `stop_only`; end tokens and stop ids cannot come before the
        minimum. With `adapter` (a LoRA adapter, a pair with its scale, or a list of these) pending and new tokens are
        computed under it. `constrain` is a `Grammar` or an object with `mask`, `accept` and `rollback`. The repetition
        penalty counts the prompt too, unless `penalize_prompt=False`.

        `prepare` is called with each pass (`Prepared`) before it is executed, and `logits` with the array of a row's
        logits and this generation before the token is drawn: it changes the array, or returns another. Either may be an
        async function.

        `speculate` is what drafts tokens that are verified several in a pass: `PromptLookup()`, `DraftModel(engine)`,
        `OwnLayers(n)` or an object with `draft` and `accept`. The tokens are the same with and without; with
        `verify="rejection"` they are others, equally likely.

        With `num_beams` or `num_return_sequences` the result is `Generations`: several sequences on shared pages. The
        first, which is the best of the beams, continues in this context. Without beams, the seeds of the draws are
        derived from this generation's seed.
        """
        options = {name: value for name, value in locals().items() if name in PARAMETERS}
        self._check_open()
        for name in unknown:
            raise unknown_parameter(name)
        with self._all_or_nothing():
            if self._conversation.messages and not self._conversation.cued and self._total() <= self._written:
                self.cue()
            several = num_beams is not None or num_return_sequences is not None
            return start(self, settle(self, sampler, options), several=several)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Take back what is appended in this block when any of it is refused."""
        before, conversation, written = len(self.pending), self._conversation, self._written
        try:
            yield
        except BaseException:
            del self._pending[before:]
            self._conversation, self._written = conversation, written
            raise

    def chat(
        self,
        messages: Messages = None,
        sampler: Sampler | None = None,
        *,
        tools: Iterable[Callable[..., Any] | Mapping[str, Any]] | None = None,
        tool_choice: Choice = "auto",
        tool_format: str | None = None,
        on_error: Literal["tell", "raise"] = "tell",
        stop: str | Iterable[str | int] = (),
        max_tokens: int = 512,
        max_rounds: int = 8,
        tool_timeout: float | None = 30.0,
        timeout: float | None = None,
        adapter: AdapterArgument | None = None,
    ) -> ChatReply:
        """Append messages and get the reply: an async iterator of parts; `await reply.text()` collects the answer.

        `tools` are typed functions, which are run when the model calls them, or schemas. `max_tokens` bounds each
        message, `max_rounds` how often calls are run, `tool_timeout` one call and `timeout` all, in seconds. `adapter`
        is as in `generate`.
        """
        limits = ChatLimits(max_tokens, max_rounds, tool_timeout, timeout)
        options: dict[str, Any] = {"tools": tools, "tool_choice": tool_choice, "tool_format": tool_format}
        mix = mix_of(self.engine, adapter)
        return ChatReply(self, messages, sampler, **options, on_error=on_error, stop=stop, limits=limits, adapter=mix)

    # -- changing --------------------------------------------------------------------------------------------------

    def fork(self) -> Context:
        """A second context that shares every committed page and has copies of the rest, pending tokens included."""
        with self._changing():
            self.engine._loop.make_room(self._table.pages_to_fork, self._table)
            twin = Context(self.engine, self._table.fork(), self.seed)
            twin._pending = list(self._pending)
            twin._conversation, twin._written = self._conversation, self._written
            return twin

    def truncate(self, n: int) -> Self:
        """Drop the last n tokens, pending ones first."""
        (n,) = integers([n], "n")
        with self._changing():
            total = self._total()
            if not 0 <= n <= total:
                raise InvalidInput(f"truncate({n}): the context has {total} tokens; give a number from 0 to {total}")
            waiting = min(n, len(self._pending))
            self.engine._loop.make_room(self._table.pages_to_truncate(n - waiting), self._table)
            self._table.truncate(n - waiting)
            del self._pending[len(self._pending) - waiting :]
            for generation in list(self._generations) if n else ():
                generation._seen.was_cut(total - n)
        return self

    def save(self, name: str, *, durable: bool = False) -> None:
        """Keep this context under a name, pending tokens included; `engine.open(name)` gives forks of it.

        With durable=True it is written to disk, with a fingerprint of the weights, and survives the process.
        """
        self.engine._snapshots.save(name, self, durable=durable)

    def inner(self) -> RawPages:
        """The raw page operations."""
        self._check_open()
        return RawPages(self)

    def release(self) -> None:
        """Release the pages; the context cannot be used after."""
        with self.engine._lock:
            self._finalizer.detach()
            self.engine._loop.release_later(self._table)
            self.engine._loop.drain()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # -- for the builder and the page operations -------------------------------------------------------------------

    @contextmanager
    def _changing(self, after: Job | None = None) -> Iterator[tuple[Context, Job | None]]:
        """The engine's lock, with this context open and idle, or with just the pass `after` in flight.

        Yields the context and that pass, None when it has ended.
        """
        with self.engine._lock:
            self._check_open()
            self.engine._loop.drain()
            if after is None:
                self._come_back()
            running = self.engine._loop.last_job(self._table)
            if running is not None and running is not after:
                raise ContextBusy("this context has a pass in flight; await it before changing or forking the context")
            yield self, running

    @contextmanager
    def _moving(self, start: int, kept: Sequence[int]) -> Iterator[None]:
        """Slots move in this block: from `start` on those in `kept` stay. The caller holds the lock.

        What generations have generated stays generated, though it may be in no slot any more.
        """
        followers = [generation for generation in self._generations if generation._seen.has_begun]
        for generation in followers:
            generation._follow()
        length = self._table.length
        yield
        if self._written > start:
            waiting = max(0, self._written - length)
            self._written = start + sum(slot < self._written for slot in kept) + waiting
        for generation in followers:
            generation._slots_moved()

    def _come_back(self) -> None:
        """Take back a pass that a generation runs ahead, so that the context is seen as it is between two steps."""
        check_may_look()
        with self.engine._lock:
            retract, self._retract = self._retract, None
            if retract is not None:
                retract()

    def _view(self, ahead: Job | None) -> ContextView:
        """The context as it is, or as it will be when the pass in flight has succeeded. The caller holds the lock."""
        return ContextView.of(self._table, self._pending, ahead)

    def _submit(
        self, work: Pass, after: Job | None = None, then: Callable[[Mapping[int, object]], None] | None = None
    ) -> Job:
        """Queue a pass over this context. The pending tokens it starts with leave the buffer when it succeeds.

        `then` gets its values in the same moment, under the lock, on the worker's thread; it must not raise.
        """
        buffer = self._pending  # not self: a job must not keep its context, and so its pages, alive
        waiting = buffer[: work.pending]

        def success(values: Mapping[int, object]) -> None:
            del buffer[: work.pending]
            if then is not None:
                then(values)

        def undo() -> None:
            buffer[:0] = waiting

        return self.engine._loop.submit(self._table, work, after, success, undo)

    def execute(self, work: Pass) -> Execution[PassResult]:
        """Submit a pass built by hand; it may take the pending tokens as its first ones (`pending=`)."""
        with self._changing():
            check_pass(self, work)
            return Execution(self._submit(work), self, lambda result: result)

    def _settle(self) -> None:
        """Resume the context if it was preempted; waits in this thread until its pages are back."""
        with self._changing():
            coming = self.execute(Pass((), (), commit=False)) if self._table.must_replay else None
        if coming is not None:
            coming.result()

    @property
    def text_start(self) -> int:
        """Where the text begins that a generation continues: at the message after a cue, else at the first token."""
        return min(self._written, self._total()) if self._conversation.cued else 0

    @property
    def text_before(self) -> tuple[int, ...]:
        """The tokens of the text that a generation continues."""
        return self.tokens[self.text_start :]

    def _restore(self, pending: list[int], conversation: Conversation, written: int) -> None:
        """Restore what a snapshot has besides the pages."""
        self._pending, self._conversation, self._written = pending, conversation, written

    def _last_residual(self) -> np.ndarray:
        """The last layer's output at the last token, before the final norm [E]."""
        state = self._table.state
        assert state is not None
        return np.array(widen(from_tensor(state)))

    def _check_open(self) -> None:
        self.engine._loop.check_open()
        if self._table.closed:
            raise Closed("this context was released; create a new one with engine.context()")
        if self._table.lost is not None:
            raise PassFailed(f"this context's pages are lost; release it and create a new one: {self._table.lost}")


def checked_bid(bid: float) -> float:
    """The bid, if it is inside its limits."""
    if isinstance(bid, bool) or not isinstance(bid, int | float) or not -BID_LIMIT <= bid <= BID_LIMIT:
        raise InvalidInput(f"the bid is {short_repr(bid)}; it must be a number in [{-BID_LIMIT:g}, {BID_LIMIT:g}]")
    return float(bid)
