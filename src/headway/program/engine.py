"""The engine: one loaded model, its KV cache and its loop. Programs are functions of it."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar

from headway.base.arrays import STORED
from headway.base.checks import check_flag, check_fraction, check_integer, check_number, check_text
from headway.base.closing import Closing
from headway.base.errors import Closed, InvalidInput, RankLost, Unsupported
from headway.base.rng import LIMIT
from headway.base.specs.adapters import AdapterMix
from headway.base.system.device import MAX_RANKS, AnyDevice
from headway.base.text import short_repr
from headway.kv.allocator import Allocator
from headway.kv.pool import Pool
from headway.kv.states import LEAST_PLACES, STATE_WIDTH, States, pages_between
from headway.kv.table import PageTable
from headway.models.adapters.adapter import Adapter
from headway.models.adapters.bound import BoundAdapter
from headway.models.capabilities import Capabilities
from headway.models.config import ModelConfig
from headway.models.quantized.cpu import QuantizedDecoder
from headway.models.weights.load import LoadProgress
from headway.program.adapters import AdapterArgument, mix_of
from headway.program.chat.conversation import ChatWriter
from headway.program.checks.ids import token_ids
from headway.program.context import Context, checked_bid
from headway.program.events import EventStream
from headway.program.figures import EngineInfo, EngineStats, engine_stats
from headway.program.generation.defaults import GenerationDefaults
from headway.program.kv_cache.idle import give_back_when_idle
from headway.program.kv_cache.page_map import PageMap, map_pages
from headway.program.kv_cache.pool_size import PoolSize
from headway.program.kv_cache.prefix_cache import PrefixCache
from headway.program.kv_cache.snapshots import Snapshots, snapshot_folder
from headway.program.kv_cache.tiers import STAGING, TierSizes, open_tiers
from headway.program.model.loaded import EngineModel
from headway.program.model.weights import sleep, update_weights, wake
from headway.program.run_in_thread import run_program
from headway.program.step_limits import row_budgets, step_target
from headway.runtime.adapters import DeviceWeights, LoadedAdapters
from headway.runtime.device import dtype_name, pick_threads, synchronizer
from headway.runtime.loop import Loop
from headway.runtime.memory import memory_share, running_out
from headway.runtime.profile import Profile, Profiler, Sample
from headway.runtime.runners.base import Runner
from headway.runtime.runners.select import Backend
from headway.runtime.scheduler.cache_tiers import CacheTiers
from headway.runtime.scheduler.step_time import StepTime

if TYPE_CHECKING:
    from headway.models.decoder import Decoder
    from headway.text.stream import TextStream
    from headway.text.templates.chat_template import ChatTemplate
    from headway.text.tokenizer import Tokenizer

Args = ParamSpec("Args")
Result = TypeVar("Result")
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()  # for monitors
_engines_lock = threading.Lock()


class Engine(Closing):
    """One model, ready to compute. Create it, `run` programs, `close` it (or use it in a `with`)."""

    def __init__(
        self,
        model: str | Path | Decoder | QuantizedDecoder | Backend,
        *,
        dtype: str = "auto",
        device: str = "auto",
        threads: int | None = None,
        page_size: int = 16,
        pages: int | None = None,
        max_batch_tokens: int | None = None,
        step_ms: float | None = None,
        memory: int | str | None = None,
        memory_fraction: float | None = None,
        max_grammar_seconds: float = 10.0,
        quantize: str | None = None,
        kv_dtype: str = "auto",
        deterministic: bool = False,
        trim: bool = True,
        tensor_parallel: int = 1,
        snapshots: str | Path | None = None,
        cache_host: int | str | None = None,
        cache_folder: str | Path | None = None,
        cache_folder_size: int | str | None = None,
        runner: Runner | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load a model: a name, a folder, a .gguf file or a hub id, or a decoder that is in memory already (a `Backend`
        is one with the runner that computes it).

        The KV cache has `pages` of `page_size` slots (by default as many as fit); a step computes at most
        `max_batch_tokens` rows. While sequences decode, prompts join their steps with as many tokens as make a step of
        `step_ms` milliseconds; by default, on a CPU, of three times what it takes without them. `memory` is how much
        of the device's memory Headway may use for weights, pages and graphs: bytes, or text like "2G";
        `memory_fraction` is the same as a fraction (0.9 on a CUDA device; on a CPU, pages take an eighth of the memory
        by default, and cached ones go back when the engine is idle).
        `max_grammar_seconds` is how long following a grammar may take for one generation. `kv_dtype` is what keys and
        values are stored in, on a CPU float32, float16 or bfloat16; auto is float16 for quantized weights on a CPU and
        what the model computes in for others. With `deterministic` a row's bits depend on nothing but the row.
        `trim=False` keeps masked pages in attention calls.
        `tensor_parallel` splits every layer over so many processes, each with a share of weights and pages: on a CPU
        all on this machine, with CUDA each on a device of its own.
        `snapshots` is where durable snapshots are: a folder, or an fsspec URL such as s3://bucket/folder, that engines
        of one model may share. It is trusted like the weights.
        `cache_host` is how much host memory keeps pages that leave the prefix cache, in bytes or as text like "2G", and
        `cache_folder` a folder for those that leave host memory, of `cache_folder_size` (16G).
        `runner` computes batches in place of the model (headway.testing).
        `progress` is called with the layers loaded and their total; without, a notebook shows a bar.
        """
        deterministic, trim = check_flag(deterministic, "deterministic"), check_flag(trim, "trim")
        count = pick_threads(threads)
        page_size = check_integer(page_size, "page_size", 1, 1024)
        fraction = check_fraction(memory_fraction)
        self._max_grammar_seconds = _check_seconds(max_grammar_seconds)
        self._snapshot_folder = snapshot_folder(snapshots)
        ranks = check_integer(tensor_parallel, "tensor_parallel", 1, MAX_RANKS)
        if ranks > 1 and (runner is not None or isinstance(model, Backend)):
            raise Unsupported("tensor_parallel is for engines with a runner of their own; this one was given another")
        tiers = TierSizes.of(cache_host, cache_folder, cache_folder_size)
        tiers.check(tensor_parallel=ranks, has_runner=runner is not None)
        loaded = self._model = EngineModel(model, dtype=dtype, device=device, quantize=quantize, tensor_parallel=ranks)
        budget, mixed = row_budgets(max_batch_tokens, loaded.device)
        step_time = step_target(step_ms, paced=loaded.device.type == "cpu" and runner is None)
        fraction = memory_share(memory, fraction, loaded.device)
        sizing = PoolSize.begin(loaded.device, pages=pages, fraction=fraction, page_size=page_size, rows=budget)
        loaded.load(threads=count, has_runner=runner is not None, progress=progress)
        try:
            self._open(
                count, sizing, runner, kv_dtype=kv_dtype, deterministic=deterministic, trim=trim,
                budget=budget, mixed=mixed, step_time=step_time, tiers=tiers,
            )  # fmt: skip
        except BaseException:
            loaded.close()
            raise
        with _engines_lock:
            _engines.add(self)

    def _open(
        self,
        count: int,
        sizing: PoolSize,
        runner: Runner | None,
        *,
        kv_dtype: str,
        deterministic: bool,
        trim: bool,
        budget: int,
        mixed: int,
        step_time: StepTime | None,
        tiers: TierSizes,
    ) -> None:
        """Take the memory of the pages, and start the loop."""
        loaded, page_size = self._model, sizing.page_size
        loaded.backend.use_threads(count)
        decoder = loaded.backend.decoder
        self.config: ModelConfig = loaded.config
        self._kv_dtype = loaded.backend.kv_dtype(kv_dtype)

        same = decoder if loaded.backend.ranks is None else loaded.backend

        def small(few: int) -> Engine:
            return Engine(
                same, threads=count, page_size=page_size, pages=few, max_batch_tokens=budget,
                kv_dtype=kv_dtype, deterministic=deterministic, trim=trim,
            )  # fmt: skip

        with running_out(decoder.device, "trying out the largest step"):
            trial, more = small if runner is None else None, loaded.backend.reference_bytes
            more += STAGING if tiers.host and decoder.device.type == "cuda" else 0
            total, self._pool_reason = sizing.pick(
                decoder, kv_dtype=self._kv_dtype, in_memory=loaded.in_memory, small=trial, more=more,
                config=loaded.config if decoder.device.type == "cpu" else None,
            )  # fmt: skip
        self._page_size, self._threads, self.deterministic = page_size, count, deterministic
        self._allocator, self._states = Allocator(total), self._new_states(total)
        self._weights_lock = threading.Lock()  # one change of weights or memory at a time
        self._pool: Pool | None = self._new_pool()
        self._profiler = Profiler(synchronizer(decoder.device), str(decoder.device))
        self._runner_is_given = runner is not None
        if runner is None:
            runner = self._new_runner()
        self._tiers = open_tiers(self, tiers)
        self._loop = Loop(
            runner,
            self._allocator,
            budget=budget,
            mixed_budget=mixed,
            step_time=step_time,
            trim=trim,
            positions=any(window is not None for window in self.config.windows),
            states=self._states,
            on_idle=partial(give_back_when_idle, weakref.ref(self)),
            on_start=partial(loaded.backend.use_threads, count),
        )
        if self._tiers is not None:
            self._loop.use_tiers(self._tiers)
        weakref.finalize(self, _end, self._loop, loaded, self._tiers)  # when it is garbage, or still open at exit
        if loaded.backend.ranks is not None:
            loaded.backend.ranks.tell(partial(_lose, weakref.ref(self._loop)))
        self._adapters = LoadedAdapters(self.config, partial(_upload, self._loop, decoder.device))
        self._snapshots = Snapshots(self, self._snapshot_folder)

    def __repr__(self) -> str:
        decoder, allocator = self._backend.decoder, self._allocator
        dtype, state = dtype_name(decoder.dtype), "open" if self.alive else "closed"
        pages = f"{allocator.free} of {allocator.total} pages free"
        return f"<Engine {self._model.name!r}: {dtype} on {decoder.device}, {pages}, {state}>"

    def __reduce__(self) -> NoReturn:
        raise Unsupported(
            "an engine cannot be pickled or copied: it owns threads and a device's memory; give the other process the "
            "model's name and create an engine there"
        )

    # -- programs --------------------------------------------------------------------------------------------------

    def run(
        self,
        program: Callable[..., Awaitable[Result]],
        *args: Any,
    ) -> Result:
        """Run `program(engine, *args)` to its end and return its value; works where an event loop runs already."""
        return run_program(program, self, *args)

    def context(
        self,
        *,
        seed: int | None = None,
        priority: float = 0.0,
        salt: str = "",
        token_budget: int | None = None,
        deadline: float | None = None,
    ) -> Context:
        """An empty context.

        `seed` is for samplers that have none of their own; `priority` is its bid in the queue; contexts of different
        `salt` never share cached pages; `token_budget` bounds the tokens it may compute, `deadline` its seconds.
        """
        if seed is not None:
            seed = check_integer(seed, "seed", high=LIMIT - 1)
        check_text(salt, "salt")
        if deadline is not None and check_number(deadline, "deadline") <= 0:
            raise InvalidInput(f"deadline is {short_repr(deadline)}; it must be a number of seconds above 0")
        with self._lock:
            self._loop.check_open()
            table = PageTable(self._allocator, self._page_size, salt, self._states)
            table.bid = checked_bid(priority)
            if token_budget is not None:
                table.token_budget = check_integer(token_budget, "token_budget", 1, 1 << 40)
            if deadline is not None:
                table.deadline = time.monotonic() + deadline
            return Context(self, table, seed)

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache: counts, pins, clearing."""
        return PrefixCache(self)

    @property
    def page_size(self) -> int:
        """Slots in a page."""
        return self._page_size

    @property
    def pages(self) -> int:
        """Pages in the KV cache."""
        return self._allocator.total

    def events(self, limit: int = 1024) -> EventStream:
        """Events from now on, one for each step: iterate in a thread or with `async for`."""
        return EventStream(self._loop, limit)

    def open(self, name: str) -> Context | None:
        """A fork of the context saved under a name, or None."""
        return self._snapshots.open(name)

    def take(self, name: str) -> Context | None:
        """The context saved under a name, which is then no longer saved; or None."""
        return self._snapshots.take(name)

    def delete(self, name: str) -> bool:
        """Forget the context saved under a name; False when there was none."""
        return self._snapshots.delete(name)

    # -- adapters --------------------------------------------------------------------------------------------------

    def _mix(self, adapter: AdapterArgument | None) -> AdapterMix | None:
        """The argument `adapter=`, read and loaded."""
        return mix_of(self, adapter)

    def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter now, to stay until `unload_adapter`. A pass that names one loads it by itself."""
        self._adapters.keep(adapter)

    def unload_adapter(self, adapter: Adapter) -> None:
        """Let go of an adapter. Passes, contexts and snapshots that need it keep it until they end."""
        self._adapters.drop(adapter)

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """V: the width of the logits."""
        return self.config.vocab_size

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model takes text, and not only token ids."""
        return self._model.text.tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises when its folder has none."""
        tokenizer = self._model.text.tokenizer
        if tokenizer is None:
            raise Unsupported(f"the model {self._model.name!r} has no tokenizer; give token ids instead of text")
        return tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template, or None."""
        return self._model.text.template

    @cached_property
    def chat_writer(self) -> ChatWriter:
        """Turns messages into token ids by the chat template, as the chat verbs do."""
        return ChatWriter(self.chat_template, self.tokenizer)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The model's end tokens; none when it has no tokenizer."""
        tokenizer = self._model.text.tokenizer
        return () if tokenizer is None else tokenizer.eos_ids

    @property
    def generation_defaults(self) -> GenerationDefaults:
        """The model's generation_config.json; all values are None if it has no such file."""
        return self._model.generation_defaults

    def stream(self, *, after: Sequence[int] = ()) -> TextStream:
        """A decoder for tokens that arrive one by one, at the beginning of a text or `after` other tokens."""
        from headway.text.stream import TextStream

        if not isinstance(after, list | tuple):  # those are read from their end, as far as it takes
            after = token_ids(after, self.vocab_size, "after")
        return TextStream(self.tokenizer, after=after)

    @property
    def info(self) -> EngineInfo:
        """Name, dtype, device, sizes."""
        info = self._model.info(self._threads, self._kv_dtype)
        size = info.kv_bytes_per_token * self._page_size * self._allocator.total
        return replace(info, kv_bytes=size, kv_reason=self._pool_reason)

    @property
    def capabilities(self) -> Capabilities:
        """What computes this model, and what can be done with it; the rest is refused where it is asked for."""
        backend = self._backend
        return Capabilities.of(
            self.config, runner=backend.name, reason=backend.reason, tensor_parallel=backend.tensor_parallel
        )

    @property
    def fingerprint(self) -> str:
        """A strong hash of the weights."""
        return self._model.fingerprint

    # -- weights and memory ----------------------------------------------------------------------------------------

    def update_weights(self, tensors: Mapping[str, Any], contexts: Literal["recompute", "keep"] = "recompute") -> None:
        """Put new weights in place of old ones, between two steps; returns when they are in effect.

            engine.update_weights(model.state_dict())

        Names, shapes and layout are those of a Hugging Face folder; weights that are not given stay. The prefix cache
        is emptied and the fingerprint changes. Contexts with computed slots compute them again before their next pass,
        or keep them as they are. All is checked first: an error changes nothing.
        """
        self._check_own_runner("update_weights")
        with self._weights_lock:
            update_weights(self, tensors, contexts)

    def sleep(self) -> None:
        """Give the memory of the pages back and, on a CUDA device, that of the weights, which wait in host memory.

        Contexts keep their tokens and come back with `wake()`, with the same results; those that cannot be computed
        again wait in host memory. Passes that are queued wait; new ones are refused.
        """
        self._check_own_runner("sleep")
        if self._backend.ranks is not None and self._backend.decoder.device.type == "cuda":
            raise Unsupported("sleep is not supported with tensor_parallel on CUDA devices; close the engine")
        with self._weights_lock:
            sleep(self)

    def wake(self) -> None:
        """Take the memory again, after `sleep()`."""
        with self._weights_lock:
            wake(self)

    @property
    def is_asleep(self) -> bool:
        """Whether it has given its memory back."""
        return self._pool is None

    def _check_own_runner(self, verb: str) -> None:
        if self._runner_is_given:
            raise Unsupported(f"{verb} is for engines with a runner of their own; this one was given another")

    def _new_states(self, pages: int) -> States | None:
        """The places for recurrent state, where the model has such layers: they take no more memory than the pages."""
        config, size = self.config, self._page_size * self.config.kv_values_per_token * STORED[self._kv_dtype].itemsize
        if not config.recurrent_layers:
            return None
        every = pages_between(config.state_values * STATE_WIDTH, size)
        return States(max(LEAST_PLACES, pages // every), every)

    def _new_pool(self) -> Pool:
        """The KV cache in memory, all zeros."""
        decoder, total = self._backend.decoder, self._allocator.total
        with running_out(decoder.device, f"making {total} pages"):
            places = 0 if self._states is None else self._states.total
            return self._backend.new_pool(pages=total, page_size=self._page_size, dtype=self._kv_dtype, places=places)

    def _new_runner(self) -> Runner:
        """What computes, over the weights and pages that there are."""
        assert self._pool is not None
        return self._backend.runner(
            self._pool, self._page_size, deterministic=self.deterministic, profiler=self._profiler
        )

    @property
    def decoder(self) -> Decoder | QuantizedDecoder:
        """The loaded model; another `Engine` of it shares its weights."""
        if self._backend.ranks is not None:
            raise Unsupported(
                f"this engine's process has a share of the model: tensor_parallel is {self._backend.tensor_parallel}; "
                "give another engine the model's name"
            )
        return self._model.decoder

    @property
    def _backend(self) -> Backend:
        return self._model.backend

    @property
    def _lock(self) -> threading.RLock:
        return self._loop.lock  # type: ignore[return-value]

    # -- figures ---------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Pages now, and steps and tokens so far."""
        return engine_stats(self)

    def page_map(self) -> PageMap:
        """The state of every page: free, cached, or held by contexts."""
        return map_pages(self)

    @property
    def busy_since(self) -> float | None:
        """When the running step began, by `time.monotonic()`; None while the engine is idle. Never waits."""
        return self._loop.busy_since

    def enable_profiling(self, *, automatic: bool = True) -> None:
        """Measure every step from now on; `profile()` has the figures.

        Each step is a sample, or with automatic=False all steps until `disable_profiling()` returns them as one.
        """
        check_flag(automatic, "automatic")
        with self._lock:
            self._profiler.enabled, self._profiler.automatic = True, automatic

    def disable_profiling(self) -> Sample | None:
        """Measure no further steps; returns what was measured and is not in a sample yet."""
        with self._lock:
            self._profiler.enabled = False
            return self._profiler.take()

    @property
    def is_profiling(self) -> bool:
        """Whether steps are measured."""
        return self._profiler.enabled

    def profile(self) -> Profile:
        """The measurements so far."""
        return self._profiler.profile()

    # -- ending ----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it can compute: its worker runs and it is not closed."""
        try:
            self._loop.check_open()
        except Closed:
            return False
        return True

    def close(self) -> None:
        """Cancel waiting passes, let the running step end, stop worker and ranks. Contexts saved in memory are gone."""
        self._snapshots.forget_all()
        _end(self._loop, self._model, self._tiers)


def _end(loop: Loop, model: EngineModel, tiers: CacheTiers | None) -> None:
    loop.close()
    if tiers is not None:
        tiers.close()
    model.close()


def _lose(loop: weakref.ref[Loop], error: RankLost) -> None:
    """The ranks have ended before their time, and with them the engine."""
    if (one := loop()) is not None:
        one.lose(error)


def _upload(loop: Loop, device: AnyDevice, adapter: BoundAdapter) -> DeviceWeights:
    """An adapter's weights on the device."""
    with running_out(device, f"loading the adapter {adapter.name!r}"):
        return loop.load_adapter(adapter)


def engines() -> list[Engine]:
    """The engines of this process, in no order, closed ones included while they are referenced."""
    with _engines_lock:
        return list(_engines)


def _check_seconds(value: float) -> float:
    seconds = check_number(value, "max_grammar_seconds")
    if seconds <= 0:
        raise InvalidInput(f"max_grammar_seconds is {short_repr(value)}; it must be a number greater than 0")
    return seconds
