"""A remote context: one sequence whose pages are on a server. The same verbs, each one message.

Verbs that cannot fail are sent without waiting; the others wait for their reply in the caller's thread. What a
generation runs ahead is taken back first, as in process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self

from headway.base.checks import check_integer, check_snapshot_name, check_text
from headway.base.errors import Closed, ContextBusy, HeadwayError, InvalidInput, Unsupported, WrongType
from headway.base.specs.generation import PARAMETERS, parameters_of, unknown_parameter
from headway.base.specs.masks import Mask
from headway.base.specs.samplers import Sampler
from headway.base.text import short_repr
from headway.program.chat.limits import ChatLimits, Choice
from headway.program.checks.ids import integers, token_ids
from headway.program.kv_cache.page_map import ContextPage
from headway.remote.chat import RemoteChatReply
from headway.remote.connection.threaded import Connection
from headway.remote.forward import RemoteForward, Submitted, adapter_list
from headway.remote.generation.generator import RemoteGeneration
from headway.remote.generation.options import generate
from headway.remote.generation.sequences import RemoteGenerations
from headway.remote.protocol.values import mask_json
from headway.remote.rules import bound_mask

if TYPE_CHECKING:
    from headway.program.chat.messages import Messages
    from headway.remote.engine import RemoteEngine

OPTIONS = {parameter.name for parameter in parameters_of("generate")}
RULE_MARGIN = 64  # rows beyond max_tokens for which a rule is computed: a chat's cue among them


class RemoteContext:
    """One sequence's state, on a server. Verbs are synchronous; only passes are awaited."""

    def __init__(self, engine: RemoteEngine, number: int, *, lent: bool = False) -> None:
        self.engine, self._number = engine, number
        self._connection: Connection = engine._connection
        self._generations: weakref.WeakSet[RemoteGeneration] = weakref.WeakSet()
        self._submitted: list[Submitted] = []  # passes that may be in flight
        self._released = False
        self._finalizer = weakref.finalize(self, _release_later, self._connection, number)
        if lent:  # the server releases it
            self._finalizer.detach()

    def __repr__(self) -> str:
        if self._released:
            return "<Context: released>"
        try:
            return self._connection.request("context.repr", context=self._number)
        except HeadwayError as error:
            return f"<Context: {error}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a context cannot be pickled or copied: fork() gives a second one, save(name) keeps it")

    # -- reading -----------------------------------------------------------------------------------------------------

    @property
    def seq_len(self) -> int:
        """The number of computed slots, discarded ones included."""
        return self._ask("state")["seq_len"]

    @property
    def pending(self) -> tuple[int, ...]:
        """The tokens that are not computed yet."""
        return tuple(self._ask("state")["pending"])

    @property
    def next_position(self) -> int:
        """The position that the next token gets, after the pending ones."""
        return self._ask("state")["next_position"]

    @property
    def seed(self) -> int | None:
        """The seed for samplers that have none of their own."""
        return self._ask("state")["seed"]

    @property
    def cached_tokens(self) -> int:
        """Tokens taken from the prefix cache instead of computed."""
        return self._ask("state")["cached_tokens"]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Every token of the sequence, pending ones last."""
        return tuple(self._ask("tokens"))

    @property
    def text_start(self) -> int:
        """Where the text begins that a generation continues: at the message after a cue, else at the first token."""
        return self._ask("state")["text_start"]

    @property
    def text_before(self) -> tuple[int, ...]:
        """The tokens of the text that a generation continues."""
        return self.tokens[self.text_start :]

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self.engine.page_size

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The chat so far."""
        return tuple(self._ask("messages"))

    # -- writing -----------------------------------------------------------------------------------------------------

    def fill(self, text_or_ids: str | Iterable[int], *, special: bool = False) -> Self:
        """Append text or token ids to the pending buffer; nothing is computed yet."""
        if isinstance(text_or_ids, str):
            self._ask("fill", text=check_text(text_or_ids, "the text"), special=special)
            return self
        ids = token_ids(text_or_ids, self.engine.vocab_size)
        if self._in_flight():  # the server says that it is busy, if it still is
            self._ask("fill", text=ids, special=False)
        else:
            self._tell("fill", text=ids, special=False)
        return self

    def system(self, text: str) -> Self:
        """Append a system message through the model's chat template."""
        return self._say("system", text)

    def user(self, text: str) -> Self:
        """Append a user message."""
        return self._say("user", text)

    def assistant(self, text: str) -> Self:
        """Append an assistant message, closed."""
        return self._say("assistant", text)

    def _say(self, role: str, text: str) -> Self:
        self._ask("say", role=role, text=text)
        return self

    def cue(self) -> Self:
        """Append the generation prompt; twice in a row adds one."""
        self._ask("cue")
        return self

    def seal(self) -> Self:
        """Append what the template puts after an assistant text: the text after the cue becomes a message."""
        self._ask("seal")
        return self

    def set_bid(self, bid: float) -> Self:
        """The priority of this context's passes, from -1000 to 1000; each step of waiting adds 1."""
        self._ask("bid", bid=bid)
        return self

    # -- computing ---------------------------------------------------------------------------------------------------

    def forward(self) -> RemoteForward:
        """A new pass over this context."""
        self._check_open()
        return RemoteForward(self)

    async def flush(self, attention_mask: Mask | Sequence[Sequence[int]] | None = None, adapter: Any = None) -> None:
        """Compute the pending tokens. Raw mask rows apply to the pending tokens, one row each."""
        self._check_open()
        self._settle()
        mask = attention_mask if attention_mask is None or isinstance(attention_mask, Mask) else None
        if attention_mask is not None and mask is None:
            mask = Mask.from_runs(attention_mask)  # type: ignore[arg-type]
        given: dict[str, Any] = {
            "attention_mask": None if mask is None else self._mask_json(mask),
            "adapter": adapter_list(adapter),
        }
        number = self.engine._new_number()
        request, mailbox = self._connection.ask("context.flush", context=self._number, number=number, **given)
        submitted = Submitted(self._connection, number, request, mailbox)
        self._began(submitted)
        await submitted.wait()
        submitted.value()
        submitted.is_taken = True

    def generate(self, sampler: Sampler | None = None, **options: Any) -> RemoteGeneration | RemoteGenerations:
        """Many passes: an async iterator of steps; `await gen.text()` collects. Options are those of `Context`.

        A constraint, drafter or hook of the program's own stays here and costs a round trip for each token.
        """
        self._check_open()
        for name in options:
            if name not in OPTIONS:
                raise unknown_parameter(name)
        self._settle()
        return generate(self, sampler, options)

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
        adapter: Any = None,
    ) -> RemoteChatReply:
        """Append messages and get the reply: an async iterator of parts; `await reply.text()` collects the answer.

        The arguments are those of `Context.chat`. Tools run here, in the thread that awaits the reply.
        """
        self._check_open()
        limits = ChatLimits(max_tokens, max_rounds, tool_timeout, timeout)
        options: dict[str, Any] = {"tools": tools, "tool_choice": tool_choice, "tool_format": tool_format}
        return RemoteChatReply(
            self, messages, sampler, limits, **options, on_error=on_error, stop=stop, adapter=adapter
        )

    def execute(self, work: Any) -> NoReturn:
        """Refused: passes by hand belong to the engine's process."""
        raise Unsupported("execute is for programs in the engine's process; use ctx.forward()")

    def _mask_json(self, mask: Mask, more: int = 0) -> list[Any]:
        """A mask for the pending tokens and `more` after them."""
        if not mask.needs_positions:
            return mask_json(mask)
        state = self._ask("positions")
        known, following = state["positions"], state["next"]
        first = len(known)
        known += range(following - state["pending"], following + more)
        return bound_mask(mask, known, first, len(known) - first)

    def _rule_rows(self, options: Mapping[str, Any]) -> int:
        """How many rows after the pending ones a rule is computed for."""
        most = options.get("max_tokens") or options.get("max_length") or PARAMETERS["max_tokens"].default
        return min(check_integer(most, "max_tokens"), self.engine.config.max_positions) + RULE_MARGIN

    # -- changing ----------------------------------------------------------------------------------------------------

    def fork(self) -> RemoteContext:
        """A second context that shares every committed page and has copies of the rest, pending tokens included."""
        number = self.engine._new_number()
        self._ask("fork", fork=number)
        return RemoteContext(self.engine, number)

    def truncate(self, n: int) -> Self:
        """Drop the last n tokens, pending ones first."""
        (n,) = integers([n], "n")
        self._ask("truncate", n=n)
        return self

    def save(self, name: str, *, durable: bool = False) -> None:
        """Keep this context on the server under a name, pending tokens included; `engine.open(name)` gives forks."""
        self._ask("save", name=check_snapshot_name(name), durable=durable)

    def inner(self) -> RemotePages:
        """The raw page operations."""
        self._check_open()
        return RemotePages(self)

    def release(self) -> None:
        """Release the pages; the context cannot be used after."""
        if not self._released:
            self._released = True
            self._finalizer.detach()
            self._connection.tell_later("context.release", context=self._number)

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

    # -- messages ----------------------------------------------------------------------------------------------------

    def _ask(self, verb: str, **args: Any) -> Any:
        """A verb of this context, and its reply."""
        self._check_open()
        self._settle()
        return self._connection.request(f"context.{verb}", context=self._number, **args)

    def _tell(self, verb: str, **args: Any) -> None:
        self._check_open()
        self._settle()
        self._connection.tell(f"context.{verb}", context=self._number, **args)

    def _settle(self, but: object = None) -> None:
        """Take back what generations run ahead, so that the context is seen as it is between two steps."""
        for generation in list(self._generations):
            if generation is not but:
                generation._settle()

    def _check_idle(self, but: Submitted | None) -> None:
        """Raise unless a pass may be submitted: none is in flight, or the last of them feeds it."""
        self._check_open()
        fed = 0 if but is None else but.number  # its reply may come before those of the passes that fed it
        if (running := self._in_flight()) and running[-1].number > fed:
            raise ContextBusy("this context has a pass in flight; await it before changing or forking the context")

    def _in_flight(self) -> list[Submitted]:
        self._submitted = [each for each in self._submitted if not each.done()]
        return self._submitted

    def _began(self, submitted: Submitted) -> None:
        self._submitted = [*self._in_flight(), submitted]

    def _check_open(self) -> None:
        self.engine._check_open()
        if self._released:
            raise Closed("this context was released; create a new one with engine.context()")


