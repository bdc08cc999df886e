"""The house: the core is small, imports no room, and knows no feature's name."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

import mini_vllm
from mini_vllm import SamplingParams
from mini_vllm.distributed.config import ParallelConfig
from mini_vllm.features import ROOMS
from mini_vllm.lora.config import LoRAConfig

ROOT = Path(mini_vllm.__file__).parent
CORE = (
    "async_scheduler", "batch", "block_pool", "checks", "config", "detokenizer", "feature",
    "interrupts", "kv_cache", "kv_cache_interface", "model_runner", "plan", "queues", "request",
    "sampler", "sampling_params", "scheduler", "tokenizer",
)  # fmt: skip
"""What decides. It reads alone."""

ASSEMBLY = (
    "__init__", "engine", "executor", "features", "input_processor", "llm", "outputs",
    "parallel_sampling", "part_signatures", "parts", "platforms", "row_sampler",
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


OPENED_BY_A_KNOB = {name for name, room in ROOMS.items() if room.arguments}
"""Rooms that a name of the real engine's own arguments opens, and nothing else."""


@pytest.mark.parametrize("module", ASSEMBLY)
def test_the_assembly_imports_no_feature(module):
    typed = {"lora"} if module == "llm" else set()  # `LoRARequest`, in signatures
    assert imports(ROOT / f"{module}.py") & rooms() <= BUILT_IN | typed


def test_the_table_of_rooms_says_what_their_configurations_take():
    def names(config):
        return {field.name for field in dataclasses.fields(config)}

    assert set(ROOMS["lora"].arguments) == names(LoRAConfig) | {"enable_lora"}
    assert set(ROOMS["distributed"].arguments) == names(ParallelConfig) | {"rank_pool"}
    params = {name for room in ROOMS.values() for name in room.sampling_params}
    assert params <= names(SamplingParams)


@pytest.mark.slow
def test_a_room_that_a_knob_opens_stays_shut_without_it():
    script = "import sys, mini_vllm; mini_vllm.LLM('toy'); print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not [n for n in loaded if n.split(".")[1:2] and n.split(".")[1] in OPENED_BY_A_KNOB]


@pytest.mark.slow
def test_the_import_of_the_engine_does_not_import_numpys_generators():
    script = "import sys, mini_vllm; print('numpy.random' in sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert loaded.stdout == "False\n"


@pytest.mark.parametrize("module", [*CORE, *ASSEMBLY])
def test_the_core_names_no_feature(module):
    """Names in code, not in docstrings: a cross-reference may say what a hook is for."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text())):
        names |= {getattr(node, field, "") or "" for field in ("id", "attr", "arg", "name")}
    names -= UPSTREAM_NAMES
    assert not [n for n in names if any(f in str(n).lower() for f in FEATURES)]


ROOMS_IN_OTHER_WORDS = (
    "speculator", "speculative", "adapter", "constraint", "grammar", "ranks", "stages", "batches",
    "drafter", "verifier", "pipeline", "parallel_size",
)  # fmt: skip

OF_THE_CORE = {
    "num_speculative_tokens", "grammar", "parallel_sampling", "collective_rpc",
    "max_num_batched_tokens",
}  # fmt: skip
"""Names that upstream's scheduler and `LLM` have themselves."""

DIALECT = {
    "Asked", "again", "ask", "asked", "batches", "begin", "due", "ends", "fill", "forget", "held",
    "in_cache", "makers", "settle", "swap", "taken", "told", "under_way", "vet",
}  # fmt: skip
"""Private words for what upstream or plain English has a name for."""

STEP = [m for m in ASSEMBLY if m != "__init__"]
"""What runs a step, or builds what does."""


def names_in(module: str) -> set[str]:
    """Every name in a module's code."""
    return {
        str(getattr(node, field, ""))
        for node in ast.walk(ast.parse((ROOT / f"{module}.py").read_text()))
        for field in ("id", "attr", "arg", "name")
    }


@pytest.mark.parametrize("module", [*CORE, *STEP])
def test_what_runs_a_step_names_no_room_in_other_words_either(module):
    """Synonyms count: a branch for `adapters` is a branch for `lora`."""
    names = names_in(module) - UPSTREAM_NAMES - OF_THE_CORE
    assert not [n for n in names if any(word in n.lower() for word in ROOMS_IN_OTHER_WORDS)]


@pytest.mark.parametrize("module", STEP)
def test_the_assembly_speaks_as_upstream_or_plainly(module):
    assert not names_in(module) & DIALECT


PLAINLY = [
    path.relative_to(ROOT).with_suffix("").as_posix()
    for path in sorted([*ROOT.glob("*/gate.py"), *ROOT.glob("entrypoints/**/*.py")])
    if "tests" not in path.parts
]


@pytest.mark.slow
@pytest.mark.parametrize("module", ["plan", *PLAINLY])
def test_gates_and_entry_points_have_no_words_of_their_own_for_requests_and_messages(module):
    assert not names_in(module) & {"Asked", "asked", "told", "due", "vet", "settle", "swap"}


def test_a_step_is_read_at_one_glance():
    tree = ast.parse((ROOT / "engine.py").read_text())
    [step] = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_step"]
    assert (step.end_lineno or 0) - step.lineno < 25
    assert sum(isinstance(node, ast.If) for node in ast.walk(step)) <= 2


@pytest.mark.slow
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
