"""Firefox, driven by WebDriver BiDi over its own port: what the tests of code in the page need.

Playwright drives only a Firefox of its own; this one is the system's. Needs `websockets`.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STARTING = 60.0
"""Seconds Firefox may take to open its port."""


class Firefox:
    """One tab."""

    def __init__(self, socket: Any) -> None:
        self.socket = socket
        self.last = 0
        self.send("session.new", capabilities={})
        self.tab = self.send("browsingContext.getTree")["contexts"][0]["context"]

    def send(self, method: str, **params: Any) -> Any:
        """Do one command of the protocol; its result."""
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": params}))
        while True:
            told = json.loads(self.socket.recv())
            if told.get("id") == self.last:
                assert told["type"] == "success", f"{method}: {told}"
                return told["result"]

    def goto(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self.send("browsingContext.navigate", context=self.tab, url=url, wait="complete")

    def evaluate(self, function: str) -> Any:
        """Call an (async) function of JavaScript in the page; its JSON result."""
        told = self.send(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({function})()))()",
            target={"context": self.tab},
            awaitPromise=True,
        )
        assert told["type"] == "success", told
        return json.loads(told["result"].get("value", "null"))


@contextlib.contextmanager
def opened(binary: str, profile: Path) -> Iterator[Firefox]:
    """A Firefox without a window, with a profile of its own; ended after."""
    from websockets.sync.client import connect

    process = subprocess.Popen(
        [binary, "--headless", "--no-remote", "--remote-debugging-port", "0", "--profile",
         str(profile), "about:blank"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env={"HOME": str(profile), "PATH": "/usr/bin:/bin", "MOZ_HEADLESS": "1"},
    )  # fmt: skip
    try:
        with connect(f"{_address(process)}/session", max_size=None) as socket:
            yield Firefox(socket)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _address(process: subprocess.Popen[str]) -> str:
    """The address that Firefox says it listens on."""
    said: list[str] = []
    found: list[str] = []

    def listen() -> None:
        assert process.stderr
        for line in process.stderr:
            said.append(line)
            if match := re.search(r"WebDriver BiDi listening on (ws://\S+)", line):
                found.append(match[1])

    threading.Thread(target=listen, daemon=True).start()
    until = time.monotonic() + STARTING
    while not found:
        assert process.poll() is None, "".join(said)
        assert time.monotonic() < until, f"Firefox opened no port in {STARTING:g} s"
        time.sleep(0.1)
    return found[0]
