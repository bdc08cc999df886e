r"""Checkpoints that `packed.py` wrote, served by vLLM and read by the mini engine, side by side.

    course engine run phase-06-quantization/experiments/serve_packed.py --out my-served
    course engine run phase-06-quantization/experiments/serve_packed.py --out my-served \
        --only "gptq, nearest"

Needs vllm==0.22.1, its CPU build or a GPU; the CPU build wants its two libraries in `LD_PRELOAD`
(vLLM's installation page). Each checkpoint is written to a temporary folder and served by a process
of its own, eager, one after the other, about half a minute each. Both engines continue 32 prompts
greedily and give each byte of held-out text a probability. vLLM computes in 16 bits (W8A8 in 32
as well), the mini engine in float64 with the weights the file stands for. Prints the table, writes
`served.json`; `--only` measures some rows and keeps the others of that file.
Mirrors nothing upstream.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read once, when numpy is imported

import numpy as np

from course.machine import cores, processor
from labkit.modules import sibling
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models.transformer import Transformer

heldout = sibling(__file__, "heldout")
packed = sibling(__file__, "packed")

HERE = Path(__file__).resolve().parent


BASE = "float16, as shipped"
ROWS: dict[str, tuple[str, str]] = {
    BASE: (BASE, "float16"),
    **{name: (name, "float16") for name in packed.RECIPES},
    "gptq, nearest, bfloat16": ("gptq, nearest", "bfloat16"),
    "gptq, nearest, float32": ("gptq, nearest", "float32"),
    "pack-quantized, nearest, float32": ("pack-quantized, nearest", "float32"),
    "int-quantized, W8A8, float32": ("int-quantized, W8A8", "float32"),
    **{name: (name, "float16") for name in packed.DAMAGE},
    "gptq without the bias, bfloat16": ("gptq without the bias", "bfloat16"),
    "awq with zeros less one, bfloat16": ("awq with zeros less one", "bfloat16"),
}
"""Row to checkpoint and the dtype that vLLM computes in."""
SCRIPT = "phase-06-quantization/experiments/serve_packed.py"
BYTES_PER_FILE = 511
MAX_TOKENS = 48
KERNEL = re.compile(r"(?:Using|Selected) (\w+Kernel) for (\w+)")
METHOD = re.compile(r"\bquantization=([\w-]+)")
ERROR = re.compile(r"(?:^|\s)((?:\w+\.)*(?:\w*Error|NotImplementedError)(?:: .*)?)$")
WRAPPED = re.compile(r"Value error, (.*?)(?: \[type=|$)")
FRAME = re.compile(r'File ".*/vllm/(.*)", line (\d+), in (\w+)')


@functools.cache
def texts() -> dict[str, bytes]:
    """Held-out files by name, as many bytes as make one window with the EOS before them."""
    return {name: text[:BYTES_PER_FILE] for name, text in heldout.library(True).items()}


def prompts() -> list[bytes]:
    """32: one of the guide's, and stretches of held-out files."""
    cut = [(name, text[start : start + 40]) for name, text in texts().items() for start in (0, 200)]
    return [b"The scheduler ", *(piece for _, piece in cut if len(piece) == 40)][:32]


def questions() -> dict[str, Any]:
    """What both engines are asked, in token ids: prompts to go on from, windows to score."""
    return {
        "prompts": [list(prompt) for prompt in prompts()],
        "max_tokens": MAX_TOKENS,
        "windows": {name: [heldout.EOS, *text] for name, text in texts().items()},
    }


# ------------------------------------------------------------------ the two engines


