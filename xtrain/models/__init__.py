"""Transformer language models whose configuration keys and parameter names are Hugging Face's."""

from typing import TYPE_CHECKING

from .._lazy import lazy

# Lazy: saving imports the registry, a module of this package, and must not import any model by it.
if TYPE_CHECKING:
    from ..generation import generate
    from ..saving import load_model as load
    from . import qwen3 as qwen3
    from .gemma2 import Gemma2, Gemma2Config
    from .gpt2 import GPT2, GPT2Config
    from .language_model import LanguageModel
    from .llama import Llama, LlamaConfig
    from .mistral import Mistral, MistralConfig
    from .qwen2 import Qwen2, Qwen2Config
    from .qwen3 import Qwen3, Qwen3Config
else:
    _HOMES = {
        "Gemma2": ".gemma2:Gemma2",
        "Gemma2Config": ".gemma2:Gemma2Config",
        "GPT2": ".gpt2:GPT2",
        "GPT2Config": ".gpt2:GPT2Config",
        "LanguageModel": ".language_model:LanguageModel",
        "Llama": ".llama:Llama",
        "LlamaConfig": ".llama:LlamaConfig",
        "Mistral": ".mistral:Mistral",
        "MistralConfig": ".mistral:MistralConfig",
        "Qwen2": ".qwen2:Qwen2",
        "Qwen2Config": ".qwen2:Qwen2Config",
        "Qwen3": ".qwen3:Qwen3",
        "Qwen3Config": ".qwen3:Qwen3Config",
        "generate": "..generation:generate",
        "load": "..saving:load_model",
        "qwen3": ".qwen3",
    }
    __getattr__, __dir__ = lazy(__name__, _HOMES)

__all__ = [
    "GPT2",
    "GPT2Config",
    "Gemma2",
    "Gemma2Config",
    "LanguageModel",
    "Llama",
    "LlamaConfig",
    "Mistral",
    "MistralConfig",
    "Qwen2",
    "Qwen2Config",
    "Qwen3",
    "Qwen3Config",
    "generate",
    "load",
]
