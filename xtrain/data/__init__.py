"""Data: text or tokens on disk -> segments -> shuffled batches.

A *segment* is one 1-D array of token ids; training windows never cross segments. Sources (`open_data`):

    "python"         the .py files of the standard library (without installed packages), one document per file
    a text file      stays in the file; one segment; its last part is for validation
    a folder         every text file below it, sorted by path, one document per file; whole files are for validation
    a token file     written by `prepare`, or a 1-D integer .npy file; stays in the file; its last part for validation
    a folder with *.tokens or *.npy files: one segment each; those named val* are for validation, else the last parts

"a.tokens:0.7,python:0.3", or a mapping of such names, is a mixture: each row comes from one of the sources, as often as
its weight says (`mixture`).

JSON lines, Parquet, packed text and .bin files are made token files first, by `prepare`.

Hidden files, installed packages and what runs have written are left out of a folder: a run inside its own data can be
resumed, and none trains on the records of another.

Text becomes tokens through the model's tokenizer; with bytes as tokens nothing is copied or cached.

A token file is: the 8 bytes "xtokens\\0"; uint32 version = 1; uint32 bytes per token = 1, 2 or 4; uint64 token count;
uint64 bytes of the original text (0: unknown); uint32 vocabulary size (0: unknown); zeros up to byte 64; then the
tokens, all little-endian unsigned.
"""

from .corpus import MAX_FOLDER_BYTES, Corpus
from .file_array import FileArray
from .identity import identity, same_data
from .loader import IGNORED, Loader, Windows, permute
from .mixture import MixedLoader, parse_sources, shares_of, sources_text
from .packing import PackedLoader
from .prepare import prepare, source_files
from .readers import Document, read_documents
from .records import Encoder, texts_of
from .sources import Mixture, open_data
from .token_files import MAGIC, open_tokens

__all__ = [
    "IGNORED", "MAGIC", "MAX_FOLDER_BYTES", "Corpus", "Document", "Encoder", "FileArray", "Loader", "MixedLoader",
    "Mixture", "PackedLoader", "Windows", "identity", "open_data", "open_tokens", "parse_sources", "permute", "prepare",
    "read_documents", "same_data", "shares_of", "source_files", "sources_text", "texts_of",
]  # fmt: skip
