"""Headway's exceptions: one tree, drawn here.

    HeadwayError
    ├── InvalidInput (ValueError)        an invalid value: the message names it, the limit and the way out
    │   ├── InvalidToken                 a token id outside the vocabulary
    │   ├── ContextLengthExceeded        a position id past the model's context limit
    │   ├── InvalidMask                  an attention or logit mask that does not fit
    │   ├── TemplateError                a chat template that fails or does not fit the messages
    │   └── GrammarTooSlow               a grammar that takes too long to compile or to follow
    ├── OutOfRange (IndexError)          a row, layer or page that does not exist
    ├── WrongType (TypeError)            a value of an unexpected type
    ├── Unsupported                      something Headway or this model cannot do
    │   └── UnsupportedModel             an architecture that is not supported
    ├── ModelError                       a model that cannot be used
    │   ├── ModelNotFound                no such model, and what was tried
    │   └── BadModelFile (ValueError)    a file that is truncated, inconsistent or does not match its config
    ├── ContextBusy                      the context has a pass in flight
    ├── Closed                           the context, state, engine or pass is closed
    │   └── RankLost                     a process of a tensor-parallel engine has ended, and with it the engine
    ├── ConnectionFailed (ConnectionError)  a server that cannot be reached, or has ended the session
    ├── OutOfPages                       the page pool cannot provide the pages
    ├── OutOfMemory (MemoryError)        a device lacks the memory for a model and its KV cache
    ├── TokenBudgetExceeded              a context has used up its token budget
    ├── DeadlineExceeded (TimeoutError)  a context's deadline has passed
    ├── SnapshotError                    a saved context that cannot be opened
    ├── ItemFailed                       an item of a stream that could not be read; `index` says which
    ├── ToolFailed                       a tool that raised, took too long or was called too often
    ├── ValidationFailed                 two ways of computing the same thing disagree
    └── PassFailed                       the device failed while computing a pass

Catch `HeadwayError` for all of them, or the built-in class in parentheses.
On the command line each is one sentence and exit code 2.
"""

from __future__ import annotations


class HeadwayError(Exception):
    """The root of Headway's errors."""


class InvalidInput(HeadwayError, ValueError):
    """An invalid value."""


class InvalidToken(InvalidInput):
    """A token id outside the vocabulary."""


class ContextLengthExceeded(InvalidInput):
    """A position id past the model's context limit."""


class InvalidMask(InvalidInput):
    """An attention or logit mask that does not fit what it is applied to."""


class TemplateError(InvalidInput):
    """A chat template that fails, or does not fit the messages."""


class GrammarTooSlow(InvalidInput):
    """A grammar that takes too long to compile, or has taken too long to follow."""


class OutOfRange(HeadwayError, IndexError):
    """A row, layer or page that does not exist."""


class WrongType(HeadwayError, TypeError):
    """A value of a type that has no obvious meaning here."""


class Unsupported(HeadwayError):
    """Something that Headway, this backend or this model cannot do."""


class UnsupportedModel(Unsupported):
    """An architecture that is not supported."""


class ModelError(HeadwayError):
    """A model that cannot be used."""


class ModelNotFound(ModelError):
    """No such model; the message says what was tried."""


class BadModelFile(ModelError, ValueError):
    """A model file that is truncated, inconsistent or does not match its config."""


class ContextBusy(HeadwayError):
    """The context has a pass in flight and cannot be changed or forked now."""


class Closed(HeadwayError):
    """The context, state, engine or pass is over."""


class RankLost(Closed):
    """A process of a tensor-parallel engine has ended or failed, and with it the engine; the message says which."""


class ConnectionFailed(HeadwayError, ConnectionError):
    """A server cannot be reached, or has ended the session; the message says why."""


class OutOfPages(HeadwayError):
    """The page pool cannot supply what was asked."""


class OutOfMemory(HeadwayError, MemoryError):
    """A device lacks the memory for a model, a step or the KV cache; the message has the numbers."""


class TokenBudgetExceeded(HeadwayError):
    """A context has computed as many tokens as it may."""


class DeadlineExceeded(HeadwayError, TimeoutError):
    """A context's deadline has passed; the pass was not computed, or its result came too late."""


class SnapshotError(HeadwayError):
    """A saved context that cannot be opened."""


class ItemFailed(HeadwayError):
    """An item of a stream could not be read; `index` is its number, the cause is the source's own error."""

    index: int


class ToolFailed(HeadwayError):
    """A tool raised or took too long, or the model called tools in more rounds than it may."""


class ValidationFailed(HeadwayError):
    """Two ways of computing the same thing disagree."""


class PassFailed(HeadwayError):
    """The device failed while computing a pass; the context is as it was."""
