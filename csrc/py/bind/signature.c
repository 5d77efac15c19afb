/* signature.c - reads the signature text of an op or function once, at import. The grammar is in ops.h. */
#include "py/bind/bind.h"

#include <ctype.h>

static const char *skip_space(const char *at) {
    while (isspace((unsigned char)*at)) at++;
    return at;
}

/* Copies [begin, end) into a fixed buffer; false when it does not fit or is empty. */
static bool copy_word(char *out, size_t size, const char *begin, const char *end) {
    size_t length = (size_t)(end - begin);
    if (length == 0 || length >= size) return false;
    memcpy(out, begin, length);
    out[length] = '\0';
    return true;
}

static const char *word_end(const char *at) {
    while (isalnum((unsigned char)*at) || *at == '_') at++;
    return at;
}

static bool is_arrow(const char *at) { return at[0] == '-' && at[1] == '>'; }

/* The end of a default: the next comma or arrow outside quotes and parentheses. */
static const char *default_end(const char *at) {
    int depth = 0;
    bool quoted = false;
    for (; *at != '\0' && (quoted || depth > 0 || (*at != ',' && !is_arrow(at))); at++) {
        if (*at == '\'') quoted = !quoted;
        if (!quoted && *at == '(') depth++;
        if (!quoted && *at == ')') depth--;
    }
    return at;
}

/* Fills param->value from param->text. */
static bool parse_default(PyParam *param) {
    XtArg *value = &param->value;
    const char *text = param->text;
    size_t length = strlen(text);
    value->is_tensor = param->kind == XT_ARG_TENSOR || param->kind == XT_ARG_OPERAND;
    if (strcmp(text, "None") == 0) return param->optional || param->kind == PY_ARG_OBJECT; /* given stays false */
    value->given = true;
    if (strcmp(text, "True") == 0 || strcmp(text, "False") == 0) {
        value->b = text[0] == 'T';
        return param->kind == XT_ARG_BOOL;
    }
    if (strcmp(text, "()") == 0) {
        value->is_sequence = true;
        return param->kind == XT_ARG_INTS;
    }
    if (text[0] == '\'') {
        if (length < 2 || text[length - 1] != '\'' || length - 2 >= sizeof param->word) return false;
        memcpy(param->word, text + 1, length - 2);
        param->word[length - 2] = '\0';
        XtDtype dtype;
        switch (param->kind) {
        case XT_ARG_DTYPE:
            if (!py_dtype_named(param->word, &dtype)) return false;
            value->i = (int64_t)dtype;
            return true;
        case XT_ARG_DEVICE: return py_device_named(param->word, &value->device);
        case XT_ARG_STR: value->s = param->word; return true;
        default: return false;
        }
    }
    char *end = NULL;
    value->f = strtod(text, &end);
    if (end == text || *end != '\0') return false;
    bool integral = strpbrk(text, ".eEn") == NULL; /* n: inf, nan */
    value->i = integral ? strtoll(text, NULL, 10) : 0;
    value->scalar = integral ? xt_scalar_int(value->i) : xt_scalar_float(value->f);
    if (param->kind == XT_ARG_INTS && integral) {
        value->ints[0] = value->i;
        value->count = 1;
        return true;
    }
    return (param->kind == XT_ARG_INT && integral) || param->kind == XT_ARG_FLOAT || param->kind == XT_ARG_NUMBER ||
           param->kind == XT_ARG_OPERAND;
}

/* Reads one `name: kind? = default` at *at and moves *at behind it. */
static bool parse_param(const char **at, PyParam *param) {
    char word[32];
    const char *begin = skip_space(*at), *end = word_end(begin);
    if (!copy_word(param->name, sizeof param->name, begin, end)) return false;
    begin = skip_space(end);
    if (*begin != ':') return false;
    begin = skip_space(begin + 1);
    end = word_end(begin);
    if (!copy_word(word, sizeof word, begin, end)) return false;
    param->kind = py_kind_named(word);
    if (param->kind < 0) return false;
    param->optional = *end == '?';
    begin = skip_space(end + (param->optional ? 1 : 0));
    if (*begin == '=') {
        begin = skip_space(begin + 1);
        end = default_end(begin);
        *at = end;
        while (end > begin && isspace((unsigned char)end[-1])) end--;
        if (!copy_word(param->text, sizeof param->text, begin, end)) return false;
        param->has_default = true;
        return parse_default(param);
    }
    *at = begin;
    return *begin == ',' || is_arrow(begin);
}

