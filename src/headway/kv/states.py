"""Recurrent state beside pages: which places of the state pool hold the state of which sequence, after how many slots.

        slots        0        16        32        48    53
        pages        [        ][        ][        ][ …  ]
        checkpoints  0                  32              53        at pass ends, and every few pages
                     └─ zeros, place 0

A checkpoint is the state of all recurrent layers after the first slots of a sequence. Once written it never changes, so
forks share it; a pass reads one and writes others. State is a function of the log, so any checkpoint that nobody is
using may go: what needs it computes it again from the nearest earlier one, in the end from place 0, which stays zero.
Pure bookkeeping; the engine's lock guards it.

        free ──take──▶ pinned by a job ──unpin──▶ idle ──evicted, least recently used first──▶ free
                            ▲                      │
                            └──────────pin─────────┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from headway.base.dataclass import dataclass

GONE = -1  # the place of a checkpoint that was evicted
STATE_WIDTH = 4  # bytes of a number: recurrent state is float32
LEAST_PLACES = 8  # of a state pool
WITHOUT_PAGES = 32  # pages between checkpoints of a model without attention, whose pages take no memory
RECENT = 4  # checkpoints that a sequence keeps besides those every few pages: its end, and where it may be cut


@dataclass(eq=False, slots=True)
class StateCheckpoint:
    """The recurrent state after the first `length` slots of a sequence."""

    length: int
    place: int  # in the state pool
    tables: int = 0  # that refer to it
    pins: int = 0  # jobs that read or write it
    key: bytes | None = None  # of the page that ends here: the prefix cache finds it by that

    @property
    def is_there(self) -> bool:
        return self.place != GONE


START = StateCheckpoint(0, 0)  # of every sequence: nothing has been seen


def pages_between(state: int, page: int) -> int:
    """The pages between two checkpoints, so that these take no more memory than the pages; both in bytes."""
    return -(-state // page) if page else WITHOUT_PAGES


class States:
    """Places 1 … total of the state pool, and the checkpoints in them; see the file's picture."""

    def __init__(self, total: int, every: int) -> None:
        assert total >= 2, "a pass reads one place and writes another"
        self.total = total
        self.every = every  # pages between two checkpoints that a sequence keeps
        self._free = list(range(total, 0, -1))
        self._idle: OrderedDict[StateCheckpoint, None] = OrderedDict()  # least recently used first
        self._by_key: dict[bytes, StateCheckpoint] = {}
        self._pinned: set[StateCheckpoint] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def available(self) -> int:
        """Places that can be taken now."""
        return len(self._free) + len(self._idle)

    def take(self, length: int) -> StateCheckpoint | None:
        """A checkpoint to write, pinned; None when jobs have pinned all others."""
        if not self._free and self._idle:
            self._evict(next(iter(self._idle)))
        if not self._free:
            return None
        checkpoint = StateCheckpoint(length, self._free.pop(), pins=1)
        self._pinned.add(checkpoint)
        return checkpoint

    def pin(self, checkpoint: StateCheckpoint) -> None:
        """Keep a checkpoint until `unpin`."""
        assert checkpoint.is_there
        if checkpoint is not START:
            self._idle.pop(checkpoint, None)
            self._pinned.add(checkpoint)
            checkpoint.pins += 1

    def unpin(self, checkpoint: StateCheckpoint) -> None:
        """A job is done with a checkpoint; it stays while a sequence or the prefix cache refers to it."""
        if checkpoint is not START and checkpoint.is_there:
            assert checkpoint.pins > 0
            checkpoint.pins -= 1
            self._settle(checkpoint)

    def hold(self, checkpoint: StateCheckpoint) -> None:
        """One more sequence refers to it."""
        if checkpoint is not START:
            checkpoint.tables += 1

    def let_go(self, checkpoints: Iterable[StateCheckpoint]) -> None:
        """One sequence less refers to each."""
        for checkpoint in checkpoints:
            if checkpoint is not START:
                assert checkpoint.tables > 0
                checkpoint.tables -= 1
                self._settle(checkpoint)

    def _settle(self, checkpoint: StateCheckpoint) -> None:
        if checkpoint.pins or not checkpoint.is_there:
            return
        self._pinned.discard(checkpoint)
        if checkpoint.tables or checkpoint.key is not None:
            self._idle.setdefault(checkpoint, None)
        else:
            self._evict(checkpoint)

    def _evict(self, checkpoint: StateCheckpoint) -> None:
        self.forget(checkpoint)
        self._idle.pop(checkpoint, None)
        self._free.append(checkpoint.place)
        checkpoint.place = GONE

    # -- the prefix cache ------------------------------------------------------------------------------------------

    def register(self, checkpoint: StateCheckpoint, key: bytes) -> None:
        """It is the state after the page of this key. The first one of a key stays."""
        if checkpoint.is_there and checkpoint.key is None and checkpoint is not START:
            known = self._by_key.setdefault(key, checkpoint)
            if known is checkpoint:
                checkpoint.key = key

    def find(self, key: bytes) -> StateCheckpoint | None:
        """The state after the page of this key, if it is kept."""
        return self._by_key.get(key)

    def forget(self, checkpoint: StateCheckpoint) -> None:
        """Take its key away."""
        if checkpoint.key is not None:
            del self._by_key[checkpoint.key]
            checkpoint.key = None

    def forget_keys(self) -> None:
        """The prefix cache was emptied."""
        for checkpoint in list(self._by_key.values()):
            self.forget(checkpoint)
            self._settle(checkpoint)

    def forget_all(self) -> None:
        """The contents of the pool are gone, or no longer what they were. No job has pinned any."""
        assert not self._pinned
        for checkpoint in list(self._idle):
            self._evict(checkpoint)

    def check(self, tables: Iterable[Iterable[StateCheckpoint]]) -> None:
        """Assert that every place is free, idle or pinned, and that every count equals what the tables refer to."""
        known: dict[StateCheckpoint, int] = dict.fromkeys([*self._idle, *self._pinned], 0)
        for checkpoints in tables:
            for checkpoint in checkpoints:
                if checkpoint.is_there and checkpoint is not START:
                    known[checkpoint] += 1
        assert all(checkpoint.tables == count for checkpoint, count in known.items()), "references differ"
        assert all((c.pins > 0) == (c in self._pinned) for c in known), "pins differ"
        places = sorted([*self._free, *(c.place for c in known)])
        assert places == list(range(1, self.total + 1)), "a place is lost, or has two checkpoints"
        assert all(self._by_key[c.key] is c for c in known if c.key is not None), "keys differ"
        assert len(self._by_key) == sum(c.key is not None for c in known), "keys differ"


