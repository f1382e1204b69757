"""Reading a step on the device: the head on the rows that are read, samplers in one kernel, one small copy back.

Tokens are sampled by sampling.py, probes are answered concurrently by probes.py. Bias and penalties go onto a row of
logits in place, or onto a copy of it where others read the row too. What neither can do, typical-p above all, goes
through the torch reader, over the same logits; so does a bias for every token. The logits of a step are overwritten by
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headway.base.specs.adapters import Mixes
from headway.base.specs.probes import Probe, Ranking
from headway.base.specs.samplers import NO_TOKEN, UNDECIDED, Sampling
from headway.kernels.transfer import to_device
from headway.models.hooks import Hooks
from headway.runtime.batch import Batch, DecodeRows, reads_final_state
from headway.runtime.passes import BEFORE, Readout
from headway.runtime.readout import Ask, Reader, not_a_number
from headway.runtime.runners.adapter_rows import has_head
from headway.runtime.runners.cuda.arrays import PinnedBuffer, Upload
from headway.runtime.runners.cuda.graphs import Graphs, padded
from headway.runtime.runners.cuda.model import CudaModel
from headway.runtime.runners.cuda.probe_rounds import Drawn, Plan, plan
from headway.runtime.runners.cuda.probes import CudaProbes
from headway.runtime.runners.cuda.sampling import MOST, CudaDraws, Key
from headway.runtime.runners.cuda.steps import Mark
from headway.runtime.runners.row_adapters import add_heads

Values = dict[Key, object]
RowValues = tuple[object, ...]  # of the probes of a decode row
_RowReadout = tuple[int, int, int, Readout]  # a segment, the index of a readout, its row, and what it reads


class _Place(NamedTuple):
    """Where a readout's residual is: a batch row, or a segment's kept state."""

    row: int
    segment: int


class _Work(NamedTuple):
    """The readouts of a part of a step, each with its row of logits."""

    quick: list[tuple[int, Ask]]  # tokens that the device can draw
    slow: list[tuple[int, Ask]]  # tokens that it cannot
    probes: list[tuple[int, Ask]]
    samplers: list[list[tuple[int, Ask]]]  # by row: all tokens that are sampled there
    copied: list[int]  # rows whose logits are copied after the last row, for bias and penalties of one sampler each


class _Begun(NamedTuple):
    """A draw that the device is set to: where each token will stand, and what waits and gives those left undecided."""

    places: dict[Key, int]
    finish: Callable[[], list[tuple[int, Ask]]]


class CudaReader:
    """Turns residual rows into values. Owns the logits, of at most MOST rows at once, and who draws and looks there."""

    def __init__(self, model: CudaModel, graphs: Graphs, name: str) -> None:
        self.model, self._graphs, self._slow, self._name = model, graphs, Reader(model, None, add_heads), name
        self._room, self._row_names = 0, [f"{name} rows {i}" for i in range(2)]
        self._rows = Upload(MOST, torch.int32, model.device)
        self._sent_rows: Sequence[int] = ()  # those on the device
        self._draws, self._probes = CudaDraws(model, graphs, name), CudaProbes(model, graphs, name)
        self._grow(1)
        self._pinned = [PinnedBuffer(MOST, model.device) for _ in range(2)]  # for the tokens of decode rows, in turn
        self._row_probes: list[CudaProbes] = []  # for the probes of decode rows, in turn, once there are any
        self._same_readouts: tuple[Readout, ...] | None = None  # greedy ones, whose numbers are on the device already
        self._same_size = 0
        self._same_probes: tuple[object, object, Plan] | None = None  # of decode rows, and what is asked of them
        self._first = 0  # rows of x before those of the batch's segments: decode rows

    @property
    def tokens(self) -> Tensor:
        """What was sampled last [MOST] int32, on the device. It is always the same memory."""
        return self._draws.tokens

    def begin(self, batch: Batch, x: Tensor | None, mark: Mark, hooks: Hooks | None = None) -> Callable[[], Values]:
        """Set the device to work on what is read of the segments; the returned function waits for the values.

        x [T, E] is the residual before the final norm, decode rows first; None when T is 0.
        """
        self._first = batch.decode_count
        placed = [(s, index, row, r) for s, segment in enumerate(batch.segments) for index, row, r in segment.readouts]
        if hooks is not None:
            return self._looking(placed, x, batch, mark, hooks)
        return self._reading(placed, x, batch, mark)

    def _looking(
        self, placed: list[_RowReadout], x: Tensor | None, batch: Batch, mark: Mark, hooks: Hooks
    ) -> Callable[[], Values]:
        """What is read of the final state, and what was looked at on the way."""
        final = [a for a in placed if reads_final_state(a[3].what)]
        read = self._reading(final, x, batch, mark)

        def finish() -> Values:
            values = read()
            for s, index, row, r in placed:
                if not reads_final_state(r.what):
                    values[s, index] = self._slow.look(Ask(s, index, row, r), batch, hooks)
            return values

        return finish

    def _reading(self, placed: list[_RowReadout], x: Tensor | None, batch: Batch, mark: Mark) -> Callable[[], Values]:
        if x is not None and len(x) > 1 and 0 < len(placed) <= MOST and self._is_plain(placed):
            return self._plain(placed, x, batch)
        by_place: dict[_Place, list[Ask]] = {}
        for s, index, row, what in placed:
            place = _Place(row, s if row == BEFORE else 0)
            by_place.setdefault(place, []).append(Ask(s, index, row, what))
        places = list(by_place)
        parts = [places[start : start + MOST] for start in range(0, len(places), MOST)]
        if not parts:
            return dict
        if len(parts) == 1:
            return self._part(parts[0], by_place, batch, x, mark)
        values: Values = {}
        for part in parts:  # now: the next step overwrites x
            values |= self._part(part, by_place, batch, x, mark)()
        return lambda: values

    def samples(self, how: Sampling) -> bool:
        """Whether `sample_rows` can sample like this."""
        return self._draws.way(how).quick

    def reads(self, what: Probe, how: Sampling) -> bool:
        """Whether `probe_rows` can read this where `sample_rows` samples like that."""
        processed = isinstance(what, Ranking) and what.processed
        return reads_final_state(what) and not (processed and how.temperature > 0 and _filters(how))

    def row_logits(self, x: Tensor, rows: DecodeRows) -> Tensor:
        """Logits [N, V] of the first rows of x, which are these; then those that bias and penalties go onto of rows
        that have probes, too."""
        count, apart = len(rows), list(_copies(rows))
        self._grow((padded(count) or count) + len(apart))
        logits = self._adapted(x, range(count), () if rows.adapters is None else rows.adapters)
        if not apart:
            return logits
        if not self._lasts(logits):
            self._out[:count] = logits
        which = to_device(apart, torch.int64, logits.device)
        torch.index_select(self._out[:count], 0, which, out=self._out[count : count + len(apart)])
        return self._out[: count + len(apart)]

    def _adapted(self, x: Tensor, rows: Sequence[int], mixes: Mixes) -> Tensor:
        """Logits [R, V] of these rows of x, with what adapters of the output matrix add to its products."""
        if not has_head(mixes):
            return self.head(None if len(x) == 1 else rows, x)
        products = self._only(x, products=True) if len(x) == 1 else self._chosen(rows, x, products=True)
        which = torch.tensor(rows, device=x.device)
        add_heads(products, self.model.finish(x.index_select(0, which), None), mixes)
        return self.model.finish_logits(products)

    def sample_rows(
        self, rows: DecodeRows, logits: Tensor, words: Sequence[np.ndarray | None]
    ) -> Callable[[], list[int]]:
        """Sample a token at each row, where `words` are bits of what is allowed; the returned function waits for them.

        Two such steps may be in flight.
        """
        count, masks = len(rows), list[int]()
        bound = [bits for bits in words if bits is not None]
        if bound:
            self._draws.upload(bound)
            at = iter(range(count))
            masks = [-1 if bits is None else next(at) for bits in words]
        copies = _copies(rows)
        if bound or rows.readouts is not self._same_readouts:
            places = [copies.get(i, i) for i in range(count)]
            size = self._draws.fill(places, rows.readouts, rows.positions, masks)
            same = not bound and all(self._draws.way(r.what).numbers[0] == 0 for r in rows.readouts)
            self._same_readouts, self._same_size = rows.readouts if same else None, size
        if rows.adjustments is not None:
            found = [(copies.get(i, i), what) for i, what in enumerate(rows.adjustments) if what is not None]
            self._draws.adjust_rows(found, logits)
        self._launch(logits, self._same_size)
        pinned = self._pinned[0]
        self._pinned.reverse()
        pinned.send(self._draws.tokens[:count])
        return lambda: pinned.read(count)

    def probe_rows(self, rows: DecodeRows, logits: Tensor) -> Callable[[], list[RowValues | None]]:
        """Answer the probes of rows that are sampled; the returned function waits for the values of each row, None
        where they are left undecided. Two such steps may be in flight."""
        if not self._row_probes:
            self._row_probes = [CudaProbes(self.model, self._graphs, name) for name in self._row_names]
        asked = self._row_plan(rows)
        wait = self._row_probes[0].begin(asked, logits, self._draws.tokens, lasting=self._lasts(logits))
        self._row_probes.reverse()
        assert rows.probes is not None
        counts = [len(probes) for probes in rows.probes]

        def finish() -> list[RowValues | None]:
            values: Values = {}
            left = {ask.segment for _, ask in wait(values)}
            found = [None if i in left else range(count) for i, count in enumerate(counts)]
            return [at if at is None else tuple([values[i, n] for n in at]) for i, at in enumerate(found)]

        if len(asked.rounds) <= 1:
            return finish
        values = finish()  # now: later the next step's logits are there
        return lambda: values

    def _row_plan(self, rows: DecodeRows) -> Plan:
        """What is asked about decode rows; the same object while it is the same."""
        known = self._same_probes
        if known is not None and known[0] is rows.probes and known[1] is rows.readouts:
            return known[2]
        assert rows.probes is not None
        queries = [(i, Ask(i, at, i, what)) for i, probes in enumerate(rows.probes) for at, what in enumerate(probes)]
        copies = _copies(rows)
        drawn = {
            (ask.segment, ask.index): [_drawn_in_place(i, copies.get(i, i), rows.readouts[i].what)]
            for i, ask in queries
            if isinstance(ask.readout.what, Ranking)
        }
        asked = plan(queries, drawn, self.model.config.vocab_size)
        self._same_probes = rows.probes, rows.readouts, asked
        return asked

    def _is_plain(self, placed: list[_RowReadout]) -> bool:
        """Whether each row of the step is read once at most, by a sampler that needs nothing but its numbers."""
        ways, rows = self._draws.ways, set()
        for _, _, row, r in placed:
            way = ways.get(id(r.what))
            if way is None or way[0] is not r.what:
                if not isinstance(r.what, Sampling):
                    return False
                way = r.what, self._draws.way(r.what)
            if row == BEFORE or not way[1].plain or r.allowed is not None or r.async_mask is not None:
                return False
            if r.bias is not None:
                return False
            rows.add(row)
        return len(rows) == len(placed)

    def _plain(self, placed: list[_RowReadout], x: Tensor, batch: Batch) -> Callable[[], Values]:
        """Most decodes: the same with less of the host's time."""
        rows = [row for _, _, row, _ in placed]
        places = [self._first + row for row in rows]
        mixes = [batch.segments[s].mix_of(row) for s, _, row, _ in placed]
        logits = self._adapted(x, places, mixes)
        readouts = [r for _, _, _, r in placed]
        size = self._draws.fill(range(len(placed)), readouts, batch.positions[rows], ())
        self._launch(logits, size)

        def finish() -> Values:
            values: Values = {}
            for (segment, index, row, r), token in zip(placed, self._draws.wait(len(placed)), strict=True):
                if token >= 0:
                    values[segment, index] = token
                elif token == NO_TOKEN:
                    values[segment, index] = not_a_number()
                else:
                    values |= self._slow.answers([Ask(segment, index, row, r)], [rows.index(row)], logits, batch)
            return values

        return finish

    def _part(
        self, places: list[_Place], by_place: dict[_Place, list[Ask]], batch: Batch, x: Tensor | None, mark: Mark
    ) -> Callable[[], Values]:
        work = self._sorted([by_place[place] for place in places])
        mixes = [batch.segments[by_place[place][0].segment].mix_of(place.row) for place in places]
        logits = self._logits(places, batch, x, work.copied, mixes)
        mark("head")
        values: Values = {}
        # An async mask is waited for when the device has all the work it can be given.
        now = len(work.quick) <= MOST and not any(_waits(ask) for _, ask in (*work.quick, *work.probes))
        begun = self._draw(work.quick, logits, batch, values) if now else None
        looked = self._look(work, logits, begun, values) if begun is not None else None

        def finish() -> Values:
            left = list(work.slow)
            if begun is not None:
                left += begun.finish()
            else:
                for start in range(0, len(work.quick), MOST):
                    left += self._draw(work.quick[start : start + MOST], logits, batch, values).finish()
            if left:
                values.update(self._slow.answers([a for _, a in left], [at for at, _ in left], logits, batch))
            wait = self._look(work, logits, None, values) if looked is None else looked
            self._settle(wait(values), work, logits, batch, values)
            mark("sample")
            return values

        return finish

    def _look(
        self, work: _Work, logits: Tensor, begun: _Begun | None, values: Values
    ) -> Callable[[Values], list[tuple[int, Ask]]]:
        """Have the device answer the probes, together with the tokens that it samples or after them."""
        drawn = {
            (ask.segment, ask.index): [self._drawn(row, mate, work, begun, values) for row, mate in work.samplers[at]]
            for at, ask in work.probes
            if isinstance(ask.readout.what, Ranking)
        }
        asked = plan(work.probes, drawn, self.model.config.vocab_size)
        return self._probes.begin(asked, logits, self._draws.tokens, lasting=self._lasts(logits))

    def _drawn(self, row: int, ask: Ask, work: _Work, begun: _Begun | None, values: Values) -> Drawn | None:
        """What is drawn at a row of logits, as a ranking of it needs to know; None when it is not known yet."""
        how, key = ask.readout.what, (ask.segment, ask.index)
        assert isinstance(how, Sampling)
        token = values.get(key)
        if begun is not None and key in begun.places:
            token = -1 - begun.places[key]
        if not isinstance(token, int):
            return None
        adjusted = row >= len(work.samplers) or not (self._draws.way(how).adjusts or ask.readout.bias is not None)
        known = adjusted and (how.temperature == 0 or not _filters(how))
        return Drawn(token, row, how.temperature if known else None, ask.readout.permitted() if known else None)

    def _settle(self, left: list[tuple[int, Ask]], work: _Work, logits: Tensor, batch: Batch, values: Values) -> None:
        """Probes that the device leaves undecided."""
        rest = [(at, ask) for at, ask in left if not isinstance(ask.readout.what, Ranking)]
        if rest:
            values.update(self._slow.answers([a for _, a in rest], [at for at, _ in rest], logits, batch))
        for at, ask in left:
            if isinstance(what := ask.readout.what, Ranking):
                mates = [mate for _, mate in work.samplers[at]]
                tokens = [values[mate.segment, mate.index] for mate in mates]
                bad = bool(logits[at].isnan().any())
                value = not_a_number() if bad else self._slow.ranked(what, logits[at], mates, tokens, batch)
                values[ask.segment, ask.index] = value

    # -- logits ----------------------------------------------------------------------------------------------------

    def _grow(self, rows: int) -> None:
        """Make the logits buffer hold this many rows; graphs that write to the old one go."""
        if rows <= self._room:
            return
        self._room = rows if rows < 64 else max(rows, MOST)
        names = {self._name, *self._row_names}
        self._graphs.forget(lambda key: not names.isdisjoint(key))
        c, device = self.model.config, self.model.device
        self._out = torch.empty(self._room, c.vocab_size, dtype=torch.float32, device=device)
        self._h = torch.empty(self._room, c.hidden_size, dtype=self.model.dtype, device=device)

    def _logits(
        self, places: Sequence[_Place], batch: Batch, x: Tensor | None, copied: list[int], mixes: Mixes
    ) -> Tensor:
        """Logits [R, V] of these places, in the reader's own buffer, followed by a copy of the `copied` rows."""
        if any(place.row == BEFORE for place in places):
            logits = self._slow.logits([self._residual(place, batch, x) for place in places], mixes)
            return torch.cat((logits, logits[copied])) if copied else logits
        assert x is not None
        count = len(places)
        self._grow((1 if len(x) == 1 else count) + len(copied))
        logits = self._adapted(x, [self._first + place.row for place in places], mixes)
        if not copied:
            return logits
        self._out[count : count + len(copied)] = logits[copied]
        return self._out[: count + len(copied)]

    def head(self, rows: Sequence[int] | None, x: Tensor) -> Tensor:
        """Logits [R, V] of these rows of x; None: of its only one."""
        return self._only(x) if rows is None else self._chosen(rows, x)

    def _only(self, x: Tensor, *, products: bool = False) -> Tensor:
        """Logits [1, V] of the one row of x, or what its output matrix gives."""
        logits, h = self._out[:1], self._h[:1]
        self.model.before_head(None)
        name, run = self._what(products)
        self._graphs.run((name, 0, x.data_ptr(), self._name), lambda: run(x, None, h, logits))
        return logits

    def _what(self, products: bool) -> tuple[str, Callable[[Tensor, Tensor | None, Tensor, Tensor], None]]:
        """What computes logits, or what becomes them, and the name of its graphs."""
        apart = products and self.model.finishes_logits
        return ("products", self.model.products) if apart else ("head", self.model.head)

    def _chosen(self, rows: Sequence[int], x: Tensor, *, products: bool = False) -> Tensor:
        """Logits [R, V] of these rows of x, or what their output matrix gives."""
        count, size = len(rows), padded(len(rows))
        assert size is not None
        self._grow(size)
        logits, h = self._out[:size], self._h[:size]
        if rows != self._sent_rows:
            numbers = np.zeros(size, np.int32)
            numbers[:count] = rows
            self._rows.put(numbers)
            self._sent_rows = rows
        chosen = self._rows.device[:size]
        self.model.before_head(rows)
        name, run = self._what(products)
        self._graphs.run((name, size, x.data_ptr(), self._name), lambda: run(x, chosen, h, logits))
        return logits[:count]

    def _residual(self, place: _Place, batch: Batch, x: Tensor | None) -> Tensor:
        kept = batch.segments[place.segment].kept if place.row == BEFORE else None
        if kept is not None:
            assert isinstance(kept, Tensor)
            return kept
        assert x is not None
        return x[self._first + place.row]

    # -- tokens ----------------------------------------------------------------------------------------------------

    def _sorted(self, rows: list[list[Ask]]) -> _Work:
        """What is asked at each row of logits, by who does it."""
        work = _Work([], [], [], [], [])
        for at, asks in enumerate(rows):
            work.samplers.append([])
            for ask in asks:
                row, what = at, ask.readout.what
                if not isinstance(what, Sampling):
                    work.probes.append((at, ask))
                    continue
                way = self._draws.way(what)
                can = way.quick and not ask.readout.is_biased
                apart = can and way.adjusts and len(asks) > 1
                if apart and len(work.copied) < MOST:
                    row = len(rows) + len(work.copied)
                    work.copied.append(at)
                quick = can and (row != at or not apart)
                (work.quick if quick else work.slow).append((row, ask))
                work.samplers[-1].append((row, ask))
        return work

    def _draw(self, draws: list[tuple[int, Ask]], logits: Tensor, batch: Batch, values: Values) -> _Begun:
        """Have the device draw tokens of at most MOST asks."""
        if any(self._draws.way(ask.readout.what).adjusts for _, ask in draws):
            self._draws.adjust(draws, logits)
        bound = self._draws.bind(draws, values)
        drawn = [(at, ask) for at, ask in draws if (ask.segment, ask.index) not in values] if values else draws
        if not drawn:
            return _Begun({}, list)
        positions = np.array([_position(batch, ask) for _, ask in drawn])
        masks = [bound.get((ask.segment, ask.index), -1) for _, ask in drawn] if bound else ()
        size = self._draws.fill([at for at, _ in drawn], [ask.readout for _, ask in drawn], positions, masks)
        self._launch(logits, size)
        places = {(ask.segment, ask.index): i for i, (_, ask) in enumerate(drawn)}
        return _Begun(places, lambda: self._tell(drawn, values))

    def _launch(self, logits: Tensor, size: int) -> None:
        """Draw what was said."""
        self._draws.launch(logits, size, lasting=self._lasts(logits))

    def _lasts(self, logits: Tensor) -> bool:
        """Whether these are in the reader's own buffer."""
        return logits.data_ptr() == self._out.data_ptr()

    def _tell(self, drawn: list[tuple[int, Ask]], values: Values) -> list[tuple[int, Ask]]:
        """Wait for the tokens; those that the device leaves undecided come back."""
        undecided = []
        for (at, ask), token in zip(drawn, self._draws.wait(len(drawn)), strict=True):
            if token == UNDECIDED:
                undecided.append((at, ask))
            else:
                values[ask.segment, ask.index] = not_a_number() if token == NO_TOKEN else token
        return undecided


