"""How busy the machine is with other work while something is timed."""

import os
import time

import psutil

IDLE = ("idle", "iowait", "guest", "guest_nice")
"""Fields of psutil's cpu_times that are no work, or are in user and nice already."""

SHORT = 0.2
"""Seconds below which a kernel that counts in ticks of 10 ms cannot tell."""


class Load:
    """What the CPUs do between its creation and `others()`."""

    def __init__(self) -> None:
        self.wall, self.own, self.all = time.perf_counter(), time.process_time(), _busy_seconds()

    def others(self) -> float | None:
        """Share of all CPUs' time that was not this process's nor idle, 0 to 1; a hypervisor's stolen time counts. None
        where the time was too short to tell."""
        wall, own = time.perf_counter() - self.wall, time.process_time() - self.own
        if wall < SHORT:
            return None
        taken = _busy_seconds() - self.all - own
        return round(min(1.0, max(0.0, taken / (wall * (os.cpu_count() or 1)))), 3)


def _busy_seconds() -> float:
    times = psutil.cpu_times()._asdict()
    return sum(seconds for name, seconds in times.items() if name not in IDLE)
