"""`connect`: an engine that is somewhere else, with the API of one in this process."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn, TypeVar

from headway.base.checks import check_integer, check_number, check_snapshot_name, check_text
from headway.base.closing import Closing
from headway.base.config import settings
from headway.base.errors import Closed, HeadwayError, InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.program.checks.ids import token_ids
from headway.program.figures import EngineInfo, EngineStats
from headway.program.run_in_thread import run_program
from headway.remote.connection.mailbox import Mailbox
from headway.remote.connection.threaded import Connection
from headway.remote.context import RemoteContext
from headway.remote.forward import adapter_list
from headway.remote.generation.callables import Callables

Result = TypeVar("Result")
SEED_LIMIT = 1 << 64


def connect(url: str, *, model: str | None = None, api_key: str | None = None, timeout: float = 30.0) -> RemoteEngine:
    """An engine on a server, with the same API: contexts, passes, masks, probes, samplers, generations, snapshots.

        engine = hw.connect("http://127.0.0.1:8000")
        print(engine.run(program))

    `url` is that of `headway serve`, or `unix:` and its `--session-socket`. `model` is the name of one of its models,
    by default the first; it stays loaded as long as this is connected. `api_key` is a key of the server,
    by default HEADWAY_API_KEY. `timeout` is how many seconds connecting may take. A lost connection is resumed, within
    the server's grace time.
    """
    if not isinstance(url, str):
        raise WrongType(f"the server's address is {short_repr(url)}; it must be text, such as http://127.0.0.1:8000")
    if check_number(timeout, "timeout") <= 0:
        raise InvalidInput(f"timeout is {timeout}; it must be a number of seconds above 0")
    if model is not None:
        check_text(model, "model")
    return RemoteEngine(url, settings().api_key if api_key is None else api_key, timeout, model)


class RemoteEngine(Closing):
    """A model on a server. Made by `hw.connect`; `run` programs, `close` it (or use it in a `with`)."""

    def __init__(self, url: str, api_key: str | None, timeout: float, model: str | None = None) -> None:
        self._url, self._model = url, model
        self._numbers = itertools.count(1)
        self._callables = Callables(self._new_number)
        self._routing = threading.RLock()
        self._inboxes: dict[int, Mailbox] = {}  # of generations
        self._waiters: defaultdict[int, list[Mailbox]] = defaultdict(list)  # who waits for something of a generation
        self._connection = self._connect(api_key, timeout)
        about = self._connection.welcome["engine"]
        self.config: Any = SimpleNamespace(**about["config"])  #: the model's sizes
        self.capabilities: Any = SimpleNamespace(**about["capabilities"])  #: what can be done with the model
        self.info = EngineInfo(**about["info"])  #: name, dtype, device, sizes
        self.page_size: int = about["page_size"]
        self.pages: int = about["pages"]
        self.deterministic: bool = about["deterministic"]
        self.eos_ids: tuple[int, ...] = tuple(about["eos_ids"])
        self._tokenizer = None if about["tokenizer"] is None else RemoteTokenizer(self._connection, about)
        self._closed = False

    def _connect(self, api_key: str | None, timeout: float) -> Connection:
        return Connection(self._url, api_key, timeout, self._route, model=self._model)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self.alive else "lost"
        return f"<RemoteEngine {self.info.name!r} at {self._url}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported("a connection cannot be pickled or copied; give the other process the address")

    # -- programs ----------------------------------------------------------------------------------------------------

    def run(self, program: Callable[..., Awaitable[Result]], *args: Any) -> Result:
        """Run `program(engine, *args)` to its end and return its value; works where an event loop runs already."""
        return run_program(program, self, *args)

    def context(
        self,
        *,
        seed: int | None = None,
        priority: float = 0.0,
        salt: str = "",
        token_budget: int | None = None,
        deadline: float | None = None,
    ) -> RemoteContext:
        """An empty context; the arguments are those of `Engine.context`."""
        self._check_open()
        number = self._new_number()
        if seed is not None:
            seed = check_integer(seed, "seed", high=SEED_LIMIT - 1)
        check_text(salt, "salt")
        plain = priority == 0.0 and token_budget is None and deadline is None
        send = self._connection.tell if plain else self._connection.request
        args: dict[str, Any] = {"seed": seed, "priority": priority, "salt": salt}
        send("context.new", context=number, token_budget=token_budget, deadline=deadline, **args)
        return RemoteContext(self, number)

    def open(self, name: str) -> RemoteContext | None:
        """A fork of the context saved under a name, or None."""
        return self._opened("engine.open", name)

    def take(self, name: str) -> RemoteContext | None:
        """The context saved under a name, which is then no longer saved; or None."""
        return self._opened("engine.take", name)

    def delete(self, name: str) -> bool:
        """Forget the context saved under a name; False when there was none."""
        return self._connection.request("engine.delete", name=check_snapshot_name(name))

    def _opened(self, verb: str, name: str) -> RemoteContext | None:
        number, name = self._new_number(), check_snapshot_name(name)
        return RemoteContext(self, number) if self._connection.request(verb, name=name, context=number) else None

    # -- the model ---------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """V: the width of the logits."""
        return self.config.vocab_size

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model takes text, and not only token ids."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> RemoteTokenizer:
        """The model's tokenizer; raises when it has none."""
        if self._tokenizer is None:
            raise Unsupported(f"the model {self.info.name!r} has no tokenizer; give token ids instead of text")
        return self._tokenizer

    @property
    def adapters(self) -> Mapping[str, float]:
        """The LoRA adapters of the server by name, each with the scale it was loaded with."""
        return MappingProxyType(self._connection.request("engine.adapters"))

    def stats(self) -> EngineStats:
        """Pages now, and steps and tokens so far, of all programs of the engine."""
        return EngineStats(**self._connection.request("engine.stats"))

    # -- ending ------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether passes can be sent: it is not closed, and the connection not given up."""
        return not self._closed and self._connection.lost is None

    def close(self) -> None:
        """End the session: the server releases its contexts."""
        self._closed = True
        self._connection.close()

    def _check_open(self) -> None:
        if self._closed:
            raise Closed("this engine is closed; connect again")
        if (lost := self._connection.lost) is not None:
            raise type(lost)(str(lost))

    def _mix(self, adapter: Any) -> list[Any] | None:
        """The argument `adapter=`, read."""
        return adapter_list(adapter)

    # -- messages ----------------------------------------------------------------------------------------------------

    def _new_number(self) -> int:
        return next(self._numbers)

    async def _ask(self, verb: str, **args: Any) -> Any:
        """Ask, and wait for the reply in this event loop; cancelling it undoes what is not done."""
        number, mailbox = self._connection.ask(verb, **args)
        try:
            return self._connection.value(await mailbox.next())
        except asyncio.CancelledError:
            with suppress(HeadwayError):
                self._connection.tell("session.cancel", request=number)
            raise
        finally:
            self._connection.forget(number)

    def _route(self, message: dict[str, Any]) -> None:
        """In the connection's thread: a step, or something that the server asks of a generation's program."""
        if message.get("method") == "drop":
            self._callables.drop([message["object"]])
            return
        with self._routing:
            self._hand_over(message)

    def _hand_over(self, message: dict[str, Any]) -> None:
        number = message.get("generation", 0)
        waiters = self._waiters.get(number)
        if message["type"] != "step" and waiters:
            waiters[-1].put(message)
        elif (inbox := self._inboxes.get(number)) is not None:
            inbox.put(message)
        elif (call := message.get("id")) is not None:
            self._connection.give(call, error=Closed("the program has let go of this generation"))

    def _begin_waiting(self, number: int, mailbox: Mailbox) -> None:
        """What the server asks for a generation goes to this mailbox first; what it has asked before, too."""
        with self._routing:
            for message in self._inboxes[number].take_calls() if number in self._inboxes else ():
                mailbox.put(message)
            self._waiters[number].append(mailbox)

    def _end_waiting(self, number: int, mailbox: Mailbox) -> None:
        with self._routing:
            self._waiters[number].remove(mailbox)
            for message in mailbox.take_calls():
                self._hand_over(message)

    def _open_inbox(self, number: int) -> Mailbox:
        inbox = self._inboxes[number] = self._connection.mailbox()
        return inbox

    def _close_inbox(self, number: int, objects: list[int]) -> None:
        self._waiters.pop(number, None)
        inbox = self._inboxes.pop(number, None)
        if inbox is not None:
            self._connection.drop_mailbox(inbox)
        self._callables.drop(objects)


