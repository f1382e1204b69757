"""A decoder for the engine from what `transformers.pipeline` takes: a module in memory, or another tokenizer."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from headway.base.errors import ModelError, Unsupported
from headway.models.hub.store import resolve
from headway.pipelines.backends.loading import transformers


def decoder_model(model: Any, tokenizer: Any) -> tuple[Any, Path | None]:
    """A model for the engine, and the temporary folder that holds it, if it was in memory or has another tokenizer."""
    in_memory = isinstance(model, torch.nn.Module)
    if in_memory and tokenizer is None:
        raise ModelError(f"{type(model).__name__} is a module in memory; pass its tokenizer too (tokenizer=...)")
    if not in_memory and (tokenizer is None or str(tokenizer) == str(model)):
        return model, None
    path = None if in_memory else resolve(model)
    if path is not None and not path.is_dir():
        raise Unsupported(f"{model} is a GGUF file with a tokenizer inside; leave tokenizer= out")
    if isinstance(tokenizer, (str, Path)):
        tokenizer = transformers().AutoTokenizer.from_pretrained(resolve(tokenizer), trust_remote_code=False)
    folder = Path(tempfile.mkdtemp(prefix="headway-pipeline-"))
    try:
        if path is None:
            model.save_pretrained(folder)
        else:
            _link(path, folder)
        tokenizer.save_pretrained(folder)
    except BaseException:
        remove(folder)
        raise
    return folder, folder


def _link(path: Path, folder: Path) -> None:
    """The model's files in `folder`, but for those of its tokenizer."""
    for file in path.iterdir():
        if "token" not in file.name:
            (folder / file.name).symlink_to(file.resolve())


def remove(folder: Path | None) -> None:
    """Delete a temporary folder, if there is one."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)
