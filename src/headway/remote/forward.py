"""A pass over a remote context: the builder notes what it is told, and `execute` sends it in one message.

What is wrong whatever the context holds (ids, layers, samplers) raises here at once, as in process; what depends on the
context raises when the pass is awaited.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from headway.base.checks import check_number
from headway.base.errors import (
    Closed,
    InvalidInput,
    InvalidMask,
    PassFailed,
    Unsupported,
    WrongType,
)
from headway.base.specs.brle import Brle
from headway.base.specs.masks import Mask, logit_mask
from headway.base.specs.probes import Probe
from headway.base.specs.samplers import Sampler, bias_array
from headway.base.system.lazy_numpy import has_numpy
from headway.base.text import short_repr
from headway.program.checks.ids import integers, position_ids, token_ids
from headway.program.checks.readouts import check_probe, checked_sample
from headway.program.output import Output, ProbeHandle, SampleHandle
from headway.remote.execution import RemoteExecution, Submitted
from headway.remote.protocol.values import mask_json, pass_stats_of, spec_json, value_of
from headway.remote.rules import bound_mask
from headway.runtime.passes import PassResult

if TYPE_CHECKING:
    from headway.remote.context import RemoteContext

P = TypeVar("P", bound=Probe)


class RemoteForward:
    """One pass over a remote context: add inputs and readouts, then `await execute()`, once."""

    def __init__(self, context: RemoteContext, prepared: int | None = None, asks: Iterable[Probe | int] = ()) -> None:
        self._context, self._prepared = context, prepared
        self._operations: list[list[Any]] = []
        self._positions: list[int | None] = []  # of the rows; None: the next one
        self._asks: list[Probe | int] = list(asks)  # a probe, or how many tokens are sampled
        self._sources: set[RemoteForward] = set()  # the passes whose tokens are fed to this one
        self._mask: Mask | None = None
        self._causal = True
        self._executed = False
        self._submitted: Submitted | None = None
        self._result: PassResult | None = None
        self._number = 0

    def __repr__(self) -> str:
        samples = sum(ask for ask in self._asks if isinstance(ask, int))
        probes = sum(not isinstance(ask, int) for ask in self._asks)
        state = "executed" if self._executed else "not executed"
        return f"<Forward: {len(self._positions)} input tokens, {samples} samples, {probes} probes, {state}>"

    # -- input -------------------------------------------------------------------------------------------------------

    def input(self, tokens: Iterable[int] | SampleHandle) -> RemoteForward:
        """Append tokens at the positions that follow, or those that an earlier pass samples."""
        self._check_open()
        if isinstance(tokens, SampleHandle):
            return self._feed(tokens)
        ids = token_ids(tokens, self._context.engine.vocab_size)
        self._operations.append(["input", ids])
        self._positions += [None] * len(ids)
        return self

    def input_at(self, tokens: Iterable[int], positions: Iterable[int]) -> RemoteForward:
        """Append tokens at explicit position ids: gaps, repeats and reorders are allowed."""
        self._check_open()
        ids = token_ids(tokens, self._context.engine.vocab_size)
        at = position_ids(positions, self._context.engine.config.max_positions)
        if len(ids) != len(at):
            raise InvalidInput(f"input_at has {len(ids)} tokens and {len(at)} positions; there must be one for each")
        self._operations.append(["input_at", ids, at])
        self._positions += at
        return self

    def _feed(self, handle: SampleHandle) -> RemoteForward:
        source = handle.owner
        assert isinstance(source, RemoteForward)
        if source._context is not self._context:
            raise InvalidInput("this handle belongs to a pass over another context; feed its token after reading it")
        if source._submitted is None:
            raise InvalidInput("this handle's pass was not executed yet; call execute() on it first")
        if source._submitted.failed:
            raise PassFailed("the pass whose token is fed failed or was cancelled, so there is no token")
        self._sources.add(source)
        if source._result is not None:  # its tokens are known
            return self.input([int(v) for v in source._result.values[handle.first : handle.first + handle.count]])  # type: ignore[call-overload]
        self._operations.append(["feed", source._number, source._ask_at(handle.first)])
        self._positions += [None] * handle.count
        return self

    def _ask_at(self, first: int) -> int:
        """The number of the ask whose first value has this number."""
        seen = 0
        for number, ask in enumerate(self._asks):
            if seen == first:
                return number
            seen += ask if isinstance(ask, int) else 1
        raise AssertionError(first)

    # -- modifiers ---------------------------------------------------------------------------------------------------

    def attention_mask(self, mask: Mask | Sequence[Sequence[int]], *, causal: bool = True) -> RemoteForward:
        """What each row attends to: a `Mask`, or raw runs, one list a row (zeros first, 0 = attend, 1 = masked)."""
        self._check_open()
        if self._mask is not None:
            raise InvalidMask("attention_mask was called twice; combine masks with & and | and give them once")
        if not isinstance(causal, bool) and str(getattr(causal, "dtype", "")) != "bool":
            raise WrongType(f"causal is {short_repr(causal)}; expected True or False")
        self._mask = mask if isinstance(mask, Mask) else Mask.from_runs(mask)
        self._causal = bool(causal)
        return self

    def mask(self, runs: Any = None, *, allow: Any = None, forbid: Any = None, rows: Any = None) -> RemoteForward:
        """Which tokens samplers may choose (1 = allowed): runs, ids, a bool array or a packed bitmask. Calls AND."""
        self._check_open()
        allowed = allowed_tokens(self._context.engine.vocab_size, runs, allow, forbid)
        self._operations.append(["mask", list(allowed.runs), _rows(rows)])
        return self

    def bias(self, array: Any, *, rows: Iterable[int] | None = None) -> RemoteForward:
        """Add an array [V] to the logits before everything else that samplers do; -inf rules a token out."""
        self._check_open()
        values = bias_values(array, "the bias", self._context.engine.vocab_size)
        self._operations.append(["bias", values, _rows(rows)])
        return self

    def mask_async(self, mask: Any) -> NoReturn:
        """Refused: such a mask is computed next to the device."""
        raise Unsupported("mask_async is for programs in the engine's process; use mask, or generate with constrain=")

    def adapter(self, adapter: str, scale: float = 1.0) -> RemoteForward:
        """Compute this pass under a LoRA adapter of the server, by its name. Several add up, each times its scale."""
        self._check_open()
        self._operations.append(["adapter", *adapter_pair((adapter, scale))])
        return self

    def _under(self, mix: list[Any] | None) -> RemoteForward:
        """Compute this pass under adapters that were read before."""
        self._operations += [["adapter", name, scale] for name, scale in mix or ()]
        return self

    def defer_commit(self) -> RemoteForward:
        """Leave full pages working after the pass; commit them with `ctx.inner().commit_working_pages`."""
        self._check_open()
        self._operations.append(["defer_commit"])
        return self

    # -- readouts ----------------------------------------------------------------------------------------------------

    def sample(
        self,
        indices: Iterable[int],
        sampler: Sampler,
        *,
        history: Iterable[int] | None = None,
        generated: Iterable[int] | None = None,
    ) -> SampleHandle:
        """Draw one token at each row. Penalties count `history`, by default the context's tokens up to the row."""
        self._check_open()
        ask = checked_sample(self._context.engine.config, indices, sampler, history, generated)
        self._operations.append(["sample", ask.rows, spec_json(sampler), ask.history, ask.generated])
        handle = SampleHandle(self, self._values, len(ask.rows))
        self._asks.append(len(ask.rows))
        return handle

    def probe(self, index: int, probe: P) -> ProbeHandle[P]:
        """Read something at a row without choosing a token."""
        self._check_open()
        (row,) = integers([index], "index")
        check_probe(self._context.engine.config, probe)
        self._operations.append(["probe", row, spec_json(probe)])
        handle = ProbeHandle(self, self._values, probe)
        self._asks.append(probe)
        return handle

    @property
    def _values(self) -> int:
        return sum(ask if isinstance(ask, int) else 1 for ask in self._asks)

    # -- running -----------------------------------------------------------------------------------------------------

    def execute(self) -> RemoteExecution:
        """Send the pass now; await the execution for its `Output`. On any error the context is as it was."""
        self._check_open()
        context, source = self._context, self._source()
        context._check_idle(source)
        operations = self._taken()
        context._settle()
        self._number = context.engine._new_number()
        extra: dict[str, Any] = {} if self._prepared is None else {"prepared": self._prepared}
        request, mailbox = context._connection.ask(
            "pass.execute", context=context._number, number=self._number, operations=operations, **extra
        )
        self._submitted = Submitted(context._connection, self._number, request, mailbox)
        if source is not None:
            source.fed.append(self._submitted)
        context._began(self._submitted)
        return RemoteExecution(self, self._submitted)

    def _source(self) -> Submitted | None:
        """The pass that feeds this one."""
        if len(self._sources) > 1:
            raise InvalidInput(
                "the handles fed to this pass belong to several passes; only the one before it can feed it"
            )
        return next(iter(self._sources))._submitted if self._sources else None

    def _taken(self) -> list[Any]:
        """The operations, to be sent; the builder is closed then."""
        mask = [] if self._mask is None else [["attention_mask", self._mask_json(self._mask), self._causal]]
        self._executed = True
        return [*self._operations, *mask]

    def _mask_json(self, mask: Mask) -> list[Any]:
        if not mask.needs_positions:
            return mask_json(mask)
        state = self._context._ask("positions")
        known, pending = state["positions"], state["pending"]
        first, following = len(known), state["next"]
        known += range(following - pending, following)
        for given in self._positions:
            position = following if given is None else given
            following = max(following, position + 1)
            known.append(position)
        total = None if self._causal else first + pending
        return bound_mask(mask, known, first, pending + len(self._positions), total)

    @property
    def output(self) -> Output:
        """The results of a pass that was executed and has ended; for whoever did not execute it."""
        if self._result is None and (
            self._submitted is None or not self._submitted.done() or self._submitted.cancelled
        ):
            raise Closed("this pass has no results; execute it, and await the execution")
        return self._delivered()

    def _delivered(self) -> Output:
        """The output of a pass that has ended."""
        if self._result is None:
            assert self._submitted is not None
            self._read(self._submitted.value())
            self._submitted.is_taken = True
        assert self._result is not None
        return Output(self, self._result)

    def _read(self, reply: dict[str, Any]) -> None:
        """Keep what the server has read."""
        values: list[Any] = []
        for ask, value in zip(self._asks, reply["values"], strict=True):
            values += value if isinstance(ask, int) else [value_of(ask, value)]
        self._result = PassResult(tuple(values), pass_stats_of(reply["stats"]))

    def _check_open(self) -> None:
        if self._executed:
            raise Closed("this pass was executed before; build a new one with ctx.forward()")


