"""The real engine, run now, beside the mini one: the same steps, the same texts, the same stream.

Each engine is started once, in the environment of `course engine install`, and serves many checks.
The recordings in `recordings/engine` were made by another build; what this build does is compared
with the mini engine directly, and with them.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance import real_engine, record, recording, replay, serve_stream, shadow
from conformance.features.entrypoints import public_api
from conformance.features.lora import texts as lora_texts
from conformance.features.moe import texts as moe_texts
from conformance.features.sampling import texts as sampling_texts
from conformance.features.spec_decode import texts as real_spec
from conformance.features.structured_output import texts as structured_texts
from labkit import environment, processes
from labkit.mine import PassedCourse
from mini_vllm import LLM, SamplingParams

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[1]
KEPT = Path(__file__).parent / "recordings" / "engine"
LIMIT = 1800.0
"""Seconds one start of the engine may take, with all its steps, on a busy machine."""
Run = Callable[..., str]


@pytest.fixture(scope="session")
def found() -> environment.Environment:
    made = environment.look(environment.folder(ROOT))
    assert made is not None
    return made


@pytest.fixture(scope="session")
def run(found: environment.Environment) -> Run:
    """Run a module in the real engine's environment; what it printed."""

    def module(name: str, *arguments: str) -> str:
        command = [str(found.python), "-m", name, *arguments]
        began = time.perf_counter()
        done = subprocess.run(
            command, cwd=ROOT, env=environment.variables(found, ROOT), timeout=LIMIT, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        print(f"{name} {' '.join(arguments)}: {time.perf_counter() - began:.0f} s")
        assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-30:])
        return done.stdout

    return module


def load(path: Path) -> dict[str, Any]:
    (found,) = recording.lines(path)
    return found


# ------------------------------------------------------------------ 128 requests, step by step


@pytest.fixture(scope="session", params=["synchronous", "default"])
def recorded(run, found, tmp_path_factory, request) -> dict[str, Any]:
    """The workload of `real_engine`, recorded now: synchronous, and as the platform has it."""
    if request.param == "default" and not found.on_cpu:
        pytest.skip("a GPU schedules asynchronously by default, which this probe does not follow")
    out = tmp_path_factory.mktemp("engine")
    part = {"synchronous": "arrivals-float32", "default": "default-float32"}[request.param]
    run("conformance.record", part, "--out", str(out))
    return load(out / "engine" / f"{part}.jsonl.gz")


def test_every_step_is_the_mini_schedulers(recorded):
    entry = recorded["recording"]
    steps, difference = replay.replay(entry)
    assert difference is None
    assert (steps, len(entry["steps"])) == (442, 442)
    assert sum(len(step["preempted"]) for step in entry["steps"]) == 46
    assert shadow.stale_reads(entry) == []


def test_every_text_is_the_mini_models(recorded, mini_texts):
    outputs = recorded["recording"]["outputs"]
    assert len(outputs) == 128
    assert [name for name in outputs if outputs[name] != mini_texts[name]] == []


@pytest.fixture(scope="session")
def mini_texts() -> dict[str, list[int]]:
    """What the mini engine says in float64 on the same arrivals."""
    return real_engine.generate_on_arrivals(real_engine.workload())


def test_it_is_what_another_build_recorded(recorded):
    assert recorded["recording"] == load(KEPT / "arrivals-float32.jsonl.gz")["recording"]


# ------------------------------------------------------------------ a learner's scheduler in it


def test_it_serves_128_prompts_by_the_scheduler_of_lab_03_01(run):
    """Texts and every step as with vLLM's own scheduler, which left the recording."""
    (lab,) = ROOT.glob("phase-03-*/labs/lab-01-*/solution.py")
    said = run("conformance.own_scheduler", "arrivals", f"scheduler={lab}:Scheduler")
    heard = processes.Ran((), 0, said).needed()
    kept = load(KEPT / "arrivals-float32.jsonl.gz")["recording"]
    assert len(heard["outputs"]) == 128
    assert heard["outputs"] == kept["outputs"]
    observed = heard["steps"][0].keys()
    assert len(heard["steps"]) == len(kept["steps"]) == heard["calls"]["scheduler.schedule"]
    for number, (step, theirs) in enumerate(zip(heard["steps"], kept["steps"], strict=True)):
        assert step == {name: theirs[name] for name in observed}, f"step {number}"
        orders = [list(each["num_scheduled_tokens"]) for each in (step, theirs)]
        assert orders[0] == orders[1], f"step {number}"


