"""The root conftest.py: labs are graded by plain pytest, without the course tool."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from course.conftest import GOOD, REPOSITORY


def plain_pytest(*arguments: str, cwd=REPOSITORY, **env: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if k != "LAB_IMPL" and not k.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        capture_output=True, text=True, cwd=cwd, check=False,
        env={**kept, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("where", "argument"),
    [(GOOD, "."), pytest.param(REPOSITORY, str(GOOD), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(("env", "code"), [({}, 0), ({"LAB_IMPL": "starter"}, 1)])
def test_a_lab_runs_from_the_root_and_from_its_own_folder(where, argument, env, code):
    assert plain_pytest(argument, cwd=where, **env).returncode == code


@pytest.mark.slow
def test_a_nonsense_lab_impl_is_refused_by_name():
    ran = plain_pytest(str(GOOD), LAB_IMPL="nonsense")
    assert ran.returncode == 4
    assert "LAB_IMPL='nonsense' is not accepted: use LAB_IMPL=solution (the default) or" in (
        ran.stderr
    )


@pytest.mark.slow
def test_a_required_thing_that_is_missing_is_refused_not_skipped():
    ran = plain_pytest(str(GOOD), "--require=gpu", CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 4 and "--require=gpu: no CUDA GPU" in ran.stderr


@pytest.mark.slow
def test_what_a_machine_lacks_skips_with_the_reason(little_course):
    (little_course / "test_needs.py").write_text(
        "import pytest\n\n\ndef test_device(gpu_device):\n    pass\n\n\n"
        "@pytest.mark.gpu\ndef test_marked():\n    pass\n"
    )
    ran = plain_pytest("-rs", "test_needs.py", cwd=little_course, CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 0 and ran.stdout.count("no CUDA GPU") == 2


@pytest.mark.slow
def test_a_folder_has_the_tests_that_the_suite_has_of_it(little_course):
    lab = "phase-90-little/labs/lab-00-blocks-0"
    with (little_course / lab / "test_lab.py").open("a", encoding="utf-8") as file:
        file.write("\n\nimport pytest\n\n\n@pytest.mark.slow\ndef test_long():\n    pass\n")

    def has_the_slow_one(*named, **env):
        ran = plain_pytest("--collect-only", *named, cwd=little_course, **env)
        return "::test_long" in ran.stdout

    assert not has_the_slow_one() and not has_the_slow_one("phase-90-little")
    assert has_the_slow_one("-m", "slow", "phase-90-little")
    assert has_the_slow_one(lab) and has_the_slow_one(f"{lab}/test_lab.py")
    graded = {"LAB_IMPL": "starter"}  # a learner, by all of a lab's tests
    assert has_the_slow_one(**graded) and has_the_slow_one("phase-90-little", **graded)


@pytest.mark.slow
def test_two_labs_with_the_same_file_names_do_not_meet(little_course):
    one, two = sorted(little_course.glob("phase-*/labs/lab-*"))
    (one / "solution.py").write_text("def num_blocks(a, b):\n    return 2\n")
    assert plain_pytest(str(one), str(two), cwd=little_course).stdout.startswith("..")
