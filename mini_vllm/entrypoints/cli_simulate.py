"""`mini-vllm simulate` and `mini-vllm fit`: a server's plans and times, without a server.

Promises: as the other commands, bad input is one line on stderr and exit code 2; what a file or a
cost does not know is said and never filled in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from mini_vllm.simulate.cost import FEATURES, fit, load_cost
from mini_vllm.simulate.report import (
    PerfettoTrace,
    Slo,
    bench_json,
    prometheus_text,
    save_json,
    write_csv,
)
from mini_vllm.simulate.steps import SOURCES, read_steps
from mini_vllm.simulate.sweep import LOADS, OTHERS, Row, Setup, knee, simulate, sweep
from mini_vllm.simulate.traces import FORMATS

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)

TraceArgument = Annotated[Path, typer.Argument(help=f"A file: {', '.join(FORMATS)}.")]
CostOption = Annotated[
    str, typer.Option(help="Seconds of a step: a file of `mini-vllm fit`, or step=6e-3,tokens=1e-5")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help=f"KNOB=VALUE of the engine, or of {', '.join(OTHERS)}."),
]
OutOption = Annotated[Path | None, typer.Option(help="A file to write.")]


def simulate_command(
    trace: TraceArgument,
    cost: CostOption,
    settings: SetOption = None,
    sweep_over: Annotated[
        list[str] | None, typer.Option("--sweep", help="KNOB=V1,V2,...; may repeat.")
    ] = None,
    slo: Annotated[str | None, typer.Option(help="ttft=0.8,tpot=0.02 in seconds.")] = None,
    attainment: Annotated[float, typer.Option(help="Share that must keep the SLO.")] = 0.99,
    trace_format: Annotated[str | None, typer.Option("--format", help="Of the trace.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N requests.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Count what is refused.")] = False,
    seed: Annotated[int, typer.Option(help="Of arrivals at a rate, and of drafts.")] = 0,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of a sweep.")] = None,
    ray: Annotated[
        str | None, typer.Option(help="A sweep on a Ray cluster: auto, HOST:PORT, or local.")
    ] = None,
    state: Annotated[Path | None, typer.Option(help="A sweep's file, to go on with.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON only.")] = False,
    save: OutOption = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="One line per request.")] = None,
    perfetto: Annotated[Path | None, typer.Option(help="Every step, for Perfetto.")] = None,
    prometheus: Annotated[Path | None, typer.Option(help="Counters, as /metrics.")] = None,
) -> None:
    """Serve a trace on a computed clock: exact plans, modelled times."""
    setup = Setup(
        trace, load_cost(cost), trace_format, limit, skip_bad, seed,
        {"async_scheduling": True, "num_blocks": 16384, **_settings(settings or ())},
    )  # fmt: skip
    goal = Slo.of(slo) if slo else None
    if sweep_over:
        for name, value in (("csv", csv_file), ("perfetto", perfetto), ("prometheus", prometheus)):
            if value is not None:
                raise ValueError(f"--{name} with --sweep: need one setting")
        axes = dict(_axis(text) for text in sweep_over)
        _sweep(setup, axes, goal, attainment, workers, ray, state, as_json, save)
        return
    if ray is not None:
        raise ValueError(f"--ray {ray}: needs --sweep")
    with ExitStack() as stack:
        observers: list[Any] = []
        if perfetto is not None:
            writer = PerfettoTrace(stack.enter_context(perfetto.open("w", encoding="utf-8")))
            stack.callback(writer.close)
            observers.append(writer)
        on_end = stack.enter_context(_progress(limit, as_json))
        result = simulate(setup, on_end, observers)
    found = bench_json(result, goal)
    if csv_file is not None:
        with csv_file.open("w", encoding="utf-8", newline="") as file:
            write_csv(result, file)
    if prometheus is not None:
        prometheus.write_text(prometheus_text(result, trace.stem), encoding="utf-8")
    if save is not None:
        save_json(found, save)
    for reason in result.skipped.first:
        errors.print(f"mini-vllm: left out: {reason}", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(found, indent=2), flush=True)
    else:
        _show(found, setup.cost.source)


def fit_command(
    sources: Annotated[list[Path], typer.Argument(help=f"Timed steps: {', '.join(SOURCES)}.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The cost, as JSON.")],
    features: Annotated[
        str, typer.Option(help=f"Some of {', '.join(FEATURES)}.")
    ] = "tokens,prefill_pairs,decode_context",
    source_format: Annotated[str | None, typer.Option("--format", help="Of the sources.")] = None,
    arm: Annotated[str | None, typer.Option(help="Of a file with several.")] = None,
    says: Annotated[str | None, typer.Option(help="Hardware, model and release.")] = None,
) -> None:
    """Fit what a step costs to steps that were timed."""
    steps, hosts, origins = [], [], []
    for path in sources:
        found = read_steps(path, source_format, arm)
        steps += found.steps
        hosts.append(found.host)
        origins.append(found.source)
    names = [name.strip() for name in features.split(",") if name.strip()]
    cost = fit(steps, says or "; ".join(dict.fromkeys(origins)), names, max(hosts))
    cost.save(out)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("steps", f"{len(steps):,}")
    for name, price in cost.terms.items():
        unit = "" if name == "step" else f" each, fitted on {_span(cost.hull[name])}"
        table.add_row(name, f"{price * 1e6:,.4g} us{unit}")
    table.add_row("host", f"{cost.host * 1e6:,.4g} us between steps")
    for name, (low, high) in cost.bands.items():
        table.add_row(f"{name} steps", f"90 % measured within {low:.3f} to {high:.3f} of the fit")
    console.print(table)


def _sweep(
    setup: Setup, axes: Mapping[str, Sequence[Any]], slo: Slo | None, attainment: float,
    workers: int | None, ray: str | None, state: Path | None, as_json: bool, save: Path | None,
) -> None:  # fmt: skip
    total = 1
    for values in axes.values():
        total *= len(values)
    columns = (TextColumn("settings"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=errors, transient=True, disable=as_json or not errors.is_terminal
    ) as progress:
        task = progress.add_task("", total=total)
        rows = sweep(
            setup, axes, slo, workers=workers or os.cpu_count() or 1, ray=ray, state=state,
            on_row=lambda row: progress.update(task, advance=1),
        )  # fmt: skip
    knees = _knees(rows, axes, attainment) if slo else []
    found = {
        "cost": setup.cost.source,
        "rows": [
            {"setting": row.setting, "error": row.error or None,
             "first_difference": row.first_difference, **row.report}
            for row in rows
        ],
        "knees": [{"setting": a, "holds": b, "fails": c} for a, b, c in knees],
    }  # fmt: skip
    if save is not None:
        save_json(found, save)
    if as_json:
        print(json.dumps(found, indent=2), flush=True)
        return
    Console(highlight=False, width=max(console.width, 150)).print(_table(rows, axes, slo))
    for setting, holds, fails in knees:
        said = ", ".join(f"{name}={value}" for name, value in setting.items()) or "knee"
        console.print(f"{said}: holds at {holds}, fails at {fails}", markup=False)
    console.print(f"cost: {setup.cost.source}", markup=False, style="dim")


def _knees(
    rows: Sequence[Row], axes: Mapping[str, Sequence[Any]], attainment: float
) -> list[tuple[dict[str, Any], Any, Any]]:
    """Per setting of the other axes, the interval of the load; none without an axis of a load."""
    load = next((name for name in axes if name in LOADS), None)
    if load is None:
        return []
    groups: dict[str, list[Row]] = {}
    for row in rows:
        rest = {name: value for name, value in row.setting.items() if name != load}
        groups.setdefault(json.dumps(rest), []).append(row)
    return [
        (json.loads(rest), *knee(sorted(of, key=lambda r: r.setting[load]), load, attainment))
        for rest, of in groups.items()
    ]


def _table(rows: Sequence[Row], axes: Mapping[str, Sequence[Any]], slo: Slo | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("tokens/s", lambda r: f"{r['output_throughput']:,.0f}"),
        ("TTFT p50", lambda r: f"{r['median_ttft_ms']:,.0f}"),
        ("p99 ms", lambda r: f"{r['p99_ttft_ms']:,.0f}"),
        ("ITL p50", lambda r: f"{r.get('median_itl_ms', 0):,.1f}"),
        ("p99 ms", lambda r: f"{r.get('p99_itl_ms', 0):,.1f}"),
        ("preempted", lambda r: f"{r['preemptions']:,}"),
        ("recomputed", lambda r: "-" if r["recomputed_tokens"] is None
         else f"{r['recomputed_tokens']:,}"),
        ("cached", lambda r: f"{r['cached_tokens']:,}"),
    ]  # fmt: skip
    if slo:
        columns.insert(0, ("in SLO", lambda r: f"{r['slo_attainment']:.1%}"))
        columns.insert(0, ("goodput/s", lambda r: f"{r['request_goodput']:.2f}"))
    for name in axes:
        table.add_column(name, justify="right")
    for title, _ in columns:
        table.add_column(title, justify="right")
    table.add_column("first other step", justify="right")
    for number, row in enumerate(rows):
        values = [str(row.setting[name]) for name in axes]
        if row.error:
            table.add_row(*values, row.error)
            continue
        shown = [show(row.report) for _, show in columns]
        first = "-" if number == 0 else "none" if row.first_difference is None else None
        table.add_row(*values, *shown, first or f"{row.first_difference:,}")
    return table


def _show(found: Mapping[str, Any], source: str) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("requests", f"{found['completed']:,}")
    table.add_row("duration", f"{found['duration']:,.2f} s in {found['num_steps']:,} steps")
    table.add_row("output throughput", f"{found['output_throughput']:,.0f} tokens/s")
    for name, title in (
        ("ttft", "time to first token"), ("tpot", "time per output token"),
        ("itl", "inter-token latency"), ("e2el", "whole request"),
    ):  # fmt: skip
        if f"p50_{name}_ms" in found:
            shown = "  ".join(f"p{p} {found[f'p{p}_{name}_ms']:,.1f}" for p in (50, 90, 99))
            table.add_row(title, f"{shown} ms")
    if found["request_goodput"] is not None:
        share = found["slo_attainment"] or 0.0
        table.add_row("goodput", f"{found['request_goodput']:.2f} requests/s, {share:.1%} in SLO")
    table.add_row("prompt tokens cached", f"{found['cached_tokens']:,}")
    recomputed = found["recomputed_tokens"]
    again = "" if recomputed is None else f", {recomputed:,} tokens computed again"
    table.add_row("preemptions", f"{found['preemptions']:,}{again}")
    table.add_row("most at once", f"{found['peak_running']:,} run, {found['peak_waiting']:,} wait")
    if found["skipped_requests"]:
        table.add_row("left out", f"{found['skipped_requests']:,} requests")
    table.add_row("cost", source)
    console.print(table)


def _progress(limit: int | None, quiet: bool) -> Any:
    """A context that gives what `on_end` wants, and shows it."""

    class Bar:
        def __enter__(self) -> Callable[[int], None]:
            columns = (
                TextColumn("requests ended"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
            )  # fmt: skip
            self.progress = Progress(
                *columns, console=errors, transient=True, disable=quiet or not errors.is_terminal
            )
            self.progress.start()
            task = self.progress.add_task("", total=limit)
            return lambda done: self.progress.update(task, completed=done)

        def __exit__(self, *error: object) -> None:
            self.progress.stop()

    return Bar()


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not value:
            raise ValueError(f"--set {text}: need KNOB=VALUE")
        found[name.strip().replace("-", "_")] = _value(value)
    return found


def _axis(text: str) -> tuple[str, list[Any]]:
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ValueError(f"--sweep {text}: need KNOB=V1,V2,...")
    return name.strip().replace("-", "_"), [_value(value) for value in values.split(",")]


def _value(text: str) -> Any:
    """A number, true, false, none, or the text itself."""
    text = text.strip()
    known = {"true": True, "false": False, "none": None}
    if text.lower() in known:
        return known[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _span(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:,.0f} to {bounds[1]:,.0f}"
