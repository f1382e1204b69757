"""A state machine of models that share memory: leases, loads that fail, engines that die, time that passes."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import headway as hw
from headway.base.errors import ModelError
from headway.server.errors import ApiError
from headway.server.keys import ANYONE
from headway.server.models import ModelLease, ModelSource, ModelSources
from headway.server.models.sources import ModelSizes
from headway.server.serving import Serving
from headway.server.settings import ServerSettings
from headway.testing import random_model

NAMES = ("kept", "a", "b", "c")
BUDGET = 280  # two models of 135
MODELS = st.sampled_from(NAMES)
DECODER: list[Any] = []  # made once


class ModelStates(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        DECODER or DECODER.append(random_model())
        self.failing: set[str] = set()
        self.held: list[ModelLease] = []
        self.waiting: list[asyncio.Task[ModelLease]] = []
        self.killed: set[int] = set()
        self.loop = asyncio.new_event_loop()
        sources = tuple(self.source(name) for name in NAMES)
        self.serving = Serving(ServerSettings(max_queue_requests=64), ModelSources(sources, budget=BUDGET))
        self.models = self.serving.models
        self.loop.run_until_complete(self.serving.start())

    def source(self, name: str) -> ModelSource:
        def open(memory: int | None, progress: Any) -> hw.Engine:
            assert memory == 135
            if name in self.failing:
                raise ModelError("it is broken")
            return hw.Engine(DECODER[0], pages=4, threads=1)

        return ModelSource((name,), open, lambda: ModelSizes(100, 1, 1, 1, "x"), is_kept=name == "kept")

    def settle(self) -> None:
        """Let everything happen that can without anybody letting go."""

        async def until_quiet() -> None:
            end = time.monotonic() + 60
            while time.monotonic() < end:
                await asyncio.sleep(0.002)
                busy = any(m.state == "loading" and m.bytes for m in self.models.all())
                closing = any(m.state == "draining" and m.loaded is None for m in self.models.all())
                blocked = any(m.state == "draining" and m.loaded is not None for m in self.models.all())
                pending = any(m.state == "loading" for m in self.models.all())
                if not busy and not closing and (blocked or not pending):
                    return
            raise AssertionError("it never became quiet")

        self.loop.run_until_complete(until_quiet())
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if (error := task.exception()) is None:
                self.held.append(task.result())
            else:
                assert isinstance(error, ApiError)
                assert error.status == 503

    @rule(name=MODELS, is_session=st.booleans())
    def use(self, name: str, is_session: bool) -> None:
        async def begin() -> None:
            self.waiting.append(asyncio.ensure_future(self.models.lease(name, ANYONE, is_session=is_session)))

        self.loop.run_until_complete(begin())
        self.settle()

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0, 100))
    def let_go(self, which: int) -> None:
        lease = self.held.pop(which % len(self.held))
        self.loop.run_until_complete(self.in_loop(lease.release))
        self.loop.run_until_complete(self.in_loop(lease.release))  # twice is once
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        """Somebody does not wait any more."""
        task = self.waiting.pop(which % len(self.waiting))
        task.cancel()
        self.settle()

    @rule(name=MODELS)
    def break_or_repair(self, name: str) -> None:
        self.failing ^= {name}
        for model in self.models.all():
            model.retry_at = 0.0

    @rule(name=MODELS)
    def kill(self, name: str) -> None:
        model = next(one for one in self.models.all() if one.name == name)
        if model.engine is not None:
            self.killed.add(id(model.engine))
            model.engine.close()
            self.loop.run_until_complete(self.in_loop(lambda: self.models.tend(time.monotonic())))
            self.settle()

    @rule()
    def time_passes(self) -> None:
        self.loop.run_until_complete(self.in_loop(lambda: self.models.tend(time.monotonic() + 1000)))
        self.settle()
        used = {lease.model.name for lease in self.held}
        for model in self.models.all():
            assert model.state != "ready" or model.is_kept or model.name in used

    async def in_loop(self, work: Any) -> None:
        work()
        await asyncio.sleep(0)

    @invariant()
    def memory_is_within_its_budget(self) -> None:
        assert sum(model.bytes for model in self.models.all()) <= BUDGET

    @invariant()
    def nobody_loses_an_engine_that_lives(self) -> None:
        for lease in self.held:
            assert lease.engine.alive or id(lease.engine) in self.killed

    @invariant()
    def counts_are_those_of_the_holders(self) -> None:
        for model in self.models.all():
            if model.loaded is not None:
                holders = [lease for lease in self.held if lease._loaded is model.loaded]
                assert model.loaded.users == len(holders)

    def teardown(self) -> None:
        async def end() -> None:
            for task in self.waiting:
                task.cancel()
            for lease in self.held:
                lease.release()
            await asyncio.gather(*self.waiting, return_exceptions=True)
            await self.serving.close()
            assert all(model.loaded is None for model in self.models.all())

        self.loop.run_until_complete(asyncio.wait_for(end(), 60))
        self.loop.close()


def test_models_share_memory_and_nobody_loses_one() -> None:
    few = settings(max_examples=6, stateful_step_count=12, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(ModelStates, settings=few)


@pytest.mark.slow
def test_models_share_memory_at_length() -> None:
    many = settings(max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(ModelStates, settings=many)
