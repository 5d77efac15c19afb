"""Data, tokenizers and generation."""

from __future__ import annotations

from faults.table import FORWARD, Fault

_D = "xtrain/data/"
_G = "xtrain/generation/"
_CONFIG = "tests/train/test_config_data.py::"
_FILES = "tests/train/test_data_files.py::"
_RULES = "tests/train/test_data_rules.py::"
_SAMPLING = "tests/nn/test_sampling_rules.py::"
_STREAM = "tests/nn/test_streaming.py::"
_STEPS, _KEPT, _CACHED = (
    "tests/nn/test_steps.py::",
    "tests/ops/test_cached_attention.py::",
    "csrc/cpu/attention/cached_attention.c",
)
_SAMPLE, _DRAWING = "csrc/cpu/layers/sample.c", "tests/ops/test_sample.py::"
_MODEL = "tests/nn/test_model.py::"

FAULTS = [
    Fault("windows: the last one", _D + "loader.py", "counts = [(len(segment) - 1) // seq_len for segment in self._segments]", "counts = [(len(segment) - 2) // seq_len for segment in self._segments]", "every window of seq_len + 1 tokens", _RULES + "test_every_window_is_there"),
    Fault("windows: a segment of exactly one", _D + "loader.py", "if len(segment) > seq_len]", "if len(segment) > seq_len + 1]", "every window of seq_len + 1 tokens", _RULES + "test_every_window_is_there"),
    Fault("windows: at the border of segments", _D + "loader.py", 'np.searchsorted(self._ends, indices, side="right")', 'np.searchsorted(self._ends, indices, side="left")', "training windows never cross segments", _RULES + "test_every_window_is_there"),
    Fault("windows: a token that is the vocabulary", _D + "loader.py", "high >= self._vocab):", "high > self._vocab):", "a token id outside the vocabulary has a position", _RULES + "test_the_first_id_behind_the_vocabulary_is_refused"),
    Fault("loader: targets are the ids", _D + "loader.py", "block[:, 1:].copy()", "block[:, :-1].copy()", "targets are the ids one position later", _CONFIG + "test_without_replacement_and_next_token_targets"),
    Fault("loader: an epoch ends late", _D + "loader.py", "            if self.index == total:\n", "            if self.index == total and wanted:\n", "every window once per epoch", _RULES + "test_the_position_at_the_end_of_an_epoch"),
    Fault("loader: all epochs alike", _D + "loader.py", "total, self.seed, self.epoch))", "total, self.seed, 0))", "an order for each epoch", _RULES + "test_epochs_have_orders_of_their_own"),
    Fault("loader: the position after the batch", _D + "loader.py", "self.epoch, self.index = epoch, index\n", "self.epoch, self.index = epoch, max(index - 1, 0)\n", "a checkpoint continues exactly", _CONFIG + "test_position_continues_exactly"),
    Fault("loader: a position behind the data", _D + "loader.py", "if not 0 <= index < len(self.windows) or epoch < 0:", "if not 0 <= index <= len(self.windows) or epoch < 0:", "a position outside the data is refused", _RULES + "test_the_position_at_the_end_of_an_epoch"),
    Fault("permute: another order", _D + "loader.py", "for turn in range(6)]", "for turn in range(5)]", "the same on every machine and version", _RULES + "test_the_order_is_the_same_on_every_machine"),
    Fault("permute: seeds that differ by a constant", _D + "loader.py", "(6 * epoch + turn + 1)) % 2**64", "(epoch + turn + 1)) % 2**64", "chosen by (seed, epoch)", _RULES + "test_the_order_is_the_same_on_every_machine"),
    Fault("corpus: a part for validation is trained on", _D + "corpus.py", "train.append(part(segment, 0, cut))", "train.append(part(segment, 0, cut + 1))", "the last part is for validation", _RULES + "test_validation_is_not_trained_on"),
    Fault("corpus: the fraction of training", _D + "corpus.py", "cut = len(segment) - max(int(len(segment) * fraction), 1)", "cut = max(int(len(segment) * fraction), 1)", "val_fraction is for validation", _RULES + "test_validation_is_not_trained_on"),
    Fault("corpus: sides by the whole path", _D + "corpus.py", "held_out = [file for file in documents if _in_validation(file, fraction)]", "held_out = [file for file in documents if _in_validation(os.path.join(root, file), fraction)]", "a file is on its side by its name alone", _RULES + "test_a_folder_that_moves_keeps_its_sides"),
    Fault("corpus: no end of a document", _D + "corpus.py", "for part in (data, bytes([tokenizer.eos or 0]))), np.uint8", "for part in (data,)), np.uint8", "an end-of-document token after each document", _RULES + "test_documents_end_with_a_token"),
    Fault("corpus: spread validation windows", _D + "corpus.py", "np.arange(count, dtype=np.int64) * len(windows) // count", "np.arange(count, dtype=np.int64)", "evenly spread windows", _RULES + "test_validation_windows_are_spread"),
    Fault("corpus: val files are trained on", _D + "corpus.py", 'os.path.basename(path).startswith("val")', 'os.path.basename(path).startswith("val-")', "those named val* are for validation", _RULES + "test_files_named_val_are_for_validation"),
    Fault("corpus: bytes a token", _D + "corpus.py", "text_bytes / count if known else None", "count / text_bytes if known else None", "bytes_per_token turns nats into bits per byte", _RULES + "test_bytes_per_token_of_token_files"),
    Fault("corpus: unknown vocabularies", _D + "corpus.py", "        vocab = 1 + max(\n", "        vocab = max(\n", "a vocabulary that is unknown is found in the tokens", _CONFIG + "test_token_files"),
    Fault("identity: a part of a piece", _D + "identity.py", "np.ascontiguousarray(segment[start : start + _PIECE]).data", "np.ascontiguousarray(segment[start : start + 4096]).data", "sha256 of all tokens", _RULES + "test_any_changed_token_is_another_data_set"),
    Fault("identity: without lengths", _D + "identity.py", '            digest.update(struct.pack("<QQ", len(segment), segment.dtype.itemsize))\n', "", "segments of other lengths are other data", _RULES + "test_any_changed_token_is_another_data_set"),
    Fault("identity: files by size alone", _D + "identity.py", 'known.get("files") == files:', '[v[0] for v in known.get("files", {}).values()] == [v[0] for v in files.values()]:', "cached by size, times and inode", _FILES + "test_one_changed_byte_is_another_data_set " + _RULES + "test_a_file_that_was_written_again_is_read_again"),
    Fault("identity: any data is the same", _D + "identity.py", 'return isinstance(stored, dict) and stored.get("sha256") == now["sha256"]', "return isinstance(stored, dict)", "a resumed run sees the data it was trained on", _FILES + "test_one_changed_byte_is_another_data_set"),
    Fault("files: short reads", _D + "file_array.py", "[out[done:]], offset + done)", "[out[done:]], offset)", "all bytes are read from their place", _RULES + "test_short_reads_are_continued"),
    Fault("files: a part in bytes", _D + "file_array.py", "return FileArray(self.file, self.dtype, self._offset + start * self.dtype.itemsize, stop - start)", "return FileArray(self.file, self.dtype, self._offset + start, stop - start)", "elements [start, stop)", _FILES + "test_an_array_in_a_file"),
    Fault("files: a file that was replaced", _D + "file_array.py", "os.fstat(descriptor.number).st_ino != self.stamp[3]:", "os.fstat(descriptor.number).st_ino == -1:", "a file that is replaced is refused", _FILES + "test_a_file_that_is_replaced_is_read_on_or_refused"),
    Fault("files: descriptors without end", _D + "file_array.py", "if len(self._open) > _MOST_OPEN:", "if len(self._open) > 100 * _MOST_OPEN:", "descriptors are few", _FILES + "test_descriptors_are_few_and_given_back"),
    Fault("tokens: one byte too few", _D + "token_files.py", "(whole and file.size != expected)", "(whole and file.size > expected + 1)", "a damaged token file is refused", "tests/train/test_token_files.py::test_the_first_version_is_read"),
    Fault("tokens: the width", _D + "prepare.py", "width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 16 else 4", "width = 1 if vocab <= 1 << 8 else 2 if vocab <= 1 << 17 else 4", "1, 2 or 4 bytes hold every token", _RULES + "test_tokens_have_the_width_of_their_vocabulary"),
    Fault("prepare: the text is overwritten", _D + "prepare.py", "if os.path.exists(out) and any(", "if os.path.exists(out) and not any(", "DataError when it would replace a text it is made of", _CONFIG + "test_prepare_keeps_the_text_it_is_made_of"),
    Fault("text: what runs have written", _D + "text.py", "        if LOCK in names:\n", "        if LOCK in names and suffix:\n", "none trains on the records of another", _CONFIG + "test_files_of_runs_are_no_data"),
    Fault("text: the order of a folder", _D + "text.py", 'return sorted(path.replace(os.sep, "/") for path in found)', 'return [path.replace(os.sep, "/") for path in found]', "sorted by path", _RULES + "test_files_of_a_folder_are_sorted"),
    Fault("text: zero bytes", _D + "text.py", 'return b"\\0" not in data[:8192]', 'return b"\\0" not in data[:16]', "files with zero bytes at the start are no text", _RULES + "test_files_of_a_folder_are_sorted"),
    # ---- generation
    Fault("sampling: the boundary of top-p", _SAMPLE, "while (kept < count && *before < limit)", "while (kept < count && *before <= limit)", "the fewest tokens whose probabilities reach top_p", _DRAWING + "test_the_fewest_tokens_that_reach_top_p"),
    Fault("sampling: the limit rounded down", "csrc/core/draw.h", "double limit = ceil(top_p * (double)total);", "double limit = floor(top_p * (double)total);", "a hair more than a half takes another token", _DRAWING + "test_the_fewest_tokens_that_reach_top_p"),
    Fault("sampling: top-p of all", _SAMPLE, "count = nucleus(items, count, xt_draw_limit(p->top_p, total), &before);", "count = nucleus(items, count, xt_draw_limit(p->top_p, 2 * total), &before);", "top_p of what top_k has left", _DRAWING + "test_top_p_is_of_what_top_k_has_left"),
    Fault("sampling: one token more", "csrc/ops/layers/sample.c", "? c->arg[3].i : x->shape[1]", "? c->arg[3].i + 1 : x->shape[1]", "among the k most likely tokens", _DRAWING + "test_the_k_most_likely"),
    Fault("sampling: temperature multiplies", "csrc/core/draw.h", "double factor = 1.0 / (temperature * 0.693147180559945309);", "double factor = temperature / 0.693147180559945309;", "logits are divided by the temperature", _DRAWING + "test_logits_are_divided_by_the_temperature"),
    Fault("sampling: the sum of the blocks before", _SAMPLE, "        *sum += block;\n", "", "tokens are drawn by their probabilities", _DRAWING + "test_seed_step_and_row_decide"),
    Fault("sampling: ties take the last", _SAMPLE, "(a->key == b->key && a->index < b->index)", "(a->key == b->key && a->index > b->index)", "of equals the first one is more likely", _DRAWING + "test_the_k_most_likely"),
    Fault("sampling: the best so far is the least", _SAMPLE, "least = LOAD(x[items[k - 1].index]);", "least = LOAD(x[items[0].index]) + 1;", "the first k are left", FORWARD + "'sample and 20001'"),
    Fault("sampling: NaN is passed over", _SAMPLE, "return nans ? (ACC)NAN : max;", "return max;", "a NaN anywhere gives -1", _DRAWING + "test_rows_without_a_largest_number"),
    Fault("sampling: keys of zeros", "csrc/core/draw.h", "    x = x == 0.0f ? 0.0f : x;\n", "", "both zeros are equal", _DRAWING + "test_the_k_most_likely"),
    Fault("sampling: one number for all rows", _SAMPLE, "(uint64_t)row, total), sum = 0;", "(uint64_t)0, total), sum = 0;", "each row has a number of its own", _DRAWING + "test_seed_step_and_row_decide tests/ops/test_ops.py -k sample"),
    Fault("sampling: the step is not read", _SAMPLE, "const XtPhilox philox = {(uint64_t)p->random[0], (uint64_t)p->random[1]};", "const XtPhilox philox = {(uint64_t)p->random[0], 0};", "each step has numbers of its own", _DRAWING + "test_seed_step_and_row_decide"),
    Fault("sampling: a step that stands still", _G + "draws.py", "        self._random[1] += 1\n", "", "each token has a number of its own", _SAMPLING + "test_each_token_has_a_number"),
    Fault("sampling: a seed draws from the generator", _G + "sampling.py", "        seed = int(_C.randint(0, 2**53, (1,), _C.int64).item()) if temperature > 0 else 0\n", "        seed = 0\n", "None draws one from the default generator", _SAMPLING + "test_seeds_of_calls"),
    Fault("generate: finished sequences go on", _G + "sampling.py", "[old if done else token for", "[token for", "a finished one repeats its last token", _SAMPLING + "test_finished_sequences_repeat_their_last_token"),
    Fault("generate: it stops with the first", _G + "sampling.py", "self._ends and all(self._finished)", "self._ends and any(self._finished)", "generation stops when all have ended", _SAMPLING + "test_finished_sequences_repeat_their_last_token"),
    Fault("generate: the positions of a refill", _G + "sampling.py", "end - first - feed.shape[1], caches)", "end - feed.shape[1], caches)", "the context goes on behind its limit", _MODEL + "test_generation_with_caches_is_generation_without " + _SAMPLING + "test_generation_goes_on_behind_the_limit"),
    Fault("generate: the limit by one", _G + "sampling.py", "if caches is None or end - first > limit:", "if caches is None or end - first > limit + 1:", "never more positions than the model has", _SAMPLING + "test_generation_goes_on_behind_the_limit"),
    Fault("steps: a position that stands still", _G + "steps.py", "        self._positions.add_(1)\n", "", "each step has the next position", _STEPS + "test_the_same_tokens_as_step_by_step"),
    Fault("steps: the seed goes up", _G + "steps.py", "self._random.add_(self._next)", "self._random.add_(1)", "the numbers of steps one by one", _STEPS + "test_the_same_tokens_as_step_by_step"),
    Fault("steps: -1 is looked up", _G + "steps.py", "_C.maximum(tokens, 0)", "tokens", "logits that are not finite are found late", _STEPS + "test_logits_that_are_not_finite_are_found_late"),
    Fault("steps: hooks are captured", _G + "steps.py", "return not hooks and", "return", "no module has hooks", _STEPS + "test_what_is_not_captured"),
    Fault("steps: caches of others", _G + "steps.py", "type(cache) is KVCache", "isinstance(cache, KVCache)", "caches of KVCache alone", _STEPS + "test_what_is_not_captured"),
    Fault("steps: beyond the limit", _G + "sampling.py", "caches is not None and total - first <= limit", "caches is not None", "no position beyond the model's", _STEPS + "test_behind_the_limit"),
    Fault("steps: captured everywhere", _G + "sampling.py", "(CAPTURES and on_gpu if capture is None else capture)", "(on_gpu or True if capture is None else capture)", "by default as CAPTURES says", _STEPS + "test_the_default_is_a_rule"),
    Fault("steps: an error is passed over", _G + "steps.py", "            if not captures or self._graph.captured:\n                raise\n", "            if True:\n                raise\n", "a step that cannot be captured runs", _STEPS + "test_a_step_that_cannot_be_captured"),
    Fault("stream: modes stay", _G + "sampling.py", "modes.enter_context(evaluating(self._model))", "self._model.eval()", "between two steps the model has its own mode", _STREAM + "test_steps_are_made_when_they_are_asked_for"),
    Fault("stream: letters in parts", _G + "text.py", "return min(3, len(text) - len(text.rstrip(_PART)))", "return 0", "a letter is shown when all its bytes are there", _STREAM + "test_pieces_are_the_text"),
    Fault("stream: parts of a stop text", _G + "text.py", "range(min(len(stop) - 1, len(text)), 0, -1)", "range(min(len(stop) - 2, len(text)), 0, -1)", "no part of a stop text is shown", _STREAM + "test_stop_texts"),
    Fault("stream: the last stop text", _G + "text.py", "self.cut = min(places)", "self.cut = max(places)", "the first text that the continuation holds", _STREAM + "test_stop_texts"),
    Fault("stream: what is held back at the end", _G + "text.py", "        if len(text) > len(shown):\n            yield text[len(shown) :]\n", "", "pieces are the text", _STREAM + "test_stop_texts " + _STREAM + "test_bytes_that_are_no_letter_are_shown_at_last"),
    Fault("penalty: of negative logits", _G + "draws.py", "_C.mul(logits, self._factor)", "_C.div(logits, self._factor)", "negative logits times the factor", _STREAM + "test_seen_tokens_are_less_likely"),
    Fault("penalty: new tokens", _G + "draws.py", "        self.penalty.see(tokens)\n", "", "tokens that a row has had", _STREAM + "test_a_penalty_changes_what_is_generated"),
    Fault("penalty: of all rows", _G + "draws.py", "np.put_along_axis(seen, self._rows, True, 1)", "seen[:, self._rows] = True", "of each row alone", _STREAM + "test_seen_tokens_are_less_likely"),
    Fault("chat: answers are forgotten", "xtrain/cli/chat.py", "messages = [*asked, {", "messages = [*messages, {", "each message has all that was said before it", _STREAM + "test_a_conversation"),
    Fault("chat: the system's message goes", "xtrain/cli/chat.py", "            messages = list(start)\n", "            messages = []\n", "/new begins with the system's message", _STREAM + "test_a_conversation"),
    Fault("chat: context is dropped", "xtrain/cli/chat.py", 'min(values["max_tokens"], room - len(ids))', 'values["max_tokens"]', "an answer ends where the room does", _STREAM + "test_a_conversation_that_is_too_long"),
    Fault("cached_attention: the new key is not kept", _CACHED, "memcpy(keys + position * p->dim,", "if (position > 0) memcpy(keys + position * p->dim,", "keys[n] = k", _KEPT + "test_one_row_is_stored_and_the_others_stay " + _KEPT + "test_the_first_position_gives_the_value tests/ops/test_ops.py -k cached_attention"),
    Fault("cached_attention: values of the key", _CACHED, "memcpy(values + position * p->dim, (const T *)p->v + b * p->v_stride[0] + g * p->v_stride[1], row);", "memcpy(values + position * p->dim, (const T *)p->k + b * p->k_stride[0] + g * p->k_stride[1], row);", "values[n] = v", _KEPT + "test_one_row_is_stored_and_the_others_stay"),
    Fault("cached_attention: one position more", _CACHED, "NAME(attend)(p, q, keys, values, position, s", "NAME(attend)(p, q, keys, values, position + 1 < p->length ? position + 1 : position, s", "over j <= n", _KEPT + "test_one_row_is_stored_and_the_others_stay"),
    Fault("cached_attention: the length is a position", _CACHED, "position < p->length;", "position <= p->length;", "n in [0, L)", _KEPT + "test_positions_outside"),
    Fault("cached_attention: heads modulo groups", _CACHED, "for (int64_t h = g * group; h < (g + 1) * group; h++) {", "for (int64_t h = g; h < p->heads; h += p->kv_heads) {", "head h sees kv head h / (H/K)", FORWARD + "cached_attention"),
    Fault("cached_attention: changes are not counted", "csrc/ops/attention/cached_attention.c", "    XT_TRY(xt_begin_inplace(keys, c->op->name));\n", "", "keys and values are changed in place", _KEPT + "test_changes_are_counted"),
    Fault("cache: room for one less", _G + "cache.py", "        if end > self.length:\n", "        if end >= self.length:\n", "positions that fit are stored", _SAMPLING + "test_a_cache_holds_what_it_has_room_for"),
    Fault("cache: values of the keys", _G + "cache.py", "_C.slice(values, 2, start, end).copy_(value)", "_C.slice(values, 2, start, end).copy_(key)", "keys and values", _MODEL + "test_generation_with_caches_is_generation_without"),
    Fault("text: the end is shown", _G + "text.py", "            if token in self._ends:\n                return\n            self.ids.append(token)\n", "            self.ids.append(token)\n            if token in self._ends:\n                return\n", "ends early at the end-of-document token", _SAMPLING + "test_text_ends_before_its_end_token"),
    Fault("text: an end in the prompt", _G + "text.py", "for (token,) in self.steps:", "for (token,) in () if self._ends & set(self.start) else self.steps:", "an end token in the prompt is none", _SAMPLING + "test_text_ends_before_its_end_token"),
    Fault("bytes: invalid text", "xtrain/tokenizers/byte_level.py", 'decode("utf-8", errors="replace")', 'decode("utf-8", errors="ignore")', "bytes that are not UTF-8 become U+FFFD", _CONFIG + "test_byte_tokenizer " + _RULES + "test_bytes_that_are_no_text_are_shown"),
]  # fmt: skip