def ask_vllm(folder: Path, dtype: str, asked: Mapping[str, Any], out: Path) -> None:
    """Answer `questions` with vLLM, in this process; writes JSON.

    `{"tokens": [[token]], "gaps": [[log probability of the first less the second]], "scores":
    {file: [log probability of each byte]}, "versions": {}}`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch
    import vllm

    llm = vllm.LLM(
        model=str(folder),
        dtype=dtype,
        seed=0,
        max_model_len=1024,
        num_gpu_blocks_override=64,
        gpu_memory_utilization=0.4,
        enforce_eager=True,
    )
    greedy = vllm.SamplingParams(
        temperature=0.0, max_tokens=asked["max_tokens"], ignore_eos=True, logprobs=2
    )
    results = llm.generate([{"prompt_token_ids": p} for p in asked["prompts"]], greedy)
    tokens = [list(result.outputs[0].token_ids) for result in results]
    gaps = []
    for result in results:
        rows = [
            sorted((e.logprob for e in row.values()), reverse=True)
            for row in result.outputs[0].logprobs
        ]
        gaps.append([row[0] - row[1] for row in rows])
    scoring = vllm.SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    windows = asked["windows"]
    results = llm.generate([{"prompt_token_ids": w} for w in windows.values()], scoring)
    scores = {
        name: [
            row[token].logprob
            for token, row in zip(window[1:], result.prompt_logprobs[1:], strict=True)
        ]
        for (name, window), result in zip(windows.items(), results, strict=True)
    }
    versions = {"vllm": vllm.__version__, "torch": torch.__version__}
    found = {"tokens": tokens, "gaps": gaps, "scores": scores, "versions": versions}
    out.write_text(json.dumps(found), encoding="utf-8")


def serve(folder: Path, dtype: str) -> dict[str, Any]:
    """What vLLM answers and logs, or how it refuses: `{"refused", "at"}` beside `"log"`.

    Beside `folder`, one file goes to the child and one comes back.
    """
    asked, out = folder.parent / "questions.json", folder.parent / "answers.json"
    asked.write_text(json.dumps(questions()), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).resolve()), "--answer", str(folder)]
    command += ["--dtype", dtype, "--questions", str(asked), "--out", str(out)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    words = f"{run.stdout}\n{run.stderr}"
    found: dict[str, Any] = {"log": kernels_of(words)}
    if method := METHOD.search(words):
        found["method"] = method[1]
    if run.returncode == 0:
        return found | json.loads(out.read_text(encoding="utf-8"))
    refusal = refusal_of(words)
    if refusal is None:
        raise RuntimeError(
            f"{folder.name}: vLLM gave {run.returncode} and no error:\n{words[-4000:]}"
        )
    return found | refusal


def kernels_of(log: str) -> list[str]:
    """The lines that name a kernel, each once: "CPUWNA16LinearKernel for AutoGPTQLinearMethod"."""
    return list(dict.fromkeys(f"{m[1]} for {m[2]}" for m in KERNEL.finditer(log)))


def refusal_of(log: str) -> dict[str, str] | None:
    """The first error of a log in its own words, and the innermost place in vLLM it passed.

    Where a checked dataclass wraps the error, the words are on the next line.
    """
    at, lines = "", log.splitlines()
    for number, line in enumerate(lines):
        if frame := FRAME.search(line):
            at = f"vllm/{frame[1]}:{frame[2]} {frame[3]}"
        elif at and (error := ERROR.search(line)):
            inner = WRAPPED.search(lines[number + 1]) if number + 1 < len(lines) else None
            return {"refused": inner[1] if inner else error[1], "at": at}
    return None


def ask_mini(model: Transformer) -> dict[str, Any]:
    """The mini engine's `tokens` and `scores`, as `ask_vllm` has them."""
    engine = LLMEngine(num_blocks=2048, max_num_batched_tokens=4096, model=model)
    asked = questions()
    params = SamplingParams(max_tokens=asked["max_tokens"], ignore_eos=True)
    results = engine.generate(asked["prompts"], params)
    return {"tokens": [result.outputs[0].token_ids for result in results], "scores": score(model)}


def score(model: Transformer) -> dict[str, list[float]]:
    """Log probability of each byte of the texts, by file."""
    scores = {}
    for name, text in texts().items():
        tokens = np.array([heldout.EOS, *text])
        rows = log_softmax(heldout.logits(model, tokens[:-1]))
        scores[name] = np.take_along_axis(rows, tokens[1:, None], axis=1)[:, 0].tolist()
    return scores


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Over the last axis, float64."""
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    result: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


# ------------------------------------------------------------------ the comparison


def distances(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> np.ndarray:
    """How far apart two engines' log probabilities are, byte by byte, over all files."""
    return np.concatenate([np.abs(np.subtract(one[name], other[name])) for name in one])


@functools.cache
def exact_scores() -> dict[str, list[float]]:
    """The mini engine's log probabilities of the texts with the model as shipped."""
    return score(heldout.model("float64"))


def compare(
    model: Transformer, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, Any]:
    """One row: bits per file of both, how far log probabilities are apart, where texts part.

    `apart` is vLLM against the mini engine, `moved` the mini engine against itself on the model as
    shipped: what the quantization does, to compare with. `nan` counts the bytes whose probability
    vLLM has not, where there are any.
    """
    apart = distances(theirs["scores"], ours["scores"])
    known = np.isfinite(apart)
    parted = []
    for number, prompt in enumerate(prompts()):
        mine, other = ours["tokens"][number], theirs["tokens"][number]
        place = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if place is not None:
            row = log_softmax(heldout.logits(model, np.array([*prompt, *mine[:place]]))[-1])
            parted.append(
                {
                    "prompt": number,
                    "token": place,
                    "mini_gap": round(float(row[mine[place]] - row[other[place]]), 5),
                    "vllm_gap": rounded(theirs["gaps"][number][place], 5),
                }
            )
    answers = json.dumps([theirs["tokens"], theirs["scores"]]).encode()
    nans = {} if known.all() else {"nan": int((~known).sum())}
    return nans | {
        "bits": bits(theirs["scores"]),
        "mini_bits": bits(ours["scores"]),
        "apart": {
            name: rounded(float(np.quantile(apart[known], q)) if known.any() else np.nan, 6)
            for name, q in (("median", 0.5), ("p999", 0.999), ("worst", 1.0))
        },
        "moved": rounded(float(np.median(distances(ours["scores"], exact_scores()))), 6),
        "parted": parted,
        "answers": hashlib.sha256(answers).hexdigest()[:16],
        "text": bytes(t for t in theirs["tokens"][0] if t < heldout.EOS).decode("utf-8", "replace"),
    }


