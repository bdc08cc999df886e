"""What lab 19-01 pins: a plan's gaps by name, the first check that fails, the jobs of a diff."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from labkit import same

HERE = Path(__file__).resolve().parent / "recordings"
GOOD = (HERE / "plan-39734.txt").read_text(encoding="utf-8")
HEADS = (
    "Issue:", "Reproduced at:", "Cause (file:line):", "Fix sketch:", "Test plan:",
    "Blast radius:", "Out of scope:", "Open questions for maintainers:",
)  # fmt: skip


@cache
def areas() -> Any:
    """The steps of the pin's CI; `ci_areas.py` made it from the YAML files."""
    return json.loads((HERE / "areas.json").read_text(encoding="utf-8"))


def field(name: str) -> str:
    """The whole field of the good plan, head and text."""
    place = HEADS.index(name)
    end = GOOD.index(HEADS[place + 1]) if place + 1 < len(HEADS) else len(GOOD)
    return GOOD[GOOD.index(name) : end]


def given(name: str, text: str) -> str:
    """The good plan with another text in one field."""
    return GOOD.replace(field(name), f"{name} {text}\n")


def test_good_plan_passes(lab):
    """A rule that a plan fit to be posted breaks."""
    same(lab.lint_plan(GOOD), [], "the plan of recordings/plan-39734.txt:")
    short = "\n".join((
        "Issue: #7, a title", "Reproduced at: 0decac0", "Cause (file:line): a/b.py:3 forgets",
        "Fix sketch: remember", "Test plan: tests/test_b.py asserts that it does",
        "Blast radius: TP none, quantization none, LoRA none, speculation checked",
        "Out of scope: speed", "Open questions for maintainers: none",
    ))  # fmt: skip
    same(lab.lint_plan(short), [], f"{short!r}:")
    for name, text in (
        ("Test plan:", "tests/v1/core/test_scheduler.py: EXPECT three steps"),
        ("Blast radius:", "tp none, QUANT none, lora none, Spec none"),
        ("Fix sketch:", "see Out of scope: it says what is left"),
    ):
        same(lab.lint_plan(given(name, text)), [], f"{name} {text!r} in the good plan:")
    fill = " word" * (450 - len(GOOD.split()))
    same(lab.lint_plan(GOOD + fill), [], "the good plan, 450 words:")
    same(lab.lint_plan(f"{GOOD}{fill} word"), ["too-long"], "the good plan, 451 words:")


def test_each_code_is_found(lab):
    """Its own words, and no code besides."""
    for name, text, code in (
        ("Issue:", "it hangs", "no-issue-number"),
        ("Issue:", "39734, it hangs", "no-issue-number"),
        ("Reproduced at:", "main, last week", "no-commit"),
        ("Cause (file:line):", "the scheduler forgets", "cause-without-location"),
        ("Cause (file:line):", "scheduler.py, somewhere", "cause-without-location"),
        ("Cause (file:line):", "scheduler:548", "cause-without-location"),
        ("Test plan:", "a test asserts it", "test-without-file"),
        ("Test plan:", "asserts it in tests/v1/core", "test-without-file"),
        ("Test plan:", "tests/test_a.py, unequal lengths", "test-without-assertion"),
        ("Test plan:", "tests/v1/core/test_scheduler.py runs", "test-without-assertion"),
        ("Blast radius:", "TP none, quant none, LoRA none", "blast-radius-incomplete"),
        ("Blast radius:", "a specific one, TP, quant, LoRA", "blast-radius-incomplete"),
        ("Blast radius:", "HTTP, quant, LoRA, spec", "blast-radius-incomplete"),
        ("Blast radius:", "TP, quant, FloRA, spec", "blast-radius-incomplete"),
        ("Out of scope:", " - ", "empty-out-of-scope"),
        ("Open questions for maintainers:", "\n- a?\n- b?\n- c?", "too-many-questions"),
        ("Fix sketch:", "word " * 451, "too-long"),
    ):
        same(lab.lint_plan(given(name, text)), [code], f"{name} {text[:60]!r} in the good plan:")


