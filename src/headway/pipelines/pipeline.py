"""Pipeline: what `hw.pipeline(...)` gives. Calls, streams and `submit` over one task, one model and one batcher."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, Self

import torch

from headway.base.errors import Closed, InvalidInput
from headway.base.machine import read_machine
from headway.pipelines.backends.forward import FORWARD_PARAMETERS, HostCopy, bring_back
from headway.pipelines.batcher import Batcher, Ticket
from headway.pipelines.budget import Budget
from headway.pipelines.collecting import collecting_rarely
from headway.pipelines.outputs import ModelOutput
from headway.pipelines.stream import Stream, item_failed
from headway.pipelines.task import MISSING, Batch, PreparedItem, Task

ON_ERROR = ("raise", "return")
DEPTH = 2  # batches that follow the running one on a GPU
DEVICE_WORKERS = 3
DEVICE_AHEAD = 16  # times as many items are prepared ahead of a GPU, which wants large batches and some to follow


class Pipeline:
    """A task that is ready: `p(item)`, `p(list)`, `for r in p(iterable)`, `await p.submit(item)`.

    Safe to use from any number of threads and event loops; the work of all of them is batched together. The steps are
    there by hand too: `p.preprocess(items)` → Batch, `p.forward(batch)` → ModelOutput.
    """

    def __init__(
        self, task: Task, *, batch_size: int | str = "auto", key: str | None = None, defaults: Any = None
    ) -> None:
        self.task, self.name = task, task.name or type(task).__name__
        self.defaults = task.Options() if defaults is None else defaults
        device = task.loaded.run.device
        self._batcher = Batcher(
            task,
            Budget(batch_size, cpu=device.type == "cpu", key=key),
            padded=task.pads(),
            depth=DEPTH if device.type == "cuda" else 0,
        )
        # a tokenizer has threads of its own; more of ours would keep the interpreter from the one that feeds a GPU
        workers = DEVICE_WORKERS if device.type == "cuda" else max(2, min(8, read_machine().fair_threads))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="headway-pipeline")
        self._intake = _Intake(task, self._batcher, self._pool)
        self._finalizer = weakref.finalize(self, _end, self._batcher, self._pool)

    # -- calling -------------------------------------------------------------------------------------------------------

    def __call__(self, inputs: Any = MISSING, /, *, on_error: str = "raise", **given: Any) -> Any:
        """The result of one item, a list of results for a list, or a lazy iterator of results for an iterable.

        Options of the task go by keyword. `on_error="return"` puts the error of an item that fails in its place.
        """
        if on_error not in ON_ERROR:
            raise InvalidInput(f"on_error is {on_error!r}; it takes 'raise' or 'return'")
        inputs, given = self.task.gather(inputs, given)
        options = self._options(given)
        if self.task.is_item(inputs) or inputs is None:
            return self._one(inputs, options, on_error)
        if isinstance(inputs, (list, tuple)):
            return list(self._stream(inputs, options, on_error))
        if not (hasattr(inputs, "__iter__") or hasattr(inputs, "__getitem__")):
            return self._one(inputs, options, on_error)  # preprocess says what is wrong with it
        return self._stream(inputs, options, on_error)

    async def submit(self, item: Any = MISSING, /, **given: Any) -> Any:
        """The result of one item; the work of all who wait at the same time is batched together."""
        item, given = self.task.gather(item, given)
        return await self._intake.put(item, self._options(given))

    def _options(self, given: dict[str, Any]) -> Any:
        for name in FORWARD_PARAMETERS:
            if name in given and name not in getattr(self.defaults, "__dataclass_fields__", {}):
                raise InvalidInput(f"{name!r} is a parameter of the forward pass; call .forward(..., {name}=...)")
        return self.task.options(self.defaults, given)

    def _one(self, item: Any, options: Any, on_error: str) -> Any:
        try:
            ticket = Ticket(item, options, _Waiter())
            ticket.ready(self.task.preprocess(item, options))
            self._batcher.add([ticket])
            ticket.sink.event.wait()  # type: ignore[attr-defined]
            if ticket.error is not None:
                raise ticket.error
            return _postprocess(self.task, ticket)
        except Exception as error:
            if on_error == "raise":
                raise
            return error

    def _stream(self, source: Iterable[Any], options: Any, on_error: str) -> Iterator[Any]:
        quick = self.device.type == "cuda"
        stream = Stream(source, self._intake.start, self.task.lookahead * (DEVICE_AHEAD if quick else 1), options)
        with collecting_rarely() if quick else nullcontext():
            for index, ticket in stream.tickets():
                try:
                    if ticket.error is not None:
                        raise ticket.error
                    result = _postprocess(self.task, ticket)
                except Exception as error:
                    if on_error == "return":
                        result = error
                    else:
                        raise item_failed(error, index) from error
                yield result

    # -- by hand -------------------------------------------------------------------------------------------------------

    def preprocess(self, items: Any, **given: Any) -> Batch:
        """The tensors the model would be called with for one item or a list of them."""
        options = self._options(given)
        listed = list(items) if isinstance(items, (list, tuple)) else [items]
        prepared = self.task.preprocess_many(listed, options)
        return self.task.collate([row for one in prepared for row in one.rows])

    def forward(self, inputs: Any, /, *, labels: Any = None, **parameters: Any) -> Any:
        """The model's whole answer, on the CPU: a ModelOutput, or a tuple with `return_dict=False`.

        `inputs` are items, a Batch of `preprocess`, or tensors by name. `labels` add a `loss`; `output_hidden_states`,
        `output_attentions` and whatever else the model's forward takes go by keyword; anything else is refused.
        """
        tensors = dict(self._tensors(inputs))
        if labels is not None:
            tensors["labels"] = torch.as_tensor(labels)
        as_dict = parameters.pop("return_dict", True)
        run = self.task.loaded.run
        run.check(tensors)
        run.check(parameters)
        if parameters.get("output_attentions"):
            _show_attention(run.module)
        found = self._batcher.call(lambda: bring_back(run(tensors, **parameters)))
        output = ModelOutput(found if isinstance(found, Mapping) else {"output": found})
        return output if as_dict else output.to_tuple()

    def postprocess(self, item: Any, output: Mapping[str, Any], **given: Any) -> Any:
        """The task's result for one item from its rows of a model's whole answer."""
        options = self._options(given)
        prepared = self.task.preprocess(item, options)
        batch = self.task.collate(prepared.rows)
        with torch.inference_mode():
            arrays = HostCopy(self.task.reduce(output, batch, options)).wait()
        rows = [{name: value[i] for name, value in arrays.items()} for i in range(len(prepared.rows))]
        return self.task.postprocess(prepared, rows, options)

    def _tensors(self, inputs: Any) -> Mapping[str, Any]:
        if isinstance(inputs, Batch):
            return inputs.inputs
        if isinstance(inputs, Mapping) and any(isinstance(value, torch.Tensor) for value in inputs.values()):
            return inputs
        return self.preprocess(inputs).inputs

    # -- life ----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The module that computes."""
        return self.task.loaded.module

    @property
    def quantization(self) -> Any:
        """What `quantize=` did to the model and to its answers, a QuantizationReport; None without it."""
        return self.task.loaded.quantization

    @property
    def tokenizer(self) -> Any:
        return self.task.loaded.tokenizer

    @property
    def device(self) -> torch.device:
        return self.task.loaded.run.device

    def stats(self) -> dict[str, float]:
        """Batches and rows computed, tokens with and without padding, halvings for lack of memory, the budget.

        `replays` counts batches that were one captured graph, on a GPU.
        """
        b = self._batcher
        return {
            "batches": b.batches,
            "rows": b.rows,
            "tokens": b.real_tokens,
            "padded_tokens": b.tokens,
            "halvings": b.halvings,
            "budget_tokens": b.budget.tokens,
            "replays": getattr(self.task.loaded.packed, "replays", 0),
        }

    def close(self) -> None:
        """End the pipeline's threads; items that still wait fail with Closed."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        loaded = self.task.loaded
        return f"Pipeline({self.name!r}, {type(loaded.module).__name__} of {loaded.name}, {loaded.run.placement})"


class _Waiter:
    """The sink of one item that its caller's thread waits for."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = threading.Event()

    def finished(self, tickets: list[Ticket]) -> None:
        self.event.set()


