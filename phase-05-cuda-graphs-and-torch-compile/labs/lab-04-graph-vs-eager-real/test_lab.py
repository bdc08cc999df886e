"""What lab 05-04 pins: a log read exactly, a step free of what is not the step, effects kept apart.

Every log and every time in this file is made up, in the formats of the pinned version. No engine
ran. `run.py` is tried on a pretended engine (`pretend/vllm.py`). Tests marked `gpu` need a CUDA GPU
and vllm==0.22.1.
"""

from __future__ import annotations

import ast
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import parts
from labkit import refused, same

HERE = Path(__file__).parent
UPSTREAM = HERE.parents[2] / "upstream"
PROCESS = "(EngineCore pid=4242) "
PREFIX = PROCESS + "INFO 01-01 00:00:00 [gpu_model_runner.py:6457] "


def plain(rows) -> list[tuple]:
    return [tuple(row) for row in rows or ()]


def close(got, expected, why: str) -> None:
    assert got is not None and math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12), (
        f"{why}\nexpected {expected:.6g}\ncame     {got}"
    )


def bar(name: str, done: int, total: int) -> str:
    """One update of a tqdm bar, as tqdm writes it."""
    share = 100 * done // total
    filled = "█" * (share // 10)
    return (
        f"\rCapturing CUDA graphs ({name}): {share:3d}%|{filled:<10}| {done}/{total} "
        "[00:01<00:01, 25.34it/s]"
    )


def bars(name: str, total: int) -> str:
    updates = "".join(bar(name, done, total) for done in (0, total // 3, total))
    return PROCESS + updates + "\n"  # the process names itself once per line, before the first \r


# --- Part A ---------------------------------------------------------------------------------------


def test_bars_of_the_default(lab):
    text = (
        PREFIX + "Estimated CUDA graph memory: 0.41 GiB total\n"
        + bars("mixed prefill-decode, PIECEWISE", 51)
        + bars("decode, FULL", 35)
        + PREFIX + "Graph capturing finished in 5 secs, took 0.39 GiB\n"
    )  # fmt: skip
    same(
        plain(lab.parse_progress(text)),
        [("mixed prefill-decode", "PIECEWISE", 51, 51), ("decode", "FULL", 35, 35)],
        "two bars, each rewritten three times on its line: (label, mode, done, total) of the last "
        "update of each, in order.",
    )


def test_bars_of_the_second_runner(lab):
    text = bars("PIECEWISE", 51) + bars("FULL", 51)
    same(
        plain(lab.parse_progress(text)),
        [(None, "PIECEWISE", 51, 51), (None, "FULL", 51, 51)],
        "model runner V2 names the mode only: the label is None.",
    )


def test_a_bar_that_stopped(lab):
    text = (
        bar("mixed prefill-decode, PIECEWISE", 0, 51)
        + bar("mixed prefill-decode, PIECEWISE", 17, 51)
        + "\ntorch.OutOfMemoryError: CUDA out of memory.\n"
    )
    same(
        plain(lab.parse_progress(text)),
        [("mixed prefill-decode", "PIECEWISE", 17, 51)],
        "out of memory while capturing: the bar stands at 17 of 51, and that is what to report.",
    )


def test_bars_of_two_engines(lab):
    text = bars("decode, FULL", 35) + "INFO another engine\n" + bars("decode, FULL", 19)
    same(
        plain(lab.parse_progress(text)),
        [("decode", "FULL", 35, 35), ("decode", "FULL", 19, 19)],
        "done fell from 35 to 0, which a bar never does: the log holds two engines.",
    )
    mixed = bar("decode, FULL", 0, 9) + "\nWARNING something\n" + bar("decode, FULL", 9, 9)
    same(
        plain(lab.parse_progress(mixed)),
        [("decode", "FULL", 9, 9)],
        "a line between two updates ends nothing.",
    )
    again = bars("decode, FULL", 35) + bar("decode, FULL", 35, 35) + "\n" + bars("decode, FULL", 35)
    same(
        plain(lab.parse_progress(again)),
        [("decode", "FULL", 35, 35)] * 2,
        "the last update written twice is the same bar: 35 has not fallen. Then it does fall, "
        "to 0, and a second engine with as many rungs has begun.",
    )
    bare = (
        "Capturing CUDA graphs (decode, FULL):  46%|#### | 16/35 [00:01<00:01, 15.9it/s]\n"
        "Capturing CUDA graphs (PIECEWISE): 100%|#####| 51/51 [00:02<00:00, 20.1it/s]"
    )
    same(
        plain(lab.parse_progress(bare)),
        [("decode", "FULL", 16, 35), (None, "PIECEWISE", 51, 51)],
        "a log collector turns carriage returns into lines: nothing stands in front of these.",
    )
    other = "Loading safetensors checkpoint shards: 100%|####| 1/1 [00:00<00:00, 9.1it/s]\n"
    same(plain(lab.parse_progress(other)), [], "a bar of something else is not a capture.")


def test_bars_of_every_recorded_mode(lab):
    cases = parts.load("cudagraph_modes")
    usual = {"kind": "ladder", "max_num_batched_tokens": 8192, "query_len": 1}
    ladders = {
        case["max_num_seqs"]: case["sizes"]
        for case in cases
        if case.get("performance_mode") == "balanced" and usual.items() <= case.items()
    }
    for case in cases:
        if case["kind"] != "dispatch":
            continue
        sizes = ladders[case["max_num_seqs"]]
        expected = lab.expected_passes(case["mode"], sizes, case["max_num_seqs"])
        recorded = [(mode, len(rungs)) for mode, rungs in case["passes"]]
        shown = "".join(bars(f"{label}, {mode}", rungs) for label, mode, rungs in expected)
        got = [(b[1], b[3]) for b in plain(lab.parse_progress(shown))]
        same(
            got,
            recorded,
            f"{case['mode']}, max_num_seqs {case['max_num_seqs']}: the bars of the expected "
            f"passes, read back, against what the real dispatcher lists.",
        )


def test_graphs_behind_the_bars(lab):
    default = lab.parse_progress(
        bars("mixed prefill-decode, PIECEWISE", 51) + bars("decode, FULL", 35)
    )
    same(
        (lab.num_graphs(default, 12), lab.num_graphs(default, 4)),
        (698, 290),
        "OPT-125m has 12 layers, so 13 pieces on 51 rungs, and 35 full graphs: 51 x 13 + 35. "
        "byte-llama has 4: 51 x 5 + 35. Rungs are not graphs.",
    )  # fmt: skip
    second = lab.parse_progress(bars("PIECEWISE", 51) + bars("FULL", 51))
    mixed = lab.parse_progress(bars("mixed prefill-decode, FULL", 51))
    same(
        (lab.num_graphs(second, 12), lab.num_graphs(mixed, 12)),
        (714, 51),
        "(model runner V2: 51 x 13 + 51; the mode FULL: 51): the mode counts, not the label.",
    )
    same(lab.num_graphs([], 12), 0, "no bars, no graphs.")


def test_graphs_of_a_bar_that_stopped(lab):
    for text, what in (
        (bar("decode, FULL", 17, 35), "a bar that stopped at 17 of 35, out of memory perhaps,"),
        (bar("decode, FULL", 0, 35), "a bar that stopped at 0 of 35"),
        (bars("NONE", 3), "a bar of a mode that captures nothing"),
    ):
        found = lab.parse_progress(text)
        refused(lambda found=found: lab.num_graphs(found, 12), what)


def test_the_startup_lines(lab):
    text = "\n".join(
        PREFIX + line
        for line in (
            "Dynamo bytecode transform time: 3.41 s",
            "Compiling a graph for compile range (1, 8192) takes 9.87 s",
            "torch.compile took 14.02 s in total",
            "Profiling CUDA graph memory: PIECEWISE=51 (largest=512), FULL=35 (largest=256)",
            "Estimated CUDA graph memory: 0.41 GiB total",
            "Graph capturing finished in 5 secs, took 0.39 GiB",
            "CUDA graph pool memory: 0.39 GiB (actual), 0.41 GiB (estimated), difference: 0.02 GiB "
            "(5.1%).",
        )
    )
    same(
        tuple(lab.read_startup(text) or ()),
        (14.02, 5.0, 0.39, 0.41, False, False, False),
        "a cold start: compile 14.02 s in total (not the parts), capture 5 s and 0.39 GiB, 0.41 "
        "GiB estimated; not from the cache, not eager, not skipped.",
    )


def test_the_startup_lines_of_other_arms(lab):
    eager = (
        "WARNING Enforce eager set, disabling torch.compile and CUDAGraphs. This is equivalent to "
        "setting -cc.mode=none -cc.cudagraph_mode=none\nINFO Cudagraph is disabled under eager mode"
    )
    same(
        tuple(lab.read_startup(eager) or ()),
        (None, None, None, None, False, True, False),
        "arm A: neither, and no warning about a skipped capture, since nothing tried. Missing "
        "numbers are None, not 0.",
    )
    warm = (
        "INFO Directly load AOT compilation from path /root/x/model\n"
        "INFO torch.compile took 1.05 s in total\n"
        "WARNING Skipping CUDA graph capture. To turn on CUDA graph capture, ensure\n"
    )
    same(
        tuple(lab.read_startup(warm) or ()),
        (1.05, None, None, None, True, False, True),
        "arm C, second start: compiled code was loaded, captures skipped.",
    )
    twice = (
        "torch.compile took 14.02 s in total\n"
        "Estimated CUDA graph memory: 0.41 GiB total\n"
        "Graph capturing finished in 5 secs, took 0.39 GiB\n"
        "torch.compile took 1.05 s in total\n"
        "Estimated CUDA graph memory: -0.01 GiB total\n"
        "Graph capturing finished in 21 secs, took -0.02 GiB\n"
    )
    same(
        tuple(lab.read_startup(twice) or ())[:4],
        (1.05, 21.0, -0.02, -0.01),
        "two engines in a log, (compile, capture, its GiB, estimated GiB): the last of each line "
        "counts. Memory is a difference of two readings and can be negative when somebody else "
        "frees some.",
    )


def test_the_padding_table(lab):
    rows = (
        "**CUDAGraph Stats:**",
        "",
        "| Unpadded Tokens | Padded Tokens | Num Paddings | Runtime Mode | Count |",
        "|-----------------|---------------|--------------|--------------|-------|",
        "| 33              | 40            | 7            | FULL         | 383   |",
        "| 528             | 528           | 0            | NONE         | 1     |",
        "| 5               | 8             | 3            | PIECEWISE    | 2     |",
    )
    text = "\n".join(PREFIX + row for row in rows)
    again = "\n" + PREFIX + "| 33 | 40 | 7 | FULL | 17 |\n"
    other = lab.parse_padding(rows[4] + "\n" + rows[4].replace("FULL     ", "PIECEWISE"))
    same(
        plain(other),
        [(33, 40, "FULL", 383), (33, 40, "PIECEWISE", 383)],
        "equal rows are equal in their mode as well.",
    )
    got = lab.parse_padding(text + again)
    same(
        plain(got),
        [(33, 40, "FULL", 400), (528, 528, "NONE", 1), (5, 8, "PIECEWISE", 2)],
        "the log's prefix stands before every line of a table; the second table adds 17 steps.",
    )
    close(
        lab.padding_share(got),
        2806 / 13738,
        "(7 x 400 + 0 + 3 x 2) rows added to 33 x 400 + 528 + 5 x 2 real ones: weighted by steps, "
        "over the real rows.",
    )
    close(lab.padding_share([]), 0.0, "no steps, no padding.")


# --- Part B ---------------------------------------------------------------------------------------


def test_a_decode_step_by_difference(lab):
    close(
        lab.step_ms(0.6, 1.5, 128, 384),
        3.515625,
        "a run of 128 tokens takes 0.6 s, one of 384 takes 1.5 s: 0.9 s are 256 steps. Prefill and "
        "start-up are in both and cancel; 1.5 s / 384 would count them as decode.",
    )
    for short, long in ((128, 128), (384, 128)):
        refused(
            lambda short=short, long=long: lab.step_ms(0.6, 1.5, short, long),
            f"a long run of {long} tokens beside a short one of {short}",
        )


def test_a_summary_is_not_a_mean(lab):
    same(
        tuple(lab.summarize([2.0, 2.1, 9.0, 2.2, 1.9]) or ()),
        (2.1, 1.9, 9.0),
        "one of five runs met something else on the machine: the median does not move, the spread "
        "tells.",
    )
    same(
        tuple(lab.summarize([5.0, 1.0, 2.0, 9.0, 3.0, 4.0]) or ()),
        (3.5, 1.0, 9.0),
        "of six samples the median lies half-way between the third and the fourth.",
    )
    for count in range(5):
        refused(lambda n=count: lab.summarize([1.0] * n), f"a summary of {count} samples")


STEPS = {
    "A": {1: 2.0, 8: 2.0, 64: 2.4},
    "B": {1: 0.5, 8: 0.8, 64: 2.0},
    "C": {1: 1.2, 8: 1.2, 64: 2.0},
    "D": {1: 0.8, 8: 1.0},
}
"""Made up."""


def rounded(effects):
    """Nine digits, so that the way of dividing does not matter."""
    return {name: {n: round(v, 9) for n, v in row.items()} for name, row in (effects or {}).items()}


def test_effects_are_pairs_of_arms(lab):
    same(
        rounded(lab.ratios(STEPS)),
        {
            "everything, A to B": {1: 4.0, 8: 2.5, 64: 1.2},
            "graphs, C to B": {1: 2.4, 8: 1.5, 64: 1.0},
            "compiler, D to B": {1: 1.6, 8: 1.25},
        },
        "each effect changes one thing: graphs from C (compiled, no graphs) to B, the compiler "
        "from D (graphs, not compiled) to B. E was not run, and D not at 64: left out, not 0.",
    )


def test_effects_keep_their_order(lab):
    one = {1: 1.0, 8: 1.0, 64: 1.0}
    steps = {"D": one, "B": one, "C": {64: 2.0, 1: 2.0}, "A": {8: 3.0, 64: 3.0, 1: 3.0}}
    got = [(name, list(row)) for name, row in (lab.ratios(steps) or {}).items()]
    same(
        got,
        [
            ("everything, A to B", [8, 64, 1]),
            ("graphs, C to B", [64, 1]),
            ("compiler, D to B", [1, 8, 64]),
        ],
        "effects in the order of EFFECTS, batches in that of the arm without: a table prints them "
        "as they come.",
    )


def test_effects_can_be_losses(lab):
    same(
        rounded(lab.ratios({"C": {64: 1.0}, "B": {64: 1.25}})),
        {"graphs, C to B": {64: 0.8}},
        "padding or less memory for the cache can make graphs a loss. Report it.",
    )


def test_the_floor_by_hand(lab):
    weights = 2 * (12 * (4 * (768 * 768 + 768) + 2 * 768 * 3072 + 3072 + 768 + 4 * 768) + 1536
                   + 50272 * 768)  # fmt: skip
    same(weights, 247_329_792, "OPT-125m in float16: 12 layers, final norm, output head.")
    close(
        lab.bandwidth_floor_ms(weights, 300e9),
        0.82443264,
        "247,329,792 bytes at 300 GB/s (an L4): no step is shorter, so at most 1,213 tokens/s at "
        "batch 1.",
    )
    close(lab.bandwidth_floor_ms(weights, 4.8e12), 0.05152704, "at 4.8 TB/s (an H200).")


def test_impossible_numbers_are_flagged(lab):
    floor = lab.bandwidth_floor_ms(247_329_792, 300e9)
    claimed = {1: 2473.6, 8: 11035.0, 64: 46883.0}  # tokens/s
    steps = {"graph": {batch: batch / rate * 1e3 for batch, rate in claimed.items()}}
    same(
        lab.flag_impossible(steps, floor),
        [("graph", 1), ("graph", 8)],
        "2,473.6, 11,035 and 46,883 tokens/s at batch 1, 8 and 64, claimed for OPT-125m on an L4. "
        "A step takes batch / rate: 0.404 and 0.725 ms are below the 0.824 ms that reading the "
        "weights takes, 1.365 ms is not. A batch shares one reading.",
    )
    same(
        lab.flag_impossible({"B": {1: floor}}, floor),
        [],
        "exactly the floor is possible.",
    )


def test_the_plateau_of_an_arm(lab):
    steps = {64: 3.0, 1: 2.0, 8: 2.05, 32: 2.19, 33: 2.21, 128: 2.0}
    same(
        lab.plateau(steps),
        [1, 8, 32],
        "2.0, 2.05 and 2.19 ms are within 10 % of the smallest batch's; 2.21 is not, and what "
        "comes after it is off the plateau, whatever it measures.",
    )
    same(lab.plateau(steps, 0.5), [1, 8, 32, 33, 64, 128], "within 50 %: all.")
    same(lab.plateau({4: 1.0, 8: 0.5}), [4, 8], "faster is not slower.")


# --- the pinned tree, and run.py without a GPU ----------------------------------------------------


def strings(path: str) -> list[str]:
    tree = ast.parse((UPSTREAM / path).read_text(encoding="utf-8"))
    return [
        n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    ]


def test_the_formats_are_those_of_the_pinned_tree(lab):
    if not (UPSTREAM / "vllm").is_dir():
        pytest.skip("the pinned tree is not here: course upstream fetch")
    runner = strings("vllm/v1/worker/gpu_model_runner.py")
    config = strings("vllm/config/vllm.py")

    def starting(texts: list[str], words: str) -> str:
        return next(text for text in texts if text.startswith(words))

    name = starting(runner, "Capturing CUDA graphs").format("decode", "FULL")
    text = f"\r{name}: 100%|##########| 35/35 [00:01<00:00, 25.34it/s]"
    same(
        plain(lab.parse_progress(text)), [("decode", "FULL", 35, 35)], f"the tree's own bar: {text}"
    )
    lines = [
        starting(strings("vllm/compilation/monitor.py"), "torch.compile took") % 14.02,
        starting(runner, "Graph capturing finished") % (5, 0.39),
        starting(runner, "Estimated CUDA graph memory") % 0.41,
        starting(strings("vllm/compilation/decorators.py"), "Directly load AOT") % "/x/model",
        starting(config, "Enforce eager set"),
        starting(runner, "Skipping CUDA graph capture"),
    ]
    same(
        tuple(lab.read_startup("\n".join(lines)) or ()),
        (14.02, 5.0, 0.39, 0.41, True, True, True),
        f"the pinned tree's own templates, filled in: {lines}.",
    )


def started(lab, *arguments: str) -> str:
    """What run.py says; fails with its last lines if it does not end well."""
    done = subprocess.run(
        [sys.executable, str(HERE / "run.py"), "--file", lab.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, "run.py failed with your file; its last lines:\n" + "\n".join(
        done.stdout.splitlines()[-15:]
    )
    return done.stdout


@pytest.mark.slow
def test_run_on_a_pretended_engine(lab):
    said = started(
        lab, "--pretend", "--arms", "A", "B", "C", "--batches", "1", "33", "--repeats", "5",
        "--bandwidth", "50e9",
    )  # fmt: skip
    for words in (
        "a pretended device: nothing here is measured",
        "log says (mixed prefill-decode, PIECEWISE) 51/51",
        "batch   33  step   0.2100 ms",
        "everything, A to B   1: 5.91  33: 2.62",
        "graphs, C to B       1: 3.23  33: 1.43",
        "IMPOSSIBLE from memory: arm B, batch 1",
        "290 graphs captured, 290 behind the bars",
        "33 tokens ran as 40, FULL, 63 steps",
    ):
        assert words in said, (
            f"run.py --pretend, three arms of an engine whose numbers are invented, must print "
            f"{words!r}. It printed:\n{said}"
        )
    assert "DIFFERS" not in said, f"expected and logged bars must agree. It printed:\n{said}"


# --- on a GPU -------------------------------------------------------------------------------------


def real_arm(lab, arm: str, *arguments: str) -> tuple[dict, str]:
    """One real engine; its result and its log."""
    pytest.importorskip("vllm")
    sizes = ("--repeats", "5", "--batches", "1", "--short", "128", "--long", "384")
    said = started(lab, "--one", arm, *sizes, *arguments)
    line = [line for line in said.splitlines() if line.startswith("RESULT ")][-1]
    return json.loads(line.removeprefix("RESULT ")), said


@pytest.mark.gpu
def test_the_real_captures(lab, gpu_device):
    result, said = real_arm(lab, "B", "--count")
    found = lab.parse_progress(said)
    same(
        [(b.mode, b.done) for b in found],
        [(mode, n) for _, mode, n in lab.expected_passes(
            result["mode"], result["sizes"], result["max_num_seqs"])],
        "the bars of a real start against the passes of its mode; a difference means that the "
        "backend has changed the mode",
    )  # fmt: skip
    same(
        lab.num_graphs(found, result["layers"]),
        result["graphs"],
        "graphs behind the bars against the engine's own counter",
    )


@pytest.mark.gpu
def test_graphs_do_not_slow_a_batch_of_one(lab, gpu_device):
    steps = {}
    for arm in ("A", "B"):
        result, said = real_arm(lab, arm)
        pairs = result["timings"]["1"]
        steps[arm] = {1: lab.summarize([lab.step_ms(*pair, 128, 384) for pair in pairs]).median}
        same(lab.read_startup(said).eager, arm == "A", f"arm {arm}: whether the log says eager")
    ratio = lab.ratios(steps)["everything, A to B"][1]
    assert ratio >= 1, (
        "byte-llama at batch 1 is all launches, so eager must not be faster; came "
        f"{ratio:.2f} from {steps}"
    )
