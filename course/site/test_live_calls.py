"""The live engine's calls and links: a replay gives the same state, nonsense is refused by name."""

from __future__ import annotations

import random
import re

import pytest

from course.site import live, live_link
from course.site.live import Session, Settings, Wanted
from course.site.test_live import random_run


@pytest.fixture
def begun():
    live._current.clear()
    return live.start(model="toy")


def test_steps_come_one_by_one_or_several_at_once(begun):
    assert begun["at"] == 0 and len(begun["frames"]) == 1
    one = live.step()
    more = live.step(3)
    assert [frame["step"] for frame in one["frames"] + more["frames"]] == [0, 1, 2, 3]
    assert live.state()["frames"][1:] == one["frames"] + more["frames"]
    rest = live.step(live.MOST_STEPS)
    assert rest["done"] and live.step()["frames"] == []


def test_a_request_that_is_added_or_ended_at_a_step_is_so_in_every_replay(begun):
    live.step(5)
    live.add("one more", 3)
    live.step(2)
    live.abort("A")
    live.step(4)
    document = live.state()
    assert document["requests"][-1] | {"arrival": 5, "arrived": 5} == document["requests"][-1]
    assert "A" in document["frames"][7]["running"] and "A" not in document["frames"][8]["cells"]
    assert live.start(**live_link.read(document["link"]), model="toy") == document


def test_going_back_and_adding_keeps_what_was_before(begun):
    live.step(12)
    document = live.add("late idea", 3, at=4)
    assert document["at"] == 4
    assert document["requests"][-1]["arrival"] == 4
    assert "H" in document["frames"][-1]["waiting"] or document["frames"][-1]["step"] == 3


def test_an_abort_of_everybody_lets_the_next_arrival_come():
    session = Session(
        Settings(), [Wanted("ab", 5), Wanted("cd", 2, arrival=40)], [(1, "A")], model="toy"
    )
    session.go(live.MOST_STEPS)
    assert session.arrived_at == {"A": 0, "B": 1}
    assert session.num_steps == 3


def test_a_link_gives_the_state_again(begun):
    live.step(17)
    document = live.state()
    assert live.start(**live_link.read("#" + document["link"]), model="toy") == document
    assert len(document["link"]) < 600


@pytest.mark.parametrize("seed", range(60))
def test_what_a_link_says_is_read_back(seed):
    rng = random.Random(seed)
    settings, wanted = random_run(seed)
    letters = "aé+&=.%#~ \n\u20ac\U0001f600"
    wanted = [
        Wanted("".join(rng.choices(letters, k=9)), one.max_tokens, one.arrival, one.priority)
        for one in wanted
    ]
    aborts = [(3, "A"), (0, "B")]
    link = live_link.written(live.asdict(settings), [live.asdict(one) for one in wanted], aborts, 7)
    assert re.fullmatch(r"[\w.~+%&=-]+", link, re.ASCII)
    assert live_link.read(link) == {
        "settings": live.asdict(settings),
        "requests": [live.asdict(one) for one in wanted],
        "aborts": aborts,
        "at": 7,
    }


