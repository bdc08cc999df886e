"""The house: the core is small, imports no room, and knows no feature's name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mini_vllm

ROOT = Path(mini_vllm.__file__).parent
CORE = (
    "async_scheduler", "batch", "block_pool", "checks", "config", "detokenizer", "feature",
    "interrupts", "kv_cache", "kv_cache_interface", "model_runner", "plan", "queues", "request",
    "sampler", "sampling_params", "scheduler", "tokenizer",
)  # fmt: skip
"""What decides. It reads alone."""

ASSEMBLY = (
    "__init__", "engine", "executor", "features", "input_processor", "llm", "outputs",
    "parallel_sampling", "parts", "row_sampler",
)  # fmt: skip
"""What puts the core, a model and its attention together."""

BUILT_IN = {"attention", "models", "sample", "cudagraph", "releases"}
"""Folders the assembly may name; every other folder is a feature."""

FEATURES = (
    "lora",
    "grammar",
    "structured",
    "encoder",
    "multimodal",
    "connector",
    "ngram",
    "eagle",
    "draft_model",
)

UPSTREAM_NAMES = {
    "use_eagle", "enable_lora", "lora_request", "LoRARequest", "LoRAConfig", "structured_outputs",
    "structured_outputs_config", "StructuredOutputManager",
}  # fmt: skip
"""Knobs of the core's own rules that upstream calls after the feature that asked for them, and what
a caller of `LLM` writes as for upstream's."""


def imports(path: Path) -> set[str]:
    """First part below `mini_vllm` of everything the file imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mini_vllm"):
            found.add((node.module or "").partition(".")[2].partition(".")[0])
        elif isinstance(node, ast.Import):
            found |= {
                a.name.partition(".")[2] for a in node.names if a.name.startswith("mini_vllm")
            }
    return found - {""}


def rooms() -> set[str]:
    return {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}


def test_every_module_of_the_package_is_core_assembly_or_in_a_room():
    assert {path.stem for path in ROOT.glob("*.py")} == {*CORE, *ASSEMBLY}


@pytest.mark.parametrize("module", CORE)
def test_the_core_imports_no_room(module):
    assert not imports(ROOT / f"{module}.py") & (rooms() | set(ASSEMBLY))


OPENED_BY_A_KNOB = {"spec_decode", "lora", "structured_output", "distributed"}
"""Rooms that a name of the real engine's own arguments opens, and nothing else."""


@pytest.mark.parametrize("module", ASSEMBLY)
def test_the_assembly_imports_no_feature(module):
    assert imports(ROOT / f"{module}.py") & rooms() <= BUILT_IN | OPENED_BY_A_KNOB


def test_a_room_that_a_knob_opens_stays_shut_without_it():
    script = "import sys, mini_vllm; mini_vllm.LLM('toy'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not [n for n in loaded if n.split(".")[1:2] and n.split(".")[1] in OPENED_BY_A_KNOB]


@pytest.mark.parametrize("module", [*CORE, *ASSEMBLY])
def test_the_core_names_no_feature(module):
    """Names in code, not in docstrings: a cross-reference may say what a hook is for."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        names |= {getattr(node, field, "") or "" for field in ("id", "attr", "arg", "name")}
    names -= UPSTREAM_NAMES
    assert not [n for n in names if any(f in str(n).lower() for f in FEATURES)]


ROOMS_IN_OTHER_WORDS = (
    "speculator",
    "adapter",
    "constraint",
    "ranks",
    "stages",
    "batches",
    "drafter",
)


@pytest.mark.parametrize(
    "module", [*CORE, "engine", "executor", "input_processor", "row_sampler", "outputs"]
)
def test_what_runs_a_step_names_no_room_in_other_words_either(module):
    """Synonyms count: a branch for `adapters` is a branch for `lora`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        names |= {str(getattr(node, field, "")) for field in ("id", "attr", "arg", "name")}
    assert not [n for n in names if any(word in n.lower() for word in ROOMS_IN_OTHER_WORDS)]


def test_a_step_is_read_at_one_glance():
    tree = ast.parse((ROOT / "engine.py").read_text())
    [step] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_step"]
    assert (step.end_lineno or 0) - step.lineno < 25
    assert sum(isinstance(node, ast.If) for node in ast.walk(step)) <= 2


def test_the_package_needs_numpy_and_safetensors_alone():
    """Libraries of a room are imported when the room is opened."""
    allowed = {"numpy", "safetensors", "mini_vllm", "__future__"} | set(
        __import__("sys").stdlib_module_names
    )
    for module in [*CORE, *ASSEMBLY]:
        for node in ast.parse((ROOT / f"{module}.py").read_text()).body:
            if isinstance(node, ast.Import):
                assert {a.name.partition(".")[0] for a in node.names} <= allowed, module
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").partition(".")[0] in allowed, module


def test_modules_and_functions_keep_their_length():
    too_long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in ROOT.rglob("*.py")
        if "tests" not in path.parts
        and (lines := len(path.read_text().splitlines()))
        > (300 if path.stem == "scheduler" else 400)
    ]
    tree = ast.parse((ROOT / "scheduler.py").read_text())
    too_long += [
        f"scheduler.py, {node.name}: {length} lines"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > 35
    ]
    assert not too_long
