"""Loads model folders: weights from safetensors only, code from the installed transformers only.

`load` returns a LoadedModel: the module in its backend, and what turns inputs into arrays (tokenizer, image processor,
feature extractor, processor), as the task needs them.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from headway.base.dataclass import dataclass
from headway.base.errors import BadModelFile, InvalidInput, ModelError, Unsupported, UnsupportedModel, WrongType
from headway.base.files import read_json
from headway.base.system.notebook import working_in_notebook
from headway.models.hub.store import resolve
from headway.pipelines.backends.torch import Placement, TorchBackend
from headway.pipelines.inputs.text import TextEncoder, longest_row
from headway.runtime.device import DTYPES

if TYPE_CHECKING:
    import torch

    from headway.pipelines.backends.quantize import QuantizationReport
    from headway.pipelines.backends.unpadded import UnpaddedEncoder

EXTRA = "pip install 'headway[pipelines]'"
PARTS = {
    "tokenizer": "AutoTokenizer",
    "image_processor": "AutoImageProcessor",
    "feature_extractor": "AutoFeatureExtractor",
    "processor": "AutoProcessor",
}


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model in memory and the preprocessors of its inputs."""

    name: str
    path: Path | None
    backend: TorchBackend
    config: Any
    tokenizer: Any = None
    image_processor: Any = None
    feature_extractor: Any = None
    processor: Any = None
    text: TextEncoder | None = None  # the tokenizer, safe for threads
    unpadded: UnpaddedEncoder | None = None  # the same model for unpadded batches, if it is supported
    quantization: QuantizationReport | None = None  # the effect of quantize=

    def __repr__(self) -> str:
        return f"{type(self.module).__name__} of {self.name}, {self.backend.placement}"

    @property
    def module(self) -> Any:
        return self.backend.module


def transformers() -> ModuleType:
    """The transformers module, or an error that names the extra to install."""
    try:
        import transformers
    except ImportError:
        raise Unsupported(f"pipelines need transformers, which is not installed: {EXTRA}") from None
    return transformers


def load(
    model: Any,
    auto_class: str,
    needs: tuple[str, ...],
    placement: Placement,
    parts: dict[str, Any] | None = None,
    *,
    changes: bool = False,
) -> LoadedModel:
    """Load a model by name, folder or hub id, or use a module in memory.

    `parts` are the caller's own tokenizer and the like; the rest of `needs` is read from the model's folder. A module
    in memory is copied first if its weights will change (`changes`, or another dtype).
    """
    library, given = transformers(), dict(parts or {})
    import torch

    if isinstance(model, torch.nn.Module):
        name, path, module = type(model).__name__, None, _private(model, placement, changes)
    elif isinstance(model, (str, Path)):
        name, path = str(model), _folder(model)
        with working_in_notebook(f"loading {name}"):
            module = _module(library, path, auto_class)
    else:
        raise WrongType(f"model is a {type(model).__name__}; pass a name, a folder, a hub id or a torch module")
    for part in needs:
        if given.get(part) is None:
            given[part] = _part(library, path, part, name)
        elif isinstance(given[part], (str, Path)):
            given[part] = _part(library, resolve(given[part]), part, str(given[part]))
    backend = TorchBackend(module, placement)
    config = getattr(module, "config", None)
    tokenizer = given.get("tokenizer") or getattr(given.get("processor"), "tokenizer", None)
    text = text_encoder(tokenizer, config, path, backend) if tokenizer is not None else None
    return LoadedModel(name, path, backend, config, **{**given, "tokenizer": tokenizer}, text=text)


def _private(module: Any, placement: Placement, changes: bool) -> Any:
    """The caller's module if it stays unchanged, else a copy."""
    cast = any(p.is_floating_point() and p.dtype != placement.dtype for p in module.parameters())
    return copy.deepcopy(module) if changes or cast or module.training else module


