"""What lab 17-04 pins: a review that names the break from source, and an override that survives."""

from __future__ import annotations

import gc
import gzip
import json
import weakref
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from labkit import same
from labkit.modules import sibling

HERE = Path(__file__).parent
PLUGIN = (HERE / "plugin.py").read_text(encoding="utf-8")
GUARD = PLUGIN[: PLUGIN.index("class Patched")]
replayed = sibling(__file__, "replayed")
plugin = sibling(__file__, "plugin")


@cache
def read(name: str):
    """A recording of the releases' own schedulers."""
    with gzip.open(HERE / "recordings" / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def row(release: str, device: str, scheduler: str):
    """What came of forty workloads."""
    wanted = (release, device, scheduler)
    return next(
        each for each in read("outcomes")
        if (each["release"], each["device"], each["scheduler"]) == wanted
    )  # fmt: skip


# --- find it before it does -----------------------------------------------------------------------

OLD = """
class Engine:
    def step(self, request):
        request.awaited -= 1
        request.mode, request.left = "run", 3
    def put_back(self, request):
        request.mode = "waits"
    def reset(self, request):
        request.awaited = 0
class Faster(Engine):
    def step(self, request):
        request.awaited += 2
"""
NEW = """
class Engine:
    def step(self, request, late=False):
        request.awaited -= 1
        request.mode, request.left = "run", 3
    def put_back(self, request):
        request.mode = "waits"
        request.awaited = 0
    def reset(self, request):
        self.put_back(request)
class Faster(Engine):
    def step(self, request):
        request.awaited += 2
"""
VENDOR = """
class Vendor:
    def __init__(self):
        self.lost = 0
    def step(self, request, **more):
        if request.awaited == 0:
            self.lost += 1
            self.note(request, self.lost)
            return None
        return super().step(request, **more)
"""
OWN = """
class Limits:
    limit, rate = 3, 4
    mode: str
class Vendor(Limits):
    most: int = 5
    def step(self, request):
        self.seen = request.awaited
        return self.seen < self.limit + self.most and self.mode
    async def wait(self, request):
        return self.rate * self.seen
"""


def test_worked_example(lab):
    """A review that compares methods and not who writes what they read."""
    came = [tuple(finding) for finding in lab.review(VENDOR, [OLD], [NEW])]
    same(
        came,
        [
            ("signature", "step", "Engine.step"), ("stopped", "awaited", "Engine.reset"),
            ("writes", "awaited", "Engine.put_back"),
        ],
        "the vendor's step drops what comes while nothing is awaited; in the new release put_back "
        "sets awaited to 0, and reset leaves that to it",
    )  # fmt: skip


def test_what_a_plugin_leans_on(lab):
    """Calls, the plugin's own attributes or __init__ taken for what it leans on."""
    same(
        tuple(map(sorted, lab.leans_on(VENDOR))), (["step"], ["awaited"]),
        "note is called, lost is the plugin's own, __init__ is of the language",
    )  # fmt: skip
    same(
        tuple(map(sorted, lab.leans_on(GUARD))),
        (["_update_request_with_output"], ["num_output_placeholders"]),
        "the plugin as shipped",
    )
    same(
        tuple(map(sorted, lab.leans_on(OWN))), (["step", "wait"], ["awaited", "mode"]),
        "limit, rate and seen are set in the plugin, by a class or by a method; mode is declared",
    )  # fmt: skip


def test_every_way_to_write(lab):
    """A write that is not `x.name = value`."""
    source = """
class A:
    def plain(self, x): x.n = 1
    def more(self, x): x.n += 1
    def noted(self, x): x.n: int = 1
    def pair(self, x): a, (b, x.n) = 1, (2, 3)
    def loop(self, x):
        for x.n in range(3):
            pass
    def reads(self, x): return x.n
    def other(self, x): x.m = x.n
    def item(self, x): x.n[0] = 1
    async def later(self, x): x.n = 3
"""
    came = sorted(lab.writers([source, "class B:\n    def late(self, x):\n        x.n = 2"], "n"))
    expected = ["A.later", "A.loop", "A.more", "A.noted", "A.pair", "A.plain", "B.late"]
    same(came, expected, "who writes an attribute n, in two sources")


def test_gone_and_unchanged(lab):
    """An override of what is no longer there, and a release that changed nothing."""
    same(lab.review(VENDOR, [OLD], [OLD]), [], "nothing changed, nothing to look at")
    gone = NEW.replace("def step", "def walk").replace("awaited = 0", "mode = 0")
    came = [tuple(finding) for finding in lab.review(VENDOR, [OLD], [gone])]
    assert ("gone", "step", "") in came, (
        "no class of the new release defines step: the override is never called.\n"
        f"expected ('gone', 'step', '') among the findings, came {came}"
    )
    one = OLD[: OLD.index("class Faster")]
    came = [tuple(finding) for finding in lab.review(VENDOR, [OLD], [one])]
    same(came, [("stopped", "awaited", "Faster.step")], "Engine still defines step: it is not gone")
    named = OLD.replace("def step(self, request):", "async def step(self, request, *, late=0):", 1)
    came = [tuple(finding) for finding in lab.review(VENDOR, [OLD], [named])]
    same(came, [("signature", "step", "Engine.step")], "a parameter that is passed by name only")


@pytest.mark.slow
def test_the_release_that_breaks_it_is_named_by_its_source(lab):
    """The review on the releases' own sources."""
    from conformance.real_core import why_not
    from conformance.real_core.places import tree_of

    versions = ("0.22.1", "0.26.0", "0.27.0", "0.28.0")
    for version in versions:
        if problem := why_not(version):
            pytest.skip(f"course upstream fetch --version {version}: {problem}")

    def sources(version):
        folder = tree_of(version) / "vllm" / "v1" / "core" / "sched"
        names = ("scheduler.py", "async_scheduler.py")
        return [(folder / name).read_text(encoding="utf-8") for name in names]

    for old, new in pairwise(versions):
        came = {tuple(finding) for finding in lab.review(GUARD, sources(old), sources(new))}
        found = ("writes", "num_output_placeholders", "Scheduler._preempt_request") in came
        assert found is (new == "0.27.0"), (
            f"{old} to {new}: expected the finding that a preemption writes the counter at 0.27.0 "
            f"and nowhere else; came {sorted(came)}"
        )


# --- an override that survives --------------------------------------------------------------------


def survives(mixin, release: str, device: str) -> None:
    """Every recorded frame of a release is treated as it should be."""
    runs = [run for run in read("frames") if run["release"] == release]
    for run in runs:
        wrong = replayed.replay(mixin, run, device)
        if wrong is not None:
            pytest.fail(
                f"vLLM {release}, seed {run['seed']}, a device that makes up tokens for "
                f"{'every row that is cut' if device == 'every' else 'rows early in a prompt'}\n"
                f"{wrong}",
                pytrace=False,
            )
    assert len(runs) > 10, f"the recordings hold over ten runs of {release}, came {len(runs)}"


@pytest.mark.parametrize("release", ["0.22.1", "0.26.0", "0.27.0", "0.33.0"])
def test_it_drops_and_delivers_as_it_should(lab, release):
    """The counter of another taken for a word about this frame."""
    survives(lab.Thin, release, "early")
    survives(lab.Thin, release, "every")


def test_what_was_shipped_does_not(lab, record_property):
    """Not a fault of yours: the plugin on the same recordings, and on the releases themselves."""
    survives(lab.Thin, "0.26.0", "early")
    survives(plugin.Guard, "0.26.0", "early")
    runs = [run for run in read("frames") if run["release"] == "0.27.0"]
    lost = [wrong for run in runs if (wrong := replayed.replay(plugin.Guard, run, "early"))]
    assert lost and all(wrong.frame["is_stale"] and wrong.came == [] for wrong in lost), (
        f"at 0.27.0 the plugin swallows tokens of before a preemption; came {lost[:1]}"
    )
    releases = list(dict.fromkeys(each["release"] for each in read("outcomes")))
    guard = {release: row(release, "early", "Guard") for release in releases}
    first = next(r for r, of in guard.items() if of["same plans"] < of["workloads"])
    record_property("measured.first_bad", first)
    broken, right = guard[first], row(first, "none", "stock")
    changed = "texts" if broken["other texts"] else "preemptions"
    record_property("measured.what", changed)
    record_property("measured.preemptions", broken["preemptions"])
    assert broken["preemptions"] > right["preemptions"], (
        f"expected more preemptions than {right['preemptions']}, came {broken['preemptions']}"
    )
    record_property("measured.patched", row(first, "early", "Patched")["other texts"])


def test_a_plan_that_never_comes_back(lab):
    """Plans matched with outputs by their order."""
    run = next(run for run in read("frames") if run["release"] == "0.26.0")
    scheduler = type("Mixed", (lab.Thin, replayed.Recorded), {})(run)
    first = replayed.plan_of(scheduler)
    second = replayed.plan_of(scheduler)
    cut = {name: of["is_prefill_chunk"] for name, of in run["plans"][second.number].items()}
    ids = list(cut)
    scheduler.requests |= {name: replayed.SimpleNamespace(request_id=name) for name in ids}
    scheduler.frames = [
        {"id": name, "num_output_placeholders": 1, "is_stale": False} for name in ids
    ]
    output = replayed.Output({name: i for i, name in enumerate(ids)}, [[7] for _ in ids])
    scheduler.update_from_output(second, output)
    expected = {name: [7] for name in ids if not cut[name]}
    assert scheduler.came == expected, (
        f"plan {first.number} is lost and plan {second.number} comes back; it cuts {cut}.\n"
        f"expected {expected} to reach the scheduler, came {scheduler.came}"
    )


def mixed(lab, release: str):
    """`Thin` in front of a recorded scheduler, made as an engine makes it: by names."""
    run = next(run for run in read("frames") if run["release"] == release)
    return type("Mixed", (lab.Thin, replayed.Recorded), {})(run=run)


def test_what_an_engine_names_goes_through(lab):
    """Arguments by place alone."""
    try:
        plan = mixed(lab, "0.33.0").schedule(throttle_prefills=True)
    except TypeError as error:
        raise AssertionError(
            f"run=... and throttle_prefills=True: expected both to arrive\ncame     {error}"
        ) from None
    same(plan.number, 0, "the release's own plan")


@pytest.mark.slow
def test_a_plan_that_came_back_is_let_go(lab):
    """Notes that are kept for good: a server that grows with each step."""
    scheduler = mixed(lab, "0.26.0")
    plans = [replayed.plan_of(scheduler) for _ in range(3)]
    seen = [weakref.ref(plan) for plan in plans]
    while plans:
        ids = list(plans[0].num_scheduled_tokens)
        output = replayed.Output({name: i for i, name in enumerate(ids)}, [[] for _ in ids])
        scheduler.update_from_output(plans.pop(0), output)
    gc.collect()
    kept = [number for number, plan in enumerate(seen) if plan() is not None]
    same(kept, [], "plans that are still held when all have come back")


@pytest.mark.slow
def test_a_plan_that_never_came_is_let_go_with_the_next_that_does(lab):
    """Notes of plans that were lost: a server that grows with each failure."""
    scheduler = mixed(lab, "0.26.0")
    lost = [weakref.ref(replayed.plan_of(scheduler)) for _ in range(2)]
    plan = replayed.plan_of(scheduler)
    ids = list(plan.num_scheduled_tokens)
    output = replayed.Output({name: i for i, name in enumerate(ids)}, [[] for _ in ids])
    scheduler.update_from_output(plan, output)
    gc.collect()
    kept = [number for number, of in enumerate(lost) if of() is not None]
    same(kept, [], "plans that are still held when a later one has come back")


@pytest.mark.slow
def test_it_survives_on_the_releases_themselves(lab):
    """Your class on the real cores: the plans of a device without fault."""
    from conformance.features.async_scheduling import override
    from conformance.real_core import why_not

    for version in ("0.26.0", "0.27.0", "0.33.0"):
        if problem := why_not(version):
            pytest.skip(f"course upstream fetch --version {version}: {problem}")
        for seed in (0, 1, 2):
            plain = override.told(override.run(version, seed, "none", None))
            made = override.run(version, seed, "every", lab.Thin)
            came = made if isinstance(made, str) else override.told(made)
            assert came == plain, (
                f"vLLM {version}, seed {seed}: texts, preemptions, steps and computed tokens.\n"
                f"expected {plain}\ncame     {came}"
            )
