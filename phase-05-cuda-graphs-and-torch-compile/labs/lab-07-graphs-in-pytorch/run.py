"""CUDA graphs in PyTorch, without an engine: host and device time, the crossover, stale outputs.

    course gpu run 05-07
    python run.py --kernels 100 --elements 256 4096 65536 --repeats 5
    python run.py --file starter.py            your predictions
    python run.py --pretend                    no GPU, no torch: an invented device

A step is `--kernels` times `buffer.add_(1)`. Each size is timed eager and as a graph: median over
`--repeats` steps, each between two synchronisations, after a warm-up. "host" ends when the last
launch has been issued, "all" when the last kernel has ended, "events" is the time between two
CUDA events around the step. The eager column is then predicted from the others by the lab's fit.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any, NamedTuple

from labkit.modules import load_module

HERE = Path(__file__).resolve().parent

SCRIPT: tuple[tuple[Any, ...], ...] = (
    ("fill", 5), ("read",), ("replay",), ("read",), ("keep",), ("clone",),
    ("fill", 7), ("read",), ("replay",), ("read",),
    ("rebind", 100), ("replay",), ("read",), ("fill", 200), ("replay",), ("read",),
)  # fmt: skip
"""Fill, replay, fill again; then rebind, as somebody does who is used to Python."""


clock: Callable[[], float] = time.perf_counter
"""Seconds; a pretended device brings its own."""


class Timing(NamedTuple):
    """Microseconds of one step."""

    host: float
    all: float
    events: float


def capture(torch: Any, work: Callable[[], Any]) -> tuple[Any, Any]:
    """A graph of `work`, and what `work` returned while it was captured.

    Warms up on a stream of its own first: what a library sets up lazily must not be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def timed(torch: Any, work: Callable[[], Any], repeats: int) -> Timing:
    """Median times of one call of `work`."""
    found = []
    for _ in range(3):
        work()
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        start = clock()
        work()
        issued = clock()
        end.record()
        torch.cuda.synchronize()
        done = clock()
        found.append(
            Timing((issued - start) * 1e6, (done - start) * 1e6, begin.elapsed_time(end) * 1e3)
        )
    return Timing(*(median(column) for column in zip(*found, strict=True)))


def sweep(
    torch: Any, lab: ModuleType, num_kernels: int, sizes: Sequence[int], repeats: int
) -> list[Any]:
    """One row per size; prints both ways of each."""
    rows = []
    for elements in sizes:
        buffer = torch.zeros((elements,), device="cuda")

        def step(buffer: Any = buffer) -> None:
            for _ in range(num_kernels):
                buffer.add_(1)

        eager = timed(torch, step, repeats)
        graph, _ = capture(torch, step)
        replay = timed(torch, graph.replay, repeats)
        check(torch, buffer, graph, num_kernels)
        rows.append(lab.Row(elements, eager.host, eager.all, replay.host, replay.all))
        for name, t in (("eager", eager), ("graph", replay)):
            print(
                f"  {elements:>9} elements  {name}  host {t.host:9.1f}  all {t.all:9.1f}  "
                f"events {t.events:9.1f} us"
            )
    return rows


def check(torch: Any, buffer: Any, graph: Any, num_kernels: int) -> None:
    """A replay adds `num_kernels` to each element; a time of anything else means nothing."""
    buffer.fill_(0)
    graph.replay()
    torch.cuda.synchronize()
    ends = [buffer[index].item() for index in (0, -1)]
    if ends != [num_kernels] * 2:
        raise SystemExit(f"a replay of {num_kernels} additions to 0 gave {ends}")


