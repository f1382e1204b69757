"""Embeddings, scores and labels over HTTP, from models served along with the engine's: `headway serve --embed MODEL`.

request_schema, response_schema   the fields of requests and responses
tasks     the pipelines' tasks for rows that are already tokenized
models    the models, by role
routes    /v1/embeddings, /rerank, /classify, /pooling
"""

from __future__ import annotations

from headway.server.pooling.models import PoolingModel, PoolingModels
from headway.server.pooling.routes import router

__all__ = ["PoolingModel", "PoolingModels", "router"]
