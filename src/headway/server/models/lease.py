"""A hold on a loaded model: while somebody has one, the engine is not closed for another model or for being idle."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import Request

from headway.server.adapters import ServedAdapter
from headway.server.models.served_model import LoadedEngine, ServedModel

if TYPE_CHECKING:
    from headway.program.engine import Engine
    from headway.program.generation.speculation.drafter import Drafter
    from headway.server.models.served_models import ServedModels
    from headway.server.serving import Serving

LEASES = "model_leases"  # in a request's state


class ModelLease:
    """An engine that somebody uses, and the adapter that was asked for by name, if any."""

    def __init__(
        self,
        models: ServedModels,
        model: ServedModel,
        loaded: LoadedEngine,
        adapter: ServedAdapter | None,
        *,
        is_session: bool,
    ) -> None:
        self._models, self._loaded, self._is_session = models, loaded, is_session
        self.model, self.adapter = model, adapter
        self._held = True

    @property
    def engine(self) -> Engine:
        return self._loaded.engine

    @property
    def drafter(self) -> Drafter | None:
        return self._loaded.drafter

    @property
    def name(self) -> str:
        """The name that responses and logs carry."""
        return self.model.name if self.adapter is None else self.adapter.name

    def again(self) -> ModelLease:
        """Another hold on the same engine, for work that may outlive the request."""
        assert self._held
        self._models.hold(self._loaded, is_session=self._is_session)
        return ModelLease(self._models, self.model, self._loaded, self.adapter, is_session=self._is_session)

    def release(self) -> None:
        """Let go; once is enough."""
        if self._held:
            self._held = False
            self._models.let_go(self.model, self._loaded, is_session=self._is_session)

    def __enter__(self) -> ModelLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


async def requested_model(request: Request, name: str | None) -> ModelLease:
    """The model that a request names, loaded; the request holds it until it ends.

    Raises a 404 for a name that this server does not have, and a 503 if the model cannot be had now. Waits while it
    loads, unless the server refuses such requests.
    """
    serving: Serving = request.app.state.serving
    lease = await serving.models.lease(name, serving.tenant(request))
    request.scope.setdefault("state", {}).setdefault(LEASES, []).append(lease)
    return lease


def end_leases(scope: object) -> None:
    """Release what a request holds, at its end."""
    assert isinstance(scope, dict)
    for lease in scope.get("state", {}).pop(LEASES, ()):
        lease.release()
