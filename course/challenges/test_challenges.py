"""Challenges: scores are vLLM's own, exact, and not had by cheating."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from course.challenges import judge, ledger, record, shown
from course.challenges.judge import Verdict, Wrong
from course.learning.labs import CourseError
from course.terminal import make_console

CUT = {
    "queue": lambda load: {**load, "ops": load["ops"][:40]},
    "lookups": lambda load: load[:6],
    "eviction": lambda load: {**load, "capacity": 120, "requests": load["requests"][:12]},
    "goodput": lambda load: load[:6],
    "sizes": lambda load: {name: batches[:300] for name, batches in load.items()},
    "drafter": lambda load: {**load, "text": load["text"][:20]},
    "masks": lambda load: load[:3],
    "placement": lambda load: {"tokens": load["tokens"][:50], "later": load["later"][:50]},
    "rebalance": lambda load: load[:3],
}
"""Of each challenge's workload, what a test needs."""


def cut(name: str) -> Any:
    challenge = judge.load(name)
    return challenge, CUT[name](challenge.meter.workload(f"{name}:0"))


def score_of(tmp_path: Any, name: str, text: str) -> int:
    challenge, load = cut(name)
    file = tmp_path / "answer.py"
    file.write_text(text, encoding="utf-8")
    return judge.play(challenge, file, load)


def starter(name: str) -> str:
    return judge.load(name).starter.read_text(encoding="utf-8")


# ------------------------------------------------------------------ vLLM's numbers


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("goodput", "lookups") else [])
        for name in judge.NAMES
    ],
)
def test_the_rule_on_this_side_scores_what_was_recorded_from_vllm(name):
    challenge = judge.load(name)
    for seed, kept in zip(judge.seeds(challenge), judge.recorded()[name], strict=True):
        load = challenge.meter.workload(seed)
        assert judge.digest(load) == kept["digest"], "another Python drew another workload"
        assert challenge.meter.vllm(load) == kept["vllm"]


@pytest.mark.upstream
@pytest.mark.parametrize("name", judge.NAMES)
def test_the_pinned_tree_still_scores_so(name):
    assert record.scores(judge.load(name)) == judge.recorded()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", judge.NAMES)
def test_the_reference_reaches_every_mark_and_the_starter_is_right_but_does_not(name):
    challenge = judge.load(name)
    reference = judge.evaluate(challenge, challenge.reference, "0")
    assert reference.marks == [mark for mark, *_ in challenge.meter.MARKS], reference
    first = judge.evaluate(challenge, challenge.starter, "0")
    assert not first.why and not first.marks, "nothing written, nothing reached"
    if name in ("placement", "masks"):  # two of the quick ones
        again = judge.evaluate(challenge, challenge.starter, "0")
        assert first == again, "the same answer and seed give the same verdict"


TRACE = judge.HERE.parents[1] / "mini_vllm/simulate/sample_traces/mooncake.jsonl"


