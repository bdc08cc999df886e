"""`vllm bench serve`, from the real engine's environment, against our server: its own report."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from labkit import environment
from mini_vllm.engine import LLMEngine
from mini_vllm.tests.server_support import serving

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_the_real_benchmark_runs_to_its_report(backend: str, endpoint: str) -> None:
    found = environment.look(environment.folder(ROOT))
    assert found is not None
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    engine = LLMEngine("byte-llama", num_blocks=1200, max_num_seqs=64, max_model_len=512)
    with serving(engine, chat_template=template) as (port, _):
        command = [
            str(found.python), "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend",
            backend, "--endpoint", endpoint, "--base-url", f"http://127.0.0.1:{port}", "--model",
            "byte-llama", "--tokenizer", "models/byte-llama", "--dataset-name", "random",
            "--random-input-len", "64", "--random-output-len", "32", "--num-prompts", "32",
            "--disable-tqdm",
        ]  # fmt: skip
        env = environment.variables(found, ROOT)
        ran = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=500
        )
    print(ran.stdout[-3000:])
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert re.search(r"Successful requests:\s+32\b", ran.stdout)
    assert re.search(r"Total generated tokens:\s+1024\b", ran.stdout)
