"""What the server says of itself in `/openapi.json`, held to it by schemathesis."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mini_vllm.tests.server_support import ask, serving  # first: it may skip

from mini_vllm.engine import LLMEngine  # isort: skip

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance",
    "response_schema_conformance",
)  # fmt: skip


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    engine = LLMEngine("byte-llama", num_blocks=256, max_model_len=128)
    with serving(engine, chat_template=TEMPLATE, tool_call_parser="hermes") as (found, _):
        yield found


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def test_every_model_that_the_document_refers_to_is_in_it(port: int) -> None:
    _, document = ask(port, "/openapi.json")
    found = {name.removeprefix("#/components/schemas/") for name in references(document)}
    assert found >= {"CompletionRequest", "ChatCompletionRequest", "Message"}
    assert found <= document["components"]["schemas"].keys()


def test_every_path_of_the_document_is_served(port: int) -> None:
    _, document = ask(port, "/openapi.json")
    for path, methods in document["paths"].items():
        for method in methods:
            body = {} if method == "post" else None
            expected = (404,) if "{" in path else (200, 400)  # no such response
            assert ask(port, path, body, method=method.upper())[0] in expected, path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paths", "checks", "phases", "least"),
    [
        (("--exclude-path-regex", "^/v1/(messages|responses)"), CHECKS, "coverage,fuzzing", 500),
        # Errors of messages are the server's own there, and what is not served is a 501
        (("--include-path-regex", "^/v1/(messages|responses)"), CHECKS[1:], "fuzzing", 40),
    ],
    ids=["completions and chats", "messages and responses"],
)
def test_no_request_that_schemathesis_makes_gets_an_answer_outside_of_the_schema(
    port: int,
    tmp_path: Path,
    paths: tuple[str, ...],
    checks: tuple[str, ...],
    phases: str,
    least: int,
) -> None:
    pytest.importorskip("schemathesis", reason="needs the extra 'fuzz'")
    command = Path(sys.executable).with_name("schemathesis")
    ran = subprocess.run(
        [
            command, "run", f"http://127.0.0.1:{port}/openapi.json", "--checks", ",".join(checks),
            *paths,
            "--phases", phases, "--max-examples", "10", "--seed", "1",
            "--continue-on-failure", "--warnings", "off", "--no-color",
        ],
        capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout[-6000:]
    counted = re.search(r"(\d+) generated, (\d+) passed", ran.stdout)
    assert counted is not None
    assert int(counted[1]) == int(counted[2]) > least
