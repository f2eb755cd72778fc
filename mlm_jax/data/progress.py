"""A line about once a second while something long is being built."""

import time
from collections.abc import Callable


class Progress:
    """Calls `log` about once a second; less often as hours go by."""

    def __init__(self, log: Callable[[str], object], what: str):
        self._log, self._what = log, what
        self._start = time.monotonic()
        self._next = 1.0

    def seconds(self) -> float:
        return time.monotonic() - self._start

    def is_due(self) -> bool:
        return self.seconds() >= self._next

    def report(self, **done: float) -> None:
        """Reports the amounts done so far, by unit, and the speed in the last one."""
        seconds = self.seconds()
        self._next = seconds + min(max(1.0, seconds / 10), 30.0)
        amounts = ", ".join(f"{amount:,.0f} {unit}" for unit, amount in done.items())
        *_, (unit, amount) = done.items()
        self._log(f"{self._what}: {amounts}, {amount / seconds:,.0f} {unit}/s")
