"""Generating token ids and text, with cached keys and values."""

from .cache import KVCache
from .sampling import LONGEST_SAMPLE, generate
from .text import generate_text

__all__ = ["LONGEST_SAMPLE", "KVCache", "generate", "generate_text"]