@pytest.mark.parametrize("file", [str(TRACE), os.environ.get("MOONCAKE_TRACE", "")])
def test_the_eviction_reference_is_not_fitted_to_drawn_traces(file):
    """`MOONCAKE_TRACE=FILE` plays Mooncake's own trace; the sample is always there."""
    if not file:
        pytest.skip("MOONCAKE_TRACE names no trace of Mooncake's")
    with open(file, encoding="utf-8") as lines:
        rows = [json.loads(line)["hash_ids"] for line in lines][:1500]
    challenge: Any = judge.load("eviction")
    rows = [list(dict.fromkeys(row)) for row in rows if row]
    distinct = len({block for row in rows for block in row})
    load = challenge.meter.of_trace(rows, max(distinct // 8, max(map(len, rows))))
    came = judge.play(challenge, challenge.reference, load)
    assert came >= challenge.meter.vllm(load) > 0


# ------------------------------------------------------------------ cheating

REFUSED = {
    # What ends the process, or never says anything.
    "exits while it is read": ("placement", "raise SystemExit(0)", "SystemExit"),
    "exits in a call": ("placement", "import sys\nBODY: sys.exit()", "SystemExit"),
    "ends its process": ("placement", "import os\nBODY: os._exit(0)", "process ended"),
    "closes the line to the judge": (
        "placement", "import os\nBODY: os.closerange(3, 99)", "process ended|Bad file|not JSON",
    ),
    # Values that lie.
    "bools for ranks": ("placement", "BODY: return [True] * 32", "whole number"),
    "floats for ranks": ("placement", "BODY: return [1.0] * 32", "whole number"),
    "not a number": ("placement", "BODY: return [float('nan')] * 32", "not JSON"),
    "an object equal to everything": (
        "placement",
        "class Any:\n    def __eq__(self, other):\n        return True\nBODY: return Any()",
        "not JSON serializable",
    ),
    "a list that says another length": (
        "placement",
        "class Long(list):\n    def __len__(self):\n        return 32\nBODY: return Long([0])",
        "need a list|must give each|process ended",
    ),
    "nested without end": ("placement", "BODY: return eval('['*150 + ']'*150)", "whole number"),
    "says more than a line may hold": ("placement", "BODY: return 'x' * 5_000_000", "characters"),
    "every expert on one rank": ("placement", "BODY: return [0] * 32", "must give each"),
    # What is not an answer.
    "asks what is not there to be asked": (
        "queue",
        "import json, os\nBODY: [os.write(f, b'{\"ask\": \"ranks\", \"args\": []}\\n')"
        " for f in range(4, 9) if os.path.exists(f'/proc/self/fd/{f}')"
        " and 'pipe' in os.readlink(f'/proc/self/fd/{f}')]; return 0",
        "process asked|less|whole number|process ended",
    ),
    "a ticket it never got": ("queue", "BODY: return self.less(-1, 3)", "need two tickets"),
    "any ticket": ("queue", "BODY: return 0", "most urgent"),
    "a count from nowhere": ("lookups", "BODY: return 0", "gave 0 of"),
    "a look at another prompt's block": ("lookups", "BODY: self.cached(-1)", "of this prompt"),
    "evicts what is not there": ("eviction", "BODY: return list(range(9000, 9000 + args[1]))",
                                 "gave block 9000: need cached blocks"),
    "evicts nothing": ("eviction", "BODY: return []", "gave 0 different blocks: need"),
    "evicts one block many times": (
        "eviction", "BODY: return [0] * args[1]", "gave block 0: need|different blocks",
    ),
    "plans nothing": ("goodput", "BODY: return []", "at least one"),
    "plans beyond the budget": (
        "goodput",
        "BODY: return [[r['name'], r['prompt']] for r in args[1]] * 2 if args[1] else []",
        "each once|at least one",
    ),
    "plans who is not there": ("goodput", "BODY: return [['r999', 1]]", "names 'r999': need"),
    "plans more than is left": (
        "goodput", "BODY: return [[args[1][0]['name'], 10**6]]", "whole number from 1",
    ),
    "captures more sizes than it may": ("sizes", "BODY: return list(range(1, 129))", "at most 19"),
    "leaves the largest batch out": ("sizes", "BODY: return [64]", "ends at 64: need 128"),
    "captures half a size": ("sizes", "BODY: return [0.5, 128]", "whole number from 1 to 128"),
    "drafts more than it may": ("drafter", "BODY: return [1] * 99", "at most 4"),
    "writes no mask": ("masks", "BODY: return {'rows': args[0], 'writes': []}", "does not hold"),
    "leaves requests out": ("masks", "BODY: return {'rows': [], 'writes': []}", "each once"),
    "writes beside the table": (
        "masks", "BODY: return {'rows': args[0], 'writes': [[99, 0, 0]]}", "row is 99",
    ),
    "never moves": ("rebalance", "BODY: return self.setup['placement']", "the limit is"),
    "drops an expert": ("rebalance", "BODY: return [[0] * 6] * 4", "no rank holds"),
    "holds more than its slots": ("rebalance", "BODY: return [list(range(16))] * 4", "at most 6"),
}  # fmt: skip
METHOD = {
    "queue": "pop", "lookups": "hits", "eviction": "evict", "goodput": "plan", "sizes": "sizes",
    "drafter": "draft", "masks": "step", "placement": "place", "rebalance": "rebalance",
}  # fmt: skip


def cheating(name: str, text: str) -> str:
    """The starter, with `BODY:` as the body of the method that matters."""
    before, found, body = text.partition("BODY:")
    if not found:
        return text
    made = f"\n\n_Honest = Answer\n{before}\n\nclass Answer(_Honest):\n"
    return starter(name) + made + f"    def {METHOD[name]}(self, *args):\n        {body.strip()}\n"


@pytest.mark.slow
@pytest.mark.parametrize("cheat", REFUSED)
def test_a_wrong_answer_scores_nothing_and_says_why(tmp_path, cheat):
    name, text, why = REFUSED[cheat]
    with pytest.raises(Wrong, match=why):
        score_of(tmp_path, name, cheating(name, text))


USELESS = {
    "replaces the meter": (
        "placement",
        "import course.challenges.placement.meter as m\nm.play = lambda *a: 0\nm.BYTES = 0\n"
        "import course.challenges.judge as j\nj.play = lambda *a: 0",
    ),
    "replaces json": (
        "drafter",
        "import json\n_real = json.dumps\n"
        "json.dumps = lambda value, **k: _real({**value, 'score': 0})",
    ),
    "changes what it is given": (
        "goodput",
        "BODY: args = [args[0], *([dict(r) for r in rows] for rows in args[1:])]; "
        "plan = _Honest.plan(self, *args); [r.update(arrival=10**9) for r in args[1]]; "
        "self.setup['first'] = 10**12; return plan",
    ),
    "looks through frames and objects": (
        "placement",
        "import gc, sys\nFOUND = []\nframe = sys._getframe()\nwhile frame:\n"
        "    FOUND += [v for v in frame.f_locals.values() if isinstance(v, dict)]\n"
        "    frame = frame.f_back\n"
        "FOUND += [v for v in gc.get_objects() if isinstance(v, dict)]\n"
        "if [v for v in FOUND if 'later' in v]: raise ValueError('found')",
    ),
    "looks for files beside it": (
        "drafter",
        "import os\nif sorted(os.listdir('.')) != ['answer.py', 'printed.txt']:\n"
        "    raise ValueError(os.listdir('.'))",
    ),
    "looks for seeds in its environment and arguments": (
        "drafter",
        "import os, sys\nif 'drafter:' in repr((sys.argv, dict(os.environ))):\n"
        "    raise ValueError('a seed')",
    ),
    "prints replies": ("drafter", "BODY: print('{\"value\": [1, 2]}'); return "
                                  "_Honest.draft(self, *args)"),
    "leaves a file for the next process": (
        "drafter", "import os\nif os.path.exists('cache'): raise ValueError('cached')\n"
                   "open('cache', 'w').close()",
    ),
    "leaves a thread": (
        "drafter", "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    ),
    "forks": (
        "drafter", "import os\nif os.fork() == 0:\n    import time; time.sleep(60)",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("cheat", USELESS)
def test_it_changes_nothing(tmp_path, cheat):
    if cheat == "forks" and not hasattr(os, "fork"):
        pytest.skip("this system has no fork")
    name, text = USELESS[cheat]
    made = cheating(name, text) if "BODY:" in text else starter(name) + "\n" + text + "\n"
    assert score_of(tmp_path, name, made) == score_of(tmp_path, name, starter(name))


WAITS = "import threading; threading.Event().wait()"


@pytest.mark.slow
def test_a_loop_without_end_and_questions_without_end_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(judge, "SECONDS", 2.0)
    with pytest.raises(Wrong, match="loop without end"):
        score_of(tmp_path, "placement", cheating("placement", "BODY: \n        while True: pass"))
    monkeypatch.setattr(judge, "PATIENCE", 1)
    with pytest.raises(Wrong, match="loop without end"):
        score_of(tmp_path, "placement", cheating("placement", f"BODY: \n        {WAITS}"))
    monkeypatch.setattr(judge, "SECONDS", 60.0)
    monkeypatch.setattr(judge, "ASKED", 500)
    ask = "BODY: \n        while True: self.less(self.waiting[0], self.waiting[0])"
    with pytest.raises(Wrong, match="more than 500 questions"):
        score_of(tmp_path, "queue", cheating("queue", ask))


KNOWS = """
import course.challenges.drafter.meter as m

TEXTS = {str(w["prompt"]): w["text"] for w in (m.workload(f"drafter:{n}") for n in range(4))}
_Honest = Answer


class Answer(_Honest):
    def __init__(self, setup):
        super().__init__(setup)
        self.text, self.at = TEXTS.get(str(setup["prompt"])), 0

    def draft(self, tokens):
        self.at += len(tokens)
        if self.text is None:
            return super().draft(tokens)
        return self.text[self.at : self.at + 4]
"""


@pytest.mark.slow
def test_what_is_known_of_the_standard_workloads_earns_no_mark(tmp_path, monkeypatch):
    """Answers kept in a file, and workloads drawn again from the seeds in the source."""
    monkeypatch.setattr(judge, "FRESH", 1)
    file = tmp_path / "answer.py"
    file.write_text(starter("drafter") + KNOWS, encoding="utf-8")
    verdict = judge.evaluate(judge.load("drafter"), file)
    assert not verdict.why and verdict.score < verdict.vllm
    assert verdict.fitted and verdict.marks == []


@pytest.mark.slow
def test_an_answer_that_scores_by_chance_scores_nothing(tmp_path):
    file = tmp_path / "answer.py"
    chance = "import os\nBODY: return [b % 100 for b in os.urandom(4)]"
    file.write_text(cheating("drafter", chance), encoding="utf-8")
    tries = (judge.evaluate(judge.load("drafter"), file, "0") for _ in range(8))
    verdict = next(each for each in tries if each.why)  # two runs may score alike by chance
    assert "two runs" in verdict.why and verdict.score == 0 and verdict.marks == []


def test_what_a_wrong_answer_printed_is_shown(tmp_path):
    text = cheating("placement", "BODY: print('here', len(self.setup)); return 1")
    with pytest.raises(Wrong, match=r"Your code printed:\nhere 3"):
        score_of(tmp_path, "placement", text)
    with pytest.raises(Wrong, match=r"place: line \d+: KeyError: 'gone'"):
        score_of(tmp_path, "placement", cheating("placement", "BODY: return self.setup['gone']"))


# ------------------------------------------------------------------ the ledger


@pytest.fixture
def drafter(tmp_path, monkeypatch):
    """Its verdicts are the given ones: nothing runs."""
    challenge = judge.load("drafter")
    told: list[Verdict] = []
    monkeypatch.setattr(judge, "evaluate", lambda *_: told.pop(0))
    return tmp_path, challenge, told


def test_tries_are_kept_with_their_texts_and_ideas(drafter, capsys):
    root, challenge, told = drafter
    console = make_console()
    path = ledger.answer_of(root, challenge)
    told += [
        Verdict(900, 636, 700, 470, "a"),
        Verdict(950, 636, 700, 470, "b"),
        Verdict(seed="c", why="draft: the answer's process ended\nYour code printed:\nmany lines"),
        Verdict(600, 636, 450, 470, "d", marks=["bronze", "vLLM's"]),
    ]
    for number in range(4):
        path.write_text(f"# idea {number}\n", encoding="utf-8")
        assert shown.check(console, root, challenge, f"idea {number}", "") == (number != 2)
    tries = ledger.read(root, challenge)
    assert [each.outcome for each in tries] == ["kept", "rejected", "rejected", "kept"]
    assert [each.note for each in tries] == [f"idea {n}" for n in range(4)]
    folder = ledger.folder_of(root, challenge) / "tries"
    assert {file.read_text() for file in folder.iterdir()} == {f"# idea {n}\n" for n in range(4)}
    assert ledger.best(challenge, tries) == tries[3] and ledger.answer_of(root, challenge) == path
    capsys.readouterr()
    shown.contract(console, root, challenge)
    said = capsys.readouterr().out
    assert "rejected  idea 1" in said and "nothing" in said and "at most 636 runs" in said
    assert "many lines" not in said, "a line for each try"


def test_a_shared_file_is_scored_again(drafter, tmp_path, capsys):
    root, challenge, told = drafter
    out = tmp_path / "shared.json"
    with pytest.raises(CourseError, match="No try at drafter has scored"):
        ledger.share(root, challenge, out)
    told += [Verdict(900, 636, 700, 470, "a"), Verdict(900, 636, 700, 470, "a")]
    shown.check(make_console(), root, challenge, "", "")
    ledger.share(root, challenge, out)
    with pytest.raises(CourseError, match="exists already"):
        ledger.share(root, challenge, out)
    assert shown.verify(make_console(), out)
    data = json.loads(out.read_text())
    out.write_text(json.dumps({**data, "score": 1}))
    told += [Verdict(900, 636, 700, 470, "a")]
    assert not shown.verify(make_console(), out)
    for wrong in ("[]", json.dumps({**data, "score": float("inf")})):
        out.write_text(wrong)
        with pytest.raises(CourseError, match="not a file that course challenge --share wrote"):
            shown.verify(make_console(), out)


def test_an_unreadable_ledger_is_moved_aside_and_names_are_named(drafter):
    root, challenge, _ = drafter
    path = ledger.folder_of(root, challenge) / "tries.json"
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(CourseError, match=r"moved to tries\.unreadable"):
        ledger.read(root, challenge)
    assert ledger.read(root, challenge) == [] and len(list(path.parent.glob("*.unreadable-*"))) == 1
    with pytest.raises(CourseError, match="The challenges are: queue, lookups"):
        shown.pick("speed")


@pytest.mark.slow
def test_the_command_lists_shows_and_refuses(course, little_course):
    assert "vLLM's 37,030 comparisons" in course("challenge").out
    said = course("challenge", "queue").out
    assert "at most 46,287 comparisons" in said and ".course/challenges/queue/answer.py" in said
    answer = little_course / ".course" / "challenges" / "queue" / "answer.py"
    answer.write_text("# mine\n", encoding="utf-8")
    course("challenge", "queue")
    assert answer.read_text(encoding="utf-8") == "# mine\n", "a file of the learner's stays"
    assert "no attribute 'Answer'" in course("challenge", "queue", "--check").out
    assert "tried, no score yet" in course("challenge").out
    assert "Name a challenge" in course("challenge", "--check").err
    assert "The challenges are: queue" in course("challenge", "speed").err
    assert "has scored yet" in course("challenge", "queue", "--share", "x.json").err
    assert "go with --check" in course("challenge", "queue", "--note", "a heap").err
    both = course("challenge", "queue", "--check", "--share", "x.json").err
    assert "--check and --share: one of them at a time" in both
    answer.unlink()
    answer.mkdir()
    assert "answer.py: Is a directory. Need a file" in course("challenge", "queue", "--check").err
