"""`headway batch --ray ADDRESS`: the rows of a job through Ray Data, by a pool of actors with an engine each.

    driver                    the journal, in order; the rows that it lacks, in chunks
    RowSource (an actor)      reads the file on the driver's node, and gives out chunks by number
    ChunkStage (many actors)  an engine each; takes a chunk, gives back its results

Ray Data hands chunk numbers to the actors, runs a chunk again when its actor dies, and keeps results in order. While
the driver is behind, actors wait: a bounded number of chunks is computed and not yet read. Only numbers, JSON texts
and plans of our own go through Ray. A row that ends its worker again and again is found by computing its chunk one row
at a time, and becomes a failure.
"""

from __future__ import annotations

import base64
import json
import logging
import socket
import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import Closed, HeadwayError, InvalidInput
from headway.base.system.device import MAX_RANKS
from headway.base.version import VERSION
from headway.cluster.connect import cluster
from headway.cluster.stage import outcome
from headway.jobs.job import RowWork, key_reader, rows_of
from headway.jobs.records import Record, records
from headway.jobs.requests import RowFormat, left_out, unique
from headway.jobs.run import RowResult

MAX_CHUNK = 512  # rows of a chunk, in jobs of at most MAX_CHUNKS
MAX_CHUNKS = 20_000  # Ray has an object for each chunk from the start, and makes a thousand in a second
TRIES = 2  # of a chunk as a whole, before its rows are computed one at a time: a worker may have died of something else
KEPT_CHUNKS = 64  # that the source has in memory
AHEAD = 16  # chunks for each worker that may be computed and not yet read
WAIT_SECONDS = 0.1  # until a worker asks again whether the driver has caught up
MAX_DEATHS = 2  # of workers that computed nothing but one row, after which it fails
BYTES = "\0bytes"  # the only field of an object that stands for bytes
FAILED = "headway worker: "  # what a sentence for the user begins with, in a message of Ray
DIED = "its worker died {} times while it computed nothing else; it is left out"


@dataclass(frozen=True)
class RowText:
    """A record as it travels: its value as JSON text."""

    line: int
    crc: int
    value: str
    error: str | None
    has_bytes: bool = False  # whether objects with the field BYTES alone stand for bytes

    def record(self) -> Record:
        """The record again."""
        value = json.loads(self.value, object_hook=_untagged if self.has_bytes else None)
        return Record(self.line, value, self.crc, None, self.error)


class RowSource:
    """The rows of a file that are still to do, by chunks; and what became of chunks that were tried before."""

    def __init__(self, name: str, work: RowWork, done: int, size: int, ahead: int) -> None:
        self._name, self._work, self._done, self._size, self._ahead = name, work, done, size, ahead
        self._chunks: OrderedDict[int, list[RowText]] = OrderedDict()
        self._rest: Iterator[Record] = iter(())
        self._next: int | None = None
        self._tries: dict[int, int] = {}
        self._begun: dict[int, int] = {}  # how often each row was computed alone
        self._finished: dict[int, dict[int, tuple[str | None, str | None]]] = {}
        self._unread = 0  # the first chunk that the driver has not written
        self._computed: set[int] = set()  # those from there on that have results

    def chunk(self, number: int) -> tuple[list[RowText], int]:
        """The rows of a chunk, and how often it was asked for before."""
        tries = self._tries[number] = self._tries.get(number, -1) + 1
        if number not in self._chunks:
            self._read(number)
        return self._chunks[number], tries

    def must_wait(self, number: int) -> bool:
        """Whether a chunk is too far ahead of a driver that could go on. One that waits for results holds nobody up."""
        return number >= self._unread + self._ahead and self._unread in self._computed

    def end_computing(self, number: int) -> None:
        """A chunk has results."""
        if number >= self._unread:
            self._computed.add(number)

    def begin_row(self, number: int, line: int) -> tuple[int, tuple[str | None, str | None] | None]:
        """A row is computed alone now: how often it was before, and its result if it has one."""
        done = self._finished.get(number, {}).get(line)
        before = self._begun.get(line, 0)
        self._begun[line] = before + 1
        return before, done

    def end_row(self, number: int, line: int, result: tuple[str | None, str | None]) -> None:
        """A row that was computed alone has a result: it need not be computed again if its chunk is."""
        self._finished.setdefault(number, {})[line] = result

    def end_chunk(self, number: int) -> None:
        """A chunk is written, and all before it."""
        self._unread = number + 1
        self._computed = {other for other in self._computed if other > number}
        self._tries.pop(number, None)
        for line in self._finished.pop(number, ()):
            self._begun.pop(line, None)

    def _source(self) -> Iterator[Record]:
        key_of, what = key_reader(self._work)
        return islice(unique(records(self._name), key_of, what), self._done, None)

    def _read(self, number: int) -> None:
        if self._next is None or number < self._next:  # a chunk that was given out long ago
            self._rest, self._next = self._source(), 0
        while self._next <= number:
            rows = [_text(record) for record in islice(self._rest, self._size)]
            self._chunks[self._next] = rows
            self._next += 1
        while len(self._chunks) > KEPT_CHUNKS:
            self._chunks.popitem(last=False)


