"""Generating token ids and text, with cached keys and values."""

from .cache import KVCache
from .sampling import LONGEST_SAMPLE, generate, stream_tokens
from .text import generate_text, generate_texts, stream_text, stream_texts

__all__ = [
    "LONGEST_SAMPLE",
    "KVCache",
    "generate",
    "generate_text",
    "generate_texts",
    "stream_text",
    "stream_texts",
    "stream_tokens",
]
