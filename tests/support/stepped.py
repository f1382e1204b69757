"""An engine on a scripted device, its loop and its programs stepped together; and what its pages must always be."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import headway as hw
from headway.kv.table import PageTable
from headway.runtime.job import Delivery
from headway.runtime.outcome import wake_all
from headway.testing import _hash, _sum, stepping
from support.overlapping import DecodingRunner
from support.scripted import check_pages, known_jobs


@dataclass(eq=False)
class Both:
    """An engine's loop and an event loop, stepped together in one thread."""

    engine: hw.Engine
    ahead: bool = True
    boxes: list[list[Delivery]] = field(default_factory=list)

    def __enter__(self) -> Both:
        self.events = asyncio.new_event_loop()
        loop = self.engine._loop
        self._by_hand = stepping(self.engine, ahead=self.ahead)
        self._step, self._notifier = self._by_hand.__enter__(), loop._notifier
        loop._notifier = self  # type: ignore[assignment]  # whom a second thread would wake, at a time of its own
        return self

    def __exit__(self, *_: object) -> None:
        self.engine._loop._notifier = self._notifier
        self._by_hand.__exit__(None, None, None)
        self.engine.close()
        self.pump()
        self.events.close()

    def put(self, box: list[Delivery]) -> None:
        self.boxes.append(box)

    def step(self) -> None:
        self._step()
        self.pump()

    def pump(self) -> None:
        """Programs go on as far as they can."""
        for box in self.boxes:
            wake_all([job for job, _ in box])
        self.boxes.clear()
        self.events.run_until_complete(_turns_of_the_loop())

    def start(self, work: Awaitable[Any]) -> asyncio.Future[Any]:
        async def program() -> Any:
            return await work

        task = self.events.create_task(program())
        self.pump()
        return task

    def run(self, work: Awaitable[Any], limit: int = 2000) -> Any:
        """Step until this is done."""
        task = self.start(work)
        for _ in range(limit):
            if not task.done():
                self.step()
        assert task.done(), f"not done after {limit} steps"
        return task.result()


async def _turns_of_the_loop() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


def check_engine(engine: hw.Engine) -> None:
    """Pages are held by whom they should, and hold what they should; the device was asked for nothing odd."""
    runner = engine._loop._runner
    assert isinstance(runner, DecodingRunner)
    with engine._lock:
        check_pages(engine)
        assert not runner.faults, runner.faults
        assert engine._loop.kv_cache.computing.keys() <= {key for job in known_jobs(engine) for key in job.keys}


def check_contents(engine: hw.Engine) -> None:
    """Every slot of every table stands in its page as its log says."""
    loop, runner = engine._loop, engine._loop._runner
    assert isinstance(runner, DecodingRunner)
    with engine._lock:
        if runner.broken == 0 and (edits := engine._allocator.take_edits()):
            runner.edit(edits)
        runner.catch_up()
        for table in [t for t in loop.kv_cache.tables if not t.closed and t.lost is None]:
            assert table.length <= len(table.pages) * table.page_size
            if not table.is_preempted and not table.has_discards and runner.broken == 0:
                _check_table(runner, table)


def _check_table(runner: DecodingRunner, table: PageTable) -> None:
    attend = np.tril(np.ones((table.length, table.length), bool))
    for i, mask in enumerate(table.masks):
        if mask is not None:
            attend[i, : i + 1] = mask.to_bool()
    slots = np.arange(table.length)
    first = np.array([_hash(t * 3 + 1, p) for t, p in zip(table.tokens, table.positions, strict=True)], np.uint64)
    second = np.array([_hash(int(a), _sum(first, slots, m)) for a, m in zip(first, attend, strict=True)], np.uint64)
    for part, expected in ((0, first), (1, second)):
        found = runner._all(part, [p or 0 for p in table.pages])[: table.length] if table.pages else expected
        assert found.tolist() == expected.tolist(), f"slots of a table differ from its log: {found != expected}"
