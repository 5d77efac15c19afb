"""The generator of the process from many threads: no two fills get the same stream."""

from race import race

import xtrain as xt

seen: list[set] = [set(), set(), set()]


def draw(i: int) -> None:
    seen[i].add(tuple(xt.rand(4).tolist()))


def state() -> None:
    seed, stream = xt._C.get_rng_state()
    assert stream >= 0 and seed == 7


xt.manual_seed(7)
counts = race(lambda: draw(0), lambda: draw(1), lambda: draw(2), state)
assert len(seen[0] | seen[1] | seen[2]) == sum(counts[:3]), "two fills got the same numbers"
