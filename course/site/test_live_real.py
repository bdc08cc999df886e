"""vLLM's own scheduler beside the live engine: they decide alike, and what differs is found."""

from __future__ import annotations

import copy
import random
import zipfile
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from conformance.real_core import why_not
from conformance.real_core.namespace import LIBRARIES
from course.learning.labs import CourseError, find_labs, pick
from course.site import desk_real, live, live_real, play, play_check, play_payload, real_payload
from course.site.test_live import finished, random_run

ROOT = Path(__file__).resolve().parents[2]
needs_the_tree = pytest.mark.skipif(bool(why_not()), reason=why_not())
NUM_IN_NODE = 500


def workload(seed: int) -> dict[str, Any]:
    """Settings, requests and aborts of a run, as the page sends them."""
    settings, wanted = random_run(seed)
    rng = random.Random(-seed)
    ids = [chr(ord("A") + place) for place in range(len(wanted))]
    aborts = [[rng.randint(0, 20), rng.choice(ids)] for _ in range(rng.choice((0, 0, 0, 1, 2)))]
    requests = [asdict(one) for one in wanted]
    return {"settings": asdict(settings), "requests": requests, "aborts": aborts}


@needs_the_tree
@pytest.mark.parametrize("seed", range(8))
def test_the_real_scheduler_decides_every_step_as_the_live_engine(seed):
    told = live_real.ask_whole(**workload(seed))
    assert told["steps"]
    assert told["difference"] is None


@needs_the_tree
@pytest.mark.parametrize("field", live_real.MEANINGS)
def test_a_step_that_is_decided_otherwise_is_found_with_its_field(field, monkeypatch):
    session = finished(*random_run(3))
    shown = live_real._shown
    at = session.frames[4]

    def other(frame: dict[str, Any]) -> dict[str, Any]:
        step = copy.deepcopy(shown(frame))
        if frame is at:
            value = step[field]
            step[field] = {**value, "Z": 1} if isinstance(value, dict) else [*value, "Z"]
        return step

    monkeypatch.setattr(live_real, "_shown", other)
    difference = live_real.compared(session)["difference"]
    assert (difference["step"], difference["field"]) == (3, field)


@needs_the_tree
def test_asking_leaves_the_run_as_it_was():
    live.start(model="toy", at=6)
    before = live.state()
    assert len(live_real.ask()["steps"]) == 6
    assert live.state() == before


@needs_the_tree
def test_a_release_that_is_not_here_is_refused_with_those_that_are():
    with pytest.raises(ValueError, match=r"release='0\.1\.0': not here; there are .*0\.22\.1"):
        live_real.ask_whole(**workload(0), release="0.1.0")


@needs_the_tree
@pytest.mark.slow
def test_a_zip_of_a_release_is_whole_and_has_its_licence(tmp_path):
    zips = real_payload.archives(ROOT)
    files = zips[real_payload.release_zip(live_real.PIN)]
    names = [name for name, _ in files]
    assert "LICENSE" in names
    assert "NOTICE" in names
    for name, data in files:
        if name != "NOTICE":
            assert data == (ROOT / "upstream" / name).read_bytes()
    with zipfile.ZipFile(BytesIO(play.zipped(zips[real_payload.LIBRARY_ZIP]))) as archive:
        assert "typing_extensions.py" in archive.namelist()
    own = {f"{name}.txt" for name in LIBRARIES if name != "numpy"}
    assert set(real_payload.licences(zips)) == {"vllm.txt", *own}


def test_without_the_pinned_tree_nothing_is_packed(tmp_path):
    assert real_payload.archives(tmp_path) == {}


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    """The pages' worker, by Node, over the runtime of build/play."""
    if problem := play.problem(ROOT):
        pytest.skip(f"needs what runs Python in the pages ({problem}): course book runtime")
    target = tmp_path_factory.mktemp("site") / "play"
    play_payload.write(ROOT, target)
    try:
        made = play_check.Worker(ROOT, target)
    except CourseError as error:
        pytest.skip(str(error))
    yield made
    made.end()


