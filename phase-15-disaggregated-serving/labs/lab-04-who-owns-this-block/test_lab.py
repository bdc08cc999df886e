"""What lab 15-04 pins: the owner of a request's blocks as the real scheduler had it, and a mend.

`recordings/owners.jsonl.gz` has twelve interleavings, five in which a report comes that is about
nothing, and 79 others that random workloads came to, recorded on v0.22.1's own scheduler by
`conformance/features/kv_transfer/owners.py`.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

import pytest

from conformance import replay
from conformance.real_core import core_of, why_not
from labkit import same

FILE = Path(__file__).parent / "recordings" / "owners.jsonl.gz"
REPORTS = {"received": "wire", "sent": "peer"}


@cache
def recorded():
    """The stories: a name, and moments with events, the owner then, and what the worker does."""
    with gzip.open(FILE, "rt") as file:
        return [json.loads(line) for line in file]


def the_twelve():
    return [story for story in recorded() if "workload" in story]


def told(story, upto=None):
    """The moments so far, for a message."""
    lines = []
    for moment in story["moments"][:upto]:
        died = f", line {moment['line']}" if "line" in moment else ""
        lines.append(f"  step {moment['step']:>3}: {', '.join(moment['events'])}: the real "
                     f"scheduler: {moment['owner']}{died}")  # fmt: skip
    return "\n".join(lines)


def heard(lab, of, events):
    """The owner after the last event of a moment, or where the engine died."""
    try:
        return [of.hear(event) for event in events][-1]
    except lab.Died as died:
        return f"dies, line {died.line}"


def as_the_pin(lab, story):
    of = lab.AtThePin()
    for number, moment in enumerate(story["moments"], 1):
        came = heard(lab, of, moment["events"])
        expected = f"dies, line {moment['line']}" if "line" in moment else moment["owner"]
        assert came == expected, (
            f"{story['name']!r}: the first difference is at the last of these moments\n"
            f"{told(story, number)}\nexpected {expected}\ncame     {came}"
        )


def wanted(story):
    """Per moment what O1 to O4 want: the real owner, and from its first mistake on what is under
    way and was told; while the request lives that is the owner before."""
    mistaken, is_kept, has_ended, owner = False, False, False, "pool"
    for moment in story["moments"]:
        words = " ".join(moment["events"])
        is_kept = is_kept or " and kept" in words
        has_ended = has_ended or "ended" in words or "aborted" in words
        under_way = [w for w in moment["busy"] if w == "wire" or is_kept]
        mistaken = mistaken or "line" in moment or (moment["owner"] == "pool" and bool(under_way))
        if not mistaken:
            owner = moment["owner"]
        elif has_ended:
            owner = " and ".join(under_way) or "pool"
        yield moment, owner


def as_wanted(lab, story, rule):
    """`Mended` goes through a story as O1 to O4 want; it, the last moment and its owner."""
    of = lab.Mended()
    for number, (moment, owner) in enumerate(wanted(story), 1):
        came = heard(lab, of, moment["events"])
        assert came == owner, (
            f"{story['name']!r}: {rule}; under way is {moment['busy'] or 'nothing'}\n"
            f"{told(story, number)}\nexpected {owner}\ncame     {came}"
        )
    return of, moment, owner


def test_a_load_and_a_send(lab):
    """The request taken for the owner of what a wire writes, or a peer reads."""
    for story in the_twelve():
        if story["name"] in (
            "loaded, and its blocks are read on", "computed here, and its blocks are read on",
        ):  # fmt: skip
            as_the_pin(lab, story)


def test_a_client_that_leaves(lab, record_property):
    """Blocks that go back to the pool while a wire still writes them."""
    stories = [s for s in the_twelve() if s["name"].startswith("its client leaves")]
    same(len(stories), 3, "interleavings")
    for story in stories:
        as_the_pin(lab, story)
    silent = next(s for s in stories if "never answers" in s["name"])
    record_property("measured.silent", "the " + silent["moments"][-1]["owner"])


def test_a_load_that_fails(lab):
    """Blocks that hold nothing taken for the request's, or thrown away before the walk."""
    for story in the_twelve():
        if "fails" in story["name"] or "can be used" in story["name"]:
            as_the_pin(lab, story)


def test_where_the_pin_dies(lab, record_property):
    """A second report that is thought to be harmless: it ends every request of the engine."""
    deaths = [s for s in the_twelve() if "line" in s["moments"][-1]]
    for story in deaths:
        as_the_pin(lab, story)
    record_property("measured.deaths", len(deaths))
    story = next(s for s in deaths if s["name"].endswith("sent, then received"))
    early, late = story["moments"][-2:]
    record_property("measured.exposed", late["step"] - early["step"])


def test_a_report_about_nothing(lab):
    """A report that was not due, taken for the end of whatever is under way (O3)."""
    strays = [story for story in recorded() if "stray" in story]
    same(len(strays), 5, "stories")
    for story in strays:
        as_the_pin(lab, story)
        as_wanted(lab, story, f"this {story['stray']!r} is about nothing (O3)")


