"""Transformer language models whose configuration keys and parameter names are Hugging Face's."""

from .generate import generate
from .qwen3 import Qwen3, Qwen3Config

__all__ = ["Qwen3", "Qwen3Config", "generate"]
