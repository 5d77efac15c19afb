"""Faults of the kernels for NVIDIA GPUs and of their runtime: paths that a size, an alignment, a stride or a flag of its own chooses."""

from __future__ import annotations

from .table import Fault

_R, _G, _M, _RED = "cuda/runtime/", "cuda/gemm/", "cuda/mhc/", "cuda/reduce/"
_E, _L, _O, _A = "cuda/elementwise/", "cuda/layers/", "cuda/optimizer/", "cuda/attention/"
_CUDA, _OPS, _GRAPH = "tests/cuda/test_cuda.py", "tests/ops/test_ops.py", "tests/cuda/test_graph.py"
_RUNTIME, _TROUBLE = "tests/cuda/test_cuda_runtime.py::", "tests/cuda/test_gpu_trouble.py::"
_KERNELS, _EDGES = "tests/cuda/test_cuda_kernels.py::", "tests/ops/test_kernel_clauses.py::"
_CAPTURE = "tests/cuda/test_cuda_library.py::test_a_capture_makes_no_call_that_cannot_be_captured"
_MEMORY = f"{_CUDA} -k 'memory_is_counted or out_of_memory_says or small_blocks or kept_is_bounded or slot_recycles or threads_share'"
_REGIONS = f"{_GRAPH} -k 'gpu and (freed or returned or outside or two_graphs)'"
_OTHERS = f"{_CUDA} -k 'interface or dlpack or cupy'"
_PRODUCTS, _EXACT = "tests/ops/test_gemm.py", "tests/ops/test_gemm_attention.py"
_BIASES = f"{_OPS} {_EXACT} -k 'linear:bias and (forward or against) or cublas and small_integers'"
_CHUNKS = "tests/ops/test_loss_in_chunks.py"
_SINKHORN = f"tests/mhc/test_sinkhorn.py {_OPS} -k sinkhorn"
_STREAMS = f"tests/mhc/test_mhc_tokens.py tests/mhc/test_mhc.py {_OPS} -k 'mhc_tokens or bad_token or stay_finite or table_of_the_seed or dx_of or mhc_pre'"
_POST = f"tests/mhc/test_mhc_tokens.py {_OPS} -k 'way_back or mhc_post'"
_SUMS = f"tests/cuda/test_cuda_kernels.py tests/ops/test_kernel_clauses.py tests/core/test_arithmetic.py {_OPS} -k 'long_sums or reductions or in_every_layout or extremes or forward and (sum- or mean or amax or argmax)'"
_RMS = f"{_OPS} tests/ops/test_fused.py -k rms_norm"
_LN = f"{_OPS} tests/ops/test_fused.py tests/ops/test_layer_norm.py -k layer_norm"
_QK = f"{_OPS} tests/ops/test_fused.py tests/cuda/test_generation_kernels.py -k 'qk_norm_rope or rotated_heads'"
_PICKING = f"{_OPS} tests/ops/test_picking.py {_CUDA} -k 'test_picking or scatter or gather or index'"
_ANYWHERE = f"{_EDGES}test_each_tensor_may_begin_at_any_element"
_NORMS = "tests/ops/test_layer_norm.py::"
_TREE = "tests/distributed/test_tree_sum.py::"
_EMA = f"{_OPS} tests/nn/test_ema.py -k ema"
_SEEN = f"{_OPS} tests/ops/test_documents.py tests/ops/test_selection.py -k 'forward and scaled_dot or against and scaled_dot or test_documents or attention_supports'"
_CACHED = f"{_OPS} tests/ops/test_cached_attention.py tests/cuda/test_generation_kernels.py -k 'cached_attention'"
_MASKED, _LONG = "tests/ops/test_masked_attention.py::", "tests/cuda/test_long_and_batched.py::"
_FLASH = f"{_CUDA} tests/cuda/test_attention_spans.py -k 'errs_at_most_twice and (64 or 128)'"

