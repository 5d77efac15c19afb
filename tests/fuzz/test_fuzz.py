"""Some thousand cases of each fuzzer, and that it finds what it is there to find."""

from __future__ import annotations

import json
import os
import random
import re
import sys

import numpy as np
import pytest
from places import ROOT
from runs import python

sys.path.insert(0, str(ROOT / "tests" / "fuzz"))
import programs
import rules
from files import PACKAGES
from frame import Wrong
from programs import Whole, _unless_large
from run import FAMILIES, family_class, one_case
from values import Value, numbers

import xtrain as xt
from xtrain import _C
from xtrain.optable.table import TINY, UNIT_ROUNDOFF, exact
from xtrain.saving import reader

pytestmark = pytest.mark.on_cpu
RUN = str(ROOT / "tests" / "fuzz" / "run.py")
CASES = {"programs": 4000, "doors": 40000, "files": 4000}  # about 4 s each


@pytest.mark.parametrize("name", FAMILIES)
def test_no_findings(name: str) -> None:
    """The same cases at every run, as many on a slow machine. `make fuzz` takes other seeds."""
    count = CASES[name]
    done = python(RUN, name, "--cases", str(count), "--jobs", "1", "--seed", "20", "--lacking")
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    cases = re.search(rf"{name} +(\d+) cases", done.stdout)
    assert cases and int(cases[1]) == count, done.stdout


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_a_package_that_is_missing_is_told(tmp_path, package: str) -> None:
    """In one sentence, with status 1, before the first case; only who says so goes on without its formats."""
    code = (
        "import importlib.util as u, runpy, sys\nfind = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == {package!r} else find(name, *a)\n"
        f"sys.argv[0] = {RUN!r}\nrunpy.run_path({RUN!r}, run_name='__main__')"
    )
    done = python("-c", code, "files", "--cases", "1", "--jobs", "1", "--seed", "1")
    what = "must be installed, or --lacking given, which leaves out what they read\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"fuzz: {package} {what}"), done
    done = python("-c", code, "files", "--cases", "1", "--jobs", "1", "--seed", "1", "--lacking")
    assert done.returncode == 0 and f"seed 1, 1 jobs, without {package}\n" in done.stdout, done


def norm(width: int, weight: float, name: str, dtype: str = "float32", row: float = 0.37233692) -> str:
    """What the fuzzer says about a norm of a constant row, whose last weight is `weight`; "" when it is right."""
    chance, trace = random.Random(1), list[str]()
    program = Whole(chance, trace)
    weights = exact(np.array([1e30] + [1.0] * (width - 2) + [weight]), dtype)
    arrays = [exact(np.full((2, width), row), dtype), weights, *([np.zeros(width)] * (name == "layer_norm"))]
    inputs = [program.keep(_C.cast(_C.tensor(a), getattr(_C, dtype)), a) for a in arrays]
    try:
        with np.errstate(invalid="ignore"):
            program.normed(name, inputs, {"eps": 1e-5})
    except Wrong as wrong:
        return str(wrong)
    return ""


def test_a_constant_row_and_an_infinite_weight() -> None:
    """The rounded mean of a constant row differs from the row by a digit of any sign, so that an infinite weight makes inf, -inf
    or NaN of it. Each is right, a finite number is not, and where the normalised number is no rounding error its sign counts."""
    for row in np.random.default_rng(3).standard_normal(50):
        assert not norm(3, np.inf, "layer_norm", row=row)
        assert not norm(3, np.inf, "rms_norm", row=row)


@pytest.mark.parametrize(("name", "wrong"), [("layer_norm", 7.0), ("rms_norm", -np.inf)])
def test_an_infinite_weight_is_no_excuse(monkeypatch, name: str, wrong: float) -> None:
    """A finite number in the place of an infinite one, and the other infinity where the sign is known."""
    inner = getattr(_C, name)

    def planted(x, *rest, **kwargs):
        out = inner(x, *rest, **kwargs).numpy()
        return _C.tensor(np.where(np.isfinite(out), out, wrong).astype(np.float32))

    monkeypatch.setattr(_C, name, planted)
    assert "finite" in norm(3, np.inf, name, row=0.37233692)


