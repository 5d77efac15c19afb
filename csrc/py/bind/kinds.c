/* kinds.c - the kinds of arguments: their words in a signature, and the rules that messages name. */
#include "py/bind/bind.h"

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

int py_kind_named(const char *word) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (strcmp(kinds[i].word, word) == 0) return kinds[i].kind;
    return -1;
}

const char *py_kind_rule(int kind, bool optional) {
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        if (kinds[i].kind == kind) return optional ? kinds[i].rule_or_none : kinds[i].rule;
    return "something else";
}