def text_encoder(tokenizer: Any, config: Any, path: Path | None, backend: TorchBackend) -> TextEncoder:
    """The tokenizer with the model's length limit."""
    limit = longest_row(getattr(config, "text_config", config))
    declared = read_json(path / "sentence_bert_config.json").get("max_seq_length") if path else None
    if isinstance(declared, int) and declared > 0:
        limit = min(declared, limit) if limit is not None else declared
    types = "token_type_ids" in getattr(tokenizer, "model_input_names", ()) and backend.takes("token_type_ids")
    return TextEncoder(tokenizer, limit, types=types)


def stored_dtype(model: Any) -> torch.dtype | None:
    """The float type of a model's weights: of a module's matrices, or as config.json has it; None if it is not one."""
    import torch

    if isinstance(model, torch.nn.Module):
        kinds = {p.dtype for p in model.parameters() if p.is_floating_point() and p.ndim > 1}
        return kinds.pop() if len(kinds) == 1 else None
    if not isinstance(model, str | Path) or not (folder := resolve(model)).is_dir():
        return None  # which loading it refuses
    config = read_json(folder / "config.json")
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, DTYPES[name]) if isinstance(name, str) and name in DTYPES else None


def model_type(model: Any) -> str:
    """The family of a model that is not loaded yet, or is in memory."""
    return str(config_of(model).get("model_type", "unknown"))


def config_of(model: Any) -> Mapping[str, Any]:
    """The config of a module in memory, or the config.json of a name or folder."""
    import torch

    if isinstance(model, torch.nn.Module):
        config = getattr(model, "config", None)
        return {"architectures": [type(model).__name__], "model_type": getattr(config, "model_type", "unknown")}
    if model is None:
        raise InvalidInput("this task has no default model; pass model=... (a folder, a name or a hub id)")
    return read_json(resolve(model) / "config.json")


def _folder(model: str | Path) -> Path:
    path = resolve(model)
    if not path.is_dir():
        raise UnsupportedModel(
            f"{model} is a GGUF file of a decoder; this task needs a folder with config.json and safetensors "
            '(decoders run as pipeline("text-generation", ...) or hw.Engine)'
        )
    if not any(path.glob("*.safetensors")):
        kinds = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        has = f"it has {', '.join(kinds)}, pickles, which are never loaded" if kinds else "it has no weights at all"
        raise BadModelFile(f"{path} has no *.safetensors: {has}; save the model again with save_pretrained")
    return path


def _module(library: ModuleType, path: Path, auto_class: str) -> Any:
    import torch

    with _quiet():
        try:
            module, info = getattr(library, auto_class).from_pretrained(
                path,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                dtype=torch.float32,
                output_loading_info=True,
            )
        except (ValueError, KeyError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UnsupportedModel(f"{path} cannot be loaded as {auto_class}: {reason}") from error
        except (OSError, RuntimeError) as error:
            raise BadModelFile(f"{path} cannot be loaded: {' '.join(str(error).split())[:200]}") from error
    # transformers would initialize a missing head at random; an unused pooler may be missing
    missing = sorted(key for key in info["missing_keys"] if not ("pooler." in key and auto_class == "AutoModel"))
    if missing:
        raise BadModelFile(
            f"{path} has no weights for {', '.join(missing[:3])}{' …' if len(missing) > 3 else ''} of "
            f"{type(module).__name__}; it was not trained for this task"
        )
    return module


def _part(library: ModuleType, path: Path | None, part: str, name: str) -> Any:
    if path is None:
        raise ModelError(f"{name} is a module in memory; pass its {part} too ({part}=...)")
    try:
        with _quiet():
            return getattr(library, PARTS[part]).from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except ImportError as error:
        reason = " ".join(str(error).split())[:200]
        raise Unsupported(f"the {part} of {path} needs a package that is not installed ({reason}): {EXTRA}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"{path} has no usable {part} ({reason}); put its files there or pass {part}=...") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence load reports of transformers; errors are still raised."""
    from transformers.utils import logging as library_logging

    log = logging.getLogger("transformers")
    before, bars = log.level, library_logging.is_progress_bar_enabled()
    log.setLevel(logging.ERROR)
    library_logging.disable_progress_bar()
    try:
        yield
    finally:
        log.setLevel(before)
        if bars:
            library_logging.enable_progress_bar()
