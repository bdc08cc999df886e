"""Runs upstream's test files where they lie, on the real code or on mini's parts.

Promises: no file of the pinned tree is copied or changed. What a test imports is put in place
before pytest collects it: for both engines a model config from a folder instead of the hub and a
device type, for mini the classes of `facade`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from labkit.yaml_files import read_yaml

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "upstream" / "tests" / "v1" / "core"
SCOPE = Path(__file__).with_name("scope.yaml")

# What is taken from `facade`, by the module that the tests import it from.
LENT = {
    "vllm.v1.core.block_pool": ("BlockHashToBlockMap", "BlockPool"),
    "vllm.v1.core.kv_cache_manager": ("KVCacheManager", "Request"),
    "vllm.v1.core.kv_cache_utils": (
        "FreeKVCacheBlockQueue",
        "KVCacheBlock",
        "generate_block_hash_extra_keys",
        "hash_block_tokens",
    ),
    "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",),
    "vllm.v1.core.sched.scheduler": ("Scheduler",),
    "vllm.v1.core.sched.utils": ("check_stop",),
    "vllm.v1.request": ("Request", "RequestStatus"),
}


LENGTHS = {"facebook/opt-125m": 2048}
"""Longest sequence of the models that the tests name."""


@dataclass(frozen=True, slots=True)
class Function:
    """One line of `scope.yaml`: a test function, and why it is not in scope, or its items."""

    file: str
    name: str
    items: int
    """How many parameter sets are in scope; 0 for none."""
    why: str
    """Why none or not all are; empty when all of them are."""


@functools.cache
def scope() -> dict[tuple[str, str], Function]:
    """Every function of the five files, by (file, name)."""
    found = {}
    for file, functions in read_yaml(SCOPE.read_text(encoding="utf-8")).items():
        for name, said in functions.items():
            items, _, why = str(said).partition(" ")
            found[file, name] = Function(file, name, int(items), why)
    return found


# ---------------------------------------------------------------------- what the tests import


@functools.cache
def prepare_real() -> None:
    """Let the real code build its configs without a hub, a GPU or a platform plugin. Once."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import vllm.config
    from vllm.platforms import current_platform

    from conformance.real import OPT_CONFIG

    current_platform.device_type = "cpu"
    real = vllm.config.ModelConfig

    @functools.cache
    def model_config(model: str, skip_tokenizer_init: bool = False, **settings: Any) -> Any:
        """A small text model whatever the name: the tests in scope read only its length."""
        length = {"max_position_embeddings": LENGTHS.get(model, 65536)}
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(OPT_CONFIG | length))
            return real(model=folder, skip_tokenizer_init=True, **settings)

    vllm.config.ModelConfig = model_config


def prepare_mini() -> None:
    """Put mini's parts, behind upstream's interface, where the tests import them from."""
    prepare_real()
    # What the tests' helpers import besides is loaded first, so that it keeps the real classes.
    sys.path.insert(0, str(ROOT / "upstream"))
    importlib.import_module("tests.v1.kv_connector.unit.utils")
    from conformance.upstream_tests import facade

    for module, names in LENT.items():
        for name in names:
            setattr(importlib.import_module(module), name, getattr(facade, name))
    one_hash = {"sha256": facade.hash_of, "sha256_cbor": facade.hash_of}
    vars(importlib.import_module("vllm.utils.hashing")).update(
        one_hash, get_hash_fn_by_name=lambda name: facade.hash_of
    )
    # One group, and hashes that are ints already: nothing to wrap or to convert.
    vars(importlib.import_module("vllm.v1.core.kv_cache_utils")).update(
        NONE_HASH=facade.NONE_HASH,
        init_none_hash=lambda function: None,
        get_request_block_hasher=facade.BlockHasher,
        make_block_hash_with_group_id=lambda block_hash, group: block_hash,
        maybe_convert_block_hash=lambda block_hash: block_hash,
        get_block_hash=lambda block_hash: block_hash,
        get_group_id=lambda block_hash: 0,
    )


# ---------------------------------------------------------------------- running


@dataclass
class Results:
    """A pytest plugin that keeps what is in scope and notes how each item ended."""

    only_scope: bool
    outcomes: dict[str, str] = field(default_factory=dict)
    """By `file::function[parameters]`: "passed", "failed" or "skipped"."""

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        if not self.only_scope:
            return
        kept = [item for item in items if in_scope(item.path.name, item.name)]
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = kept

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[name] = report.outcome


def in_scope(file: str, item: str) -> bool:
    """Whether an item, named with its parameters, is in scope."""
    function = scope().get((file, item.partition("[")[0]))
    return function is not None and function.items > 0


@contextlib.contextmanager
def _no_bytecode() -> Iterator[None]:
    """The pinned tree stays as it is."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def run(arguments: Sequence[str] = (), only_scope: bool = True) -> tuple[int, dict[str, str]]:
    """Run the files in scope in this process, after `prepare_real` or `prepare_mini`.

    Args:
        arguments: further ones for pytest, such as `-k order`; files replace the five of `scope`.
        only_scope: leave out what `scope.yaml` does not hold.

    Returns:
        pytest's exit status, and how each item ended.
    """
    results = Results(only_scope)
    files = sorted({str(TESTS / file) for file, _ in scope()})
    if any(argument.partition("::")[0].endswith(".py") for argument in arguments):
        files = []
    with _no_bytecode():
        status = pytest.main(
            [
                *("-c", str(ROOT / "upstream" / "pyproject.toml"), "--noconftest", "-q"),
                *("--import-mode=prepend", "-p", "no:cacheprovider", "-W", "ignore"),
                *arguments,
                *files,
            ],
            plugins=[results],
        )
    return int(status), results.outcomes
