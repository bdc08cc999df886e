"""What `course book serve` answers to its own pages: the learner's files, graded on this machine.

Promises: only a browser that opened the printed address is given the token, and only with it a
request is answered, from this machine's own address and this site's own pages; a file that changed
on disk is never written over; what a page asks for runs in a child process, as `course check` does,
and ends when the page goes away. It stands on `http.server`: Starlette would spare some 60 lines of
reading requests and writing answers, and cost two packages that `course book serve` does without,
and a thread and a queue between the runner's events and the answer. Routes, all under `/.course/`:

    GET  progress          {"labs": {id: {state, passed, total, at}}, "next": id or null}
    GET  tries             {"tries": {challenge: {tries: [{when, score, ...}], at}}}
    GET  lab?id=02-01      {"text", "digest", "state"}: the learner's starter.py; and of the lab's
                           {"predictions": {name: {given, at, measured, first}}, "problems": [text]}
    POST predict           {"lab", "name", "given", "before"}: commits an answer where none stands,
                           or the one that the page saw, `before`; answers those two
    POST grade             {"lab", "files": {"starter.py": text}, "base": digest}; answers one JSON
                           object a line: saved, the runner's events, and last a report, with those
                           two as they are then
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import secrets
import select
import socket
import threading
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from course.files import write_atomically
from course.learning import exchange, grading, learner, predictions
from course.learning.labs import CourseError, Lab, find_labs
from course.learning.progress import Progress

PREFIX = "/.course/"
TOKEN_HEADER = "X-Course-Token"
LARGEST = 1_000_000
"""Bytes of a request's body."""
STARTER = "starter.py"


class Refusal(Exception):
    """An answer other than what was asked for: a status, and what is said with it."""

    def __init__(self, status: HTTPStatus, error: str, **more: Any) -> None:
        super().__init__(error)
        self.status = status
        self.told = {"error": error, **more}


