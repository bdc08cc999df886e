"""A small service from one file: servers, a gateway before them, alarms that look for progress.

    python phase-19-capstone-maintainer-and-startup/service/service.py [service.yaml]

Where a `prometheus` is on the PATH and the file asks for it, it scrapes all of them and judges
`alarms.yaml`. Promises: everything listens on the loopback address and on a free port, and ends
with the service.
A server is up when its `/health` answers, and alive when tokens come while it has work: the second
is what the gateway routes by (upstream reports of the first without the second: 53130, 39734).
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import yaml

try:
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
except ModuleNotFoundError:
    sys.exit(
        "prometheus_client is not installed: put `uv run --extra serve` before the command, or "
        "pip install '.[serve]'"
    )

from labkit.yaml_files import read_yaml
from mini_vllm.kv_transfer.router import POLICIES, Router

HERE = Path(__file__).resolve().parent
HOST = "127.0.0.1"
PATIENCE = 60
"""Seconds after which a connection to a server counts as broken."""
KEYS = {"servers": int, "model": str, "flags": dict, "policy": str, "most_in_flight": int,
        "looks": int, "interval": int, "prometheus": bool}  # fmt: skip
COUNTED = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
"""Of a server: what must rise while it has work."""


def read(path: Path) -> dict[str, Any]:
    """The service of a file.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not YAML, or a key is missing, unknown or of another kind; it is named.
    """
    try:
        found = read_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 ({error.reason})") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path}: not YAML: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: need the keys {', '.join(KEYS)}")
    for what, names in (("missing", KEYS.keys() - found), ("unknown", found.keys() - KEYS)):
        if names:
            named = ", ".join(sorted(map(str, names)))
            raise ValueError(f"{path}: {named} {what}; need the keys {', '.join(KEYS)}")
    for key, kind in KEYS.items():
        if type(found[key]) is not kind or (kind is int and found[key] < 1):
            need = "int, 1 or more" if kind is int else kind.__name__
            raise ValueError(f"{path}: {key}={found[key]!r}: need {need}")
    for name, value in found["flags"].items():
        if type(value) not in (str, int, float):
            raise ValueError(f"{path}: flags: {name}={value!r}: need a text or a number")
    if found["policy"] not in POLICIES:
        raise ValueError(f"{path}: policy={found['policy']!r}: need one of {', '.join(POLICIES)}")
    return found


@dataclass(slots=True)
class Server:
    """One `mini-vllm serve`, and what was seen of it."""

    name: str
    command: list[str]
    process: subprocess.Popen[str] | None = None
    port: int = 0
    in_flight: int = 0
    tokens: float = -1.0
    """Its counters at the last look; -1: not looked at since it was started."""
    idle_looks: int = 0
    """Looks in a row at which it had work, as at the one before, and no token had come."""
    up: bool = False
    stalled: bool = False

    def start(self) -> None:
        """Begin, and wait until it listens.

        Raises:
            RuntimeError: it ends instead; with the last line that it said.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8") as said:
            self._begin(said)

    def _begin(self, said: IO[str]) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.PIPE, stderr=said, text=True
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r":(\d+)/v1", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError(self._ended(said))
        while self.get("/health") is None:  # its address is said before it answers
            if self.process.poll() is not None:
                raise RuntimeError(self._ended(said))
        self.in_flight, self.tokens, self.idle_looks = 0, -1.0, 0
        self.up, self.stalled = True, False

    def _ended(self, said: IO[str]) -> str:
        """That it has ended, and the last words of its error."""
        assert self.process is not None
        status = self.process.wait()
        said.seek(0)
        lines = [line.strip(" │\n") for line in said]
        last = next((line for line in reversed(lines) if re.search(r"\w", line)), "it said nothing")
        return f"server {self.name} ended with {status}: {last}"

    def stop(self) -> None:
        """End it, at once: its requests are broken off."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def get(self, path: str) -> str | None:
        """The text of a page, None where it does not answer with 200."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            text = answer.read().decode()
            return text if answer.status == 200 else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()


def counted(text: str) -> float:
    """The sum of `COUNTED` in a page of metrics."""
    names = "|".join(map(re.escape, COUNTED))
    return sum(float(v) for v in re.findall(rf"^(?:{names}){{[^}}]*}} (\S+)$", text, re.MULTILINE))


