"""Reading directories against their manifest, clause by clause."""

from __future__ import annotations

from faults.table import Fault

FAULTS = [
    Fault("reading: has lists", "xtrain/saving/reader.py", "return name in (self.records or ()) or (self.directory / name).is_file()", "return (self.directory / name).is_file()", "whether the file is there, or should be there", "tests/saving/test_reader_clauses.py::test_a_file_that_should_be_there_is_missed"),
    Fault("reading: broken manifest link", "xtrain/saving/reader.py", "if os.path.lexists(manifest) else None", "if os.path.exists(manifest) else None", "a manifest that is a broken link is damaged", "tests/saving/test_reader_clauses.py::test_a_manifest_that_is_a_broken_link_is_an_error"),
    Fault("reading: queue unbounded", "xtrain/saving/reader.py", "            if len(self._checks) >= _QUEUE:\n                self._wait()\n", "            if len(self._checks) >= _QUEUE:\n                self._checks.clear()\n", "every piece of a whole file is checked", "tests/saving/test_reader_clauses.py::test_every_one_of_many_pieces_is_checked"),
    Fault("reading: close leaves file", "xtrain/saving/reader.py", "        finally:\n            self._file.close()\n            if self._pool", "        finally:\n            if self._pool", "the end of the block closes the file", "tests/saving/test_reader_clauses.py::test_an_error_in_the_block_is_the_one_that_is_raised"),
    Fault("reading: format 3", "xtrain/saving/reader.py", "if number not in (1, FORMAT) or", "if number is None or", "format 1 or 2", "tests/saving/test_malformed.py::test_values_of_a_manifest"),
    Fault("reading: piece counts bool", "xtrain/saving/reader.py", "return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63", "return isinstance(value, int) and 0 <= value < 2**63", "sizes are whole numbers", "tests/saving/test_reader_clauses.py::test_pieces_that_cannot_be"),
    Fault("reading: piece negative", "xtrain/saving/reader.py", "not isinstance(value, bool) and 0 <= value < 2**63", "not isinstance(value, bool) and value < 2**63", "sizes are not negative", "tests/saving/test_reader_clauses.py::test_pieces_that_cannot_be"),
    Fault("reading: empty pieces", "xtrain/saving/reader.py", "pieces = [piece for piece in pieces if piece[0] or number == 1]", "pieces = [piece for piece in pieces]", "pieces of nothing are passed over", "tests/saving/test_reader_clauses.py::test_pieces_of_nothing_are_passed_over"),
    Fault("reading: open whole at exit of error", "xtrain/saving/reader.py", "self.close(check=kind is None)", "self.close()", "an error in the block is the one that is raised", "tests/saving/test_reader_clauses.py::test_an_error_in_the_block_is_the_one_that_is_raised"),
    Fault("reading: names printable", "xtrain/saving/reader.py", "if not (plain and name.isprintable() and isinstance(entry, dict)):", "if not (plain and isinstance(entry, dict)):", "names of a manifest are printable", "tests/saving/test_reader_clauses.py::test_names_that_are_no_plain_names"),
    Fault("reading: names empty", "xtrain/saving/reader.py", 'name not in ("", ".", "..")', 'name not in ("..",)', "names of a manifest are plain", "tests/saving/test_reader_clauses.py::test_names_that_are_no_plain_names"),
]  # fmt: skip
