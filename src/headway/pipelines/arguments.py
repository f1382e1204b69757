"""The arguments of `transformers.pipeline` in Headway's words, so that code written for it runs here unchanged.

Each argument has its meaning here, or changes no result and is checked only (`num_workers`, `use_fast`, …), or would
change a result that cannot be had: then it is refused, with the name of what to use instead. The table is in
docs/coming-from.md. Loads nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from headway.base.checks import check_integer
from headway.base.errors import InvalidInput, Unsupported, WrongType
from headway.base.text import short_repr
from headway.models.hub.registry import KNOWN, is_hub_id
from headway.models.hub.store import is_on_disk, resolve

ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
ONE_DEVICE_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")  # on one device they all mean the same
# What the model loader of transformers takes and that changes no result here, each with the values it may have.
LOADING: Mapping[str, tuple[Any, ...]] = {
    "low_cpu_mem_usage": (None, True, False),
    "use_safetensors": (None, True),
    "attn_implementation": (None, *ATTENTION),
    "trust_remote_code": (None, False),
    "use_cache": (None, True, False),
}
TOKENIZER_KWARGS = ("tokenizer_kwargs", "tokenize_kwargs", "tokenizer_encode_kwargs")
INPUTS = (
    "inputs",
    "images",
    "image",
    "text_inputs",
    "sequences",
)  # names of the item in transformers


def checked(value: Any, values: tuple[Any, ...], name: str, way_out: str) -> None:
    """Raise Unsupported unless `value` is one of `values`, by identity for True, False and None."""
    if not any(value is known or (isinstance(known, str) and value == known) for known in values):
        raise Unsupported(f"{name}={short_repr(value)} is not supported; {way_out}")


def refuse_remote_code(value: Any) -> None:
    """Raise Unsupported for anything but None and False."""
    checked(
        value, (None, False), "trust_remote_code",
        "code from a model's folder never runs here; use a model that transformers itself has, "
        "or pass the torch module that you loaded (model=...)",
    )  # fmt: skip


# -- where and in which precision --------------------------------------------------------------------------------------


def device_of(device: Any, device_map: Any = None) -> str:
    """The device's name: -1 is the CPU and n is `cuda:n`; a map must put the whole model on one device."""
    if device_map is not None:
        mapped = _mapped(device_map)
        if device not in (None, "auto"):
            raise InvalidInput(
                f"device={short_repr(device)} and device_map={short_repr(device_map)} were both given; pass one of them"
            )
        device = mapped
    match device:
        case None:
            return "auto"
        case torch.device():
            return str(device)
        case bool():
            raise WrongType(
                f"device is {short_repr(device)}; it must be a name such as 'cuda:0', a number or a torch.device"
            )
        case int():
            return "cpu" if check_integer(device, "device", -1) == -1 else f"cuda:{device}"
    return device


def _mapped(device_map: Any) -> Any:
    if isinstance(device_map, Mapping):
        devices = {str(device_of(device)) for device in device_map.values()}
        if len(devices) != 1:
            raise Unsupported(
                f"device_map spreads the model over {', '.join(sorted(devices)) or 'no device'}; a pipeline runs on "
                "one: pass device='cuda:0', or device_map='auto'"
            )
        return devices.pop()
    return "auto" if device_map in ONE_DEVICE_MAPS else device_map


def dtype_of(dtype: Any, torch_dtype: Any = None) -> str:
    """The dtype's name; `torch_dtype` is the older word for it."""
    if torch_dtype is not None:
        if dtype not in (None, "auto", torch_dtype):
            raise InvalidInput(
                f"dtype={short_repr(dtype)} and torch_dtype={short_repr(torch_dtype)} were both given; pass dtype alone"
            )
        dtype = torch_dtype
    if dtype is None:
        return "auto"
    return str(dtype) if not isinstance(dtype, torch.dtype) else str(dtype).removeprefix("torch.")


