"""Reading documents, training tokenizers, fine-tuning."""

from __future__ import annotations

from faults.table import Fault

_D = "xtrain/data/"
_READERS = "tests/data/test_readers.py::"
_TOKENIZER = "tests/data/test_tokenizer_training.py::"

FAULTS = [
    Fault(
        "readers: the line",
        _D + "readers.py",
        "            number += 1\n            place =",
        "            number += 2\n            place =",
        "a broken line is named",
        _READERS + "test_a_broken_line_is_named",
    ),
    Fault(
        "readers: empty lines",
        _D + "readers.py",
        "            if not line.strip():\n                continue\n",
        "",
        "empty lines are no documents",
        _READERS + "test_a_line_is_a_document",
    ),
    Fault(
        "readers: the mark of UTF-8",
        _D + "readers.py",
        'line = line.removeprefix(b"\\xef\\xbb\\xbf")',
        "pass",
        "a byte-order mark is no text",
        _READERS + "test_a_line_is_a_document",
    ),
    Fault(
        "readers: what is no object",
        _D + "readers.py",
        "            if not isinstance(value, dict):\n",
        "            if value is None:\n",
        "a line is an object",
        _READERS + "test_a_broken_line_is_named",
    ),
    Fault(
        "readers: binary that is packed",
        _D + "readers.py",
        'if name.endswith(".gz") and not is_text(data):',
        "if False:",
        "packed binary files are refused",
        _READERS + "test_packed_text_is_one_document",
    ),
    Fault(
        "readers: the end is cut off",
        _D + "readers.py",
        "    except EOFError:\n",
        "    except KeyError:\n",
        "a damaged packed file is told",
        _READERS + "test_a_damaged_packed_file",
    ),
    Fault(
        "readers: tokens in half",
        _D + "readers.py",
        "    if (file.size - start) % width:\n",
        "    if False:\n",
        "a whole number of tokens",
        _READERS + "test_tokens_of_nanogpt",
    ),
    Fault(
        "readers: the header is tokens",
        _D + "readers.py",
        "start, count = 1024, int",
        "start, count = 0, int",
        "a header is left out",
        _READERS + "test_tokens_of_nanogpt",
    ),
    Fault(
        "prepare: any token of a .bin",
        _D + "prepare.py",
        "if known and largest >= known:",
        "if known and largest > known:",
        "tokens are in the vocabulary",
        _READERS + "test_tokens_of_nanogpt",
    ),
    Fault(
        "prepare: packed texts are overwritten",
        _D + "prepare.py",
        "(is_packed(file) or holds_text(file))",
        "holds_text(file)",
        "DataError when it would replace a text it is made of",
        _READERS + "test_a_folder_has_all_kinds",
    ),
    Fault(
        "prepare: the last batch",
        _D + "prepare.py",
        "if waiting and (text is None or",
        "if waiting and (",
        "every text is encoded",
        _TOKENIZER + "test_a_batch_is_its_texts",
    ),
    Fault(
        "corpus: JSON is text",
        _D + "corpus.py",
        "        if is_packed(file):\n",
        "        if False:\n",
        "nobody trains on JSON unawares",
        _READERS + "test_training_wants_documents_prepared",
    ),
    Fault(
        "tokenizer: no byte is left out",
        "xtrain/tokenizers/training.py",
        "initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),",
        "",
        "any text is encoded",
        _TOKENIZER + "test_it_encodes_any_text",
    ),
    Fault(
        "tokenizer: no end",
        "xtrain/tokenizers/training.py",
        '        "eos_token": eos,\n',
        "",
        "the end of a document has a name",
        _TOKENIZER + "test_it_encodes_any_text",
    ),
]
