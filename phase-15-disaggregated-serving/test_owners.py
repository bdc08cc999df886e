"""The stories of lab 15-04, recorded anew on the pinned release's own scheduler, without torch.

Without the pinned tree this test is skipped: `course upstream fetch`.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from conformance.features.kv_transfer import owners
from conformance.real_core import why_not

FILE = Path(__file__).parent / "labs/lab-04-who-owns-this-block/recordings/owners.jsonl.gz"


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_every_story_is_what_the_pinned_scheduler_does():
    with gzip.open(FILE, "rt") as file:
        kept = [json.loads(line) for line in file]
    assert list(owners.record()) == kept