def report(lab: ModuleType, rows: Sequence[Any], num_kernels: int, ratio: float) -> None:
    """Fit the sweep, predict its eager column, and compare both crossovers."""
    found = lab.fit(rows, num_kernels)
    print(f"launch {found.launch_us:.2f} us, replay {found.replay_us:.1f} us")
    for row, kernel in zip(rows, found.kernel_us, strict=True):
        predicted = lab.eager_us(num_kernels, found.launch_us, kernel)
        off = round(predicted / row.eager_us - 1, 3) + 0.0  # never -0.0
        print(
            f"  {row.elements:>9} elements  kernel {kernel:8.2f} us  eager {row.eager_us:9.1f}, "
            f"predicted {predicted:9.1f} ({off:+.1%})  "
            f"gain {row.eager_us / row.graph_us:.2f}"
        )
    kernel = lab.kernel_us_at_gain(num_kernels, found.launch_us, found.replay_us, ratio)
    where = lab.measured_crossover(rows, ratio)
    if kernel is None:
        print(f"predicted: a graph never gains {ratio} here")
        return
    largest = max(zip(rows, found.kernel_us, strict=True), key=lambda pair: pair[0].elements)
    bandwidth = largest[0].elements * lab.BYTES_PER_ELEMENT / (largest[1] * 1e-6)
    floor = min(found.kernel_us)
    elements = lab.elements_at_gain(
        num_kernels, found.launch_us, found.replay_us, ratio, bandwidth, floor
    )
    print(
        f"predicted: the gain is {ratio} where a kernel lasts {kernel:.2f} us, at {elements} "
        f"elements with {bandwidth / 1e9:.0f} GB/s and a shortest kernel of {floor:.2f} us"
    )
    print(f"measured: the gain falls to {ratio} at {where and round(where)} elements")


def play(torch: Any, actions: Sequence[tuple[Any, ...]]) -> tuple[list[float], list[float]]:
    """The actions of `reads` on a real graph of out = 2 * x + 1."""
    x = torch.zeros((4,), device="cuda")
    static = x  # the graph reads this memory: it must outlive a rebinding of x
    graph, out = capture(torch, lambda: static * 2 + 1)
    noted: list[float] = []
    kept: list[Any] = []
    for name, *values in actions:
        if name == "fill":
            x.fill_(values[0])
        elif name == "rebind":
            x = torch.full((4,), float(values[0]), device="cuda")
        elif name == "replay":
            graph.replay()
        elif name == "read":
            noted.append(out[0].item())
        else:
            kept.append(out if name == "keep" else out.clone())
    torch.cuda.synchronize()
    return noted, [tensor[0].item() for tensor in kept]


def stale(torch: Any, lab: ModuleType) -> int:
    """Play the script, print it beside the prediction; how many values differ."""
    predicted, real = lab.reads(SCRIPT), play(torch, SCRIPT)
    print("out = 2 * x + 1; " + ", ".join(" ".join(map(str, action)) for action in SCRIPT))
    differ = 0
    for what, expected, came in zip(("read", "kept"), predicted, real, strict=True):
        for number, (a, b) in enumerate(zip(expected, came, strict=True)):
            known = a is not None
            differ += known and a != b
            words = f"predicted {a:g}" if known else "nobody has written it yet"
            print(f"  {what} {number}: {b:g}; {words}{'' if a == b or not known else '  DIFFERS'}")
    print(f"{differ} differ")
    return differ


def real_torch() -> ModuleType:
    """torch with a GPU, or an end with the reason."""
    try:
        import torch
    except ImportError:
        raise SystemExit("needs torch and a CUDA GPU; --pretend works without") from None
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here; --pretend works without")
    return torch


def main(argv: Sequence[str] | None = None) -> None:
    global clock
    parser = argparse.ArgumentParser(description="CUDA graphs in PyTorch.")
    parser.add_argument("--kernels", type=int, default=300)
    parser.add_argument(
        "--elements", type=int, nargs="+", default=[2**n for n in range(8, 27)], metavar="N"
    )
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--ratio", type=float, default=1.1, help="the crossover's gain")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--pretend", action="store_true", help="an invented device")
    arguments = parser.parse_args(argv)
    lab = load_module(Path(arguments.file).resolve(), "lab_05_07")
    torch: Any
    if arguments.pretend:
        pretend = load_module(HERE / "pretend.py", "lab_05_07_pretend")
        device = pretend.Device(launch_us=5.0, replay_us=10.0, floor_us=2.0, bandwidth=1e11)
        torch, clock = pretend.make(device), device.clock
        arguments.elements = [n for n in arguments.elements if n <= 2**18]
    else:
        torch = real_torch()
    print(torch.cuda.get_device_name())
    print(f"=== {arguments.kernels} kernels a step")
    rows = sweep(torch, lab, arguments.kernels, arguments.elements, arguments.repeats)
    print("=== prediction")
    report(lab, rows, arguments.kernels, arguments.ratio)
    print("=== what a replay reads and writes")
    if stale(torch, lab):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
