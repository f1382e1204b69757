"""A workload of random prompts, sent to a server and timed as its clients see it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, closing

import h11

from headway.base.checks import check_integer
from headway.base.dataclass import dataclass
from headway.base.errors import InvalidInput
from headway.bench.http_client import Address, HttpClient
from headway.bench.load_generator import ArrivalPattern, LoadRequest, RequestResult, run_load, send
from headway.bench.load_report import LoadReport

LIMIT = 1 << 20  # of every count


@dataclass(frozen=True)
class Workload:
    """How many requests, and of which lengths; a range of 0.5 draws each length from 0.5 to 1.5 times its mean."""

    requests: int
    prompt: int
    tokens: int
    range: float = 0.0
    warmup: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("requests", 1), ("prompt", 1), ("tokens", 1), ("warmup", 0)):
            check_integer(getattr(self, name), f"--{name}", low, LIMIT)
        if not 0 <= self.range < 1:
            raise InvalidInput(f"--range is {self.range:g}; it must be at least 0 and below 1")

    @property
    def max_request_tokens(self) -> int:
        """Prompt and generated tokens of the longest possible request."""
        return round(self.prompt * (1 + self.range)) + round(self.tokens * (1 + self.range))

    def draw(self, vocab: int, *, stream: bool, model: str | None) -> list[LoadRequest]:
        """Requests with prompts of random token ids, warmup first; the same seed draws the same requests."""
        rng = random.Random(self.seed)

        def length(mean: int) -> int:
            return max(1, rng.randint(round(mean * (1 - self.range)), round(mean * (1 + self.range))))

        def one() -> LoadRequest:
            prompt = tuple(rng.choices(range(vocab), k=length(self.prompt)))
            return LoadRequest(prompt, length(self.tokens), stream, model)

        return [one() for _ in range(self.warmup + self.requests)]


async def measure_server(
    address: Address,
    workload: Workload,
    pattern: ArrivalPattern,
    *,
    stream: bool,
    model: str | None,
    vocab: int | None,
    progress: Callable[[int], AbstractContextManager[Callable[[RequestResult], None]]],
) -> LoadReport:
    """Send the workload to the server at `address` and report what its clients saw."""
    with closing(HttpClient(address)) as client:
        name, ids = await _model_and_vocab(client, workload, model, vocab)
        requests = workload.draw(ids, stream=stream, model=name)
        for request in requests[: workload.warmup]:
            result = await send(client, request)
            if result.error is not None:
                raise InvalidInput(f"the first request failed, so the others would too: {result.error}")
        with progress(workload.requests) as tick:
            load = await run_load(client, requests[workload.warmup :], pattern, tick)
        return LoadReport(load, pattern, stream=stream, model=name)


async def _model_and_vocab(
    client: HttpClient, workload: Workload, model: str | None, vocab: int | None
) -> tuple[str, int]:
    """The model's name and its vocabulary size, as the server reports them."""
    where = f"{client.address.host}:{client.address.port}"
    try:
        status, listed = await client.json("/v1/models")
        if status != 200:
            reason = (listed or {}).get("error", {}).get("message", f"HTTP {status}")
            raise InvalidInput(f"the server at {where} does not list its models: {reason}")
        models = {entry["id"]: entry for entry in listed["data"]}
        if vocab is None:
            status, info = await client.json("/tokenizer_info")
            if status != 200:
                raise InvalidInput(f"the server at {where} does not report its vocabulary size; give --vocab N")
            vocab = int(info["vocab_size"])
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidInput(f"no server answers at {where}: {reason}; start one with `headway serve`") from None
    except (ValueError, KeyError, TypeError, AttributeError, h11.ProtocolError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"the server at {where} is not OpenAI-compatible: {error}") from None
    check_integer(vocab, "--vocab", 1, LIMIT)
    name = model if model is not None else next(iter(models))
    limit = models.get(name, {}).get("max_model_len")
    if limit is not None and workload.max_request_tokens > limit:
        raise InvalidInput(
            f"--prompt {workload.prompt} and --tokens {workload.tokens} make up to {workload.max_request_tokens} "
            f"positions; this model has {limit}"
        )
    return name, vocab