FAULTS = [
    # ---- memory, devices, graphs ----------------------------------------------------------------------------------------
    Fault("gpu memory: a region that outlives its graph", _R + "memory.cu", "        if (region->abandoned && region->arena.blocks == 0) free_region(memory, region);\n", "", "a region goes back to the pool with the last tensor in it", _REGIONS),
    Fault("gpu memory: blocks released during a capture", _R + "memory.cu", "        put_back(memory, late->data, late->nbytes);\n", "        if (!late->data) put_back(memory, late->data, late->nbytes);\n", "they go to the free lists or the pool when the capture has ended", _REGIONS),
    Fault("gpu memory: waits are not counted", _R + "memory.cu", "    out->synchronizations += memory->waits;\n", "", "an allocation that waits counts as a synchronisation", f"{_CUDA}::test_out_of_memory_says_what_is_asked_and_held_and_the_next_one_works"),
    Fault("gpu memory: the newest class goes first", _R + "memory.cu", "memory->lists[i].used < memory->lists[oldest].used", "memory->lists[i].used > memory->lists[oldest].used", "the class that was unused for longest returns blocks to the pool", _MEMORY),
    Fault("gpu memory: a peak of nothing", _R + "memory.cu", "    memories[index].peak = memories[index].in_use;\n", "    memories[index].peak = 0;\n", "the peak since a reset is at least what was in use then", f"{_CUDA}::test_memory_is_counted_and_given_back"),
    Fault("gpu transfers: a piece in flight", _R + "device.cu", "    return cudaEventSynchronize(device->piece_done[*out]);\n", "    return cudaSuccess;\n", "a pinned piece is filled again once its copy is done", f"{_CUDA}::test_data_is_queued_without_waiting"),
    Fault("gpu: the range of an index", _R + "device.cu", "slot >= XT_INDEX_WRAPPED ? -limit : 0", "slot > XT_INDEX_WRAPPED ? -limit : 0", "negative indices count from the end", f"{_OPS}::test_error {_CUDA}::test_an_index_out_of_range_is_raised_at_the_next_wait -k index"),
    Fault("gpu: another library does not wait", _R + "device.cu", "    if (!error) error = cudaStreamWaitEvent((cudaStream_t)foreign, device->event, 0);\n", "    (void)foreign;\n", "the consumer's stream waits for what makes the tensor", _OTHERS),
    Fault("gpu: no wait for the legacy stream", _R + "device.cu", "cudaEventRecord(device->event, cudaStreamLegacy)", "cudaEventRecord(device->event, device->stream)", "memory may be reused once the consumer's stream is done with it", f"{_RUNTIME}test_memory_that_the_legacy_stream_reads_is_not_used_again_before"),
    Fault("gpu: the oldest slots first", _R + "device.cu", "(device->recent_next + RECENT - 1 - i) % RECENT", "(device->recent_next + i) % RECENT", "queued last, newest first", f"{_TROUBLE}test_what_was_queued_last_comes_first"),
    Fault("gpu: a bad index keeps the memory", _R + "device.cu", "    XtStatus status = wait(&devices[index]); /* after an index out of range the memory is returned all the same */\n", "    XT_CHECK(wait(&devices[index]));\n    XtStatus status = XT_OK;\n", "after an index out of range the memory is returned all the same", f"{_RUNTIME}test_memory_goes_back_although_an_index_was_out_of_range"),
    Fault("gpu: XTRAIN_CUDA_SYNC does not wait", _R + "device.cu", "    if (error == cudaSuccess && xt_always_wait) error = cudaStreamSynchronize(device->stream);\n", "", "it waits after every slot, and tells which one failed", f"{_RUNTIME}test_the_stream_is_done_after_every_slot_that_waits"),
    Fault("gpu graph: free lists beside the region", _R + "graph.cu", "    xt_memory_empty_lists(index);\n    XT_CHECK(xt_drain(index));", "    XT_CHECK(xt_drain(index));", "the region takes the place of what the eager step has left unused", _CAPTURE),
    Fault("gpu graph: the recorded graph stays", _R + "graph.cu", "    if (recorded && cudaGraphDestroy(recorded) != cudaSuccess) cudaGetLastError();\n", "", "a capture leaves its executable alone", _CAPTURE),
    # ---- products -------------------------------------------------------------------------------------------------------
    Fault("gpu cublas: one plan with and without a bias", _G + "cublas.cu", "(p->trans_b ? 2 : 0) | (p->bias ? 4 : 0)", "(p->trans_b ? 2 : 0)", "a plan depends on whether there is a bias", _BIASES),
    Fault("gpu cublas: the bias of the plan's first product", _G + "cublas.cu", "XtBlasStatus queued = p->bias ? add_bias(lt, plan->desc, p) : XT_BLAS_SUCCESS;", "XtBlasStatus queued = XT_BLAS_SUCCESS;", "each product adds its own bias", f"{_EXACT}::test_each_product_adds_its_own_bias -k cublas"),
    Fault("gpu cublas: any C is aligned", _G + "cublas.cu", "    key.align_c = alignment(p->c, p, p->stride_c, p->dtype_c);\n", "    key.align_c = 16;\n", "the choice is made for pointers aligned as these are", f"{_EXACT}::test_a_gradient_that_begins_at_any_element -k cublas"),
    Fault("gpu cublas: a far vector", _G + "cublas.cu", "return (p->m == 1 || p->n == 1) && (a", "return (p->m == 1 && p->n == 1) && (a", "a vector beside a matrix of more than 2^31 elements is not supported", "tests/cuda/test_cuda_selection.py::test_products_on_the_gpu"),
    Fault("gpu cublas: B of a later piece", _G + "cublas.cu", "    q.b = xt_moved(p->b, first * p->stride_b[1], p->dtype_b);\n", "", "a batch above 32768 matrices is split", f"{_EXACT}::test_batches_of_more_than_32768_matrices -k cublas"),
    Fault("gpu cublas: pointers of a later piece", _G + "cublas.cu", "*const *b = (const void *const *)(list + count + first);", "*const *b = (const void *const *)(list + count);", "lists above 32768 matrices are split", f"{_EXACT}::test_batches_of_more_than_32768_matrices -k cublas"),
    Fault("gpu cublas: last terms forget C", _G + "cublas.cu", "            if (p.beta != 0) sum += (float)p.beta * xt_load(c[row * p.ldc + col]);\n", "", "C = sums + last terms + beta C", f"{_EXACT}::test_the_last_row_and_the_last_term_of_large_products"),
    Fault("gpu cublas: last terms without alpha", _G + "cublas.cu", "float sum = sums[row * ld + col] + (float)p.alpha * last;", "float sum = sums[row * ld + col] + last;", "alpha times the last terms", f"{_EXACT}::test_the_last_key_has_the_factor_of_the_others"),
    Fault("gpu cublas: the last rows are the first", _G + "cublas.cu", "        part[1].a = xt_moved(p->a, m, p->dtype_a);\n", "", "the last row of C is a product of its own", f"{_EXACT}::test_the_last_row_and_the_last_term_of_large_products"),
    Fault("gpu cublas: a product that was refused", _G + "cublas.cu", '        if (queued != XT_BLAS_SUCCESS) status = failed("cublasLtMatmul", queued, p);\n        else xt_count_launch();\n', "        if (queued == XT_BLAS_SUCCESS) xt_count_launch();\n", "what the library refuses after it has offered an algorithm is an error", f"{_RUNTIME}test_a_product_that_the_library_refuses_after_its_offer_is_an_error"),
    Fault("gpu few: what was there is lost", _G + "few.cu", "        if (p.beta != 0) sum += (float)p.beta * xt_load(*c);\n", "", "C = alpha A B^T + beta C", f"{_EXACT}::test_few_rows_are_added_to_a_gradient -k few"),
    Fault("gpu tiled: 0 times what was there", _G + "tiled.cu", "beta == 0 ? value : value + beta * xt_load(*element)", "value + beta * xt_load(*element)", "C is read only when beta != 0: it may be NaN", f"{_EXACT}::test_products_of_small_integers_are_exact -k tiled"),
    Fault("gpu gemm: 0 times what was there", _G + "select.cu", "beta == 0 ? ACC(0) : beta * xt_load(*c)", "beta * xt_load(*c)", "a sum over nothing is 0, whatever memory held", f"{_PRODUCTS}::test_empty"),
    # ---- hyper-connections ----------------------------------------------------------------------------------------------
    Fault("gpu sinkhorn: an approximate inverse", _M + "sinkhorn.cu", "    return fmaf(r, fmaf(-d, r, 1.0f), r);\n", "    return r;\n", "one Newton step leaves about half a unit in the last place", _SINKHORN),
    Fault("gpu sinkhorn: subnormal exponentials", _M + "sinkhorn.cu", "v * 1.44269504f < -125.5f ? 0.0f : expf(v)", "expf(v)", "0 where the result would be subnormal", _SINKHORN),
    Fault("gpu sinkhorn: rebuilt from too little", _M + "sinkhorn.cu", "A off = 2 * unit(at.eps) * (A)stages", "A off = 64 * unit(at.eps) * (A)stages", "a matrix that does not come back to its start is done again", _SINKHORN),
    Fault("gpu sinkhorn: 0 / 0 in form D", _M + "sinkhorn.cu", "e[j] *= start[j] == 0 ? A(0) : start[j] / (start[j] + eps);", "e[j] *= start[j] / (start[j] + eps);", "F is 0 where P is 0", _SINKHORN),
    Fault("gpu mhc_post: h y is rounded", _M + "mhc_post.cu", "sum.at[e] = share * w.at[e];", "sum.at[e] = xt_load(xt_store<T>(share * w.at[e]));", "every output is summed in ACC and rounded once", _POST),
    Fault("gpu mhc_pre: the slope of an almost full gate", _M + "mhc_pre.cu", "value *= e / ((1 + e) * (1 + e));", "value *= (1 / (1 + exp(-z))) * (1 - 1 / (1 + exp(-z)));", "the slope is precise also where the sigmoid is almost 1", _STREAMS),
    Fault("gpu mhc_pre: dx of a million tokens", _M + "mhc_pre.cu", "first < tokens; first += (int64_t)gridDim.y * GROUP) {", "first < tokens; first += tokens) {", "dx of every token", _STREAMS),
    Fault("gpu mhc_pre: gamma anywhere", _M + "mhc_pre.cu", "xt_aligned<T>(p->streams * p->cols, 0, p->x, p->phi, p->gamma)", "xt_aligned<T>(p->streams * p->cols, 0, p->x, p->phi)", "no alignment beyond that of an element", _STREAMS),
    Fault("gpu mhc_pre: two parts of phi", _M + "mhc_pre.cu", "status = p->tf32 ? mix_mma<3, 2>(p, &part, &slices) : mix_mma<3, 3>(p, &part, &slices);", "status = mix_mma<3, 2>(p, &part, &slices);", "without tf32 u uses every bit of phi", _STREAMS),
    Fault("gpu mhc_pre: two parts of phi, once", _M + "mhc_pre_once.cuh", "p->tf32 ? once_queue<OnceBest<4, 2>>(p, queued) : once_queue<OnceBest<4, 3>>(p, queued)", "once_queue<OnceBest<4, 2>>(p, queued)", "without tf32 u uses every bit of phi", _STREAMS),
    Fault("gpu mhc_pre: NaN becomes infinite", _M + "mhc_pre.cuh", "        if (!(fabsf(low) < INFINITY)) a = low != low ? 0x7fc00000u : a;\n", "", "a number that is not finite is its own first part, also a NaN of low bits", _STREAMS),
    Fault("gpu mhc_pre: sums over no tokens", _M + "mhc_pre.cu", "        if (with_s || p->dalpha || p->dbias) {\n", "        if (p->tokens > 0 && (with_s || p->dalpha || p->dbias)) {\n", "with T = 0 the sums over tokens are zeros", _STREAMS),
    # ---- reductions -----------------------------------------------------------------------------------------------------
    Fault("gpu reduce: segments joined in another order", _RED + "reduce.cu", "of_segments, p->segments, p->chunk, WARPS);", "of_segments, p->segments, p->chunk, 32);", "the order of additions is a function of n alone, whatever the strides", f"{_KERNELS}test_long_sums_do_not_depend_on_the_layout"),
    Fault("gpu reduce: the mean of nothing", _RED + "reduce.cu", "if (OP == SUM && p.divisor != 1) v /= p.divisor;", "if (OP == SUM && p.divisor > 1) v /= p.divisor;", "MEAN of no elements is NaN", _SUMS),
    Fault("gpu reduce: groups across two dims", _RED + "reduce.cu", "(p->reduced.ndim == 1 || xt_walk_row(&p->reduced) % GROUP == 0) && p->row % GROUP == 0", "p->row % GROUP == 0", "the rows of every group are evenly spaced", f"{_EDGES}test_sums_over_two_dimensions_that_others_part"),
    Fault("gpu reduce: nothing but -inf", _RED + "reduce.cu", "    lane_begin(&s, lane * GROUP < length ? lane * GROUP : NONE);\n    if (LINE", "    lane_begin(&s, NONE);\n    if (LINE", "ARGMAX is the first one on ties", f"{_EDGES}test_the_first_of_the_lowest"),
    Fault("gpu stats: any address is aligned", _RED + "stats.cu", "if (dense && (uintptr_t)x % 16 == 0)", "if (dense && (uintptr_t)x % 4 == 0)", "any strides, and any first element", f"{_EDGES}test_statistics_at_their_edges"),
    Fault("gpu compare: only out is dense", _RED + "compare.cu", "walk.strides[0][0] == 1 && walk.strides[1][0] == 1)", "walk.strides[0][0] == 1)", "views of any strides", f"{_EDGES}test_comparison_at_its_edges"),
    Fault("gpu cumsum: every sum is rounded", _RED + "cumsum.cu", "            write(out + at, sum);\n", "            write(out + at, sum), sum = (A)read(out + at);\n", "added in ACC and rounded once", f"{_OPS} tests/ops/test_picking.py -k cumsum"),
    # ---- elements -------------------------------------------------------------------------------------------------------
    Fault("gpu strided: a part begins within 2 GiB", "cuda/common/strided.cuh", "second->data[k] += half * loop.strides[k][d] * loop.size[k];", "second->data[k] += (int)(half * loop.strides[k][d] * loop.size[k]);", "larger tensors are cut; offsets are 64-bit", f"{_KERNELS}test_offsets_beyond_2_gib"),
    Fault("gpu floor_divide: a quotient just below", _E + "binary.cu", "return q - whole > A(0.5) ? whole + 1 : whole;", "return whole;", "(a - m) / b to the nearest integer", f"{_OPS} tests/ops/test_composed.py -k 'floor_divide or division'"),
    Fault("gpu pow: -1 to an even power", _E + "binary.cu", "(exponent & 1 ? UINT64_MAX : 1)", "UINT64_MAX", "negative exponents give 0, 1 and -1 excepted", f"{_EDGES}test_powers_of_integers_by_integers"),
    Fault("gpu silu: denominators above 2^126", _E + "unary_math.cuh", "return __fdividef(0.25f * a, fmaf(0.25f, e, 0.25f));", "return __fdividef(a, 1 + e);", "a quarter of both keeps finite denominators below the limit of the quotient", f"{_EDGES}test_silu_of_16_bits_is_not_0_before_its_result_is"),
    Fault("gpu abs: the gradient of NaN", _E + "unary_math.cuh", "x < 0 ? -dy : dy * (x * 0))", "x < 0 ? -dy : dy * 0)", "NaN reaches the gradient", f"{_EDGES}test_the_slope_of_abs_at_nan_is_nan"),
    Fault("gpu copy: pairs at odd places", _E + "copy.cu", "    for (int d = 0; d < t->ndim; d++) even = even && (t->dst_stride[d] | t->src_stride[d]) % 2 == 0;\n", "", "16-bit elements move in pairs where strides are even", f"{_EDGES}test_matrices_an_odd_number_of_elements_apart_are_transposed"),
    Fault("gpu arange: numbers of 24 bits", _E + "arange.cu", "fma((double)i, step, start)", "fma((double)(float)i, step, start)", "each element comes from its index, so no error accumulates", f"{_EDGES}test_a_long_range_counts_in_float64"),
    # ---- layers ---------------------------------------------------------------------------------------------------------
    Fault("gpu rms_norm: a block without eps", _L + "rms_norm.cu", "sum += squares<T, N>(v[i]);\n        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols + eps);", "sum += squares<T, N>(v[i]);\n        sum = reciprocal_root(xt_block_sum(sum) * inverse_cols);", "1 / sqrt(mean x^2 + eps), in every plan", _RMS),
    Fault("gpu rms_norm: a weight anywhere", _L + "rms_norm.cu", "p->out, p->x, p->weight, p->sum, p->residual)", "p->out, p->x, p->sum, p->residual)", "unaligned rows take a plan of single elements", f"{_ANYWHERE}[rms_norm]"),
    Fault("gpu rms_norm: no rows, no dweight", _L + "rms_norm.cu", "(p->rows == 0 && (!p->dweight || p->accumulate))", "p->rows == 0", "the sum over no rows is 0", _RMS),
    Fault("gpu rms_norm: rstd of a block's first row", _L + "rms_norm_bwd.cuh", "            scale = next_scale;\n", "", "dx of a row by its own rstd", _RMS),
    Fault("gpu rms_norm: rstd of the first tile", _L + "rms_norm_bwd.cuh", "            scale[k] = next_scale[k];\n", "", "dx of a row by its own rstd, whatever tile it is in", f"{_NORMS}test_the_gradient_of_a_row_by_its_own_mean_and_rstd[rms_norm-3400-132]"),
    Fault("gpu rms_norm: rounded once", _L + "rms_norm.cuh", "        for (int e = 0; e < N; e++) x.at[e] *= rstd;\n        return product<T, N>(xt_store<T>(x), of_weight);", "        for (int e = 0; e < N; e++) x.at[e] *= rstd * factors<T, N, false>(of_weight).at[e];\n        return xt_store<T>(x);", "out = w cast(x rstd)", f"{_NORMS}test_a_norm_is_rounded_before_its_weight_in_every_plan"),
    Fault("gpu layer_norm: threads behind the row", _L + "layer_norm.cu", "            if ((i * (int)blockDim.x + (int)threadIdx.x) * N < cols) sum += squares_from", "            sum += squares_from", "the variance of the row's elements alone", f"{_NORMS}test_the_variance_of_layer_norm_is_of_the_elements_of_the_row"),
    Fault("gpu layer_norm: a bias anywhere", _L + "layer_norm.cu", "p->out, p->x, p->weight, p->bias, p->sum, p->residual)", "p->out, p->x, p->weight, p->sum, p->residual)", "unaligned rows take a plan of single elements", f"{_ANYWHERE}[layer_norm]"),
    Fault("gpu layer_norm: no rows, no dbias", _L + "layer_norm.cu", " || (p->dbias && !p->accumulate_bias);", ";", "the sum over no rows is 0", _LN),
    Fault("gpu layer_norm: mean of the next row", _L + "layer_norm_bwd.cuh", "        const A centre = next_centre, scale = next_scale;\n        fetch(r + gridDim.x);\n", "        fetch(r + gridDim.x);\n        const A centre = next_centre, scale = next_scale;\n", "dx of a row by its own mean and rstd", f"{_NORMS}test_the_gradient_of_a_row_by_its_own_mean_and_rstd[layer_norm-9-520]"),
    Fault("gpu layer_norm: one flag for both", _L + "layer_norm_bwd.cuh", "{p->accumulate_weight, p->accumulate_bias}", "{p->accumulate_weight, p->accumulate_weight}", "weight and bias accumulate each for itself", _LN),
    Fault("gpu rope: a tile of many periods", _L + "rope.cu", "place -= quotient(place, period) * period; /* the tile", "place -= period; /* the tile", "the position of row r is r % period", f"{_EDGES}test_a_position_is_counted_anew_in_every_period"),
    Fault("gpu rope: heads apart by an odd number", _L + "rope.cu", "xt_aligned<T>(p->x_stride[1], p->out_stride[0])", "xt_aligned<T>(p->out_stride[0], p->out_stride[0])", "x with any strides of rows and heads", f"{_EDGES}test_heads_an_odd_number_of_elements_apart_are_turned"),
    Fault("gpu scatter: whichever thread is last", _L + "gather.cu", "atomicMax(&winner[ids[r]], (long long)r);", "winner[ids[r]] = (long long)r;", "of several rows for one place the last counts: the same bits in every run", _PICKING),
    Fault("gpu positions: an index behind the end", _L + "gather.cu", "p.out[c] = known ? place : -1;", "p.out[c] = known || place >= 0 ? place : -1;", "an index out of range is treated as absent", f"{_KERNELS}test_what_an_index_out_of_range_names_is_absent"),
    Fault("gpu dropout: x anywhere", _L + "dropout.cu", "(uintptr_t)p->out % 16 == 0 && (uintptr_t)p->x % 16 == 0;", "(uintptr_t)p->out % 16 == 0;", "unaligned tensors are read one by one", f"{_ANYWHERE}[dropout]"),
    Fault("gpu bias_gelu: a bias anywhere", _L + "bias_gelu.cu", "xt_aligned<T>(p->cols, 0, out, x, bias)", "xt_aligned<T>(p->cols, 0, out, x)", "unaligned or odd rows: one element a piece", f"{_ANYWHERE}[bias_gelu]"),
    Fault("gpu loss in chunks: 0 times infinity", _L + "linear_cross_entropy.cu", "v.at[e] == 0 ? A(0) : v.at[e] * factor", "v.at[e] * factor", "what no row has touched stays 0, whatever dloss / total is", f"{_CHUNKS} {_OPS} -k 'test_loss_in_chunks and (ignored or nan or losses) or linear_cross_entropy:chunks'"),
    Fault("gpu loss in chunks: a scale is lost", _L + "linear_cross_entropy.cu", "(total ? *total : A(1)) * (A)scale", "(total ? *total : A(1))", "x dloss / total * scale", f"{_CHUNKS} {_OPS} -k 'bits_are_those or as_exact or losses or linear_cross_entropy:chunks'"),
    Fault("gpu qk_norm_rope: no rows, no dweight", _L + "qk_norm_rope.cu", "    if (p->dim == 0) return XT_OK;\n", "    if (p->dim == 0 || p->rows == 0) return XT_OK;\n", "the sum over no rows is 0", _QK),
    Fault("gpu qk_norm_rope: dout anywhere", _L + "qk_norm_rope.cu", "!even<T>(p->dout[i], p->dout_stride[i]) || ", "", "rows that are not aligned take the plain plan", f"{_ANYWHERE}[qk_norm_rope]"),
    Fault("gpu qk_norm_rope: the plain plan rounds once", _L + "qk_norm_rope.cu", "const T na = xt_store<T>(wa * xt_load(xt_store<T>(a * scale))),", "const T na = xt_store<T>(wa * (a * scale)),", "n = w cast(x rstd), in every plan", f"{_NORMS}test_the_norm_of_a_head_is_rounded_before_its_weight"),
    Fault("gpu embedding: rows behind the table are cleared", _L + "embedding.cu", "        if (p.vocab - tile * 32 < 32) absent &= (1u << (p.vocab - tile * 32)) - 1;\n", "", "nothing behind dweight is written", f"{_OPS} tests/cuda/test_cuda_kernels.py -k embedding"),
    # ---- optimizers -----------------------------------------------------------------------------------------------------
    Fault("gpu muon: a norm of NaN", _O + "muon.cu", "1 / (norm < eps ? eps : norm);", "1 / fmax(norm, eps);", "NaN stays NaN", "tests/nn/test_muon.py::test_a_norm_that_is_nan_is_not_the_least_one"),
    Fault("gpu muon: a fused decay", _O + "muon.cu", "(A)(1 - __dmul_rn(*lr, weight_decay))", "(A)fma(-*lr, weight_decay, 1.0)", "not fused, as on the host", "tests/nn/test_muon.py::test_the_factor_of_decay_is_rounded_twice"),
    Fault("gpu tree_sum: the dtype of the first part", _O + "tree_sum.cu", " && banks.dtype[i] == banks.dtype[0]", "", "parts may have different dtypes", f"{_TREE}test_parts_of_16_bits_beside_sums"),
    Fault("gpu tree_sum: parts anywhere", _O + "tree_sum.cu", "whole = whole && only[2 + i] % (W * sizeof(A)) == 0", "whole = whole", "parts of any alignment", f"{_TREE}test_parts_may_begin_anywhere"),
    Fault("gpu foreach_copy: pieces behind 2 GiB", _O + "foreach_copy.cu", "(int64_t)((int)blockIdx.x - table.first[item]) * PIECE * WORD", "((int)blockIdx.x - table.first[item]) * PIECE * WORD", "the bytes of tensors of any size", f"{_KERNELS}test_offsets_beyond_2_gib"),
    Fault("gpu ema: a step that is not taken counts", _O + "ema.cu", "if (!guard || isfinite(*guard)) ++*step;", "++*step;", "with a bad guard nothing is written, and no step", _EMA),
    Fault("gpu clip: a norm of NaN", _O + "clip_grad_norm.cu", "if (coefficient >= 1) return;", "if (!(coefficient < 1)) return;", "a norm that is NaN multiplies as it comes", f"{_EDGES}test_a_norm_that_is_nan_multiplies_the_gradients_as_it_comes"),
    Fault("gpu block_norm: an infinite norm", _O + "block_norm.cu", "isfinite(found) ? 0.0f : NAN", "isnan(found) ? NAN : 0.0f", "guard is NaN where the norm is NaN or Inf", f"{_TREE}test_the_guard_of_a_norm_is_nan_where_the_norm_is_not_finite"),
    Fault("gpu tables: an empty tensor at the end", _O + "tables.cuh", "        if (pieces > 0) {\n", "        if (pieces == 0) continue;\n        {\n", "an empty tensor is left out, and the others are not", f"{_EDGES}test_an_empty_tensor_at_the_end_of_a_list"),
    # ---- attention ------------------------------------------------------------------------------------------------------
    Fault("gpu attention float32: the first row's window", _A + "flash.cu", "whole = {bottom.begin, top.end};", "whole = {top.begin, top.end};", "no query sees keys before its window", _SEEN),
    Fault("gpu attention float32: the last key's queries", _A + "flash.cu", "const XtSeen<int> all = {by_last.begin, by_first.end};", "const XtSeen<int> all = {by_last.begin, by_last.end};", "no key is seen by queries behind its window", _SEEN),
    Fault("gpu attention float32: rows behind the end", _A + "flash.cu", "from, 16, there ? 0 : 16);", "from, 16, 0);", "rows beyond the end are zeros: 0 times an infinity is not", "tests/ops/test_documents.py::test_the_first_row_does_not_stand_for_rows_behind_the_last"),
    Fault("gpu attention materialized: rows in parts", _A + "materialized.cu", "bool add = t.row > 0;", "bool add = false;", "dK and dV add up the steps", f"{_LONG}test_rows_of_scores_that_have_no_room_together"),
    Fault("gpu attention materialized: scores not yet read", _A + "materialized.cu", "            row_barrier<THREADS>();\n", "", "no thread writes P before all have read the scores there", f"{_LONG}test_weights_that_replace_scores_sum_to_1"),
    Fault("gpu attention materialized: one query of heads apart", _A + "materialized.cu", "if (x.seq == 1) ld = group == 1 ? s.dim : x.stride[1];", "if (x.seq == 1) ld = s.dim;", "heads of a group lie stride[1] apart", f"{_EXACT}::test_heads_of_one_query_may_lie_apart"),
    Fault("gpu cached_attention: more heads than a grid has", _A + "cached_attention.cu", "p->batch * p->heads <= 65535 && ", "", "what the split plan does not fit takes the plain one", "tests/ops/test_cached_attention.py::test_more_sequences_than_a_grid_has_rows"),
    Fault("gpu cached_attention: one key before the window", _A + "cached_attention.cu", "position - p.window + 1 : 0; /* the first position that is seen */", "position - p.window : 0; /* the first position that is seen */", "j > n - window", _CACHED),
    Fault("gpu sinks: parts of another head", _A + "attention_sinks.cu", "parts[h * gridDim.y + blockIdx.y] = sum;", "parts[blockIdx.y * p.heads + h] = sum;", "the blocks of a head in order", f"{_MASKED}test_the_gradient_of_a_sink_sums_over_thousands_of_rows"),
    Fault("gpu sinks: no key and no sink", _A + "attention_sinks.cu", "        if (max == -(A)INFINITY) continue; // no key and no sink\n", "", "a row that sees nothing keeps out = 0", f"{_MASKED}test_a_query_without_keys_beside_a_sink"),
    Fault("gpu attention: out of the first sequences", _A + "flash_hopper_bwd.cu", "        move(part.out, p->out_stride[0]), move(part.dout, p->dout_stride[0]);\n", "        move(part.dout, p->dout_stride[0]);\n", "as many sequences at a time as have room", f"{_LONG}test_sequences_whose_sums_have_no_room_together"),
    Fault("gpu attention: lse of a row that sees nothing", _A + "flash_hopper_fwd.cu", "sq + i] = i + past > 0 ? lse : -INFINITY;", "sq + i] = lse;", "a row that sees nothing gives lse = -inf", f"tests/ops/test_masked_attention.py {_FLASH[:-1]} or sink'"),
    # ---- convolutions ---------------------------------------------------------------------------------------------------
    Fault("gpu conv1d: dweight of no samples", "cuda/conv/conv1d.cu", "if (p->dweight && weights > 0)", "if (p->dweight && weights > 0 && s.batch > 0)", "the sum over no samples is 0", f"{_OPS} -k conv1d:direct"),
    Fault("gpu causal_conv1d: infinity behind the end", "cuda/conv/causal_conv1d.cu", "if (!INSIDE && t >= steps) {", "if (!INSIDE && t >= steps + taps) {", "0 times a slope that is not finite would be NaN", "tests/conv/test_conv1d.py::test_sums_behind_the_last_row_have_no_slope"),
]  # fmt: skip
