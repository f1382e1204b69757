"""The pipeline of encoder-decoder models: the calls of every pipeline, and `generate` and `encode` by hand.

`p(text)` returns the task's result. `p.generate(...)` is `model.generate` with everything it can return. `p.encode`
runs the encoder alone; `generate` and `forward` accept its states, so that no text is encoded twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.base.errors import InvalidInput, WrongType
from headway.pipelines.backends.torch import accepted, to_device, to_host
from headway.pipelines.generation.generate import per_item_sampling
from headway.pipelines.outputs import ModelOutput
from headway.pipelines.pipeline import Pipeline, use_eager_attention
from headway.pipelines.task import MISSING

if TYPE_CHECKING:
    from headway.pipelines.tasks.seq2seq import Text2TextGeneration

OUTPUT_FLAGS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
GENERATE_ONLY = (
    "return_dict_in_generate",
    *OUTPUT_FLAGS,
    "encoder_outputs",
    "decoder_input_ids",
    "decoder_attention_mask",
)
STATES = ("last_hidden_state", "hidden_states", "attentions")


class Seq2SeqPipeline(Pipeline):
    """A Pipeline with the model's own `encode` and `generate`."""

    implementation: Text2TextGeneration

    def generate(self, inputs: Any = MISSING, /, *, encoder_outputs: Any = None, **parameters: Any) -> Any:
        """Token ids [items × sequences of each, L], or a ModelOutput with `return_dict_in_generate=True`.

        `inputs` are items, the ModelInputs of `preprocess` or tensors by name; `encoder_outputs` from `encode` (or a
        tuple that begins with the last hidden state) can replace them. Parameters are those of a call and any others of
        the model's `generate`.
        """
        known = {field.name for field in fields(self.defaults)}
        options = self.implementation.options(self.defaults, {k: v for k, v in parameters.items() if k in known})
        extra = {name: value for name, value in parameters.items() if name not in known}
        tensors = self._inputs_of(inputs, encoder_outputs, "generate")
        backend = self.implementation.loaded.backend
        backend.check({**tensors, **extra}, "generate")
        _check_output_flags(extra)
        if extra.get("output_attentions"):
            use_eager_attention(backend.module)
        keywords = self.implementation.keywords(options) | extra
        return self._batcher.call(lambda: self._generate(tensors, keywords, options))

    def _generate(self, tensors: Mapping[str, Any], keywords: Mapping[str, Any], options: Any) -> Any:
        backend, sampled = self.implementation.loaded.backend, self.implementation.settings(options).samples(options)
        with per_item_sampling(_count(tensors), options, backend.device, enabled=sampled):
            output = backend(tensors, method="generate", **keywords)
        if isinstance(output, Tensor):
            return to_host(output)
        return ModelOutput(to_host({name: plain_cache(value) for name, value in output.items()}))

    def encode(self, inputs: Any, /, **parameters: Any) -> ModelOutput:
        """The encoder's output: `last_hidden_state`, its `attention_mask`, and what the parameters add."""
        tensors = dict(self._tensors(inputs))
        backend = self.implementation.loaded.backend
        encoder: Any = backend.module.get_encoder()  # type: ignore[operator]
        for name in {**tensors, **parameters}:
            if name not in accepted(type(encoder)):
                raise InvalidInput(f"{type(encoder).__name__} takes no argument {name!r}")
        if parameters.get("output_attentions"):
            use_eager_attention(backend.module)

        def run_encoder() -> Any:
            with backend.context():
                return to_host({**encoder(**to_device(tensors, backend.device), **parameters)})

        return ModelOutput({**self._batcher.call(run_encoder), "attention_mask": tensors.get("attention_mask")})

    def forward(self, inputs: Any = MISSING, /, *, labels: Any = None, **parameters: Any) -> Any:
        """One pass of encoder and decoder: a ModelOutput on the CPU, or a tuple with `return_dict=False`.

        Without `labels` or `decoder_input_ids` the decoder gets only its start token. The KV cache is left out unless
        `use_cache=True`; `encoder_outputs` come from `encode`.
        """
        tensors = self._inputs_of(inputs, parameters.pop("encoder_outputs", None), "forward")
        if labels is not None:
            tensors["labels"] = torch.as_tensor(labels)
        for name in ("decoder_input_ids", "decoder_attention_mask"):
            if parameters.get(name) is not None:
                tensors[name] = torch.as_tensor(parameters.pop(name))
        if not {"labels", "decoder_input_ids", "decoder_inputs_embeds"} & {*tensors, *parameters}:
            tensors["decoder_input_ids"] = torch.full((_count(tensors), 1), self.implementation.start_token)
        as_dict = parameters.pop("return_dict", True)
        parameters.setdefault("use_cache", False)
        backend = self.implementation.loaded.backend
        backend.check({**tensors, **parameters})
        if parameters.get("output_attentions"):
            use_eager_attention(backend.module)
        fields = self._batcher.call(
            lambda: to_host({name: plain_cache(value) for name, value in backend(tensors, **parameters).items()})
        )
        output = ModelOutput(fields)
        return output if as_dict else output.to_tuple()

    def _inputs_of(self, inputs: Any, encoder_outputs: Any, method: str) -> dict[str, Any]:
        if inputs is MISSING and encoder_outputs is None:
            raise InvalidInput(f"no inputs; pass items, tensors or encoder_outputs to .{method}")
        tensors = {} if inputs is MISSING else dict(self._tensors(inputs))
        given = encoder_outputs if encoder_outputs is not None else tensors.pop("encoder_outputs", None)
        if given is not None:
            states, mask = _states(given)
            tensors["encoder_outputs"] = states
            if mask is not None:
                tensors.setdefault("attention_mask", mask)
        return tensors

    def _options(self, given: dict[str, Any]) -> Any:
        for name in GENERATE_ONLY:
            if name in given:
                raise InvalidInput(f"{name!r} belongs to the model's own generate; call .generate(..., {name}=...)")
        return super()._options(given)


def plain_cache(value: Any) -> Any:
    """A KV cache as one tuple per layer: keys and values of decoder, then encoder; else `value` as is."""
    if not hasattr(value, "self_attention_cache"):
        return value
    own, cross = value.self_attention_cache.layers, value.cross_attention_cache.layers
    return tuple((mine.keys, mine.values, other.keys, other.values) for mine, other in zip(own, cross))


def _states(given: Any) -> tuple[Any, Tensor | None]:
    """Encoder states as a transformers output, and their mask if there is one."""
    from transformers.modeling_outputs import BaseModelOutput

    if isinstance(given, Mapping):
        if "last_hidden_state" not in given:
            raise InvalidInput(f"encoder_outputs has {', '.join(map(str, given.keys()))}; last_hidden_state is needed")
        return BaseModelOutput(**{name: given[name] for name in STATES if name in given}), given.get("attention_mask")
    if isinstance(given, (tuple, list)) and given and all(isinstance(part, (Tensor, tuple)) for part in given):
        return BaseModelOutput(**dict(zip(STATES, given))), None
    raise WrongType(
        f"encoder_outputs is a {type(given).__name__}; it must be the result of .encode, or a tuple that begins "
        "with the last hidden state"
    )


def _check_output_flags(extra: Mapping[str, Any]) -> None:
    if not extra.get("return_dict_in_generate"):
        for name in OUTPUT_FLAGS:
            if extra.get(name):
                raise InvalidInput(f"{name} needs return_dict_in_generate=True; pass it too")


def _count(tensors: Mapping[str, Any]) -> int:
    states = tensors.get("encoder_outputs")
    first = states.last_hidden_state if states is not None else next(iter(tensors.values()))
    return len(first)
