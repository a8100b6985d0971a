"""Errors that a user can cause and mend: each says what was given, what is allowed, what to do."""

from __future__ import annotations


class DlmDecodeError(Exception):
    """Base of all errors that the command line prints without a traceback."""


class UnknownNameError(DlmDecodeError, KeyError):
    """A name that no registry entry has."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0])


class OptionError(DlmDecodeError, ValueError):
    """An option that is unknown, of the wrong type or out of range."""


class RequestError(DlmDecodeError, ValueError):
    """A request that cannot be decoded: empty, too long, or with ids the model does not know."""


class CapabilityError(DlmDecodeError, ValueError):
    """A sampler, cache or schedule asks for something that the model or engine does not offer."""


class CheckpointError(DlmDecodeError, ValueError):
    """A checkpoint folder that is missing, incomplete, misshapen or of an unknown family."""


class ParallelError(DlmDecodeError, RuntimeError):
    """Another process of those that share a model failed, so that this one can't go on either."""


class CapacityError(DlmDecodeError, MemoryError):
    """A request that does not fit into the memory set aside for it; the message has the numbers."""
