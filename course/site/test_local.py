"""The endpoint of `course book serve`: it serves its own pages and nobody else."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from course.challenges import judge, ledger
from course.conftest import TESTDATA
from course.learning.labs import find_labs
from course.learning.progress import PASSED, Progress
from course.site import book_site, local

ASKS = TESTDATA / "phase-90-selfcheck" / "labs" / "lab-08-predicts"
PAGE = "<html><head><title>x</title></head><body></body></html>"
RIGHT = "def num_blocks(num_tokens, block_size):\n    return -(-num_tokens // block_size)\n"
WRONG = RIGHT.replace("-(-num_tokens // block_size)", "num_tokens // block_size")


@dataclass
class Answer:
    status: int
    headers: Any
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]


class Client:
    """Asks as a browser would: with the Host of the address, and what a test adds."""

    def __init__(self, address: str) -> None:
        parts = urlsplit(address)
        self.host, self.entrance = parts.netloc, f"{parts.path}?{parts.query}"
        self.cookie = self.token = ""

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        sent = {"Cookie": self.cookie, "X-Course-Token": self.token, **(headers or {})}
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, data, sent)
        answer = connection.getresponse()
        told = Answer(answer.status, answer.headers, answer.read().decode())
        connection.close()
        return told

    def enter(self) -> Client:
        """Open the printed address, as the reader does."""
        answer = self.ask("GET", self.entrance)
        assert (answer.status, answer.headers["Location"]) == (303, "/")
        self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        found = re.search(r'name="course-token" content="([^"]+)"', self.ask("GET", "/").text)
        assert found
        self.token = found[1]
        return self

    def grade(self, text: str, base: str, **more: Any) -> Answer:
        return self.ask(
            "POST",
            "/.course/grade",
            {"lab": "90-00", "files": {"starter.py": text}, "base": base, **more},
        )

    def file(self) -> Any:
        return self.ask("GET", "/.course/lab?id=90-00").json


@pytest.fixture
def client(little_course: Path, tmp_path: Path) -> Iterator[Client]:
    site = tmp_path / "site"
    (site / "a").mkdir(parents=True)
    for name in ("index.html", "a/b.html"):
        (site / name).write_text(PAGE, encoding="utf-8")
    with book_site.serving(site, 0, None, local.Local(little_course)) as address:
        yield Client(address)


@pytest.fixture
def reader(client: Client) -> Client:
    return client.enter()


# ------------------------------------------------------------------ who may ask


def test_pages_carry_the_token_for_who_opened_the_printed_address_and_for_nobody_else(client):
    for path in ("/", "/index.html", "/a/b.html"):
        assert "course-token" not in client.ask("GET", path).text
    client.enter()
    for path in ("/", "/index.html?v=1", "/a/b.html"):
        assert client.token in client.ask("GET", path).text


def test_a_wrong_key_opens_the_page_without_the_token(client):
    answer = client.ask("GET", "/?key=guess")
    assert (answer.status, answer.headers["Set-Cookie"]) == (200, None)
    assert "course-token" not in answer.text


def test_the_cookie_is_for_this_site_alone_and_no_script_reads_it(client):
    told = client.ask("GET", client.entrance).headers["Set-Cookie"]
    assert "HttpOnly" in told and "SameSite=Strict" in told


def test_the_entrance_leads_to_no_other_machine(client):
    answer = client.ask("GET", "//evil.test/" + client.entrance.lstrip("/"))
    assert answer.headers["Location"] == "/evil.test/"


@pytest.mark.parametrize("token", ["", "guess", "\u00e9"])
def test_a_wrong_token_is_refused(reader, token):
    answer = reader.ask("GET", "/.course/progress", headers={"X-Course-Token": token})
    assert answer.status == 403
    assert "open the address" in answer.json["error"]


@pytest.mark.parametrize("origin", ["http://evil.test", "null", "http://127.0.0.1:1"])
def test_a_page_of_another_site_is_refused(reader, origin):
    body = {"lab": "90-00"}
    answer = reader.ask("POST", "/.course/grade", body, {"Origin": origin})
    assert (answer.status, "not this site" in answer.text) == (403, True)


def test_a_name_that_was_bent_to_this_machine_is_refused_and_given_no_token(reader):
    host = {"Host": f"evil.test:{reader.host.rpartition(':')[2]}"}
    assert reader.ask("GET", "/.course/progress", headers=host).status == 403
    assert "course-token" not in reader.ask("GET", "/", headers=host).text
    assert reader.ask("GET", reader.entrance, headers=host).headers["Set-Cookie"] is None


def test_this_site_itself_is_served(reader):
    own = {"Origin": f"http://{reader.host}"}
    assert reader.ask("GET", "/.course/progress", headers=own).status == 200


# ------------------------------------------------------------------ what may be asked


def test_a_huge_body_is_refused_unread(reader):
    answer = reader.ask("POST", "/.course/grade", None, {"Content-Length": str(10**10)})
    assert (answer.status, "1,000,000" in answer.text) == (413, True)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be an object"),
        ({"lab": "90-00", "files": {"../x.py": ""}}, "files must be"),
        ({"lab": "90-00", "files": {"starter.py": 5}}, "must be a text"),
        ({"lab": "90-00", "files": {"starter.py": "\ud800"}}, "half a character"),
    ],
)
def test_a_request_that_is_none_is_refused_and_writes_nothing(reader, little_course, body, told):
    before = find_labs(little_course)[0].starter.read_bytes()
    answer = reader.ask("POST", "/.course/grade", body)
    assert (answer.status, told in answer.json["error"]) == (400, True)
    assert find_labs(little_course)[0].starter.read_bytes() == before


@pytest.mark.parametrize("name", ["90-99", "../90-00", "", None, ["90-00"]])
def test_a_lab_that_does_not_exist_is_refused(reader, name):
    answer = reader.ask("POST", "/.course/grade", {"lab": name})
    assert (answer.status, "no lab" in answer.text) == (404, True)


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "grade"), ("POST", "progress"), ("GET", "../x"), ("GET", "")]
)
def test_there_is_nothing_else(reader, method, path):
    body = {} if method == "POST" else None
    assert reader.ask(method, f"/.course/{path}", body).status == 404


@pytest.mark.slow
def test_without_the_endpoint_nothing_is_answered(tmp_path):
    (tmp_path / "index.html").write_text(PAGE, encoding="utf-8")
    with book_site.serving(tmp_path, 0) as address:
        client = Client(address)
        assert client.ask("GET", "/.course/progress").status == 404
        assert client.ask("POST", "/.course/grade", {}).status == 405


# ------------------------------------------------------------------ grading


@pytest.mark.slow
def test_the_file_on_disk_is_graded_with_its_events_and_kept(reader, little_course):
    lab = find_labs(little_course)[0]
    lab.starter.write_text(RIGHT, encoding="utf-8")
    lines = reader.ask("POST", "/.course/grade", {"lab": "90-00"}).lines
    kinds = [line["event"] for line in lines]
    reading = ["reading", "reading"]  # the file is being imported, and is
    assert kinds == ["saved", "begin", "collected", "start", *reading, "result", "end", "report"]
    assert lines[-1]["ok"] and lines[-1]["state"] == PASSED
    assert Progress(little_course).state(lab) == PASSED
    assert reader.ask("GET", "/.course/progress").json["labs"]["90-00"]["state"] == PASSED
    assert reader.ask("GET", "/.course/progress").json["next"] == "90-01"


def test_tries_at_challenges_are_told_with_their_texts(reader, little_course):
    verdict = judge.Verdict(score=50, fresh=9, seed="s", marks=["bronze"])
    ledger.keep(little_course, judge.load("queue"), b"a = 1\n", verdict, "a heap")
    (told,) = reader.ask("GET", "/.course/tries").json["tries"]["queue"]["tries"]
    assert (told["score"], told["text"], told["note"]) == (50, "a = 1\n", "a heap")


@pytest.mark.slow
def test_a_text_of_the_page_is_saved_and_graded(reader, little_course):
    opened = reader.file()
    lines = reader.grade(WRONG, opened["digest"]).lines
    assert find_labs(little_course)[0].starter.read_text(encoding="utf-8") == WRONG
    assert (lines[-1]["ok"], lines[-1]["passed"], lines[-1]["total"]) == (False, 0, 1)
    failed = next(line for line in lines if line["event"] == "result")
    assert "expected 2, came 1" in failed["message"]
    assert reader.grade(RIGHT, lines[0]["digest"]).lines[-1]["ok"]


@pytest.mark.slow
def test_a_file_that_changed_on_disk_meanwhile_is_not_written_over(reader, little_course):
    starter = find_labs(little_course)[0].starter
    opened = reader.file()
    starter.write_text("# mine\n", encoding="utf-8")
    answer = reader.grade(RIGHT, opened["digest"])
    assert (answer.status, answer.json["text"]) == (409, "# mine\n")
    assert starter.read_text(encoding="utf-8") == "# mine\n"
    assert reader.grade(RIGHT, answer.json["digest"]).lines[-1]["ok"]


@pytest.mark.slow
def test_a_file_that_is_gone_is_put_there_only_by_a_page_that_knows(reader, little_course):
    starter = find_labs(little_course)[0].starter
    opened = reader.file()
    starter.unlink()
    assert reader.ask("POST", "/.course/grade", {"lab": "90-00"}).status == 409
    assert reader.grade(RIGHT, opened["digest"]).status == 409
    assert reader.grade(RIGHT, "").lines[-1]["ok"]


@pytest.mark.slow
def test_the_line_ends_of_the_file_stay(reader, little_course):
    starter = find_labs(little_course)[0].starter
    starter.write_bytes(WRONG.replace("\n", "\r\n").encode())
    opened = reader.file()
    assert opened["text"] == WRONG
    assert reader.grade(RIGHT, opened["digest"]).lines[-1]["ok"]
    assert starter.read_bytes() == RIGHT.replace("\n", "\r\n").encode()


@pytest.mark.slow
def test_a_page_that_goes_away_ends_the_grading(reader, little_course):
    endless = "def num_blocks(a, b):\n    while True:\n        pass\n"
    body = {"lab": "90-00", "files": {"starter.py": endless}, "base": reader.file()["digest"]}
    connection = http.client.HTTPConnection(reader.host, timeout=60)
    headers = {"X-Course-Token": reader.token}
    connection.request("POST", "/.course/grade", json.dumps(body), headers)
    answer = connection.getresponse()
    while json.loads(answer.readline())["event"] != "start":
        pass
    answer.close()
    connection.close()
    lines = reader.grade(RIGHT, local._digest(endless.encode())).lines  # waits for the other's end
    assert lines[-1]["ok"]


@pytest.mark.slow
def test_what_a_child_process_does_is_told_as_course_check_tells_it(reader):
    dead = "import os\n" + RIGHT.replace("return", "os._exit(7)")
    report = reader.grade(dead, reader.file()["digest"]).lines[-1]
    assert "ended in test_rounds_up with exit code 7" in report["trouble"]


# ------------------------------------------------------------------ predictions


@pytest.fixture
def asking(little_course: Path) -> Path:
    """The lab of the little course that asks three things, 90-08, with a starter that passes."""
    folder = little_course / "phase-90-little" / "labs" / "lab-08-predicts"
    shutil.copytree(ASKS, folder)
    (folder / "starter.py").write_text(RIGHT, encoding="utf-8")
    return folder


def predict(
    reader: Client, name: Any, given: Any, before: Any = None, lab: str = "90-08"
) -> Answer:
    body = {"lab": lab, "name": name, "given": given, "before": before}
    return reader.ask("POST", "/.course/predict", body)


def test_an_answer_of_the_page_is_committed_in_the_learners_file(reader, asking):
    (asking / "predictions.yaml").write_text("# mine\nblocks:  # ?\n", encoding="utf-8")
    assert reader.ask("GET", "/.course/lab?id=90-08").json["predictions"] == {}
    told = predict(reader, "blocks", "6").json
    assert told["predictions"]["blocks"]["given"] == 6
    assert predict(reader, "waste", "c").json["predictions"]["waste"]["given"] == "nowhere"
    text = (asking / "predictions.yaml").read_text(encoding="utf-8")
    assert text == '# mine\nblocks: 6  # ?\nwaste: "nowhere"\n'
    told = reader.ask("GET", "/.course/lab?id=90-08").json
    assert (set(told["predictions"]), told["problems"]) == ({"blocks", "waste"}, [])


@pytest.mark.slow
def test_a_grading_tells_what_was_compared_and_the_first_answer_stays(
    reader, asking, little_course
):
    predict(reader, "blocks", 6)
    report = reader.ask("POST", "/.course/grade", {"lab": "90-08"}).lines[-1]
    blocks = report["predictions"]["blocks"]
    assert (blocks["given"], blocks["measured"]) == (6, 7)
    later = predict(reader, "blocks", 7, before=6).json["predictions"]["blocks"]
    assert (later["given"], later["first"], later["measured"]) == (7, 6, 7)
    lab = next(lab for lab in find_labs(little_course) if lab.id == "90-08")
    assert Progress(little_course).entry(lab).predictions == {"blocks": [6, 7]}


def test_an_answer_that_changed_on_disk_meanwhile_is_not_written_over(reader, asking):
    predict(reader, "blocks", 6)
    (asking / "predictions.yaml").write_text("blocks: 5\n", encoding="utf-8")
    for before in (6, None):
        answer = predict(reader, "blocks", 7, before=before)
        assert (answer.status, answer.json["predictions"]["blocks"]["given"]) == (409, 5)
        assert "has changed on disk" in answer.json["error"]
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == "blocks: 5\n"
    assert predict(reader, "blocks", 7, before=5).status == 200
    assert predict(reader, "blocks", 7, before=None).status == 200, "it stands there already"


def test_what_is_wrong_with_the_file_is_told(reader, asking):
    (asking / "predictions.yaml").write_text("{blocks: many}\n", encoding="utf-8")
    told = reader.ask("GET", "/.course/lab?id=90-08").json
    assert "blocks: answer is 'many'" in told["problems"][0]
    answer = predict(reader, "share", 0.5)
    assert (answer.status, "share was not written" in answer.json["error"]) == (500, True)
    assert (asking / "predictions.yaml").read_text(encoding="utf-8") == "{blocks: many}\n"


@pytest.mark.parametrize(
    ("name", "given", "status"),
    [
        ("blocks", "many", 400),
        ("blocks", None, 400),
        ("blocks", True, 400),
        ("waste", "\ud800", 400),
        ("bloks", 5, 404),
        (None, 5, 404),
        (["blocks"], 5, 404),
        ("__proto__", 5, 404),
    ],
)
def test_an_answer_that_is_none_is_refused_and_writes_nothing(reader, asking, name, given, status):
    assert predict(reader, name, given).status == status
    assert not (asking / "predictions.yaml").exists()


def test_only_a_page_that_may_grade_may_commit(reader, asking):
    body = {"lab": "90-08", "name": "blocks", "given": 6, "before": None}
    for headers in ({"X-Course-Token": "guess"}, {"Origin": "http://evil.test"}, {"Host": "x:1"}):
        assert reader.ask("POST", "/.course/predict", body, headers).status == 403
    assert reader.ask("GET", "/.course/predict").status == 404
    assert predict(reader, "blocks", 6, lab="90-99").status == 404
    assert not (asking / "predictions.yaml").exists()


@pytest.mark.slow
def test_a_reader_who_goes_on_before_a_file_has_come_is_no_error(tmp_path, capsys):
    (tmp_path / "large.bin").write_bytes(bytes(50_000_000))
    with book_site.serving(tmp_path, 0) as address:
        where = urlsplit(address)
        for _ in range(3):
            with socket.create_connection((where.hostname, where.port)) as gone:
                gone.sendall(b"GET /large.bin HTTP/1.0\r\n\r\n")
                gone.recv(1)
        with socket.create_connection((where.hostname, where.port)) as stays:
            stays.sendall(b"HEAD /large.bin HTTP/1.0\r\n\r\n")
            assert b"200" in stays.recv(100)
    assert capsys.readouterr().err == ""
