"""Mistakes in C that a search finds: what a library must not do, and calls of the C API that leak or hide errors."""

import re

import pytest
from places import ROOT

FILES = sorted(path for path in (ROOT / "csrc").rglob("*.[ch]"))
CUDA_FILES = sorted((ROOT / "cuda").rglob("*.cu*"))

# (pattern, in which folder, what to do instead)
RULES = [
    (r"\b(exit|_exit|abort|quick_exit)\s*\(", "csrc", "return an XtStatus: a library does not end the process"),
    (r"\b(printf|puts|putchar|perror)\s*\(", "csrc", "put the message in xt_error(): a library does not print"),
    (r"\bfprintf\s*\(\s*std(out|err)", "csrc", "put the message in xt_error(): a library does not print"),
    (r"\b(sprintf|strcpy|strcat|gets|alloca)\s*\(", "csrc", "use the form that knows the size of its buffer"),
    (r"\b(rand|srand|random)\s*\(\s*\)", "csrc", "use Philox: the same seed gives the same numbers everywhere"),
    (r"static\s+PyTypeObject\b(?!\s*\*)", "csrc/py", "make a heap type with PyType_FromModuleAndSpec"),
    (r"\bPyModule_AddObject\s*\(", "csrc/py", "use PyModule_AddObjectRef: this one steals only when it succeeds"),
    (r"\bPyDict_GetItem(String)?\s*\(", "csrc/py", "use PyDict_GetItemWithError: this one hides errors"),
    (r"\bPyArg_ParseTuple(AndKeywords)?\s*\([^;]*\"[^\"]*O&", "csrc/py", "parse by the op's signature"),
    (r"\bPyErr_Print\s*\(", "csrc/py", "raise, or PyErr_WriteUnraisable"),
    (r"\b(TODO|FIXME|XXX|HACK)\b", "csrc", "do it, or open an issue"),
]

# (file, match): what a rule must let pass, and why.
EXCEPTIONS = {
    ("csrc/py/runtime/ending.c", "_exit("): "Python asks for it, when a lost rank has ended the run and no thread can get the GIL",
}  # fmt: skip


def stripped(text: str) -> str:
    """The text without comments and the contents of strings; line numbers stay."""

    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    return re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"", blank, text, flags=re.S)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_rules(path):
    text = path.read_text()
    code = stripped(text)
    name = str(path.relative_to(ROOT))
    wrong = []
    for pattern, folder, advice in RULES:
        if not name.startswith(folder + "/"):
            continue
        searched = text if "TODO" in pattern or "O&" in pattern else code
        for match in re.finditer(pattern, searched):
            if (name, match[0]) in EXCEPTIONS:
                continue
            wrong.append(f"{name}:{searched.count(chr(10), 0, match.start()) + 1}: {match[0].strip()}: {advice}")
    assert not wrong, "\n".join(wrong)


def test_an_instruction_is_wrapped_once_and_in_arch():
    wrapped = []
    for path in CUDA_FILES:
        text = path.read_text()
        if path.parent.name == "arch":
            wrapped += re.findall(r'"([a-z]\w*(?:\.[\w:]+)+)', text)
        else:
            assert not re.search(r"\basm\b", stripped(text)), f"{path.relative_to(ROOT)}: PTX belongs in cuda/arch"
    assert len(wrapped) > 10
    assert sorted(wrapped) == sorted(set(wrapped)), "an instruction is wrapped twice"