def test_every_recorded_story(lab):
    """Preemptions, loads that begin again, requests that are looked at and not admitted."""
    for story in recorded():
        as_the_pin(lab, story)


def test_why_it_dies(lab):
    """Two reports (46240) and one too many (43226) taken for one defect."""
    for story in recorded():
        moments = story["moments"]
        if "line" not in moments[-1] or "stray" in story:
            continue
        cause = lab.why([list(moment["events"]) for moment in moments])
        assert cause in lab.CAUSES, f"expected one of {list(lab.CAUSES)}; came {cause!r}"
        busy = [moment["busy"] for moment in moments]
        words = [word for moment in moments for word in moment["events"]]
        owners = ["pool", *(moment["owner"] for moment in moments)]
        at_abort = [
            before for before, moment in zip(owners, moments, strict=False)
            if any("aborted" in word for word in moment["events"])
        ]  # fmt: skip
        against = {
            "first-report-frees": f"never are two transfers under way: {busy}",
            "never-kept": "the connector kept it",
            "never-known": f"it was known at step {moments[0]['step']}",
            "ended-in-a-plan": f"owner when its client left: {at_abort or 'it stayed'}",
        }
        if ["wire", "peer"] in busy:
            against["first-report-frees"] = ""
        if not any("kept" in word for word in words):
            against["never-kept"] = ""
        if "request" in at_abort:
            against["ended-in-a-plan"] = ""
        left = [name for name, said in against.items() if not said]
        same(len(left), 1, f"{story['name']!r}: causes that nothing contradicts: {left}")
        assert not against[cause], (
            f"{story['name']!r}: the recording contradicts {cause!r}: {against[cause]}\n"
            f"{told(story)}"
        )


def test_mended_until_the_first_mistake(lab):
    """A mend that changes what was right (O4)."""
    for story in recorded():
        of = lab.Mended()
        for number, (moment, owner) in enumerate(wanted(story), 1):
            if owner != moment["owner"]:
                break
            came = heard(lab, of, moment["events"])
            assert came == owner, (
                f"{story['name']!r}: here the pin is right (O4)\n{told(story, number)}\n"
                f"expected {owner}\ncame     {came}"
            )


def test_mended_never_gives_away_what_is_in_use(lab):
    """The first of two reports taken for the last (O1, O2), a stray one for an order (O3)."""
    for story in recorded():
        of, moment, owner = as_wanted(lab, story, "what is under way keeps its blocks (O1 to O3)")
        for event in ("sent", "received"):
            if owner == "pool" and "line" in moment:
                same(heard(lab, of, [event]), "pool", f"{story['name']!r}: another {event!r} (O3)")


def test_the_engine_owns_as_yours(lab):
    """An automaton that is right on paper: the mini engine lives through the twelve beside it."""
    for story in the_twelve():
        workload = story["workload"]
        make = replay.mini_scheduler(replay.config_of(workload))
        driven = replay.Driven(workload, make, replay.mini_request)
        gate = next(g for g in driven.scheduler.gates if hasattr(g, "kv_load_failure_policy"))
        events, of = replay.events_by_step(workload), lab.Mended()
        for step in range(story["moments"][-1]["step"] + 1):
            driven.step(events.get(step, {}))
            came = None
            for moment in story["moments"]:
                if moment["step"] == step:
                    came = heard(lab, of, moment["events"])
            if came is not None:
                same(
                    came, engine_owner(driven.scheduler, gate, "r"),
                    f"{story['name']!r}, after step {step}: yours (came) and the engine's",
                )  # fmt: skip


def engine_owner(scheduler, gate, name):
    if name in gate.held:
        why = gate.held[name][1]
        words = (("recving", "wire"), ("sending", "peer"))
        return " and ".join(word for reason, word in words if reason in why)
    if not scheduler.kv.get_block_ids(name):
        return "pool"
    return "wire" if name in gate.loading and name not in gate._received else "request"


@pytest.mark.skipif(bool(why_not()), reason="no pinned tree: course upstream fetch")
def test_the_twelve_are_what_the_pinned_scheduler_does(lab):
    """A file that says what the release does not."""
    from conformance.features.kv_transfer import owners

    for name, story in owners.STRAYS.items():
        run = owners.story_of(owners.workload_of(story), core_of(), 60, story["stray"])
        kept = next(each for each in recorded() if each["name"] == name)
        same(run.moments["r"], kept["moments"], f"{name!r}, recorded anew")
    for story in the_twelve():
        most = owners.NAMED[story["name"]].get("most", 60)
        again = owners.story_of(story["workload"], core_of(), most).moments["r"]
        same(again, story["moments"], f"{story['name']!r}, recorded anew")
        as_the_pin(lab, {**story, "moments": again})
