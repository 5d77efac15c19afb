"""The `xtrain` command."""

from .dispatch import main

__all__ = ["main"]
