"""A client's file as samples. It is decoded in a process of its own, so that no file can harm this one.

The process has limits on memory, CPU time and output (`pipelines.inputs.decode_process`) and ends with the request.
File and samples pass through anonymous files in memory: no pipe to wait for, nothing on a disk.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import ceil
from typing import BinaryIO

import numpy as np

from headway.base.config import child_environment
from headway.pipelines.inputs.decode_process import HEADER_BYTES, DecodeLimits
from headway.server.errors import ApiError, bad_request
from headway.server.settings import ServerSettings

AT_ONCE = 2  # processes; others wait
KEPT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG")


class AudioDecoder:
    """Decodes files for one server, a few at a time."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def samples(self, data: bytes, rate: int) -> np.ndarray:
        """[samples] in float32 at `rate`; raises an `ApiError` for a file that cannot be decoded within the limits."""
        settings = self._settings
        limits = DecodeLimits(rate, settings.max_audio_seconds, settings.max_audio_bytes, ceil(settings.audio_timeout))
        async with self._turns:
            with _memory_file("audio") as given, _memory_file("samples") as result:
                given.write(data)
                given.seek(0)
                code = await self._run(limits, given, result)
                return _read(result, code, settings)

    async def _run(self, limits: DecodeLimits, given: BinaryIO, result: BinaryIO) -> int | None:
        """The exit code of the process; None if its time was over."""
        environment = child_environment(only=KEPT_VARIABLES, OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1")
        process = await asyncio.create_subprocess_exec(
            *limits.command(), stdin=given, stdout=result, stderr=asyncio.subprocess.DEVNULL, env=environment
        )
        try:
            async with asyncio.timeout(self._settings.audio_timeout):
                return await process.wait()
        except TimeoutError:
            return None
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.shield(process.wait())


@contextmanager
def _memory_file(name: str) -> Iterator[BinaryIO]:
    if not hasattr(os, "memfd_create"):  # which only Linux has
        with tempfile.TemporaryFile(buffering=0) as file:  # deleted as it is made
            yield file  # type: ignore[misc]
        return
    with os.fdopen(os.memfd_create(name), "w+b", buffering=0) as file:
        yield file  # type: ignore[misc]


def _read(result: BinaryIO, code: int | None, settings: ServerSettings) -> np.ndarray:
    """What a process left behind. It may be anything: the process had a stranger's file."""
    if code is None or code == -24:  # SIGXCPU
        raise _refused(f"the file could not be decoded within {settings.audio_timeout:g} s; send a shorter one")
    size = os.fstat(result.fileno()).st_size
    if code != 0 or size == 0:
        raise _refused("the file cannot be decoded: it is damaged, or takes more memory than decoding may use")
    with mmap.mmap(result.fileno(), size, prot=mmap.PROT_READ) as mapped:
        end = mapped.find(b"\n", 0, HEADER_BYTES)
        head = json.loads(mapped[: max(end, 0)] or b"{}")
        if "error" in head:
            raise _refused(str(head["error"]))
        samples = np.frombuffer(mapped[end + 1 :], dtype=np.float32)
    if len(samples) != head.get("samples"):
        raise _refused("the file cannot be decoded: decoding was cut off")
    return samples


def _refused(message: str) -> ApiError:
    return bad_request(message, "file", "invalid_audio")
