"""Core and backend: storage, shapes, dtypes, errors, threads, forks, names of implementations."""

from __future__ import annotations

from faults.table import Fault

_C = "csrc/core/"
_RULES = "tests/core/test_core_rules.py::"
_META = "tests/core/test_meta.py::"
_SIGNALS = "tests/core/test_threads_signals.py::"

FAULTS = [
    Fault(
        "meta: values", "csrc/backend/meta.c", "    (void)index, (void)host, (void)device, (void)nbytes;\n    return no_values();", "    (void)index, (void)host, (void)device, (void)nbytes;\n    return XT_OK;",
        "a tensor on meta has no values", _META + "test_sizes_without_values",
    ),
    Fault(
        "meta: sizes of a GPU", _C + "storage.c", "*rounded = index == 0 ? cpu_rounded(nbytes)", "*rounded = index < 2 ? cpu_rounded(nbytes)", "meta:1 rounds as a GPU",
        _META + "test_rounding_of_a_gpu",
    ),
    Fault(
        "meta: the causal half", "csrc/backend/meta.c", "return (causal ? 1.0 : 2.0) *", "return 2.0 *", "the causal half alone is counted", _META + "test_work_is_counted",
    ),
    Fault(
        "size: overflow behind a 0", _C + "view.c", "if (shape[i] > 0 && __builtin_mul_overflow(n, shape[i], &n)) overflow = true;",
        "if (__builtin_mul_overflow(n, shape[i], &n)) overflow = true;", "(2^62, 0, 2^62) is refused in any order",
        _RULES + "test_sizes_that_overflow_behind_a_zero",
    ),
    Fault(
        "size: one bit more", _C + "view.c", "|| bytes > INT64_MAX / 2)", "|| bytes > INT64_MAX - 1)", "2^62 bytes and more are refused",
        _RULES + "test_the_largest_size",
    ),
    Fault(
        "contiguous: strides of ones", _C + "view.c", "if (view->shape[i] != 1 && view->strides[i] != expected) dense = false;",
        "if (view->strides[i] != expected) dense = false;", "a size of 1 may have any stride", _RULES + "test_a_size_of_one_has_any_stride",
    ),
    Fault(
        "shape text: a tuple of one", _C + "view.c", 'i + 1 < ndim || ndim == 1 ? "%lld, " : "%lld"', 'i + 1 < ndim ? "%lld, " : "%lld"',
        "messages show shapes as Python does", _RULES + "test_shapes_in_messages",
    ),
    Fault(
        "dtype: bfloat16 with float16", _C + "dtype.c", "        return XT_FLOAT32; /* float32 with", "        return a == XT_FLOAT32 || b == XT_FLOAT32 ? XT_FLOAT32 : a; /* float32 with",
        "bfloat16 with float16 is float32", "tests/core/test_arithmetic.py::test_promotion",
    ),
    Fault(
        "dtype: uint8 with int32", _C + "dtype.c", "return rank[a] > rank[b] ? a : b;", "return rank[a] < rank[b] ? a : b;",
        "integers promote to the wider one", "tests/core/test_arithmetic.py::test_promotion",
    ),
    Fault(
        "error: an argument in the old message", _C + "error.c", "    char text[sizeof message];\n", "    char *text = message;\n",
        "an argument may point into the old message", _RULES + "test_a_kernels_message_gets_the_name_of_its_op",
    ),
    Fault(
        "error: the name twice", _C + "error.c", "return message[word] == ':' ? status :", "return message[word] == '!' ? status :",
        "a message begins with its op, once", _RULES + "test_messages_name_their_op_once",
    ),
    Fault(
        "random: a seed keeps the stream", _C + "random.c", "{ xt_random_set_state(seed, 0); }", "{ xt_random_set_state(seed, state.stream); }",
        "a seed begins the sequence", "tests/core/test_random.py",
    ),
    Fault(
        "storage: classes twice as far apart", _C + "storage.c", "size_t step = (size_t)1 << (log - 3);", "size_t step = (size_t)1 << (log - 2);",
        "at most 1/8 of a block is wasted", _RULES + "test_at_most_an_eighth_is_wasted",
    ),
    Fault(
        "storage: a block of the cache twice", _C + "storage.c", "                cache[class] = cache[class]->next;\n", "", "a block has one owner",
        _RULES + "test_blocks_of_all_sizes",
    ),
    Fault(
        "storage: a cache without an end", _C + "storage.c", "stats[XT_CPU].cached + (int64_t)rounded <= CACHE_LIMIT) {", "stats[XT_CPU].cached >= 0) {",
        "up to CACHE_LIMIT bytes are kept in all", _RULES + "test_the_cache_has_a_limit",
    ),
    Fault(
        "storage: what is cached is not counted", _C + "storage.c", "            stats[XT_CPU].cached += (int64_t)rounded;\n", "", "memory_stats: bytes of the cache",
        _RULES + "test_what_the_cache_holds_is_counted",
    ),
    Fault(
        "storage: the peak", _C + "storage.c", "if (s->allocated > s->peak) s->peak = s->allocated;", "if (bytes > s->peak) s->peak = bytes;", "the most that was held at once",
        _RULES + "test_the_peak_is_of_all_blocks",
    ),
    Fault(
        "storage: out of memory with a full cache", _C + "storage.c", "            (void)xt_memory_trim(device); /* never fails on the CPU */\n", "",
        "the cache is given back before an allocation fails", _RULES + "test_the_cache_is_given_back_before_an_allocation_fails",
    ),
    Fault(
        "storage: foreign memory by recursion", _C + "storage.c", "    if (draining) return;\n    draining = true;\n    while ((storage = pending)) {", "    while ((storage = pending)) {",
        "a long chain of from_dlpack is freed without recursion", "tests/core/test_hostile.py::test_a_long_chain_of_borrowed_memory_is_freed",
    ),
    Fault(
        "threads: the last piece is whole", _C + "threads.c", "*status = job->body(job->context, begin, end < job->count ? end : job->count);",
        "*status = job->body(job->context, begin, end);", "a piece ends with the count", _RULES + "test_the_last_piece_ends_with_the_count",
    ),
    Fault(
        "threads: the caller leaves early", _C + "threads.c", "    withdraw(&job);\n    XtStatus status = own;", "    current = NULL;\n    XtStatus status = own;",
        "a job ends with its last piece", _RULES + "test_a_job_ends_with_its_last_piece",
    ),
    Fault(
        "threads: one_job stays locked", _C + "threads.c", "    pthread_mutex_unlock(&one_job);\n    return status;", "    if (status == XT_OK) pthread_mutex_unlock(&one_job);\n    return status;",
        "after an error the pool works on", _RULES + "test_the_pool_works_on_after_an_error",
    ),
    Fault(
        "threads: a child has its parent's workers", _C + "threads.c", "    workers = 0;\n", "", "after a fork the pool starts over", _RULES + "test_a_child_has_workers_of_its_own",
    ),
    Fault(
        "threads: Ctrl-C at the end", _C + "threads.c", "        if (own == XT_OK && xt_interrupted()) own = XT_INTERRUPTED;\n", "", "Ctrl-C is answered between pieces",
        _SIGNALS + "test_ctrl_c_is_answered_within_200_ms -k 'long and 2'",
    ),
    Fault(
        "threads: Ctrl-C on one thread", _C + "threads.c", "        if (may_ask && end < count && xt_interrupted()) return XT_INTERRUPTED;\n", "", "Ctrl-C is answered between pieces",
        _SIGNALS + "test_ctrl_c_is_answered_within_200_ms -k 'long and 1'",
    ),
    Fault(
        "threads: the environment", _C + "threads.c", 'if (!text) text = getenv("OMP_NUM_THREADS");', "", "XTRAIN_NUM_THREADS, else OMP_NUM_THREADS",
        _RULES + "test_threads_of_the_environment",
    ),
    Fault(
        "select: a name that is the start of another", "csrc/backend/select.c", "        if (!strcmp(*(const char *const *)entry, name)) {", "        if (!strncmp(*(const char *const *)entry, name, strlen(name))) {",
        "unknown names are refused", _RULES + "test_names_of_implementations_are_whole",
    ),
    Fault(
        "select: auto is a name", "csrc/backend/select.c", 'return !name || !strcmp(name, "auto"); }', "return !name; }", "auto picks",
        _RULES + "test_names_of_implementations_are_whole",
    ),
    Fault(
        "select: the choice of all threads", "csrc/backend/select.c", "static _Thread_local Choice gemm_choice, attention_choice;", "static Choice gemm_choice, attention_choice;",
        "the backend in force belongs to the thread", _RULES + "test_a_choice_is_of_its_thread",
    ),
    Fault(
        "scratch: of one thread for all", "csrc/cpu/gemm/common.c", "if (nbytes <= memory->nbytes && (", "if (nbytes <= memory->nbytes + 4096 && (",
        "scratch has the bytes that were asked", _RULES + "test_scratch_of_all_sizes",
    ),
    Fault(
        "signals: every thread asks", "csrc/py/bind/errors.c", "if (PyThread_get_thread_ident() != main_thread || !Py_IsInitialized()) return false;", "if (!Py_IsInitialized()) return false;",
        "no other thread waits for the GIL inside a loop", _SIGNALS + "test_no_other_thread_waits_for_the_gil_inside_a_loop",
    ),
    Fault(
        "signals: a child's main thread", "csrc/py/bind/errors.c", "    pthread_atfork(NULL, NULL, main_is_this_thread);\n", "", "in a forked child, the thread that forked is main",
        _SIGNALS + "test_a_forked_childs_main_thread_asks_for_signals",
    ),
    Fault(
        "blas: exit beside a product", "csrc/cpu/gemm/open_blas.c", "    atexit(keep_out);", "    (void)keep_out;", "threads are kept out of OpenBLAS when the process exits",
        _SIGNALS + "test_exit_with_work_in_other_threads -k OpenBLAS",
    ),
    Fault(
        "blas: exit does not wait", "csrc/cpu/gemm/open_blas.c", "} while (__atomic_load_n(&users, __ATOMIC_SEQ_CST) > 0 && now.tv_sec - begun.tv_sec < LONGEST);", "} while (0);", "those that are inside come to the end of their tiles",
        _SIGNALS + "test_exit_with_work_in_other_threads -k OpenBLAS",
    ),
    Fault(
        "blas: threads of its own", "xtrain/_load.py", 'ours = {"OPENBLAS_NUM_THREADS": "1"}', "ours = {}", "OpenBLAS starts no threads", _SIGNALS + "test_import_is_clean",
    ),
    Fault(
        "doctor: a full GPU", "xtrain/cli/doctor.py", "except (RuntimeError, MemoryError) as error:\n            rows", "except MemoryError as error:\n            rows", "a device that cannot be used is a row",
        "tests/train/test_option_clauses.py::test_doctor_shows_a_gpu_that_cannot_be_used",
    ),
    Fault(
        "doctor: no memory for a product", "xtrain/cli/doctor.py", "except (RuntimeError, MemoryError) as error:\n            return", "except RuntimeError as error:\n            return", "a product that finds no memory is a row",
        "tests/train/test_option_clauses.py::test_doctor_shows_a_gpu_that_cannot_be_used",
    ),
    Fault(
        "exit: all threads compute", "csrc/py/bind/bind.h", "    if (xt_py->ending) py_park();\n", "", "the main thread alone calls the core at the end",
        _SIGNALS + "test_at_the_end_the_main_thread_alone_computes",
    ),
    Fault(
        "exit: nobody computes", "csrc/py/bind/errors.c", "    if (PyThread_get_thread_ident() == main_thread) return;\n    xt_py->parked", "    xt_py->parked", "the main thread alone calls the core at the end",
        _SIGNALS + "test_at_the_end_the_main_thread_alone_computes",
    ),
    Fault("exit: what is parked is waited for", "csrc/py/bind/errors.c", "    xt_py->parked += callers;\n", "", "a thread in a hook is not waited for where it stays", "tests/cuda/test_cuda_library.py::test_the_end_does_not_wait_for_what_a_backward_calls"),
    Fault("core: align", "csrc/core/storage.c", "posix_memalign(&data, ALIGNMENT, *rounded)", "posix_memalign(&data, 16, *rounded)", "64-byte aligned", "tests/core/test_binding_rules.py::test_what_is_a_copy_and_what_is_not"),
    Fault("threads: a caller that never sleeps", _C + "threads.c", "nanoseconds() - begun < PATIENCE;", "nanoseconds() - begun >= 0;", "a waiting caller sleeps", _RULES + "test_a_caller_sleeps_until_its_workers_have_left"),
    Fault("threads: a sleeping caller is not woken", _C + "threads.c", " == ASLEEP) wake_caller();", " == 0) wake_caller();", "the last worker wakes its caller", _RULES + "test_a_caller_sleeps_until_its_workers_have_left"),
    Fault("threads: a worker's error text", _C + "threads.c", "strncpy(job->message, xt_error_message(), sizeof job->message - 1);", "", "a worker's error has its message", _RULES + "test_an_error_ends_a_loop_with_its_text"),
    Fault("threads: a worker's error is the caller's", _C + "threads.c", 'status = xt_error(job.status, "%s", job.message);', "status = job.status;", "the message of a worker is read on the caller's thread", _RULES + "test_an_error_ends_a_loop_with_its_text"),
    Fault("threads: the caller claims on", _C + "threads.c", "while (!__atomic_load_n(&job.stop, __ATOMIC_RELAXED) && run_piece(&job, &own)) {", "while (run_piece(&job, &own)) {", "no piece begins after an error", _RULES + "test_an_error_ends_a_loop_with_its_text"),
    Fault("threads: a worker claims on", _C + "threads.c", "while (!__atomic_load_n(&job->stop, __ATOMIC_RELAXED) && !__atomic", "while (!__atomic", "no piece begins after an error", _RULES + "test_an_error_ends_a_loop_with_its_text"),
    Fault("threads: a worker fails in silence", _C + "threads.c", "        __atomic_store_n(&job->stop, 1, __ATOMIC_RELAXED);\n    }\n}", "    }\n}", "no piece begins after an error", _RULES + "test_an_error_ends_a_loop_with_its_text"),
    Fault("random: a lock of the parent", _C + "random.c", "    lock = fresh;\n", "    (void)fresh;\n", "a child draws, whoever drew during the fork", _RULES + "test_a_child_draws_though_its_parent_was_drawing"),
    Fault("spans: lost ones", _C + "span.c", "        else spans_lost++;\n", "", "spans without memory are counted", _RULES + "test_spans_without_memory_are_counted"),
    Fault("spans: lost in the profile before", _C + "span.c", "span_count = span_capacity = spans_lost = 0;", "span_count = span_capacity = 0;", "a profile begins from none", _RULES + "test_spans_without_memory_are_counted"),
    Fault("spans: a grown list that is not there", _C + "span.c", "if (grown) spans = grown, span_capacity = capacity;", "if (grown) spans = grown;\n            span_capacity = capacity;", "spans without memory are counted", _RULES + "test_spans_without_memory_are_counted"),
    Fault("spans: no room for the dots", _C + "span.c", 'sizeof " ..." > size', "1 > size", "shapes are whole, and dots stand for those that have no room", "tests/testing/test_profile.py::test_shapes_that_are_recorded_are_whole"),
    Fault("spans: cut in silence", _C + "span.c", '            snprintf(text + used, size - used, "%s...", used ? " " : "");\n', "", "shapes are whole, and dots stand for those that have no room", "tests/testing/test_profile.py::test_shapes_that_are_recorded_are_whole"),
]  # fmt: skip
