/* create.c - tensors from nothing: uninitialised, constant, counting, random. */
#include "contract/elementwise.h"
#include "ops/ops.h"

#include <math.h>

/* A new tensor of arg[0]'s shape; device None means the default device. */
static XtStatus make(XtCall *c, const XtArg *shape, const XtArg *dtype, const XtArg *device) {
    XtDevice where = device->given ? device->device : xt_default_device();
    const XtBackend *unused;
    XT_CHECK(xt_backend_for(where, &unused));
    XT_CHECK(xt_tensor_empty(where, (XtDtype)dtype->i, shape->count, shape->ints, &c->out[0]));
    c->out_count = 1;
    return XT_OK;
}

static XtStatus empty_forward(XtCall *c) { return make(c, &c->arg[0], &c->arg[1], &c->arg[2]); }

const XtOp xt_op_empty = {.name = "empty",
                          .signature = "shape: ints, dtype: dtype = 'float32', device: device? = None -> Tensor",
                          .forward = empty_forward,
                          .doc = "Uninitialised tensor."};

static XtStatus full_forward(XtCall *c) {
    XT_CHECK(xt_check_fits(c->op, "value", c->arg[1].scalar, (XtDtype)c->arg[2].i));
    XT_CHECK(make(c, &c->arg[0], &c->arg[2], &c->arg[3]));
    return xt_backend_of(c->out[0])->fill(&(XtFill){.dst = c->out[0]->view, .value = c->arg[1].scalar});
}

const XtOp xt_op_full = {.name = "full",
                         .signature = "shape: ints, value: number, dtype: dtype = 'float32', device: device? = None -> Tensor",
                         .forward = full_forward,
                         .doc = "Tensor with every element equal to value."};

static XtStatus arange_forward(XtCall *c) {
    XtScalar start = c->arg[0].scalar, end = c->arg[1].scalar, step = c->arg[2].scalar;
    double length = step.d == 0 ? NAN : (end.d - start.d) / step.d;
    if (!isfinite(length))
        return xt_error(XT_VALUE_ERROR, "arange: step must not be 0 and the bounds must be finite, got start %g, end %g, step %g",
                        start.d, end.d, step.d);
    if (length < 0)
        return xt_error(XT_VALUE_ERROR, "arange: step must lead from start to end, got start %g, end %g, step %g", start.d, end.d,
                        step.d);
    if (!(length < 9e15)) return xt_error(XT_VALUE_ERROR, "arange: too many elements (%g)", length);
    int64_t count = length > 0 ? (int64_t)length : 0;
    if ((double)count < length) count++;
    if (start.is_int && end.is_int && step.is_int) { /* exact beyond 2^53 */
        __int128 span = (__int128)end.i - start.i, by = step.i;
        __int128 n = by > 0 ? (span + by - 1) / by : (span + by + 1) / by;
        count = n > 0 ? (int64_t)n : 0;
    }
    XtArg shape = {.count = 1, .ints = {count}};
    if ((XtDtype)c->arg[3].i == XT_BOOL) return xt_error(XT_TYPE_ERROR, "arange: dtype must be a number type, got bool");
    if (count > 0) {
        const __int128 whole = (__int128)start.i + (__int128)(count - 1) * step.i;
        XtScalar last = {.d = start.d + (double)(count - 1) * step.d};
        if (start.is_int && step.is_int)
            last = (XtScalar){.is_int = whole == (int64_t)whole, .i = (int64_t)whole, .d = (double)whole};
        XT_CHECK(xt_check_fits(c->op, "start", start, (XtDtype)c->arg[3].i));
        XT_CHECK(xt_check_fits(c->op, "the last number", last, (XtDtype)c->arg[3].i));
    }
    XT_CHECK(make(c, &shape, &c->arg[3], &c->arg[4]));
    return xt_backend_of(c->out[0])->arange(&(XtArange){.dst = c->out[0]->view, .start = start, .step = step});
}

const XtOp xt_op_arange = {
    .name = "arange",
    .signature = "start: number, end: number, step: number = 1, dtype: dtype = 'int64', device: device? = None -> Tensor",
    .forward = arange_forward,
    .doc = "start, start + step, ... up to but without end. ValueError for numbers that an integer dtype does not hold."};

