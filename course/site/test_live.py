"""The live engine: it decides as the plain one, says why truthfully, and a link gives it back."""

from __future__ import annotations

import functools
import json
import random
import re
from collections import Counter
from typing import Any

import pytest

from course.site import gantt, live, live_why
from course.site.live import Session, Settings, Wanted
from course.truth import checking, citations
from mini_vllm.engine import LLMEngine

SCHEDULES = {"decodes", "catches_up", "is_held_to_the_threshold", "takes_the_rest"}
GIVES_WAY = {"gives_way_as_the_last", "gives_way_as_least_urgent"}


def random_run(seed: int) -> tuple[Settings, list[Wanted]]:
    """Settings and requests under which much is short."""
    rng = random.Random(seed)
    size = rng.choice((2, 4, 8))
    budget = rng.choice((6, 12, 24, 48))
    prefix = "".join(rng.choice("ab") for _ in range(rng.choice((4, 17, 26))))
    wanted = [
        Wanted(
            prefix[: rng.randint(0, len(prefix))]
            + "".join(rng.choices("xyz", k=rng.randint(1, 20))),
            rng.randint(1, 12),
            rng.choice((0, 0, 0, 1, 3, 9)),
            rng.randint(-9, 9),
        )
        for _ in range(rng.randint(2, 7))
    ]
    longest = max(len(one.prompt) + one.max_tokens for one in wanted)
    chunked = rng.random() < 0.8
    return (
        Settings(
            budget=budget if chunked else max(budget, longest),
            blocks=-(-longest // size) + rng.randint(0, 6),
            slots=min(budget, rng.choice((1, 2, 4, 8))),
            block_size=size,
            threshold=rng.choice((0, 0, 5, 9)),
            chunked=int(chunked),
            caching=int(rng.random() < 0.7),
            policy=rng.choice(("fcfs", "fcfs", "priority")),
        ),
        wanted,
    )


def finished(settings: Settings, wanted: list[Wanted], model: Any = "toy") -> Session:
    session = Session(settings, wanted, model=model)
    session.go(live.MOST_STEPS)
    return session


# ---------------------------------------------------------------------- the run


@pytest.mark.slow
def test_the_run_it_begins_with_is_the_recorded_one_with_the_shipped_model():
    recorded = gantt.engine_timeline()
    session = finished(Settings(), live.default_requests(), model=None)
    assert [frame["total"] for frame in session.frames[1:]] == recorded["totals"]
    assert type(session.engine.model).__name__ == "Transformer"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_watching_changes_no_decision(seed):
    settings, wanted = random_run(seed)
    session = finished(settings, wanted)
    plain = gantt.record(
        LLMEngine(model="toy", **settings.knobs()),
        [
            gantt.Arrival(name, one.prompt, one.max_tokens, one.arrival, one.priority)
            for name, one in zip(session.ids, wanted, strict=True)
        ],
    )
    assert [frame["total"] for frame in session.frames[1:]] == plain["totals"]
    for request in plain["requests"]:
        mine = [f["cells"][request["id"]] for f in session.frames if request["id"] in f["cells"]]
        assert mine == request["cells"]


@pytest.mark.slow
def test_texts_do_not_depend_on_the_settings():
    """In float64 nothing of a batch reaches a token: preemption, chunks and hits change no text."""
    wanted = live.default_requests()
    tight = Settings(budget=20, blocks=12, slots=3, block_size=8, threshold=0)
    texts = [finished(settings, wanted, model=None).frames[-1] for settings in (Settings(), tight)]
    assert texts[0]["texts"] == texts[1]["texts"]
    assert texts[0]["counters"] != texts[1]["counters"]


def test_a_document_is_json_and_the_same_every_time():
    settings, wanted = random_run(5)
    documents = [finished(settings, wanted).document() for _ in range(2)]
    assert documents[0] == documents[1]
    assert json.loads(json.dumps(documents[0])) == documents[0]


# ---------------------------------------------------------------------- why


class Oracle:
    """Blocks, cached prefixes and budget of a run, followed by tables and tokens alone."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.size = session.settings.block_size
        self.tables: dict[str, list[int]] = {}
        self.content: dict[int, tuple[int, ...]] = {}
        self.hashed: dict[int, None] = {}  # the first cached first

    def tokens(self, name: str, count: int) -> tuple[int, ...]:
        return tuple(self.session.requests[name].all_token_ids[:count])

    def held(self) -> Counter[int]:
        return Counter(block for table in self.tables.values() for block in table)

    def free(self) -> int:
        return self.session.settings.blocks - len(self.held())

    def cached_prefix(self, name: str, known: int) -> list[int]:
        """For each leading block of its tokens that is cached, who has held it longest."""
        found: list[int] = []
        while self.session.settings.caching and (len(found) + 1) * self.size < known:
            wanted = self.tokens(name, (len(found) + 1) * self.size)
            same = [b for b in self.hashed if self.content.get(b) == wanted]
            if not same:
                break
            found.append(same[0])
        return found

    def needs(self, name: str, known: int) -> int:
        """Free blocks it takes to admit a request with `known` tokens."""
        held = self.held()
        shared = sum(held[block] > 0 for block in self.cached_prefix(name, known))
        return -(-known // self.size) - shared

    def schedule(self, name: str, frame: dict[str, Any]) -> None:
        """The request has its blocks of this step."""
        cell, table = frame["cells"][name], frame["pool"]["tables"][name]
        old = self.tables.get(name, [])[:]
        assert table[: len(old)] == old
        self.tables[name] = list(table)
        for place, block in enumerate(table):
            if block not in old and place * self.size >= cell["hit"]:
                self.hashed.pop(block, None)  # its old content is gone
            if (place + 1) * self.size <= cell["computed"] + cell["tokens"]:
                self.content[block] = self.tokens(name, (place + 1) * self.size)
                if self.session.settings.caching:
                    self.hashed.setdefault(block)


def checked(session: Session, number: int, oracle: Oracle) -> None:
    """Every decision of a step against the oracle, in their order."""
    frame = session.frames[number + 1]
    settings, total, cells = session.settings, frame["total"], frame["cells"]
    budget = settings.budget
    for each in frame["why"]:
        name, about, numbers = each["name"], each["about"], each["numbers"]
        cell = cells[about]
        lacks = cell["known"] - cell["computed"]
        if name in SCHEDULES:
            assert cell["tokens"] == (1 if name == "decodes" else numbers["tokens"])
            if name in ("decodes", "catches_up"):
                assert cell["tokens"] == lacks <= budget
            elif name == "is_held_to_the_threshold":
                assert cell["tokens"] == settings.threshold < numbers["lacks"] == lacks
            else:
                assert cell["tokens"] == budget < numbers["lacks"] == lacks
                assert numbers["budget"] == settings.budget
            budget -= cell["tokens"]
            oracle.schedule(about, frame)
        elif name in GIVES_WAY:
            to = cells[numbers["to"]]
            assert numbers["free"] == oracle.free() < numbers["needed"]
            assert numbers["blocks"] == len(oracle.tables.pop(about))
            assert numbers["needed"] >= 1 and to["kind"] != "waiting"
            if numbers["to"] != about and to["tokens"]:
                slots = -(-(to["computed"] + to["tokens"]) // settings.block_size)
                assert numbers["needed"] == slots - len(oracle.tables[numbers["to"]])
        elif name == "is_admitted":
            assert numbers["free"] == oracle.free() >= numbers["needed"]
            assert numbers["needed"] == oracle.needs(about, cell["known"])
            assert numbers["known"] == cell["known"]
            assert frame["running"].index(about) + 1 == numbers["slot"] <= settings.slots
        elif name == "adopts":
            found = oracle.cached_prefix(about, cell["known"])
            assert numbers["blocks"] == len(found) == cell["hit"] // settings.block_size
            assert numbers["tokens"] == cell["hit"]
            assert numbers["most"] == (cell["known"] - 1) // settings.block_size
        elif name == "waits_for_blocks":
            assert about == frame["waiting"][0]
            assert numbers["free"] == oracle.free() < numbers["needed"]
            assert numbers["needed"] == oracle.needs(about, cell["known"])
            assert numbers["known"] == cell["known"]
        elif name == "waits_for_a_whole_chunk":
            assert settings.chunked == 0 and about == frame["waiting"][0]
            assert numbers["left"] == budget < numbers["chunk"]
        elif name == "waits_for_budget":
            assert budget == 0 and numbers["budget"] == settings.budget
        elif name == "waits_for_a_slot":
            assert len(frame["running"]) == settings.slots == numbers["slots"]
        elif name == "waits_after_preemption":
            assert numbers["victims"] == " and ".join(total["preempted"])
        elif name == "waits_behind":
            assert numbers["head"] == frame["waiting"][0] != about
        elif name == "overwrites":
            assert set(numbers["blocks"]) <= set(frame["pool"]["lost"])
        elif name == "ends":
            request = session.requests[about]
            wanted = session.wanted[session.ids.index(about)]
            assert cell["finish"] == "length"
            assert numbers["outputs"] == wanted.max_tokens == request.num_output_tokens
        else:
            raise AssertionError(name)
        assert set(re.findall(r"\d+", each["text"])) <= set(re.findall(r"\d+", f"1 {numbers}"))
    for name in total["finished"]:
        oracle.tables.pop(name)


def complete(frame: dict[str, Any]) -> None:
    """Every decision of the step has one reason."""
    said = Counter((each["about"], each["name"]) for each in frame["why"])
    assert max(said.values(), default=1) == 1

    def those(names: set[str]) -> list[str]:
        return sorted(each["about"] for each in frame["why"] if each["name"] in names)

    batch = [entry["id"] for entry in frame["batch"]]
    assert those(SCHEDULES) == sorted(batch)
    assert those({name for _, name in said if name.startswith("waits")}) == sorted(frame["waiting"])
    assert those(GIVES_WAY) == sorted(frame["total"]["preempted"])
    assert those({"is_admitted"}) == sorted(frame["total"]["admitted"])
    assert those({"ends"}) == sorted(frame["total"]["finished"])
    assert those({"adopts"}) == sorted(entry["id"] for entry in frame["batch"] if entry["hit"])
    idle = [name for name in frame["running"] if name not in batch]
    assert those({"is_not_reached"}) == sorted(idle)


@functools.cache
def run_of(seed: int) -> Session:
    return finished(*random_run(seed))


def runs(number: int = 200) -> list[Session]:
    return [run_of(seed) for seed in range(number)]


@pytest.mark.slow
def test_every_number_of_every_reason_is_true_in_hundreds_of_random_runs():
    """Served in order; under priorities a step may take a plan back, see below."""
    counted: Counter[str] = Counter()
    for session in runs():
        if session.settings.policy != "fcfs":
            continue
        oracle = Oracle(session)
        for number in range(session.num_steps):
            checked(session, number, oracle)
        counted.update(each["name"] for frame in session.frames for each in frame["why"])
    missing = {rule.__name__ for rule in live_why.OURS} - counted.keys()
    assert missing == {"gives_way_as_least_urgent", "is_withdrawn", "is_not_reached"}
    assert min(counted.values()) >= 3, counted


@pytest.mark.slow
def test_every_decision_has_exactly_one_reason():
    frames = [frame for session in runs(60) for frame in session.frames[1:]]
    for frame in frames:
        complete(frame)
    assert len(frames) > 900


@pytest.mark.slow
def test_every_decision_of_hundreds_of_random_runs_has_exactly_one_reason():
    for session in runs():
        for frame in session.frames[1:]:
            complete(frame)


@pytest.mark.slow
def test_under_priorities_the_victim_is_the_least_urgent_and_the_refund_is_what_it_had():
    counted: Counter[str] = Counter()
    for session in (s for s in runs() if s.settings.policy == "priority"):
        urgency = {
            name: (one.priority, list(session.requests).index(name))
            for name, one in zip(session.ids, session.wanted, strict=True)
        }
        for before, frame in zip(session.frames[1:], session.frames[2:], strict=False):
            ran = [name for name in before["running"] if name not in before["total"]["finished"]]
            for each in frame["why"]:
                counted[each["name"]] += 1
                numbers = each["numbers"]
                if each["name"] == "gives_way_as_least_urgent":
                    assert each["about"] == max(ran, key=urgency.__getitem__)
                    assert numbers["needed"] > numbers["free"]
                    ran.remove(each["about"])
                elif each["name"] == "is_withdrawn":
                    assert each["about"] in frame["total"]["preempted"]
                    assert 1 <= numbers["tokens"] <= session.settings.budget
    assert min(counted[name] for name in ("gives_way_as_least_urgent", "is_withdrawn")) >= 3
    assert counted["is_not_reached"] >= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "knob"), [("waits_for_a_slot", "slots"), ("waits_for_budget", "budget")]
)
def test_with_one_more_of_what_is_short_the_reason_is_gone(reason, knob):
    tried = 0
    for session in runs(60):
        for frame in session.frames[1:]:
            heads = [w["about"] for w in frame["why"] if w["name"] == reason]
            if not heads:
                continue
            again = Session(session.settings, session.wanted, model="toy")
            again.go(frame["step"])
            scheduler = again.engine.scheduler
            if knob == "slots":
                scheduler.max_num_seqs += 1
            else:
                enough = 1 + sum(cell["known"] for cell in frame["cells"].values())
                object.__setattr__(scheduler.config, "max_num_batched_tokens", enough + 99)
            changed = again.step()
            assert changed is not None
            assert (heads[0], reason) not in [(w["about"], w["name"]) for w in changed["why"]]
            tried += 1
            break
    assert tried >= 10


@pytest.mark.parametrize("rule", live_why.OURS, ids=lambda rule: rule.__name__)
def test_every_rule_names_its_line_here(rule):
    sentence, vllm, mini = live_why.sources(rule)
    assert sentence.endswith(".") and vllm["first"] <= vllm["last"]
    lines = (live_why.ROOT / mini["path"]).read_text(encoding="utf-8").splitlines()
    assert lines[mini["line"] - 1].strip() == mini["code"]
    assert mini["symbol"].rpartition(".")[2] == live_why.OURS[rule][0].__name__


@pytest.mark.upstream
def test_every_rule_cites_the_pinned_tree_exactly():
    page = live_why.ROOT / "course" / "site" / "live_why.py"
    cited, problems = citations.in_file(page, live_why.ROOT)
    assert not problems and len(cited) == len(live_why.OURS)
    assert [checking.problem_of(c, live_why.ROOT / "upstream") for c in cited] == [""] * len(cited)
