"""The playground's Python: both runs frame by frame, the link, and what is refused."""

from __future__ import annotations

import pytest

from conformance.known_releases import RELEASES
from conformance.real_core import why_not
from course.site import live, real_payload, vllm_live, widgets
from course.site.test_live_real import workload
from mini_vllm.releases import PARTS, PIN

needs_the_tree = pytest.mark.skipif(bool(why_not()), reason=why_not())
PROVED = [
    pytest.param(
        release,
        marks=[pytest.mark.skipif(bool(why_not(release)), reason=why_not(release))]
        + ([] if release == PIN else [pytest.mark.slow]),
    )
    for release in (PIN, *RELEASES)
]


def first_run():
    begin = live.defaults()
    return {"settings": begin["settings"], "requests": begin["requests"]}


@pytest.mark.parametrize("release", PROVED)
def test_what_the_real_scheduler_does_is_drawn_as_what_the_same_rules_do_here(release):
    for seed in range(5 if release == PIN else 40):
        told = vllm_live.play(**workload(seed), release=release, beside=release)
        assert told["difference"] is None
        for real, ours in zip(told["real"], told["ours"], strict=True):
            for name in real.keys() - {"why", "texts", "counters"}:
                assert real[name] == ours[name], (seed, real["step"], name)


@needs_the_tree
def test_both_runs_come_to_their_end():
    told = vllm_live.play(**first_run())
    for side in ("real", "ours"):
        ends = [cell["finish"] for frame in told[side] for cell in frame["cells"].values()]
        assert ends.count("length") == len(told["requests"])


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not("0.33.0")), reason=why_not("0.33.0"))
def test_a_later_release_beside_the_rules_of_the_pin_parts_and_both_go_on():
    told = vllm_live.play(**first_run(), release="0.33.0")
    assert (told["difference"]["step"], told["difference"]["field"]) == (12, "tables")
    alike = [one["pool"]["tables"] == other["pool"]["tables"] for one, other in
             zip(told["real"], told["ours"], strict=True)]  # fmt: skip
    assert alike[:13] == [True] * 13 and not alike[13]
    assert not told["real"][-1]["waiting"] and len(told["real"]) == 32
    assert vllm_live.play(**first_run(), release="0.33.0", beside="0.33.0")["difference"] is None


@needs_the_tree
def test_a_link_holds_the_run_and_both_releases():
    asked = {**workload(3), "aborts": [[2, "A"]]}
    told = vllm_live.play(**asked, beside="0.23.0")
    again = vllm_live.open_link(f"#{told['link']}")
    assert again == told
    assert (again["beside"], again["aborts"]) == ("0.23.0", [[2, "A"]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"beside": "0.22.0"}, "beside='0.22.0': need one of 0.22.1, 0.23.0"),
        ({"release": "9.9.9"}, "release='9.9.9': not here"),
        ({"settings": {"blocks": 0}}, "blocks=0"),
    ],
)
def test_what_cannot_be_decided_is_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        vllm_live.play(**{**first_run(), **change})


@pytest.mark.parametrize("link", ["", "live=1&r=1.0.0.a", "vllm=1&live=1&r=1.0.0.a", 3])
def test_another_link_is_refused(link):
    with pytest.raises(ValueError, match="need one that begins with vllm=RELEASE"):
        vllm_live.open_link(link)


def test_a_site_without_the_pinned_tree_offers_no_release(tmp_path):
    assert real_payload.offered(tmp_path) == []
    assert set(widgets.document("vllm-live")["proved"]) == set(PARTS)
