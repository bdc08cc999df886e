"""What the page shows of broken rules is what the recordings say."""

from __future__ import annotations

import json

import pytest

from conformance import broken_rules


def test_every_rule_is_kept_and_noticed():
    kept = broken_rules.document()
    assert [each["name"] for each in kept] == list(broken_rules.RULES)
    for each in kept:
        assert 0 < each["differ"] <= each["workloads"]
        assert each["first"]["expected"] != each["first"]["got"]
        assert sum(count for _, count in each["fields"]) == each["differ"]


@pytest.mark.slow
def test_what_is_kept_is_what_a_replay_finds():
    found = [broken_rules.broken(mutant) for mutant in broken_rules.chosen()]
    assert json.loads(json.dumps(found)) == broken_rules.document()
