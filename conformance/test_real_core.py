"""The core from an archive decides as the installed package did, and never guesses."""

from __future__ import annotations

import os
import sys
import zipfile
from pathlib import Path

import pytest

from conformance import recording, workloads
from conformance.features.core import recorder as scheduler
from conformance.real_core import (
    ArchiveError,
    LoadError,
    RealCore,
    StubError,
    answers,
    core_of,
    present,
    why_not,
)
from conformance.real_core.archive import identity, open_archive
from conformance.real_core.namespace import Namespace
from conformance.real_core.places import tree_of
from conformance.real_core.stand_ins import Given, Placeholder
from conformance.recorders import again

RECORDINGS = Path(recording.__file__).parent / "recordings"
KEPT = sorted(RECORDINGS.glob("*.jsonl.gz"))
TIMES = int(os.environ.get("CONFORMANCE_TIMES", "1"))
OTHERS = [version for version in present() if version != recording.UPSTREAM["version"]]
needs_pin = pytest.mark.skipif(bool(why_not()), reason=why_not())


# ------------------------------------------------------------------ decides as the installed one


@needs_pin
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_the_first_kept_workload_of_each_file_is_recorded_again(path):
    kept = next(recording.read(path))
    assert again.record(kept, core_of()) == kept


@needs_pin
@pytest.mark.slow
@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name.partition(".")[0])
def test_kept_workloads_are_recorded_again(path):
    """One of ten; every one with CONFORMANCE_TIMES=10."""
    for kept in recording.read(path, wanted=lambda number: number % 10 < TIMES):
        assert again.record(kept, core_of()) == kept, f"{path.name}, seed {kept['seed']}"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((RECORDINGS / "releases").glob("0.*.gz")), ids=str)
def test_what_later_releases_decided_when_installed_is_recorded_again(path):
    version = path.name.removesuffix(".jsonl.gz")
    if problem := why_not(version):
        pytest.skip(problem)
    for kept in recording.read(path, None, lambda number: number % 12 == 1):
        assert again.record(kept, core_of(version)) == kept, f"{version}, seed {kept['seed']}"


@pytest.mark.slow
@pytest.mark.parametrize("version", OTHERS)
def test_five_workloads_of_each_profile_are_recorded_from_every_release_that_is_here(version):
    """But for two faults that those releases had: see the table."""
    core, faults = core_of(version), set()
    for seed in range(5 * len(workloads.PROFILES)):
        try:
            made = scheduler.record(workloads.generate(seed), core)
        except (TypeError, scheduler.Stalled) as error:
            faults.add(type(error))
        else:
            assert recording.problem_of(made, core.upstream) == ""
    known = {TypeError: (0, 12, 0), scheduler.Stalled: (0, 19, 0)}
    """Two requests of equal rank could not be compared; one too many was let in for ever."""
    assert {fault for fault in faults if core.number >= known[fault]} == set()


# ------------------------------------------------------------------ worlds of its own


@needs_pin
def test_nothing_of_it_is_left_in_the_modules_of_the_process():
    before = dict(sys.modules)
    core = RealCore(tree_of(recording.UPSTREAM["version"]))
    names = set(core.namespace.modules)
    assert {"vllm.v1.core.sched.scheduler", "torch"} <= names
    assert {n for n in sys.modules if n.startswith("vllm_0")} == set()
    assert all(sys.modules.get(name) is before.get(name) for name in names if "numpy" not in name)


@pytest.mark.slow
@needs_pin
def test_two_cores_in_one_process_share_no_class():
    one, other = (RealCore(tree_of(recording.UPSTREAM["version"])) for _ in range(2))
    config = workloads.generate(0)["config"]
    schedulers = [type(core.make_scheduler(config)) for core in (one, other)]
    assert schedulers[0].__name__ == schedulers[1].__name__ == "Scheduler"
    assert schedulers[0] is not schedulers[1]


@needs_pin
def test_a_zip_of_the_modules_is_as_good_as_the_tree(tmp_path):
    tree, packed = tree_of(recording.UPSTREAM["version"]), tmp_path / "core.zip"
    used = core_of().namespace.files
    with zipfile.ZipFile(packed, "w") as archive:
        for name in ["vllm/_version.py", *used]:
            archive.write(tree / name, name)
    kept = next(recording.read(RECORDINGS / "mixed.jsonl.gz"))
    assert again.record(kept, RealCore(packed)) == kept


# ------------------------------------------------------------------ it never guesses


def test_a_placeholder_may_be_imported_and_annotated_with():
    made = Placeholder("torch.Tensor")
    assert made.dtype.__name__ == "torch.Tensor.dtype"
    assert repr(made | None).endswith("| None")
    assert made["anything"] is made


@pytest.mark.parametrize(
    "ask",
    [
        lambda it: it(),
        bool,
        len,
        list,
        lambda it: isinstance(3, it),
        lambda it: issubclass(int, it),
        lambda it: it == 3,
        lambda it: it < 3,
        lambda it: it + 3,
        lambda it: 3 in it,
    ],
)
def test_a_placeholder_that_is_asked_anything_names_itself(ask):
    with pytest.raises(StubError, match=r"torch\.float16 has no answer here"):
        ask(Placeholder("torch.float16"))