/* Argument 5: the seed and the number of the fill, of a generator of the caller's; else the next ones of the process. */
static XtStatus random(XtCall *c, XtRandomKind kind, double low, double high) {
    XtTensor *t = c->out[0];
    const XtArg *key = &c->arg[5];
    XtPhilox philox = key->given ? (XtPhilox){(uint64_t)key->ints[0], (uint64_t)key->ints[1]} : xt_random_next();
    return xt_backend_of(t)->random(&(XtRandom){.dst = t->view, .kind = kind, .low = low, .high = high, .philox = philox});
}

static XtStatus check_key(const XtCall *c) {
    if (!c->arg[5].given || c->arg[5].count == 2) return XT_OK;
    return xt_error(XT_VALUE_ERROR, "%s: key must be a seed and the number of a fill, got %d numbers", c->op->name,
                    c->arg[5].count);
}

static XtStatus float_fill(XtCall *c) {
    XtDtype dtype = (XtDtype)c->arg[3].i;
    if (!xt_dtype_is_float(dtype))
        return xt_error(XT_TYPE_ERROR, "%s: dtype must be floating point, got %s", c->op->name, xt_dtype_name(dtype));
    double first = c->arg[1].f, second = c->arg[2].f; /* low and high, or mean and std */
    XT_CHECK(check_key(c));
    const bool finite = isfinite((float)first) && isfinite((float)second); /* the kernels compute in float32 */
    if (c->op->code == XT_UNIFORM && !(finite && isfinite((float)(second - first)) && first <= second))
        return xt_error(XT_VALUE_ERROR,
                        "uniform: low must not be above high, they and their difference finite in float32, got %g and %g", first,
                        second);
    if (c->op->code == XT_NORMAL && !(finite && second >= 0))
        return xt_error(XT_VALUE_ERROR, "normal: std must be at least 0, both it and mean finite in float32, got mean %g, std %g",
                        first, second);
    XT_CHECK(make(c, &c->arg[0], &c->arg[3], &c->arg[4]));
    return random(c, (XtRandomKind)c->op->code, first, second);
}

const XtOp xt_op_uniform = {
    .name = "uniform",
    .signature = "shape: ints, low: float = 0.0, high: float = 1.0, dtype: dtype = 'float32', device: device? = None, *, key: "
                 "ints? = None -> Tensor",
    .forward = float_fill,
    .code = XT_UNIFORM,
    .doc = "Independent uniform numbers in [low, high). Philox4x32-10 keyed by the seed: the same on every device."};
const XtOp xt_op_normal = {.name = "normal",
                           .signature = "shape: ints, mean: float = 0.0, std: float = 1.0, dtype: dtype = 'float32', device: "
                                        "device? = None, *, key: ints? = None -> Tensor",
                           .forward = float_fill,
                           .code = XT_NORMAL,
                           .doc = "Independent normal numbers (Box-Muller on Philox4x32-10)."};

static XtStatus randint_forward(XtCall *c) {
    int64_t low = c->arg[0].i, high = c->arg[1].i, limit = (int64_t)1 << 53;
    if (low >= high || low < -limit || high > limit)
        return xt_error(XT_VALUE_ERROR, "randint: low must be below high, both within 2^53, got %lld and %lld", (long long)low,
                        (long long)high);
    XT_CHECK(xt_check_fits(c->op, "low", xt_scalar_int(low), (XtDtype)c->arg[3].i));
    XT_CHECK(xt_check_fits(c->op, "high - 1", xt_scalar_int(high - 1), (XtDtype)c->arg[3].i));
    XT_CHECK(check_key(c));
    XT_CHECK(make(c, &c->arg[2], &c->arg[3], &c->arg[4]));
    return random(c, XT_RANDINT, (double)low, (double)high);
}

const XtOp xt_op_randint = {
    .name = "randint",
    .signature = "low: int, high: int, shape: ints, dtype: dtype = 'int64', device: device? = None, *, key: ints? = None -> Tensor",
    .forward = randint_forward,
    .doc = "Independent integers, uniform in [low, high). ValueError for numbers that an integer dtype does not hold."};