@needs_the_tree
@pytest.mark.slow
def test_in_the_pages_python_both_decide_500_random_workloads_alike(worker):
    steps = 0
    for seed in range(NUM_IN_NODE):
        payload = {
            "module": "course.site.live_real", "function": "ask_whole",
            "arguments": workload(seed),
        }  # fmt: skip
        told, _ = worker.call("python", payload, recycle=False)
        assert told["difference"] is None, (seed, told["difference"])
        steps += len(told["steps"])
    assert steps > NUM_IN_NODE


# ------------------------------------------------------------------ a lab's desk

SHORT = """config: {num_blocks: 9, block_size: 4}
requests:
- {id: A, prompt: 11, max_tokens: 12}
- {id: B, prompt: 11, max_tokens: 12}
"""


def solution(lab: str) -> str:
    return pick(find_labs(ROOT), lab).solution.read_text(encoding="utf-8")


def test_every_lab_of_scheduler_and_cache_asks_but_those_whose_work_is_not_scheduling():
    labs = {lab.id for lab in find_labs(ROOT) if lab.id[:2] in ("02", "03")}
    assert labs - set(desk_real.LABS) == {"02-02", "02-04", "02-06"}


@needs_the_tree
@pytest.mark.parametrize("lab", desk_real.LABS)
def test_a_solution_decides_as_the_real_scheduler(lab):
    told = desk_real.ask_mine(lab, solution(lab), desk_real.LABS[lab].workload)
    assert told["rows"]
    if lab == "03-07":  # the fix parts where the real one reads what was never written
        assert told["at"] == 3
        assert "vLLM 0.22.1: {'low': 4}. Yours: {'low': 8}" in told["verdict"]
    else:
        assert told["at"] is None
        assert "the same in vLLM 0.22.1 and in yours" in told["verdict"]


@needs_the_tree
@pytest.mark.parametrize(
    ("lab", "right", "wrong", "row", "values"),
    [
        ("02-03", "(num_tokens - 1) // block_size", "num_tokens // block_size", 0, ("4", "8")),
        ("03-02", "-> list[int]:\n", "-> list[int]:\n    return [prompt_len]\n", 0, ("24", "100")),
        ("03-03", "(len(prompt) - 1) // block_size", "len(prompt) // block_size", 2, ("4", "8")),
        ("03-05", "costs.append(1 + chunk)", "costs.append(chunk)", 0, ("51", "50")),
        ("03-06", "(num_prompts - 1) *", "num_prompts *", 0, ("8", "12")),
    ],
)
def test_a_wrong_prediction_is_shown_beside_what_the_real_scheduler_came_to(
    lab, right, wrong, row, values
):
    text = solution(lab)
    assert right in text
    told = desk_real.ask_mine(lab, text.replace(right, wrong, 1), desk_real.LABS[lab].workload)
    assert told["at"] == row
    assert tuple(told["rows"][row][1:]) == values


@needs_the_tree
def test_a_pool_that_gives_blocks_in_another_order_parts_at_the_step_that_shows_it():
    text = (
        solution("02-01")
        + """

class BlockPool(BlockPool):
    def get_new_blocks(self, num_blocks):
        return super().get_new_blocks(num_blocks)[::-1]
"""
    )
    told = desk_real.ask_mine("02-01", text, SHORT)
    assert told["at"] == 0
    assert "differs, in block_ids" in told["verdict"]


@needs_the_tree
@pytest.mark.parametrize(
    ("lab", "text", "workload", "message"),
    [
        ("02-01", "class (", SHORT, "starter.py does not load: SyntaxError"),
        ("02-01", "x = 1", SHORT, "starter.py does not load: AttributeError"),
        ("02-01", "class BlockPool: pass", "requests: 3", "workload: need config"),
        ("03-02", "x = 1", SHORT, "workload: has 2 requests, this lab predicts for 1"),
        ("03-03", "x = 1", SHORT, "starter.py: AttributeError"),
        ("02-02", "x = 1", SHORT, "lab='02-02': need one of 02-01"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(lab, text, workload, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        desk_real.ask_mine(lab, text, workload)
