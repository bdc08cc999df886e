"""The published JSON Schema suite: verdicts of mini_vllm, xgrammar and llguidance, counted.

    course engine run -m conformance.record grammar_suite      # the libraries' verdicts
    python -m conformance.features.structured_output.suite --write                # ours beside them

The suite is the one that `jsonschema` 4.26.0 ships in its source archive (`json/tests`), 2020-12
without the optional parts; it is not kept here. The recorder reads it from the folder that
`MINI_VLLM_SCHEMA_SUITE` names (`pip download --no-binary :all: --no-deps jsonschema==4.26.0`, then
unpack), and keeps schemas, instances and verdicts.

A constraint has no verdicts, it has texts. An instance counts as accepted when one of its spellings
is a whole text of the grammar: keys in any order (at most 200 orders), with `, ` and `: ` or with
`,` and `:`. So a valid instance must be writable somehow, and an invalid one not at all.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance import parts
from labkit.tables import markdown_table, write_section
from mini_vllm.structured_output.compiler import grammar_of
from mini_vllm.structured_output.expressions import GrammarError
from mini_vllm.structured_output.json_values import orders
from mini_vllm.structured_output.machine import Machine
from mini_vllm.structured_output.network import compile_network

ABOUT = (
    "One line per schema: `{file, description, schema, tests: [{data, valid, id}], verdicts: "
    "{peer: [accepted per test] or the reason of a refusal}}`. `id` is the first 12 digits of the "
    "SHA-256 of file, descriptions and data."
)
README = Path(__file__).with_name("README.md")
PEERS = ("xgrammar", "xgrammar, not strict", "llguidance")


def spellings(value: Any) -> Iterator[bytes]:
    """The texts that stand for a value."""
    for each in orders(value):
        for separators in ((", ", ": "), (",", ":")):
            text = json.dumps(each, ensure_ascii=False, separators=separators)
            yield text.encode("utf-8", "surrogatepass")


def cases() -> Iterator[dict[str, Any]]:
    """Every schema of the suite with the libraries' verdicts. Raises KeyError without a suite."""
    from conformance.features.structured_output import peers as grammar_peers

    folder = Path(os.environ["MINI_VLLM_SCHEMA_SUITE"]) / "draft2020-12"
    xgrammar, llguidance = grammar_peers.XGrammar(), grammar_peers.LLGuidance()
    asked: dict[str, tuple[Any, dict[str, Any]]] = {
        PEERS[0]: (xgrammar, {"any_whitespace": True}),
        PEERS[1]: (xgrammar, {"any_whitespace": True, "strict_mode": False}),
        PEERS[2]: (llguidance, {}),
    }
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            schema, described = group["schema"], group["description"]
            tests = []
            for test in group["tests"]:
                name = [path.name, described, test["description"], test["data"]]
                digest = hashlib.sha256(json.dumps(name).encode()).hexdigest()[:12]
                tests.append({"data": test["data"], "valid": test["valid"], "id": digest})
            verdicts = {
                name: _verdicts(peer, schema, tests, options)
                for name, (peer, options) in asked.items()
            }
            yield {"file": path.stem, "description": described, "schema": schema, "tests": tests,
                   "verdicts": verdicts}  # fmt: skip


