"""The accuracy of quantized arithmetic: a model file as it is against the same weights in float32.

    python benchmarks/accuracy.py                                     # the default model, Headway alone
    python benchmarks/accuracy.py --kinds all                         # and its floats in every other kind
    python benchmarks/accuracy.py --peer llama=llama/bin/python       # and llama.cpp on the same files

Every engine reads the same tokens, in pieces of `--context`, each piece by itself, and gives the logits of every token.
They are held against Headway with `dtype="float32"`: dequantized weights, rows of floats. KL is
the divergence from that distribution in nats a token; agreement, how often the likeliest token is the same. No time is
taken, so it may run on a machine that does something else.

Further kinds quantize these floats once more: GGUF kinds as `headway quantize` writes them, int8 and int4 as
`quantize=` does. So the file's own kind is shown without the error of its weights, the others with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import headway as hw
from headway.base.system.machine import read_machine
from headway.models.hub import store
from headway.models.quantized.write import quantize_model

ROOT = Path(__file__).resolve().parents[1]
PEERS = Path(__file__).parent / "peers"
ROWS = 128  # rows whose logits are asked for in one pass
FILE = "file"  # the model file as it is
QUANTIZE = ("int8", "int4")
GGUF = ("BF16", "Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0", "Q3_K_M", "Q2_K")


@dataclass(frozen=True)
class Distance:
    """How far an engine is from the reference, over all tokens."""

    kl_mean: float
    kl_median: float
    kl_99: float  # of a hundred tokens the worst but one
    kl_largest: float
    agreement: float
    perplexity: float


def main() -> int:
    options = _options()
    path = store.resolve(options.model)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with hw.Engine(path, dtype="float32", threads=options.threads, pages=_pages(options)) as exact:
            pieces = _pieces(exact, options)
            about = _about(options, path, pieces)
            about["engines"]["reference"] = {"runner": exact.info.runner, "format": exact.info.format}
            reference = np.lib.format.open_memmap(
                folder / "reference.npy", mode="w+", dtype=np.float32, shape=(*pieces.shape, exact.vocab_size)
            )  # [pieces, tokens, V]
            for n, piece in enumerate(pieces):
                reference[n] = _log_probabilities(_logits(exact, piece))
        results = _measure(reference, pieces, options, about, folder)
    perplexity = float(np.exp(np.concatenate([_losses(rows, piece) for rows, piece in zip(reference, pieces)]).mean()))
    data = {"about": about, "reference": {"perplexity": perplexity}, "results": results}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "accuracy.json").write_text(json.dumps(data, indent=2) + "\n")
    (options.out / "accuracy.txt").write_text(table(data))
    print(table(data), end="")
    native = all(kind["headway"]["runner"].startswith("native") for kind in about["kinds"].values())
    if not native:
        print("FAILED: Headway did not compute on its native step, so nothing was quantized", file=sys.stderr)
    return 0 if native else 1


def _measure(
    reference: np.ndarray, pieces: np.ndarray, options: argparse.Namespace, about: dict[str, Any], at: Path
) -> dict[str, dict[str, dict[str, float]]]:
    """The distances of every kind, by kind and engine."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    path = store.resolve(options.model)
    for kind in [FILE, *options.kinds]:
        print(f"{kind} …", flush=True)
        file, how = path, {}
        if kind in QUANTIZE:
            how = {"dtype": "float32", "quantize": kind}
        elif kind != FILE:
            file = at / f"{kind}.gguf"
            quantize_model(path, kind, file)
        with hw.Engine(file, threads=options.threads, pages=_pages(options), **how) as own:
            bits = 8 * own.info.weight_bytes / own.info.parameters
            told = {"version": hw.__version__, "runner": own.info.runner, "format": own.info.format, "bits": bits}
            about["kinds"][kind] = {"headway": told}
            results[kind] = {"headway": _compared(reference, pieces, (_logits(own, piece) for piece in pieces))}
        if options.llama is not None and kind not in QUANTIZE:
            about["kinds"][kind]["llama.cpp"], logits = _llama(pieces, file, options, at)
            results[kind]["llama.cpp"] = _compared(reference, pieces, iter(logits))
        if file != path:
            file.unlink()
    return results


def _compared(reference: np.ndarray, pieces: np.ndarray, logits: Iterator[np.ndarray]) -> dict[str, float]:
    """How far an engine's logits of every piece are from the reference."""
    divergence, same, losses = [], [], []
    for exact, piece, rows in zip(reference, pieces, logits, strict=True):
        wide, near = exact.astype(np.float64), _log_probabilities(rows)
        divergence.append(np.einsum("rv,rv->r", np.exp(wide), wide - near))
        same.append(wide.argmax(1) == near.argmax(1))
        losses.append(_losses(near, piece))
    return asdict(_distance(*map(np.concatenate, (divergence, same, losses))))


def _distance(divergence: np.ndarray, same: np.ndarray, losses: np.ndarray) -> Distance:
    return Distance(
        kl_mean=float(divergence.mean()),
        kl_median=float(np.median(divergence)),
        kl_99=float(np.quantile(divergence, 0.99)),
        kl_largest=float(divergence.max()),
        agreement=float(same.mean()),
        perplexity=float(np.exp(losses.mean())),
    )


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    """Of rows of logits [n, V], in float64."""
    wide = logits.astype(np.float64)
    wide -= wide.max(1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(1, keepdims=True))
    return wide


