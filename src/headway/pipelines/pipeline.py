"""Pipeline, the object that `hw.pipeline(...)` returns: calls, streams and `submit` over one task and one batcher."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from os import PathLike
from typing import Any

import torch

from headway.base.closing import Closing
from headway.base.errors import Closed, InvalidInput, Unsupported
from headway.base.system.machine import read_machine
from headway.base.text import short_repr
from headway.pipelines.arguments import INPUTS, call_options
from headway.pipelines.backends.torch import FORWARD_PARAMETERS, HostCopy, to_host
from headway.pipelines.batcher import Batcher, ItemJob
from headway.pipelines.outputs import ModelOutput
from headway.pipelines.stream import Stream, gc_relaxed, item_failed
from headway.pipelines.task import MISSING, ModelInputs, PreparedItem, Task, known_options
from headway.pipelines.token_budget import TokenBudget

ON_ERROR = ("raise", "return")
DEPTH = 2  # batches queued after the running one on a GPU
GPU_WORKERS = 3
GPU_LOOKAHEAD = 16  # factor on Task.lookahead: a GPU needs large batches, and more of them queued


class Pipeline(Closing):
    """A task ready to use: `p(item)`, `p(list)`, `for r in p(iterable)`, `await p.submit(item)`.

    Safe to use from any number of threads and event loops; the work of all of them is batched together. Each step can
    also be called by hand: `p.preprocess(items)` → ModelInputs, `p.forward(batch)` → ModelOutput.
    """

    def __init__(
        self, task: Task, *, batch_size: int | str = "auto", key: str | None = None, defaults: Any = None
    ) -> None:
        self.implementation, self.task = task, task.name or type(task).__name__
        self.defaults = task.Options() if defaults is None else defaults
        device = task.loaded.backend.device
        self._batcher = Batcher(
            task,
            TokenBudget(batch_size, cpu=device.type == "cpu", key=key),
            padded=task.pads(),
            depth=DEPTH if device.type == "cuda" else 0,
        )
        # tokenizers have threads of their own; more of ours would compete for the GIL with the thread that feeds a GPU
        workers = GPU_WORKERS if device.type == "cuda" else max(2, min(8, read_machine().fair_threads))
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="headway-pipeline")
        self._intake = _Intake(task, self._batcher, self._pool)
        self._finalizer = weakref.finalize(self, _shut_down, self._batcher, self._pool)

    # -- calling -------------------------------------------------------------------------------------------------------

    def __call__(self, inputs: Any = MISSING, /, *more: Any, on_error: str = "raise", **given: Any) -> Any:
        """The result of one item, a list of results for a list, or a lazy iterator of results for an iterable.

        Task options are keywords. `on_error="return"` returns the error of an item that fails in place of its result.
        """
        if on_error not in ON_ERROR:
            raise InvalidInput(f"on_error is {short_repr(on_error)}; it must be 'raise' or 'return'")
        inputs, given = self.implementation.gather(*by_keyword(self.implementation, inputs, more, given))
        options = self._options(given)
        if self.implementation.is_item(inputs) or inputs is None:
            result = self._one(inputs, options, on_error)
            return result if isinstance(result, Exception) else self.implementation.single(inputs, result, given)
        if isinstance(inputs, (list, tuple)):
            return list(self._stream(inputs, options, on_error))
        several = hasattr(inputs, "__iter__") or hasattr(inputs, "__getitem__")
        if not several or getattr(inputs, "ndim", 1) == 0:
            return self._one(inputs, options, on_error)  # preprocess raises the error
        return self._stream(inputs, options, on_error)

    async def submit(self, item: Any = MISSING, /, **given: Any) -> Any:
        """The result of one item; concurrent calls are batched together."""
        item, given = self.implementation.gather(*by_keyword(self.implementation, item, (), given))
        return await self._intake.put(item, self._options(given))

    def _options(self, given: dict[str, Any]) -> Any:
        for name in FORWARD_PARAMETERS:
            if name in given and name not in getattr(self.defaults, "__dataclass_fields__", {}):
                raise InvalidInput(f"{name!r} is a parameter of the forward pass; call .forward(..., {name}=...)")
        return self.implementation.options(self.defaults, call_options(given, known_options(self.defaults)))

    def predict(self, X: Any, /) -> Any:
        """The same as a call, by the name that scikit-learn has for it."""
        return self(X)

    transform = predict

    def _one(self, item: Any, options: Any, on_error: str) -> Any:
        try:
            job = ItemJob(item, options, _Waiter())
            job.ready(self.implementation.preprocess(item, options))
            self._batcher.add([job])
            job.sink.event.wait()  # type: ignore[attr-defined]
            if job.error is not None:
                raise job.error
            return _postprocess(self.implementation, job)
        except Exception as error:
            if on_error == "raise":
                raise
            return error

    def _stream(self, source: Iterable[Any], options: Any, on_error: str) -> Iterator[Any]:
        gpu = self.device.type == "cuda"
        ahead = self.implementation.lookahead * (GPU_LOOKAHEAD if gpu else 1)
        stream = Stream(source, self._intake.start, ahead, options)
        with gc_relaxed() if gpu else nullcontext():
            for index, job in stream.jobs():
                try:
                    if job.error is not None:
                        raise job.error
                    result = _postprocess(self.implementation, job)
                except Exception as error:
                    if on_error == "return":
                        result = error
                    else:
                        raise item_failed(error, index) from error
                yield result

    # -- step by step --------------------------------------------------------------------------------------------------

    def preprocess(self, items: Any, **given: Any) -> ModelInputs:
        """The model inputs for one item or a list of items."""
        options = self._options(given)
        items = list(items) if isinstance(items, (list, tuple)) else [items]
        prepared = self.implementation.preprocess_many(items, options)
        return self.implementation.collate([row for one in prepared for row in one.rows])

    def forward(self, inputs: Any, /, *, labels: Any = None, **parameters: Any) -> Any:
        """The model's full output on the CPU: a ModelOutput, or a tuple with `return_dict=False`.

        `inputs` are items, the ModelInputs of `preprocess`, or tensors by name. `labels` adds a `loss`; other keywords
        are those of the model's own forward, such as `output_hidden_states` and `output_attentions`.
        """
        tensors = dict(self._tensors(inputs))
        if labels is not None:
            tensors["labels"] = torch.as_tensor(labels)
        as_dict = parameters.pop("return_dict", True)
        backend = self.implementation.loaded.backend
        backend.check(tensors)
        backend.check(parameters)
        if parameters.get("output_attentions"):
            use_eager_attention(backend.module)
        result = self._batcher.call(lambda: to_host(backend(tensors, **parameters)))
        output = ModelOutput(result if isinstance(result, Mapping) else {"output": result})
        return output if as_dict else output.to_tuple()

    def postprocess(self, item: Any, output: Any = MISSING, /, **given: Any) -> Any:
        """The task's result for one item from its rows of a model's full output."""
        if not isinstance(output, Mapping):
            raise InvalidInput("postprocess takes the item and the output of forward: p.postprocess(item, output)")
        options = self._options(given)
        prepared = self.implementation.preprocess(item, options)
        batch = self.implementation.collate(prepared.rows)
        with torch.inference_mode():
            arrays = HostCopy(self.implementation.reduce(output, batch, options)).wait()
        rows = [{name: value[i] for name, value in arrays.items()} for i in range(len(prepared.rows))]
        return self.implementation.postprocess(prepared, rows, options)

    def save_pretrained(self, folder: str | PathLike[str], **parameters: Any) -> None:
        """Write the model and what prepares its inputs to a folder that `hw.pipeline` and transformers can load."""
        loaded = self.implementation.loaded
        if loaded.quantization is not None:
            raise Unsupported("a model with quantize='int8' cannot be saved; save one without, and quantize it again")
        parts = (loaded.tokenizer, loaded.feature_extractor, loaded.image_processor, loaded.processor)
        self._batcher.call(lambda: loaded.module.save_pretrained(folder, **parameters))
        for part in filter(None, parts):
            part.save_pretrained(folder, **parameters)

    def _tensors(self, inputs: Any) -> Mapping[str, Any]:
        if isinstance(inputs, ModelInputs):
            return inputs.inputs
        if isinstance(inputs, Mapping) and any(isinstance(value, torch.Tensor) for value in inputs.values()):
            return inputs
        return self.preprocess(inputs).inputs

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Any:
        """The torch module."""
        return self.implementation.loaded.module

    @property
    def quantization(self) -> Any:
        """The effect of `quantize=` on the model and its outputs, a QuantizationReport; None without it."""
        return self.implementation.loaded.quantization

    @property
    def tokenizer(self) -> Any:
        return self.implementation.loaded.tokenizer

    @property
    def image_processor(self) -> Any:
        return self.implementation.loaded.image_processor

    @property
    def feature_extractor(self) -> Any:
        return self.implementation.loaded.feature_extractor

    @property
    def device(self) -> torch.device:
        return self.implementation.loaded.backend.device

    @property
    def dtype(self) -> torch.dtype:
        return self.implementation.loaded.backend.placement.dtype

    def stats(self) -> dict[str, float]:
        """Batches and rows computed, tokens with and without padding, halvings for lack of memory, the token budget.

        `replays` counts batches that ran as one CUDA graph.
        """
        batcher = self._batcher
        return {
            "batches": batcher.batches,
            "rows": batcher.rows,
            "tokens": batcher.real_tokens,
            "padded_tokens": batcher.tokens,
            "halvings": batcher.halvings,
            "budget_tokens": batcher.budget.tokens,
            "replays": getattr(self.implementation.loaded.unpadded, "replays", 0),
        }

    def close(self) -> None:
        """End the pipeline's threads; waiting items fail with Closed."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"Pipeline({self.task!r}, {self.implementation.loaded!r})"