class RemoteTokenizer:
    """The model's tokenizer, on the server."""

    def __init__(self, connection: Connection, about: Mapping[str, Any]) -> None:
        self._connection = connection
        self.vocab_size: int = about["tokenizer"]["vocab_size"]
        self.bos_id: int | None = about["tokenizer"]["bos_id"]
        self.add_bos: bool = about["tokenizer"]["add_bos"]
        self.eos_ids: tuple[int, ...] = tuple(about["eos_ids"])
        self._names: list[str | None] | None = None

    def __repr__(self) -> str:
        return f"<RemoteTokenizer: {self.vocab_size} tokens, bos_id={self.bos_id}, eos_ids={self.eos_ids}>"

    def vocabulary(self) -> list[str | None]:
        """The name of every token, by id; None where an id has no token."""
        if self._names is None:
            self._names = list(self._connection.request("engine.vocabulary"))
        return self._names

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """The ids of a text; names of special tokens in it are plain text unless `special`."""
        ids = self._connection.request("engine.encode", text=check_text(text, "the text"), special=special)
        return ids if isinstance(ids, list) else ids.tolist()

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of ids."""
        listed = token_ids(ids, self.vocab_size, "ids")
        return self._connection.request("engine.decode", ids=listed, skip_special=skip_special)

    def token_text(self, id: int) -> str:
        """One token, for people to read."""
        return self._connection.request("engine.token", id=id)[0]

    def token_bytes(self, id: int) -> bytes:
        """The bytes that a token stands for."""
        return bytes(self._connection.request("engine.token", id=id)[1])
