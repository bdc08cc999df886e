"""vLLM's own scheduler from the command line: beside ours, and release beside release."""

from __future__ import annotations

import pytest

from conformance.real_core import why_not

needs_pin = pytest.mark.skipif(bool(why_not()), reason=why_not())
PRIORITY = """
config: {num_blocks: 6, policy: priority, max_num_seqs: 4, max_num_batched_tokens: 16}
requests:
- {id: A, prompt: 11, max_tokens: 5, priority: 9}
- {id: B, prompt: 4, max_tokens: 6, step: 1}
- {id: C, prompt: 3, max_tokens: 6, step: 1, priority: 1}
"""
BACKWARDS = """
from mini_vllm.block_pool import BlockPool


class Backwards(BlockPool):
    def get_new_blocks(self, num_blocks):
        return super().get_new_blocks(num_blocks)[::-1]
"""


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "workload.yaml"
    path.write_text(PRIORITY)
    return str(path)


def needs(*versions):
    reasons = [problem for version in versions if (problem := why_not(version))]
    return pytest.mark.skipif(bool(reasons), reason="; ".join(reasons))


@needs_pin
def test_ask_shows_both_schedulers_step_by_step(course, workload):
    ran = course("ask", workload)
    assert ran.code == 0
    lines = ran.out.splitlines()
    assert lines[0].split() == ["step", "vLLM", "0.22.1", "mini_vllm"]
    assert lines[-1] == "11 steps, every field of each: the same."


@needs_pin
def test_ask_takes_a_part_of_a_learners_and_shows_where_it_differs(course, workload, tmp_path):
    (tmp_path / "mine.py").write_text(BACKWARDS)
    ran = course("ask", workload, "--block-pool", f"{tmp_path}/mine.py:Backwards")
    assert ran.code == 1
    assert "Step 0 is the first that differs, in block_ids" in ran.out
    assert "  yours" in ran.out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["ask", "nowhere.yaml"], "nowhere.yaml: No such file or directory; need a seed, FILE"),
        (["ask", "1", "--release", "9.9.9"], "vLLM 9.9.9 is not here: course upstream fetch"),
        (["ask", "1", "--release", "new"], "version='new': need three numbers"),
        (["ask", "1", "--block-pool", "mine"], "'mine': need module:Name or path"),
        (["bisect", "1", "--bad", "9.9.9"], "vLLM 9.9.9 is not here"),
        (["drift", "--decisions", "9.9.8", "9.9.9"], "vLLM 9.9.8 is not here"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(course, arguments, words):
    ran = course(*arguments)
    assert ran.code == 2
    assert words in " ".join(ran.err.split())


@pytest.mark.slow
@needs("0.22.1", "0.27.1", "0.33.0")
def test_bisect_names_the_first_bad_and_the_first_good_release(course, workload):
    asked = ("bisect", workload, "--field", "num_scheduled_tokens")
    ran = course(*asked)
    out = " ".join(ran.out.split())
    assert ran.code == 0
    assert "Bad is what decides as 0.22.1 does, in num_scheduled_tokens." in out
    assert "first bad " in out and "first good 0.33.0" in out
    assert "part in step 2, num_scheduled_tokens" in out
    assert "0.22.1 bad" in course(*asked, "--all").out
    ran = course("bisect", workload, "--field", "bogus")
    assert ran.code == 2 and "field='bogus': need one of" in ran.err


@pytest.mark.slow
@needs("0.22.1", "0.33.0")
def test_drift_shows_the_smallest_workload_of_each_difference(course):
    ran = course("drift", "--decisions", "0.22.1", "0.33.0", "--workloads", "12")
    assert ran.code == 0
    assert "part first in block_ids. The smallest found:" in ran.out
    assert "    requests:" in ran.out
