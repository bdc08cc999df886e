"""The guide's section "Since the pin": in which release's own source each knob is.

Read, not run. Without an archive in `build/releases` its rows are skipped:
`course upstream fetch --version 0.31.0`.
"""

from __future__ import annotations

import re

import pytest

from conformance.real_core import why_not
from conformance.real_core.places import tree_of

CONFIG = "vllm/config/scheduler.py"
ADMISSION = "vllm/v1/core/sched/scheduler.py"
ROWS = (
    ("watermark", CONFIG, "0.23.0", "0.24.0"),
    ("prefill_schedule_interval", CONFIG, "0.23.0", "0.24.0"),
    ("max_num_queued_reqs", CONFIG, "0.28.0", "0.29.0"),
    ("long_prefill_token_threshold_adaptive", CONFIG, "0.30.0", "0.31.0"),
    ("max_num_active_seqs", CONFIG, "0.30.0", "0.31.0"),
    ("record_prefix_cache_stats", ADMISSION, "0.26.0", "0.27.0"),
)


@pytest.mark.parametrize(("name", "file", "before", "since"), ROWS)
def test_a_knob_is_there_from_the_release_that_the_page_names(name, file, before, since):
    if reason := why_not(before) or why_not(since):
        pytest.skip(reason)
    word = re.compile(rf"\b{name}\b")
    held = {
        release: bool(word.search((tree_of(release) / file).read_text(encoding="utf-8")))
        for release in (before, since)
    }
    assert held == {before: False, since: True}