def _losses(log_probabilities: np.ndarray, piece: np.ndarray) -> np.ndarray:
    """What each token's row gave the token that came next, in nats."""
    return -log_probabilities[np.arange(len(piece) - 1), piece[1:]].astype(np.float64)


def _logits(engine: hw.Engine, piece: np.ndarray) -> np.ndarray:
    """Of every token of a piece [n, V]."""
    parts = []
    with engine.context() as context:
        for start in range(0, len(piece), ROWS):
            part = piece[start : start + ROWS].tolist()
            forward = context.forward().input(part)
            handles = [forward.probe(i, hw.Logits()) for i in range(len(part))]
            out = forward.execute().result()
            parts += [out.logits(handle) for handle in handles]
    return np.stack(parts)


def _llama(
    pieces: np.ndarray, path: Path, options: argparse.Namespace, folder: Path
) -> tuple[dict[str, Any], np.ndarray]:
    """llama.cpp's logits [pieces, n, V], taken in a process of its own interpreter."""
    tokens, target = folder / "tokens.npy", folder / "logits.npy"
    np.save(tokens, pieces)
    asked = {"path": str(path), "tokens": str(tokens), "target": str(target), "threads": options.threads}
    command = [options.llama, str(PEERS / "llama_worker.py"), "logits", json.dumps(asked)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    answer = json.loads(done.stdout.splitlines()[-1]) if done.stdout.strip() else {"error": done.stderr[-400:]}
    if "error" in answer:
        raise SystemExit(f"llama.cpp gave no logits: {answer['error']}")
    return answer, np.load(target, mmap_mode="r")


def _pieces(engine: hw.Engine, options: argparse.Namespace) -> np.ndarray:
    """The text as whole pieces of ids [pieces, context]."""
    paths = options.text or [ROOT / "LICENSE", *sorted((ROOT / "docs").glob("*.md"))]
    ids = engine.tokenizer.encode("\n\n".join(path.read_text() for path in paths))
    count = options.tokens // options.context
    if len(ids) < count * options.context:
        raise SystemExit(
            f"the text has {len(ids)} tokens and {count * options.context} were asked for; give more --text"
        )
    spread = np.linspace(0, len(ids) - options.context, count).astype(int)
    return np.stack([ids[start : start + options.context] for start in spread]).astype(np.int64)


def _about(options: argparse.Namespace, path: Path, pieces: np.ndarray) -> dict[str, Any]:
    return {
        "model": path.name,
        "tokens": int(pieces.size),
        "context": options.context,
        "text": hashlib.sha256(pieces.tobytes()).hexdigest(),
        "threads": options.threads,
        "machine": asdict(read_machine()),
        "engines": {},
        "kinds": {},
    }


def _pages(options: argparse.Namespace) -> int:
    return -(-options.context // 16) + 1


def table(data: dict[str, Any]) -> str:
    """The results as the text that is stored and shown."""
    about = data["about"]
    lines = [
        f"{about['model']}: {about['tokens']} tokens in pieces of {about['context']}, against its numbers in float32",
        f"{'kind':<10}{'engine':<11}{'bits':>6}{'KL mean':>10}{'median':>10}{'99 %':>10}{'largest':>10}"
        f"{'agreement':>11}{'perplexity':>12}",
        f"{'float32':<10}{'':<11}{32:>6.2f}{'':>51}{data['reference']['perplexity']:>12.3f}",
    ]
    for kind, engines in data["results"].items():
        for name, row in engines.items():
            bits = about["kinds"][kind][name].get("bits")
            kl = "".join(f"{row[key]:>10.5f}" for key in ("kl_mean", "kl_median", "kl_99", "kl_largest"))
            shown = f"{'' if bits is None else format(bits, '.2f'):>6}"
            lines.append(f"{kind:<10}{name:<11}{shown}{kl}{row['agreement']:>11.4f}{row['perplexity']:>12.3f}")
    return "".join(f"{line}\n" for line in lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("--model", default="smollm2", help="a name, or a GGUF file with a tokenizer")
    parser.add_argument(
        "--kinds", nargs="+", default=[], choices=["all", *QUANTIZE, *GGUF], help="further kinds to quantize it to"
    )
    parser.add_argument("--peer", metavar="llama=PYTHON", help="the interpreter that has llama-cpp-python")
    parser.add_argument("--text", type=Path, action="append", help="a file to read; by default the project's own pages")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--context", type=int, default=1024, help="tokens of one piece")
    parser.add_argument("--threads", type=int, default=read_machine().fair_threads)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    if "all" in options.kinds:
        options.kinds = [*QUANTIZE, *GGUF]
    name, _, options.llama = (options.peer or "").partition("=")
    options.llama = options.llama or None
    if options.peer is not None and (name != "llama" or options.llama is None):
        parser.error(f"--peer is {options.peer!r}; it must be llama=PYTHON")
    if options.context < 2 or options.tokens < options.context or options.threads < 1:
        parser.error("--context takes a number from 2, --tokens one from --context, --threads one from 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