def _text(record: Record) -> RowText:
    """A record as it travels. JSON has everything that a value holds but bytes, which a parquet file may have."""
    has_bytes = False

    def tagged(value: bytes) -> dict[str, str]:
        nonlocal has_bytes
        has_bytes = True
        return {BYTES: base64.b64encode(value).decode()}

    try:
        value = json.dumps(record.value, default=tagged)
    except RecursionError as problem:
        return RowText(record.line, record.crc, "null", record.error or f"the row cannot be sent: {problem}")
    return RowText(record.line, record.crc, value, record.error, has_bytes)


def _untagged(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


class ChunkStage:
    """An engine, in an actor of Ray Data: chunk numbers in, results out."""

    def __init__(self, work: RowWork, source: Any, version: str) -> None:
        from headway.models.hub import store
        from headway.server.in_process import open_worker

        try:
            if version != VERSION:
                raise InvalidInput(
                    f"this node has Headway {VERSION}, and the job was started with {version}; install the same "
                    "version on every node"
                )
            self._source = source
            self._opened = open_worker(work, find=store.resolve)
            self._worker = self._opened.__enter__()
        except HeadwayError as error:
            raise RuntimeError(f"{FAILED}on the node {socket.gethostname()}: {error}\n") from None

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        number = int(batch["item"][0])
        while _get(self._source.must_wait.remote(number)):
            time.sleep(WAIT_SECONDS)
        rows, tries = _get(self._source.chunk.remote(number))
        if tries < TRIES:
            results = [outcome(row) for row in self._worker.results(row.record() for row in rows)]
        else:
            results = [self._alone(number, row) for row in rows]
        _get(self._source.end_computing.remote(number))
        return {
            "chunk": [number] * len(rows),
            "line": [row.line for row in rows],
            "crc": [row.crc for row in rows],
            "result": [result for result, _ in results],
            "error": [error for _, error in results],
        }

    def _alone(self, number: int, row: RowText) -> tuple[str | None, str | None]:
        """The result of a row of a chunk that has ended a worker already."""
        before, done = _get(self._source.begin_row.remote(number, row.line))
        if done is None and before >= MAX_DEATHS:
            done = None, json.dumps(DIED.format(before))
        elif done is None:
            (computed,) = self._worker.results([row.record()])
            done = outcome(computed)
        _get(self._source.end_row.remote(number, row.line, done))
        return done


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference)


