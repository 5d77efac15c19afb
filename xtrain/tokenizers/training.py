"""Training a tokenizer on text (needs the package `tokenizers`)."""

from __future__ import annotations

import json
from collections.abc import Iterable

from ..errors import ConfigError, DataError
from .from_file import package

END = "<|endoftext|>"
SMALLEST = 257  # every byte, and the end of a document
MOST = 1 << 24  # the package takes memory for all tokens at once, and ends the process where there is too little


def train_tokenizer(texts: Iterable[bytes], vocab_size: int, eos: str = END) -> dict[str, bytes]:
    """Train byte-level BPE (Sennrich et al. 2016, with the alphabet and the words of GPT-2) on UTF-8 texts and return
    the files of a tokenizer directory {name: content}, which transformers reads too.

    Token 0 is `eos`, which ends a document. Texts that are too few for `vocab_size` tokens make fewer. The same texts
    make the same tokenizer. ConfigError for a vocabulary that is not in [257, 2**24] or an empty eos, DataError without
    the package or any text.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(f"vocab must be at least {SMALLEST}, every byte and the end of a document, got {vocab_size}")
    if vocab_size > MOST:
        raise ConfigError(f"vocab must be at most {MOST:,}, got {vocab_size:,}")
    if not eos:
        raise ConfigError("eos must not be empty")
    library = package("tokenizer train")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eos],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    seen = 0

    def strings() -> Iterable[str]:
        nonlocal seen
        for text in texts:
            seen += len(text)
            yield text.decode("utf-8", errors="replace")

    tokenizer.train_from_iterator(strings(), trainer)
    if not seen:
        raise DataError("data: there is no text to train a tokenizer on")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "eos_token": eos,
    }
    about = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    return {"tokenizer.json": (tokenizer.to_str(pretty=True) + "\n").encode(), "tokenizer_config.json": about.encode()}
