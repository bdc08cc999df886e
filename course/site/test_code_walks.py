"""vLLM's own lines, stepped: what is shown is a run of the pinned code, the same each time."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from conformance import walks
from conformance.real_core import why_not
from conformance.walks import Walk
from course.conftest import REPOSITORY
from course.site import code_walks
from course.truth import symbols

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=why_not() or "it is here")]
TREE = REPOSITORY / "upstream"
INCLUDE = re.compile(r"\{\{#upstream (\S+) (\S+)\}\}")


def shown() -> dict[tuple[str, str], set[str]]:
    """The functions that pages show, and the phases in which."""
    found: dict[tuple[str, str], set[str]] = {}
    for page in REPOSITORY.glob("phase-*/0*.md"):
        for path, symbol in INCLUDE.findall(page.read_text(encoding="utf-8")):
            found.setdefault((path, symbol), set()).add(page.parent.name[6:8])
    return found


def test_each_walk_is_of_a_function_that_a_page_shows_and_most_phases_have_one():
    pages = shown()
    assert [w.symbol for w in code_walks.WALKS if (w.path, w.symbol) not in pages] == []
    phases = set().union(*(pages[w.path, w.symbol] for w in code_walks.WALKS))
    numbers = {f"{number:02d}" for number in range(1, 17)}
    assert numbers - phases == {"09"}, "its functions are torch's own"


@pytest.mark.slow
@pytest.mark.parametrize("walk", code_walks.WALKS, ids=lambda walk: walk.symbol)
def test_a_walk_stays_in_its_function_and_is_the_same_each_time(walk):
    made = walks.record(walk)
    [(first, last)] = symbols.lookup(symbols.symbols(TREE / walk.path), walk.symbol)[:1]
    assert made.lines - {0} <= set(range(first, last + 1))
    assert made.events[-1][0] == 0 and len(made.events) > 1
    assert any(values for _, values in made.events), "nothing to see"
    again = walks.record(walk)
    assert (again.events, again.returns) == (made.events, made.returns)


def test_a_page_carries_what_changed_and_puts_it_together_again():
    document = code_walks.document("vllm/v1/core/sched/scheduler.py", "Scheduler._preempt_request")
    walk = code_walks.of("vllm/v1/core/sched/scheduler.py", "Scheduler._preempt_request")
    now: dict[str, str] = {}
    for (line, changed, *gone), (real, values) in zip(
        document["events"], walks.record(walk).events, strict=True
    ):
        left = {name for names in gone for name in names}
        now = {name: text for name, text in (now | changed).items() if name not in left}
        assert (line, now) == (real, values)
    assert now["request.status"] == "PREEMPTED" and now["request.num_computed_tokens"] == "0"
    data = code_walks.host("vllm/v1/core/sched/scheduler.py", "Scheduler._preempt_request")
    assert json.loads(data.partition('json">')[2].partition("</script>")[0]) == document
    assert code_walks.host("vllm/v1/request.py", "Request.num_tokens") == ""


def test_a_function_that_does_not_run_is_refused_by_name():
    with pytest.raises(ValueError, match="get_max_tokens: no call"):
        walks.record(Walk("vllm/entrypoints/utils.py", "get_max_tokens", "", call=lambda f: None))
    with pytest.raises(ValueError, match=r"Request\.num_tokens has no walk"):
        code_walks.document("vllm/v1/request.py", "Request.num_tokens")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, None, "a"], "[1, None, 'a']"),
        ({"r0": 3}, "{'r0': 3}"),
        ([SimpleNamespace(request_id="r1")], "[r1]"),
        ((SimpleNamespace(block_id=4),), "[block 4]"),
        (object(), ""),
        ([object()], ""),
        (set(), "{}"),
        (0.123456, "0.1235"),
        ("x" * 200, "'" + "x" * 94 + "\u2026"),
    ],
)
def test_a_value_is_short_or_left_out(value, text):
    assert walks.brief(value) == text