def test_missing_field_reported_once(lab):
    """A field that is not there, reported again for what it would have held."""
    for name in HEADS:
        came = lab.lint_plan(GOOD.replace(field(name), ""))
        same(came, [f"missing:{name[:-1]}"], f"the good plan without {name!r}:")
    small = GOOD.replace("Issue:", "issue:")
    same(lab.lint_plan(small), ["missing:Issue"], "the good plan with `issue:` for `Issue:`:")
    same(lab.lint_plan(""), sorted(f"missing:{name[:-1]}" for name in HEADS), "an empty plan:")


def test_order_of_the_fields(lab):
    """A reviewer looks for each field at its place."""
    swapped = GOOD.replace(field("Issue:"), "") + field("Issue:")
    same(lab.lint_plan(swapped), ["order"], "the good plan with Issue at the end:")
    twice = GOOD + "\n" + field("Issue:")
    same(lab.lint_plan(twice), ["order"], "the good plan with a second Issue at the end:")
    twice = field("Issue:") + GOOD
    same(lab.lint_plan(twice), ["order"], "the good plan with Issue twice at the beginning:")
    both = ["missing:Fix sketch", "order"]
    swapped = swapped.replace(field("Fix sketch:"), "")
    same(lab.lint_plan(swapped), both, "Issue at the end, and no Fix sketch:")


def test_a_commit_is_no_issue_number(lab):
    """An issue number has digits only, and digits are hexadecimal."""
    came = lab.lint_plan(given("Reproduced at:", "see #4356900"))
    same(came, ["no-commit"], "Reproduced at: see #4356900, an issue with seven digits:")
    named = given("Reproduced at:", "main").replace("Fix sketch:", "Fix sketch: as 0decac0 has it,")
    same(lab.lint_plan(named), ["no-commit"], "Reproduced at: main, a commit in the fix sketch:")
    for text in ("0decac0", "v0.22.1 (0decac0d96c42b49572498019f0a0e3600f50398)", "1234567"):
        same(lab.lint_plan(given("Reproduced at:", text)), [], f"Reproduced at: {text}:")
    for text in ("0decac", "0decac0" * 6, "xdecac0d"):
        same(lab.lint_plan(given("Reproduced at:", text)), ["no-commit"], f"{text!r}:")


def test_questions_are_the_items_of_the_list(lab):
    """One question may have three question marks."""
    name = "Open questions for maintainers:"
    one = "\n- Here? Or there? Or in both?\n- Which release?"
    same(lab.lint_plan(given(name, one)), [], f"two items, four question marks, {one!r}:")
    for three in ("\n1. this\n2. that\n3. and that", "\n  * this\n  * that\n  * and that"):
        same(lab.lint_plan(given(name, three)), ["too-many-questions"], f"three items, {three!r}:")


def candidate(lab: Any, **other: Any) -> Any:
    sound = {
        "number": 39734, "open_pr": False, "fixed": False, "reproduced_at": "0decac0",
        "cause_file": "a.py", "in_map": True, "changed_lines": 40, "has_failing_test": True,
        "busywork": False, "merges_90d": 12,
    }  # fmt: skip
    return lab.Candidate(**(sound | other))


def test_each_check_fails_on_its_own(lab):
    """A check that is not made."""
    kept = lab.gauntlet(candidate(lab))
    same((kept.keep, kept.failed_check), (True, None), "a sound candidate, keep and failed_check:")
    for check, other in (
        (1, {"open_pr": True}), (1, {"fixed": True}), (2, {"reproduced_at": None}),
        (3, {"cause_file": None}), (3, {"in_map": False}), (4, {"has_failing_test": False}),
        (5, {"merges_90d": 0}),
    ):  # fmt: skip
        came = lab.gauntlet(candidate(lab, **other))
        same((came.keep, came.failed_check), (False, check), f"{other}, keep and failed_check:")
        assert came.reason.strip(), f"{other}: expected a reason in words, came {came.reason!r}"