def test_an_option_nobody_listed_is_no_attribute_error():
    config = Given("cache_config", {"block_size": 16})
    assert config.block_size == 16
    with pytest.raises(StubError, match=r"cache_config\.new_knob"):
        getattr(config, "new_knob", None)


def release(tmp_path, scheduler, **more):
    """An archive of a release nobody published, with that scheduler."""
    files = {
        "vllm/_version.py": "version = '9.9.9'\ncommit_id = 'gabc123'\n",
        "vllm/v1/core/sched/scheduler.py": scheduler,
        **more,
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def namespace(root):
    return Namespace(open_archive(root), "9.9.9", answers.values())


def test_a_name_first_asked_for_while_scheduling_is_named(tmp_path):
    root = release(tmp_path, "import vllm.envs as envs\ndef go():\n    return envs.VLLM_NEW\n")
    core = namespace(root).load("vllm.v1.core.sched.scheduler")
    with pytest.raises(StubError, match=r"9\.9\.9 asks for vllm\.envs\.VLLM_NEW"):
        core.go()


def test_a_stubbed_name_that_is_called_while_loading_is_named(tmp_path):
    root = release(tmp_path, "from vllm.new import decide\nLIMIT = decide()\n")
    with pytest.raises(LoadError, match=r"9\.9\.9: .*scheduler\.py .*vllm\.new\.decide"):
        namespace(root).load("vllm.v1.core.sched.scheduler")


def test_installed_packages_that_are_not_listed_are_not_used(tmp_path):
    root = release(tmp_path, "import yaml\ndef go():\n    return yaml.safe_load('1')\n")
    core = namespace(root).load("vllm.v1.core.sched.scheduler")
    with pytest.raises(StubError, match=r"yaml\.safe_load"):
        core.go()


def test_imports_inside_the_core_are_its_own(tmp_path):
    root = release(
        tmp_path,
        "from .queue import LENGTH\nfrom vllm.v1.core import sched\n"
        "import vllm.v1.core.sched.queue\n"
        "def go():\n    from vllm.v1.core.sched.late import LATE\n    return LENGTH, LATE\n",
        **{
            "vllm/v1/core/__init__.py": "",
            "vllm/v1/core/sched/__init__.py": "",
            "vllm/v1/core/sched/queue.py": "LENGTH = 7\n",
            "vllm/v1/core/sched/late.py": "from vllm.v1.core.sched.queue import LENGTH as LATE\n",
        },
    )
    assert namespace(root).load("vllm.v1.core.sched.scheduler").go() == (7, 7)


@pytest.mark.slow
@pytest.mark.skipif(len(OTHERS) < 20, reason="needs the archives of many releases")
def test_every_listed_option_and_name_is_one_that_some_release_reads():
    text = "".join(core_of(version).namespace.text for version in present())
    asked = {path.partition(".")[2] for path in answers.OPTIONS}
    asked |= {name for names in answers.ANSWERS.values() for name in names}
    assert [name for name in sorted(asked) if name not in text] == []


# ------------------------------------------------------------------ archives


def test_an_archive_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(ArchiveError, match="course upstream fetch"):
        RealCore(tmp_path / "vllm-9.9.9")


def test_a_release_that_was_not_fetched_is_named():
    with pytest.raises(ArchiveError, match=r"9\.9\.9 is not here: .* --version 9\.9\.9"):
        core_of("9.9.9")


@pytest.mark.parametrize("version", ["newest", "0.33", "v0.22.1"])
def test_a_version_is_three_numbers(version):
    with pytest.raises(ArchiveError, match="need three numbers"):
        core_of(version)


def test_a_tree_without_a_scheduler_is_no_release(tmp_path):
    (tmp_path / "vllm").mkdir()
    with pytest.raises(ArchiveError, match=r"holds no vllm/v1/core/sched/scheduler\.py"):
        RealCore(tmp_path)


def test_a_tree_that_does_not_say_its_version_is_refused(tmp_path):
    root = release(tmp_path, "", **{"vllm/_version.py": ""})
    with pytest.raises(ArchiveError, match="which release it is"):
        identity(open_archive(root))


def test_a_release_older_than_the_core_is_refused(tmp_path):
    root = release(tmp_path, "", **{"vllm/_version.py": "version = '0.10.2'\n"})
    with pytest.raises(ArchiveError, match=r"0\.10\.2: the oldest that loads is 0\.11\.0"):
        RealCore(root)


def test_a_file_that_was_cut_off_is_named(tmp_path):
    root = release(tmp_path, "class Scheduler(\n")
    with pytest.raises(LoadError, match=r"scheduler\.py does not load"):
        RealCore(root)


def test_a_damaged_zip_is_named(tmp_path):
    path = tmp_path / "core.zip"
    path.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ArchiveError, match=r"core\.zip cannot be read"):
        RealCore(path)