/* What an op's outputs become. The result of other functions is text for people and type stubs (tests/support/make_stubs.py). */
static bool parse_result(PySignature *signature, const char *text) {
    if (strcmp(text, "None") == 0) signature->result = PY_RESULT_NONE;
    else if (strcmp(text, "Tensor") == 0) signature->result = PY_RESULT_TENSOR;
    else if (strncmp(text, "(Tensor, ", 9) == 0) signature->result = PY_RESULT_TUPLE;
    else if (strcmp(text, "self") == 0) signature->result = PY_RESULT_SELF;
    else return signature->function.op == NULL && *text != '\0';
    return signature->result != PY_RESULT_SELF || (signature->count > 0 && signature->param[0].kind == XT_ARG_TENSOR);
}

static bool parse(PySignature *signature) {
    const char *at = skip_space(signature->function.signature);
    bool keyword_only = false;
    while (!is_arrow(at)) {
        if (*at == '*') {
            if (keyword_only) return false;
            keyword_only = true;
            at = skip_space(at + 1);
        } else {
            if (signature->count == XT_MAX_ARGS || !parse_param(&at, &signature->param[signature->count])) return false;
            signature->count++;
            if (!keyword_only) signature->positional++;
        }
        at = skip_space(at);
        if (*at == ',') at = skip_space(at + 1);
        else if (!is_arrow(at)) return false;
    }
    signature->arrow = (int)(at - signature->function.signature);
    return parse_result(signature, skip_space(at + 2));
}

/* The form inspect.signature reads: names and defaults without kinds. */
static PyObject *text_signature(const PySignature *signature) {
    char text[XT_MAX_ARGS * 72];
    size_t used = 0;
    text[used++] = '(';
    for (int i = 0; i < signature->count; i++) {
        const PyParam *param = &signature->param[i];
        used += (size_t)snprintf(text + used, sizeof text - used, "%s%s%s%s%s", i > 0 ? ", " : "",
                                 i == signature->positional ? "*, " : "", param->name, param->has_default ? "=" : "",
                                 param->has_default ? param->text : "");
    }
    text[used++] = ')';
    return PyUnicode_FromStringAndSize(text, (Py_ssize_t)used);
}

/* The form that people read: kinds too, and the result. */
static PyObject *full_text(const PySignature *signature) {
    const char *text = signature->function.signature, *result = skip_space(text + signature->arrow + 2);
    int length = signature->arrow;
    while (length > 0 && isspace((unsigned char)text[length - 1])) length--;
    PyObject *arguments = PyUnicode_FromStringAndSize(text, length);
    PyObject *full = arguments != NULL ? PyUnicode_FromFormat("%s(%U) -> %s", signature->function.name, arguments, result) : NULL;
    Py_XDECREF(arguments);
    return full;
}

PySignature *py_signature_new(const PyFunction *function) {
    PySignature *signature = PyMem_Calloc(1, sizeof *signature);
    if (signature == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    signature->function = *function;
    if (!parse(signature)) {
        PyErr_Format(PyExc_SystemError, "%s: signature '%s' does not parse", function->name, function->signature);
        goto fail;
    }
    for (int i = 0; i < signature->count; i++) {
        signature->param[i].key = PyUnicode_InternFromString(signature->param[i].name);
        if (signature->param[i].key == NULL) goto fail;
    }
    signature->text = text_signature(signature);
    signature->full = signature->text != NULL ? full_text(signature) : NULL;
    if (signature->full == NULL) goto fail;
    return signature;
fail:
    py_signature_free(signature);
    return NULL;
}

void py_signature_free(PySignature *signature) {
    if (signature == NULL) return;
    for (int i = 0; i < signature->count; i++) Py_XDECREF(signature->param[i].key);
    Py_XDECREF(signature->text);
    Py_XDECREF(signature->full);
    PyMem_Free(signature);
}
