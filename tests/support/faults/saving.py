"""Files, model directories, checkpoints and their manifests."""

from __future__ import annotations

from faults.table import Fault

_S = "xtrain/saving/"
_F = "xtrain/files.py"
_WRITING = "tests/saving/test_writing.py::"
_READER = "tests/saving/test_reader.py::"
_SAVING = "tests/train/test_saving.py::"
_RULES = "tests/saving/test_saving_rules.py::"
_MADE = _WRITING + "test_what_is_made_is_flushed_with_its_folder"
_PUBLISHED = _WRITING + "test_a_directory_is_flushed_before_and_its_name_after_it_is_published"

FAULTS = [
    Fault("files: folders are not flushed", _F, "    try:\n        os.fsync(folder)\n", "    try:\n        folder + 0\n", "names come to the disk with their folder", _MADE),
    Fault("files: a file is not flushed", _F, "            os.fsync(descriptor)\n", "", "flushed to the disk before it gets its name", _RULES + "test_a_file_is_flushed_before_it_gets_its_name"),
    Fault("files: the folder of a file is not flushed", _F, "        if readable is not None:\n            sync_names(readable)\n", "        if readable is None:\n            pass\n", "in place in one step, flushed to the disk", _MADE),
    Fault("files: new folders are not flushed", _F, "        return\n    sync_folder(path.parent)\n", "        return\n", "flush the name of each new folder", _MADE),
    Fault("files: the mode is lost", _F, "                os.fchmod(descriptor, stat.S_IMODE(before.st_mode))\n", "                pass\n", "a file that is replaced keeps its mode", "tests/train/test_files.py::test_a_file_that_is_replaced_keeps_its_mode"),
    Fault("files: a temporary is left by an error", _F, "        with contextlib.suppress(OSError):\n            os.unlink(temporary, dir_fd=folder)\n        raise\n", "        raise\n", "whole, or not there", _RULES + "test_a_writer_that_fails_leaves_nothing"),
    Fault("files: links are followed", _F, "os.path.realpath(path) if follow else os.path.abspath(path)", "os.path.realpath(path)", "without `follow` a link is refused", _WRITING + "test_a_link_in_a_run_is_refused"),
    Fault("files: a made temporary is written", _F, "os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NEW, 0o666, dir_fd=folder", "os.O_WRONLY | os.O_CREAT | _NEW, 0o666, dir_fd=folder", "temporaries are new", _WRITING + "test_a_link_made_before_its_temporary_file_is_not_followed " + _RULES + "test_a_temporary_that_exists_is_not_written"),
    Fault("files: no lock on temporaries", _F, "        lock(descriptor)\n        if os.fstat", "        if os.fstat", "a living writer keeps its temporary", _WRITING + "test_a_living_writer_keeps_its_temporary"),
    Fault("files: names that can be foreseen", _F, "secrets.choice(string.ascii_lowercase) for _ in range(10)", "string.ascii_lowercase[0] for _ in range(10)", "names that nobody can foresee", _WRITING + "test_the_names_of_temporaries_cannot_be_foreseen"),
    Fault("files: the filename of an error", _F, "raise OSError(error.errno, reason(error), path) from None", "raise", "OSError has `path` as its filename", "tests/train/test_files.py::test_write_file_names_the_file_and_leaves_what_was_there"),
    Fault("files: an error of the disk is passed over", _F, "if error.errno not in (errno.EINVAL, errno.ENOTSUP):", "if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EIO):", "nothing on a file system that can flush only files", _WRITING + "test_a_file_system_that_flushes_no_folders"),
    Fault("files: handlers stay", _F, "        for number, before in kept.items():\n            signal.signal(number, before)\n", "        kept.clear()\n", "handlers are as before", _RULES + "test_signals_are_as_before_a_write"),
    Fault("files: SIGTERM skips the cleaning", _F, '        for name in ("SIGTERM", "SIGHUP"):', '        for name in ("SIGHUP",):', "SIGTERM becomes SystemExit inside", _RULES + "test_sigterm_in_a_write_leaves_nothing"),
    Fault("directory: published before it is flushed", _S + "directory.py", "            sync_names(self._handle)\n            with _renames:", "            with _renames:", "its names are flushed before it is published", _PUBLISHED),
    Fault("directory: its name is not flushed", _S + "directory.py", "            sync_folder(self.final.parent)\n        if old", "        if old", "its own name, in the folder above", _PUBLISHED),
    Fault("directory: files are not flushed", _S + "directory.py", "            os.fsync(file.fileno())\n", "", "write file and flush it to the disk", _PUBLISHED),
    Fault("directory: the hash of the last piece", _S + "directory.py", "written.append((len(part), hashlib.sha256(part).hexdigest()))", "written.append((len(part), hashlib.sha256(view).hexdigest()))", "a hash of the manifest covers its piece", _READER + "test_pieces_of_any_size"),
    Fault("directory: short writes", _S + "directory.py", "                    while part:\n                        part = part[file.write(part) :]\n", "                    file.write(part)\n", "all bytes are written", _RULES + "test_short_writes_are_continued"),
    Fault("directory: other files are replaced", _S + "directory.py", "if self.final.is_dir() and any(self.final.iterdir()) and not (self.final / MANIFEST).is_file():", "if self.final.is_dir() and not any(self.final.iterdir()) and not self.final.exists():", "a directory of other files is not replaced", _WRITING + "test_a_directory_of_other_files_is_not_replaced_by_a_checkpoint"),
    Fault("directory: two renames", _S + "directory.py", "        if _C.exchange(self.temporary, self.final):\n            return None\n", "", "an earlier model is replaced in one step", _WRITING + "test_a_directory_is_replaced_in_one_step"),
    Fault("directory: a kill between two renames", _S + "directory.py", "            if old.exists() and not self.final.exists():\n                os.rename(old, self.final)\n            elif", "            if", "what interrupts the renames loses nothing", "tests/train/test_rundir.py::test_what_interrupts_the_renames_loses_nothing"),
    Fault("directory: a lock of a forked child", _S + "directory.py", "os.register_at_fork(after_in_child=_forked)\n", "", "a forked child can save while the parent renames", _RULES + "test_a_child_saves_while_another_thread_of_its_parent_renames"),
    Fault("directory: what lives is removed", _S + "directory.py", "                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)\n                    shutil", "                    shutil", "a living writer keeps its temporary", _WRITING + "test_a_living_writer_keeps_its_temporary"),
    Fault("reader: damage is read", _S + "reader.py", "!= record.hashes[piece]:", "!= record.hashes[piece] and piece > 10**6:", "no damaged byte is used", _READER + "test_every_flipped_byte_is_refused_by_load_model"),
    Fault("reader: the piece before", _S + "reader.py", "begin = record.ends[first - 1] if first else 0", "begin = record.ends[first - 1] if first > 1 else 0", "bytes [start, stop): whole pieces", _READER + "test_pieces_of_any_size"),
    Fault("reader: files that are not listed", _S + "reader.py", "        if self.records is not None and name not in self.records:\n", "        if self.records is not None and name not in self.records and name.endswith('.py'):\n", "a file that the manifest does not list is not used", _READER + "test_a_file_that_the_manifest_does_not_list_is_not_used"),
    Fault("reader: sizes", _S + "reader.py", "            if record is not None and self.size != record.size:\n", "            if record is not None and self.size < record.size:\n", "a file has the size that the manifest says", _RULES + "test_a_longer_file_is_damaged"),
    Fault("reader: format 1 is not checked", _S + "reader.py", "            if record is not None and record.whole:\n                self._verify_whole(record.hashes[0])\n", "", "format 1 is checked as a whole", _READER + "test_every_flipped_byte_is_refused_by_load_model"),
    Fault("reader: a FIFO is waited for", _S + "reader.py", "opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))", "opener=lambda path, flags: os.open(path, flags))", "a FIFO is one sentence", "tests/saving/test_malformed.py::test_a_manifest_that_is_a_pipe"),
    Fault("reader: names of other folders", _S + "reader.py", 'plain = os.path.basename(name) == name and name not in ("", ".", "..") and "\\0" not in name', 'plain = name not in ("", ".", "..") and "\\0" not in name', "a manifest may not leave the directory", _SAVING + "test_manifest_may_not_leave_the_directory tests/saving/test_malformed.py::test_names_of_a_manifest"),
    Fault("reader: pieces that do not add up", _S + "reader.py", "sum(piece[0] for piece in pieces) != size:", "sum(piece[0] for piece in pieces) > size:", "the sizes of pieces add up", "tests/saving/test_malformed.py::test_values_of_a_manifest " + _READER + "test_a_forged_manifest_is_one_sentence"),
    Fault("reader: the last check is not waited for", _S + "reader.py", "            if check:\n                self._wait()\n", "            if check and self._pool is None:\n                self._wait()\n", "the end of the block waits for the hashes", _READER + "test_pieces_of_any_size " + _RULES + "test_damage_in_a_long_piece_is_seen"),
    Fault("safetensors: overlapping tensors", _S + "safetensors.py", "        if entry.start != end:\n", "        if entry.start > end:\n", "offsets that overlap are refused", _SAVING + "test_hostile_files"),
    Fault("safetensors: bytes behind the end", _S + "safetensors.py", "    if end != size:\n", "    if end > size:\n", "bytes after the last tensor are refused", _SAVING + "test_hostile_files"),
    Fault("safetensors: a name twice", _S + "safetensors.py", "    if len(result) != len(pairs):\n", "    if len(result) > len(pairs):\n", "duplicate names are refused", _SAVING + "test_hostile_files"),
    Fault("safetensors: alignment", _S + "safetensors.py", "order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))", "order = sorted(tensors)", "wider dtypes come first, so every tensor is aligned", _RULES + "test_every_tensor_is_aligned"),
    Fault("safetensors: the header's length", _S + "safetensors.py", '    text += b" " * (-len(text) % 8)\n', "", "every tensor is aligned to its itemsize", _RULES + "test_every_tensor_is_aligned"),
    Fault("model: a shard too large", _S + "model.py", "if shards[-1] and size + tensor.nbytes > shard_bytes:", "if shards[-1] and size > shard_bytes:", "files of more than shard_bytes are split", _RULES + "test_shards_have_at_most_their_bytes"),
    Fault("model: total_size of the last shard", _S + "model.py", "total = sum(tensor.nbytes for tensor in tensors.values())", "total = size", "the index has the size of all tensors", _RULES + "test_shards_have_at_most_their_bytes"),
    Fault("model: random numbers of a load", _S + "model.py", "        _C.set_rng_state(random)  # the initial", "        _C.set_rng_state(_C.get_rng_state())  # the initial", "a load costs no random numbers", _RULES + "test_a_load_costs_no_random_numbers"),
    Fault("model: a tied head that differs", _S + "model.py", "not _same_bytes(tensors[name], tensors[other])", "tensors[name].shape != tensors[other].shape", "a tied head must equal its embedding", _SAVING + "test_tied_head_in_the_file"),
    Fault("model: index of another folder", _S + "model.py", 'if os.path.basename(name) != name or not name', 'if not name', "an index may not leave the directory", _RULES + "test_an_index_names_files_beside_it"),
    Fault("checkpoint: the state's format", _S + "checkpoint.py", '    if state.get("format") != STATE_FORMAT:\n', '    if state.get("format") is None:\n', "trainer_state.json has format 1", "tests/train/test_train.py::test_a_wrong_trainer_state_is_named " + _RULES + "test_another_format_of_the_state_is_refused"),
    Fault("checkpoint: betas of a list", _S + "checkpoint.py", 'group.update((key, tuple(group[key])) for key in lists)', "pass", "options are as they were", _RULES + "test_options_of_a_loaded_optimizer_are_as_they_were"),
    Fault("checkpoint: damaged ones are taken", _S + "checkpoint.py", "            verify_checkpoint(path)\n            return path\n", "            return path\n", "the newest checkpoint that passes verification", "tests/train/test_train.py::test_resume_takes_the_newest_valid_checkpoint"),
    Fault("places: the oldest first", _S + "places.py", "(checkpoint_step(path) or 0, not is_emergency(path)), reverse=True)", "(checkpoint_step(path) or 0, not is_emergency(path)))", "newest (highest step) first", "tests/train/test_train.py::test_resume_takes_the_newest_valid_checkpoint"),
    Fault("places: emergency checkpoints before others", _S + "places.py", "(checkpoint_step(path) or 0, not is_emergency(path))", "(checkpoint_step(path) or 0, is_emergency(path))", "emergency checkpoints behind others of their step", "tests/train/test_emergency.py::test_of_two_of_one_step_the_usual_one_is_the_newest"),
    Fault("places: a half-deleted checkpoint", _S + "places.py", "    _remove(temporary)\n\n\ndef _remove", "    os.rename(temporary, path)\n    _remove(path)\n\n\ndef _remove", "renamed first", _RULES + "test_a_checkpoint_that_is_being_removed_is_none"),
    Fault("places: checkpoints at the step are set aside", _S + "places.py", "        if (checkpoint_step(path) or 0) > step:\n", "        if (checkpoint_step(path) or 0) >= step:\n", "checkpoints after the step are set aside", _RULES + "test_the_checkpoint_of_a_resumed_run_stays"),
]  # fmt: skip