def test_the_longest_run_has_a_link_that_is_read():
    wanted = [Wanted("\u20ac" * 66, live.MOST_OUTPUTS, live.MOST_STEPS, -9)] * live.MOST_REQUESTS
    link = live_link.written(
        live.asdict(Settings(budget=256, blocks=128, threshold=256)),
        [live.asdict(one) for one in wanted], [(499, "H")] * 8, 500,
    )  # fmt: skip
    assert len(live_link.read(link)["requests"]) == live.MOST_REQUESTS


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("", "begins with live=1"),
        ("live=2&r=1.0.0.a", "begins with live=1"),
        ("live=1", "no request"),
        ("live=1&at=3", "no request"),
        ("live=1&r=1.0.0.", "cannot read the request"),
        ("live=1&r=a", "cannot read the request"),
        ("live=1&r=1.0.0.<b>", "cannot read the request"),
        ("live=1&r=1.0.0.%ff", "not UTF-8"),
        ("live=1&r=1.0.0.a&budget=9&budget=8", "cannot read 'budget=8'"),
        ("live=1&r=1.0.0.a&colour=9", "cannot read 'colour=9'"),
        ("live=1&r=1.0.0.a&budget=x", "cannot read 'budget=x'"),
        ("live=1&r=1.0.0.a&policy=lifo", "cannot read 'policy=lifo'"),
        ("live=1&r=1.0.0.a&x=1.AB", "cannot read 'x=1.AB'"),
        ("live=1&r=1.0.0.a&at=1&at=2", "cannot read 'at=2'"),
        ("live=1&r=1.0.0.a" + "&r=1.0.0.a" * 900, "at most 6000"),
        ("live=1&r=1.0.0.a&budget=0", "budget=0: need 1 to 256"),
        ("live=1&r=1.0.0.a&at=9999", "at=9999: need 0 to 500"),
        ("live=1&r=0.0.0.a", "max_tokens=0: need 1 to 64"),
        ("live=1&r=1.0.0.a&x=1.Z", "abort='Z': need one of A"),
        ("live=1" + "&r=1.0.0.a" * 9, "requests=9: need 1 to 8"),
    ],
)
def test_a_link_of_nonsense_is_refused_by_name_and_the_run_stays(begun, link, complaint):
    before = live.state()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        live.open_link(link)
    assert live.state() == before


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"settings": {"speed": 3}}, "speed=3: no such setting; there are budget"),
        ({"settings": {"budget": "32"}}, "budget='32': need an int, 1 to 256"),
        ({"settings": {"budget": True}}, "budget=True: need an int, 1 to 256"),
        ({"settings": {"slots": 9}}, "slots=9: need 1 to 8"),
        ({"settings": {"budget": 3}}, "slots=4: need at most budget=3"),
        ({"settings": {"policy": "lifo"}}, "policy='lifo': need one of fcfs, priority"),
        ({"settings": {"blocks": 5}}, "request B: prompt of 69 tokens with max_tokens=10 needs 10"),
        ({"settings": {"chunked": 0, "threshold": 0}}, "budget=32: with chunked=0 request A may"),
        ({"requests": []}, "requests=0: need 1 to 8"),
        ({"requests": ["a"]}, "request='a': need an object with a prompt"),
        ({"requests": [{"prompt": "a", "n": 2}]}, "request has 'n': there are prompt"),
        ({"requests": [{"prompt": ""}]}, "prompt='': need a text"),
        ({"requests": [{"prompt": "\ud800"}]}, "need whole characters"),
        ({"requests": [{"prompt": "a" * 201}]}, "has 201 bytes, need at most 200"),
        ({"requests": [{"prompt": "a", "max_tokens": 65}]}, "max_tokens=65: need 1 to 64"),
        ({"requests": [{"prompt": "a", "arrival": -1}]}, "arrival=-1: need 0 to 500"),
        ({"aborts": [3]}, "abort=3: need [step, id]"),
        ({"aborts": [[3, "Q"]]}, "abort='Q': need one of A"),
        ({"at": 501}, "at=501: need 0 to 500"),
    ],
)
def test_bad_input_is_refused_by_name_and_the_run_stays(begun, arguments, complaint):
    before = live.state()
    with pytest.raises(ValueError, match=re.escape(complaint)):
        live.start(**arguments)
    assert live.state() == before


def test_without_a_run_there_is_nothing_to_step():
    live._current.clear()
    with pytest.raises(ValueError, match="call start first"):
        live.step()


def test_an_addition_that_is_refused_changes_nothing(begun):
    live.step(3)
    before = live.state()
    with pytest.raises(ValueError, match="at=9: need 0 to 3"):
        live.add("late", at=9)
    with pytest.raises(ValueError, match="need one of A"):
        live.abort("Z")
    assert live.state() == before


def test_the_defaults_of_links_are_those_of_the_settings():
    defaults = live.asdict(Settings())
    assert defaults.pop("policy") == "fcfs"
    assert defaults == live_link.SETTINGS