def test_a_mean_that_cancels_has_an_error() -> None:
    """Of a row whose sum is almost zero: it is one of the sum of absolute values."""
    rng = np.random.default_rng(8)
    x = rng.standard_normal((4000, 6)).astype(np.float32)
    x[:, 5] = -x[:, :5].sum(1)
    x[:, 0] *= 1e-3
    x[:, 4] -= x.sum(1)
    arrays = [exact(a, "float32") for a in (x, np.ones(6), np.zeros(6))]
    program = Whole(random.Random(1), [])
    program.normed("layer_norm", [program.keep(_C.cast(_C.tensor(a), _C.float32), a) for a in arrays], {"eps": 0.5})


def test_a_power_beyond_its_dtype_is_not_judged() -> None:
    """In float16 y log a leaves the dtype, and the gradient is infinite where the product with a small dy would fit."""
    a, b, y = (Value(_C.cast(_C.tensor(np.array([v])), _C.float16), np.array([v])) for v in (4.25, 7.6, 60000.0))
    part = (np.ones(1), np.ones(1))
    assert np.isinf(_unless_large(part, y, [a, b])[1]).all()
    y.shadow[:] = 100.0
    assert _unless_large(part, y, [a, b]) is part


def test_the_gradient_of_gelu_far_below_zero() -> None:
    """The rule has digits there: (1 + erf) / 2 is off by 1e-16 where gelu' is 1e-4. The wanted numbers have 50 digits behind them."""
    for x, want in (
        (-4.170434583626306, -0.00026299616426007433),
        (-6.0, -3.5468709453902015e-8),
        (-9.0, -9.138937373906639e-18),
    ):
        ((got, _),) = rules.UNARY["gelu"](np.ones(1), np.array([x]), np.zeros(1))
        assert abs(got[0] / want - 1) < 2e-14 * (1 + x * x), (x, got)


@pytest.mark.parametrize("name", ["div", "pow"])
def test_gradients_of_small_halves(name: str) -> None:
    """Intermediate results below the smallest number of float16 are rounded to multiples of it, and then multiplied."""
    rng = np.random.default_rng(5)
    a, b = (exact(rng.uniform(1.0, 4.0, 2000), "float16") for _ in range(2))
    dy = exact(rng.standard_normal(2000) * (1e-5 if name == "div" else 4.0), "float16")
    b, dy = (b / 4, dy) if name == "div" else (-4 * b, dy)
    half = [_C.cast(_C.tensor(v), _C.float16) for v in (a, b, dy)]
    for leaf in half[:2]:
        leaf.requires_grad_()
    _C.backward([getattr(_C, name)(*half[:2])], [half[2]])
    worst, unit, tiny = 0.0, UNIT_ROUNDOFF["float16"], TINY["float16"]
    for leaf, (want, size), floor in zip(half, rules.BINARY[name](dy, a, b, a), rules.FLOORS[name](dy, a, b)):
        error = np.abs(numbers(leaf.grad) - want)
        assert (error <= 6 * unit * size + floor * tiny).all()
        worst = max(worst, ((error - 6 * unit * size) / tiny).max())
    assert worst > 1, "the factors are needed"


