"""Text generation: decoders on Headway's engine, with the interface of a pipeline.

The engine does the batching: each item of a list, a stream or a `submit` call is a program of its own. Defaults are
those of transformers' pipeline: what neither the call nor the model's generation_config.json sets is drawn at
temperature 0.7 among the 50 likeliest tokens, 256 tokens at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import warnings
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from headway.base.closing import Closing
from headway.base.errors import InvalidInput, Unsupported
from headway.base.specs.logits_rules import SWITCHES
from headway.base.specs.probes import Ranking
from headway.base.text import short_repr
from headway.pipelines.arguments import INPUTS, call_options
from headway.pipelines.generation import causal
from headway.pipelines.generation.causal import Continued
from headway.pipelines.generation.decoder_model import decoder_model, remove
from headway.pipelines.generation.decoder_options import TextGenerationOptions, merged_options, settled_lengths
from headway.pipelines.generation.loop_thread import LoopThread
from headway.pipelines.outputs import ModelOutput
from headway.pipelines.stream import item_failed
from headway.pipelines.task import MISSING, ModelInputs, Task, check_text, known_options, wrong_type
from headway.program.generation.stops import listed_stops

if TYPE_CHECKING:
    from headway.pipelines.factory import PipelineSpec
    from headway.program.context import Context
    from headway.program.engine import Engine

AHEAD = 64  # items of a stream that run at once, unless `batch_size` sets it
TEMPERATURE, TOP_K = 0.7, 50  # of transformers' pipeline, if neither the call nor the model's files set them
DRAWING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff")
Message = Mapping[str, Any]


class TextGeneration(Task):
    """Continues a text, or answers the messages of a chat: `[{"generated_text": ...}]`."""

    Options = TextGenerationOptions
    default_model: ClassVar[str | None] = "smollm2"
    needs: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, spec: PipelineSpec) -> TextGenerationPipeline:
        from headway.program.engine import Engine

        unsupported = {
            "compile": spec.compile,
            "backend": spec.backend != "torch",
            "unpadded": spec.unpadded != "auto",
            **dict.fromkeys(set(spec.parts) - {"tokenizer"}, True),
        }
        for name, given in unsupported.items():
            if given:
                raise Unsupported(f"{spec.name} runs on Headway's engine, which takes no {name}; leave it out")
        task = object.__new__(cls)  # it has no transformers model; only its options are needed
        rows = None if spec.batch_size == "auto" else spec.batch_size
        base = TextGenerationOptions(batch_size=rows)  # type: ignore[arg-type]  # checked there
        defaults = task.options(base, call_options(spec.options, known_options(base)))
        if isinstance(spec.model, Engine):
            if spec.parts:
                raise Unsupported("an engine has its own tokenizer; leave tokenizer= out, or pass the model's folder")
            return TextGenerationPipeline(spec.model, task, defaults, owns=False)
        wanted = spec.model if spec.model is not None else cls.default_model
        model, folder = decoder_model(wanted, spec.parts.get("tokenizer"))
        try:
            engine = Engine(model, dtype=spec.dtype, device=spec.device, quantize=spec.quantize)
        except BaseException:
            remove(folder)
            raise
        return TextGenerationPipeline(engine, task, defaults, owns=True, folder=folder)

    def options(self, base: Any, given: Mapping[str, Any]) -> Any:
        return super().options(base, settled_lengths(base, merged_options(given)))


class TextGenerationPipeline(Closing):
    """The pipeline of `hw.pipeline("text-generation", ...)`; `engine` runs it.

    By hand, as in every pipeline: `preprocess` → ModelInputs of token ids, `forward` → the output of a CausalLM, and
    `generate` → token ids, or all that transformers' `generate` can return.
    """

    task = "text-generation"

    def __init__(
        self, engine: Engine, task: Task, defaults: TextGenerationOptions, *, owns: bool, folder: Path | None = None
    ) -> None:
        self.engine, self.implementation, self.defaults = engine, task, defaults
        self._loop = LoopThread()
        self._finalizer = weakref.finalize(self, _end, self._loop, engine if owns else None, folder)
        self._tokenizer: Any = None

    def __call__(self, inputs: Any = MISSING, /, *, on_error: str = "raise", **given: Any) -> Any:
        """A list of `{"generated_text": ...}` for a text or a chat; a list of those for a list, else an iterator."""
        if on_error not in ("raise", "return"):
            raise InvalidInput(f"on_error is {short_repr(on_error)}; it must be 'raise' or 'return'")
        if inputs is MISSING:
            inputs = next((given.pop(name) for name in INPUTS if name in given), MISSING)
        if inputs is MISSING:
            raise InvalidInput("no input; call it with a text, a chat, a list or an iterable of them")
        options = self._options(given)
        if is_prompt(inputs) or not hasattr(inputs, "__iter__") or getattr(inputs, "ndim", 1) == 0:
            return self._one(inputs, options, on_error)
        results = self._stream(inputs, options, on_error)
        return list(results) if isinstance(inputs, (list, tuple)) else results

    def predict(self, X: Any, /) -> Any:
        """The same as a call, by the name that scikit-learn has for it."""
        return self(X)

    transform = predict

    async def submit(self, item: Any, /, **given: Any) -> list[dict[str, Any]]:
        """The same for one item, from any event loop."""
        return await self._results(item, self._options(given))

    # -- step by step --------------------------------------------------------------------------------------------------

    def preprocess(self, items: Any, **given: Any) -> ModelInputs:
        """The token ids of one text or chat, or of a list of them: [R, T], padded at the beginning."""
        options = self._options(given)
        several = isinstance(items, (list, tuple)) and not is_prompt(items)
        return self._loop.start(self._preprocess(items if several else [items], options)).result()

    async def _preprocess(self, items: Sequence[Any], options: TextGenerationOptions) -> ModelInputs:
        if not items:
            raise InvalidInput("the list is empty; pass at least one text or chat")
        rows = []
        for item in items:
            async with self.engine.context() as ctx:
                self._write(ctx, item, options)
                rows.append(list(ctx.tokens))
        return causal.batch_of(rows, self._pad_id(options))

    def forward(self, inputs: Any, /, **parameters: Any) -> Any:
        """The output of a CausalLM: logits [R, T, V], with `labels=` a loss, and hidden states and attentions as asked.

        `inputs` are texts, the ModelInputs of `preprocess`, or tensors by name (`input_ids`, `attention_mask`).
        """
        causal.check_forward(parameters)
        return self._loop.start(causal.forward(self.engine, self._tensors(inputs), parameters)).result()

    def generate(self, inputs: Any, /, **parameters: Any) -> Any:
        """Token ids [R × sequences of each, L], or a ModelOutput with `return_dict_in_generate=True`.

        That has `sequences` and, as asked, `scores`, `logits`, `hidden_states` and `attentions` of each step.
        """
        names = (*causal.OUTPUTS, "return_dict_in_generate")
        flags = {name: parameters.pop(name) for name in names if name in parameters}
        for name, value in flags.items():
            causal.check_flag(name, value)
            if value and not flags.get("return_dict_in_generate"):
                raise InvalidInput(f"{name} needs return_dict_in_generate=True; pass it too")
        options = self._options(parameters)
        return self._loop.start(self._by_hand(self._tensors(inputs), options, flags)).result()

    async def _by_hand(
        self, inputs: Mapping[str, Any], options: TextGenerationOptions, flags: Mapping[str, Any]
    ) -> Any:
        padded = causal.PaddedRows.of(inputs)
        continued = await asyncio.gather(*(self._continued(i, row, options) for i, row in enumerate(padded.rows())))
        every: list[Continued] = [one for some in continued for one in some]
        sequences = causal.sequences_of(padded, every, self._pad_id(options))
        if not flags.get("return_dict_in_generate"):
            return sequences
        if (options.num_beams or 1) > 1 and any(flags.get(name) for name in causal.OUTPUTS):
            raise Unsupported(
                "scores, hidden states and attentions of a beam search are not kept; call .forward on its sequences"
            )
        more = await causal.outputs_of_generate(self.engine, padded, every, flags, self._processing(options, padded))
        return ModelOutput({"sequences": sequences, **more})

    async def _continued(self, row: int, ids: Sequence[int], options: TextGenerationOptions) -> list[Continued]:
        async with self.engine.context(seed=options.seed) as ctx:
            ctx.fill(ids)
            sequences = await self._generate(ctx, "", options, ends=True)
        return [Continued(row, tuple(ids), tokens) for tokens, _ in sequences]

    def _processing(self, options: TextGenerationOptions, padded: causal.PaddedRows) -> causal.Processing:
        settled = self._settled(options)
        file = self.engine.generation_defaults.overridden(
            **{name: getattr(settled, name) for name in ("no_repeat_ngram_size", "min_new_tokens", "min_length")}
        )
        for name in ("bad_words_ids", "sequence_bias", *SWITCHES.values()):
            if getattr(settled, name) or getattr(file, name, None):
                raise Unsupported(f"{name} cannot be given where scores are returned; leave one of them out")
        drawing = {name: getattr(settled, name) for name in (*DRAWING, "do_sample", "repetition_penalty")}
        return causal.Processing(
            sampler=self.engine.generation_defaults.sampler(**drawing),
            no_repeat_ngram_size=file.value("no_repeat_ngram_size"),
            min_tokens=file.min_tokens(padded.ids.shape[1]),
            end_ids=self._end_ids(options),
        )

    def _tensors(self, inputs: Any) -> Mapping[str, Any]:
        import torch

        if isinstance(inputs, ModelInputs):
            return inputs.inputs
        if isinstance(inputs, torch.Tensor):
            return {"input_ids": inputs}
        return inputs if isinstance(inputs, Mapping) else self.preprocess(inputs).inputs

    # -- one item ------------------------------------------------------------------------------------------------------

    def _options(self, given: Mapping[str, Any]) -> TextGenerationOptions:
        return self.implementation.options(self.defaults, call_options(given, known_options(self.defaults)))

    def _one(self, item: Any, options: TextGenerationOptions, on_error: str) -> Any:
        try:
            return self._loop.start(self._results(item, options)).result()
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
                while not exhausted and len(pending) < (options.batch_size or AHEAD):
                    try:
                        item = next(items)
                    except StopIteration:
                        exhausted = True
                    except Exception as error:  # raised after the results that come before it
                        exhausted, source_error = True, error
                    else:
                        read += 1
                        pending.append(self._loop.start(self._results(item, options)))
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

    async def _results(self, item: Any, options: TextGenerationOptions) -> list[dict[str, Any]]:
        async with self.engine.context(seed=options.seed) as ctx:
            self._write(ctx, item, options)
            prompt = ctx.tokens
            tail = item if isinstance(item, str) else ""
            ids = options.return_tensors or options.eos_ids is not None
            sequences = await self._generate(ctx, tail, options, ends=bool(ids))
        if options.return_tensors:
            return [{"generated_token_ids": [*prompt, *tokens]} for tokens, _ in sequences]
        return [{"generated_text": self._joined(item, text, options)} for _, text in sequences]

    def _write(self, ctx: Context, item: Any, options: TextGenerationOptions) -> None:
        """Put a text or a chat into a context."""
        if isinstance(item, str):
            text = (options.prefix or "") + item
            if not text:
                raise InvalidInput("an empty text cannot be continued; pass a text with something in it")
            ctx.fill(text, special=True)
            return
        messages = checked_chat(item)
        continues = self._continues(messages, options)
        for message in messages[:-1] if continues else messages:
            {"system": ctx.system, "user": ctx.user, "assistant": ctx.assistant}[message["role"]](message["content"])
        ctx.cue()
        if continues:
            ctx.fill(messages[-1]["content"])

    def _continues(self, messages: Sequence[Message], options: TextGenerationOptions) -> bool:
        """Whether the last message is continued, rather than answered."""
        last = options.continue_final_message
        return messages[-1]["role"] == "assistant" if last is None else last

    async def _generate(
        self, ctx: Context, tail: str, options: TextGenerationOptions, *, ends: bool
    ) -> list[tuple[tuple[int, ...], str]]:
        """The new tokens and the text of each sequence; with `ends` the end token is among them, as in transformers.

        `tail` is the text that a stop string may begin in.
        """
        keywords: dict[str, Any] = dict(self._settled(options).keywords())
        end_ids = self._end_ids(options)
        keywords |= {"stop": [*listed_stops(options.stop), *end_ids]}
        if {"num_return_sequences", "num_beams"} & set(keywords):
            if options.ends_after:
                raise Unsupported(
                    "stop_strings cannot be given with several sequences; use stop=, which leaves them out"
                )
            sequences = await ctx.generate(**keywords).sequences()  # type: ignore[attr-defined]
            return [self._finished(one.tokens, one.text, one.finish, None, options, ends=ends) for one in sequences]
        unclear = ends and (len(end_ids) > 1 or bool(options.stop))  # which token it ends with
        generation = ctx.generate(**keywords, probe=Ranking() if unclear else None)
        tokens: list[int] = []
        text, last = "", None
        async for step in generation:
            tokens += step.tokens
            before, text = len(tail + text), text[: len(text) - step.retracted] + step.text
            if step.probes:
                last = step.probes[-1].drawn[0].id
            if any((tail + text).find(stop, max(0, before - len(stop) + 1)) >= 0 for stop in options.ends_after):
                return [self._finished(tuple(tokens), text, "stop", None, options, ends=False)]
        return [self._finished(tuple(tokens), text, generation.finish, last, options, ends=ends)]

    def _finished(
        self, tokens: tuple[int, ...], text: str, finish: str | None, last: int | None, options: Any, *, ends: bool
    ) -> tuple[tuple[int, ...], str]:
        end_ids = self._end_ids(options)
        if ends and end_ids and finish in ("eos", "stop"):
            end = end_ids[0] if last is None and not options.stop else last
            if end in end_ids:
                tokens = (*tokens, end)
        tokenizer = self.engine.tokenizer
        special = any(id in tokenizer.special_ids for id in tokens)
        if options.skip_special_tokens is False:
            text = tokenizer.decode(tokens)
        elif special or (ends and options.eos_ids is not None):
            text = tokenizer.decode(tokens, skip_special=True)
        return tokens, text

    def _joined(self, item: Any, text: str, options: TextGenerationOptions) -> Any:
        if options.return_full_text is False:
            return text
        if isinstance(item, str):
            return item + text
        if self._continues(item, options):
            return [*item[:-1], {**item[-1], "content": item[-1]["content"] + text}]
        return [*item, {"role": "assistant", "content": text}]

    def _settled(self, options: TextGenerationOptions) -> TextGenerationOptions:
        """The options with the defaults of transformers' pipeline; without sampling, how to draw has no effect."""
        file = self.engine.generation_defaults
        draws = next((value for value in (options.do_sample, file.do_sample) if value is not None), True)
        if not draws:
            given = [name for name in DRAWING if getattr(options, name) is not None]
            if given:
                named = ", ".join(f"{name}={short_repr(getattr(options, name))}" for name in given)
                warnings.warn(f"{named} has no effect with do_sample=False", stacklevel=2)
            return dataclasses.replace(options, do_sample=False, **dict.fromkeys(given))
        defaults = {"temperature": TEMPERATURE, "top_k": TOP_K}
        open_ = {n: v for n, v in defaults.items() if getattr(options, n) is None and getattr(file, n) is None}
        return dataclasses.replace(options, do_sample=True, **open_)

    def _end_ids(self, options: TextGenerationOptions) -> tuple[int, ...]:
        """As in transformers: the call's, or those of generation_config.json; the model's own where there is none."""
        own = (options.eos_ids, self.engine.generation_defaults.eos_ids)
        return next((ids for ids in own if ids is not None), self.engine.eos_ids)

    def _pad_id(self, options: TextGenerationOptions) -> int:
        """What fills up shorter rows: as given, or of the model's files, or the end token."""
        own = (options.pad_token_id, self.engine.generation_defaults.pad_id, *self._end_ids(options))
        return next((id for id in own if id is not None), 0)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def tokenizer(self) -> Any:
        """transformers' tokenizer for a model folder, so that code that uses it runs; the engine's for a GGUF file."""
        if self._tokenizer is None:
            path = self.engine.info.path
            if path is None or not Path(path).is_dir():
                self._tokenizer = self.engine.tokenizer
            else:
                from headway.pipelines.backends.loading import transformers

                self._tokenizer = transformers().AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        return self._tokenizer

    @property
    def model(self) -> DecoderModel:
        """What code for transformers reads from a pipeline's model: its configs, device, dtype and `generate`."""
        return DecoderModel(self)

    @property
    def device(self) -> Any:
        import torch

        return torch.device(self.engine.info.device)

    @property
    def dtype(self) -> Any:
        import torch

        return getattr(torch, self.engine.info.dtype)

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Copy the model's files to a folder that `hw.pipeline`, `hw.Engine` and transformers can load."""
        path = self.engine.info.path
        if path is None:
            raise Unsupported("this engine's model is in memory only; there is no file to copy")
        if Path(path).is_file():
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder)
        else:
            shutil.copytree(path, folder, dirs_exist_ok=True)

    def stats(self) -> dict[str, float]:
        """The engine's statistics."""
        return {name: float(value) for name, value in vars(self.engine.stats()).items()}

    def close(self) -> None:
        """End the pipeline, and its engine unless it is the caller's."""
        self._finalizer()

    def __repr__(self) -> str:
        return f"TextGenerationPipeline({self.engine.info.name})"


class DecoderModel:
    """The engine's model as transformers shows one. `config` and `generation_config` need the model's folder."""

    def __init__(self, pipeline: TextGenerationPipeline) -> None:
        self.generate, self.forward = pipeline.generate, pipeline.forward
        self.device, self.dtype = pipeline.device, pipeline.dtype
        self._path = pipeline.engine.info.path

    @property
    def config(self) -> Any:
        return self._read("AutoConfig")

    @property
    def generation_config(self) -> Any:
        return self._read("GenerationConfig")

    def _read(self, kind: str) -> Any:
        from headway.pipelines.backends.loading import transformers

        if self._path is None or not Path(self._path).is_dir():
            raise Unsupported("a GGUF file has no config of transformers; engine.config has the model's shape")
        return getattr(transformers(), kind).from_pretrained(self._path)


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
                f"{short_repr(dict(message))} is not a message: it must have a role (system, user or assistant) "
                "and content"
            )
        check_text(message["content"], "a message's content")
    return item


def _end(loop: LoopThread, engine: Any, folder: Path | None) -> None:
    loop.close()
    if engine is not None:
        engine.close()
    remove(folder)
