"""A recording decoded in a process of its own, with limits of the kernel: what a stranger's file is given to.

    python -m headway.pipelines.inputs.decode_process '{"rate": 16000, ...}' < FILE > RESULT

RESULT is a line of JSON, {"samples": n} or {"error": message}, and then n samples in float32 at `rate`. The process has
no more memory, CPU time and files than it is told, and cannot start others. `DecodeLimits` is both sides' form of that.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from dataclasses import asdict

import numpy as np

from headway.base.dataclass import dataclass
from headway.base.errors import HeadwayError, InvalidInput
from headway.pipelines.inputs.audio import decode, resample

BASE_MEMORY = 768 << 20  # addresses that Python, numpy and libsndfile take before the first sample
COPIES = 6  # of the samples at most, while they are decoded and resampled
HEADER_BYTES = 4096


@dataclass(frozen=True)
class DecodeLimits:
    """What one recording may cost; `rate` is what its samples are wanted at."""

    rate: int
    max_seconds: float
    max_bytes: int  # of decoded samples
    cpu_seconds: int

    def command(self) -> list[str]:
        """The command that decodes under these limits."""
        return [sys.executable, "-m", "headway.pipelines.inputs.decode_process", json.dumps(asdict(self))]

    @property
    def memory(self) -> int:
        return BASE_MEMORY + COPIES * self.max_bytes

    def apply(self) -> None:
        """The kernel's limits for this process."""
        for name, limit in (
            ("AS", self.memory),
            ("CPU", self.cpu_seconds),
            ("FSIZE", HEADER_BYTES + self.max_bytes),
            ("CORE", 0),
            ("NPROC", 0),
            ("NOFILE", 16),
        ):
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))


def decoded(data: bytes, limits: DecodeLimits) -> np.ndarray:
    """[samples] in float32 at the wanted rate, within the limits."""
    values, rate = decode(data, "the file", max_seconds=limits.max_seconds, max_bytes=limits.max_bytes)
    if not len(values):
        raise InvalidInput("the recording has no samples; send one that is not empty")
    if len(values) > limits.max_seconds * rate:
        raise InvalidInput(f"the recording lasts more than {limits.max_seconds:g} s, which is the limit; send a part")
    if len(values) * limits.rate / rate * 4 > limits.max_bytes:
        raise InvalidInput(f"the recording has more than {limits.max_bytes} bytes of samples, the limit; send a part")
    if not np.isfinite(values).all():
        raise InvalidInput("the recording has samples that are not finite numbers; write it again")
    return resample(values, rate, limits.rate)


def main() -> None:
    """Decode standard input, write the result, and end."""
    with suppress(ImportError, OSError):  # loaded before the limits; the file's format says whether it is needed
        import soundfile  # type: ignore[import-not-found]  # noqa: F401
    limits = DecodeLimits(**json.loads(sys.argv[1]))
    limits.apply()
    samples = np.zeros(0, np.float32)
    try:
        samples = decoded(sys.stdin.buffer.read(), limits)
        head: dict[str, object] = {"samples": len(samples)}
    except HeadwayError as error:
        head = {"error": str(error)[:1000]}
    except MemoryError:
        head = {"error": "the recording takes more memory than decoding may use; send a part of it"}
    with os.fdopen(sys.stdout.fileno(), "wb", closefd=False) as out:
        out.write(json.dumps(head).encode() + b"\n")
        out.write(samples.tobytes())
        out.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
