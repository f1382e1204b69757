"""`headway quantize`: a model written with fewer bits, usable without the original."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from headway.base.errors import InvalidInput
from headway.cli.flags.declare import Argument, Option
from headway.cli.flags.shared import Json, Quiet
from headway.cli.terminal.render import counted, emit_json, fetched, loading, note, size

Name = Annotated[str, Argument(metavar="MODEL", help="A known name, a path or a hub id org/name.")]
To = Annotated[
    str | None,
    Option(
        "--to",
        metavar="FORMAT",
        help="A folder of a folder: int8, int4, fp8. A GGUF file: Q8_0, Q6_K, Q5_K_M, Q4_K_M, Q4_0, …, F16, BF16, F32.",
    ),
]
Out = Annotated[str | None, Option("--out", "-o", metavar="PATH", help="What to write; it must not exist.")]


def quantize(model: Name, to: To = None, out: Out = None, quiet: Quiet = False, json: Json = False) -> None:
    """Write a model with fewer bits: a folder of a folder, or a GGUF file of either.

    Config, tokenizer and chat template come along. Nothing is overwritten, and nothing half-written is left.
    """
    from headway.models.config import read_config
    from headway.models.quantized.write import GGUF, quantize_model
    from headway.text.gguf_metadata import gguf_metadata

    if to is None or out is None:
        raise InvalidInput("give --to FORMAT and --out PATH: headway quantize MODEL --to int8 --out PATH")
    source, vocabulary = fetched(model), None
    if source.is_dir() and to in GGUF:
        vocabulary = gguf_metadata(source, read_config(source).vocab_size)
    with loading() as progress:
        result = quantize_model(source, to, Path(out), progress, vocabulary=vocabulary)
    if result.requantized:
        note("the source was quantized already: what it had lost stays lost")
    if result.kept:
        note(
            f"{counted(result.kept, 'tensor')} of linear layers, {size(result.kept_bytes)}, stay as they are: a folder "
            f"in {to} holds no matrices that are stored stacked or transposed, nor in int4 inputs that are not groups "
            "of 32; a GGUF file does"
        )
    if result.bytes_after > result.bytes_before:
        note(f"what is written is larger than the source, which had fewer bits than {to}")
    if json:
        emit_json(
            {
                "path": str(result.path),
                "to": result.to,
                "tensors": result.tensors,
                "kept": result.kept,
                "kept_bytes": result.kept_bytes,
                "bytes_before": result.bytes_before,
                "bytes_after": result.bytes_after,
                "requantized": result.requantized,
            }
        )
    else:
        done = f"{counted(result.tensors, 'tensor')} in {result.to}, {size(result.bytes_before)} before"
        note(f"{done}, {size(result.bytes_after)} now")
        print(result.path)
