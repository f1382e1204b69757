"""A model's tensors by name, from a folder of safetensors or a GGUF file.

Owns the way from a name to stored bytes, and from those to an array, or a tensor on a device. Files are mapped, never
read whole: loading allocates the requested tensor and a chunk of temporaries, or makes no copy at all. It never reads a
header (`gguf` and `safetensors` do), never runs a pickle and does not know what the names mean.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeAlias, TypeVar

import numpy as np

from headway.base.closing import Closing
from headway.base.errors import BadModelFile, Closed, InvalidInput, ModelNotFound, Unsupported
from headway.base.files import read_json
from headway.base.text import short_repr
from headway.models.files.blocks import FLOATS, dequantize, stored_floats
from headway.models.files.gguf import GgufFile
from headway.models.files.mapped import Span, map_file, unmap
from headway.models.files.quantization import read_scheme
from headway.models.files.safetensors import INDEX, SINGLE, Entry, read_entries, read_index

if TYPE_CHECKING:
    import torch

    from headway.models.files.mxfp4_folder import Mxfp4Folder
    from headway.models.files.quantized_folder import QuantizedFolder


class Weights(Protocol):
    """The tensors of one model. An unknown name raises `BadModelFile`."""

    def names(self) -> Sequence[str]:
        """Every tensor's name, in the file's order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, in torch's order."""
        ...

    def stored(self, name: str) -> str:
        """The type it is stored in, such as `BF16` or `Q4_1`."""
        ...

    def nbytes(self, name: str) -> int:
        """The bytes it takes in the file."""
        ...

    def array(self, name: str, dtype: str = "float32") -> np.ndarray:
        """The numbers as float32, or in the float type that they are stored in; bfloat16 as uint16.

        In their stored type they are a view of the file's private map, as with `load`.
        """
        ...

    def load(self, name: str, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        """The tensor of torch as `dtype` on `device`. A value that `dtype` can only hold as infinity raises
        `Unsupported`.

        On the CPU, if `dtype` is the stored type, it is a view of the file's private map: the tensor keeps the map
        alive, even after `close()`, and writing to it changes this process's memory and never the file.
        """
        ...

    def span(self, name: str) -> Span:
        """The location of its stored bytes. A type that cannot be loaded raises `Unsupported`."""
        ...

    def close(self) -> None:
        """Close the files. Tensors already loaded stay valid."""
        ...


Folder: TypeAlias = "SafetensorsWeights | QuantizedFolder | Mxfp4Folder"


def open_weights(path: str | os.PathLike[str]) -> Folder | GgufWeights:
    """The weights in a folder of safetensors, quantized or not, or in a GGUF file."""
    where = Path(path)
    if os.path.isdir(where):
        return _open_folder(where)
    if where.suffix == ".safetensors":
        raise InvalidInput(f"{where} is one file of a model; pass its folder, {where.parent}, with the config in it")
    if where.suffix.lower() != ".gguf" and os.path.isfile(where) and not _starts_as_gguf(where):
        raise BadModelFile(f"{where} is neither a GGUF file nor a folder; pass a .gguf file or a folder with {SINGLE}")
    file = GgufFile.open(where)
    try:
        return GgufWeights(file)
    except BaseException:
        file.close()
        raise


def _open_folder(folder: Path) -> Folder:
    from headway.models.nested import outer_family  # which reads files' metadata

    config = read_json(folder / "config.json")
    scheme = read_scheme(config)
    if scheme is None:
        return SafetensorsWeights(folder, text=outer_family(config) is not None)
    if scheme.form == "mxfp4":
        from headway.models.files.mxfp4_folder import Mxfp4Folder

        return Mxfp4Folder(SafetensorsWeights(folder))
    from headway.models.files.quantized_folder import QuantizedFolder

    return QuantizedFolder(SafetensorsWeights(folder), scheme)


def _starts_as_gguf(path: Path) -> bool:
    # Files in the hub's cache are named by their hash.
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise BadModelFile(f"{path} cannot be read: {error.strerror or error}") from None


class GgufWeights(Closing):
    """The tensors of an open GGUF file, which it closes."""

    def __init__(self, file: GgufFile) -> None:
        parts = file.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise Unsupported(
                f"{file.path} is one of {parts} parts of a model; merge them with `llama-gguf-split --merge` first"
            )
        self.file = file

    def names(self) -> Sequence[str]:
        return tuple(self.file.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return _find(self.file.tensors, name, self.file.path).shape

    def stored(self, name: str) -> str:
        return _find(self.file.tensors, name, self.file.path).kind

    def nbytes(self, name: str) -> int:
        return _find(self.file.tensors, name, self.file.path).nbytes

    def array(self, name: str, dtype: str = "float32") -> np.ndarray:
        tensor = _find(self.file.tensors, name, self.file.path)
        what = f"{self.file.path}: tensor {name!r}"
        return _to_array(self.file.raw(name), tensor.kind, tensor.shape, what, dtype)

    def load(self, name: str, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        from headway.models.files.tensors import to_tensor

        tensor = _find(self.file.tensors, name, self.file.path)
        what = f"{self.file.path}: tensor {name!r}"
        return to_tensor(self.file.raw(name), tensor.kind, tensor.shape, what, dtype=dtype, device=device)

    def span(self, name: str) -> Span:
        return self.file.span(name)

    def close(self) -> None:
        self.file.close()


class SafetensorsWeights(Closing):
    """The tensors of a folder with `model.safetensors`, or with shards and `model.safetensors.index.json`.

    If both exist the single file is used, as Hugging Face does. `single` is its name. With `text` there are the tensors
    of the text model alone, by its own names.
    """

    def __init__(self, folder: str | os.PathLike[str], single: str = SINGLE, *, text: bool = False) -> None:
        self.folder, self._single = Path(folder), single
        self._maps: dict[Path, mmap.mmap] = {}
        self._entries: dict[str, Entry] = {}
        self._closed = False
        try:
            self._read()
            if text:
                self._keep_text()
        except BaseException:
            self.close()
            raise

    def names(self) -> Sequence[str]:
        return tuple(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return _find(self._entries, name, self.folder).shape

    def stored(self, name: str) -> str:
        return _find(self._entries, name, self.folder).dtype

    def nbytes(self, name: str) -> int:
        return _find(self._entries, name, self.folder).nbytes

    def array(self, name: str, dtype: str = "float32") -> np.ndarray:
        entry, raw = _find(self._entries, name, self.folder), self.span(name).bytes()
        return _to_array(raw, entry.dtype, entry.shape, f"{entry.file}: tensor {name!r}", dtype)

    def load(self, name: str, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        from headway.models.files.tensors import to_tensor

        entry, raw = _find(self._entries, name, self.folder), self.span(name).bytes()
        what = f"{entry.file}: tensor {name!r}"
        return to_tensor(raw, entry.dtype, entry.shape, what, dtype=dtype, device=device)

    def span(self, name: str) -> Span:
        entry = _find(self._entries, name, self.folder)
        if entry.dtype not in FLOATS and not self._closed:
            raise Unsupported(
                f"{entry.file}: tensor {name!r} is stored as {entry.dtype}; "
                f"Headway loads weights stored as {', '.join(FLOATS)}"
            )
        return self.any_span(name)

    def any_span(self, name: str) -> Span:
        """The location of a tensor of any type."""
        entry = _find(self._entries, name, self.folder)
        if self._closed:
            raise Closed(f"the weights of {self.folder} are closed; open them again to load {name!r}")
        return Span(self._maps[entry.file], entry.offset, entry.nbytes)

    def close(self) -> None:
        self._closed = True
        while self._maps:
            unmap(self._maps.popitem()[1])

    def _read(self) -> None:
        if os.path.exists(self.folder / self._single):
            self._add(self.folder / self._single)
        elif os.path.exists(self.folder / INDEX):
            self._read_shards(self.folder / INDEX)
        else:
            _refuse_folder(self.folder)

    def _keep_text(self) -> None:
        from headway.models.nested import text_names

        self._entries = {own: self._entries[name] for own, name in text_names(self._entries).items()}

    def _read_shards(self, index: Path) -> None:
        places = read_index(index)
        for shard in dict.fromkeys(places.values()):
            try:
                self._add(self.folder / shard)
            except ModelNotFound:
                raise BadModelFile(
                    f"{index} lists the file {short_repr(shard)}, which is not in the folder; download it again"
                ) from None
        for name, shard in places.items():
            entry = self._entries.get(name)
            if entry is None or entry.file.name != shard:
                raise BadModelFile(f"{index} puts tensor {short_repr(name)} in {short_repr(shard)}, which lacks it")

    def _add(self, file: Path) -> None:
        self._maps[file] = map_file(file)
        for name, entry in read_entries(file, self._maps[file]).items():
            if name in self._entries:
                raise BadModelFile(f"tensor {short_repr(name)} is in both {self._entries[name].file} and {file.name}")
            self._entries[name] = entry


def _refuse_folder(folder: Path) -> NoReturn:
    try:
        names = sorted(os.listdir(folder))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelNotFound(f"the folder {folder} cannot be read: {reason}; check the path") from None
    if any(name.startswith("pytorch_model") and name.endswith((".bin", ".json")) for name in names):
        raise BadModelFile(
            f"{folder} holds its weights as a pickle (pytorch_model.bin), which can run code and is never loaded; "
            "convert it with transformers: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
        )
    for name in names:
        if name.lower().endswith(".gguf"):
            raise BadModelFile(f"{folder} has no {SINGLE}; to use its GGUF file pass the file itself: {folder / name}")
    raise BadModelFile(f"{folder} has neither {SINGLE} nor {INDEX}; pass a folder with weights in safetensors")


def _to_array(raw: np.ndarray, stored: str, shape: tuple[int, ...], what: str, dtype: str) -> np.ndarray:
    if FLOATS.get(stored) == dtype:
        return stored_floats(stored, raw, shape)
    if dtype != "float32":
        raise InvalidInput(f"{what} is stored as {stored}; it loads as that or as float32, not as {dtype}")
    try:
        return dequantize(stored, raw, shape)
    except Unsupported as error:
        raise Unsupported(f"{what}, stored as {stored}: {error}") from None


_Item = TypeVar("_Item")


def _find(items: Mapping[str, _Item], name: str, where: Path) -> _Item:
    item = items.get(name)
    if item is None:
        some = ", ".join(short_repr(other) for other in list(items)[:3])
        raise BadModelFile(f"{where} has no tensor {name!r}; it has {len(items)}: {some} …")
    return item
