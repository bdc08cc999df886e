"""The `mini-vllm` command: what it prints, and exit codes 0, 1, 2 and 130."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mini_vllm.entrypoints.cli as cli
from mini_vllm.engine import LLMEngine
from mini_vllm.models.fp8_writer import write_block_fp8
from mini_vllm.models.tests.test_checkpoint import write_checkpoint
from mini_vllm.tests.support import ScriptedModel

ROOT = Path(__file__).parents[3]
ROCKET = "\N{ROCKET}"


def run(*arguments: str, stdin: str | None = None):
    return CliRunner().invoke(cli.app, list(arguments), input=stdin)


@pytest.fixture
def parrot(monkeypatch):
    """The command's engine answers every one-letter prompt with "hi", a rocket and EOS."""
    stream = [*f"hi{ROCKET}".encode(), *[256] * 99]

    def make(model, dtype, **knobs):
        return LLMEngine(ScriptedModel(lambda _, position: stream[position]), **knobs)

    monkeypatch.setattr(cli, "LLMEngine", make)


def test_generate_streams_the_prompt_and_its_continuation(parrot):
    result = run("generate", "x")
    assert (result.exit_code, result.stdout) == (0, f"xhi{ROCKET}\n")


def test_with_drafts_the_text_is_the_same_and_a_line_says_what_they_brought(parrot):
    config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}'
    result = run("generate", "--speculative-config", config, "hi hi")
    assert (result.exit_code, result.stdout) == (0, run("generate", "hi hi").stdout)
    assert "SpecDecoding metrics: " in result.stderr


def test_prompts_come_from_stdin_and_a_file_in_order(parrot, tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("b\n\nc\n")
    result = run("generate", "-", "--file", str(path), stdin="a\n")
    assert result.exit_code == 0
    lines = sorted(result.stdout.splitlines())
    assert lines == [f"r{i}  {name}hi{ROCKET}  [stop]" for i, name in enumerate("abc")]


def test_trace_prints_one_row_per_step(parrot):
    result = run("generate", "--trace", "x")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["step", "tokens", "run", "wait", "free", "scheduled"]
    assert rows[1] == ["0", "1", "1", "0", "254", "r0:1"]
    assert rows[7] == ["6", "1", "1", "0", "254", "r0:1", "[r0", "done:", "stop]"]
    assert f"xhi{ROCKET}  [stop]" in result.stdout


def test_the_shipped_model_serves_the_command():
    result = run("generate", "--max-tokens", "4", "The KV cache")
    assert result.exit_code == 0
    assert result.stdout.startswith("The KV cache")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--model", "toy", ""], "prompt is empty: need at least one token"),
        (["generate", "--model", "toy", "--temperature", "-1", "x"], "temperature=-1.0"),
        (["generate", "--model", "toy", "--temperature", "nan", "x"], "temperature=nan"),
        (["generate", "--model", "toy", "--max-tokens", "0", "x"], "max_tokens=0"),
        (["generate", "--model", "toy", "--num-blocks", "1", "x"], "num_blocks=1"),
        (["generate", "--model", "toy", "--num-blocks", "3", "x" * 99], "the pool has 2"),
        (["generate", "--model", "/no/such/folder", "x"], "no such folder"),
        (["generate", "--model", "toy", "--file", "/no/such/file"], "/no/such/file"),
        (["generate", "--model", "toy", "--dtype", "x", "x"], "dtype='x': need float32 or float64"),
        (["generate", "--dtype", "float16", "x"], "dtype='float16': need float32 or float64"),
        (["generate", "--block-size", "100000000", "x"], "block_size=100000000"),
        (["generate", "--num-blocks", "400000000", "x"], "num_blocks=400000000"),
        (["generate", "--seed", "-2", "x"], "seed=-2"),
        (["generate", "--speculative-config", "{", "x"], "speculative_config='{': need JSON"),
        (["generate", "--speculative-config", "{}", "x"], "num_speculative_tokens is missing"),
        (["bench", "--dtype", "x"], "dtype='x'"),
        (["bench", "--prompt-len", "99999999999"], "prompt_len=99999999999-99999999999"),
        (["bench", "--prompt-len", "9" * 5000], "need N or LOW-HIGH"),
        (["bench", "--num-requests", "99999999999"], "num_requests=99999999999"),
        (["bench", "--seed", "-1"], "seed=-1: need 0 or more"),
        (["bench", "--request-rate", "inf"], "request_rate=inf"),
        (["info", "--memory", "9" * 400 + "GiB"], "need at most 2^60 bytes"),
        (["info", "--memory", "."], "need a number and a unit"),
        (["info", "--memory", "1.2.3GiB"], "need a number and a unit"),
        (["info", "--block-size", "0"], "--block-size=0: need 1 to 1048576"),
        (["info", "--kv-dtype-bytes", "9" * 400], "--kv-dtype-bytes=999"),
        (["generate", "--model", "a\nb", "x"], "no such folder"),
        (["bench", "--model", "toy", "--prompt-len", "9-3"], "prompt_len=9-3"),
        (["bench", "--model", "toy", "--output-len", "many"], "need N or LOW-HIGH"),
        (["bench", "--model", "toy", "--num-requests", "0"], "num_requests=0"),
        (["info", "--memory", "8 apples"], "need a number and a unit"),
        (["info", "/no/such/folder"], "no such folder"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("mini-vllm: ")
    assert len(result.stderr.splitlines()) == 1
    assert result.stdout == ""


def test_stdin_that_is_no_text_is_refused():
    result = CliRunner().invoke(cli.app, ["generate", "--model", "toy"], input=b"\xff")
    assert (result.exit_code, result.stderr.startswith("mini-vllm: stdin: ")) == (2, True)


def test_info_of_three_million_layers_is_arithmetic(tmp_path):
    folder = write_checkpoint(tmp_path)
    per_layer = 2 * 8 + 2 * 8 * 8 + 2 * 4 * 8 + 3 * 8 * 12
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_hidden_layers": 3_000_000}))
    result = run("info", str(folder))
    assert f"parameters             {257 * 8 + 8 + 3_000_000 * per_layer:,}" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["x"], ["--trace", "x"], ["x", "y"]])