def _verdicts(
    peer: Any, schema: Any, tests: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[bool] | str:
    try:
        peer.matcher("json", schema, **options)
    except Exception as error:  # the libraries raise what they like
        return str(error).splitlines()[0][:100] or type(error).__name__

    def accepts(data: bytes) -> bool:
        return bool(peer.is_text(peer.matcher("json", schema, **options), data))

    return [any(map(accepts, spellings(test["data"]))) for test in tests]


def ours(closed: bool, compact: bool = False) -> Callable[[Any], Callable[[bytes], bool]]:
    """Our acceptor of a schema's texts, in xgrammar's reading (`closed`) or in the standard's."""

    def of(schema: Any) -> Callable[[bytes], bool]:
        key = "json", json.dumps(schema), compact, closed
        try:
            machine = Machine(compile_network(grammar_of(key)))
        except GrammarError as error:
            if "has no text" in str(error):  # nothing satisfies it, and nothing is accepted
                return lambda data: False
            raise

        def accepts(data: bytes) -> bool:
            state = machine.run(machine.initial, data)
            return state is not None and state.accepting

        return accepts

    return of


def judge(closed: bool, case: Mapping[str, Any]) -> list[bool] | str:
    """Our verdicts of one schema's tests, or why it is refused."""
    try:
        accepts = ours(closed)(case["schema"])
    except GrammarError as error:
        return str(error)
    return [any(map(accepts, spellings(test["data"]))) for test in case["tests"]]


def tally(case: Mapping[str, Any], verdicts: list[bool] | str) -> Counter[str]:
    """Right, too strict, too loose, refused."""
    if isinstance(verdicts, str):
        return Counter({"refused": len(case["tests"]), "schemas refused": 1})
    found = Counter[str]()
    for test, accepted in zip(case["tests"], verdicts, strict=True):
        if accepted == test["valid"]:
            found["right"] += 1
        else:
            found["too loose" if accepted else "too strict"] += 1
    return found


def counts() -> dict[str, Counter[str]]:
    """Per engine its sums over the suite."""
    found: dict[str, Counter[str]] = {}
    for case in parts.load("grammar_suite"):
        said = dict(case["verdicts"])
        said["mini_vllm, the standard's reading"] = judge(False, case)
        said["mini_vllm, xgrammar's reading"] = judge(True, case)
        for name, verdicts in said.items():
            found.setdefault(name, Counter()).update(tally(case, verdicts))
    return found


@dataclass(slots=True)
class Language:
    """Of one schema's texts: where both libraries say the same, and who is right where not."""

    schema: Any
    agreed: int = 0
    ours_agree: int = 0
    """Of the agreed ones, in xgrammar's reading."""
    disputed: int = 0
    right: Counter[str] = field(default_factory=Counter)
    """By engine, of the disputed ones, by `json.loads` and `jsonschema`."""


def languages() -> Iterator[Language]:
    """The texts of `grammar_language`, schema by schema."""
    for case in parts.load("grammar_language"):
        found = Language(case["schema"])
        closed, free = ours(True)(case["schema"]), ours(False)(case["schema"])
        for hexed, valid, xgrammar, llguidance in case["texts"]:
            if xgrammar is None or llguidance is None:
                continue
            text = bytes.fromhex(hexed)
            said = closed(text)
            if xgrammar == llguidance:
                found.agreed += 1
                found.ours_agree += said == xgrammar
                continue
            found.disputed += 1
            verdicts = {
                "xgrammar": xgrammar,
                "llguidance": llguidance,
                "mini_vllm, xgrammar's reading": said,
                "mini_vllm, the standard's": free(text),
            }
            found.right.update(name for name, verdict in verdicts.items() if verdict == valid)
        yield found


def language_table(found: Sequence[Language]) -> str:
    """Where the libraries do not agree, who is right by the standard."""
    names = ("xgrammar", "llguidance", "mini_vllm, xgrammar's reading", "mini_vllm, the standard's")
    rows = [
        [f"`{json.dumps(each.schema)}`", str(each.disputed), *(str(each.right[n]) for n in names)]
        for each in found
        if each.disputed
    ]
    totals = [str(sum(each.right[name] for each in found)) for name in names]
    rows.append(["all", str(sum(each.disputed for each in found)), *totals])
    return markdown_table(["schema", "disputed texts", *(f"{n} right" for n in names)], rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.features.structured_output.suite")
    parser.add_argument("--write", action="store_true", help="update the README.md beside it")
    arguments = parser.parse_args(argv)
    columns = ("right", "too strict", "too loose", "refused", "schemas refused")
    rows = [[name, *(str(sums[c]) for c in columns)] for name, sums in counts().items()]
    for row in rows:
        print(f"{row[0]:<36}" + "".join(f"{value:>8}" for value in row[1:]))
    found = list(languages())
    agreed, alike = sum(each.agreed for each in found), sum(each.ours_agree for each in found)
    print(f"{agreed} texts on which the libraries agree, {alike} of them judged so here")
    if arguments.write:
        header = ["", *columns]
        write_section("grammar-suite", markdown_table(header, rows), README)
        write_section("grammar-language", language_table(found), README)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
