"""How far a generation's steps are ahead of its program, and taking back those that it has not taken.

    taken   steps that the program has          upto   steps that the server may send without being asked again
    epoch   one more whenever steps are taken back: those of an older one are still on their way, and are ignored

The server is at most `WINDOW` steps ahead, few at first. It takes nothing back by itself: it is told.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from headway.base.errors import HeadwayError
from headway.remote.connection.mailbox import Mailbox
from headway.remote.connection.threaded import Connection
from headway.remote.protocol.limits import WINDOW


class Ahead:
    """The steps of one generation that are on their way. Its finalizer needs it too, so it does not know its owner."""

    def __init__(self, connection: Connection, number: int, inbox: Mailbox, *, patient: bool) -> None:
        self._connection, self.number, self.inbox = connection, number, inbox
        self.patient = patient  # functions of the program's own are called, so that nothing can be ahead
        self.taken = self.epoch = self._upto = 0
        self._window = 1

    def pull(self) -> None:
        """Let the server go on, before the program has taken all that is on its way."""
        if self._upto - self.taken <= self._window // 2:
            self._window = 1 if self.patient or self._upto == 0 else min(2 * self._window, WINDOW)
            self._upto = self.taken + self._window
            self._connection.tell("generation.pull", generation=self.number, upto=self._upto, taken=self.taken)

    def take(self, message: dict[str, Any]) -> bool:
        """Whether a step is the program's, and was not taken back meanwhile; raises if it failed."""
        if message["epoch"] not in (self.epoch, None):
            return False
        if "error" in message:
            self._upto, self._window = self.taken, 1
            raise self._connection.error(message["error"])
        self.taken = message["number"]
        return True

    def settle(self) -> None:
        """Have the server take back what the program has not taken."""
        if self._upto > self.taken:
            self.restart()
            with suppress(HeadwayError):  # whoever asks next is told
                self._connection.tell("generation.settle", generation=self.number, taken=self.taken, epoch=self.epoch)

    def restart(self) -> None:
        """Ignore what is on its way; the server is told how much was taken with the new epoch."""
        self.epoch, self._upto, self._window = self.epoch + 1, self.taken, 1
        self.inbox.clear_steps()

    def drop(self) -> None:
        """The program has let go of the generation."""
        self._connection.tell_later("generation.drop", generation=self.number, taken=self.taken)
