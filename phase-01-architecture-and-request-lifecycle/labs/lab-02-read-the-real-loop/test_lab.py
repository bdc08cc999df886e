"""What lab 01-02 pins: every line of a real log has a source, and its numbers add up."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from conformance import parts

HERE = Path(__file__).parent
UPSTREAM = HERE.parents[2] / "upstream"
GENERATED = (HERE / "generated.txt").read_text(encoding="utf-8").splitlines()

ITERATION = (
    "Iteration(0): 1 context requests, 6 context tokens, 0 generation requests, "
    "0 generation tokens, iteration elapsed time: 12.34 ms"
)
BATCH = (
    "Running batch with cudagraph_mode: FULL, batch_descriptor: BatchDescriptor(num_tokens=8, "
    "num_reqs=1), should_ubatch: False, num_tokens_across_dp: None"
)


def test_an_iteration_line_gives_its_numbers(lab):
    got = lab.parse_iteration(ITERATION)
    assert got == (0, 1, 6, 0, 0, 12.34), (
        "iteration 0 computed 6 prompt tokens of one request in 12.34 ms.\n"
        f"expected (0, 1, 6, 0, 0, 12.34)\ncame     {got}"
    )
    assert type(got.elapsed_ms) is float and type(got.index) is int, (
        f"counts are int, milliseconds float, not text; came {got}"
    )


def test_other_messages_are_no_iterations(lab):
    for message in (
        "EngineCore loop active.",
        ITERATION.replace(" context tokens", " tokens"),
        "so " + ITERATION,
        ITERATION + "?",
        BATCH,
        "",
    ):
        got = lab.parse_iteration(message)
        assert got is None, (
            f"not an Iteration line as this version prints it: {message!r}; expected None, came "
            f"{got}. A padded batch_descriptor is not what was scheduled"
        )
    assert lab.parse_iteration(ITERATION) is not None, "the line itself must still parse"


def test_a_line_comes_apart(lab):
    text = f"(EngineCore pid=4242) INFO 01-01 00:00:00 [v1/engine/core.py:407] {ITERATION}"
    got = lab.parse_line(text + "\n")
    expected = ("EngineCore", "INFO", "v1/engine/core.py", 407, ITERATION)
    assert got == expected, (
        "a line of the child process: prefix, level, date, file and line, message.\n"
        f"expected {expected}\ncame     {got}"
    )


def test_lines_without_a_prefix_come_from_this_process(lab):
    got = lab.parse_line("WARNING 11-20 09:08:07 [utils.py:12] a [b:3] c")
    expected = (None, "WARNING", "utils.py", 12, "a [b:3] c")
    assert got == expected, (
        "no prefix: the process is None. Above DEBUG the file is a bare name, and a message may "
        f"hold brackets of its own.\nexpected {expected}\ncame     {got}"
    )
    got = lab.parse_line("(Worker_TP0 pid=7) DEBUG 11-20 09:08:07 [v1/.../gpu/x.py:1] ")
    expected = ("Worker_TP0", "DEBUG", "v1/.../gpu/x.py", 1, "")
    assert got == expected, f"an empty message is a message.\nexpected {expected}\ncame     {got}"
    for text in ("", "Traceback (most recent call last):", "INFO: uvicorn running", "  more text"):
        got = lab.parse_line(text)
        assert got is None, f"{text!r} does not begin a log message; expected None, came {got}"


def test_a_template_becomes_a_pattern(lab):
    cases = (
        ("took %.2f s", "took 12.50 s", ("12.50",)),
        ("took %.2f s", "took 12.5 s", None),
        ("cache: %s GiB", "cache: 4.83 GiB", ("4.83",)),
        ("a (b) %s.", "a (b) c.", ("c",)),
        ("a (b) %s.", "a (b) cx", None),
        ("usage: %.1f%%, %d reqs", "usage: 3.0%, 12 reqs", ("3.0", "12")),
        ("usage: %.1f%%, %d reqs", "usage: 3.0%, 1.5 reqs", None),
        ("%s", "", ("",)),
    )
    for template, message, expected in cases:
        match = lab.template_regex(template).fullmatch(message)
        got = match.groups() if match else None
        assert got == expected, (
            f"template {template!r} and message {message!r}: dots and brackets stand for "
            f"themselves, fields are groups.\nexpected {expected}\ncame     {got}"
        )


def test_every_template_matches_what_it_prints(lab):
    for source in lab.SOURCES:
        fields = source.template.replace("%%", "").count("%")
        pattern = lab.template_regex(source.template)
        assert pattern.groups == fields, (
            f"{source.path}:{source.line}: one group per field, {fields}; came {pattern.groups}"
        )
        args = []
        for piece in source.template.replace("%%", "").split("%")[1:]:
            args.append("x (y)" if piece[0] == "s" else 3 if piece[0] == "d" else 2.0)
        message = source.template % tuple(args)
        assert pattern.fullmatch(message), (
            f"{source.path}:{source.line} prints {message!r}, and its own pattern does not match"
        )


def test_each_message_goes_to_its_call(lab):
    cases = {
        "Asynchronous scheduling is disabled.": ("vllm/config/vllm.py", 977),
        "GPU KV cache size: 140,608 tokens": ("vllm/v1/core/kv_cache_utils.py", 1733),
        ITERATION: ("vllm/v1/engine/core.py", 407),
        BATCH: ("vllm/v1/worker/gpu_model_runner.py", 4069),
        "EngineCore loop active.": ("vllm/v1/engine/core.py", 1227),
        "EngineCore step: req-0 running": None,
        "Finished request req-0": None,
    }
    for message, expected in cases.items():
        source = lab.attribute(message)
        got = None if source is None else (source.path, source.line)
        assert got == expected, (
            f"{message!r}\nexpected {expected}\ncame     {got}\n(no line of this version announces "
            "one request's step or end)"
        )


def test_the_most_specific_template_wins(lab):
    general, special = lab.Source("a.py", 1, "took %s"), lab.Source("b.py", 2, "took %.2f s")
    for sources in ((general, special), (special, general)):
        got = lab.attribute("took 1.00 s", sources)
        assert got == special, (
            "both templates match; the one with more text of its own printed it, in whatever "
            f"order they are listed.\nexpected {special}\ncame     {got}"
        )
    long_field = lab.Source("c.py", 3, "t%s%s%s%s%s")
    got = lab.attribute("took 1.00 s", (long_field, general))
    assert got == general, (
        "five fields are ten characters of template and one character of its own: the fields do "
        f"not count.\nexpected {general}\ncame     {got}"
    )


def test_every_generated_line_is_attributed(lab):
    for text in GENERATED:
        line = lab.parse_line(text)
        assert line is not None, f"this line must come apart: {text!r}"
        source = lab.attribute(line.message)
        assert source is not None, f"this message has a source: {line.message!r}; came None"
        assert (source.line, source.path.endswith(line.file)) == (line.line, True), (
            f"the line itself says [{line.file}:{line.line}]; attribute says "
            f"{source.path}:{source.line}, for {line.message!r}"
        )


def test_sixteen_steps_not_seventeen(lab):
    got = lab.count_work(GENERATED)
    assert got == (16, 21), (
        "6 prompt tokens, 16 outputs: one step reads the prompt and samples, 15 follow, and "
        "6 + 16 - 1 = 21 tokens are computed. The last Iteration line has no tokens: it only "
        f"passes on that the request ended.\nexpected (16, 21)\ncame     {tuple(got)}"
    )


def test_counting_passes_over_other_lines(lab):
    lines = ["Traceback", "", "INFO 01-01 00:00:00 [x.py:1] Iteration of something", ITERATION]
    got = lab.count_work(lines)
    assert got == (0, 0), (
        "four lines without an iteration as the log prints it (the last lacks level and date): "
        f"expected (0, 0), came {tuple(got)}"
    )
    mixed = (
        "INFO 01-01 00:00:00 [core.py:407] Iteration(7): 2 context requests, 30 context tokens, "
        "3 generation requests, 3 generation tokens, iteration elapsed time: 0.50 ms"
    )
    got = lab.count_work(iter([mixed, mixed]))
    assert got == (2, 66), (
        f"two steps of 30 + 3 tokens, from an iterator: expected (2, 66), came {tuple(got)}"
    )


def test_capacity_of_a_pool(lab):
    for arguments, expected in (
        ((8788, 16, 256), (549.25, 140_608)),
        ((8788, 16, 250), (549.25, 137_312)),
        ((1, 16, 16), (1.0, 16)),
        ((1, 16, 17), (0.5, 8)),
    ):
        got = lab.kv_capacity(*arguments)
        assert got == expected, (
            f"{arguments[0]} blocks of {arguments[1]}, max_model_len={arguments[2]}: a request "
            f"takes whole blocks.\nexpected {expected}\ncame     {got}"
        )
    for bad in ((0, 16, 256), (8, 0, 256), (8, 16, 0)):
        try:
            got = lab.kv_capacity(*bad)
        except ValueError:
            continue
        pytest.fail(f"kv_capacity{bad} must raise ValueError; it gave {got!r}", pytrace=False)


def test_capacity_equals_the_recorded_one(lab):
    for case in parts.load("kv_capacity"):
        arguments = (case["num_blocks"], case["block_size"], case["max_model_len"])
        got, _ = lab.kv_capacity(*arguments)
        assert got == pytest.approx(case["max_concurrency"], rel=1e-12), (
            f"blocks, block size, max_model_len = {arguments}: the real code says "
            f"{case['max_concurrency']}, you have {got}"
        )


def message_of(call: ast.Call) -> str | None:
    """The constant message of a logging call; fields of a `"".join([...])` become %s."""
    if not call.args:
        return None
    first = call.args[0]
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return first.value
    if isinstance(first, ast.Call) and first.args and isinstance(first.args[0], ast.List):
        return "".join(
            item.value if isinstance(item, ast.Constant) else "%s" for item in first.args[0].elts
        )
    return None


def test_the_sources_are_the_calls_of_the_pinned_tree(lab):
    assert lab.template_regex("a%s").fullmatch("ab"), "template_regex is needed here"
    if not (UPSTREAM / "vllm").is_dir():
        pytest.skip("upstream/ is absent: course upstream fetch")
    for source in lab.SOURCES:
        tree = ast.parse((UPSTREAM / source.path).read_text(encoding="utf-8"))
        calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and n.lineno == source.line]
        if source.path.endswith("loggers.py"):
            # Put together from a list of parts: each part stands in the file by itself.
            text = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant)}
            missing = [p for p in source.template.split(": ", 1)[1].split(", ") if p not in text]
            assert calls and not missing, f"{source.path}:{source.line}: not there: {missing}"
            continue
        messages = [message_of(call) for call in calls]
        assert source.template in messages, (
            f"{source.path}:{source.line} in the pinned tree logs {messages}, not "
            f"{source.template!r}"
        )


@pytest.mark.upstream
def test_the_generated_lines_are_what_the_real_code_prints(lab):
    environment = {"PYTHONPATH": f"{HERE.parents[2]}:{UPSTREAM}"}
    code = (
        "import runpy, sys; g = runpy.run_path(sys.argv[1]); "
        "open(sys.argv[2], 'w', encoding='utf-8').write(g['generate']())"
    )
    import os
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "again.txt"
        command = [sys.executable, "-c", code, str(HERE / "make_log.py"), str(target)]
        subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True)
        again = target.read_text(encoding="utf-8").splitlines()
    assert again == GENERATED, (
        "make_log.py prints other lines than generated.txt holds; run it and commit the result"
    )
    assert lab.count_work(again) == (16, 21), "16 steps and 21 tokens"


def measured(*part: str) -> dict:
    """The JSON that a part of run.py prints last; skips where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (pip install -e '.[vllm]')")
    command = [sys.executable, str(HERE / "run.py"), *part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run.py {part} failed:\n{done.stderr[-2000:]}"
    return json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])


