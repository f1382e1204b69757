"""Text generation: decoders on Headway's engine, with the interface of a pipeline.

The engine does the batching: each item of a list, a stream or a `submit` call is a program of its own.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headway.base.errors import Closed, InvalidInput, Unsupported
from headway.pipelines.stream import item_failed
from headway.pipelines.task import MISSING, Task, TaskOptions, check_text, wrong_type

if TYPE_CHECKING:
    from headway.pipelines.factory import PipelineSpec
    from headway.program.engine import Engine

AHEAD = 64  # items of a stream that run at once
Message = Mapping[str, Any]


@dataclass(frozen=True)
class TextGenerationOptions(TaskOptions):
    """Generation parameters; None means the model's generation_config.json. `return_full_text` includes the prompt.

    `max_length` and `min_length` count the prompt, `max_new_tokens` and `min_new_tokens` do not.
    """

    max_new_tokens: int | None = None
    max_length: int | None = None
    min_new_tokens: int | None = None
    min_length: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    num_beams: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None
    num_return_sequences: int | None = None
    stop: str | Sequence[str] = ()
    seed: int | None = None
    return_full_text: bool = True

    def keywords(self) -> dict[str, Any]:
        """The keywords of `ctx.generate`."""
        names = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
        skipped = ("seed", "return_full_text", "stop")
        given = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skipped}
        renamed = {names.get(name, name): value for name, value in given.items() if value is not None}
        return renamed | {"stop": self.stop}


class TextGeneration(Task):
    """Continues a text, or answers the messages of a chat: `[{"generated_text": ...}]`."""

    Options = TextGenerationOptions
    default_model: ClassVar[str | None] = "smollm2"
    needs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, spec: PipelineSpec) -> TextGenerationPipeline:
        from headway.program.engine import Engine

        unsupported = {
            "batch_size": spec.batch_size != "auto",
            "compile": spec.compile,
            "backend": spec.backend != "torch",
            "unpadded": spec.unpadded != "auto",
            **dict.fromkeys(spec.parts, True),
        }
        for name, given in unsupported.items():
            if given:
                raise Unsupported(f"{spec.name} runs on Headway's engine, which takes no {name}; leave it out")
        model = spec.model if spec.model is not None else cls.default_model
        task = object.__new__(cls)  # it has no transformers model; only its options are needed
        defaults = task.options(TextGenerationOptions(), spec.options)
        if isinstance(model, Engine):
            return TextGenerationPipeline(model, task, defaults, owns=False)
        assert model is not None
        engine = Engine(model, dtype=spec.dtype, device=spec.device, quantize=spec.quantize)
        return TextGenerationPipeline(engine, task, defaults, owns=True)


class TextGenerationPipeline:
    """The pipeline of `hw.pipeline("text-generation", ...)`; `engine` runs it."""

    name = "text-generation"

    def __init__(self, engine: Engine, task: Task, defaults: TextGenerationOptions, *, owns: bool) -> None:
        self.engine, self.task, self.defaults = engine, task, defaults
        self._loop = _Loop()
        self._finalizer = weakref.finalize(self, _end, self._loop, engine if owns else None)

    def __call__(self, inputs: Any = MISSING, /, *, on_error: str = "raise", **given: Any) -> Any:
        """A list of `{"generated_text": ...}` for a text or a chat; a list of those for a list, else an iterator."""
        if on_error not in ("raise", "return"):
            raise InvalidInput(f"on_error is {on_error!r}; it must be 'raise' or 'return'")
        if inputs is MISSING:
            raise InvalidInput("no input; call it with a text, a chat, a list or an iterable of them")
        options = self.task.options(self.defaults, given)
        if is_prompt(inputs) or not hasattr(inputs, "__iter__"):
            return self._one(inputs, options, on_error)
        results = self._stream(inputs, options, on_error)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    async def submit(self, item: Any, /, **given: Any) -> list[dict[str, Any]]:
        """The same for one item, from any event loop."""
        return await self._generate(item, self.task.options(self.defaults, given))

    def _one(self, item: Any, options: TextGenerationOptions, on_error: str) -> Any:
        try:
            return self._loop.start(self._generate(item, options)).result()
        except Exception as error:
            if on_error == "raise":
                raise
            return error

    def _stream(self, source: Iterable[Any], options: TextGenerationOptions, on_error: str) -> Iterator[Any]:
        pending: deque[Future[Any]] = deque()
        items, source_error, index, read = iter(source), None, 0, 0
        exhausted = False
        try:
            while True:
                while not exhausted and len(pending) < AHEAD:
                    try:
                        item = next(items)
                    except StopIteration:
                        exhausted = True
                    except Exception as error:  # raised after the results that come before it
                        exhausted, source_error = True, error
                    else:
                        read += 1
                        pending.append(self._loop.start(self._generate(item, options)))
                if not pending:
                    break
                try:
                    result = pending.popleft().result()
                except Exception as error:
                    if on_error == "raise":
                        raise item_failed(error, index) from error
                    result = error
                yield result
                index += 1
        finally:
            for future in pending:
                future.cancel()
        if source_error is not None:
            raise item_failed(source_error, read) from source_error

    async def _generate(self, item: Any, options: TextGenerationOptions) -> list[dict[str, Any]]:
        async with self.engine.context(seed=options.seed) as ctx:
            if isinstance(item, str):
                if not item:
                    raise InvalidInput("an empty text cannot be continued; pass a text with something in it")
                ctx.fill(item)
            else:
                for message in checked_chat(item):
                    {"system": ctx.system, "user": ctx.user, "assistant": ctx.assistant}[message["role"]](
                        message["content"]
                    )
            keywords = options.keywords()
            several = {"num_return_sequences", "num_beams"} & set(keywords)
            generation = ctx.generate(**keywords)
            texts = await generation.texts() if several else [await generation.text()]  # type: ignore[attr-defined]
        return [{"generated_text": self._joined(item, text, options)} for text in texts]

    def _joined(self, item: Any, text: str, options: TextGenerationOptions) -> Any:
        if not options.return_full_text:
            return text
        return item + text if isinstance(item, str) else [*item, {"role": "assistant", "content": text}]

    def stats(self) -> dict[str, float]:
        """The engine's statistics."""
        return {name: float(value) for name, value in vars(self.engine.stats()).items()}

    def close(self) -> None:
        """End the pipeline, and its engine unless it is the caller's."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TextGenerationPipeline({self.engine.info.name})"


def is_prompt(value: Any) -> bool:
    """Whether `value` is one text or one chat."""
    if isinstance(value, str):
        return True
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(part, Mapping) for part in value)


def checked_chat(item: Any) -> Sequence[Message]:
    """The messages of a chat: dicts with `role` and `content`."""
    if not is_prompt(item):
        raise wrong_type(item, "a text or a chat")
    for message in item:
        if set(message) != {"role", "content"} or message["role"] not in ("system", "user", "assistant"):
            raise InvalidInput(
                f"{dict(message)!r:.80} is not a message: it must have a role (system, user or assistant) and content"
            )
        check_text(message["content"], "a message's content")
    return item


class _Loop:
    """An event loop in its own thread, started on first use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closed = False

    def start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        with self._lock:
            if self._closed:
                work.close()
                raise Closed("this pipeline is closed; create a new one")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name="headway-generation", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            loop, thread = self._loop, self._thread
        if loop is not None and thread is not None:
            loop.call_soon_threadsafe(loop.stop)
            if thread is not threading.current_thread():
                thread.join()
            loop.close()


def _end(loop: _Loop, engine: Any) -> None:
    loop.close()
    if engine is not None:
        engine.close()
