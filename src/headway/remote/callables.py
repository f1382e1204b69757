"""What a program gives a generation and keeps here: its own constraint, drafter and hooks, called for the server.

The server asks; whoever waits for the generation in the program runs the function, in the program's own thread and
event loop, and sends back what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from headway.base.checks import number_array
from headway.base.errors import Unsupported, WrongType
from headway.base.lazy_numpy import has_numpy
from headway.base.text import short_repr
from headway.remote.codec import BadMessage
from headway.remote.forward import RemoteForward

if TYPE_CHECKING:
    from headway.remote.generation import RemoteGeneration


class Callables:
    """The objects of one connection, by number; those that the server names, copies, have negative ones."""

    def __init__(self, new_number: Callable[[], int]) -> None:
        self._new_number = new_number
        self._objects: dict[int, Any] = {}

    def add(self, thing: Any) -> int:
        number = self._new_number()
        self._objects[number] = thing
        return number

    def get(self, number: int) -> Any:
        return self._objects.get(number)

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._objects.pop(number, None)

    def call(self, message: dict[str, Any], generation: RemoteGeneration | None) -> Any:
        """Do what the server asks; the result may be awaitable."""
        if message["method"] == "passed":
            return generation._passed(message["args"][0]) if generation is not None else None
        thing, method, args = self._objects.get(message["object"]), message["method"], message["args"]
        if thing is None:
            raise Unsupported("the program has let go of what the server asks for")
        match method:
            case "follow":
                _follow(thing, args[0])
                return _state(thing)
            case "copy":
                _follow(thing, args[1])
                self._objects[args[0]] = thing.copy()
                return None
            case "draft":
                return _drafted(thing.draft([int(t) for t in args[0]], args[1]))
            case "accept":
                return thing.accept(tuple(int(t) for t in args[0]))
            case "logits":
                return _logits(thing, args[0], generation)
            case "prepare":
                return _prepared(thing, generation)
        raise BadMessage(f"the server asks for {method!r:.40}, which this client does not know")


def _follow(constraint: Any, since: list[list[Any]]) -> None:
    for verb, value in since:
        getattr(constraint, "accept" if verb == "accept" else "rollback")(value)


def _state(constraint: Any) -> dict[str, Any]:
    """What a constraint says now."""
    mask = constraint.mask()
    return {
        "mask": mask,
        "forced": [int(token) for token in getattr(constraint, "forced", list)()],
        "may_end": bool(getattr(constraint, "may_end", True)),
        "finished": bool(getattr(constraint, "finished", False)),
    }


async def _drafted(drafted: Any) -> list[Any]:
    if isawaitable(drafted):
        drafted = await drafted
    if hasattr(drafted, "tokens"):
        chances = drafted.probabilities
        probabilities = None if chances is None else list(chances)
        parents = None if drafted.parents is None else [int(p) for p in drafted.parents]
        return [[int(t) for t in drafted.tokens], parents, probabilities, int(drafted.kind), float(drafted.chance)]
    return [[int(t) for t in drafted], None, None, 0, 0.7]


async def _logits(hook: Any, logits: Any, generation: RemoteGeneration | None) -> Any:
    changed = hook(logits, generation)
    if isawaitable(changed):
        changed = await changed
    if changed is None or not has_numpy():
        return logits if changed is None else changed
    row = number_array(changed, "the logits that the hook returned")
    return row.astype("<f4" if row.dtype.kind == "f" and row.itemsize <= 4 else "<f8")


async def _prepared(hook: Any, generation: RemoteGeneration | None) -> Any:
    assert generation is not None
    prepared = generation._hooked()
    found = hook(prepared)
    if isawaitable(found):
        await found
    assert isinstance(prepared.forward, RemoteForward)
    return prepared.forward.taken()


def check_callable(hook: Any, name: str) -> None:
    """Raise unless a hook can be called."""
    if not callable(hook):
        raise WrongType(f"{name} is {short_repr(hook)}; it must be a function, async or not")