def test_a_small_normalised_number_is_rounded_before_its_weight(monkeypatch) -> None:
    """In float16 those below 6e-5 are multiples of 2^-24: half of one is lost, times the weight, and half of one again."""
    rng = np.random.default_rng(6)
    x, weight = (exact(a, "float16") for a in (rng.uniform(-1e-5, 1e-5, (40, 50)), rng.uniform(1.0, 9.0, 50)))

    def judged(planted: float) -> np.ndarray:
        program = Whole(random.Random(1), [])
        x16, w16 = ([_C.cast(_C.tensor(a), _C.float16), a] for a in (x, weight))
        inner = _C.rms_norm
        with monkeypatch.context() as patch:
            patch.setattr(_C, "rms_norm", lambda *a, **k: inner(*a, **k) + planted)
            program.normed("rms_norm", [program.keep(*x16), program.keep(*w16)], {"eps": 0.5})
        return program.values[-1].shadow

    got = judged(0.0)
    error = np.abs(got - x / np.sqrt((x * x).mean(-1, keepdims=True) + 0.5) * weight)
    rest = 3 * UNIT_ROUNDOFF["float16"] * np.abs(got)  # of rounding in float32, and of weights above 1
    assert (error <= (1 + weight) * 2.0**-25 + rest).all()
    assert (error > 2.0**-24 + rest).any(), "the factor is needed"
    with pytest.raises(Wrong, match="^rms_norm: .* elements are wrong"):
        judged(12 * 2.0**-24)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_sum_of_an_elements_places_has_additions(monkeypatch, dtype: str) -> None:
    """The gradient of a number that is at several places is their sum, which the core and the rule round in orders of
    their own."""

    def judged(planted: float) -> None:
        chance = next(c for c in map(random.Random, range(99)) if Whole(c, []).records)
        program = Whole(chance, [])
        program.records = True
        array = np.zeros(4000)
        x = program.keep(_C.cast(_C.tensor(array), getattr(_C, dtype)).requires_grad_(), array)
        program.alias("expand", x, _C.expand(x.tensor, (6, 4000)), lambda s: np.broadcast_to(s, (6, *np.shape(s)[-1:])))
        inner = programs.numbers
        with monkeypatch.context() as patch:
            patch.setattr(programs, "numbers", lambda t: inner(t) + planted * (t.shape == (4000,)))
            dy = exact(np.random.default_rng(7).standard_normal((6, 4000)), dtype)
            out = program.values[-1]
            _C.backward([out.tensor], [_C.cast(_C.tensor(dy), out.tensor.dtype)], True)
            program.expect({id(v): v.tensor.grad for v in program.values}, {id(out): dy})
        sums, sizes = np.zeros(4000), np.abs(dy).sum(0)
        for row in dy:
            sums += row
        more.append((np.abs(inner(x.tensor.grad) - sums) / sizes / UNIT_ROUNDOFF[dtype]).max())

    more: list[float] = []
    judged(0.0)
    assert dtype == "float32" or more[0] > 3, "the additions are needed"
    with pytest.raises(Wrong, match="^gradient of v0: "):
        judged(200 * UNIT_ROUNDOFF[dtype])


def test_a_product_beyond_its_dtype_and_a_bias(monkeypatch) -> None:
    """linear rounds the product: one of 119,749 is infinite in float16, whatever is added then."""
    half = [
        _C.cast(_C.tensor(np.array(v)), _C.float16)
        for v in ([[2.0, 0.5]], [[40000.0, 8.0], [1.0, 3.0]], [-30000.0, 1.0])
    ]
    assert _C.linear(*half).tolist() == [[np.inf, 4.5]]
    for name in ("STEPS", "STEPS_OF_A_GRAPH"):  # those of the time when these cases were found
        monkeypatch.setattr(programs, name, tuple(s for s in getattr(programs, name) if s not in programs.PICKED))
    family = family_class("programs")
    assert not one_case(family(ROOT), 9101, 96417)
    assert not one_case(family(ROOT), 9208, 4057), "65504 and a hair is 65504"


def first_finding(family, count: int) -> str:
    return next((wrong for number in range(count) if (wrong := one_case(family, 5, number))), "")


def test_programs_find_nothing_in_right_ops(tmp_path) -> None:
    assert not first_finding(family_class("programs")(tmp_path), 300)


@pytest.mark.parametrize(
    ("call", "planted"),
    [
        ("gelu", lambda gelu: lambda x, *a, **k: gelu(x, *a, **k) + x * 1e-2),
        ("amax", lambda amax: lambda x, *a, **k: amax(x, *a, **k) + 1e-3),
        ("transpose", lambda transpose: lambda x, a, b: transpose(x, a, b).clone()),  # an alias that is none
        ("slice", lambda cut: lambda x, dim, start, stop, step: cut(x, dim, start, stop, min(step, 2))),
        ("where", lambda where: lambda c, a, b: where(c, a, b.detach())),  # no gradient
        ("cat", lambda cat: lambda tensors, dim: tensors[0] if len(tensors) == 1 else cat(tensors, dim)),  # no copy
        ("matmul", lambda matmul: lambda a, b: matmul(a, b.detach()) + b.sum() * 0),  # another gradient
        ("gather", lambda gather: lambda x, dim, index: gather(x, dim, index) * 1.01),
        ("scatter_add", lambda add: lambda x, dim, index, src: add(x.detach(), dim, index, src)),
        ("index_put", lambda put: lambda x, index, values, add: put(x, index, values, not add)),
        ("cumsum", lambda cumsum: lambda x, dim: cumsum(x, dim) - x),  # without its own
        ("conv1d", lambda conv: lambda *a, **k: conv(*a, **k) * 1.02),
        ("causal_conv1d", lambda conv: lambda x, w, *a, **k: conv(x, w.detach() + 0 * w, *a, **k)),
        ("rope", lambda rope: lambda x, **k: rope(x, **{**k, "theta": 1e4})),
    ],
)
def test_programs_find(monkeypatch, tmp_path, call: str, planted) -> None:
    """What a wrong op would do."""
    monkeypatch.setattr(_C, call, planted(getattr(_C, call)))
    assert first_finding(family_class("programs")(tmp_path), 4000), call


