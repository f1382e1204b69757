"""What a client keeps for itself, as the engine sees it: own constraints, drafters and hooks, called over the session.

A constraint is asked once for each token, before anybody here needs its mask: `Generation` treats it as slow to follow,
and what it says is there when the step looks. Tokens that it accepts and takes back in between go along with the next
question. Nothing here waits in the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from headway.base.errors import InvalidInput, InvalidToken, Unsupported, WrongType
from headway.base.text import short_repr
from headway.program.generation.draws import Drawing
from headway.program.generation.hooks import RunningBeam
from headway.program.generation.speculation.drafter import Draft
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.values import spec_json

if TYPE_CHECKING:
    from headway.program.context import Context


class Caller(Protocol):
    """The client of one generation: `ask` waits for what it returns, `tell` does not."""

    def ask(self, of: int, method: str, *args: Any) -> Awaitable[Any]: ...

    def tell(self, of: int, method: str, *args: Any) -> None: ...

    def named(self, of: int, proxy: Any) -> Any:
        """`proxy`, which stands for the object of this number: the client drops that when it is gone."""
        ...

    def new_object(self) -> int:
        """A number for one more object of the client."""
        ...

    def lent(self, context: Context) -> AbstractContextManager[int]:
        """A number under which the client may use a context of the server's own, in this block."""
        ...


class ClientConstraint:
    """A constraint of the client's own. Its state after the last token is known once it is settled."""

    is_slow = True  # so that the generation settles it before each step, and looks no further ahead

    def __init__(self, caller: Caller, of: int, vocab: int) -> None:
        self._caller, self.number, self._vocab = caller, of, vocab
        self._since: list[list[Any]] = []  # what it was not told yet
        self._mask: np.ndarray | None = None
        self._forced: list[int] = []
        self._settled = self.may_end = self.finished = False
        self.skips = 0  # tokens that the client's object has accepted already

    @property
    def is_behind(self) -> bool:
        """Whether the client's object was not told of all tokens."""
        return bool(self._since)

    def finish(self) -> None:
        """Tell it what it was not told, without asking."""
        if self._since:
            since, self._since = self._since, []
            self._caller.tell(self.number, "follow", since)

    async def settle_async(self) -> None:
        """Tell it what came, and ask what may come next."""
        if self._settled and not self._since:
            return
        since, self._since = self._since, []
        self._read(await self._caller.ask(self.number, "follow", since))
        self._settled = not self._since

    def _read(self, state: Any) -> None:
        match state:
            case {"mask": mask, "forced": list(forced), "may_end": bool(may_end), "finished": bool(finished)}:
                pass
            case _:
                raise BadMessage(f"{short_repr(state)} is not the state of a constraint; see docs/protocol.md")
        if mask is not None and (not isinstance(mask, np.ndarray) or mask.dtype != np.uint32):
            raise WrongType("the mask of a constraint must be uint32 words over all tokens, or None")
        self._mask, self._forced, self.may_end, self.finished = mask, forced, may_end, finished

    def mask(self) -> np.ndarray | None:
        if self._since or not self._settled:
            raise Unsupported("the mask of a client's constraint is needed before it was asked; leave the option out")
        return self._mask

    def forced(self) -> list[int]:
        return [] if self._since else list(self._forced)

    def accept(self, token: int) -> None:
        if self._settled and not self._since and self._mask is not None and not _allows(self._mask, token):
            raise InvalidToken(f"token {token} is not allowed here by the constraint")
        if self.skips:
            self.skips -= 1
            self._settled = self.finished = False
        else:
            self._note("accept", token)

    def rollback(self, n: int) -> None:
        if n:
            self._note("rollback", n)

    def _note(self, verb: str, value: int) -> None:
        self._since.append([verb, int(value)])
        self._settled = self.finished = False