class RemotePages:
    """Pages by hand: reserve, commit, release, roll back, discard, move. Misuse raises and changes nothing."""

    def __init__(self, context: RemoteContext) -> None:
        self._context = context

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self._context.page_size

    @property
    def pages(self) -> tuple[ContextPage, ...]:
        """Its pages in the order of its slots: where each is, its state, and how many contexts hold it."""
        return tuple(ContextPage(*page) for page in self._ask("state")["pages"])

    @property
    def committed_page_count(self) -> int:
        """Full, immutable pages, discarded ones included."""
        return self._ask("state")["committed"]

    @property
    def working_page_count(self) -> int:
        """Pages that are not committed."""
        return self._ask("state")["working"]

    @property
    def working_page_token_count(self) -> int:
        """Tokens in working pages."""
        return self._ask("state")["working_tokens"]

    def reserve_working_pages(self, n: int) -> None:
        """Add n empty working pages, or raise when the pool cannot supply them now."""
        self._ask("reserve", n=check_integer(n, "the number of pages"))

    def commit_working_pages(self, k: int) -> None:
        """Make the first k working pages immutable and shared by forks; each must be full."""
        self._ask("commit", k=check_integer(k, "the number of pages"))

    def release_working_pages(self, n: int) -> None:
        """Free the last n working pages, and drop the tokens in them."""
        self._ask("release", n=check_integer(n, "the number of pages"))

    def truncate_working_page_tokens(self, n: int) -> None:
        """Drop the last n computed tokens, which must lie in working pages."""
        self._ask("truncate", n=check_integer(n, "the number of tokens"))

    def discard_pages(self, start: int, n: int) -> None:
        """Free n full pages from page number `start` on; no later row can attend to them."""
        start, n = check_integer(start, "the first page"), check_integer(n, "the number of pages")
        self._ask("discard", start=start, n=n)

    def keep_slots(self, slots: Iterable[int], start: int | None = None) -> None:
        """Keep these slots of the sequence's tail, compacted, each with its position; the others are freed."""
        chosen = integers(slots, "slots")
        self._ask("keep", slots=chosen, start=None if start is None else check_integer(start, "start"))

    def append_from(self, other: RemoteContext, pages: Iterable[int], shift: int = 0) -> None:
        """Put committed pages of another context after this one's last slot, in the order given."""
        chosen, (moved,) = integers(pages, "pages"), integers([shift], "shift")
        if not isinstance(other, RemoteContext):
            raise WrongType(f"append_from was given {short_repr(other)}; it must be another context")
        if other is self._context:
            raise InvalidInput("append_from was given this context itself; fork it, and give the fork")
        if other.engine is not self._context.engine:
            raise InvalidInput("append_from was given a context of another engine, whose pages are elsewhere")
        other._settle()
        self._ask("append", other=other._number, pages=chosen, shift=moved)

    def _ask(self, verb: str, **args: Any) -> Any:
        context = self._context
        context._check_open()
        context._settle()
        return context._connection.request(f"pages.{verb}", context=context._number, **args)


def _release_later(connection: Connection, number: int) -> None:
    """A context was lost: the server releases it."""
    connection.tell_later("context.release", context=number)