class TableStates:
    """The checkpoints of one sequence, by ascending length."""

    def __init__(self, states: States, page_size: int) -> None:
        self.states = states
        self._size = page_size
        self._own: list[StateCheckpoint] = []

    def __iter__(self):
        return iter(self._own)

    def nearest(self, length: int) -> StateCheckpoint:
        """The last checkpoint after at most this many slots."""
        self._tidy()
        for checkpoint in reversed(self._own):
            if checkpoint.length <= length:
                return checkpoint
        return START

    def at(self, length: int) -> StateCheckpoint | None:
        """The checkpoint after exactly this many slots, if there is one."""
        checkpoint = self.nearest(length)
        return checkpoint if checkpoint.length == length else None

    def add(self, checkpoint: StateCheckpoint) -> None:
        """Refer to a checkpoint; one of the same length stays."""
        if checkpoint is START or not checkpoint.is_there or self.at(checkpoint.length) is not None:
            return
        self.states.hold(checkpoint)
        self._own.append(checkpoint)
        self._own.sort(key=lambda c: c.length)

    def cut(self, length: int) -> None:
        """The sequence has this many slots: forget what comes after them."""
        gone = [c for c in self._own if c.length > length]
        if gone:
            self._own = [c for c in self._own if c.length <= length]
            self.states.let_go(gone)

    def thin(self, *, but: int = -1) -> None:
        """Keep the last few, and those every few pages; `but` is a length that need not stay."""
        step = self.states.every * self._size
        extra = [c for c in self._own if c.length % step]
        gone = extra[:-RECENT] + [c for c in extra[-RECENT:] if c.length == but]
        if gone:
            self._own = [c for c in self._own if c not in gone]
            self.states.let_go(gone)

    def share(self) -> TableStates:
        """The same for a fork."""
        twin = TableStates(self.states, self._size)
        self._tidy()
        for checkpoint in self._own:
            twin.add(checkpoint)
        return twin

    def _tidy(self) -> None:
        if any(not c.is_there for c in self._own):
            self._own = [c for c in self._own if c.is_there]