class CopyableConstraint(ClientConstraint):
    """One whose object on the client has `copy()`."""

    def copy(self) -> CopyableConstraint:
        twin = type(self)(self._caller, self._caller.new_object(), self._vocab)
        self._caller.tell(self.number, "copy", twin.number, self._since)
        self._since = []
        return self._caller.named(twin.number, twin)


def _allows(mask: np.ndarray, token: int) -> bool:
    return token // 32 < mask.size and bool(int(mask[token // 32]) >> (token % 32) & 1)


def _named_kind(name: Any, base: type) -> Any:
    """The class under the name of the client's own, for messages."""
    if not isinstance(name, str) or not name.isidentifier() or len(name) > 80:
        raise BadMessage(f"{short_repr(name)} is not the name of a class")
    return type(name, (base,), {})


def client_constraint(caller: Caller, given: Any, vocab: int) -> ClientConstraint:
    """The constraint of `{"object": number, "copy": whether it can be copied, "name": its class, for messages}`."""
    match given:
        case {"object": int(of), "copy": bool(copies), "name": name}:
            base = CopyableConstraint if copies else ClientConstraint
            return _named_kind(name, base)(caller, of, vocab)
    raise BadMessage(f"{short_repr(given)} is not a constraint; see docs/protocol.md")


class ClientDrafter:
    """A drafter of the client's own, which is told the tokens and asked for drafts."""

    def __init__(self, caller: Caller, of: int, adaptive: bool) -> None:
        self._caller, self._of, self.adaptive = caller, of, adaptive

    async def draft(self, tokens: Sequence[int], limit: int) -> Draft:
        match await self._caller.ask(self._of, "draft", np.array(tokens, np.int32), limit):
            case [drafted, parents, probabilities, int(kind), float() | int() as chance]:
                return Draft(drafted, parents, probabilities, kind, float(chance))
            case other:
                raise BadMessage(f"{short_repr(other)} is not a draft; see docs/protocol.md")

    def accept(self, tokens: Sequence[int]) -> None:
        self._caller.tell(self._of, "accept", np.array(tokens, np.int32))


class CopyableDrafter(ClientDrafter):
    """One whose object on the client has `copy()`."""

    def copy(self) -> CopyableDrafter:
        twin = type(self)(self._caller, self._caller.new_object(), self.adaptive)
        self._caller.tell(self._of, "copy", twin._of, [])
        return self._caller.named(twin._of, twin)


class DrawingDrafter(CopyableDrafter):
    """One of ours that draws as the generation does: a `DraftModel`, whose engine is the client's."""

    def bind(self, context: object, drawing: Drawing, *, rejects: bool) -> None:
        self._caller.tell(self._of, "bind", spec_json(drawing.sampler), rejects)

    def release(self) -> None:
        self._caller.tell(self._of, "release")


def client_drafter(caller: Caller, given: Any) -> ClientDrafter:
    """The drafter of `{"object": number, "copy": …, "name": …, "adaptive": …, "draws": as the generation does}`."""
    match given:
        case {"object": int(of), "copy": bool(copies), "adaptive": bool(adaptive), "draws": bool(draws), "name": name}:
            base = DrawingDrafter if draws else CopyableDrafter if copies else ClientDrafter
            return _named_kind(name, base)(caller, of, adaptive)
    raise BadMessage(f"{short_repr(given)} is not a drafter; see docs/protocol.md")


def logits_hook(caller: Caller, of: int) -> Callable[..., Awaitable[Any]]:
    """The client's hook between a row's logits and its draw."""

    async def hook(logits: np.ndarray, generation: object) -> Any:
        if isinstance(generation, RunningBeam):
            with caller.lent(generation.context) as number:
                changed = await caller.ask(of, "logits", logits, number, list(generation.generated))
        else:
            changed = await caller.ask(of, "logits", logits)
        if changed is not None and not isinstance(changed, np.ndarray):
            raise InvalidInput("the logits that a hook returns must be an array")
        return changed

    return hook