class _Intake:
    """Items on their way to the batcher: preprocessed in the pool; those of event loops are collected and answered."""

    def __init__(self, task: Task, batcher: Batcher, pool: ThreadPoolExecutor) -> None:
        self._task, self._batcher, self._pool = task, batcher, pool
        self._lock = threading.Lock()
        self._raw: deque[Ticket] = deque()
        self._busy = False

    def start(self, tickets: list[Ticket]) -> None:
        """Prepare tickets of a stream and hand them on, in the pool."""
        self._begin(prepare, self._task, self._batcher, tickets)

    def _begin(self, work: Callable[..., None], *args: Any) -> None:
        try:
            self._pool.submit(work, *args)
        except RuntimeError:  # the pool has ended with the pipeline
            raise Closed("this pipeline is closed; make a new one") from None

    def put(self, item: Any, options: Any) -> asyncio.Future[Any]:
        """A future of the running loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        ticket = Ticket(item, options, self, (loop, future))
        with self._lock:
            self._raw.append(ticket)
            start, self._busy = not self._busy, True
        if start:
            self._begin(self._drain)
        return future

    def _drain(self) -> None:
        while True:
            with self._lock:
                tickets = [ticket for ticket in self._raw if not ticket.mark[1].cancelled()]
                self._raw.clear()
                self._busy = bool(tickets)
            if not tickets:
                return
            prepare(self._task, self._batcher, tickets)

    def finished(self, tickets: list[Ticket]) -> None:
        try:
            self._pool.submit(self._answer, tickets)
        except RuntimeError:  # the pool has ended with the pipeline
            self._answer(tickets)

    def _answer(self, tickets: list[Ticket]) -> None:
        answers: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}
        for ticket in tickets:
            loop, future = ticket.mark
            result, error = None, ticket.error
            if error is None and not future.cancelled():
                try:
                    result = _postprocess(self._task, ticket)
                except Exception as failed:  # belongs to whoever waits for this item
                    error = failed
            answers.setdefault(loop, []).append((future, result, error))
        for loop, some in answers.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, some)


def prepare(task: Task, batcher: Batcher, tickets: list[Ticket]) -> None:
    """Preprocess tickets and hand them to the batcher; those that cannot be are failed by themselves."""
    good: list[Ticket] = []
    bad: list[Ticket] = []
    for some in _by_options(tickets):
        found = _prepared(task, [ticket.item for ticket in some], some[0].options)
        for ticket, one in zip(some, found):
            if isinstance(one, PreparedItem):
                ticket.ready(one)
                good.append(ticket)
            else:
                ticket.fail(one)
                bad.append(ticket)
    try:
        if good:
            batcher.add(good)
    except Exception as error:  # closed meanwhile
        for ticket in good:
            ticket.fail(error)
        bad += good
    for ticket in bad:
        ticket.sink.finished([ticket])


def _by_options(tickets: list[Ticket]) -> Iterator[list[Ticket]]:
    """Runs of tickets with the same options."""
    start = 0
    for end in range(1, len(tickets) + 1):
        if end < len(tickets) and tickets[end].options is tickets[start].options:
            continue
        if end == len(tickets) or tickets[end].options != tickets[start].options:
            yield tickets[start:end]
            start = end


def _prepared(task: Task, items: Sequence[Any], options: Any) -> Sequence[PreparedItem | Exception]:
    try:
        return task.preprocess_many(items, options)
    except Exception as error:  # one of them is at fault: find out which
        if len(items) == 1:
            return [error]
        return [one for item in items for one in _prepared(task, [item], options)]


def _postprocess(task: Task, ticket: Ticket) -> Any:
    assert ticket.prepared is not None
    return task.postprocess(ticket.prepared, ticket.results, ticket.options)


def _resolve(answers: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in answers:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _show_attention(module: Any) -> None:
    """Fused attention keeps no weights; the plain form is slower and does."""
    config = getattr(module, "config", None)
    if config is not None and getattr(config, "_attn_implementation", "eager") != "eager":
        module.set_attn_implementation("eager")


def _end(batcher: Batcher, pool: ThreadPoolExecutor) -> None:
    batcher.close()
    pool.shutdown(wait=False)  # what it still holds finds the batcher closed and fails its items
