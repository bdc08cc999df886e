"""What labs 15-04 and 15-06 are graded by, recorded anew on the pinned release's own scheduler.

Without the pinned tree these tests are skipped: `course upstream fetch`. Lab 15-02's recording
needs torch as well, and its own test records it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from conformance.features.kv_transfer import decoder, owners
from conformance.real_core import why_not

LABS = Path(__file__).parent / "labs"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.mark.parametrize(
    ("recorder", "file"),
    [
        (owners, "lab-04-who-owns-this-block/recordings/owners.jsonl.gz"),
        (decoder, "lab-06-does-my-decoder-prefill-again/recordings/windows.jsonl.gz"),
    ],
    ids=["owners", "windows"],
)
def test_the_pinned_scheduler_does_it_again(recorder, file):
    with gzip.open(LABS / file, "rt") as lines:
        kept = [json.loads(line) for line in lines]
    assert list(recorder.record()) == kept
