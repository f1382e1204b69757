"""Vectors, scores and labels over HTTP, of models that stand beside the engine's: `headway serve --embed MODEL`.

wire      the fields of a body          shapes  those of an answer
tasks     rows that were tokenized for a request, and their numbers: the pipelines' own tasks and batcher
pools     the models, by what they are for
routes    /v1/embeddings, /rerank, /classify, /pooling
"""

from __future__ import annotations

from headway.server.pooling.pools import Pool, Pools
from headway.server.pooling.routes import router

__all__ = ["Pool", "Pools", "router"]