class RayWorker:
    """What computes records, for `run_records`: a pool of actors."""

    _stage = ChunkStage

    def __init__(self, work: RowWork, source: Any, chunks: int, workers: int, resources: dict[str, Any]) -> None:
        self._work, self._source, self._chunks = work, source, chunks
        self._workers, self._resources = workers, resources
        self._rows: RowFormat | None = rows_of(work)
        self._key_of, _ = key_reader(work)

    def results(self, todo: Iterable[Record]) -> Generator[RowResult, None, None]:
        todo = iter(todo)
        chunk = None
        for row in self._computed():
            record = next(todo, None)
            if record is None or (record.line, record.crc) != (row["line"], row["crc"]):
                raise InvalidInput(
                    "the input has changed while the job reads it; restore it, and the same command resumes"
                )
            if chunk is not None and row["chunk"] != chunk:
                _get(self._source.end_chunk.remote(chunk))
            chunk = row["chunk"]
            yield self._result(record, row)
        for _ in todo:
            raise InvalidInput("the input has changed while the job reads it; restore it, and the same command resumes")

    def _result(self, record: Record, row: dict[str, Any]) -> RowResult:
        key = self._key_of(record.value)
        if row["error"] is not None:
            reason = json.loads(row["error"])
            whole = not isinstance(reason, str) or record.error is not None  # what the worker's own format made
            return left_out(None if whole else self._rows, record, reason, key)
        item = record.value if self._rows is None else self._rows.item(record)
        return RowResult(record, json.loads(row["result"]), item, key)

    def _computed(self) -> Iterator[dict[str, Any]]:
        """The results of all chunks, in order."""
        import ray
        from ray.data import DataContext

        try:
            count = self._chunks
            if count == 0:
                return
            context = DataContext.get_current()
            context.execution_options.preserve_order = True
            context.enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.WARNING)
            chunks = ray.data.from_items(list(range(count)), override_num_blocks=count)
            results = chunks.map_batches(
                self._stage,
                fn_constructor_args=(self._work, self._source, VERSION),
                batch_size=1,
                compute=ray.data.ActorPoolStrategy(min_size=1, max_size=self._workers),
                **self._resources,
            )
            yield from results.iter_rows()
        except Exception as error:
            if isinstance(error, HeadwayError):
                raise
            raise Closed(_sentence(error)) from None


@contextmanager
def ray_worker(name: str, work: RowWork, address: str, *, workers: int | None, done: int) -> Iterator[RayWorker]:
    """The workers of a cluster, for the rows of a file from row `done` on."""
    if workers is not None:
        check_integer(workers, "workers", 1, 100_000)
    with cluster(address, quiet=True) as ray:
        resources, places = worker_places(work.engine, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        count, rows = workers or places, sum(1 for _ in islice(records(name), done, None))
        size = chunk_size(rows, work.concurrency, count)
        here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        source = (
            ray.remote(RowSource)
            .options(num_cpus=0, max_restarts=-1, max_task_retries=-1, scheduling_strategy=here)
            .remote(name, work, done, size, AHEAD * count)
        )
        try:
            yield RayWorker(work, source, -(-rows // size), count, resources)
        finally:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(source)


def chunk_size(rows: int, concurrency: int, workers: int) -> int:
    """The rows of each chunk: as many as a worker has in flight, so that its engine is full; fewer where some worker
    would have no chunk, more where there would be too many chunks.
    """
    return max(1, min(MAX_CHUNK, concurrency, -(-rows // workers)), -(-rows // MAX_CHUNKS))


def worker_places(engine: Mapping[str, Any], nodes: Sequence[Mapping[str, float]]) -> tuple[dict[str, Any], int]:
    """What one worker takes of its node, all ranks of its engine together, and for how many workers there is a place.

    On CPUs that is one worker on each node: engines that share a node's memory bandwidth gain nothing.
    """
    ranks = check_integer(engine.get("tensor_parallel") or 1, "tensor_parallel", 1, MAX_RANKS)
    gpus = [int(node.get("GPU", 0)) for node in nodes]
    if any(gpus) and engine.get("device", "auto") != "cpu":
        places = sum(count // ranks for count in gpus)
        taken: dict[str, Any] = {"num_cpus": 0.5 if ranks == 1 else ranks, "num_gpus": ranks}
        cpus = taken["num_cpus"]
        if not places:
            raise InvalidInput(
                f"tensor_parallel is {ranks}, and no node of the cluster has more than {max(gpus)} GPUs; use at most "
                "so many ranks"
            )
    else:
        cpus, places = max(int(engine.get("threads") or 1), ranks), len(nodes)
        taken = {"num_cpus": cpus}
    most = max((node.get("CPU", 0) for node in nodes), default=0)
    if cpus > most:
        raise InvalidInput(
            f"a worker takes {cpus} CPUs of its node (threads {engine.get('threads') or 1}, tensor_parallel {ranks}), "
            f"and no node of the cluster has more than {most:g}; use fewer"
        )
    return taken, places


def _sentence(error: Exception) -> str:
    """What a worker said, without what Ray put around it."""
    text = str(error)
    if FAILED in text:
        return text.partition(FAILED)[2].partition("\n")[0].strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"the job has stopped: {(lines[-1] if lines else type(error).__name__)[:300]}"
