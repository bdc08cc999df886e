"""The contribution's tests on a release's own scheduler, as it is and with the patch.

    python phase-19-capstone-maintainer-and-startup/contribution/run.py
    python phase-19-capstone-maintainer-and-startup/contribution/run.py --workloads 450

Promises: the release's tree is not changed; the patch is applied to a copy of one file beside links
to the others. The tests are the file as it would be sent: what it imports from upstream's
`tests/v1/core/utils.py` is put in its place, over the core that is loaded without torch.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance import shadow, workload_file, workloads
from conformance.real_core import RealCore, core_of, why_not
from conformance.real_core.places import tree_of
from conformance.recorders.run import RefusedError, Run, Stalled
from course.files import load_module

HERE = Path(__file__).resolve().parent
TESTS = HERE / "priority_withdrawal.py"
SCHEDULER = Path("vllm", "v1", "core", "sched", "scheduler.py")
RELEASES = ("0.22.1", "0.33.0")
"""The pin, and the newest release that was asked; each has its patch."""
IMPORTED = ("vllm.v1.core.sched.request_queue", "vllm.v1.outputs")


@functools.cache
def core(version: str, patched: bool) -> RealCore:
    """A release's core, with the patch or without."""
    if not patched:
        return core_of(version)
    return patched_core(version, (HERE / f"{version}.patch").read_text(encoding="utf-8"))


def patched_core(version: str, patch: str) -> RealCore:
    """A release's core with a patch of its scheduler.

    Raises:
        ValueError: the patch does not apply to this release.
    """
    with tempfile.TemporaryDirectory() as folder:
        root, tree = Path(folder), tree_of(version)
        for number in range(1, len(SCHEDULER.parts)):
            inside = Path(*SCHEDULER.parts[:number])
            (root / inside).mkdir()
            for each in (tree / inside).iterdir():
                if each.name != SCHEDULER.parts[number]:
                    (root / inside / each.name).symlink_to(each.resolve())
        shutil.copy(tree / SCHEDULER, root / SCHEDULER)
        command = ["git", "apply", "--whitespace=nowarn", "-"]
        done = subprocess.run(command, input=patch, text=True, cwd=root, capture_output=True)
        if done.returncode:
            raise ValueError(f"vLLM {version}: the patch does not apply: {done.stderr.strip()}")
        return RealCore(root)


# ------------------------------------------------------------------ upstream's helpers, in small


def _utils(core: RealCore) -> types.ModuleType:
    """`tests/v1/core/utils.py`, as far as the tests use it."""
    module = types.ModuleType("tests.v1.core.utils")

    def create_scheduler(*, async_scheduling: bool, **asked: Any) -> Any:
        config = {"policy": "fcfs", "enable_chunked_prefill": True, **asked}
        return core.make_scheduler(config, async_scheduling)

    def create_requests(
        num_requests: int, num_tokens: int, max_tokens: int, block_size: int, req_ids: list[str]
    ) -> list[Any]:
        return [
            core.make_request(
                {
                    "request_id": req_ids[i], "prompt_token_ids": [i] * num_tokens,
                    "max_tokens": max_tokens, "priority": 0, "arrival_time": 0.0,
                    "ignore_eos": True,
                },
                block_size, 2,
            )
            for i in range(num_requests)
        ]  # fmt: skip

    vars(module).update(create_scheduler=create_scheduler, create_requests=create_requests)
    return module


def _pytest() -> types.ModuleType:
    """The marks that the file uses: a function keeps its parameters in `cases`."""

    def parametrize(name: str, values: list[Any]) -> Any:
        def marked(function: Any) -> Any:
            function.cases = [{name: value} for value in values]
            return function

        return marked

    module = types.ModuleType("pytest")
    vars(module)["mark"] = types.SimpleNamespace(cpu_test=None, parametrize=parametrize)
    return module


