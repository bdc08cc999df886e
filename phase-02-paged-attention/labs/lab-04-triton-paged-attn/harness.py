"""Given: cases with a float64 reference, and a child process in which kernels run on a CPU.

Triton decides once per process, when it is first imported, whether kernels are compiled or
interpreted. So interpreted kernels run in a child that is started with TRITON_INTERPRET=1, and
whatever else the tests of this course import does not matter. `python harness.py` is that child.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import pickle
import re
import subprocess
import sys
import traceback
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from labkit.modules import load_module


@dataclass(frozen=True, slots=True)
class Case:
    """One decode step's attention; `make_tensors` gives the tensors, `reference` the answer."""

    seq_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: str = "float16"
    seed: int = 0
    spread: float = 1.0
    """Factor on the queries: large scores."""
    sign: int = 0
    """1 or -1 makes every score of that sign."""
    value_mean: float = 0.0
    """Added to V: sums that grow with the length."""
    unused: float = 0.0
    """What lies in slots and blocks that no token owns."""
    foreign_entries: int = 0
    """Further entries of each table, which point outside the cache."""
    interleaved: bool = False
    """K and V of a block side by side in one tensor, as some engines keep them."""
    far: bool = False
    """Blocks so far apart that their places do not fit 32 bits."""
    keys_per_split: int | None = None
    options: dict[str, int] = field(default_factory=dict)
    """Further keyword arguments of version two."""

    def __str__(self) -> str:
        """The fields that are not the usual ones, and the shape."""
        always = ("seq_lens", "num_heads", "num_kv_heads", "head_dim", "block_size", "dtype")
        shown = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if item.name in always or repr(getattr(self, item.name)) != repr(_usual(item))
        ]
        return f"case: {', '.join(shown)}"


def _usual(item: Field[Any]) -> Any:
    return item.default_factory() if callable(item.default_factory) else item.default