def loading_arguments(model_kwargs: Any) -> dict[str, Any]:
    """The arguments of `pipeline` that `model_kwargs` has; the rest is checked, or refused by name."""
    if model_kwargs is None:
        return {}
    if not isinstance(model_kwargs, Mapping):
        raise WrongType(f"model_kwargs is a {type(model_kwargs).__name__}; it must be a dict")
    passed: dict[str, Any] = {}
    for name, value in model_kwargs.items():
        if name == "trust_remote_code":
            refuse_remote_code(value)
        elif name in ("torch_dtype", "dtype", "device_map", "revision", "token", "local_files_only"):
            passed[name] = value
        elif name in ("load_in_8bit", "load_in_4bit", "quantization_config"):
            checked(value, (None, False), f"model_kwargs[{name!r}]", "pass quantize='int8', or a quantized GGUF file")
        elif name in LOADING:
            known = ", ".join(map(repr, LOADING[name]))
            checked(value, LOADING[name], f"model_kwargs[{name!r}]", f"it takes {known}; leave it out")
        else:
            raise Unsupported(
                f"model_kwargs[{name!r}] is not supported; it takes torch_dtype, device_map, revision, token, "
                f"{', '.join(sorted(LOADING))}; for anything else pass the torch module that you loaded (model=...)"
            )
    return passed


# -- which model -------------------------------------------------------------------------------------------------------


def model_of(model: Any, revision: Any, token: Any, local_only: Any) -> Any:
    """`model`, fetched if it is a hub id of which a revision, a token or only local files are asked for."""
    if revision is not None and not isinstance(revision, str):
        raise WrongType(f"revision is {short_repr(revision)}; it must be a branch, a tag or a commit")
    if not (token is None or isinstance(token, (bool, str))):
        raise WrongType(f"token is a {type(token).__name__}; it must be a string, True, False or None")
    if not isinstance(local_only, bool):
        raise WrongType(f"local_files_only is {short_repr(local_only)}; it must be True or False")
    if not is_remote(model):
        if revision not in (None, "main"):
            raise InvalidInput(
                f"revision={short_repr(revision)} was given and "
                f"{model if isinstance(model, (str, Path)) else 'this model'} has "
                "no revisions: only a hub id (org/name) has; leave it out"
            )
        return model
    if revision is None and token is None and not local_only:
        return model
    return resolve(model, revision=revision, token=token, download=not local_only)


def is_remote(model: Any) -> bool:
    """Whether `model` is a hub id, and nothing on this disk has its name."""
    return isinstance(model, str) and model not in KNOWN and is_hub_id(model) and not is_on_disk(Path(model))


# -- options of a call -------------------------------------------------------------------------------------------------


def _plain(value: Any) -> Any:
    """An option's value; numbers and arrays of numpy and torch as Python's own numbers and lists."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "ndim") else value


def call_options(given: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call, of which `known` are the task's own, without those that change no result here.

    Batches are formed from all callers, preprocessing has threads of its own, and no result depends on padding; images
    are never fetched from a network, so nothing can time out.
    """
    options: dict[str, Any] = {}
    for name, value in ((name, _plain(value)) for name, value in given.items()):
        if name in known:
            options[name] = value
        elif name == "batch_size":
            check_integer(value, name, 1)
        elif name == "num_workers":
            check_integer(value, name, 0)
        elif name == "padding":
            checked(value, (None, True, False, "longest", "max_length", "do_not_pad"), name, "leave it out")
        elif name == "timeout":
            _check_timeout(value)
        elif name == "ignore_warning":
            checked(value, (None, True, False), name, "leave it out")
        elif name in TOKENIZER_KWARGS:
            options |= _tokenizer_options(name, value, given)
        else:
            options[name] = value
    return _older_names(options, known)


def _check_timeout(value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
        raise InvalidInput(f"timeout is {short_repr(value)}; it must be a number of seconds above 0, or None")


def _tokenizer_options(name: str, value: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise WrongType(f"{name} is a {type(value).__name__}; it must be a dict of the tokenizer's options")
    if twice := sorted(set(value) & set(given)):
        raise InvalidInput(f"{twice[0]} is given both directly and in {name}; pass it once")
    return call_options(value, {})


def _older_names(options: dict[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Names that tasks of transformers once had, and the words that its tokenizers take for `truncation`."""
    if options.get("truncation") in ("longest_first", "do_not_truncate"):
        options["truncation"] = options["truncation"] == "longest_first"
    if "return_all_scores" in options and "top_k" in known:
        checked(options["return_all_scores"], (None, True, False), "return_all_scores", "pass top_k=None for all")
        if options.pop("return_all_scores"):
            options["top_k"] = None
    if "grouped_entities" in options and "aggregation_strategy" in known:
        checked(options["grouped_entities"], (None, True, False), "grouped_entities", "pass aggregation_strategy=")
        if options.pop("grouped_entities"):
            options["aggregation_strategy"] = "simple"
    return options
