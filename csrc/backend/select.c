/* select.c - which GEMM and which attention run: the name in force, and from there the first implementation that supports the problem. */
#include "backend.h"
#include "contract/attention.h"
#include "contract/backend.h"
#include "contract/gemm.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_MAX_LENGTH 32

/* ---- names ------------------------------------------------------------------------------------------------------------- */

static bool is_auto(const char *name) { return !name || !strcmp(name, "auto"); }

/* One choice per family. `set` tells a deliberate NULL ("auto") from "not chosen yet: read the environment". */
typedef struct Choice {
    bool set;
    char name[NAME_MAX_LENGTH];
} Choice;

static _Thread_local Choice gemm_choice, attention_choice;

static const char *in_use(Choice *choice, const char *variable) {
    if (!choice->set) {
        const char *text = getenv(variable);
        choice->set = true;
        snprintf(choice->name, sizeof choice->name, "%s", text ? text : "");
        if (!strcmp(choice->name, "auto")) choice->name[0] = '\0';
    }
    return choice->name[0] ? choice->name : NULL;
}

static XtStatus choose(Choice *choice, const char *name) {
    if (name && strlen(name) >= NAME_MAX_LENGTH)
        return xt_error(XT_VALUE_ERROR, "backend names are shorter than %d letters", NAME_MAX_LENGTH);
    choice->set = true;
    snprintf(choice->name, sizeof choice->name, "%s", is_auto(name) ? "" : name);
    return XT_OK;
}

const char *xt_gemm_backend_in_use(void) { return in_use(&gemm_choice, "XTRAIN_GEMM"); }
const char *xt_attention_backend_in_use(void) { return in_use(&attention_choice, "XTRAIN_ATTENTION"); }

/* The first record of that name, in a table of records that begin with one. */
static XtStatus find(const char *family, const void *table, size_t record, const char *name, XtDevice device, const void **out) {
    const char *entry = table;
    for (; *(const char *const *)entry; entry += record) {
        if (!strcmp(*(const char *const *)entry, name)) {
            *out = entry;
            return XT_OK;
        }
    }
    char known[256] = "";
    const char *before = "";
    for (entry = table; *(const char *const *)entry; before = *(const char *const *)entry, entry += record) {
        if (!strcmp(*(const char *const *)entry, before)) continue;
        strncat(known, known[0] ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, *(const char *const *)entry, sizeof known - strlen(known) - 1);
    }
    return xt_error(XT_VALUE_ERROR, "%s: backend must be one of auto, %s on %s, got '%s'", family, known, xt_device_name(device),
                    name);
}

/* A name that no device knows is refused when it is chosen, not when a product is first needed. Only a name that the CPU does not
 * know is worth opening the CUDA library for. `table` is where XtBackend keeps the family's table. */
static XtStatus check_name(const char *function, const char *name, size_t table, size_t record) {
    const void *unused;
    const XtBackend *cuda;
    XtDevice cpu = {XT_CPU, 0};
    if (is_auto(name)) return XT_OK;
    if (find(function, *(const void *const *)((const char *)&xt_cpu_backend + table), record, name, cpu, &unused) == XT_OK)
        return XT_OK;
    if (xt_cuda_table(&cuda) == XT_OK &&
        find(function, *(const void *const *)((const char *)cuda + table), record, name, cpu, &unused) == XT_OK)
        return XT_OK;
    return find(function, *(const void *const *)((const char *)&xt_cpu_backend + table), record, name, cpu, &unused);
}

XtStatus xt_use_gemm_backend(const char *name) {
    XtStatus status = check_name("use_gemm_backend", name, offsetof(XtBackend, gemm), sizeof(XtGemmBackend));
    return status == XT_OK ? choose(&gemm_choice, name) : status;
}
XtStatus xt_use_attention_backend(const char *name) {
    XtStatus status = check_name("use_attention_backend", name, offsetof(XtBackend, attention), sizeof(XtAttentionBackend));
    return status == XT_OK ? choose(&attention_choice, name) : status;
}

/* ---- where the search begins ------------------------------------------------------------------------------------------- */

