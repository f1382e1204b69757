"""All models of a server. It alone opens and closes engines, and keeps them within the memory that they share.

Used on the event loop, except for what opens and closes an engine, which runs in a thread: the tokens of one model go
on while another loads. At most `max_loads` load at a time; whoever waits for memory waits in the order they came.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headway.base.errors import HeadwayError, ModelError, OutOfMemory, OutOfPages
from headway.base.text import format_bytes, short_repr
from headway.server import logs
from headway.server.adapters import ServedAdapter
from headway.server.errors import ApiError, bad_request
from headway.server.keys import Tenant
from headway.server.models.engines import close_engine, discard, facts, opened
from headway.server.models.lease import ModelLease
from headway.server.models.memory import allowance, room_for
from headway.server.models.served_model import LoadedEngine, ServedModel, Waiter
from headway.server.models.sources import ModelSources

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.server.serving import Serving

FIRST_RETRY, LAST_RETRY = 5.0, 300.0  # seconds until a model that could not be loaded is tried again
SHOWN_NAMES = 20  # of an error about a name


class ServedModels:
    """The models of one server by name."""

    def __init__(self, serving: Serving, sources: ModelSources) -> None:
        self._serving, self._settings, self._sources = serving, serving.settings, sources
        self._named = {source.name: ServedModel(source, serving.settings) for source in sources.named}
        self._listed: dict[str, ServedModel] = {}
        self._by_name = {
            name: one for one in self._named.values() for name in (*one.source.names, *one.source.accepted)
        }
        self._changed = asyncio.Event()  # set, and replaced, whenever memory becomes free
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing = False
        self.on_unload: Callable[[Engine], None] = lambda engine: None  # before an engine is closed
        self.loads = self.unloads = self.failed_loads = 0

    # -- names -----------------------------------------------------------------------------------------------------

    @property
    def is_single(self) -> bool:
        return self._sources.is_single

    @property
    def budget(self) -> int | None:
        return self._sources.budget

    @property
    def default(self) -> ServedModel | None:
        """The model of requests that name none: the first that was named, or the only one."""
        first = next(iter(self._named.values()), None)
        return first or (next(iter(self._listed.values())) if len(self._listed) == 1 else None)

    def all(self) -> tuple[ServedModel, ...]:
        """Every model, as last listed."""
        return (*self._named.values(), *self._listed.values())

    def names(self) -> tuple[str, ...]:
        """The names that clients see: of models, and of their adapters."""
        return tuple(name for one in self.all() for name in (*one.source.names, *one.adapters.known))

    def is_taken(self, name: str) -> bool:
        """Whether a model has this name, which no adapter may have then."""
        return name in self._by_name or name in self._listed

    def adapter_owner(self, name: str) -> ServedModel | None:
        """The model that has an adapter of this name."""
        return next((one for one in self.all() if name in one.adapters.known), None)

    async def refresh(self) -> None:
        """List the folder of models again, and read the headers of new ones."""
        folder = self._sources.folder

        def read() -> Mapping[str, Any]:
            listed = {} if folder is None else folder.sources()
            for source in (*self._sources.named, *listed.values()):
                _ = source.sizes
            return listed

        listed = await self._serving.readers.run(read)
        for name, source in listed.items():
            known = self._listed.get(name)
            if name not in self._by_name and (
                known is None or (known.source is not source and known.state == "absent")
            ):
                self._listed[name] = ServedModel(source, self._settings)
        gone = [name for name, one in self._listed.items() if name not in listed and one.state == "absent"]
        for name in gone:
            del self._listed[name]

    async def find(self, name: str | None) -> tuple[ServedModel, str | None]:
        """The model that a client names, and the adapter if the name is one's. Raises a 404, or a 400 without a name
        where there is no default."""
        if name is not None and (model := self._lookup(name)) is not None:
            return model
        if not self.is_single:
            await self.refresh()
        if name is None and self.default is not None:
            return self.default, None
        if name is not None and (model := self._lookup(name)) is not None:
            return model
        names = self.names()
        listed = ", ".join(map(repr, names[:SHOWN_NAMES])) + (" and others" if len(names) > SHOWN_NAMES else "")
        if name is None:
            raise bad_request(
                f"the field 'model' is required: this server has {listed or 'none'}", "model", "missing_field"
            )
        raise ApiError(
            404,
            f"model {short_repr(name)} does not exist; this server has {listed or 'none'}",
            param="model",
            code="model_not_found",
        )

    async def has(self, name: str) -> bool:
        """Whether this server has a model or an adapter of this name."""
        if self._lookup(name) is None and not self.is_single:
            await self.refresh()
        return self._lookup(name) is not None

    def _lookup(self, name: str) -> tuple[ServedModel, str | None] | None:
        if (owner := self.adapter_owner(name)) is not None:
            return owner, name
        model = self._by_name.get(name) or self._listed.get(name)
        return None if model is None else (model, None)

    # -- leases ----------------------------------------------------------------------------------------------------

    async def lease(self, name: str | None, tenant: Tenant, *, is_session: bool = False) -> ModelLease:
        """A hold on the model with this name, which is loaded first if it has to be. Raises an `ApiError`."""
        model, adapter = await self.find(name)
        if model.shown_state == "failed" and not self.is_single:
            await self.refresh()  # its files may have been repaired
            model, adapter = await self.find(name)
        if self.is_single:
            loaded = self._the_only(model, is_session=is_session)
        else:
            loaded = self._ready(model, is_session=is_session) or await self._waited(model, tenant, is_session)
        lease = ModelLease(self, model, loaded, None, is_session=is_session)
        try:
            lease.adapter = None if adapter is None else self._adapter(model, adapter)
        except BaseException:
            lease.release()
            raise
        return lease

    def _adapter(self, model: ServedModel, name: str) -> ServedAdapter:
        if (adapter := model.adapters.names.get(name)) is None:  # unloaded while the model was
            raise ApiError(
                404, f"model {short_repr(name)} does not exist any more", param="model", code="model_not_found"
            )
        return adapter

    def _the_only(self, model: ServedModel, *, is_session: bool) -> LoadedEngine:
        """The engine of a server with one model: it is there, or the server says why not."""
        state = self._serving.state
        if model.loaded is None or state in ("loading", "dead", "failed"):
            raise self._serving.unavailable(state)
        self.hold(model.loaded, is_session=is_session)
        return model.loaded

    def _ready(self, model: ServedModel, *, is_session: bool) -> LoadedEngine | None:
        if model.state != "ready" or model.loaded is None or not model.loaded.engine.alive:
            return None
        model.used_at = time.monotonic()
        self.hold(model.loaded, is_session=is_session)
        return model.loaded

    async def _waited(self, model: ServedModel, tenant: Tenant, is_session: bool) -> LoadedEngine:
        """The engine once it is loaded; a request that waits has a place in the queue."""
        self._check_retry(model)
        with self._serving.queue_slot(tenant):
            waiter = Waiter(asyncio.get_running_loop().create_future(), is_session)
            model.waiters.append(waiter)
            try:
                self.load(model)
                if self._settings.on_load == "refuse":
                    raise self._not_yet(model)
                async with asyncio.timeout(self._settings.load_timeout):
                    return await waiter.future
            except TimeoutError:
                self._give_up(model, waiter)
                raise self._not_yet(model) from None
            except BaseException:
                self._give_up(model, waiter)
                raise

    def _give_up(self, model: ServedModel, waiter: Waiter) -> None:
        """Somebody does not wait any more; what they were given meanwhile goes back."""
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        future = waiter.future
        if future.done() and not future.cancelled() and future.exception() is None:
            self.let_go(model, future.result(), is_session=waiter.is_session)

    def _not_yet(self, model: ServedModel) -> ApiError:
        done = "" if model.progress is None else f": {model.progress[0]} of {model.progress[1]} layers"
        wait = model.wait_seconds
        return ApiError(
            503,
            f"the model {model.name!r} is loading{done}; try again in {wait} s",
            param="model",
            code="loading",
            headers={"Retry-After": str(wait)},
        )

    def _check_retry(self, model: ServedModel) -> None:
        """Raise while a model that could not be loaded is not to be tried again."""
        wait = model.retry_at - time.monotonic()
        if model.failure is not None and wait > 0 and model.state == "absent":
            raise self._failed(model, max(1, round(wait)))

    def _failed(self, model: ServedModel, wait: int) -> ApiError:
        assert model.failure is not None
        text = f"the model {model.name!r} could not be loaded: {_told(model)}; it is tried again in {wait} s"
        after = {"Retry-After": str(wait)}
        if isinstance(model.failure, OutOfMemory | OutOfPages):
            return ApiError(503, text, param="model", code="out_of_memory", headers=after)
        return ApiError(503, text, param="model", code="load_failed", headers=after)

    def hold(self, loaded: LoadedEngine, *, is_session: bool) -> None:
        """Count somebody who uses an engine."""
        if is_session:
            loaded.sessions += 1
        else:
            loaded.requests += 1

    def let_go(self, model: ServedModel, loaded: LoadedEngine, *, is_session: bool) -> None:
        """Count somebody out; the last one of a draining model closes it."""
        if is_session:
            loaded.sessions -= 1
        else:
            loaded.requests -= 1
        assert min(loaded.requests, loaded.sessions) >= 0
        model.used_at = time.monotonic()
        if model.loaded is loaded and model.state == "draining" and not loaded.users:
            self._close(model)

    async def peek(self, name: str | None) -> tuple[ServedModel, LoadedEngine]:
        """A model that is loaded, without a hold on it; raises a 503 for one that is not, which is not loaded now."""
        model, _ = await self.find(name)
        if model.loaded is None or not model.loaded.engine.alive:
            state = self._serving.state if self.is_single else "loading" if model.state == "loading" else "absent"
            raise self._serving.unavailable(state)
        return model, model.loaded

    # -- loading ---------------------------------------------------------------------------------------------------

    async def load_kept(self) -> None:
        """Load the models that are kept, one after the other. Raises if the only model cannot be loaded; with several,
        one that cannot is tried again when it is asked for."""
        await self.refresh()
        if self.budget is not None:
            _check_kept(self.all(), self.budget, self._sources.pages)
        for model in self.all():
            if model.is_kept:
                self.load(model)
                while model.state == "loading":
                    await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)
                if self.is_single and model.failure is not None:
                    raise model.failure

    @cached_property
    def _loads(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(self._settings.max_loads)

    @cached_property
    def _room(self) -> asyncio.Lock:
        return asyncio.Lock()

    def load(self, model: ServedModel) -> None:
        """Begin to load a model, unless it loads already; one that is draining is loaded after that."""
        if model.state == "absent" and not self._closing:
            model.state, model.progress, model.loading_since = "loading", None, time.monotonic()
            self._start(self._load(model))

    async def _load(self, model: ServedModel) -> None:
        try:
            async with self._loads:
                needed = await self._reserve(model)
                model.loading_since = time.monotonic()
                logs.info("loading", model=model.name, **({} if needed is None else {"memory": format_bytes(needed)}))
                share = self._share(model, needed)
                loaded = await self._serving.loaders.run(lambda: opened(model, share), discard)
        except asyncio.CancelledError:
            self._set_absent(model)
            raise
        except BaseException as error:
            self._load_failed(model, error)
        else:
            self._set_ready(model, loaded)

    async def _reserve(self, model: ServedModel) -> int | None:
        """Have memory for a model: others leave, or are waited for."""
        budget = self._sources.budget
        if budget is None:
            return None
        sizes = await self._serving.readers.run(lambda: model.source.sizes)
        needed = model.measured or allowance(sizes, budget, self._sources.pages)
        async with self._room:
            while True:
                room = room_for(needed or 0, self.all(), budget)
                if room.fits:
                    model.bytes = needed or 0
                    return needed
                for other in room.leaving:
                    self._drain(other)
                await self._changed.wait()

    def _share(self, model: ServedModel, needed: int | None) -> int | None:
        """The bytes that an engine may take: with pages of a given number all that other models leave, as it alone
        knows what its weights and pages take; it refuses what does not fit."""
        budget = self._sources.budget
        if budget is None or self._sources.pages is None:
            return needed
        return budget - sum(other.bytes for other in self.all() if other is not model)

    def _drain(self, model: ServedModel) -> None:
        """Take no more users; the last one closes it."""
        assert model.loaded is not None
        model.state = "draining"
        if not model.loaded.users:
            self._close(model)

    def _set_ready(self, model: ServedModel, loaded: LoadedEngine) -> None:
        """An engine is there: those who wait for it have it from now on."""
        info, budget = loaded.engine.info, self._sources.budget
        model.loaded, model.state, model.loaded_at = loaded, "ready", int(time.time())
        model.failure, model.failures, model.progress = None, 0, None
        model.used_at, model.load_seconds = time.monotonic(), time.monotonic() - model.loading_since
        self.loads += 1
        logs.info("ready", model=model.name, **facts(loaded.engine), seconds=round(model.load_seconds, 2))
        if budget is not None and (not model.bytes or self._sources.pages is not None):  # it was an estimate, if that
            model.bytes = model.measured = info.weight_bytes + info.kv_bytes
            if sum(one.bytes for one in self.all()) > budget:
                return self._load_failed(model, _too_large(model.bytes, budget))
            return self._give(model, loaded)
        self._give(model, loaded)

    def _give(self, model: ServedModel, loaded: LoadedEngine) -> None:
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.future.done():
                self.hold(loaded, is_session=waiter.is_session)
                waiter.future.set_result(loaded)

    def _load_failed(self, model: ServedModel, error: BaseException) -> None:
        """A model could not be loaded: those who wait are told, and it is tried again later."""
        self.failed_loads += 1
        model.failures += 1
        in_use = isinstance(error, OutOfMemory) and model.state == "loading" and not model.bytes
        wait = 1.0 if in_use else min(LAST_RETRY, FIRST_RETRY * 2 ** (model.failures - 1))
        model.failure, model.retry_at = error, time.monotonic() + wait
        if self.is_single:
            pass  # the server ends with this error
        elif isinstance(error, HeadwayError):
            logs.warn("a model could not be loaded", model=model.name, error=str(error), retry_seconds=wait)
        else:
            logs.failure("a model could not be loaded", error, with_text=True, model=model.name)
        failure = self._failed(model, round(wait))
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if not waiter.future.done():
                waiter.future.set_exception(failure)
        if model.loaded is None:
            self._set_absent(model)
        else:
            self._close(model)

    # -- closing ---------------------------------------------------------------------------------------------------

    def _close(self, model: ServedModel) -> None:
        """Close a model's engine, in a thread."""
        loaded, model.loaded, model.state = model.loaded, None, "draining"
        assert loaded is not None
        self.on_unload(loaded.engine)
        self._start(self._closed(model, loaded))

    async def _closed(self, model: ServedModel, loaded: LoadedEngine) -> None:
        logs.info("unloading", model=model.name)
        self.unloads += 1
        loaded.events.close()
        closed = [loaded.engine, loaded.drafter]
        del loaded
        await asyncio.to_thread(close_engine, closed)
        self._set_absent(model)

    def _set_absent(self, model: ServedModel) -> None:
        model.state, model.bytes, model.progress = "absent", 0, None
        model.idle_timeout = self._settings.idle_timeout
        self._changed.set()
        self._changed = asyncio.Event()
        if model.waiters:
            self.load(model)

    def tend(self, now: float) -> None:
        """Unload what has been idle for too long, and what has died. Called now and then."""
        for model in self.all():
            loaded = model.loaded
            if loaded is None or model.state != "ready":
                continue
            if not loaded.engine.alive:
                model.failures += 1
                model.failure, model.retry_at = ModelError("its engine has stopped"), now + FIRST_RETRY
                logs.log(logs.CRITICAL, "the engine's worker has died", model=model.name)
                self._close(model)
            elif not model.is_kept and not loaded.users and now - model.used_at >= model.idle_timeout:
                self._close(model)

    async def close(self) -> None:
        """Close every engine: the server exits. One that is stuck in a step is left as it is."""
        self._closing = True
        for task in list(self._tasks):
            if not task.done() and task.get_coro().__name__ == "_load":  # type: ignore[union-attr]
                task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for model in self.all():
            if (loaded := model.loaded) is not None:
                loaded.events.close()
                since = loaded.engine.busy_since
                if since is None or time.monotonic() - since <= self._settings.step_timeout:
                    model.loaded = None
                    await asyncio.to_thread(loaded.engine.close)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _check_kept(models: Sequence[ServedModel], budget: int, pages: int | None) -> None:
    """Raise if the models that are kept do not fit together."""
    kept = [model for model in models if model.is_kept]
    needed = sum(allowance(model.source.sizes, budget, pages) or 0 for model in kept)
    if needed > budget:
        names = ", ".join(repr(model.name) for model in kept)
        raise OutOfMemory(
            f"the models {names} are kept and take {format_bytes(needed)}; all models together may take "
            f"{format_bytes(budget)}: keep fewer, or start the server with more --memory"
        )


def _too_large(size: int, budget: int) -> OutOfMemory:
    return OutOfMemory(
        f"it takes {format_bytes(size)}, with which all models take more than {format_bytes(budget)}; start the "
        "server with more --memory"
    )


def _told(model: ServedModel) -> str:
    """What clients may know of a failure: never where files are."""
    if not isinstance(model.failure, HeadwayError):
        return "see the server's log"
    text, path = str(model.failure), model.source.path
    return text if path is None else text.replace(str(path), model.name).replace(str(path.parent), "")
