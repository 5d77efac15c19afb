"""What a signature declares as the result is what a call returns: for every op, function, method and attribute of the core."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import make_stubs
import numpy as np
import pytest
from runs import python

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import TABLE, tensor

CLASSES: dict[str, Any] = {
    "Tensor": _C.Tensor, "int": int, "float": float, "number": (int, float), "bool": bool, "str": str, "dtype": _C.dtype,
    "device": _C.device, "object": (int, float, str, bytes, tuple, type(None)), "None": type(None), "Handle": _C.Handle, "memoryview": memoryview,
    "ndarray": np.ndarray,
}  # fmt: skip


def agrees(value: Any, text: str, first: Any = None) -> bool:
    """Whether a value is of the declared kind; `first` is the first argument, for `self`."""
    inner = text[1:-1]
    if text[0] == "(":
        kinds = make_stubs.split(inner)
        if kinds[-1] == "...":
            kinds = kinds[:1] * len(value)
        return type(value) is tuple and len(value) == len(kinds) and all(map(agrees, value, kinds))
    if text[0] == "[":
        return type(value) is list and all(agrees(item, inner) for item in value)
    if text[0] == "{":
        return type(value) is dict and all(type(key) is str and agrees(item, inner) for key, item in value.items())
    if text == "self":
        return type(value) is type(first)
    if text.endswith("?"):
        return value is None or agrees(value, text[:-1])
    return isinstance(value, CLASSES[text]) and not (text == "int" and type(value) is bool)


def declared(f: Any) -> str:
    return f.signature.rpartition("->")[2].strip()


@pytest.mark.parametrize("name", _C.op_signatures())
def test_ops_return_what_they_declare(name: str) -> None:
    seen, wrong = [], []

    def hook(op: Any, arguments: dict[str, Any], outputs: tuple[Any, ...]) -> None:
        if op.__name__ != name:
            return
        seen.append(name)
        value, first = op(**arguments), next(iter(arguments.values()))
        if not agrees(value, declared(op), first) or (declared(op) == "self" and value is not first):
            wrong.append((declared(op), value))

    entry = next(entry for entry in TABLE if entry.op == name)
    case = next(case for case in entry.cases if not case.big)
    inputs = [tensor(a, entry.dtypes[0]) for a in entry.draw(case, entry.dtypes[0])]
    before = _C.set_call_hook(hook)
    try:
        entry.call(*inputs, **case.kwargs)
    finally:
        _C.set_call_hook(before)
    assert seen and not wrong, wrong


def x() -> Any:
    return _C.tensor([[1.0, 2.0]])


def captured() -> Any:
    """An empty graph; RuntimeError without a GPU."""
    graph = _C.cuda_capture("cuda", 512)
    _C.cuda_end_capture(graph, True)
    return graph


def alone() -> Any:
    """A communicator of one process; RuntimeError without a GPU or NCCL."""
    return _C.nccl_open("cuda", _C.nccl_unique_id(), 0, 1)


def on_gpu() -> Any:
    return x().to("cuda")


def in_a_process_of_its_own() -> None:
    """From then on no other thread may call the core."""
    done = python("-c", "from xtrain import _C; assert _C.end_threads() is None")
    assert done.returncode == 0, done.stderr


FUNCTIONS: dict[str, Callable[[], Any]] = {
    "nccl_version": _C.nccl_version,
    "nccl_unique_id": _C.nccl_unique_id,
    "nccl_all_to_all": lambda: _C.nccl_all_to_all(alone(), on_gpu(), on_gpu()),
    "nccl_all_gather": lambda: _C.nccl_all_gather(alone(), [on_gpu()], [on_gpu()]),
    "nccl_broadcast": lambda: _C.nccl_broadcast(alone(), on_gpu(), 0),
    "nccl_join": lambda: _C.nccl_join(alone()),
    "end_threads": in_a_process_of_its_own,
    "nccl_idle": lambda: _C.nccl_idle(alone()),
    "nccl_close": lambda: _C.nccl_close(alone(), True),
    "allow_tf32": lambda: _C.allow_tf32(_C.tf32()),
    "attention_backends": _C.attention_backends,
    "on_ready": lambda: _C.on_ready([], lambda index: None),
    "backward": lambda: _C.backward([_C.tensor(1.0, requires_grad=True) * 2]),
    "build_info": _C.build_info,
    "check_documents": lambda: _C.check_documents(_C.tensor([[[0, 0], [2, 2]]], _C.int32)),
    "compare": lambda: _C.compare(x(), x(), 0.0, 0.0),
    "cpu_features": _C.cpu_features,
    "cuda_counters": _C.cuda_counters,
    "cuda_end_capture": lambda: _C.cuda_end_capture(captured(), True),
    "cuda_graph_owns": lambda: _C.cuda_graph_owns(captured(), x()),
    "cuda_plan": lambda: (_C.cuda_plan(), _C.cuda_planned())[0],
    "cuda_planned": lambda: (_C.cuda_plan(), _C.cuda_planned())[1],
    "cuda_replay": lambda: _C.cuda_replay(captured()),
    "cuda_waits": _C.cuda_waits,
    "cuda_device_count": _C.cuda_device_count,
    "cuda_info": _C.cuda_info,
    "cuda_stream": _C.cuda_stream,
    "fail_storages": lambda: _C.fail_storages(0, -1),
    "from_bytes": lambda: _C.from_bytes(b"12345678", "int64", 1),
    "from_dlpack": lambda: _C.from_dlpack(x()),
    "from_numpy": lambda: _C.from_numpy(np.zeros(2)),
    "exchange": lambda: _C.exchange("no such path", "nor this"),
    "explain_attention": lambda: _C.explain_attention((1, 1, 1, 4, 0, 4)),
    "explain_chunk": lambda: _C.explain_chunk((4, 3, 5)),
    "explain_gemm": lambda: _C.explain_gemm((4, 2**31, 4)),
    "function_apply": lambda: _C.function_apply("f", lambda g: g, [_C.tensor(1.0, requires_grad=True)], [x()]),
    "gemm_backends": _C.gemm_backends,
    "get_default_device": _C.get_default_device,
    "get_num_threads": _C.get_num_threads,
    "get_rng_state": _C.get_rng_state,
    "is_grad_enabled": _C.is_grad_enabled,
    "kernels": _C.kernels,
    "kernels_start": lambda: (_C.kernels_start(), _C.kernels_stop())[0],
    "kernels_stop": _C.kernels_stop,
    "manual_seed": lambda: _C.manual_seed(1),
    "memory_reset_peak": _C.memory_reset_peak,
    "meta_plan": lambda: _C.meta_plan(),
    "meta_planned": lambda: _C.meta_planned(),
    "meta_work": lambda: _C.meta_work(),
    "memory_stats": _C.memory_stats,
    "memory_trim": _C.memory_trim,
    "op_signatures": _C.op_signatures,
    "end_after": lambda: (_C.end_after(1e6, 0), _C.call_off_end())[0],
    "call_off_end": _C.call_off_end,
    "pulse_start": lambda: _C.pulse_start([], 1.0),
    "pulse_stop": _C.pulse_stop,
    "set_default_device": lambda: _C.set_default_device(_C.get_default_device()),
    "set_grad_enabled": lambda: _C.set_grad_enabled(True),
    "set_recompute": lambda: _C.set_recompute(False),
    "set_num_threads": lambda: _C.set_num_threads(_C.get_num_threads()),
    "set_package_folders": lambda: _C.set_package_folders(
        [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    ),
    "set_rng_state": lambda: _C.set_rng_state(_C.get_rng_state()),
    "spans_clock": _C.spans_clock,
    "spans_start": lambda: (_C.spans_start(), _C.spans_stop())[0],
    "spans_stop": lambda: (_C.spans_start(), x(), x() + 1, _C.spans_stop())[3],
    "stats": lambda: _C.stats(x()),
    "synchronize": lambda: _C.synchronize("cpu"),
    "tensor": x,
    "tf32": _C.tf32,
    "to_bytes": lambda: _C.to_bytes(_C.tensor([1.0], device="cpu")),
    "use_attention_backend": lambda: _C.use_attention_backend(None),
    "use_gemm_backend": lambda: _C.use_gemm_backend(None),
}
METHODS: dict[str, Callable[[Any], Any]] = {
    "__array__": lambda t: t.__array__(),
    "__copy__": lambda t: t.__copy__(),
    "__deepcopy__": lambda t: t.__deepcopy__({}),
    "__dlpack_device__": lambda t: t.__dlpack_device__(),
    "__format__": lambda t: t.__format__(""),
    "backward": lambda t: (t * 1).backward(t) if t.requires_grad_() is t else t,
    "cuda": lambda t: t.cuda(),
    "numpy": lambda t: t.numpy(),
    "register_hook": lambda t: t.requires_grad_().register_hook(print),
    "requires_grad_": lambda t: t.requires_grad_(),
    "retain_grad": lambda t: (t.requires_grad_() * 2).retain_grad(),
    **{
        name: lambda t, name=name: getattr(t, name)()
        for name in ["bfloat16", "bool", "cpu", "data_ptr", "dim", "double", "element_size", "float", "half", "int", "is_contiguous", "long", "numel", "to"]
    },
    "adjoins": lambda t: t.adjoins(t),
    "item": lambda t: t[0, 0].item(),
}  # fmt: skip


class Sub(_C.Tensor):
    pass


# Where a signature says object, the type depends on the call: calls with the type that each must return.
OBJECTS: dict[str, list[tuple[Callable[[], Any], str]]] = {
    "cuda_capture": [
        (
            lambda: captured() if xt.cuda.is_available() else raised(RuntimeError, captured),
            "PyCapsule" if xt.cuda.is_available() else "RuntimeError",
        ),
    ],
    "make_subclass": [(lambda: _C.make_subclass(Sub, x()), "Sub")],
    "nccl_open": [(lambda: raised(ValueError, lambda: _C.nccl_open("cuda", "", 1, 1)), "ValueError")],
    "reads_of": [(lambda: _C.reads_of(lambda: None, ()), "tuple")],
    "set_call_hook": [
        (lambda: _C.set_call_hook(print), "NoneType"),
        (lambda: _C.set_call_hook(None), "builtin_function_or_method"),
    ],
    "__dlpack__": [(lambda: x().__dlpack__(), "PyCapsule")],
    "__reduce_ex__": [(lambda: raised(TypeError, lambda: x().__reduce_ex__(4)), "TypeError")],
    "size": [(lambda: x().size(), "tuple"), (lambda: x().size(0), "int")],
    "stride": [(lambda: x().stride(), "tuple"), (lambda: x().stride(0), "int")],
    "tolist": [(lambda: x().tolist(), "list"), (lambda: x()[0, 0].tolist(), "float")],
}


def raised(kind: type[Exception], call: Callable[[], Any]) -> Exception:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


NEEDS_A_GPU = {name for name in FUNCTIONS if name.startswith(("cuda_", "nccl_"))} | {"cuda"}


def check(name: str, call: Callable[[], Any], signature: str, first: Any = None) -> None:
    try:
        value = call()
    except (RuntimeError, _C.CudaError) as error:
        assert name in NEEDS_A_GPU and ("CUDA" in str(error) or "NCCL" in str(error))
        return
    assert agrees(value, signature, first), f"{name} -> {signature} returned {value!r}"


def test_functions_return_what_they_declare() -> None:
    functions = {name for name in dir(_C) if isinstance(getattr(_C, name), _C.Op)} - set(_C.op_signatures())
    assert set(FUNCTIONS) == functions - set(OBJECTS)
    for name in FUNCTIONS:
        check(name, FUNCTIONS[name], declared(getattr(_C, name)))


def test_methods_return_what_they_declare() -> None:
    ops = set(_C.op_signatures())
    methods = {name: f for name, f in vars(_C.Tensor).items() if isinstance(f, _C.Op) and name not in ops}
    assert set(METHODS) == set(methods) - set(OBJECTS)
    for name in METHODS:
        f, t = methods[name], _C.tensor([[1.0, 2.0]], device="cpu")
        check(name, lambda name=name, t=t: METHODS[name](t), declared(f), t)


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_is_of_the_type_that_the_call_asks_for(name: str) -> None:
    assert declared({**vars(_C), **vars(_C.Tensor)}[name]) == "object"
    for call, kind in OBJECTS[name]:
        assert type(call()).__name__ == kind


def test_nothing_else_is_declared_as_object() -> None:
    """An op, function or method whose result every check would accept."""
    everything = {**vars(_C), **vars(_C.Tensor)}
    found = {name for name, f in everything.items() if isinstance(f, _C.Op) and declared(f) == "object"}
    assert found == set(OBJECTS)


def test_attributes_are_what_they_declare() -> None:
    count = 0
    for value in (x(), x().requires_grad_() * 2, _C.float32, _C.device("cpu"), _C.device("cuda", 1), _C.add):
        for name, descriptor in vars(type(value)).items():
            if type(descriptor).__name__ != "getset_descriptor" or not descriptor.__doc__:
                continue
            try:
                found = getattr(value, name)
            except (AttributeError, RuntimeError):  # of the CPU, or of a tensor that requires a gradient
                assert name == "__cuda_array_interface__"
                continue
            text = descriptor.__doc__.partition(": ")[0]
            assert agrees(found, text), f"{name}: {text} is {found!r}"
            count += 1
    assert count > 30


def test_this_test_sees_a_wrong_declaration() -> None:
    t = x()
    assert agrees((t, t), "(Tensor, Tensor)") and agrees((t, t), "(Tensor, ...)") and agrees(t, "self", t)
    assert not agrees([t, t], "(Tensor, Tensor)") and not agrees((t, t), "(Tensor, Tensor, Tensor)")
    assert not agrees((t, t), "Tensor") and not agrees(True, "int") and not agrees({"a": "b"}, "{int}")
    assert agrees({"a": "b"}, "{object}") and not agrees({"a": t}, "{object}") and not agrees(t, "object")
