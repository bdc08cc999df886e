"""`mini-vllm simulate` and `fit`, as somebody types them."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mini_vllm.entrypoints.cli import app
from mini_vllm.simulate.samples import FOLDER

TRACE = str(FOLDER / "mooncake.jsonl")
COST = ["--cost", "step=6e-3,tokens=1e-5", "--limit", "10"]


def run(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def test_a_trace_becomes_a_table_and_files(tmp_path):
    out = tmp_path / "r.json"
    said = run("simulate", TRACE, *COST, "--slo", "ttft=0.05", "--save", str(out),
               "--csv", str(tmp_path / "r.csv"),
               "--perfetto", str(tmp_path / "p.json"))  # fmt: skip
    assert said.exit_code == 0, said.output
    assert "made up on the command line" in said.output and "in SLO" in said.output
    assert json.loads(out.read_text())["completed"] == 10
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 11
    assert json.loads((tmp_path / "p.json").read_text())["traceEvents"]


@pytest.mark.slow
def test_a_sweep_prints_a_row_per_setting_and_the_knee():
    said = run("simulate", TRACE, *COST, "--sweep", "max-num-batched-tokens=512,2048",
               "--sweep", "speed=1,50", "--slo", "ttft=0.04",
               "--workers", "1", "--json")  # fmt: skip
    assert said.exit_code == 0, said.output
    found = json.loads(said.output)
    assert len(found["rows"]) == 4
    assert [(k["holds"], k["fails"]) for k in found["knees"]] == [(None, 1), (1, 50)]


@pytest.mark.slow
def test_releases_are_compared_as_a_setting():
    said = run("simulate", TRACE, *COST, "--set", "long_prefill_token_threshold=100",
               "--sweep", "release=0.22.1,0.33.0", "--workers", "1", "--json")  # fmt: skip
    pin, later = json.loads(said.output)["rows"]
    assert pin["first_difference"] is None and later["first_difference"] == 0


def test_times_become_a_cost(tmp_path):
    arm = {
        "config": {"architectures": ["SomeForCausalLM"]},
        "decode_ms": {str(n): [5.0 + 0.01 * n] * 3 for n in (1, 8, 64)},
        "prefill": {f"1x{n}": [0.005 + 2e-5 * n] * 3 for n in (100, 1000, 4000)},
    }  # fmt: skip
    source, out = tmp_path / "m.json", tmp_path / "cost.json"
    source.write_text(json.dumps({"device": "a card", "vllm": "0.22.1", "arms": {"bf16": arm}}))
    said = run("fit", str(source), "--arm", "bf16", "-o", str(out))
    assert said.exit_code == 0, said.output
    assert "fitted on 1 to 4,000" in said.output
    refused = run("simulate", TRACE, "--cost", str(out), "--limit", "20")
    assert refused.exit_code == 2 and "decode_context=" in refused.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["simulate", "none.jsonl", *COST], "none.jsonl: No such file"),
        (["simulate", TRACE, "--cost", "x=1"], "terms['x']: need one of step"),
        (["simulate", TRACE, *COST, "--set", "block_size"], "--set block_size: need KNOB=VALUE"),
        (["simulate", TRACE, *COST, "--sweep", "a"], "--sweep a: need KNOB=V1,V2"),
        (["simulate", TRACE, *COST, "--set", "num_blocks=20"], "need at most 304"),
        (["simulate", TRACE, *COST, "--sweep", "speed=1,2", "--csv", "x"], "--csv with --sweep"),
        (["fit", TRACE, "-o", "x"], "line 1: need an object with one of add"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said):
    ran = run(*arguments)
    assert ran.exit_code == 2
    assert said in ran.output and ran.output.count("\n") == 1
