/* backend.c - the tables of the devices, and the choice among named GEMM and attention implementations. */
#include "backend.h"
#include "contract/attention.h"
#include "contract/backend.h"
#include "contract/gemm.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NAME_MAX_LENGTH 32

XtStatus xt_backend_for(XtDevice device, const XtBackend **out) {
    if (device.type == XT_CPU) {
        *out = &xt_cpu_backend;
        return XT_OK;
    }
    XtStatus status = xt_cuda_table(out);
    return status == XT_OK ? (*out)->accelerator->use(device.index) : status;
}

static _Thread_local XtDevice default_device;
XtDevice xt_default_device(void) { return default_device; }
XtStatus xt_set_default_device(XtDevice device) {
    const XtBackend *unused;
    XtStatus status = xt_backend_for(device, &unused);
    if (status == XT_OK) default_device = device;
    return status;
}

static bool tf32; /* atomic */
void xt_allow_tf32(bool allow) { __atomic_store_n(&tf32, allow, __ATOMIC_RELAXED); }
bool xt_tf32(void) { return __atomic_load_n(&tf32, __ATOMIC_RELAXED); }

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
    snprintf(choice->name, sizeof choice->name, "%s", name && strcmp(name, "auto") ? name : "");
    return XT_OK;
}

const char *xt_gemm_backend_in_use(void) { return in_use(&gemm_choice, "XTRAIN_GEMM"); }
const char *xt_attention_backend_in_use(void) { return in_use(&attention_choice, "XTRAIN_ATTENTION"); }

/* Finds `name` in a table of records that begin with a name; returns its index, or -1 after composing the error. */
static XtStatus find(const char *family, const void *table, size_t record, const char *name, XtDevice device, const void **out) {
    const char *entry = table;
    for (; *(const char *const *)entry; entry += record) {
        if (!name || !strcmp(*(const char *const *)entry, name)) {
            *out = entry;
            return XT_OK;
        }
    }
    char known[256] = "";
    for (entry = table; *(const char *const *)entry; entry += record) {
        strncat(known, known[0] ? ", " : "", sizeof known - strlen(known) - 1);
        strncat(known, *(const char *const *)entry, sizeof known - strlen(known) - 1);
    }
    return xt_error(XT_VALUE_ERROR, "%s: backend must be one of auto, %s on %s, got '%s'", family, known, xt_device_name(device),
                    name ? name : "auto");
}

/* A name that no device knows is refused when it is chosen, not when a product is first needed. Only a name that the CPU does not
 * know is worth opening the CUDA library for. `table` is where XtBackend keeps the family's table. */
static XtStatus check_name(const char *function, const char *name, size_t table, size_t record) {
    const void *unused;
    const XtBackend *cuda;
    XtDevice cpu = {XT_CPU, 0};
    if (!name || !strcmp(name, "auto")) return XT_OK;
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

XtStatus xt_gemm_backend(XtDevice device, const char *name, const XtGemmBackend **out) {
    const XtBackend *backend;
    XtStatus status = xt_backend_for(device, &backend);
    if (status != XT_OK) return status;
    if (!name || !strcmp(name, "auto")) name = xt_gemm_backend_in_use();
    const XtGemmBackend *first = backend->gemm;
    while (!name && first->usable && !first->usable()) first++; /* the last of a table always is */
    return find("matmul", first, sizeof(XtGemmBackend), name, device, (const void **)out);
}

XtStatus xt_attention_backend(XtDevice device, const char *name, const XtAttentionBackend **out) {
    const XtBackend *backend;
    XtStatus status = xt_backend_for(device, &backend);
    if (status != XT_OK) return status;
    if (!name || !strcmp(name, "auto")) name = xt_attention_backend_in_use();
    return find("scaled_dot_product_attention", backend->attention, sizeof(XtAttentionBackend), name, device, (const void **)out);
}
