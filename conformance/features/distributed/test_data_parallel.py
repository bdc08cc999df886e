"""The router of data-parallel engines against the real front end and the real coordinator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from conformance import parts
from mini_vllm.distributed import balancer
from mini_vllm.distributed.balancer import Coordinator, LoadBalancer, Messages

Case = dict[str, Any]


load = functools.cache(parts.load)


def differing_choices(
    make: Callable[..., LoadBalancer] = LoadBalancer, num: int | None = None
) -> int:
    """Of the first `num` recorded sequences, those where `make` chooses or believes otherwise."""
    count = 0
    for case in load("balancer")[:num]:
        ours = make(case["num_engines"], case["client_index"], case["client_count"])
        count += any(not _agrees(ours, *event) for event in case["events"])
    return count


def _agrees(ours: LoadBalancer, kind: str, *what: Any) -> bool:
    if kind == "update":
        ours.update(*what)
    elif kind == "choose":
        rank, chosen = what
        return ours.choose(rank) == chosen
    else:
        return ours.counts == what[0]
    return True


def differing_messages(
    make: Callable[..., Coordinator] = Coordinator, num: int | None = None
) -> int:
    """Of the first `num` recorded sequences, those where `make` sends or waits otherwise."""
    count = 0
    for case in load("coordinator")[:num]:
        ours = make(case["num_engines"], case["interval_ms"], case["wave_coordination"])
        count += any(not _same_step(ours, step) for step in case["events"])
    return count


def _same_step(ours: Coordinator, step: Case) -> bool:
    if ours.wait_ms(step["now_ms"]) != step["wait_ms"]:
        return False
    kind, *rest = step["event"]
    sent = Messages()
    if kind == "timeout":
        sent = ours.publish(step["now_ms"] + step["wait_ms"])
    elif kind == "counts":
        ours.on_counts(*rest)
    elif kind == "first":
        sent = ours.on_first_request(*rest)
    elif kind == "complete":
        sent = ours.on_wave_complete(*rest)
    else:
        sent = ours.on_start_wave(*rest)
    front = [list(message) for message in sent.front]
    return front == step["front"] and [list(m) for m in sent.start_wave] == step["start_wave"]


@pytest.mark.slow
def test_every_recorded_choice_of_the_real_front_end_is_ours() -> None:
    assert len(load("balancer")) == 1000
    assert differing_choices() == 0


@pytest.mark.slow
def test_every_recorded_message_of_the_real_coordinator_is_ours() -> None:
    assert len(load("coordinator")) == 1000
    assert differing_messages() == 0


class WeightOfOne(LoadBalancer):
    def score(self, engine: int) -> int:
        return sum(self.counts[engine])


class FromZero(LoadBalancer):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.start = 0


class LastOfEquals(LoadBalancer):
    def choose(self, rank: int | None = None) -> int:
        self.start -= 1
        order, self.start = self.start, self.start + 1
        if rank is not None:
            return rank
        num = len(self.counts)
        chosen = min(((order - i) % num for i in range(num)), key=self.score)
        self.counts[chosen][0] += self.client_count
        return chosen


class CountsOne(LoadBalancer):
    def choose(self, rank: int | None = None) -> int:
        chosen = super().choose(rank)
        if rank is None:
            self.counts[chosen][0] -= self.client_count - 1
        return chosen


class CountsNamed(LoadBalancer):
    def choose(self, rank: int | None = None) -> int:
        if rank is not None:
            self.counts[rank][0] += self.client_count
        return super().choose(rank)


class NeverUpdated(LoadBalancer):
    def update(self, counts: Any) -> None:
        pass


class RoundRobin(LoadBalancer):
    def choose(self, rank: int | None = None) -> int:
        self.start = (self.start + 1) % len(self.counts)
        return super().choose(rank if rank is not None else self.start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [WeightOfOne, FromZero, LastOfEquals, CountsOne, CountsNamed, NeverUpdated, RoundRobin],
)
def test_a_wrong_balancer_is_caught(wrong: type[LoadBalancer]) -> None:
    assert differing_choices(wrong, 300) > 50


class PublishesNewestFirst(Coordinator):
    def publish(self, now_ms: int) -> Messages:
        self._step_counts = None
        return super().publish(now_ms)


class NeverIdle(Coordinator):
    def wait_ms(self, now_ms: int) -> int:
        self._changed = True
        return super().wait_ms(now_ms)


class NoWindow(Coordinator):
    def wait_ms(self, now_ms: int) -> int:
        kept, self._step_counts = self._step_counts, self._step_counts or []
        waited = super().wait_ms(now_ms)
        self._step_counts = kept
        return waited


class TrustsStaleWaves(Coordinator):
    def on_first_request(self, engine: int | None, wave: int) -> Messages:
        return super().on_first_request(engine, max(wave, self.wave))


class WakesTheRunning(Coordinator):
    def on_first_request(self, engine: int | None, wave: int) -> Messages:
        self.running = False
        return super().on_first_request(engine, wave)


class KeepsTheWave(Coordinator):
    def on_wave_complete(self, wave: int) -> Messages:
        sent = super().on_wave_complete(wave)
        if sent.front:
            self.wave = wave
        return sent


class AcceptsOldEnds(Coordinator):
    def on_wave_complete(self, wave: int) -> Messages:
        return super().on_wave_complete(max(wave, self.wave))


class NeverRestarts(Coordinator):
    def on_start_wave(self, engine: int, wave: int) -> Messages:
        return Messages() if wave == self.wave else super().on_start_wave(engine, wave)


class TellsTheTeller(Coordinator):
    def on_start_wave(self, engine: int, wave: int) -> Messages:
        sent = super().on_start_wave(engine, wave)
        return Messages(sent.front, [(wave, None) for wave, _ in sent.start_wave])


class WavesForDense(Coordinator):
    def __init__(self, num_engines: int, interval_ms: int, wave_coordination: bool) -> None:
        super().__init__(num_engines, interval_ms, True)


class SharesCounts(Coordinator):
    def on_counts(self, engine: int, wave: int, step: int, waiting: int, running: int) -> None:
        super().on_counts(engine, wave, step, waiting, running)
        if self._step_counts is not None:
            self._step_counts = self.counts


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrong",
    [PublishesNewestFirst, NeverIdle, NoWindow, TrustsStaleWaves, WakesTheRunning, KeepsTheWave,
     AcceptsOldEnds, NeverRestarts, TellsTheTeller, WavesForDense, SharesCounts],
)  # fmt: skip
def test_a_wrong_coordinator_is_caught(wrong: type[Coordinator]) -> None:
    assert differing_messages(wrong, 300) > 10


@pytest.mark.slow
def test_the_recorded_sequences_hold_every_situation() -> None:
    seen = dict.fromkeys(
        ("a tie between busy engines", "a stale wave", "two counts of one step", "idle interval"), 0
    )
    for case in load("coordinator"):
        for step in case["events"]:
            seen["a stale wave"] += any(told is None for _, told in step["start_wave"])
            seen["idle interval"] += step["wait_ms"] > case["interval_ms"] > 50
            seen["two counts of one step"] += step["wait_ms"] < balancer.STEP_WINDOW_MS
    for case in load("balancer"):
        ours = LoadBalancer(case["num_engines"], case["client_index"], case["client_count"])
        for event in case["events"]:
            scores = sorted(ours.score(i) for i in range(case["num_engines"]))
            seen["a tie between busy engines"] += scores[0] == scores[1] > 0
            _agrees(ours, *event)
    assert all(seen.values()), seen


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: LoadBalancer(0), "num_engines=0"),
        (lambda: LoadBalancer(2, 1, 1), "client_index=1"),
        (lambda: LoadBalancer(2, 0, 0), "client_count=0"),
        (lambda: LoadBalancer(2).choose(2), "rank=2: need 0 to 1"),
        (lambda: LoadBalancer(2).choose(-1), "rank=-1"),
        (lambda: LoadBalancer(2).update([[0, 0]]), "need 2 pairs"),
        (lambda: LoadBalancer(2).update([[0, 0], [0, -1]]), "running=-1"),
        (lambda: Coordinator(1), "num_engines=1"),
        (lambda: Coordinator(2, -1), "interval_ms=-1"),
    ],
)
def test_bad_input_is_refused_by_name(call: Callable[[], Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        call()


def test_a_refused_choice_counts_nothing() -> None:
    ours = LoadBalancer(2)
    with pytest.raises(ValueError, match="rank"):
        ours.choose(7)
    assert ours.counts == [[0, 0], [0, 0]]