def _copies(rows: DecodeRows) -> dict[int, int]:
    """Rows with bias or penalties and with probes, which see neither, and where a copy of each row's logits is."""
    if rows.adjustments is None or rows.probes is None:
        return {}
    both = zip(rows.adjustments, rows.probes, strict=True)
    apart = [i for i, (adjusted, probes) in enumerate(both) if adjusted is not None and probes]
    return {row: len(rows) + i for i, row in enumerate(apart)}


def _drawn_in_place(place: int, row: int, how: Sampling | Probe) -> Drawn:
    """What is drawn at a decode row, from this row of logits, as a ranking of it needs to know."""
    assert isinstance(how, Sampling)
    known = how.temperature == 0 or not _filters(how)
    return Drawn(-1 - place, row, how.temperature if known else None, None)


def _filters(how: Sampling) -> bool:
    return bool(how.top_k or how.top_p < 1 or how.min_p or how.filters_rarely)


def _position(batch: Batch, ask: Ask) -> int:
    """The position id of the row that is read."""
    return int(batch.positions[ask.row]) if ask.row != BEFORE else batch.segments[ask.segment].before_position


def _waits(ask: Ask) -> bool:
    """Whether an async mask binds it."""
    bound = isinstance(ask.readout.what, Sampling) or getattr(ask.readout.what, "masked", False)
    return bound and ask.readout.async_mask is not None
