"""An edited kernel contract recompiles its own family: few other files include csrc/contract/<family>.h, and each is named here."""

import os
import re
from pathlib import Path

import pytest
from places import ROOT

# Files of other rooms that call or list a family's kernels.
OTHERS = {
    "attention": {"csrc/backend/select.c", "csrc/cpu/table.c", "csrc/py/runtime/select.c", "cuda/runtime/device.cu"}
    | {"cuda/layers/decoder_step.cu"},
    "elementwise": {
        "csrc/ops/common.c",
        "csrc/ops/gemm/matmul.c",
        "csrc/ops/gemm/linear_joined.c",
        "csrc/ops/layers/cross_entropy.c",
        "csrc/ops/layers/gather.c",
    }
    | {"csrc/ops/reduce/reduce.c", "cuda/attention/materialized.cu", "cuda/layers/decoder_step.cu"},
    "gemm": {"csrc/backend/select.c", "csrc/cpu/table.c", "csrc/py/runtime/select.c", "cuda/runtime/device.cu"}
    | {
        "csrc/cpu/attention/amx.c",
        "csrc/cpu/attention/bf16.c",
        "csrc/cpu/attention/bf16_shares.c",
        "csrc/cpu/attention/materialized.c",
        "csrc/cpu/attention/cached_attention.c",
        "csrc/cpu/attention/documents.c",
        "csrc/cpu/attention/reference.c",
        "csrc/cpu/layers/decoder_step.c",
        "cuda/attention/materialized.cu",
        "cuda/layers/decoder_step.cu",
        "csrc/ops/optimizer/muon.c",
        "csrc/ops/conv/conv1d.c",
    },
    "layers": {"csrc/ops/gemm/swiglu_mlp.c", "csrc/ops/gemm/gelu_mlp.c"},
    "optimizer": {"csrc/py/runtime/module.c"},
    "reduce": {
        "csrc/ops/common.c",
        "csrc/ops/layers/cross_entropy.c",
        "csrc/py/tensor/repr.c",
        "csrc/py/runtime/testing.c",
    },
}
FAMILIES = sorted(path.stem for path in (ROOT / "csrc/contract").glob("*.h") if path.stem not in ("backend", "traits"))


def included(path: Path) -> set[Path]:
    """Every file of the project that compiling `path` reads."""
    found, todo = set(), [path]
    while todo:
        file = todo.pop()
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(), re.M):
            places = [Path(os.path.normpath(folder / name)) for folder in (file.parent, ROOT / "csrc", ROOT / "cuda")]
            todo += [place for place in places if place.is_file() and place not in found][:1]
            found.update(todo[-1:])
    return found


READS = {
    path: included(path) for room in ("csrc", "cuda") for path in (ROOT / room).rglob("*.c*") if path.suffix != ".cuh"
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edited_contract_recompiles_its_family(family: str) -> None:
    contract = ROOT / f"csrc/contract/{family}.h"
    readers = {path.relative_to(ROOT) for path, files in READS.items() if contract in files}
    own = {path for path in readers if path.parent.name == family}
    assert {path.parts[:2] for path in own} >= {("csrc", "ops"), ("csrc", "cpu"), ("cuda", family)}
    assert {str(path) for path in readers - own} == OTHERS.get(family, set()) | {"csrc/backend/meta.c"}