def test_a_request_that_ends_in_an_error_says_why_and_exits_with_1(monkeypatch, arguments):
    class Broken:
        def forward(self, batch):
            return np.full((len(batch.seq_lens), 257), np.nan)

    monkeypatch.setattr(
        cli, "LLMEngine", lambda model, dtype, **knobs: LLMEngine(Broken(), **knobs)
    )
    result = run("generate", *arguments)
    assert result.exit_code == 1
    lines = result.stderr.splitlines()
    assert len(lines) == arguments.count("x") + arguments.count("y")
    assert all(line.startswith("mini-vllm: request ") for line in lines)
    assert all(
        line.endswith("ended in an error: the model's logits hold NaN or infinity")
        for line in lines
    )
    measured = run("bench", "--json", "--num-requests", "2", "--output-len", "4")
    assert (measured.exit_code, measured.stdout) == (1, "")
    assert len(measured.stderr.splitlines()) == 2


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["generate", "--max-tokens", "2", "x"], ["bench", "--json", "--num-requests", "1"]],
    ids=["generate", "bench"],
)
def test_output_to_a_full_device_is_one_line_and_exit_code_1(arguments):
    command = [sys.executable, "-m", "mini_vllm.entrypoints.cli", *arguments, "--model", "toy"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 1
    assert done.stderr == "mini-vllm: output: No space left on device\n"


def test_no_prompt_at_all_is_refused():
    result = run("generate", "--model", "toy", stdin="")
    assert (result.exit_code, "no prompt" in result.stderr) == (2, True)


def test_ctrl_c_exits_with_130_and_no_traceback(monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "LLMEngine", interrupted)
    result = run("generate", "x")
    assert result.exit_code == 130
    assert "Traceback" not in result.output
    assert "interrupted" in result.stderr


def test_bench_json_counts_the_workload_it_was_given():
    result = run(
        *("bench", "--model", "toy", "--json", "--num-requests", "3"),
        *("--prompt-len", "8", "--output-len", "5", "--shared-prefix-len", "4"),
    )
    assert result.exit_code == 0
    measured = json.loads(result.stdout)
    assert (measured["prompt_tokens"], measured["output_tokens"]) == (24, 15)
    assert measured["preemptions"] == 0
    assert measured["num_steps"] == 5
    assert set(measured["ttft_ms"]) == set(measured["itl_ms"]) == {"mean", "p50", "p90", "p99"}


def test_info_shows_the_arithmetic_of_the_kv_cache(tmp_path):
    """2 layers, 1 KV head of 4: 2 x 2 x 1 x 4 x 2 B = 32 B per token, 512 B per block of 16."""
    result = run("info", str(write_checkpoint(tmp_path)), "--memory", "1MiB")
    assert result.exit_code == 0
    rows = {line[:22].strip(): line[22:].strip() for line in result.stdout.splitlines()}
    assert rows["architecture"] == "LlamaForCausalLM"
    assert rows["KV per token"].startswith("32 B = 2 x 2 layers x 1 KV heads x 4 x 2 B")
    assert rows["KV per block"] == "512 B for 16 tokens"
    assert rows["blocks in 1MiB"] == "2,048 (32,768 tokens)"
    assert rows["full-length sequences"] == "512.00 at once"


@pytest.mark.slow
def test_info_names_a_quantization_and_counts_the_weights_it_stands_for(tmp_path):
    plain = write_checkpoint(tmp_path / "plain")
    made = write_block_fp8(plain, tmp_path / "fp8", 4, "_proj$")
    before, after = (run("info", str(folder)).stdout.splitlines() for folder in (plain, made))
    told = "quantization           fp8, a scale for 4 x 4 weights"
    assert [line.rstrip() for line in after if line not in before] == [told]


def test_a_prompt_may_come_with_pictures(tmp_path):
    Image = pytest.importorskip("PIL.Image")
    pixels = np.full((56, 56, 3), 255, np.uint8)
    pixels[12:44, 12:44] = (214, 48, 40)
    path = tmp_path / "square.png"
    Image.fromarray(pixels).save(path)
    result = run("generate", "--model", "byte-sees", "--image", str(path), "<image>what is this?\n")
    assert (result.exit_code, result.stdout) == (0, "<image>what is this?\na red square\n")
    (tmp_path / "bad.png").write_bytes(b"no")
    bad = str(tmp_path / "bad.png")
    for arguments, words in (
        (["--image", bad, "<image>?"], "--image"),
        (["--image", str(path), "?"], "the prompt has 0 placeholder(s)"),
        (["--image", str(path), "<image>?", "and"], "--image: need one prompt, not 2"),
    ):
        refused = run("generate", "--model", "byte-sees", *arguments)
        assert refused.exit_code == 2 and words in refused.stderr


def test_the_shape_of_a_model_that_sees_is_its_language_models():
    result = run("info", "byte-sees")
    assert result.exit_code == 0 and "258" in result.stdout
