"""The models that stand beside the engine, by what they are for. Opened and closed with the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput, UnsupportedModel
from headway.server.errors import ApiError, bad_request
from headway.server.settings import public_name

if TYPE_CHECKING:
    from headway.pipelines.pipeline import Pipeline

ROLES = ("embed", "rerank", "classify")
WHAT = {"embed": "embedding model", "rerank": "reranker or embedding model", "classify": "classifier"}


@dataclass(frozen=True, eq=False)
class Pool:
    """One model that is ready: what it is called, and its pipeline with the batcher that all requests share."""

    role: str
    name: str
    asked: str
    pipeline: Pipeline

    @property
    def task(self) -> Any:
        return self.pipeline.task


class Pools:
    """Which model each kind of request goes to. Empty unless the server was told of some."""

    def __init__(
        self, models: Mapping[str, str] | None = None, *, device: str = "auto", find: Callable[[str], Any] = str
    ) -> None:
        """`models` has a name, folder or hub id for some of the roles; `find` turns it into what is loaded."""
        self._models, self._device, self._find = dict(models or {}), device, find
        for role in self._models:
            if role not in ROLES:
                raise InvalidInput(f"{role!r} is no role of a model; there are {', '.join(ROLES)}")
        self._lock, self._closed = threading.Lock(), False
        self.ready: dict[str, Pool] = {}

    def open(self) -> None:
        """Load all of them; takes a while."""
        for role, asked in self._models.items():
            pool = Pool(role, public_name(asked), asked, self._opened(role, asked))
            with self._lock:
                if self._closed:
                    pool.pipeline.close()
                else:
                    self.ready[role] = pool

    def close(self) -> None:
        """Close all of them, also one that is still being loaded."""
        with self._lock:
            self._closed = True
            pools = list(self.ready.values())
        for pool in pools:
            pool.pipeline.close()

    def _opened(self, role: str, asked: str) -> Pipeline:
        from headway.pipelines.factory import PipelineSpec, open_pipeline
        from headway.server.pooling.tasks import ServedClassifier, ServedEmbedding

        kind = ServedEmbedding if role == "embed" else ServedClassifier
        pipeline = open_pipeline(PipelineSpec(name=role, kind=kind, model=self._find(asked), device=self._device))
        if role == "rerank" and pipeline.task.config.num_labels != 1:
            pipeline.close()
            raise UnsupportedModel(f"{asked} has {pipeline.task.config.num_labels} outputs; a reranker has one score")
        return pipeline

    # -- requests ------------------------------------------------------------------------------------------------------

    def names(self) -> dict[str, Pool]:
        """What clients may call the models."""
        return {pool.name: pool for pool in self.ready.values()}

    def get(self, *roles: str, model: str | None) -> Pool:
        """The model for a request: the first of these roles that the server has, and that goes by this name."""
        found = [self.ready[role] for role in roles if role in self.ready]
        if not found:
            flags = " or ".join(f"--{role} MODEL" for role in roles)
            raise bad_request(f"this server has no {WHAT[roles[0]]}; it is started with {flags}", code="unsupported")
        for pool in found:
            if model is None or model in (pool.name, pool.asked):
                return pool
        names = ", ".join(repr(pool.name) for pool in found)
        raise ApiError(
            404,
            f"there is no model {model!r:.80} here for this; this server has {names}",
            param="model",
            code="model_not_found",
        )
