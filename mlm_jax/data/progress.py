"""A line about once a second while something long is being made."""

import math
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
        amounts = ", ".join(f"{amount:,.0f} {unit}" for unit, amount in done.items())
        *_, (unit, amount) = done.items()
        self._say(f"{amounts}, {amount / self.seconds():,.0f} {unit}/s")

    def _say(self, text: str) -> None:
        seconds = self.seconds()
        self._next = seconds + min(max(1.0, seconds / 10), 30.0)
        self._log(f"{self._what}: {text}")


class Countdown(Progress):
    """The same for an amount that is known beforehand, with the time left. It is called
    with what has been done since the last call."""

    def __init__(self, log: Callable[[str], object], what: str, unit: str, total: int):
        super().__init__(log, what)
        self._unit, self._total, self._done = unit, total, 0

    def __call__(self, more: int) -> None:
        self._done += more
        if self.is_due() and self._done:
            rate = self._done / self.seconds()
            left = duration((self._total - self._done) / rate)
            self._say(
                f"{self._done:,} of {self._total:,} {self._unit}, "
                f"{rate:,.0f} {self._unit}/s, {left} left"
            )


def duration(seconds: float) -> str:
    """Returns seconds as people say them; `?` for what is not known."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h {minutes:02}m"
    return f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"
