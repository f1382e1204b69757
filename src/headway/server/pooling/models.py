"""The models for embeddings, reranking, classification and speech, by role. Opened and closed with the server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput, UnsupportedModel
from headway.base.text import short_repr
from headway.server.errors import ApiError, bad_request
from headway.server.settings import named_model

if TYPE_CHECKING:
    from headway.pipelines.pipeline import Pipeline

ROLES = ("embed", "rerank", "classify", "audio")
ROLE_NAMES = {
    "embed": "embedding model",
    "rerank": "reranker or embedding model",
    "classify": "classifier",
    "audio": "speech model",
}


@dataclass(frozen=True, eq=False)
class PoolingModel:
    """One loaded model: its name, and its pipeline with the batcher that all requests share."""

    role: str
    name: str
    source: str  # the name, folder or hub id it was loaded from
    pipeline: Pipeline

    @property
    def task(self) -> Any:
        return self.pipeline.implementation

    @cached_property
    def size(self) -> int | None:
        """Bytes of its weights; None where they are not torch's."""
        parameters = getattr(self.pipeline.model, "parameters", None)
        return None if parameters is None else sum(tensor.nbytes for tensor in parameters())


class PoolingModels:
    """The model of each role; empty unless the server was started with some."""

    def __init__(
        self, models: Mapping[str, str] | None = None, *, device: str = "auto", find: Callable[[str], Any] = str
    ) -> None:
        """`models` maps roles to names, folders or hub ids, each also as NAME=MODEL with the name for clients; `find`
        turns one of these into what is loaded."""
        self._models = {role: named_model(text) for role, text in (models or {}).items()}
        self._device, self._find = device, find
        for role in self._models:
            if role not in ROLES:
                raise InvalidInput(f"{role!r} is not a role of a model; the roles are {', '.join(ROLES)}")
        self._lock, self._closed = threading.Lock(), False
        self.ready: dict[str, PoolingModel] = {}

    def open(self) -> None:
        """Load all models."""
        for role, (name, source) in self._models.items():
            pool = PoolingModel(role, name, source, self._open_pipeline(role, source))
            with self._lock:
                if self._closed:
                    pool.pipeline.close()
                else:
                    self.ready[role] = pool

    def close(self) -> None:
        """Close all models, including one that is still loading."""
        with self._lock:
            self._closed = True
            pooling_models = list(self.ready.values())
        for pool in pooling_models:
            pool.pipeline.close()

    def _open_pipeline(self, role: str, source: str) -> Pipeline:
        from headway.pipelines.factory import PipelineSpec, open_pipeline
        from headway.server.pooling.tasks import ServedClassifier, ServedEmbedding

        if role == "audio":
            from headway.pipelines.backends.loading import config_of
            from headway.pipelines.tasks.speech_recognition import class_for

            model = self._find(source)
            return open_pipeline(
                PipelineSpec(name=role, kind=class_for(config_of(model)), model=model, device=self._device)
            )
        kind = ServedEmbedding if role == "embed" else ServedClassifier
        pipeline = open_pipeline(PipelineSpec(name=role, kind=kind, model=self._find(source), device=self._device))
        if role == "rerank" and pipeline.implementation.config.num_labels != 1:
            pipeline.close()
            raise UnsupportedModel(
                f"{source} has {pipeline.implementation.config.num_labels} outputs; a reranker must have one"
            )
        return pipeline

    # -- requests --------------------------------------------------------------------------------------------------

    def names(self) -> dict[str, PoolingModel]:
        """The models by their names."""
        return {pool.name: pool for pool in self.ready.values()}

    def get(self, *roles: str, model: str | None) -> PoolingModel:
        """The model for a request: the first of these roles that the server has and whose name matches."""
        candidates = [self.ready[role] for role in roles if role in self.ready]
        if not candidates:
            flags = " or ".join(f"--{role} MODEL" for role in roles)
            raise bad_request(f"this server has no {ROLE_NAMES[roles[0]]}; start it with {flags}", code="unsupported")
        for pool in candidates:
            if model is None or model in (pool.name, pool.source):
                return pool
        names = ", ".join(repr(pool.name) for pool in candidates)
        raise ApiError(
            404,
            f"model {short_repr(model)} does not exist for this route; this server has {names}",
            param="model",
            code="model_not_found",
        )