@dataclass
class Service:
    """The servers, the gateway's counts, and the alarms of the last look."""

    config: Mapping[str, Any]
    servers: list[Server] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        flags = [text for key, value in self.config["flags"].items() for text in
                 (f"--{key}", str(value))]  # fmt: skip
        command = [sys.executable, "-m", "mini_vllm.entrypoints.cli", "serve",
                   self.config["model"], "--port", "0", *flags]  # fmt: skip
        for number in range(self.config["servers"]):
            self.servers.append(Server(chr(ord("a") + number), command))
        self.router = Router(len(self.servers), 16, self.config["policy"])
        self.ids = (f"gateway-{number}" for number in itertools.count())
        self.registry = CollectorRegistry()

        def gauge(name: str, what: str) -> Gauge:
            return Gauge(f"gateway_{name}", what, ["server"], registry=self.registry)

        self.gauges = {
            "up": gauge("up", "1 if the server's /health answers"),
            "alive": gauge("alive", "1 if tokens come while the server has work"),
            "in_flight": gauge("in_flight", "Requests that the server has from the gateway"),
        }
        self.requests = Counter(
            "gateway_requests", "Requests by server and outcome", ["server", "outcome"],
            registry=self.registry,
        )  # fmt: skip

    # ------------------------------------------------------------------ which server

    def take(self, body: bytes) -> tuple[Server, str] | None:
        """A server that is up and alive, by the policy; None: there is none, or too much is asked.

        Bytes stand for tokens: the router compares prompts of one front end with each other.
        """
        with self.lock:
            if sum(s.in_flight for s in self.servers) >= self.config["most_in_flight"]:
                return None
            sound = [i for i, s in enumerate(self.servers) if s.up and not s.stalled]
            if not sound:
                return None
            request_id, prompt = next(self.ids), list(body) or [0]
            chosen = self.router.choose(prompt).engine
            if chosen not in sound:
                chosen = min(sound, key=lambda i: self.servers[i].in_flight)
            else:
                self.router.send(request_id, prompt)
            self.servers[chosen].in_flight += 1
            return self.servers[chosen], request_id

    def give_back(self, server: Server, request_id: str, outcome: str) -> None:
        """A request has ended, one way or another."""
        with self.lock:
            self.router.finished(request_id)
            server.in_flight = max(0, server.in_flight - 1)
        self.requests.labels(server.name, outcome).inc()

    # ------------------------------------------------------------------ looking

    def look(self) -> list[str]:
        """Ask every server once; the alarms, sorted: "a down", "b stalled"."""
        alarms = []
        for server in self.servers:
            page = server.get("/metrics") if server.get("/health") is not None else None
            server.up = page is not None
            if page is None:
                server.tokens, server.idle_looks, server.stalled = -1.0, 0, False
                alarms.append(f"{server.name} down")
                continue
            now = counted(page)
            if server.in_flight and now == server.tokens:
                server.idle_looks += 1
            else:
                server.idle_looks, server.stalled = 0, False
            server.tokens = now if server.in_flight else -1.0
            if server.idle_looks >= self.config["looks"]:
                server.stalled = True
                alarms.append(f"{server.name} stalled")
        return sorted(alarms)

    def metrics(self) -> bytes:
        """The gateway's own metrics, as Prometheus reads them."""
        for server in self.servers:
            for name, value in (
                ("up", server.up), ("alive", server.up and not server.stalled),
                ("in_flight", server.in_flight),
            ):  # fmt: skip
                self.gauges[name].labels(server.name).set(value)
        return generate_latest(self.registry)


class Gateway(BaseHTTPRequestHandler):
    """POST goes to a server; /metrics, /alive and /health are the gateway's own."""

    service: Service
    protocol_version = "HTTP/1.0"  # an answer ends where the connection does

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: what is counted is in the metrics."""

    def say(self, status: int, body: bytes, kind: str = "text/plain") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        service = self.service
        if self.path == "/metrics":
            self.say(200, service.metrics())
        elif self.path == "/alive":
            bad = [s.name for s in service.servers if not s.up or s.stalled]
            self.say(503 if bad else 200, json.dumps({"not alive": bad}).encode())
        elif self.path == "/health":
            self.say(200, b"")
        else:
            self.say(404, b"need /metrics, /alive, /health, or POST to /v1/...")

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal():
            self.say(400, b'{"error": "Content-Length: need a number"}', "application/json")
            return
        body = self.rfile.read(int(length))
        taken = self.service.take(body)
        if taken is None:
            self.service.requests.labels("none", "refused").inc()
            self.say(429, b'{"error": "no server is free, up and alive"}', "application/json")
            return
        outcome = "broken"
        try:
            outcome = self._pass_on(taken[0], body)
        finally:
            self.service.give_back(*taken, outcome)

    def _pass_on(self, server: Server, body: bytes) -> str:
        """One request through a server; how it ended."""
        connection = http.client.HTTPConnection(HOST, server.port, timeout=PATIENCE)
        begun = False
        try:
            kind = {"Content-Type": self.headers.get("Content-Type", "application/json")}
            connection.request("POST", self.path, body, kind)
            answer = connection.getresponse()
            begun = True
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.getheader("Content-Type", ""))
            self.end_headers()
            while piece := answer.read1(65536):
                try:
                    self.wfile.write(piece)
                except OSError:
                    return "left"  # the connection to the server closes, and it aborts
            return "done" if answer.status == 200 else "refused"
        except (OSError, http.client.HTTPException):
            if not begun:
                with contextlib.suppress(OSError):
                    self.say(502, b'{"error": "the server broke off"}', "application/json")
            return "broken"
        finally:
            connection.close()


@dataclass(slots=True)
class Prometheus:
    """A Prometheus of the machine that scrapes the service and judges its alarms."""

    port: int
    targets: Path

    def follow(self, service: Service) -> None:
        """Say where the servers listen now; it looks at the file by itself."""
        groups = [
            {"targets": [f"{HOST}:{server.port}"], "labels": {"server": server.name}}
            for server in service.servers
        ]
        beside = self.targets.with_suffix(".new")
        beside.write_text(json.dumps(groups), encoding="utf-8")
        beside.replace(self.targets)

    def alerts(self) -> list[str] | None:
        """What fires, as "ServerDown a"; None while it does not answer."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=PATIENCE)
        try:
            connection.request("GET", "/api/v1/alerts")
            found = json.loads(connection.getresponse().read())["data"]["alerts"]
        except (OSError, http.client.HTTPException, ValueError, KeyError):
            return None
        finally:
            connection.close()
        return sorted(
            f"{a['labels']['alertname']} {a['labels'].get('server', '')}".strip()
            for a in found
            if a["state"] == "firing"
        )


