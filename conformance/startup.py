"""Where a start of vLLM's CPU build spends its time: every log line of every process, with clocks.

    course engine run -m conformance.startup FILE

Each start is a process of its own that makes an `LLM` of the shipped model and asks for one token,
as `vllm/benchmarks/startup.py:133` `run_startup_in_subprocess` does. What is turned between starts
is in `STARTS`. A line has the wall clock since the start, and the processor time of its own process
and of the children that it has waited for: on a machine that others use too, the second can be
compared and the first cannot. Promises: nothing is computed here; the phases are the reader's.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOG, BEGAN = "COURSE_STARTUP_LOG", "COURSE_STARTUP_BEGAN"
KEPT: dict[str, Any] = {
    "load_format": "auto", "compile": False, "kept_cache": True, "multiprocessing": False,
}  # fmt: skip
"""`compile`: what TORCH_COMPILE_DISABLE=0 turns on; `kept_cache`: VLLM_CACHE_ROOT has the files of
an earlier start; `multiprocessing`: VLLM_ENABLE_V1_MULTIPROCESSING."""
STARTS: tuple[dict[str, Any], ...] = (
    {"kept_cache": False},
    {"kept_cache": False, "load_format": "dummy"},
    {},
    {"load_format": "dummy"},
    {"multiprocessing": True},
    {"multiprocessing": True, "load_format": "dummy"},
    {"compile": True, "kept_cache": False},
    {"compile": True},
    {"compile": True, "load_format": "dummy"},
)
"""Each as it differs from `KEPT`, in this order: a kept cache is that of the start before it that
compiles as it does."""


class Lines(logging.Handler):
    """Writes a line of JSON per record of vLLM's logger, from any of its processes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Note one."""
        note(f"{record.filename}:{record.lineno}", record.getMessage())


def note(where: str, text: str) -> None:
    """One line: who, when, what."""
    own, waited = (resource.getrusage(who) for who in (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN,
    ))  # fmt: skip
    line = {
        "pid": os.getpid(), "parent": os.getppid(),
        "wall": round(time.monotonic() - float(os.environ[BEGAN]), 3),
        "cpu": round(own.ru_utime + own.ru_stime, 3),
        "children": round(waited.ru_utime + waited.ru_stime, 3),
        "where": where, "text": text.replace(f"{ROOT}/", "").split("\n")[0][:60],
    }  # fmt: skip
    with open(os.environ[LOG], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def one(knobs: dict[str, Any]) -> None:
    """Start, ask for a token, end."""
    note("python", "begins")
    from vllm import LLM, SamplingParams

    note("python", "vllm is imported")
    logging.getLogger("vllm").addHandler(Lines())
    llm = LLM(
        str(ROOT / "models" / "byte-llama"), dtype="float32", max_model_len=512,
        load_format=knobs["load_format"],
    )  # fmt: skip
    note("python", "the engine is ready")
    params = SamplingParams(max_tokens=1, temperature=0)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    note("python", "the first token is there")


def started(knobs: dict[str, Any], cache: Path) -> list[dict[str, Any]]:
    """The lines of one start, in the order of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lines"
        env = os.environ | {
            LOG: str(file), BEGAN: repr(time.monotonic()), "VLLM_CACHE_ROOT": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"), "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": str(int(not knobs["compile"])),
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(knobs["multiprocessing"])),
        }  # fmt: skip
        ran = subprocess.run(
            [sys.executable, "-m", "conformance.startup", "--one", json.dumps(knobs)],
            env=env, capture_output=True, text=True,
        )  # fmt: skip
        if ran.returncode:
            raise SystemExit(ran.stderr[-3000:])
        text = file.read_text(encoding="utf-8").replace(str(cache.parent), "CACHE")
        lines = [json.loads(line) for line in text.splitlines()]
    return sorted(lines, key=lambda line: line["wall"])


def main() -> int:
    """Every start, into the file as each is done."""
    target = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, gzip.GzipFile(target, "wb", mtime=0) as file:
        for number, turned in enumerate(STARTS):
            knobs = KEPT | turned
            cache = Path(folder) / ("compiled" if knobs["compile"] else "eager")
            if not knobs["kept_cache"]:
                cache = cache.with_name(f"{cache.name}-{number}")
            lines = started(knobs, cache)
            kept = cache.with_name("compiled" if knobs["compile"] else "eager")
            if not kept.exists():
                cache.rename(kept)
            found = {"knobs": knobs, "lines": lines}
            file.write(json.dumps(found, separators=(",", ":")).encode() + b"\n")
            file.flush()
            print(turned, lines[-1]["wall"], flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(json.loads(sys.argv[2]))
    else:
        sys.exit(main())
elif __name__ == "__mp_main__":  # a process that vLLM spawned
    note("python", "begins")
    import vllm  # sets its logger up, which drops handlers that came before

    note("python", f"vllm {vllm.__version__} begins")
    logging.getLogger("vllm").addHandler(Lines())
