"""Generating token ids and text, with cached keys and values."""

from .cache import KVCache
from .sampling import LONGEST_SAMPLE, generate, stream_tokens
from .text import generate_text, stream_text

__all__ = ["LONGEST_SAMPLE", "KVCache", "generate", "generate_text", "stream_text", "stream_tokens"]