@pytest.mark.gpu
def test_the_real_engine_takes_sixteen_steps(lab, gpu_device):
    got = measured("--part", "probe")["alone"]
    shares = [sum(row.values()) for row in got["rows"]]
    assert shares == [24] + [1] * 15, (
        "24 bytes of prompt are 24 tokens for byte-llama: one step of 24 and 15 of one; "
        f"came {shares}"
    )
    assert (got["finish_reasons"], len(got["token_ids"][0])) == (["length"], 16), (
        f"16 tokens and 'length'; came {got['finish_reasons']}, {got['token_ids']}"
    )
    assert len(got["ids"]) == 1 and got["ids"][0].startswith("0-"), (
        f"one request, whose id is its number and a random tail; came {got['ids']}"
    )
    assert lab.kv_capacity(1, 16, 16) == (1.0, 16), "kv_capacity is needed here"


@pytest.mark.gpu
def test_the_real_engine_plans_lab_04(lab, gpu_device):
    got = measured("--part", "pair")["pair"]
    names = dict(zip(got["ids"], "AB", strict=True))
    rows = [{names[name]: count for name, count in row.items()} for row in got["rows"]]
    expected = [
        {"A": 8}, {"A": 3, "B": 5}, {"A": 1, "B": 2}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"B": 1},
    ]  # fmt: skip
    assert rows == expected, (
        f"the rows of lab 01-04, from the real scheduler.\nexpected {expected}\ncame     {rows}"
    )
    assert lab.kv_capacity(1, 16, 16) == (1.0, 16), "kv_capacity is needed here"