class Local:
    """The endpoint of one serving."""

    def __init__(self, root: Path, time_limit: float = grading.TIME_LIMIT) -> None:
        self.root = root
        self.time_limit = time_limit
        self.key = secrets.token_urlsafe(24)
        """In the printed address: who opens it gets the cookie."""
        self.token = secrets.token_urlsafe(24)
        """In the pages for who has the cookie: what a request must carry."""
        self.grading = threading.Lock()
        self.committing = threading.Lock()

    # -------------------------------------------------------------- who may ask

    def admit(self, request: BaseHTTPRequestHandler) -> bool:
        """Answer the printed address: a cookie, and the page without the key. Else False."""
        parts = urlsplit(request.path)
        query = parse_qs(parts.query)
        given = query.pop("key", [""])[0]
        if not given or not _same(given, self.key) or not self.is_own_host(request):
            return False
        path = "/" + parts.path.lstrip("/")  # never another machine's: two slashes begin a name
        rest = urlencode(query, doseq=True)
        request.send_response(HTTPStatus.SEE_OTHER)
        request.send_header("Location", f"{path}?{rest}" if rest else path)
        cookie = f"{_cookie(request)}={self.key}; HttpOnly; SameSite=Strict; Path=/"
        request.send_header("Set-Cookie", cookie)
        request.send_header("Content-Length", "0")
        request.end_headers()
        return True

    def is_admitted(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether a page for this request may carry the token."""
        try:
            cookies = SimpleCookie(request.headers.get("Cookie", ""))
        except CookieError:
            return False
        morsel = cookies.get(_cookie(request))
        return bool(morsel) and _same(morsel.value, self.key) and self.is_own_host(request)  # type: ignore[union-attr]

    def is_own_host(self, request: BaseHTTPRequestHandler) -> bool:
        """Whether the request names this machine; a name that only resolves to it does not."""
        port = _port(request)
        return request.headers.get("Host", "") in (f"127.0.0.1:{port}", f"localhost:{port}")

    def with_token(self, page: bytes) -> bytes:
        """A page that carries the token."""
        tag = f'<meta name="course-token" content="{self.token}">'.encode()
        return page.replace(b"</head>", tag + b"</head>", 1)

    def _check(self, request: BaseHTTPRequestHandler) -> None:
        host = request.headers.get("Host", "")
        if not self.is_own_host(request):
            raise Refusal(HTTPStatus.FORBIDDEN, f"host is {host!r}: not this machine")
        origin = request.headers.get("Origin")
        if origin is not None and origin != f"http://{host}":
            raise Refusal(HTTPStatus.FORBIDDEN, f"origin is {origin!r}: not this site")
        if not _same(request.headers.get(TOKEN_HEADER, ""), self.token):
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                "this page was opened before the course was served anew: open the address that "
                "`course book serve` prints",
            )

    # -------------------------------------------------------------- answering

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Answer a request under PREFIX, whatever it asks."""
        try:
            self._check(request)
            parts = urlsplit(request.path)
            route = (request.command, parts.path.removeprefix(PREFIX))
            if route == ("GET", "progress"):
                _send(request, HTTPStatus.OK, self._progress())
            elif route == ("GET", "tries"):
                _send(request, HTTPStatus.OK, {"tries": exchange.tried(self.root)})
            elif route == ("GET", "lab"):
                lab = self._lab(parse_qs(parts.query).get("id", [""])[0])
                _send(request, HTTPStatus.OK, self._file(lab))
            elif route == ("POST", "predict"):
                _send(request, HTTPStatus.OK, self._predict(_body(request)))
            elif route == ("POST", "grade"):
                self._grade(request, _body(request))
            else:
                raise Refusal(HTTPStatus.NOT_FOUND, f"there is no {' '.join(route)}")
        except Refusal as refusal:
            _send(request, refusal.status, refusal.told)
        except CourseError as error:
            _send(request, HTTPStatus.INTERNAL_SERVER_ERROR, {"error": str(error)})

    def _lab(self, name: object) -> Lab:
        for lab in find_labs(self.root):
            if lab.id == name:
                return lab
        raise Refusal(HTTPStatus.NOT_FOUND, f"there is no lab {str(name)[:60]!r}")

    def _progress(self) -> dict[str, Any]:
        labs, progress = find_labs(self.root), Progress(self.root)
        told = {}
        for lab in labs:
            entry = progress.entry(lab)
            told[lab.id] = {
                "state": progress.state(lab),
                "passed": entry.passed,
                "total": entry.total,
                "at": entry.graded_at or None,
            }
        following = progress.next_lab(labs)
        return {"labs": told, "next": following.id if following else None}

    def _file(self, lab: Lab) -> dict[str, Any]:
        data = _bytes(lab)
        return {
            "text": _text(data),
            "digest": _digest(data),
            "state": Progress(self.root).state(lab),
            **_predicted(lab, Progress(self.root)),
        }

    def _predict(self, body: dict[str, Any]) -> dict[str, Any]:
        """Commit an answer in the learner's file, unless one stands there that the page saw not."""
        lab, name = self._lab(body.get("lab")), body.get("name")
        asked = lab.manifest.predictions
        if not isinstance(name, str) or name not in asked:
            raise Refusal(HTTPStatus.NOT_FOUND, f"lab {lab.id} asks no {str(name)[:60]!r}")
        try:
            answer = asked[name].read(body.get("given"))
        except ValueError as error:
            raise Refusal(HTTPStatus.BAD_REQUEST, f"{name}: {error}") from None
        with self.committing:
            here = predictions.committed(lab.folder, asked)[0].get(name)
            if here not in (None, answer, body.get("before")):
                told = f"{name} in {predictions.FILE} has changed on disk since this page read it"
                raise Refusal(HTTPStatus.CONFLICT, told, **_predicted(lab, Progress(self.root)))
            if here != answer:
                try:
                    predictions.commit(lab.folder, name, answer)
                except (OSError, ValueError) as error:
                    raise Refusal(
                        HTTPStatus.INTERNAL_SERVER_ERROR, f"{name} was not written: {error}"
                    ) from None
            return _predicted(lab, Progress(self.root))

    def _grade(self, request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        lab = self._lab(body.get("lab"))
        text = _starter_of(body)
        with self.grading:
            if text is not None:
                _save(lab, text, body.get("base"))
            elif not lab.starter.is_file():
                raise Refusal(HTTPStatus.CONFLICT, f"{STARTER} of lab {lab.id} is gone")
            request.send_response(HTTPStatus.OK)
            request.send_header("Content-Type", "application/x-ndjson; charset=utf-8")
            request.end_headers()
            with contextlib.suppress(OSError):  # the page is gone
                _line(request, {"event": "saved", "digest": _digest(_bytes(lab))})
                report = learner.run_starter(
                    self.root, lab, self.time_limit, lambda events: _told(request, events)
                )
                _line(request, self._kept(lab, report))

    def _kept(self, lab: Lab, report: grading.Report) -> dict[str, Any]:
        """Keep a result as `course check` does; the last line of an answer."""
        progress, notice = Progress(self.root), ""
        if not report.digest:
            notice = "The file or its tests were saved while they ran: nothing was kept."
        else:
            try:
                learner.keep(progress, lab, report)
            except OSError as error:
                notice = f"The result cannot be kept ({error})."
        return {
            "event": "report",
            "ok": report.ok,
            "passed": len(report.passed),
            "total": len(report.passed) + len(report.failed),
            "trouble": report.trouble,
            "notice": notice,
            "state": progress.state(lab),
            **_predicted(lab, progress),
        }


# ------------------------------------------------------------------ the learner's file


def _bytes(lab: Lab) -> bytes | None:
    try:
        return lab.starter.read_bytes()
    except FileNotFoundError:
        return None


def _text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace").replace("\r\n", "\n")


def _digest(data: bytes | None) -> str:
    """Names what stands in the file; "" for no file."""
    return "" if data is None else hashlib.sha256(data).hexdigest()


def _predicted(lab: Lab, progress: Progress) -> dict[str, Any]:
    """The predictions that stand in the learner's file, and what is wrong with it."""
    _, problems = predictions.committed(lab.folder, lab.manifest.predictions)
    return {"predictions": exchange.predicted(lab, progress), "problems": problems}


def _save(lab: Lab, text: str, base: object) -> None:
    """Write a page's text, unless the file is another than the page has seen.

    Raises:
        Refusal: it is; with what stands there now.
    """
    here = _bytes(lab)
    if here is not None and _text(here) == text:
        return
    if base != _digest(here):
        raise Refusal(
            HTTPStatus.CONFLICT,
            f"{STARTER} has changed on disk since this page read it",
            text=_text(here),
            digest=_digest(here),
        )
    data = text.encode("utf-8")
    write_atomically(
        lab.starter, data.replace(b"\n", b"\r\n") if b"\r\n" in (here or b"") else data
    )


def _starter_of(body: dict[str, Any]) -> str | None:
    """The text that a request brings, if it brings one.

    Raises:
        Refusal: what it brings is something else.
    """
    files = body.get("files")
    if files is None:
        return None
    if not isinstance(files, dict) or files.keys() - {STARTER}:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"files must be an object with {STARTER}")
    text = files.get(STARTER)
    if not isinstance(text, str):
        raise Refusal(HTTPStatus.BAD_REQUEST, f"{STARTER} must be a text")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise Refusal(HTTPStatus.BAD_REQUEST, f"{STARTER} holds half a character") from None
    return text.replace("\r\n", "\n")


# ------------------------------------------------------------------ requests and answers


def _same(given: str, secret: str) -> bool:
    return secrets.compare_digest(given.encode(), secret.encode())


def _port(request: BaseHTTPRequestHandler) -> int:
    return int(request.server.server_address[1])  # type: ignore[index]


def _cookie(request: BaseHTTPRequestHandler) -> str:
    """Its name: cookies of one machine are shared by all its ports."""
    return f"course-{_port(request)}"


def _body(request: BaseHTTPRequestHandler) -> dict[str, Any]:
    length = request.headers.get("Content-Length", "")
    if not length.isdecimal():
        raise Refusal(HTTPStatus.LENGTH_REQUIRED, "a request needs its Content-Length")
    if int(length) > LARGEST:
        raise Refusal(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"at most {LARGEST:,} bytes are read")
    try:
        body = json.loads(request.rfile.read(int(length)))
    except (ValueError, RecursionError):
        raise Refusal(HTTPStatus.BAD_REQUEST, "the body is not JSON") from None
    if not isinstance(body, dict):
        raise Refusal(HTTPStatus.BAD_REQUEST, "the body must be an object")
    return body


def _send(request: BaseHTTPRequestHandler, status: HTTPStatus, told: dict[str, Any]) -> None:
    data = json.dumps(told).encode()
    request.send_response(status)
    request.send_header("Content-Type", "application/json; charset=utf-8")
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    with contextlib.suppress(OSError):
        request.wfile.write(data)


def _line(request: BaseHTTPRequestHandler, told: dict[str, Any]) -> None:
    request.wfile.write(json.dumps(told).encode() + b"\n")
    request.wfile.flush()


def _told(request: BaseHTTPRequestHandler, events: list[dict[str, Any]]) -> bool:
    """Send events on; True when no page listens any more."""
    try:
        for event in events:
            _line(request, event)
        readable, _, _ = select.select([request.connection], [], [], 0)
        return bool(readable) and request.connection.recv(1, socket.MSG_PEEK) == b""
    except OSError:
        return True
