"""The exception tree.  Every message says what happened, what was got, what is allowed, and how to mend it.

PancakeError
├── ConfigError                a setting, flag or environment value is not usable
├── EngineError                the model server
│   ├── EngineUnavailable      refused, unreachable, or ended in the middle of a stream
│   ├── EngineTimeout          no answer within the limit
│   ├── EngineRejected         the server answered 4xx
│   │   ├── ModelNotFound      it does not serve that model
│   │   └── ContextOverflow    prompt plus requested output exceed the window
│   ├── EngineFault            the server answered 5xx
│   ├── MalformedStream        the answer is not what the wire format allows
│   ├── StructuredOutputError  the answer is empty, cut short or does not fit the schema
│   └── Unsupported            this engine cannot do that (capability missing)
├── TierError                  the KV cache server
├── LaunchError                a child process did not start, or died
├── ModelFilesError            model files missing, wrong or unverifiable
├── CheckpointError            a checkpoint could not be stored or read
│   ├── StateTypeError         a value's type may not be stored, or a stored one may not come back
│   ├── CorruptCheckpoint      stored bytes are not what was written, or are sealed otherwise
│   ├── ThreadDeleted          a run wrote to a thread that had been deleted
│   ├── StoreUnavailable       the database or server does not answer; what was not acknowledged is not stored
│   └── SchemaMismatch         the database was made by something else, or by a later version
├── RetrievalError             an index could not be written, read or searched
│   ├── InvalidItem            an item may not be stored as it is
│   ├── InvalidQuery           a search cannot be answered as it is asked
│   ├── IndexLocked            another process writes to this index
│   ├── CorruptIndex           stored bytes are not what was written
│   ├── EmbedderMismatch       the index holds the vectors of another embedder
│   ├── EmbeddingError         an embedder's answer cannot be used
│   ├── DeviceFull             a DeviceBudget has no room for weights, say
│   ├── RetrievalOverloaded    too many searches wait already
│   └── RetrievalTimeout       no answer within the limit
├── TopologyError              an object is not a graph that can be read
└── InvariantError             bookkeeping does not add up (a bug in this package)
"""

from __future__ import annotations


class PancakeError(Exception):
    """Root of all errors raised on purpose by this package."""


class ConfigError(PancakeError, ValueError):
    """A setting is unknown, out of range or contradicts another."""


class EngineError(PancakeError):
    """The model server could not do what was asked."""


class EngineUnavailable(EngineError, ConnectionError):
    """The server refused the connection or ended it before the answer was complete."""


class EngineTimeout(EngineError, TimeoutError):
    """The server gave no answer within the limit."""


class EngineRejected(EngineError):
    """The server answered 4xx; `status_code` holds the number."""

    def __init__(self, message: str, *, status_code: int) -> None:
        """Keep the HTTP status next to the message."""
        super().__init__(message)
        self.status_code = status_code


class ModelNotFound(EngineRejected):
    """The server does not serve the model that was asked for."""


class ContextOverflow(EngineRejected):
    """Prompt plus requested output do not fit the model's window."""


class EngineFault(EngineError):
    """The server answered 5xx; `status_code` holds the number."""

    def __init__(self, message: str, *, status_code: int) -> None:
        """Keep the HTTP status next to the message."""
        super().__init__(message)
        self.status_code = status_code


class MalformedStream(EngineError):
    """The server sent something that the wire format does not allow."""


class StructuredOutputError(EngineError, ValueError):
    """The answer is not the structured value that was asked for; the message names the finish reason."""


class Unsupported(EngineError):
    """The engine lacks a capability; the message names it."""


class TierError(PancakeError):
    """The KV cache server did not answer, or answered wrongly."""


class LaunchError(PancakeError):
    """A child process did not start, did not become ready, or died."""


class ModelFilesError(PancakeError):
    """Model files are missing, damaged or not what was expected."""


class RuntimeClosed(PancakeError, RuntimeError):
    """A runtime was asked for something after it was closed."""


class CheckpointError(PancakeError):
    """A checkpoint could not be stored or read; nothing of the failed call was accepted."""


class StateTypeError(CheckpointError, TypeError):
    """A value's type may not be stored, or a stored type may not come back; the message names channel and type."""


class CorruptCheckpoint(CheckpointError, ValueError):
    """Stored bytes are missing, damaged, moved from another thread, or sealed with a key that is not known."""


class ThreadDeleted(CheckpointError):
    """A run wrote to, or read from, a thread that was deleted or expired meanwhile; the thread stays deleted."""


class StoreUnavailable(CheckpointError, ConnectionError):
    """The database or server does not answer, refuses, or has no room; the thread can be resumed when it does."""


class SchemaMismatch(CheckpointError):
    """The database was made by another program or by a later version of this package."""


class RetrievalError(PancakeError):
    """An index could not be written, read or searched; what was acknowledged is kept."""


class InvalidItem(RetrievalError, ValueError):
    """An item may not be stored as it is; nothing of its batch is stored."""


class InvalidQuery(RetrievalError, ValueError):
    """A search cannot be answered as it is asked."""


class IndexLocked(RetrievalError):
    """Another process writes to this index; there is one writer and any number of readers."""


class CorruptIndex(RetrievalError, ValueError):
    """Stored bytes of an index are not what was written; the part is named, and the rest can be used."""


class EmbedderMismatch(RetrievalError, ValueError):
    """The index holds vectors of another embedder, or of another version of it."""


class EmbeddingError(RetrievalError, ValueError):
    """An embedder answered with something that is no vector for each text; the message says what, not the text."""


class DeviceFull(RetrievalError, MemoryError):
    """What was to be counted in a `DeviceBudget` would pass the limit of a device; nothing of it was counted."""


class RetrievalOverloaded(RetrievalError):
    """More work waits than is allowed; nothing of this was queued, and it may be tried again later."""


class RetrievalTimeout(RetrievalError, TimeoutError):
    """A search or an embedding gave no answer within the limit; it may still be under way."""


class TopologyError(PancakeError, TypeError):
    """The object is not a compiled graph."""


class InvariantError(PancakeError):
    """Bookkeeping does not add up; always a bug in this package."""
