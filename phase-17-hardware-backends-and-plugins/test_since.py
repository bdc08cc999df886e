"""The guide's section "Since the pin": in which release's own source each thing is.

Read, not run. Without an archive in `build/releases` its rows are skipped:
`course upstream fetch --version 0.33.0`.
"""

from __future__ import annotations

import ast
import json
import re

import pytest

from conformance.features.engine import platform_uses
from conformance.real_core import why_not
from conformance.real_core.places import tree_of

PLATFORM, PLUGINS = "vllm/platforms/interface.py", "vllm/plugins/__init__.py"
INTERFACE = "vllm/v1/core/sched/interface.py"
ROWS = (
    ("ENDPOINT_PLUGINS_GROUP", PLUGINS, "0.24.0", "0.26.0"),
    ("register_custom_kv_cache_specs", PLATFORM, "0.22.1", "0.23.0"),
    ("get_kv_cache_config_builder_cls", PLATFORM, "0.32.0", "0.33.0"),
)


def read(release: str, file: str) -> str:
    if reason := why_not(release):
        pytest.skip(reason)
    return (tree_of(release) / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "file", "before", "since"), ROWS)
def test_a_name_is_there_from_the_release_that_the_page_names(name, file, before, since):
    word = re.compile(rf"\b{name}\b")
    held = {release: bool(word.search(read(release, file))) for release in (before, since)}
    assert held == {before: False, since: True}


def abstract(release: str) -> set[str]:
    """What a scheduler must define there."""
    body = ast.parse(read(release, INTERFACE)).body
    (found,) = [n for n in body if isinstance(n, ast.ClassDef) and n.name == "SchedulerInterface"]
    return {
        node.name
        for node in found.body
        if isinstance(node, ast.FunctionDef)
        and any(getattr(each, "id", "") == "abstractmethod" for each in node.decorator_list)
    }


def test_one_method_more_is_asked_of_a_scheduler_at_0_33_0():
    assert abstract("0.32.0") == abstract("0.22.1")
    assert abstract("0.33.0") - abstract("0.22.1") == {"has_request"}


def test_endpoint_plugins_are_loaded_only_by_name():
    text = read("0.33.0", PLUGINS)
    function = text[text.index("def load_endpoint_plugins") :]
    assert "if envs.VLLM_PLUGINS is None:" in function
    assert function.index("return []") < function.index("load_plugins_by_group(")


@pytest.mark.slow
def test_the_counts_of_the_guides_funnel_are_the_pins():
    if reason := why_not():
        pytest.skip(reason)
    kept = json.loads(platform_uses.KEPT.read_text(encoding="utf-8"))
    assert platform_uses.counted() == kept["folders"]
