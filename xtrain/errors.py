"""Errors that a user can cause and repair: each carries one sentence, and the command line prints exactly that."""

from __future__ import annotations


class ConfigError(ValueError):
    """An unknown option, a value of the wrong type or range, or a resume with another configuration."""


class DataError(ValueError):
    """Data that is missing, unreadable, empty, too short, or does not fit the model."""


class CheckpointError(ValueError):
    """A checkpoint or model directory that is missing, damaged, hostile, or cannot be written."""


class NonFiniteError(FloatingPointError):
    """The loss or a gradient became NaN or infinite. The last checkpoint on disk is from before that step, and the
    Trainer stands before it too.
    """