@contextlib.contextmanager
def _standing_in(core: RealCore) -> Iterator[None]:
    """What the tests import, while they are loaded."""
    found = {name: core.namespace.load(name) for name in IMPORTED}
    found["tests.v1.core.utils"] = _utils(core)
    found["pytest"] = _pytest()
    parents = {n.rpartition(".")[0] for n in found}
    parents |= {".".join(n.split(".")[:k]) for n in found for k in range(1, n.count(".") + 1)}
    stood = {name: types.ModuleType(name) for name in parents} | found
    before = {name: sys.modules.get(name) for name in stood}
    sys.modules.update(stood)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def other_fix(version: str, fix: str) -> RealCore:
    """A release's core with another fix, to see what the tests say of it.

    Args:
        version: one of `RELEASES`.
        fix: "everything" forgets all blocks of the victim; "until output" those that no output
            has confirmed, in this plan or in one that is in flight.
    """
    made = patched_core(version, (HERE / f"{version}.patch").read_text(encoding="utf-8"))

    def fixed(kind: type[Any]) -> type[Any]:
        class Fixed(kind):
            confirmed: dict[str, int]

            def update_from_output(self, plan: Any, output: Any) -> Any:
                vars(self).setdefault("confirmed", {})
                for request_id, count in plan.num_scheduled_tokens.items():
                    self.confirmed[request_id] = self.confirmed.get(request_id, 0) + count
                return super().update_from_output(plan, output)

            def _forget_uncomputed_blocks(self, request: Any) -> None:
                confirmed = vars(self).get("confirmed", {}).get(request.request_id, 0)
                computed = request.num_computed_tokens
                request.num_computed_tokens = confirmed if fix == "until output" else 0
                super()._forget_uncomputed_blocks(request)
                request.num_computed_tokens = computed

        return Fixed

    made._scheduler, made._async_scheduler = fixed(made._scheduler), fixed(made._async_scheduler)
    return made


def outcomes(core: RealCore) -> dict[str, str]:
    """Each test, by name and parameters: "passed", or what failed."""
    with _standing_in(core):
        module = load_module(TESTS)
    found = {}
    for name, function in vars(module).items():
        if not name.startswith("test_"):
            continue
        cases: list[dict[str, Any]] = getattr(function, "cases", [{}])
        for case in cases:
            said = ", ".join(f"{key}={value}" for key, value in case.items())
            try:
                function(**case)
            except AssertionError as error:
                found[f"{name}({said})"] = f"failed {error}".strip()
            else:
                found[f"{name}({said})"] = "passed"
    return found


# ------------------------------------------------------------------ drawn workloads


def drawn(seed: int) -> workloads.Workload:
    """A long prompt in chunks of two blocks, an urgent short one, and one that waits for both."""
    rng = random.Random(seed)
    long, short = rng.choice((16, 24)), rng.choice((3, 4))
    return workload_file.parse(
        f"""
config: {{num_blocks: {rng.randint(7, 8)}, max_num_seqs: 2, max_num_batched_tokens: 16,
         policy: priority, long_prefill_token_threshold: 8, max_model_len: 64}}
requests:
- {{id: low, prompt: {long}, max_tokens: 2, priority: 5}}
- {{id: later, prompt: 25, max_tokens: 2, priority: 9}}
- {{id: high, prompt: {short}, max_tokens: {rng.randint(2, 8)}, step: {rng.randint(0, 2)}}}
"""
    )


def stale(core: RealCore, count: int) -> tuple[int, int]:
    """Of so many drawn priority workloads: how many ended, and how many read stale blocks."""
    read = ended = 0
    for seed in range(count):
        try:
            entry = Run(drawn(seed), core, tells_tokens=False).recorded()
        except (Stalled, RefusedError):
            continue
        ended += 1
        read += bool(shadow.stale_reads(entry))
    return ended, read


def main() -> int:
    parser = argparse.ArgumentParser(description="The contribution's tests, without and with it.")
    parser.add_argument("--workloads", type=int, default=0, help="also so many drawn workloads")
    arguments = parser.parse_args()
    if arguments.workloads < 0:
        parser.error(f"--workloads={arguments.workloads}: need 0 or more")
    if problems := list(filter(None, map(why_not, RELEASES))):
        print("\n".join(dict.fromkeys(problems)), file=sys.stderr)
        return 2
    for version in RELEASES:
        for patched in (False, True):
            print(f"vLLM {version}{', patched' if patched else ''}")
            for name, said in outcomes(core(version, patched)).items():
                print(f"  {said.splitlines()[0]:<8} {name}")
            if arguments.workloads:
                ran, read = stale(core(version, patched), arguments.workloads)
                print(f"  {read} of {ran} drawn workloads read a block that holds something else")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
