"""What a program gives a generation and keeps here: its own constraint, drafter and hooks, called for the server.

The server asks; whoever waits for the generation in the program runs the function, in the program's own thread and
event loop, and sends back what it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

from headway.base.checks import number_array
from headway.base.errors import Unsupported, WrongType
from headway.base.system.lazy_numpy import has_numpy
from headway.base.text import short_repr
from headway.program.generation.speculation.drafter import checked_draft, failed
from headway.remote.forward import RemoteForward
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.values import sampler_of

if TYPE_CHECKING:
    from headway.remote.generation.generator import RemoteGeneration


class Callables:
    """The objects of one connection, by number; those that the server names, copies, have negative ones."""

    def __init__(self, new_number: Callable[[], int]) -> None:
        self._new_number = new_number
        self._objects: dict[int, Any] = {}
        self._unheard: dict[int, Exception] = {}  # what drafters raised when they were told of tokens

    def add(self, thing: Any) -> int:
        number = self._new_number()
        self._objects[number] = thing
        return number

    def get(self, number: int) -> Any:
        return self._objects.get(number)

    def drop(self, numbers: list[int]) -> None:
        for number in numbers:
            self._objects.pop(number, None)
            self._unheard.pop(number, None)

    def call(self, message: dict[str, Any], generation: Any) -> Any:
        """Do what the server asks; the result may be awaitable."""
        if message["method"] == "passed":
            return generation._passed(message["args"][0]) if generation is not None else None
        if message["method"] == "tool":
            return generation._run(*message["args"])
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
            case "draft" if (error := self._unheard.pop(message["object"], None)) is not None:
                raise error
            case "draft":
                return _drafted(thing, args[0], args[1], generation._context.engine.vocab_size)
            case "bind":
                return thing.draw_as(sampler_of(args[0]), generation._context.engine.vocab_size, rejects=args[1])
            case "release":
                return thing.release()
            case "accept":
                return self._tell(thing, message["object"], args[0])
            case "logits":
                return _logits(thing, args[0], generation, args[1:])
            case "prepare":
                return _prepared(thing, generation)
        raise BadMessage(f"the server asks for {method!r:.40}, which this client does not know")

    def _tell(self, drafter: Any, number: int, tokens: Any) -> None:
        """Hand tokens to a drafter; what it raises, its next draft raises."""
        try:
            drafter.accept(tuple(int(t) for t in tokens))
        except Exception as error:
            self._unheard[number] = failed(drafter, error)


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


async def _drafted(drafter: Any, tokens: Any, limit: int, vocab: int) -> list[Any]:
    """What a drafter proposes, checked as in process."""
    try:
        drafted = drafter.draft([int(t) for t in tokens], limit)
        if isawaitable(drafted):
            drafted = await drafted
    except Exception as error:
        raise failed(drafter, error) from error
    draft = checked_draft(drafter, drafted, limit, vocab)
    chances = None if draft.probabilities is None else list(draft.probabilities)
    parents = None if draft.parents is None else list(draft.parents)
    return [list(draft.tokens), parents, chances, int(draft.kind), float(draft.chance)]


async def _logits(hook: Any, logits: Any, generation: RemoteGeneration, beam: list[Any]) -> Any:
    """What a hook makes of logits; `beam` has the context and the tokens of the beam they come after, if any."""
    with generation._beam(*beam) if beam else nullcontext(generation) as running:
        changed = hook(logits, running)
        if isawaitable(changed):
            changed = await changed
    if changed is None or not has_numpy():
        return logits if changed is None else changed
    row = number_array(changed, "the logits that the hook returned")
    return row.astype("<f4" if row.dtype.kind == "f" and row.itemsize <= 4 else "<f8")


async def _prepared(hook: Any, generation: RemoteGeneration | None) -> Any:
    assert generation is not None
    prepared = generation._hooked()
    result = hook(prepared)
    if isawaitable(result):
        await result
    assert isinstance(prepared.forward, RemoteForward)
    return prepared.forward._taken()


def check_callable(hook: Any, name: str) -> None:
    """Raise unless a hook can be called."""
    if not callable(hook):
        raise WrongType(f"{name} is {short_repr(hook)}; it must be a function, async or not")