def make_tensors(case: Case, device: str = "cpu") -> dict[str, Any]:
    """query, k_cache, v_cache, block_tables, seq_lens as torch tensors.

    Block ids are drawn without replacement from 1 upwards; block 0 belongs to nobody.
    """
    import torch

    rng = np.random.default_rng(case.seed)
    dtype = getattr(torch, case.dtype)
    num_seqs, size = len(case.seq_lens), case.block_size
    needed = [-(-length // size) for length in case.seq_lens]
    num_blocks = sum(needed) + 3
    shape = (num_blocks, size, case.num_kv_heads, case.head_dim)
    if case.far:
        apart = 2**31 // (num_blocks - 2) + 1  # the last block begins beyond 2**31
        apart = -(-apart // 16) * 16
        slot = case.num_kv_heads * case.head_dim
        room = torch.empty(num_blocks * apart, dtype=dtype, device=device)  # touched where used
        strides = (apart, slot, case.head_dim, 1)
        k_cache = room.as_strided(shape, strides)
        v_cache = room.as_strided(shape, strides, size * slot)
    elif case.interleaved:
        both = torch.full((num_blocks, 2, *shape[1:]), case.unused, dtype=dtype, device=device)
        k_cache, v_cache = both[:, 0], both[:, 1]
    else:
        k_cache = torch.full(shape, case.unused, dtype=dtype, device=device)
        v_cache = k_cache.clone()
    ids = rng.permutation(np.arange(1, num_blocks))
    if case.far:  # the first request must own the farthest block
        ids = np.sort(ids)[::-1]
    tables = np.full((num_seqs, max(needed) + case.foreign_entries), 2**30, dtype=np.int32)
    query = rng.standard_normal((num_seqs, case.num_heads, case.head_dim)) * case.spread
    if case.sign:
        query = np.abs(query) * case.sign
    used = 0
    for i, (length, count) in enumerate(zip(case.seq_lens, needed, strict=True)):
        tables[i, :count] = ids[used : used + count]
        used += count
        rows = rng.standard_normal((2, length, case.num_kv_heads, case.head_dim))
        if case.sign:
            rows[0] = np.abs(rows[0])
        rows[1] += case.value_mean
        k, v = torch.from_numpy(rows).to(device=device, dtype=dtype)
        for entry in range(count):
            stop = min(size, length - entry * size)
            block = int(tables[i, entry])
            k_cache[block, :stop] = k[entry * size : entry * size + stop]
            v_cache[block, :stop] = v[entry * size : entry * size + stop]
    return {
        "query": torch.from_numpy(query).to(device=device, dtype=dtype),
        "k_cache": k_cache,
        "v_cache": v_cache,
        "block_tables": torch.from_numpy(tables).to(device),
        "seq_lens": torch.tensor(case.seq_lens, dtype=torch.int32, device=device),
    }


def reference(tensors: dict[str, Any]) -> np.ndarray:
    """Attention in float64 on K and V laid out contiguously: [num_seqs, num_heads, head_dim]."""
    query = tensors["query"].double()
    outputs = []
    for i, length in enumerate(tensors["seq_lens"].tolist()):
        size, kv_heads = tensors["k_cache"].shape[1:3]
        table = tensors["block_tables"][i, : -(-length // size)].long()
        k, v = (tensors[name][table].double().flatten(0, 1)[:length] for name in _CACHES)
        group = query.shape[1] // kv_heads
        k, v = (rows.repeat_interleave(group, dim=1).transpose(0, 1) for rows in (k, v))
        scores = (k @ query[i][:, :, None])[..., 0] * query.shape[2] ** -0.5  # [heads, length]
        outputs.append((scores.softmax(-1)[:, None] @ v)[:, 0])
    return np.stack([out.cpu().numpy() for out in outputs])


_CACHES = ("k_cache", "v_cache")


def run_version(lab: ModuleType, version: int, case: Case, tensors: dict[str, Any]) -> Any:
    """The output tensor of version 1 or 2 of a lab file."""
    if version == 1:
        return lab.paged_attention_v1(**tensors)
    more = dict(case.options)
    if case.keys_per_split is not None:
        more["keys_per_split"] = case.keys_per_split
    return lab.paged_attention_v2(**tensors, max_seq_len=max(case.seq_lens), **more)


def compile_kernel(lab: ModuleType, name: str, dtype: str, constants: dict[str, Any]) -> str:
    """PTX of a kernel for compute capability 9.0, an H100's; no GPU needed.

    What the launcher knows of its arguments on a packed cache is told to the compiler: pointers
    and strides are multiples of 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    function = getattr(lab, name)
    signature, attributes = {}, {}
    fixed = {"partial_ptr": "*fp32", "lse_ptr": "*fp32", "scale": "fp32"}
    fixed |= {"tables_ptr": "*i32", "seq_lens_ptr": "*i32"}
    for i, argument in enumerate(function.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        default = "*" + dtype if argument.endswith("_ptr") else "i32"
        signature[argument] = fixed.get(argument, default)
        if argument.endswith("_ptr") or argument.startswith(("q_", "kv_", "out_")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    indexed = {(function.arg_names.index(key),): value for key, value in constants.items()}
    source = triton.compiler.ASTSource(function, signature, indexed, attributes)
    target = GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": 4, "num_stages": 3})
    return str(compiled.asm["ptx"])


# ------------------------------------------------------------------ the child


class Child:
    """A Python process that answers jobs. Starts on the first, ends with this process."""

    def __init__(self, interpret: bool) -> None:
        self.interpret = interpret
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job: {"file", "call", ...}. The answer has "error" when it went wrong."""
        process = self._running()
        assert process.stdin and process.stdout
        try:
            pickle.dump(job, process.stdin)
            process.stdin.flush()
            answer: dict[str, Any] = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = process.wait()
            self._process = None
            return {
                "error": f"the process that ran the kernel died (exit status {code}). A load or "
                "store without a mask, or with a wrong place, reached memory that is not its own"
            }
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            environment = {**os.environ, "TRITON_INTERPRET": "1"}
            if not self.interpret:
                del environment["TRITON_INTERPRET"]
            self._process = subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
            )
            atexit.register(self.close)
        return self._process

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@functools.cache
def child(interpret: bool) -> Child:
    """The one child of a kind."""
    return Child(interpret)


def load_lab(file: str) -> ModuleType:
    """A lab file as a module."""
    return load_module(file, "_lab_under_test")


def answer_job(job: dict[str, Any]) -> dict[str, Any]:
    """What the child does with a job."""
    lab = load_lab(job["file"])
    if job["call"] == "compile":
        return {"ptx": compile_kernel(lab, job["name"], job["dtype"], job["constants"])}
    if job["call"] == "main":
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            load_module(job["script"]).main(job["arguments"])
        return {"printed": printed.getvalue()}
    case = job["case"]
    try:
        tensors = make_tensors(case)
    except RuntimeError as error:  # no such room on this machine
        return {"skip": f"the case needs more memory than there is: {error}"}
    out = run_version(lab, job["version"], case, tensors)
    return {"out": out.double().numpy(), "expected": reference(tensors)}


def explain(error: BaseException, file: str) -> str:
    """The error and the line of the lab file it came from."""
    inner = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    frames = [f for f in traceback.extract_tb(inner.__traceback__) if f.filename == file]
    where = f"{Path(file).name}, line {frames[-1].lineno}: " if frames else ""
    if isinstance(inner, NotImplementedError) and frames:
        return f"{where}{frames[-1].name} is not written yet"
    text = re.sub(r"\n\s*\n+", "\n", str(inner)).strip()
    return f"{where}{type(inner).__name__}: {text}"[:1500]


def serve() -> None:
    """Answer jobs from standard input until it closes."""
    jobs, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a lab prints must not come between the answers
    sys.modules["harness"] = sys.modules["__main__"]
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        try:
            answer = answer_job(job)
        except BaseException as error:
            answer = {"error": explain(error, job["file"])}
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    serve()