@pytest.mark.parametrize("field", ["lanes", "stride", "alignment"])
def test_doors_find(monkeypatch, tmp_path, field: str) -> None:
    """A door that checks one thing less: it takes the object after repairing what it should have refused."""
    doors = family_class("doors")(tmp_path)
    if field == "lanes":
        monkeypatch.setattr(xt, "from_dlpack", lambda producer: xt.zeros(3))
    elif field == "stride":
        inner = xt.from_numpy
        monkeypatch.setattr(xt, "from_numpy", lambda array: inner(np.ascontiguousarray(array)))
    else:
        inner_tensor = xt.tensor
        monkeypatch.setattr(xt, "tensor", lambda data, *a, **k: inner_tensor(data, *a, **k) * 2)
    assert first_finding(doors, 300)


def test_files_find(monkeypatch, tmp_path) -> None:
    """Pieces whose hashes nobody compares, and an exception that nobody documented."""
    files = family_class("files")(tmp_path)
    everything = files.targets
    files.targets = [target for target in everything if target[0] == "listed" and target[1].suffix == ".safetensors"]
    monkeypatch.setattr(reader.CheckedFile, "_wait", lambda self: self._checks.clear())
    found = [wrong for number in range(400) if (wrong := one_case(files, 5, number))]
    assert any("damage was accepted" in wrong for wrong in found)
    files.targets = everything
    monkeypatch.setattr(reader, "parse_object", lambda path, data: json.loads(data))
    found = [wrong for number in range(400) if (wrong := one_case(files, 5, number))]
    assert any("not documented" in wrong for wrong in found)


def test_the_corpus_is_refused(tmp_path) -> None:
    """Each file in the place of a good one, at every reader of its format: an exception that is documented, in one line."""
    files = family_class("files")(tmp_path)
    for kind, seeds in files.seeds.items():
        places = [(path, read) for format, path, read in files.targets if format == kind]
        assert places or any(kind in PACKAGES[name] for name in files.lacks()), f"no reader of {kind}"
        for path, read in places:
            good = path.read_bytes()
            for content in seeds:
                path.write_bytes(content)
                taken = files.tried(kind, path, read)
                assert not taken or kind == "metrics", f"{kind}: {content[:60]!r} is taken"
            path.write_bytes(good)
            read(path)


@pytest.mark.skipif(bool(os.environ.get("XTRAIN_SANITIZE")), reason="ASan takes the signal, and bounds no memory")
def test_a_crash_a_hang_and_memory_are_findings(tmp_path) -> None:
    """Planted in a worker: its case is named, and the worker goes on behind it."""
    planted = tmp_path / "programs.py"
    planted.write_text(PLANTED)
    done = python(
        RUN, "programs", "--cases", "20", "--jobs", "1", "--seed", "1", env={**os.environ, "PLANTED": str(planted)}
    )
    assert done.returncode == 1, done.stdout
    for what in (
        "case 7: the process ended with status -11",
        "case 9: no end within 2 s",
        "case 11: an exception that is not",
        "case 13: no end within 2 s",
    ):
        assert what in done.stdout, done.stdout
    cases = re.search(r"programs +(\d+) cases", done.stdout)
    assert cases and int(cases[1]) > 12


PLANTED = """
import os, signal, time
from frame import Family

class FAMILY(Family):
    name, slow = "programs", 2.0
    def run(self, chance):
        number = self.number = getattr(self, "number", -1) + 1
        mine = chance.random()
        from frame import chance_of
        for which in (7, 9, 11, 13):
            if chance_of("programs", 1, which).random() == mine:
                if which == 7:
                    os.kill(os.getpid(), signal.SIGSEGV)
                if which == 9:
                    time.sleep(60)
                if which == 11:
                    bytes(1 << 40)
                while which == 13:
                    pass
        time.sleep(0.01)
"""
