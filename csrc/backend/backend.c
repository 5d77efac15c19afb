/* backend.c - which table serves which device, the default device, and whether products may use TF32. */
#include "backend.h"
#include "contract/backend.h"

XtStatus xt_backend_for(XtDevice device, const XtBackend **out) {
    if (device.type == XT_CPU) {
        *out = &xt_cpu_backend;
        return XT_OK;
    }
    if (device.type == XT_META) {
        *out = xt_meta_table();
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
