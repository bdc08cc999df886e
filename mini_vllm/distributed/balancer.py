"""Which of several engines gets a request, and who tells the front end how busy they are.

Promises: the choice, and every message and waiting time of the coordinator, equal the real ones'
for the same events. Mirrors `vllm/v1/engine/core_client.py:1382`
`DPLBAsyncMPClient.get_core_engine_for_request` and `vllm/v1/engine/coordinator.py:144`
`DPCoordinatorProc`. No clock and no socket: the caller has both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mini_vllm.checks import whole

WAITING_WEIGHT = 4
"""One waiting request counts as much as this many running ones."""

IDLE_INTERVAL_MS = 5000
"""Milliseconds between two publications while nothing changes."""

STEP_WINDOW_MS = 50
"""Milliseconds to wait for the other engines' counts of the same step."""


class LoadBalancer:
    """One front end's picture of its engines: waiting and running requests of each.

    The picture is stale between two publications, so a front end counts its own choices: it adds
    `client_count` waiting requests at a time, as if every other front end chose the same.
    """

    def __init__(self, num_engines: int, client_index: int = 0, client_count: int = 1) -> None:
        """All engines idle.

        Raises:
            ValueError: an argument is not a whole number, or out of its range.
        """
        whole("num_engines", num_engines, 1)
        whole("client_count", client_count, 1)
        whole("client_index", client_index, 0, client_count - 1)
        self.counts = [[0, 0] for _ in range(num_engines)]
        """[waiting, running] of each engine."""
        self.client_count = client_count
        self.start = num_engines * client_index // client_count
        """Where this front end begins to look: idle engines are shared out between front ends."""

    def choose(self, rank: int | None = None) -> int:
        """The engine for one more request: `rank` if given, else the first of the least score.

        Raises:
            ValueError: there is no such rank; nothing is counted.
        """
        num_engines = len(self.counts)
        if rank is not None:  # whoever names an engine is not counted
            return whole("rank", rank, 0, num_engines - 1)
        order = [(self.start + i) % num_engines for i in range(num_engines)]
        chosen = min(order, key=self.score)  # the first of equals
        self.counts[chosen][0] += self.client_count
        return chosen

    def score(self, engine: int) -> int:
        """How busy an engine is."""
        waiting, running = self.counts[engine]
        return WAITING_WEIGHT * waiting + running

    def update(self, counts: Sequence[Sequence[int]]) -> None:
        """Take published counts, [waiting, running] of each engine; local additions are forgotten.

        Raises:
            ValueError: not one pair for each engine; nothing changed.
        """
        if len(counts) != len(self.counts) or any(len(pair) != 2 for pair in counts):
            raise ValueError(f"counts={counts!r}: need {len(self.counts)} pairs")
        for pair in counts:
            for name, value in zip(("waiting", "running"), pair, strict=True):
                whole(name, value, 0)
        self.counts = [list(pair) for pair in counts]


Counts = list[list[int]]


@dataclass(slots=True)
class Messages:
    """What the coordinator sends because of one event."""

    front: list[tuple[Counts | None, int, bool]] = field(default_factory=list)
    """To the front ends: counts ([waiting, running] of each engine, None: as before), the wave,
    and whether engines are running."""
    start_wave: list[tuple[int, int | None]] = field(default_factory=list)
    """To the engines: the wave, and the engine that needs no telling."""


class Coordinator:
    """Collects counts, publishes them, and keeps lock-step engines in the same wave.

    Engines with experts run every step together, so an engine without work must be woken when
    another gets some: a wave is the time from the first request until all are idle.
    """

    def __init__(
        self, num_engines: int, interval_ms: int = 100, wave_coordination: bool = True
    ) -> None:
        """Idle engines, wave 0, nothing published.

        Raises:
            ValueError: `num_engines` below 2, or `interval_ms` below 0.
        """
        whole("num_engines", num_engines, 2)
        self.interval_ms = whole("interval_ms", interval_ms, 0)
        self.wave_coordination = wave_coordination
        self.counts: Counts = [[0, 0] for _ in range(num_engines)]
        self.wave = 0
        self.running = False
        self._changed = False
        self._last_published_ms = 0
        self._last_step = (-1, -1)  # wave, step
        self._step_counts: Counts | None = None

    def wait_ms(self, now_ms: int) -> int:
        """Milliseconds to wait for an event before `publish` is called."""
        elapsed = now_ms - self._last_published_ms
        wait_for = self.interval_ms if self._changed else IDLE_INTERVAL_MS
        at_least = STEP_WINDOW_MS if self._step_counts is None else 0
        return max(at_least, wait_for - elapsed)

    def publish(self, now_ms: int) -> Messages:
        """Nothing came for `wait_ms`: tell the front ends.

        Counts of a step that is over come first; the newest follow when the next wait has passed.
        """
        counts, self._step_counts = self._step_counts, None
        if counts is None:
            counts, self._changed = [list(pair) for pair in self.counts], False
        self._last_published_ms = now_ms
        return Messages(front=[(counts, self.wave, self.running)])

    def on_counts(self, engine: int, wave: int, step: int, waiting: int, running: int) -> None:
        """An engine says how many of its requests wait and run, in `step` of `wave`."""
        if (wave, step) > self._last_step:
            if self._changed:  # the others' counts of the step before are complete
                self._step_counts = [list(pair) for pair in self.counts]
            self._last_step = wave, step
        self.counts[engine] = [waiting, running]
        self._changed = True

    def on_first_request(self, engine: int | None, wave: int) -> Messages:
        """A front end sent a request to idle `engine`, thinking that the wave is `wave`."""
        if not self.wave_coordination or self.running:
            return Messages()
        exclude_engine_index = (
            engine if wave >= self.wave else None
        )  # a stale wave: everybody must hear
        self.running = True
        return self._state([(self.wave, exclude_engine_index)])

    def on_wave_complete(self, wave: int) -> Messages:
        """Rank 0 says that all engines have become idle."""
        if not self.wave_coordination or wave < self.wave:
            return Messages()
        self.wave, self.running = wave + 1, False
        return self._state([])

    def on_start_wave(self, engine: int, wave: int) -> Messages:
        """An idle engine got a request of a wave that is over: the next must begin."""
        stale = wave < self.wave or (wave == self.wave and self.running)
        if not self.wave_coordination or stale:
            return Messages()
        self.wave, self.running = wave, True
        return self._state([(wave, engine)])

    def _state(self, started: list[tuple[int, int | None]]) -> Messages:
        return Messages([(None, self.wave, self.running)], started)
