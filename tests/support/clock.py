"""A clock of the tests' own, so that no result depends on how busy the machine is."""


class Clock:
    """Stands in for the module `time`: it goes on while somebody sleeps, and by a nanosecond whenever somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-9
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
