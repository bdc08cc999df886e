"""A pretended `torch` for `run.py` where there is no GPU: numpy, two lanes, and an exact clock.

Its CUDA graphs are honest: a capture records calls and runs none of them, a replay runs them over
the arrays they were recorded with. Times are those of `mini_vllm/cudagraph/launches.py`, with
constants of your choice, so what `run.py` finds out about this device can be compared with what was
put in. Nothing it says is a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np


class Device:
    """Two lanes. `host` and `gpu` are where each has got to, in seconds."""

    def __init__(
        self, launch_us: float, replay_us: float, floor_us: float, bandwidth: float
    ) -> None:
        self.launch_us, self.replay_us = launch_us, replay_us
        self.floor_us, self.bandwidth = floor_us, bandwidth
        self.host = self.gpu = 0.0
        self.recording: list[tuple[Callable[[], None], int]] | None = None

    def kernel(self, run: Callable[[], None], elements: int) -> None:
        """Launch a kernel, or write down that it would have been."""
        if self.recording is not None:
            self.recording.append((run, elements))
            return
        self.host += self.launch_us * 1e-6
        self.execute(run, elements)

    def execute(self, run: Callable[[], None], elements: int) -> None:
        """The GPU's lane: after what is there, and not before it was submitted."""
        took = max(self.floor_us * 1e-6, elements * 8 / self.bandwidth)
        self.gpu = max(self.gpu, self.host) + took
        run()

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)

    def clock(self) -> float:
        return self.host


class Tensor:
    """The few methods of a tensor that `run.py` calls."""

    def __init__(self, device: Device, array: np.ndarray) -> None:
        self.device, self.array = device, array

    def _launch(self, run: Callable[[], Any]) -> Tensor:
        self.device.kernel(run, self.array.size)
        return self

    def add_(self, value: float) -> Tensor:
        return self._launch(lambda: np.add(self.array, value, out=self.array))

    def fill_(self, value: float) -> Tensor:
        return self._launch(lambda: self.array.fill(value))

    def clone(self) -> Tensor:
        copy = Tensor(self.device, np.full_like(self.array, np.nan))
        return copy._launch(lambda: np.copyto(copy.array, self.array))

    def __mul__(self, value: float) -> Tensor:
        result = Tensor(self.device, np.full_like(self.array, np.nan))
        return result._launch(lambda: np.multiply(self.array, value, out=result.array))

    def __add__(self, value: float) -> Tensor:
        result = Tensor(self.device, np.full_like(self.array, np.nan))
        return result._launch(lambda: np.add(self.array, value, out=result.array))

    def item(self) -> float:
        if self.device.recording is not None:
            raise RuntimeError("the host waits for a value while a graph is captured")
        self.device.synchronize()
        return float(self.array.flat[0])

    def __getitem__(self, index: int) -> Tensor:
        return Tensor(self.device, self.array[index:][:1])


def make(device: Device) -> SimpleNamespace:
    """A module-like object with the names that `run.py` takes from torch."""

    class CUDAGraph:
        def __init__(self) -> None:
            self.calls: list[tuple[Callable[[], None], int]] = []

        def replay(self) -> None:
            device.host += device.replay_us * 1e-6
            for run, elements in self.calls:
                device.execute(run, elements)

    class Event:
        def __init__(self, enable_timing: bool = False) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = max(device.gpu, device.host)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    class Stream:
        def wait_stream(self, other: Stream) -> None:
            pass

    @contextmanager
    def graph(captured: CUDAGraph) -> Iterator[None]:
        device.recording = captured.calls
        try:
            yield
        finally:
            device.recording = None

    @contextmanager
    def stream(which: Stream) -> Iterator[None]:
        yield

    def full(shape: tuple[int, ...], value: float, device: str = "cuda") -> Tensor:
        return zeros(shape).fill_(value)

    def zeros(shape: tuple[int, ...], device: str = "cuda") -> Tensor:
        return Tensor(here, np.zeros(shape, dtype=np.float32))

    here = device
    cuda = SimpleNamespace(
        CUDAGraph=CUDAGraph,
        Event=Event,
        Stream=Stream,
        graph=graph,
        stream=stream,
        current_stream=Stream,
        synchronize=device.synchronize,
        is_available=lambda: True,
        get_device_name=lambda: "a pretended device: nothing here is measured",
    )
    return SimpleNamespace(cuda=cuda, zeros=zeros, full=full)