def by_keyword(task: Task, item: Any, more: Sequence[Any], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The item and the options of a call whose item may be `inputs=` and whose options may be positional."""
    if len(more) > len(task.positional):
        takes = f", and {', '.join(task.positional)}" if task.positional else "; give options by name"
        raise InvalidInput(f"{1 + len(more)} positional arguments were given; {task.name} takes an item{takes}")
    named = dict(zip(task.positional, more))
    if twice := sorted(set(named) & set(given)):
        raise InvalidInput(f"{twice[0]} is given both by position and by name; pass it once")
    given = {**given, **named}
    alias = next((name for name in INPUTS if name in given), None) if item is MISSING else None
    return (item, given) if alias is None else (given.pop(alias), given)


class _Waiter:
    """The sink of one item whose caller waits in its own thread."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event = threading.Event()

    def finished(self, jobs: list[ItemJob]) -> None:
        self.event.set()


class _Intake:
    """Preprocesses items in the pool and hands them to the batcher; resolves the futures of `submit`."""

    def __init__(self, task: Task, batcher: Batcher, pool: ThreadPoolExecutor) -> None:
        self._task, self._batcher, self._pool = task, batcher, pool
        self._lock = threading.Lock()
        self._submitted: deque[ItemJob] = deque()
        self._busy = False

    def start(self, jobs: list[ItemJob]) -> None:
        """Prepare the jobs of a stream in the pool and hand them to the batcher."""
        self._in_pool(prepare, self._task, self._batcher, jobs)

    def _in_pool(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._pool.submit(function, *args)
        except RuntimeError:  # the pipeline has closed its pool
            raise Closed("this pipeline is closed; create a new one") from None

    def put(self, item: Any, options: Any) -> asyncio.Future[Any]:
        """A future of the running event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        job = ItemJob(item, options, self, (loop, future))
        with self._lock:
            self._submitted.append(job)
            start, self._busy = not self._busy, True
        if start:
            self._in_pool(self._drain)
        return future

    def _drain(self) -> None:
        while True:
            with self._lock:
                jobs = [job for job in self._submitted if not job.tag[1].cancelled()]
                self._submitted.clear()
                self._busy = bool(jobs)
            if not jobs:
                return
            prepare(self._task, self._batcher, jobs)

    def finished(self, jobs: list[ItemJob]) -> None:
        try:
            self._pool.submit(self._resolve_futures, jobs)
        except RuntimeError:  # the pipeline has closed its pool
            self._resolve_futures(jobs)

    def _resolve_futures(self, jobs: list[ItemJob]) -> None:
        outcomes: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Any], Any, BaseException | None]]] = {}
        for job in jobs:
            loop, future = job.tag
            result, error = None, job.error
            if error is None and not future.cancelled():
                try:
                    result = _postprocess(self._task, job)
                except Exception as postprocess_error:  # raised where the caller waits for this item
                    error = postprocess_error
            outcomes.setdefault(loop, []).append((future, result, error))
        for loop, finished in outcomes.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_resolve, finished)


def prepare(task: Task, batcher: Batcher, jobs: list[ItemJob]) -> None:
    """Preprocess jobs and hand them to the batcher; an item that cannot be preprocessed fails alone."""
    good: list[ItemJob] = []
    bad: list[ItemJob] = []
    for same in _by_options(jobs):
        outcomes = _preprocess(task, [job.item for job in same], same[0].options)
        for job, outcome in zip(same, outcomes):
            if isinstance(outcome, PreparedItem):
                job.ready(outcome)
                good.append(job)
            else:
                job.fail(outcome)
                bad.append(job)
    try:
        if good:
            batcher.add(good)
    except Exception as error:  # closed in the meantime
        for job in good:
            job.fail(error)
        bad += good
    for job in bad:
        job.sink.finished([job])


def _by_options(jobs: list[ItemJob]) -> Iterator[list[ItemJob]]:
    """Consecutive jobs with equal options."""
    start = 0
    for end in range(1, len(jobs) + 1):
        if end < len(jobs) and jobs[end].options is jobs[start].options:
            continue
        if end == len(jobs) or jobs[end].options != jobs[start].options:
            yield jobs[start:end]
            start = end


def _preprocess(task: Task, items: Sequence[Any], options: Any) -> Sequence[PreparedItem | Exception]:
    try:
        return task.preprocess_many(items, options)
    except Exception as error:  # one of the items is at fault: find out which
        if len(items) == 1:
            return [error]
        return [one for item in items for one in _preprocess(task, [item], options)]


def _postprocess(task: Task, job: ItemJob) -> Any:
    assert job.prepared is not None
    return task.postprocess(job.prepared, job.results, job.options)


def _resolve(outcomes: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in outcomes:
        if future.done():
            continue
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def use_eager_attention(module: Any) -> None:
    """Make the module keep attention weights, which fused attention does not; eager attention is slower."""
    config = getattr(module, "config", None)
    if config is not None and getattr(config, "_attn_implementation", "eager") != "eager":
        module.set_attn_implementation("eager")


def _shut_down(batcher: Batcher, pool: ThreadPoolExecutor) -> None:
    batcher.close()
    pool.shutdown(wait=False)  # jobs still in it find the batcher closed and fail