def test_a_server_whose_core_plans_by_it_streams_refuses_and_goes_on(run):
    said = run("conformance.own_scheduler", "serve")
    heard = processes.Ran((), 0, said).needed()
    params = SamplingParams(max_tokens=serve_stream.MAX_TOKENS, ignore_eos=True)
    for prompt in serve_stream.PROMPTS:
        (mini,) = LLM(dtype="float64").generate([prompt], params)
        assert "".join(heard["answers"][prompt]["pieces"]) == mini.outputs[0].text
    assert heard["counters"]["vllm:generation_tokens_total"] == 2 * serve_stream.MAX_TOKENS
    assert heard["refused"] == 500, "answered with an error, by name in the log"
    assert "not served: structured_outputs" in said
    assert heard["again"]["pieces"], "the server goes on after a refusal and a client that left"
    assert heard["running"] == 0.0, "nothing is left of the stream that was given up"


def test_course_run_mine_real_says_what_it_called(found, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COURSE_ENGINE", str(environment.folder(ROOT)))
    course = PassedCourse(tmp_path, ["02-01", "02-05", "03-01", "09-01"], monkeypatch, capsys)
    plain, real = course.run("The KV cache is"), course.run("The KV cache is", "--mine", "--real")
    assert plain.splitlines()[0] in real.splitlines()
    assert "yours, from lab 03-01: add_request 1, schedule 12, update_from_output 12" in real
    assert "kv_cache_manager   yours, from lab 02-05: " in real
    assert "block_pool         yours, from lab 02-01: " in real
    assert "sampler            yours, not called: the real engine has its own" in real


# ------------------------------------------------------------------ the public interface


@pytest.fixture(scope="session")
def script(run, tmp_path_factory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("engine")
    run("conformance.record", "public-api", "--out", str(out))
    return load(out / "engine" / "public-api.jsonl.gz")


def test_the_script_answers_and_refuses_as_recorded(script):
    kept = load(public_api.RECORDED)
    assert script["answers"] == kept["answers"]
    assert script["refusals"] == kept["refusals"]


def test_the_script_answers_as_on_mini_but_for_the_known_prompt(script):
    mini = public_api.run_script(LLM, SamplingParams)["answers"]
    differ = [name for name in mini if mini[name] != script["answers"][name]]
    assert differ == ["ends inside a character"]


# ------------------------------------------------------------------ served


@pytest.fixture(scope="session")
def served(run) -> dict[str, Any]:
    said = run("conformance.serve_stream")
    result = processes.Ran((), 0, said).result
    assert result is not None, said[-2000:]
    return result


@pytest.mark.parametrize("prompt", serve_stream.PROMPTS)
def test_the_streamed_pieces_are_the_mini_engines_text(served, prompt):
    heard = served["answers"][prompt]
    params = SamplingParams(max_tokens=serve_stream.MAX_TOKENS, ignore_eos=True)
    (mini,) = LLM(dtype="float64").generate([prompt], params)
    assert "".join(heard["pieces"]) == mini.outputs[0].text
    assert len(heard["pieces"]) > 1, "a stream, not one answer"
    assert heard["finish_reason"] == "length" and heard["done"]
    assert heard["usage"]["prompt_tokens"] == len(prompt.encode())
    assert heard["usage"]["completion_tokens"] == serve_stream.MAX_TOKENS


def test_the_servers_counters_count_the_same_tokens(served):
    prompts = serve_stream.PROMPTS
    assert served["counters"] == {
        "vllm:prompt_tokens_total": sum(len(prompt.encode()) for prompt in prompts),
        "vllm:generation_tokens_total": len(prompts) * serve_stream.MAX_TOKENS,
        "vllm:request_success_total": len(prompts),
    }


# ------------------------------------------------------------------ a model with experts


@pytest.mark.slow
def test_a_hundred_texts_of_a_model_with_experts_are_the_mini_engines(run, tmp_path):
    """The shipped one; float32, greedy, in one batch."""
    name = "byte-moe"
    run("conformance.record", f"texts-{name}", "--out", str(tmp_path))
    heard = moe_texts.kept(name, tmp_path / "engine")
    folder = moe_texts.folder_of(name, tmp_path)
    assert moe_texts.differing(heard, moe_texts.mini(folder, heard["prompts"])) == []


# ------------------------------------------------------------------ adapters


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mini", "names"),
    [
        ("texts-lora", lora_texts.mini, lora_texts.NAMES),
        ("texts-lora-ends", lora_texts.mini_ends, tuple(lora_texts.ENDS)),
    ],
)
def test_three_adapters_and_the_base_in_one_batch_say_what_the_mini_engine_says(
    run, tmp_path, name, mini, names
):
    """Shipped ones, or of embedding and head: 64 rows, float32, greedy, a slot to spare."""
    run("conformance.record", name, "--out", str(tmp_path))
    heard = lora_texts.kept(name, folder=tmp_path / "engine")
    assert heard["outputs"] == lora_texts.kept(name)["outputs"]
    assert not any(lora_texts.differing(heard, mini(heard), names).values())


# ------------------------------------------------------------------ constraints


@pytest.mark.slow
def test_fifty_constraints_say_what_the_mini_engine_says(run, tmp_path):
    """Regexes, choices, grammars and schemas in one batch with free requests, float32, greedy."""
    run("conformance.record", "texts-structured", "--out", str(tmp_path))
    heard = structured_texts.kept(folder=tmp_path / "engine")
    assert heard["outputs"] == structured_texts.kept()["outputs"]
    assert structured_texts.differing(heard, structured_texts.mini()) == []


def test_the_masks_of_both_libraries_are_those_that_are_kept(run, tmp_path):
    run("conformance.record", "grammar_masks", "--out", str(tmp_path))
    kept = recording.lines(record.FOLDER / "parts" / "grammar_masks.jsonl.gz")
    heard = recording.lines(tmp_path / "parts" / "grammar_masks.jsonl.gz")
    assert [line for line in heard if line.get("vocabulary") == "bytes"] == [
        line for line in kept if line.get("vocabulary") == "bytes"
    ]


def test_the_rows_of_masks_under_drafts_are_those_that_are_kept(run, tmp_path):
    """The real manager, scheduler and worker, with xgrammar's grammars."""
    run("conformance.record", "grammar_rows", "--out", str(tmp_path))
    kept = recording.lines(record.FOLDER / "parts" / "grammar_rows.jsonl.gz")
    assert recording.lines(tmp_path / "parts" / "grammar_rows.jsonl.gz") == kept


# ------------------------------------------------------------------ every knob


@pytest.mark.slow
def test_a_hundred_requests_with_every_knob_are_answered_alike(run, tmp_path):
    """Texts, logprobs and beams, float32; recorded anew and compared with the mini engine."""
    run("conformance.record", "texts-sampling", "--out", str(tmp_path))
    heard = sampling_texts.kept(tmp_path / "engine" / sampling_texts.FILE.name)
    assert sampling_texts.differences(heard, sampling_texts.mini(heard, "float32")) == []


# ------------------------------------------------------------------ the build


def test_the_builds_python_is_the_pinned_trees_but_for_two_files(found):
    """The build for processors is not upstream's own: what it says it is, it is."""
    tree = ROOT / "upstream" / "vllm"
    if not found.on_cpu:
        pytest.skip("on a GPU it is upstream's own wheel")
    if not tree.is_dir():
        pytest.skip("no pinned tree to compare with: course upstream fetch")
    packages = sorted(found.python.parents[1].glob("lib/python3*/site-packages/vllm"))
    (package,) = packages
    ours = {path.relative_to(package) for path in package.rglob("*.py")}
    differ = [
        path.as_posix()
        for path in sorted(ours)
        if not (tree / path).is_file()
        or (tree / path).read_bytes() != (package / path).read_bytes()
    ]
    assert len(ours) > 1500
    assert set(differ) <= {"_version.py", "platforms/__init__.py"}


# ------------------------------------------------------------------ drafts


@pytest.mark.slow
def test_drafts_are_made_and_accepted_as_by_the_mini_engine(run, tmp_path):
    """A draft model with K and V of its own: steps, drafts, counters and texts."""
    run("conformance.record", "spec-draft_model-float32", "--out", str(tmp_path))
    out = tmp_path / "engine" / "spec-draft_model-float32.jsonl.gz"
    found = real_spec.load(out)
    wrong, line = real_spec.compare(found, real_spec.make_draft(tmp_path / "draft"))
    assert not wrong, (line, wrong[:3])
    kept = real_spec.load(KEPT / "spec-draft_model-float32.jsonl.gz")
    assert found["recording"]["outputs"] == kept["recording"]["outputs"]


# ------------------------------------------------------------------ two engines, one folder


def test_two_engines_that_share_files_say_what_was_recorded(run, found, tmp_path):
    if not found.on_cpu:
        pytest.skip("recorded on a processor")
    part = "texts-example-connector-by-tokens"
    run("conformance.record", part, "--out", str(tmp_path))
    now, kept = load(tmp_path / "engine" / f"{part}.jsonl.gz"), load(KEPT / f"{part}.jsonl.gz")
    for role in ("producer_by_tokens", "consumer_by_tokens"):
        assert now[role] == kept[role]
