"""The type stubs describe the module that is there."""

from __future__ import annotations

import ast
from pathlib import Path

import make_stubs
import pytest

import xtrain
from xtrain import _C


def test_stub_is_what_the_core_says() -> None:
    assert make_stubs.STUB.exists()
    found = make_stubs.STUB.read_text()
    assert make_stubs.same(found, make_stubs.stub()), "xtrain/_C.pyi is stale: run python tests/support/make_stubs.py"


def test_stub_names_are_the_modules_names() -> None:
    """Independent of the generator: every public name is in the stub, and nothing else."""
    tree = ast.parse(make_stubs.STUB.read_text())
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    public = {name for name in dir(_C) if not name.startswith("_")}
    assert names == public
    tensor = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Tensor")
    methods = {node.name for node in tensor.body if isinstance(node, ast.FunctionDef)}
    methods |= {node.target.id for node in tensor.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in vars(_C.Tensor) if not name.startswith("_")} <= methods
    assert all(hasattr(_C.Tensor, name) for name in methods)


def test_package_is_marked_as_typed() -> None:
    assert (Path(xtrain.__file__).parent / "py.typed").exists()


def test_every_op_has_a_signature_and_a_text() -> None:
    for name, signature in _C.op_signatures().items():
        f = getattr(_C, name)
        assert f.signature == signature
        assert f.__text_signature__.startswith("(")
        assert len(f.__doc__.split("\n\n", 1)[1].strip()) >= 6, f"{name} has no documentation"


@pytest.mark.parametrize(
    "module",
    [
        "functional",
        "nn",
        "optim",
        "autograd",
        "models",
        "generation",
        "tokenizers",
        "data",
        "train",
        "saving",
        "testing",
    ],
)
def test_public_functions_are_documented(module: str) -> None:
    import importlib
    import inspect

    m = importlib.import_module(f"xtrain.{module}")
    names = getattr(m, "__all__", None) or [name for name in vars(m) if not name.startswith("_")]
    found = [(name, getattr(m, name)) for name in names]
    made = [(name, value) for name, value in found if inspect.isfunction(value) or inspect.isclass(value)]
    assert made, f"xtrain.{module} has no public function or class"
    for name, value in made:
        assert value.__doc__ or not value.__module__.startswith("xtrain"), f"xtrain.{module}.{name} has no docstring"
