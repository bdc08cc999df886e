"""What releases make of five prompts over groups with windows, run on their own schedulers.

The table of the deep dive's section "Since the pin". Without an archive in `build/releases` its
release is skipped: `course upstream fetch --version 0.33.0`.
"""

from __future__ import annotations

import pytest

from conformance.real_core import core_of, why_not
from conformance.recorders.run import run

FULL = {"kind": "full", "block_size": 16}
WINDOWS = [{"kind": "sliding_window", "block_size": 16, "sliding_window": w} for w in (33, 65)]
STATE = {"kind": "mamba", "block_size": 16}
SHARED = (200, 200, 96, 96, 160, 160)
"""Tokens of the common text that each prompt begins with; 9 of its own follow."""


def workload(groups):
    text = [7 * i % 97 + 3 for i in range(400)]
    config = {
        "num_blocks": 400, "block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 512,
        "long_prefill_token_threshold": 0, "enable_prefix_caching": True,
        "enable_chunked_prefill": True, "max_model_len": 1024, "policy": "fcfs",
        "kv_groups": groups,
    }  # fmt: skip
    events = [
        {"step": 6 * turn, "abort": [], "add": [{
            "request_id": f"r{turn}", "prompt_token_ids": text[:length] + [100 + turn] * 9,
            "max_tokens": 2, "priority": 0, "arrival_time": float(turn), "ignore_eos": True,
        }]}
        for turn, length in enumerate(SHARED)
    ]  # fmt: skip
    outputs = {f"r{turn}": [5, 6] for turn in range(len(SHARED))}
    return {"seed": 1, "eos_token_id": 2, "config": config, "events": events, "outputs": outputs}


class Retaining:
    """A release's core, whose coordinator keeps checkpoints every so many tokens."""

    def __init__(self, core, interval):
        self.core, self.interval = core, interval

    def __getattr__(self, name):
        return getattr(self.core, name)

    def make_scheduler(self, *arguments):
        made = self.core.make_scheduler(*arguments)
        coordinator = made.kv_cache_manager.coordinator
        assert coordinator.retention_interval is None
        coordinator.retention_interval = self.interval
        return made


def cached(core, groups):
    """Tokens that each prompt finds when it is admitted."""
    first = {}
    for step in run(workload(groups), core)["steps"]:
        for name, count in dict(step["num_scheduled_tokens"]).items():
            first.setdefault(name, count)
    return [length + 9 - first[f"r{turn}"] for turn, length in enumerate(SHARED)]


def released(version):
    if problem := why_not(version):
        pytest.skip(problem)
    return core_of(version)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [[FULL, WINDOWS[0]], [FULL, *WINDOWS]])
@pytest.mark.parametrize(
    ("version", "interval", "found"),
    [
        ("0.22.1", "none there", [0, 192, 96, 96, 160, 160]),
        ("0.33.0", None, [0, 192, 96, 96, 160, 160]),
        ("0.33.0", 64, [0, 192, 64, 96, 128, 160]),
        ("0.33.0", 0, [0, 0, 0, 96, 96, 160]),
    ],
)
def test_where_checkpoints_are_kept_decides_what_is_found(version, interval, found, groups):
    core = released(version)
    if interval != "none there":
        core = Retaining(core, interval)
    assert cached(core, groups) == found


@pytest.mark.slow
def test_a_state_per_block_is_no_mode_any_more():
    with pytest.raises(AssertionError, match="requires mamba_cache_mode='align'"):
        cached(released("0.33.0"), [STATE, FULL])