def adapter_pair(given: Any) -> list[Any]:
    """A name with its scale."""
    name, scale = given if isinstance(given, tuple) and len(given) == 2 else (given, 1.0)
    if not isinstance(name, str):
        raise WrongType(
            f"adapter is {short_repr(name)}; over a connection adapters are named: give the name that the server has "
            "loaded it under (engine.adapters)"
        )
    return [name, check_number(scale, "the scale of an adapter")]


def adapter_list(given: Any) -> list[Any] | None:
    """The argument `adapter=`: a name, a pair with its scale, or a list of these."""
    if given is None:
        return None
    if not isinstance(given, list):
        return [adapter_pair(given)]
    return [adapter_pair(tuple(one) if isinstance(one, list) else one) for one in given]


def allowed_tokens(vocab: int, runs: Any, allow: Any, forbid: Any) -> Brle:
    """A logit mask in any of its forms, as bits."""
    if has_numpy():
        return Brle.from_bool(logit_mask(vocab, runs, allow=allow, forbid=forbid))
    if runs is None and allow is None and forbid is None:
        raise InvalidInput("a logit mask needs runs, allow=ids or forbid=ids")
    bits = Brle.ones(vocab) if runs is None else Brle.from_runs(runs, where="the logit mask")
    if len(bits) != vocab:
        raise InvalidMask(f"the logit mask's runs sum to {len(bits)}; expected {vocab}")
    if allow is not None:
        bits &= Brle.from_intervals(vocab, [(id, id + 1) for id in token_ids(allow, vocab, "allow")])
    if forbid is not None:
        bits &= ~Brle.from_intervals(vocab, [(id, id + 1) for id in token_ids(forbid, vocab, "forbid")])
    if not bits.any():
        raise InvalidMask(f"the logit mask allows none of {vocab} tokens (1 = allowed); allow at least one")
    return bits


def bias_values(values: Any, name: str, vocab: int) -> Any:
    """A bias for every token, as an array that can be sent."""
    if has_numpy():
        return bias_array(values, name, vocab)
    from array import array

    return array("d", values)


def _rows(rows: Iterable[int] | None) -> list[int] | None:
    return None if rows is None else integers(rows, "rows")