def bits(scores: Mapping[str, list[float]]) -> dict[str, float | None]:
    """Bits of each file; None where some byte's probability is not a number."""
    return {name: rounded(-sum(rows) / float(np.log(2)), 3) for name, rows in scores.items()}


def rounded(value: float, digits: int) -> float | None:
    """For JSON, which has no NaN."""
    return round(value, digits) if np.isfinite(value) else None


def measure(name: str, scratch: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Write, serve and compare one row; also the versions that answered, if any did."""
    checkpoint, dtype = ROWS[name]
    folder = scratch / re.sub(r"\W+", "-", checkpoint)
    if checkpoint == BASE:
        packed.write(packed.shipped(), {}, folder)
    else:
        packed.make(checkpoint, folder)
    row: dict[str, Any] = {
        "dtype": dtype,
        "bytes": (folder / "model.safetensors").stat().st_size,
    }
    theirs = serve(folder, dtype)
    row |= {key: theirs[key] for key in ("method", "log") if key in theirs}
    if "refused" in theirs:
        return row | {"refused": theirs["refused"], "at": theirs["at"]}, {}
    model = packed.load(folder)
    return row | compare(model, ask_mini(model), theirs), theirs["versions"]


def per_byte(row: Mapping[str, Any], which: str, sizes: Mapping[str, int]) -> float:
    """Bits per byte over all files; NaN where one of them has none."""
    known = [np.nan if value is None else value for value in row[which].values()]
    return float(sum(known)) / sum(sizes.values())


def table(saved: Mapping[str, Any], names: Mapping[str, Any] | None = None) -> str:
    """Rows that were served, as text: bits per byte of both engines, and what parts them."""
    sizes = saved["text"]["sizes"]
    head = f"{'':<33}{'vLLM':>7}{'mini':>8}{'moved':>9}{'apart':>9}{'worst':>9}{'texts equal':>13}"
    lines = [head]
    for name in names or saved["rows"]:
        row = saved["rows"][name]
        if "refused" in row:
            lines.append(f"{name:<33} refused")
            continue
        theirs, ours = (per_byte(row, which, sizes) for which in ("bits", "mini_bits"))
        median, worst = (
            np.nan if row["apart"][key] is None else row["apart"][key]
            for key in ("median", "worst")
        )
        lines.append(
            f"{name:<33}{theirs:>7.4f}{ours:>8.4f}{row['moved']:>9.4f}{median:>9.4f}{worst:>9.4f}"
            f"{saved['prompts'] - len(row['parted']):>7} of {saved['prompts']}"
        )
    return "\n".join(lines)


def new_results() -> dict[str, Any]:
    """What the file says besides its rows."""
    return {
        "model": "byte-llama",
        "text": {
            "what": "held-out files of the Python standard library, docstrings and help() topics",
            "bytes_per_file": BYTES_PER_FILE,
            "sizes": {name: len(text) for name, text in texts().items()},
        },
        "prompts": len(prompts()),
        "max_tokens": MAX_TOKENS,
        "rows": {},
    }


def main(argv: list[str] | None = None) -> int:
    """Measure what is asked, print the table, write the file."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for served.json")
    parser.add_argument("--only", action="append", choices=list(ROWS), default=[], metavar="ROW")
    parser.add_argument("--answer", type=Path, help=argparse.SUPPRESS)  # one folder, in a child
    parser.add_argument("--questions", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.answer:
        asked = json.loads(args.questions.read_text(encoding="utf-8"))
        ask_vllm(args.answer, args.dtype, asked, args.out)
        return 0
    path = args.out / "served.json"
    saved = new_results()
    if path.exists():
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["text"] != saved["text"]:
            parser.error(f"{path}: measured on other text; give another --out")
        saved = old
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only or ROWS:
        with tempfile.TemporaryDirectory() as scratch:
            row, versions = measure(name, Path(scratch))
        if versions:
            saved["machine"] = {
                "processor": processor(),
                "cores": cores(),
                "python": platform.python_version(),
                "numpy": np.__version__,
                **versions,
                "date": datetime.now(UTC).date().isoformat(),
                "command": shlex.join(["python", SCRIPT, *(argv or sys.argv[1:])]),
            }
        saved["rows"][name] = row
        saved["rows"] = {known: saved["rows"][known] for known in ROWS if known in saved["rows"]}
        text = json.dumps(saved, indent=1, allow_nan=False) + "\n"
        path.write_text(text, encoding="utf-8")
        print(name, row.get("refused", ""), flush=True)
    print(f"\n{table(saved)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
