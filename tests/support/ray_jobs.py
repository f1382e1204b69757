"""Batch jobs on a Ray cluster, in a process of their own: `python tests/support/ray_jobs.py ADDRESS JOBS`.

JOBS is a JSON list of arguments for `headway.batch.run`. With `"stage": "deadly"`, workers have no engine: they give
each prompt back, backwards, after `"seconds"`, die of the prompt POISON, and answer PLACE with the CPUs that Ray gave
them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import Future
from typing import Any

import ray

import headway.batch
import headway.cluster.batch
from headway.cluster.batch import ChunkStage, RayWorker
from headway.jobs.job import rows_of
from headway.jobs.requests import RequestWorker, RowRequest, RowResponse


def backwards(request: RowRequest, seconds: float) -> Future[RowResponse]:
    prompt = request.body["prompt"]
    if prompt == "POISON":
        os._exit(9)
    if prompt == "PLACE":
        prompt = f"{ray.get_runtime_context().get_assigned_resources()['CPU']:g}"
    time.sleep(seconds)
    choice = {"text": prompt[::-1], "finish_reason": "stop"}
    future: Future[RowResponse] = Future()
    future.set_result(RowResponse(200, {"choices": [choice], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}))
    return future


class DeadlyStage(ChunkStage):
    def __init__(self, work: Any, source: Any, version: str) -> None:
        rows = rows_of(work)
        assert rows is not None
        self._source: Any = source
        seconds = float(work.engine.get("seconds", 0))
        self._worker = RequestWorker(lambda request: backwards(request, seconds), rows, work.concurrency)


class DeadlyWorker(RayWorker):
    _stage = DeadlyStage


def main() -> None:
    for job in json.loads(sys.argv[2]):
        stage = job.pop("stage", None)
        headway.cluster.batch.RayWorker = RayWorker if stage is None else DeadlyWorker
        headway.batch.run(ray=sys.argv[1], **job)


if __name__ == "__main__":
    main()