# Uses of what one device has (file, how many, why no order of additions depends on it). Where the number of blocks decides such an
# order, it comes from the shape and XT_PLAN_MULTIPROCESSORS: same bits on every device.
DEVICE_SIZES = [
    (
        "attention/flash_hopper.cuh",
        2,
        "blocks claim tiles; a sum is of one tile, or in the order of ranks, which the shape gives",
    ),
    ("common/launch.cuh", 1, "the declaration"),
    ("common/strided.cuh", 1, "vectors of a thread; every element is on its own"),
    ("elementwise/unary.cu", 1, "pieces of a thread; every element is on its own"),
    ("gemm/hopper.cu", 2, "blocks that take tiles; a sum is of one tile, its terms in order"),
    ("gemm/tiled.cu", 1, "size of a tile; an element of C is one chain over k whatever the tile"),
    (
        "layers/cross_entropy.cu",
        2,
        "blocks take rows in turns, and tiles of a row in the backward; a sum is of one row",
    ),
    ("layers/decoder_step.cu", 1, "blocks share out columns of products and chunks of attention; each is one sum"),
    ("layers/embedding.cu", 1, "blocks share out chunks of columns; a sum is of one chunk"),
    ("layers/embedding_sort.cuh", 2, "blocks share out ids that occur at most once: no sums of more than one row"),
    ("layers/sample.cu", 1, "parts of a row; its sums are of integers"),
    ("mhc/mhc_pre_once.cuh", 2, "groups share out the tokens; the slices of a token come from the shape"),
    ("mhc/sinkhorn.cu", 1, "blocks share out the tokens; a token's matrix is on its own"),
    ("optimizer/clip_grad_norm.cu", 1, "blocks that clip take pieces in turns; every element is on its own"),
    ("reduce/reduce.cu", 3, "blocks take chunks of rows, or tiles of columns, in turns; a sum is of one"),
    ("runtime/device.cu", 3, "the definition, and what xtrain doctor prints"),
]
# Uses of what a kind of device has. Those that decide an order of additions are the exceptions in docs/reference/numerics.md.
DEVICE_KINDS = [
    ("arch/overlap.cuh", 1, "whether a launch may overlap the one before it"),
    ("arch/warp_ring.cuh", 1, "the copies of 9.0; sums are in the order of the plan without them"),
    ("attention/flash.cu", 1, "supports: too little shared memory is a reason"),
    ("attention/flash_half.cu", 7, "supports, and the exception: smaller tiles of head dim 128"),
    (
        "attention/flash_hopper.cuh",
        2,
        "supports: too little shared memory is a reason; the exception: attention in 16 bits on 9.0",
    ),
    ("common/launch.cuh", 2, "the declarations"),
    ("gemm/cublas.cu", 1, "exception: bytes of workspace"),
    ("gemm/cublas_choice.cuh", 2, "exception: 9.0, which the choice among cuBLAS' algorithms sees"),
    ("gemm/few.cu", 1, "exception: the tensor cores of 8.0"),
    ("gemm/hopper.cu", 2, "exception: the tensor cores of 9.0"),
    (
        "layers/cross_entropy.cu",
        3,
        "vectors of a row that wait for its gradient; from 9.0 on the ring, whose sums are in the same order",
    ),
    (
        "layers/decoder_step.cu",
        2,
        "exception: one launch on 9.0, with the bits of its parts where few.cu has their products",
    ),
    ("layers/embedding_sort.cuh", 2, "one launch on 9.0; the list is the same"),
    ("mhc/mhc_pre.cu", 1, "exception: the tensor cores of 8.0"),
    ("mhc/mhc_pre_once.cuh", 2, "exception: one pass from 9.0 on"),
    ("runtime/device.cu", 8, "the definitions, and what xtrain doctor prints"),
]


def test_no_order_of_additions_depends_on_the_device():
    uses, kinds, numbers = {}, {}, {}
    for path in CUDA_FILES:
        name, code = str(path.relative_to(ROOT / "cuda")), stripped(path.read_text())
        if found := re.findall(
            r"\b(?:xt_multiprocessors|cudaOccupancy\w+|cudaDevAttrMultiProcessorCount|multiProcessorCount)\b", code
        ):
            uses[name] = len(found)
        if found := re.findall(r"\b(?:xt_shared_limit|shared_limit|xt_compute_capability|capability)\b", code):
            kinds[name] = len(found)
        if found := [n for n in re.findall(r"\b(\d+)[uUlL]*\b", code) if int(n) > 0 and int(n) % 132 == 0]:
            numbers[name] = found
    assert uses == {name: count for name, count, _ in DEVICE_SIZES}, "a new use: does it decide an order of additions?"
    assert kinds == {name: count for name, count, _ in DEVICE_KINDS}, "a new use: does it decide an order of additions?"
    assert numbers == {"common/launch.cuh": ["132"]}, "132 multiprocessors are XT_PLAN_MULTIPROCESSORS"
