/* optimizer.h - optimizer kernels: a list of dense tensors in one call. The rules for all kernels are in kernels.h. */
#ifndef XT_CONTRACT_OPTIMIZER_H
#define XT_CONTRACT_OPTIMIZER_H

#include "xtrain.h"

#ifdef __cplusplus
extern "C" {
#endif

/* AdamW (Loshchilov & Hutter 2019), PyTorch's order of operations, for each tensor:
 *   p *= 1 - lr * weight_decay;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;
 *   p -= lr / (1 - beta1^step) * m / (sqrt(v / (1 - beta2^step)) + eps)
 * p and g have `dtype`; m, v and master (or NULL: p is the master) have ACC. Computed in ACC; p is the rounded master when given.
 * guard: one float on the device, or NULL; when it is NaN or Inf no tensor is written.
 * missed: one int64 on the device, or NULL: how many of the `step` steps a guard has stopped before this one; where the formula says
 * step, step - missed is meant. missed_after, elsewhere, or NULL: gets missed, plus 1 when the guard stops this step too. */
typedef struct XtAdamWItem {
    void *p, *m, *v, *master;
    const void *g;
    XtDtype dtype;
    int64_t numel;
    double weight_decay;
} XtAdamWItem;
typedef struct XtAdamW {
    const XtAdamWItem *items; /* [count], host memory */
    int64_t count;
    double lr, beta1, beta2, eps;
    int64_t step;       /* >= 1, the step being taken */
    const float *guard; /* borrows, as the others do */
    const int64_t *missed;
    int64_t *missed_after; /* NULL without missed */
} XtAdamW;

/* norm[0] (float32, on the device) = sqrt(sum over all tensors of x^2), in float64 partial sums of fixed size. */
typedef struct XtGradNorm {
    float *norm;
    const XtView *items; /* [count] dense views, host memory */
    int64_t count;
} XtGradNorm;

/* Every item *= min(1, max_norm / (norm[0] + 1e-6)), as torch.nn.utils.clip_grad_norm_. A coefficient of exactly 1 writes nothing.
 * A norm that is NaN or Inf multiplies as it comes: the caller looks at the norm. */
typedef struct XtClip {
    const float *norm;
    const XtView *items; /* [count] dense views, host memory */
    int64_t count;
    double max_norm;
} XtClip;

#ifdef __cplusplus
}
#endif

#endif