@contextlib.contextmanager
def watched(service: Service, gateway: int, seconds: int) -> Iterator[Prometheus | None]:
    """A Prometheus beside the service; None where the machine has no such program.

    Args:
        gateway: its port.
        seconds: between two scrapes, and between two judgements of the alarms.
    """
    program = shutil.which("prometheus")
    if program is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="service-") as folder:
        made = Prometheus(port, Path(folder) / "servers.json")
        made.follow(service)
        config = {
            "global": {"scrape_interval": f"{seconds}s", "evaluation_interval": f"{seconds}s"},
            "rule_files": [str(HERE / "alarms.yaml")],
            "scrape_configs": [
                {"job_name": "gateway", "static_configs": [{"targets": [f"{HOST}:{gateway}"]}],
                 "honor_labels": True},
                {"job_name": "servers", "file_sd_configs": [{"files": [str(made.targets)]}]},
            ],
        }  # fmt: skip
        file = Path(folder) / "prometheus.yml"
        file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder}/data",
                   f"--web.listen-address={HOST}:{port}"]  # fmt: skip
        with (Path(folder) / "said.log").open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said)
            try:
                while made.alerts() is None:
                    if process.poll() is not None:
                        last = (Path(folder) / "said.log").read_text().strip().rpartition("\n")[2]
                        raise RuntimeError(f"prometheus ended with {process.returncode}: {last}")
                yield made
            finally:
                process.kill()
                process.wait()


@contextlib.contextmanager
def running(config: Mapping[str, Any]) -> Iterator[tuple[Service, int]]:
    """The service, and the gateway's port; everything has ended afterwards."""
    service = Service(config)
    handler = type("Handler", (Gateway,), {"service": service})
    gateway = ThreadingHTTPServer((HOST, 0), handler)
    gateway.daemon_threads = True
    thread = threading.Thread(target=gateway.serve_forever, daemon=True)
    try:
        for server in service.servers:
            server.start()
        thread.start()
        yield service, gateway.server_address[1]
    finally:
        for server in service.servers:
            server.stop()
        if thread.is_alive():
            gateway.shutdown()
        gateway.server_close()


def main() -> int:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "service.yaml"
    try:
        config = read(path)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        _serve(config)
    except RuntimeError as error:  # a server that does not start, with its own words
        print(error, file=sys.stderr)
        return 1
    return 0


def _serve(config: Mapping[str, Any]) -> None:
    with running(config) as (service, port):
        names = ", ".join(f"{s.name} at {s.port}" for s in service.servers)
        print(f"gateway at http://{HOST}:{port}/v1, servers {names}; Ctrl-C ends it", flush=True)
        waiting = threading.Event()
        beside = watched(service, port, config["interval"]) if config["prometheus"] else None
        with contextlib.suppress(KeyboardInterrupt), beside or contextlib.nullcontext() as found:
            if found is not None:
                print(f"Prometheus at http://{HOST}:{found.port}/alerts", flush=True)
            elif config["prometheus"]:
                print("no prometheus on the PATH: the service looks by itself alone", flush=True)
            while True:
                for alarm in service.look():
                    print(alarm, flush=True)
                waiting.wait(config["interval"])


if __name__ == "__main__":
    raise SystemExit(main())