static XtStatus look_up(XtDevice device, const XtBackend **backend, const XtDeviceTraits **traits) {
    static const XtDeviceTraits none; /* of the CPU */
    XtStatus status = xt_backend_for(device, backend);
    if (status == XT_OK) *traits = (*backend)->accelerator ? (*backend)->accelerator->traits(device.index) : &none;
    return status;
}

XtStatus xt_gemm_from(XtDevice device, const char *name, const XtGemmBackend **first, const XtDeviceTraits **traits) {
    const XtBackend *backend;
    XT_CHECK(look_up(device, &backend, traits));
    if (is_auto(name)) name = xt_gemm_backend_in_use();
    *first = backend->gemm;
    if (!name) return XT_OK;
    XtStatus status = find("matmul", backend->gemm, sizeof(XtGemmBackend), name, device, (const void **)first);
    return status == XT_OK && (*first)->check ? (*first)->check() : status;
}

XtStatus xt_attention_from(XtDevice device, const char *name, const XtAttentionBackend **first, const XtDeviceTraits **traits) {
    const XtBackend *backend;
    XT_CHECK(look_up(device, &backend, traits));
    if (is_auto(name)) name = xt_attention_backend_in_use();
    *first = backend->attention;
    if (!name) return XT_OK;
    return find("scaled_dot_product_attention", backend->attention, sizeof(XtAttentionBackend), name, device, (const void **)first);
}

/* ---- products and attention ---------------------------------------------------------------------------------------------- */

XtStatus xt_gemm_refuse(const XtGemm *p) {
    const XtDtype dtype[] = {p->dtype_a, p->dtype_b, p->dtype_c};
    for (int i = 0; i < 3; i++) {
        if (!xt_dtype_is_float(dtype[i]))
            return xt_error(XT_TYPE_ERROR, "gemm: dtype of %c must be float32, float64, bfloat16 or float16, got %s", 'A' + i,
                            xt_dtype_name(dtype[i]));
        if (dtype[i] != dtype[0])
            return xt_error(XT_TYPE_ERROR, "gemm: dtype of %c must be %s like that of A%s, got %s", 'A' + i,
                            xt_dtype_name(dtype[0]), i == 2 && xt_dtype_size(dtype[0]) == 2 ? ", or float32" : "",
                            xt_dtype_name(dtype[i]));
    }
    return xt_error(XT_NOT_IMPLEMENTED, "gemm: no implementation of this device supports the problem");
}

XtStatus xt_gemm(XtDevice device, const char *name, const XtGemm *p) {
    bool done;
    XtStatus status = xt_gemm_where_supported(device, name, p, &done);
    return status != XT_OK || done ? status : xt_gemm_refuse(p);
}

XtStatus xt_gemm_where_supported(XtDevice device, const char *name, const XtGemm *p, bool *done) {
    const XtGemmBackend *first;
    const XtDeviceTraits *traits;
    *done = false;
    XT_CHECK(xt_gemm_from(device, name, &first, &traits));
    first = xt_gemm_select(first, p, traits);
    *done = first->name != NULL;
    return *done ? first->run(p) : XT_OK;
}

XtStatus xt_gemm_adds_bias(XtDevice device, const char *name, const XtGemm *p, bool *adds) {
    const XtGemmBackend *first;
    const XtDeviceTraits *traits;
    XtGemm alone = *p;
    alone.bias = NULL;
    XT_CHECK(xt_gemm_from(device, name, &first, &traits));
    first = xt_gemm_select(first, &alone, traits);
    *adds = first->name && !first->supports(p, traits);
    return XT_OK;
}

XtStatus xt_attention_fwd(XtDevice device, const char *name, const XtAttentionFwd *p) {
    const XtAttentionBackend *first;
    const XtDeviceTraits *traits;
    XT_CHECK(xt_attention_from(device, name, &first, &traits));
    return xt_attention_select_fwd(first, p, traits)->forward(p);
}

XtStatus xt_attention_bwd(XtDevice device, const char *name, const XtAttentionBwd *p) {
    const XtAttentionBackend *first;
    const XtDeviceTraits *traits;
    XT_CHECK(xt_attention_from(device, name, &first, &traits));
    return xt_attention_select_bwd(first, p, traits)->backward(p);
}
