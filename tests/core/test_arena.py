"""core/arena.h: places of blocks in a region, which a plan sized."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT

UNIT = 512
SOURCE = """
#include "core/arena.h"
XtMemoryPlan *plan_new(void) { XtMemoryPlan *plan = malloc(sizeof *plan); xt_plan_begin(plan); return plan; }
void plan_took(XtMemoryPlan *plan, const void *data, size_t nbytes) { xt_plan_took(plan, data, nbytes); }
void plan_gave(XtMemoryPlan *plan, const void *data, size_t nbytes) { xt_plan_gave(plan, data, nbytes); }
size_t plan_end(XtMemoryPlan *plan) { size_t nbytes = xt_plan_end(plan); free(plan); return nbytes; }
XtArena *arena_new(size_t limit) { XtArena *arena = calloc(1, sizeof *arena); arena->limit = limit; return arena; }
long arena_take(XtArena *arena, size_t nbytes) { size_t at; return xt_arena_take(arena, nbytes, &at) ? (long)at : -1; }
void arena_give(XtArena *arena, size_t offset, size_t nbytes) { xt_arena_give(arena, offset, nbytes); }
size_t arena_top(XtArena *arena) { return arena->top; }
long arena_holes(XtArena *arena) { return arena->count; }
void arena_free(XtArena *arena) { free(arena->holes); free(arena); }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC") or "cc", "gcc", "clang"))))
    folder: Path = tmp_path_factory.mktemp("arena")
    (folder / "arena.c").write_text(SOURCE)
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", f"-I{ROOT}/csrc"]
    subprocess.run([compiler, *options, folder / "arena.c", "-o", folder / "arena.so"], check=True)
    found = ctypes.CDLL(str(folder / "arena.so"))
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, result, *arguments in (
        ("plan_new", pointer),
        ("plan_took", None, pointer, pointer, size),
        ("plan_gave", None, pointer, pointer, size),
        ("plan_end", size, pointer),
        ("arena_new", pointer, size),
        ("arena_take", ctypes.c_long, pointer, size),
        ("arena_give", None, pointer, size, size),
        ("arena_top", size, pointer),
        ("arena_holes", ctypes.c_long, pointer),
        ("arena_free", None, pointer),
    ):
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def sequence(seed: int) -> list[tuple[str, int, int]]:
    """("take" or "give", number of the block, its size): random sizes, alive for random times."""
    rng, alive, steps = random.Random(seed), [], []
    for number in range(rng.choice((1, 30, 400))):
        size = rng.choice((1, 512, 513, rng.randrange(1, 4000), rng.randrange(1, 200_000)))
        steps.append(("take", number, size))
        alive.append((number, size))
        while alive and rng.random() < 0.5 * len(alive) / (len(alive) + 8):
            steps.append(("give", *alive.pop(rng.randrange(len(alive)))))
    rng.shuffle(alive)
    return steps + [("give", *block) for block in alive[: rng.randrange(len(alive) + 1)]]


@pytest.mark.parametrize("seed", range(60))
def test_a_region_of_the_planned_size_holds_the_sequence(library: ctypes.CDLL, seed: int) -> None:
    """Blocks do not overlap and begin at whole units; a smaller region does not do; what came before the plan does not count."""
    steps = sequence(seed)
    address = {number: 1 << 20 | number * 7919 % 4096 << 32 for _, number, _ in steps}  # in no order
    plan = library.plan_new()
    for step, number, size in steps:
        if step == "take":
            library.plan_took(plan, address[number], size)
        else:
            library.plan_gave(plan, address[number], size)
            library.plan_gave(plan, address[number] + 64, size)  # none of the plan's
    planned = library.plan_end(plan)
    for limit, fits in ((planned, True), (planned - UNIT, False)):
        arena, places, failed = library.arena_new(limit), {}, False
        for step, number, size in steps:
            if step == "give":
                library.arena_give(arena, places.pop(number)[0], size)
                continue
            at = library.arena_take(arena, size)
            failed = at < 0
            if failed:
                break
            assert at % UNIT == 0 and at + size <= limit
            assert all(at + size <= begin or end <= at for begin, end in places.values())
            places[number] = (at, at + size)
        assert failed != fits
        if fits:
            sizes = {number: size for step, number, size in steps}
            for number, (begin, _) in places.items():
                library.arena_give(arena, begin, sizes[number])
            assert library.arena_top(arena) == 0 and library.arena_holes(arena) == 0
        library.arena_free(arena)


def test_the_smallest_hole_and_the_lowest_of_equal_ones(library: ctypes.CDLL) -> None:
    arena = library.arena_new(1 << 30)
    at = [library.arena_take(arena, units * UNIT) for units in (3, 1, 2, 1, 2, 1, 4, 1)]
    for number, units in ((0, 3), (2, 2), (4, 2), (6, 4)):
        library.arena_give(arena, at[number], units * UNIT)
    assert [library.arena_take(arena, 2 * UNIT) for _ in range(2)] == [at[2], at[4]]
    assert library.arena_take(arena, 2 * UNIT) == at[0]  # of three units, not of four
    assert library.arena_take(arena, 1) == at[0] + 2 * UNIT
    assert library.arena_take(arena, 5 * UNIT) == at[7] + UNIT  # at the end
    assert library.arena_take(arena, 1 << 40) == -1
    library.arena_free(arena)
