"""The pipeline of models that read a text whole and then write another: calls as ever, and `generate` by hand.

`p(text)` gives what a task promises. `p.generate(...)` is `model.generate` with everything it can return; `p.encode` is
the reading alone, whose states `generate` and `forward` take back so that nothing is read twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.base.errors import InvalidInput, WrongType
from headway.pipelines.backends.forward import accepted, bring_back, to_device
from headway.pipelines.generation.sampling import Draws
from headway.pipelines.outputs import ModelOutput
from headway.pipelines.pipeline import Pipeline
from headway.pipelines.pipeline import _show_attention as show_attention
from headway.pipelines.task import MISSING

if TYPE_CHECKING:
    from headway.pipelines.tasks.seq2seq import Text2TextGeneration

READ = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
BY_HAND = ("return_dict_in_generate", *READ, "encoder_outputs", "decoder_input_ids", "decoder_attention_mask")
STATES = ("last_hidden_state", "hidden_states", "attentions")


class Seq2SeqPipeline(Pipeline):
    """A Pipeline that also reads (`encode`) and writes (`generate`) by hand."""

    task: Text2TextGeneration

    def generate(self, inputs: Any = MISSING, /, *, encoder_outputs: Any = None, **parameters: Any) -> Any:
        """Token ids [items × sequences of each, L], or all that was asked for with `return_dict_in_generate=True`.

        `inputs` are items, a Batch of `preprocess` or tensors by name; `encoder_outputs` are what `encode` gave (or a
        tuple that begins with the last hidden state), and are enough by themselves. Parameters are those of a call,
        and whatever else the model's `generate` takes; anything else is refused.
        """
        known = {field.name for field in fields(self.defaults)}
        options = self.task.options(self.defaults, {k: v for k, v in parameters.items() if k in known})
        extra = {name: value for name, value in parameters.items() if name not in known}
        tensors = self._read_inputs(inputs, encoder_outputs, "generate")
        run = self.task.loaded.run
        run.check({**tensors, **extra}, "generate")
        _check_readings(extra)
        if extra.get("output_attentions"):
            show_attention(run.module)
        settings = self.task.settings(options) | extra
        return self._batcher.call(lambda: self._generated(tensors, settings, options))

    def _generated(self, tensors: Mapping[str, Any], settings: Mapping[str, Any], options: Any) -> Any:
        run, items = self.task.loaded.run, _count(tensors)
        draws = Draws(items, options.seed, run.device) if self.task.writer(options).draws(options) else nullcontext()
        with draws:
            found = run(tensors, method="generate", **settings)
        if isinstance(found, Tensor):
            return bring_back(found)
        return ModelOutput(bring_back({k: plain_cache(v) for k, v in found.items()}))

    def encode(self, inputs: Any, /, **parameters: Any) -> ModelOutput:
        """What the encoder makes of items: `last_hidden_state`, its `attention_mask`, and what was asked for beside."""
        tensors = dict(self._tensors(inputs))
        run = self.task.loaded.run
        encoder: Any = run.module.get_encoder()  # type: ignore[operator]
        for name in {**tensors, **parameters}:
            if name not in accepted(type(encoder)):
                raise InvalidInput(f"{type(encoder).__name__} takes no argument {name!r}")
        if parameters.get("output_attentions"):
            show_attention(run.module)

        def read() -> Any:
            with run.context():
                return bring_back({**encoder(**to_device(tensors, run.device), **parameters)})

        return ModelOutput({**self._batcher.call(read), "attention_mask": tensors.get("attention_mask")})

    def forward(self, inputs: Any = MISSING, /, *, labels: Any = None, **parameters: Any) -> Any:
        """One pass of encoder and decoder: a ModelOutput on the CPU, or a tuple with `return_dict=False`.

        Without `labels`, `decoder_input_ids` or the like, the decoder is given the token it starts from alone. The
        cache is left out unless `use_cache=True`; `encoder_outputs` are what `encode` gave.
        """
        tensors = self._read_inputs(inputs, parameters.pop("encoder_outputs", None), "forward")
        if labels is not None:
            tensors["labels"] = torch.as_tensor(labels)
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            if parameters.get(name) is not None:
                tensors[name] = torch.as_tensor(parameters.pop(name))
        if not {"labels", "decoder_input_ids", "decoder_inputs_embeds"} & {*tensors, *parameters}:
            tensors["decoder_input_ids"] = torch.full((_count(tensors), 1), self.task.start_token)
        as_dict = parameters.pop("return_dict", True)
        parameters.setdefault("use_cache", False)
        run = self.task.loaded.run
        run.check({**tensors, **parameters})
        if parameters.get("output_attentions"):
            show_attention(run.module)
        found = self._batcher.call(
            lambda: bring_back({name: plain_cache(value) for name, value in run(tensors, **parameters).items()})
        )
        output = ModelOutput(found)
        return output if as_dict else output.to_tuple()

    def _read_inputs(self, inputs: Any, encoder_outputs: Any, method: str) -> dict[str, Any]:
        if inputs is MISSING and encoder_outputs is None:
            raise InvalidInput(f"nothing was given; pass items, tensors or encoder_outputs to .{method}")
        tensors = {} if inputs is MISSING else dict(self._tensors(inputs))
        given = encoder_outputs if encoder_outputs is not None else tensors.pop("encoder_outputs", None)
        if given is not None:
            states, mask = _states(given)
            tensors["encoder_outputs"] = states
            if mask is not None:
                tensors.setdefault("attention_mask", mask)
        return tensors

    def _options(self, given: dict[str, Any]) -> Any:
        for name in BY_HAND:
            if name in given:
                raise InvalidInput(f"{name!r} belongs to the model's own generate; call .generate(..., {name}=...)")
        return super()._options(given)


def plain_cache(value: Any) -> Any:
    """A cache as tuples, a layer each: keys and values of the decoder, then those of the encoder; else `value`."""
    if not hasattr(value, "self_attention_cache"):
        return value
    own, cross = value.self_attention_cache.layers, value.cross_attention_cache.layers
    return tuple((mine.keys, mine.values, other.keys, other.values) for mine, other in zip(own, cross))


def _states(given: Any) -> tuple[Any, Tensor | None]:
    """What the encoder said, as transformers passes it on, and its mask if it is there."""
    from transformers.modeling_outputs import BaseModelOutput

    if isinstance(given, Mapping):
        if "last_hidden_state" not in given:
            raise InvalidInput(f"encoder_outputs has {', '.join(map(str, given))}; last_hidden_state is needed")
        return BaseModelOutput(**{name: given[name] for name in STATES if name in given}), given.get("attention_mask")
    if isinstance(given, (tuple, list)) and given and all(isinstance(part, (Tensor, tuple)) for part in given):
        return BaseModelOutput(**dict(zip(STATES, given))), None
    raise WrongType(
        f"encoder_outputs is a {type(given).__name__}; it takes what .encode gave, or a tuple whose first part is the "
        "last hidden state"
    )


def _check_readings(extra: Mapping[str, Any]) -> None:
    if not extra.get("return_dict_in_generate"):
        for name in READ:
            if extra.get(name):
                raise InvalidInput(f"{name} is kept only with return_dict_in_generate=True; pass it too")


def _count(tensors: Mapping[str, Any]) -> int:
    states = tensors.get("encoder_outputs")
    first = states.last_hidden_state if states is not None else next(iter(tensors.values()))
    return len(first)
