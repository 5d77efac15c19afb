"""Reading documents, training tokenizers, fine-tuning."""

from __future__ import annotations

from faults.table import Fault

_D = "xtrain/data/"
_READERS = "tests/data/test_readers.py::"
_TOKENIZER = "tests/data/test_tokenizer_training.py::"
_LABELS = "tests/data/test_labels.py::"
_N = "xtrain/nn/"
_PRE = "tests/saving/test_pretrained.py::"
_T = "xtrain/train/"
_CALL = "tests/tune/test_callbacks.py::"
_LORA = "tests/tune/test_lora.py::"
_RUNS = "tests/tune/test_tuning_runs.py::"
_NEW = "tests/tune/test_new_models.py::"
_PREPARE = "tests/data/test_prepare.py::"
_GGUF = "tests/saving/test_gguf.py::"
_SMALL = "tests/core/test_refusals.py::"
_G = "xtrain/generation/"
_FEW = "csrc/cpu/gemm/few.c"
_FEW_TESTS = "tests/ops/test_gemm_bf16.py -k "

FAULTS = [
    Fault("readers: the line", _D + "readers.py", "            number += 1\n            place =", "            number += 2\n            place =", "a broken line is named", _READERS + "test_a_broken_line_is_named"),
    Fault("readers: empty lines", _D + "readers.py", "            if not line.strip():\n                continue\n", "", "empty lines are no documents", _READERS + "test_a_line_is_a_document"),
    Fault("readers: the mark of UTF-8", _D + "readers.py", 'line = line.removeprefix(b"\\xef\\xbb\\xbf")', "pass", "a byte-order mark is no text", _READERS + "test_a_line_is_a_document"),
    Fault("readers: what is no object", _D + "readers.py", "            if not isinstance(value, dict):\n", "            if value is None:\n", "a line is an object", _READERS + "test_a_broken_line_is_named"),
    Fault("readers: binary that is packed", _D + "readers.py", 'if name.endswith(".gz") and not is_text(data):', "if False:", "packed binary files are refused", _READERS + "test_packed_text_is_one_document"),
    Fault("readers: the end is cut off", _D + "readers.py", "    except EOFError:\n", "    except KeyError:\n", "a damaged packed file is told", _READERS + "test_a_damaged_packed_file"),
    Fault("readers: tokens in half", _D + "readers.py", "    if (file.size - start) % width:\n", "    if False:\n", "a whole number of tokens", _READERS + "test_tokens_of_nanogpt"),
    Fault("readers: the header is tokens", _D + "readers.py", "start, count = 1024, int", "start, count = 0, int", "a header is left out", _READERS + "test_tokens_of_nanogpt"),
    Fault("prepare: any token of a .bin", _D + "prepare.py", "if known and largest >= known:", "if known and largest > known:", "tokens are in the vocabulary", _READERS + "test_tokens_of_nanogpt"),
    Fault("prepare: packed texts are overwritten", _D + "prepare.py", "(is_packed(file) or holds_text(file))", "holds_text(file)", "DataError when it would replace a text it is made of", _READERS + "test_a_folder_has_all_kinds"),
    Fault("corpus: JSON is text", _D + "corpus.py", "        if is_packed(file):\n", "        if False:\n", "nobody trains on JSON unawares", _READERS + "test_training_wants_documents_prepared"),
    Fault("tokenizer: no byte is left out", "xtrain/tokenizers/training.py", "initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),", "", "any text is encoded", _TOKENIZER + "test_it_encodes_any_text"),
    Fault("tokenizer: no end", "xtrain/tokenizers/training.py", '        "eos_token": eos,\n', "", "the end of a document has a name", _TOKENIZER + "test_it_encodes_any_text"),
    Fault("lora: the scale", _N + "lora.py", "config.lora_alpha / (math.sqrt(r) if config.use_rslora else r)", "config.lora_alpha / r", "lora_alpha / sqrt(r) with use_rslora", _LORA + "test_a_layer_is_its_formula"),
    Fault("lora: B begins somewhere", _N + "lora.py", "        init.zeros_(self.lora_B.weight)\n", "", "B starts at zero", _LORA + "test_a_layer_is_its_formula"),
    Fault("lora: dropout of the sum", _N + "lora.py", "self.lora_A(self.lora_dropout(input))", "self.lora_A(input)", "dropout of the input of A", _LORA + "test_dropout_is_of_the_input_of_a"),
    Fault("lora: nothing is frozen", _N + "lora.py", "    model.requires_grad_(False)\n", "", "only LoRA is trained", _LORA + "test_only_lora_is_trained"),
    Fault("lora: unmerge subtracts", _N + "lora.py", "            kept: Any = self._original if same", "            kept: Any = Parameter(self.weight.detach() - self.delta().to(self.weight.dtype), False) if same", "the weight comes back bit for bit", _LORA + "test_merged_and_back_bit_for_bit"),
    Fault("lora: merged twice", _N + "lora.py", "        if self._original is not None:\n            return y\n", "", "merged layers are one product", _LORA + "test_merged_and_back_bit_for_bit"),
    Fault("lora: the kept weight is a parameter", _N + "lora.py", 'if name != "_original")', "if name)", "names are those of the model", _LORA + "test_merged_and_back_bit_for_bit"),
    Fault("lora: unload is in memory of its own", _N + "lora.py", "            layer.weight.copy_((layer.weight.detach().to(delta.dtype) + delta).to(layer.weight.dtype))", "            layer.weight = Parameter((layer.weight.detach().to(delta.dtype) + delta).to(layer.weight.dtype))", "weights that lie together stay so", _LORA + "test_weights_that_lie_together_stay_so"),
    Fault("lora: the head is a layer, too", _N + "lora.py", 'if name.rpartition(".")[2] != "lm_head"]', "if name]", "every linear layer but the head", _LORA + "test_targets"),
    Fault("lora: a part of a name", _N + "lora.py", '            if not any(f".{name}".endswith(f".{end}") for name in chosen):', "            if False:", "a name that means no layer is refused", _LORA + "test_targets"),
    Fault("adapter: unknown keys", "xtrain/saving/adapter.py", 'and value not in (None, False, [], {}, ""):', "and False:", "what is not supported is named", _LORA + "test_what_is_not_supported_is_named"),
    Fault("adapter: starts that change the model", "xtrain/saving/adapter.py", "    if start not in _PLAIN_STARTS:\n", "    if False:\n", "what is not supported is named", _LORA + "test_what_is_not_supported_is_named"),
    Fault("adapter: start values cost random numbers", "xtrain/saving/adapter.py", "        _C.set_rng_state(random)", "        pass", "loading draws nothing", _LORA + "test_loading_draws_no_random_numbers"),
    Fault("adapter: merged values stay", "xtrain/saving/adapter.py", "        layer.unmerge()\n        layer.lora_A", "        layer.lora_A", "values of merged layers are replaced", _LORA + "test_saved_and_loaded"),
    Fault("lora: another model below", "xtrain/train/resume.py", 'if stored.get("base") != state.base:', "if False:", "a resumed run has its model below", _RUNS + "test_a_resumed_run_has_its_model_below"),
    Fault("lora: a resumed run has it twice", "xtrain/train/parts.py", "if config.lora.r and new:", "if config.lora.r:", "a resumed run goes on", _RUNS + "test_a_resumed_run_has_the_same_bits"),
    Fault("freeze: moments of all", "xtrain/train/parts.py", "for parameter in model.parameters() if parameter.requires_grad]", "for parameter in model.parameters()]", "optimizer state only for what trains", _RUNS + "test_lora_that_was_trained_can_be_trained_on"),
    Fault("freeze: a pattern of nothing", "xtrain/train/parts.py", '        if not found:\n            raise ConfigError(f"freeze must name', '        if False:\n            raise ConfigError(f"freeze must name', "a pattern that matches nothing is refused", _RUNS + "test_options_that_cannot_be"),
    Fault("freeze: a dry run trains all", "xtrain/train/estimate.py", "    choose_trained(model, config, new=adapter is None)\n", "", "a dry run counts what is trained", _RUNS + "test_a_dry_run_counts_what_is_trained"),
    Fault("labels: the prompt is learned", _D + "records.py", "np.arange(len(tokens)) >= len(prompt)", "np.arange(len(tokens)) >= 0", "a completion is learned", _LABELS + "test_a_completion_is_learned_and_the_end"),
    Fault("labels: the end is not learned", _D + "records.py", "np.arange(len(tokens)) >= len(prompt), 0)", "(np.arange(len(tokens)) >= len(prompt)) & (np.arange(len(tokens)) < len(tokens) - len(self._end)), 0)", "and the end of the document", _LABELS + "test_a_completion_is_learned_and_the_end"),
    Fault("labels: texts wait for records", _D + "records.py", "                found += self._encode_texts(waiting)\n                waiting = []\n                found.append", "                found.append", "documents stay in order", _LABELS + "test_a_completion_is_learned_and_the_end"),
    Fault("labels: a token before the answer", _D + "records.py", "(places[:, 1] > start)", "(places[:, 1] >= start)", "what the assistant says is learned", _LABELS + "test_what_the_assistant_says_is_learned"),
    Fault("labels: a token behind the answer", _D + "records.py", "(places[:, 0] < end)", "(places[:, 0] <= end)", "what the assistant says is learned", _LABELS + "test_what_the_assistant_says_is_learned"),
    Fault("labels: everyone is learned", "xtrain/tokenizers/chat.py", '            if message.get("role") != "assistant":\n                continue\n', "", "what the assistant says is learned", _LABELS + "test_what_the_assistant_says_is_learned"),
    Fault("labels: the announcement is learned", "xtrain/tokenizers/chat.py", "before = self.render(messages[:index], add_generation_prompt=True)", "before = self.render(messages[:index])", "what the assistant says is learned", _LABELS + "test_what_the_assistant_says_is_learned"),
    Fault("labels: marks are overlooked", "xtrain/tokenizers/chat.py", "        if self._marks:\n", "        if False:\n", "a generation block says what is learned", _LABELS + "test_what_the_assistant_says_is_learned"),
    Fault("labels: texts that change", "xtrain/tokenizers/chat.py", "            if not whole.startswith(until):\n", "            if False:\n", "messages that cannot be", _LABELS + "test_messages_that_cannot_be"),
    Fault("labels: marks in messages", "xtrain/tokenizers/chat.py", 'spelled = json.dumps(list(messages), ensure_ascii=False, default=str)', 'spelled = "".join(str(message.get("content")) for message in messages)', "no message holds the marks", _LABELS + "test_messages_that_cannot_be"),
    Fault("mask: that of the token before", _D + "loader.py", "mask[start + 1 : start + self.seq_len + 1] == 0", "mask[start : start + self.seq_len] == 0", "a target is left out by the mask of its own token", _LABELS + "test_targets_of_windows"),
    Fault("mask: of another segment", _D + "loader.py", "masks[place] if masks else None for place in kept]", "mask for mask in masks or [None] * len(segments)]", "masks belong to segments", _LABELS + "test_targets_of_windows"),
    Fault("mask: cut elsewhere", _D + "corpus.py", "file.loss_mask.part(begin, end)", "file.loss_mask.part(0, end - begin)", "a file is cut with its mask", _LABELS + "test_a_file_is_cut_with_its_mask"),
    Fault("mask: no part of the data", _D + "corpus.py", "return [*self.train, *self.val, *masks]", "return [*self.train, *self.val]", "a changed mask is other data", _LABELS + "test_a_run_counts_what_is_learned"),
    Fault("mask: validation counts all", "xtrain/train/evaluate.py", "np.count_nonzero(state.val_targets[rows] != IGNORED)", "state.val_targets[rows].size", "the validation loss is of learned tokens", _LABELS + "test_a_run_counts_what_is_learned"),
    Fault("mask: texts before it", _D + "prepare.py", 'self.mask.extend(b"\\1" * (self.count - len(self.mask)) + learned', "self.mask.extend(learned", "texts are learned whole", _LABELS + "test_a_completion_is_learned_and_the_end"),
    Fault("mask: readers may ignore it", _D + "token_files.py", '["loss_mask"] if mask else []', "[]", "no reader ignores the mask", _LABELS + "test_damaged_masks_and_documents"),
    Fault("mask: of another length", _D + "token_files.py", "        if size != len(found.tokens):\n", "        if False:\n", "a damaged mask is refused", _LABELS + "test_damaged_masks_and_documents"),
    Fault("documents: any order", _D + "token_files.py", "        _check_order(found.documents, len(found.tokens))\n", "", "documents are in order", _LABELS + "test_damaged_masks_and_documents"),
    Fault("documents: order at the border of pieces", _D + "token_files.py", "        last = int(piece[-1])\n", "", "documents are in order", _LABELS + "test_damaged_masks_and_documents"),
    # ---- callbacks, writers and records
    Fault("callbacks: nobody hears of a checkpoint", _T + "trainer.py", "        self.callbacks.on_checkpoint(self, path)\n", "", "what a callback hears", _CALL + "test_what_a_callback_hears"),
    Fault("callbacks: the first that asks for the end", _T + "callbacks/base.py", "                found.append(bool(getattr(callback, hook)(state, *arguments)))\n", "                found.append(bool(getattr(callback, hook)(state, *arguments)))\n                if found[-1]:\n                    break\n", "every callback hears of a step", _CALL + "test_a_callback_ends_a_run"),
    Fault("callbacks: one that fails hides the next", _T + "callbacks/base.py", "error, state.step if step is None else step)\n                found.append(False)\n", "error, state.step if step is None else step)\n                found.append(False)\n                break\n", "the others hear everything", _CALL + "test_an_error_of_a_callback_ends_no_run"),
    Fault("callbacks: the step of the state", _T + "callbacks/base.py", "state.step if step is None else step)", "step or 0)", "a warning has the step", _CALL + "test_an_error_of_a_callback_ends_no_run"),
    Fault("callbacks: two of a name", _T + "callbacks/base.py", "(name if count == 1 else f\"{name} {count}\", callback)", "(name, callback)", "once for each callback", _CALL + "test_an_error_of_a_callback_ends_no_run"),
    Fault("callbacks: processes that have gone", _T + "callbacks/base.py", "            except PeerError:\n                raise\n", "", "a PeerError ends the run", _CALL + "test_what_ends_a_process_ends_the_run_from_a_callback_too"),
    Fault("callbacks: SystemExit is a warning", _T + "callbacks/base.py", "            except Exception as error:\n", "            except BaseException as error:\n", "what ends a process ends the run", _CALL + "test_what_ends_a_process_ends_the_run_from_a_callback_too"),
    Fault("callbacks: a wrong option is a warning", _T + "callbacks/base.py", "                if isinstance(error, ConfigError) and hook == \"on_start\":\n                    raise\n", "", "a ConfigError of on_start is raised", _CALL + "test_an_option_of_a_callback_is_wrong_before_the_first_step"),
    Fault("callbacks: a wrong option of any time", _T + "callbacks/base.py", " and hook == \"on_start\":", ":", "of on_start alone", _CALL + "test_an_option_of_a_callback_is_wrong_before_the_first_step"),
    Fault("callbacks: a result is judged outside", _T + "callbacks/base.py", "bool(getattr(callback, hook)(state, *arguments))", "getattr(callback, hook)(state, *arguments)", "a result that is neither true nor false is an error of the callback", _CALL + "test_what_a_callback_fails_with_may_be_anything"),
    Fault("side effects: later ones are not counted", _T + "report.py", "            self._failed[what] += 1\n", "", "later ones are counted and told at the end", _CALL + "test_an_error_of_a_callback_ends_no_run"),
    Fault("side effects: an error without a text", _T + "report.py", "        except Exception:  # of a class of the user's\n", "        except KeyError:  # of a class of the user's\n", "an error whose text is an error", _CALL + "test_what_a_callback_fails_with_may_be_anything"),
    Fault("side effects: nobody says how many", _T + "trainer.py", "                self.report.later_failures()\n", "                pass\n", "the end of a run says how often each failed", _CALL + "test_an_error_of_a_callback_ends_no_run"),
    Fault("side effects: on_end hides how many", _T + "trainer.py", "            finally:\n                self.report.later_failures()\n", "            except ZeroDivisionError:\n                raise\n            self.report.later_failures()\n", "the end of a run says how often, whatever on_end raises", _CALL + "test_later_failures_are_told_whatever_on_end_raises"),
    Fault("callbacks: anything ends a run", _T + "callbacks/base.py", "self._function(state, record) is True", "bool(self._function(state, record))", "True ends the run", _CALL + "test_a_callback_ends_a_run"),
    Fault("callbacks: a step is told before it is done", _T + "loop.py", "            del queued[0]\n            if self._hooks.on_step(self._record):", "            if self._hooks.on_step(self._record):\n                pass\n            del queued[0]\n            if False:", "an error of a callback leaves one record", _CALL + "test_what_ends_a_process_ends_the_run_from_a_callback_too"),
    Fault("callbacks: no end with an error", _T + "trainer.py", "                self.callbacks.on_end(self, ended)\n", "                if ended:\n                    self.callbacks.on_end(self, ended)\n", "the end is heard after an error", _CALL + "test_what_ends_a_process_ends_the_run_from_a_callback_too"),
    Fault("records: one group", _T + "step.py", 'for group in state.optimizer.param_groups]\n        if state.parallel', 'for group in state.optimizer.param_groups[:1]]\n        if state.parallel', "learning rates of groups", _CALL + "test_records_say_more_of_the_machine"),
    Fault("records: memory of now", _T + "report.py", '_C.memory_stats(device)["peak"]', '_C.memory_stats(device)["live_storages"] * -1', "the most memory", _CALL + "test_records_say_more_of_the_machine"),
    Fault("records: frozen weights cost all", "xtrain/models/decoder.py", " - 2 * self.idle_weights() + attention", " + attention", "4 operations of a frozen weight", _CALL + "test_frozen_weights_take_two_thirds"),
    Fault("writers: the mask of a checksum", _T + "callbacks/tensorboard.py", "crc >> 15 | crc << 17", "crc >> 17 | crc << 15", "events for TensorBoard", _CALL + "test_checksums"),
    Fault("writers: events of the future stay", _T + "callbacks/tensorboard.py", "        if state.step:\n", "        if False:\n", "a resumed run takes back events", _CALL + "test_events_for_tensorboard"),
    Fault("writers: a table from now on", _T + "callbacks/writers.py", "        for record in read_metrics(state.directory / METRICS):\n            self._write(record)\n", "", "a resumed run has the whole table", _CALL + "test_a_table_of_metrics"),
    Fault("writers: one that fails is asked again", _T + "callbacks/writers.py", "            self._works = False\n", "", "a writer that fails is left alone", _CALL + "test_a_writer_that_fails_ends_no_run"),
    Fault("writers: their files are data", "xtrain/saving/places.py", r"metrics\.csv|tensorboard|wandb|", "", "files of writers are no data", _CALL + "test_what_writers_write_is_no_data"),
    Fault("own model: its dtype is lost", _T + "parts.py", 'precision = {} if next(iter(model.parameters())).dtype != _C.bfloat16 else {"precision": "bfloat16"}', "precision = {}", "the dtype of a model is kept", _CALL + "test_the_dtype_of_a_model_is_kept"),
    Fault("own model: a copy is trained", _T + "parts.py", "        model = own.to(dtype)", "        model = __import__('copy').deepcopy(own).to(dtype)", "the model is changed", _CALL + "test_a_model_that_is_there_is_trained"),
    # ---- save_pretrained
    Fault("pretrained: any shard size", "xtrain/models/causal_lm.py", "shard_bytes=saving.parse_size(max_shard_size))", "shard_bytes=saving.SHARD_BYTES)", "files of a size", _PRE + "test_shards_of_a_size"),
    Fault("pretrained: thousands are 1024", "xtrain/saving/model.py", "1000**i for i", "1024**i for i", "units of sizes", _PRE + "test_sizes"),
    Fault("pretrained: a size of nothing", "xtrain/saving/model.py", "        if bytes_ >= 1:\n", "        if True:\n", "a size is positive", _PRE + "test_sizes_that_cannot_be"),
    Fault("pretrained: the tokenizer is left out", "xtrain/models/causal_lm.py", "saving.save_model(self, directory, tokenizer=tokenizer,", "saving.save_model(self, directory,", "with a tokenizer", _PRE + "test_with_a_tokenizer_in_another_dtype"),
    Fault("lora: a dry run overlooks it", "xtrain/train/estimate.py", "read_adapter_config(reader) if reader.has(ADAPTER) else None", "None", "a dry run knows LoRA of a directory", _RUNS + "test_a_dry_run_counts_what_is_trained"),
    Fault("new models: a shard is no model", "xtrain/saving/model.py", 'if any(".safetensors" in name for name in {*os.listdir(directory), *(reader.records or {})}):', "if False:", "a shard without its index is a damaged model", _NEW + "test_what_is_no_new_model"),
    Fault("new models: what the manifest lists", "xtrain/saving/model.py", '    if reader.has("model.safetensors") or reader.has(ADAPTER):\n        return True\n    if any(".safetensors" in name for name in {*os.listdir(directory), *(reader.records or {})}):', '    if any(".safetensors" in name for name in os.listdir(directory)):', "weights that a manifest lists are missing, not new", _NEW + "test_a_save_that_lost_its_weights_is_damaged"),
    Fault("new models: LoRA of nothing", _T + "parts.py", '    if config.lora.r:\n        raise ConfigError(f"lora.r must be left out with {config', '    if False:\n        raise ConfigError(f"lora.r must be left out with {config', "LoRA has a model below it", _NEW + "test_what_is_no_new_model"),
    Fault("new models: the option's tokenizer", _T + "parts.py", '        if not _has_tokenizer(source) and not saving.has_weights(source):\n            source = None', '        if False:\n            source = None', "a new model without a tokenizer takes the option's", _NEW + "test_the_tokenizer_of_the_directory_is_used"),
    Fault("new models: drawn in 16 bits", _T + "parts.py", '    planned.dtype = "float32"  # drawn in it', '    # drawn in it', "weights are drawn in float32", _NEW + "test_every_family_begins_with_a_config"),
    Fault("prepare: the last batch", _D + "records.py", "    if waiting:\n        yield waiting\n\n\ndef _size", "\n\ndef _size", "every text is encoded", _TOKENIZER + "test_a_batch_is_its_texts"),
    Fault("prepare: batches in any order", _D + "encoding.py", "yield _finish(waiting.popleft(), kept)\n        while", "yield _finish(waiting.pop(), kept)\n        while", "the same bytes for any number of processes", _PREPARE + "test_any_number_of_processes_writes_the_same_bytes"),
    Fault("prepare: kept for another work", _D + "encoding.py", "            if _read(folder / _KEY) != key:\n", "            if _read(folder / _KEY) is None:\n", "files, tokenizer and field must be those of then", _PREPARE + "test_another_work_begins_anew"),
    Fault("prepare: nothing is kept", _D + "encoding.py", "    if kept is not None and not known:\n        kept.store(number, found)\n", "", "an interrupted run goes on", _PREPARE + "test_an_interrupted_run_goes_on"),
    Fault("prepare: the mask of kept batches", _D + "encoding.py", "Encoded(ids, None if every else mask, int(size))", "Encoded(ids, None, int(size))", "what is kept is what was encoded", _PREPARE + "test_an_interrupted_run_goes_on"),
    Fault("export: the name before the end", "xtrain/cli/export.py", "            yield temporary\n    except", "            yield out\n    except", "a file is whole or not there", _GGUF + "test_a_file_is_whole_or_not_there"),
    Fault("export: what a kill has left stays", "xtrain/cli/export.py", "        with whole_file(out, follow=False) as (temporary, _):\n            yield temporary\n", "        temporary = out.with_name(f'.{out.name}.tmp-{os.urandom(5).hex()}')\n        yield temporary\n        os.rename(temporary, out)\n", "the next export removes what a killed one left", "tests/saving/test_writing.py::test_what_a_killed_writer_left_is_removed_by_the_next"),
    Fault("export: no token begins a text", "xtrain/models/gguf_vocabulary.py", "        writer.add_bos_token_id(begin[0])\n", "        pass\n", "the token that begins a text", _GGUF + "test_the_token_that_begins_a_text"),
    Fault("export: what the settings say", "xtrain/models/gguf_vocabulary.py", "adds if isinstance(adds, bool) else begin in", "begin in", "add_bos_token of tokenizer_config.json", _GGUF + "test_the_token_that_begins_a_text"),
    Fault("repr: repeated once", "csrc/py/tensor/repr.c", "for (int i = 2; i < 5; i++) out[i] *= times;", "for (int i = 2; i < 4; i++) out[i] *= times;", "what a stride repeats counts", _SMALL + "test_what_is_repeated_by_a_stride_is_read_once"),
    Fault("repeat: arrays", "xtrain/tensors/arithmetic.py", "(tuple, list, range, np.ndarray)) and", "(tuple, list)) and", "sizes in ranges and arrays", _SMALL + "test_repeat_takes_all_kinds_of_sizes"),
    Fault("generate: integers of Python alone", _G + "sampling.py", "        max_new_tokens, top_k, seed = _whole(max_new_tokens), _whole(top_k), _whole(seed)\n", "", "NumPy's integers", _SMALL + "test_generate_takes_numpy_integers"),
    Fault("generate: a prompt of prompts", _G + "text.py", "    if found.ndim > 1 and found.shape[0] != 1:\n", "    if False:\n", "a prompt is one list", _SMALL + "test_prompts_are_lists_of_ids"),
    Fault("var: a scalar", "xtrain/_tensor.py", "for d in dims if input.ndim else ():", "for d in dims:", "a scalar takes dim 0 and -1", _SMALL + "test_the_variance_of_a_scalar"),
    Fault("index_select: the op's name", "xtrain/tensors/indexing.py", '                raise type(error)(f"{self._name}: {text}") from None\n', "                pass\n", "a message has the name of the call", _SMALL + "test_errors_of_rows_have_the_name_of_the_call"),
    Fault("html: all parameters", "xtrain/notebook/html.py", "        left[1] -= 1\n", "", "a module shows so many parameters", "tests/notebook/test_display.py::test_a_module_of_many_parameters_is_cut"),
    Fault("few: the tail is a whole vector", _FEW, "        memset(v, 0, sizeof v);\n", "", "what lies behind K enters no sum", _FEW_TESTS + "behind_k"),
    Fault("few: A behind K", _FEW, "        memset(to + few->depth - few->step, 0, (size_t)few->step * sizeof *to);\n", "", "zeros behind K", _FEW_TESTS + "behind_k"),
    Fault("few: sums are not added", _FEW, "*c = xt_float_to_bf16(beta == 0 ? sum : sum + beta * xt_bf16_to_float(*c));", "*c = xt_float_to_bf16(sum);", "C = alpha A B^T + beta C", _FEW_TESTS + "add_to_what"),
    Fault("few: C is dense", _FEW, "at.c + (m + i) * p->ldc + n", "at.c + (m + i) * p->n + n", "rows of C lie ldc apart", _FEW_TESTS + "add_to_what"),
    Fault("few: A is dense", _FEW, "row % p->m * p->lda;", "row % p->m * p->k;", "rows of A lie lda apart", _FEW_TESTS + "each_alone"),
    Fault("few: one A for the batch", _FEW, "few->a + (matrix * p->m + m) * few->depth", "few->a + m * few->depth", "the products of a batch", _FEW_TESTS + "each_alone"),
    Fault("blas: a vector's pieces by the threads", "csrc/cpu/gemm/blas.c", "*(p->m == 1 ? &plan.tiles_n : &plan.tiles_m) = pieces;", "*(p->m == 1 ? &plan.tiles_n : &plan.tiles_m) = xt_num_threads(), plan.parts = xt_num_threads() > 1 ? 2 : 1, plan.part_k = (p->k + plan.parts - 1) / plan.parts;", "the same bits for any number of threads", "tests/ops/test_gemm.py -k test_products_with_a_vector"),
    Fault("blas: no piece of a small vector", "csrc/cpu/gemm/blas.c", "at_most(pieces < 1 ? 1 : pieces,", "at_most(pieces,", "every product has a piece", "tests/ops/test_gemm.py -k test_products_with_a_vector"),
    Fault("tensorboard: events are held back", _T + "callbacks/tensorboard.py", "record.get(\"wall_time\")))\n        if self._file is not None:\n            self._file.flush()\n", "record.get(\"wall_time\")))\n", "what was written of a step can be read before the next", _CALL + "test_what_writers_wrote_of_a_step_can_be_read_before_the_next"),
    Fault("csv: lines are held back", _T + "callbacks/writers.py", "        self._write(record)\n        if self._file is not None:\n            self._file.flush()\n", "        self._write(record)\n", "what was written of a step can be read before the next", _CALL + "test_what_writers_wrote_of_a_step_can_be_read_before_the_next"),
    Fault("wandb: its options lose", _T + "callbacks/writers.py", "{**given, \"config\": flatten(state.config), **self._options}", "{**self._options, **given, \"config\": flatten(state.config)}", "options: of wandb.init", _CALL + "test_options_of_wandb_are_those_of_its_init"),
]  # fmt: skip
