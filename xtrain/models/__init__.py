"""Transformer language models whose configuration keys and parameter names are Hugging Face's."""

from typing import TYPE_CHECKING

from .._lazy import lazy

# Lazy: saving imports the registry, a module of this package, and must not import any model by it.
if TYPE_CHECKING:
    from ..generation import generate
    from . import qwen3 as qwen3
    from .language_model import LanguageModel
    from .qwen3 import Qwen3
    from .qwen3_config import Qwen3Config
else:
    _HOMES = {
        "LanguageModel": ".language_model:LanguageModel",
        "Qwen3": ".qwen3:Qwen3",
        "Qwen3Config": ".qwen3_config:Qwen3Config",
        "generate": "..generation:generate",
        "qwen3": ".qwen3",
    }
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = ["LanguageModel", "Qwen3", "Qwen3Config", "generate"]
