"""Several remote sequences, generated together: what `num_beams` or `num_return_sequences` gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headway.base.errors import InvalidInput, Unsupported
from headway.program.generation.results import Continuation
from headway.program.generation.steps import Step
from headway.program.generation.stops import parse_json
from headway.remote.generation.generator import RemoteGeneration
from headway.remote.protocol.codec import as_number
from headway.remote.protocol.values import probes_of

if TYPE_CHECKING:
    from headway.remote.context import RemoteContext


class RemoteGenerations(RemoteGeneration):
    """Several continuations of one context, generated together: what `num_beams` or `num_return_sequences` gives."""

    _sequences: list[Continuation[Any]] | None = None
    _stepped = False

    async def sequences(self) -> list[Continuation[Any]]:
        """Run to the end; every sequence with its tokens, text, score, finish and seed, the best first."""
        if self._sequences is None:
            self._context._settle()
            reply = await self._wait("sequences")
            self._note(reply)
            self._sequences = [self._continuation(one) for one in reply["sequences"]]
        return list(self._sequences)

    def _continuation(self, sequence: Mapping[str, Any]) -> Continuation[Any]:
        return Continuation(
            tuple(sequence["tokens"]),
            sequence["text"],
            sequence["finish"],
            as_number(sequence["score"]),
            sequence["seed"],
            probes_of(self._probe, sequence["probes"]),
        )

    async def texts(self) -> list[str]:
        """Run to the end; the text of every sequence, the best first."""
        self._check_text()
        return [one.text for one in await self.sequences()]

    async def contexts(self) -> list[RemoteContext]:
        """Run to the end; a context for every sequence. The first is the context itself, the others are new."""
        from headway.remote.context import RemoteContext

        engine, (_, *others) = self._context.engine, await self.sequences()
        numbers = [engine._new_number() for _ in others]
        count = await self._wait("contexts", contexts=numbers)
        return [self._context, *(RemoteContext(engine, number) for number in numbers[:count])]

    async def tokens(self) -> list[int]:
        """Run to the end; the first sequence's tokens."""
        return list((await self.sequences())[0].tokens)

    async def text(self) -> str:
        """Run to the end; the first sequence's text."""
        self._check_text()
        return (await self.sequences())[0].text

    async def __anext__(self) -> Step[Any]:
        """The first sequence, as one step."""
        if self._stepped:
            raise StopAsyncIteration
        first, *_ = await self.sequences()
        self._stepped = True
        return Step(first.tokens, first.text, first.probes, first.finish)

    async def json(self, schema: Any = None) -> Any:
        """Run to the end; the first sequence's text as JSON. With a schema every sequence follows it."""
        self._check_text()
        if schema is None:
            return parse_json(await self.text(), self.finish)
        if self._sequences is not None:
            raise InvalidInput("a schema can be given to json() before the first step, and to no other constraint")
        return await super().json(schema)

    def _check_text(self) -> None:
        if not self._context.engine.has_tokenizer:
            raise Unsupported("this model has no tokenizer, so its tokens have no text; collect them with tokens()")

    def _check_one(self, verb: str) -> None:
        raise Unsupported(
            f"{verb}() steers one sequence, and num_beams or num_return_sequences ask for several at once; "
            "fork the context and generate in each fork"
        )
