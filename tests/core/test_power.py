"""xt_power of csrc/core/power.h: b^n to less than 0.51 units in the last place, for n < 2^40 and b^n > 2^-900."""

import ctypes
import math
import os
import random
import shutil
import subprocess
from decimal import Context, Decimal
from fractions import Fraction

import pytest
from places import ROOT

SOURCE = '#include "core/power.h"\ndouble power(double b, int64_t n) { return xt_power(b, n); }\n'
REFERENCE = Context(prec=80)  # 266 bits; an exact b^n of n = 2^30 would have 2^35


def build(folder, *options):
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
    (folder / "power.c").write_text(SOURCE)
    library = folder / f"power{''.join(options)}.so"
    command = [
        compiler,
        "-std=gnu11",
        *options,
        "-shared",
        "-fPIC",
        f"-I{ROOT}/csrc",
        folder / "power.c",
        "-o",
        library,
    ]
    subprocess.run([*command, "-lm"], check=True)
    function = ctypes.CDLL(str(library)).power
    function.argtypes, function.restype = [ctypes.c_double, ctypes.c_int64], ctypes.c_double
    return function


@pytest.fixture(scope="module")
def power(tmp_path_factory):
    """Of two builds, which must agree in every bit: the second fuses products and sums where the source lets it."""
    folder = tmp_path_factory.mktemp("power")
    plain, fused = build(folder, "-O0"), build(folder, "-O3", "-march=native")

    def both(b, n):
        assert plain(b, n) == fused(b, n), f"{b!r} ** {n} depends on the compiler's options"
        return plain(b, n)

    return both


def error(found: float, b: float, n: int) -> float:
    """In units in the last place of b^n."""
    exact = Fraction(REFERENCE.power(Decimal(b), n))
    return float(abs(Fraction(found) - exact) / Fraction(math.ulp(float(exact))))


def nearest_float32(x: float) -> float:
    return ctypes.c_float(x).value


NEAR = [2**30 + i for i in (-2, -1, 0, 1, 2, 12345)]


@pytest.mark.parametrize("n", [*NEAR, 2**31 - 1, 2**35 + 1, 2**40 - 1])
def test_large_n(power, n):
    last = -890 * math.log(2) / n  # ln of the smallest b to try
    rng = random.Random(n)
    below_1 = [1 - 2.0**-24, 1 - 2.0**-25, nearest_float32(0.9999999), 1 - 2.0**-31, 1 - 2.0**-53]
    for b in [*below_1, *(math.exp(last * rng.random()) for _ in range(200))]:
        for base in {b, nearest_float32(b)}:
            if base < 1 and n * math.log(base) > -895 * math.log(2):
                assert error(power(base, n), base, n) < 0.51, f"{base!r} ** {n} gave {power(base, n)!r}"


def test_small_n(power):
    rng = random.Random(7)
    for case in range(3000):
        b, n = rng.random() ** 0.1, rng.choice((1, 2, 3, 7, 100, 1000, rng.randrange(1, 5000)))
        if n * math.log2(b) > -895:
            assert error(power(b, n), b, n) < 0.51, f"case {case} of seed 7: {b!r} ** {n} gave {power(b, n)!r}"


def test_ends(power):
    assert [power(b, 0) for b in (0.0, 0.5, 0.999)] == [1.0, 1.0, 1.0]
    assert power(0.0, 1) == power(0.0, 2**40 - 1) == power(0.9, 2**40 - 1) == 0.0


def test_the_reference_is_exact():
    for b, n in ((0.999, 333), (0.95, 1000), (1 - 2.0**-53, 4095)):
        exact, found = Fraction(b) ** n, Fraction(REFERENCE.power(Decimal(b), n))
        assert abs(found - exact) < exact / 2**200
