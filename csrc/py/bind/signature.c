/* signature.c - reads the signature text of an op or function once, at import. The grammar is in ops.h. */
#include "py/py.h"

#include <ctype.h>

static const struct {
    const char *word;
    int kind;
    const char *rule, *rule_or_none;
} kinds[] = {
    {"Tensor", XT_ARG_TENSOR, "a Tensor", "a Tensor or None"},
    {"Tensors", XT_ARG_TENSORS, "a list or tuple of Tensors", "a list or tuple of Tensors, or None"},
    {"Operand", XT_ARG_OPERAND, "a Tensor or a number", "a Tensor, a number or None"},
    {"int", XT_ARG_INT, "an int", "an int or None"},
    {"float", XT_ARG_FLOAT, "a float", "a float or None"},
    {"bool", XT_ARG_BOOL, "a bool", "a bool or None"},
    {"str", XT_ARG_STR, "a str", "a str or None"},
    {"dtype", XT_ARG_DTYPE, "a dtype or its name", "a dtype, its name or None"},
    {"device", XT_ARG_DEVICE, "a device or its name", "a device, its name or None"},
    {"ints", XT_ARG_INTS, "an int or a tuple of ints", "an int, a tuple of ints or None"},
    {"number", XT_ARG_NUMBER, "a number", "a number or None"},
    {"object", PY_ARG_OBJECT, "an object", "an object"},
};

const char *py_kind_rule(int kind, bool optional) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (kinds[i].kind == kind) return optional ? kinds[i].rule_or_none : kinds[i].rule;
    return "something else";
}

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

/* The end of a default: the next comma outside quotes and parentheses. */
static const char *default_end(const char *at) {
    int depth = 0;
    bool quoted = false;
    for (; *at != '\0' && (quoted || depth > 0 || *at != ','); at++) {
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
    param->kind = -1;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kinds[i].word, word) == 0) param->kind = kinds[i].kind;
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
    return *begin == ',' || *begin == '\0';
}

static bool parse(PySignature *signature) {
    const char *at = skip_space(signature->function.signature);
    bool keyword_only = false;
    while (*at != '\0') {
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
        else if (*at != '\0') return false;
    }
    return true;
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
    if (signature->text == NULL) goto fail;
    return signature;
fail:
    py_signature_free(signature);
    return NULL;
}

void py_signature_free(PySignature *signature) {
    if (signature == NULL) return;
    for (int i = 0; i < signature->count; i++) Py_XDECREF(signature->param[i].key);
    Py_XDECREF(signature->text);
    PyMem_Free(signature);
}
