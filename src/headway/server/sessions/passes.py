"""Passes of a session: the client's builder is replayed on a real `Forward`, whose checks decide, and read out as JSON.

An operation is a list: its name, then its arguments, as in `docs/protocol.md`. Samples and probes are numbered in the
order in which they are asked for; the values come back in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headway.base.errors import Closed, InvalidInput
from headway.base.specs.brle import Brle
from headway.base.specs.probes import Probe
from headway.base.text import short_repr
from headway.program.execution import Execution
from headway.program.forward import Forward
from headway.program.generation.steps import read_probe
from headway.program.output import Output, ProbeHandle, SampleHandle
from headway.remote.protocol.codec import BadMessage
from headway.remote.protocol.values import mask_of, pass_stats_json, probe_of, sampler_of, value_json

if TYPE_CHECKING:
    from headway.models.adapters.adapter import Adapter
    from headway.program.context import Context
    from headway.server.adapters import ServedAdapter

MOST_OPERATIONS = 65_536  # of one pass


class ServedPass:
    """One pass of a client."""

    def __init__(self, context: Context, forward: Forward) -> None:
        self.context, self.forward = context, forward
        self.handles: list[SampleHandle | ProbeHandle[Any]] = []
        self.execution: Execution[Output] | None = None

    def build(
        self, operations: Any, passes: Mapping[int, ServedPass], adapters: Mapping[str, ServedAdapter]
    ) -> ServedPass:
        """Do to the builder what the client did to its own."""
        if not isinstance(operations, list) or len(operations) > MOST_OPERATIONS:
            raise BadMessage(f"a pass must be a list of at most {MOST_OPERATIONS} operations")
        for operation in operations:
            self._apply(operation, passes, adapters)
        return self

    def _apply(self, operation: Any, passes: Mapping[int, ServedPass], adapters: Mapping[str, ServedAdapter]) -> None:
        forward = self.forward
        match operation:
            case ["input", tokens]:
                forward.input(tokens)
            case ["input_at", tokens, positions]:
                forward.input_at(tokens, positions)
            case ["feed", int(number), int(ask)]:
                forward.input(_fed(passes.get(number), ask))
            case ["attention_mask", mask, bool(causal)]:
                forward.attention_mask(mask_of(mask), causal=causal)
            case ["mask", [*runs], rows]:
                forward.mask(Brle.from_runs(runs, where="the logit mask"), rows=rows)
            case ["bias", values, rows]:
                forward.bias(values, rows=rows)
            case ["adapter", name, scale]:
                forward.adapter(*named_adapter(adapters, name, scale))
            case ["defer_commit"]:
                forward.defer_commit()
            case ["sample", indices, sampler, history, generated]:
                self.handles.append(forward.sample(indices, sampler_of(sampler), history=history, generated=generated))
            case ["probe", index, probe]:
                self.handles.append(forward.probe(index, probe_of(probe)))
            case _:
                raise BadMessage(f"{short_repr(operation)} is not an operation of a pass; see docs/protocol.md")

    def execute(self) -> Execution[Output]:
        """Submit it."""
        self.execution = self.forward.execute()
        return self.execution

    def result(self) -> dict[str, Any]:
        """What it has read; raises its error."""
        try:
            return self.read(self.forward.output)
        except CancelledError:
            raise Closed("this pass was cancelled") from None

    def read(self, out: Output) -> dict[str, Any]:
        """The values in the order in which they were asked for, and the figures."""
        values = [
            out.tokens(handle) if isinstance(handle, SampleHandle) else value_json(read_probe(out, handle))
            for handle in self.handles
        ]
        return {"values": values, "stats": pass_stats_json(out.stats)}

    def settle(self) -> None:
        """The client has the result, or will never ask: it is no longer undone."""
        if self.execution is not None and self.execution.done():
            execution, self.execution = self.execution, None
            with suppress(Exception):  # which the client has
                execution.result(0)


def _fed(source: ServedPass | None, ask: int) -> SampleHandle:
    if source is None:
        raise InvalidInput("the pass whose token is fed is no longer known; feed its token after reading it")
    handle = source.handles[ask] if 0 <= ask < len(source.handles) else None
    if not isinstance(handle, SampleHandle):
        raise InvalidInput(f"value {ask} of the pass that is fed is not a sample")
    return handle


def named_adapter(adapters: Mapping[str, ServedAdapter], name: Any, scale: Any) -> tuple[Adapter, float]:
    """An adapter that this server has loaded, by its name, with the scale it was loaded with."""
    served = adapters.get(name) if isinstance(name, str) else None
    if served is None:
        known = ", ".join(sorted(adapters)) or "none"
        raise InvalidInput(f"there is no adapter {short_repr(name)} on this server; it has {known}")
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise InvalidInput(f"the scale of the adapter {short_repr(name)} is {short_repr(scale)}; it must be a number")
    return served.adapter, served.scale * scale


def adapter_argument(adapters: Mapping[str, ServedAdapter], given: Any) -> Any:
    """The argument `adapter=` of a list of `[name, scale]`; None without."""
    if given is None:
        return None
    if not isinstance(given, list) or not all(isinstance(one, list) and len(one) == 2 for one in given):
        raise BadMessage(f"{short_repr(given)} must be a list of names with scales")
    return [named_adapter(adapters, name, scale) for name, scale in given]


def probe_argument(given: Any) -> Probe | tuple[Probe, ...] | None:
    """The argument `probe=`: one probe, a list of them, or None."""
    if isinstance(given, list):
        return tuple(probe_of(one) for one in given)
    return None if given is None else probe_of(given)