def test_gauntlet_stops_at_first_failure(lab):
    """The cheap checks come first; a later failure hides that the work is taken."""
    came = lab.gauntlet(candidate(lab, open_pr=True, busywork=True)).failed_check
    same(came, 1, "taken and busywork; the first check that fails:")
    came = lab.gauntlet(candidate(lab, reproduced_at=None, in_map=False, merges_90d=0)).failed_check
    same(came, 2, "not reproduced, not in the map, nobody merges; the first check that fails:")
    came = lab.gauntlet(candidate(lab, changed_lines=900, merges_90d=0)).failed_check
    same(came, 4, "900 lines where nobody merges; the first check that fails:")


def test_501_lines_needs_rfc_500_does_not(lab):
    """Above 500 an RFC comes first."""
    same(lab.gauntlet(candidate(lab, changed_lines=500)).keep, True, "500 lines, keep:")
    same(lab.gauntlet(candidate(lab, changed_lines=501)).failed_check, 4, "501 lines, the check:")


def test_busywork_fails_even_if_small(lab):
    """A typo with a test is still a typo."""
    came = lab.gauntlet(candidate(lab, busywork=True, changed_lines=1)).failed_check
    same(came, 4, "busywork of one line with a failing test, the check:")


CPU = "Async Engine, Inputs, Utils, Worker, Config (CPU)"


def test_parser_change_triggers_cpu_step(lab, record_property):
    """The step that runs the parsers' own tests is one of those that a laptop can run."""
    came = lab.jobs_for(["vllm/tool_parsers/utils.py"], areas())
    assert CPU in came, f"vllm/tool_parsers/utils.py: expected {CPU!r} among the jobs, came {came}"
    same(came, sorted(came), "the jobs, sorted:")
    same(len(came), 23, "vllm/tool_parsers/utils.py, jobs:")
    record_property("measured.parser", len(came))


def test_csrc_triggers_everything(lab, record_property):
    """A pattern that runs all, and one that takes a path out of it."""
    every = sum(not step["optional"] for step in areas()["steps"])
    came = len(lab.jobs_for(["csrc/cache_kernels.cu"], areas()))
    same(came, every, "csrc/cache_kernels.cu, jobs:")
    record_property("measured.kernel", came)
    same(len(lab.jobs_for(["csrc/cpu/utils.cpp"], areas())), 4, "csrc/cpu/utils.cpp, excluded:")
    both = ["csrc/cpu/utils.cpp", "setup.py"]
    same(len(lab.jobs_for(both, areas())), every, f"{both}, one of which is not excluded:")


def test_prefix_is_a_plain_string_prefix(lab):
    """`vllm/` stands in many paths, and at the beginning of few; a prefix may end in a name."""
    made = {
        "run_all_patterns": [], "run_all_exclude_patterns": [],
        "steps": [
            {"label": "chat", "optional": False,
             "source_file_dependencies": ["tests/entrypoints/test_chat_utils"]},
        ],
    }  # fmt: skip
    for path, expected in (
        ("tests/entrypoints/test_chat_utils.py", ["chat"]),
        ("tests/entrypoints/test_chat_utils/a.py", ["chat"]),
        ("old/tests/entrypoints/test_chat_utils.py", []),
        ("tests/entrypoints/test_chat.py", []),
    ):
        same(lab.jobs_for([path], made), expected, f"{path}, jobs of {made['steps'][0]}:")


def test_docs_only_change_triggers_nothing_mandatory(lab):
    """A step without the key is always selected, and at the pin all of those are optional."""
    same(lab.jobs_for(["docs/README.md"], areas()), [], "docs/README.md, jobs:")
    bare = {**areas(), "steps": [{"label": "always", "optional": False}]}
    same(lab.jobs_for(["docs/README.md"], bare), ["always"], "a mandatory step without the key:")


def test_optional_steps_only_on_request(lab):
    """What is started by hand or at night is not what a reviewer waits for."""
    path = ["vllm/tool_parsers/utils.py"]
    same(len(lab.jobs_for(path, areas(), include_optional=True)), 53, f"{path}, with optional:")
    every = len(areas()["steps"])
    came = len(lab.jobs_for(["setup.py"], areas(), include_optional=True))
    same(came, every, "setup.py, with optional ones:")
