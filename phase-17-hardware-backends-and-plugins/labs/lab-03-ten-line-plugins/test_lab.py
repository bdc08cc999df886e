"""What lab 17-03 pins: each plugin on what the real engine hands to it, and in the real engine."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from labkit import environment, refused, same

HERE = Path(__file__).parent
ROOT = HERE.parents[2]


@functools.cache
def recorded():
    """What the real engine did with the solution, and what vLLM's own code says."""
    with gzip.open(HERE / "recordings" / "plugins.jsonl.gz", "rt") as file:
        return json.loads(file.read())


class Base:
    """Stands for one of vLLM's base classes."""


# --- platform -------------------------------------------------------------------------------------


class Cpu:
    """Stands for `CpuPlatform`, as far as the configuration goes."""

    @classmethod
    def check_and_update_config(cls, config):
        config.seen = True
        if not config.cache_config.user_specified_block_size:
            config.cache_config.block_size = 128


@pytest.mark.parametrize(
    ("given", "size", "want"), [(False, None, 64), (True, 16, 16), (True, 128, 128)]
)
def test_the_platform_moves_a_default_and_no_wish(lab, given, size, want):
    """A size that overrules the user's; a base that is not asked."""
    cache = SimpleNamespace(block_size=size, user_specified_block_size=given)
    config = SimpleNamespace(cache_config=cache, seen=False)
    kind = lab.make_platform(Cpu)
    assert issubclass(kind, Cpu), f"a subclass of the class handed in: expected Cpu, came {kind}"
    kind.check_and_update_config(config)
    same(
        cache.block_size,
        want,
        f"block size, the user {'gave ' + str(size) if given else 'gave none'}",
    )
    same(config.seen, True, "whether the base rewrote the rest")


def test_the_platform_is_there_with_its_device_alone(lab, monkeypatch):
    """A plugin that beats CUDA wherever it is installed."""
    monkeypatch.delenv("COURSE_DEVICE", raising=False)
    same(lab.platform_plugin(), None, "without the device")
    monkeypatch.setenv("COURSE_DEVICE", "1")
    same(lab.platform_plugin(), "course_plugins_classes.BigBlocks", "with it")
    for value in ("0", "", "2", "no"):
        monkeypatch.setenv("COURSE_DEVICE", value)
        same(lab.platform_plugin(), None, f"COURSE_DEVICE={value!r}: the device is at 1")


# --- logits processor -----------------------------------------------------------------------------


def update_of(line):
    """A recorded change of the batch, as vLLM hands it over; None where there was none."""
    if line is None:
        return None
    return SimpleNamespace(
        removed=line["removed"],
        added=[(row, SimpleNamespace(extra_args=args), None, []) for row, args in line["added"]],
        moved=[(a, b, SimpleNamespace(name=how)) for a, b, how in line["moved"]],
    )


def masked(processor, size):
    """[row, token] of what `apply` forbids in a batch."""
    logits = np.zeros((size, 257))
    out = processor.apply(logits)
    return [[int(r), int(t)] for r, t in np.argwhere(np.isneginf(out))]


def walk(lab, lines):
    """The first step whose rows are not those that vLLM's own bookkeeping means."""
    processor = lab.make_logits_processor(Base)(None, "cpu", False)
    for number, line in enumerate(lines):
        processor.update_state(update_of(line["update"]))
        got = masked(processor, max([line["size"], *(row + 1 for row, _ in line["rows"])]))
        if got != line["rows"]:
            return f"step {number}, update {line['update']}: expected {line['rows']}, came {got}"
    return ""


def test_a_letter_is_kept_out_of_its_own_row(lab):
    """The whole batch without it; a token that is taken for a row."""
    processor = lab.make_logits_processor(Base)(None, "cpu", False)
    added = [[0, None], [1, {"without": 101}], [2, {}], [3, {"without": 7}]]
    processor.update_state(update_of({"removed": [], "added": added, "moved": []}))
    same(masked(processor, 4), [[1, 101], [3, 7]], "[row, token] of what is forbidden")
    processor.update_state(None)
    same(masked(processor, 4), [[1, 101], [3, 7]], "the same after a step without a change")
    same(processor.is_argmax_invariant(), False, "whether a greedy token is what it was")
    added = [[3, {"without": 7}], [11, {"without": 8}], [200, {"without": 9}]]
    processor.update_state(update_of({"removed": [1], "added": added, "moved": []}))
    same(masked(processor, 256), [[3, 7], [11, 8], [200, 9]], "in a batch of 256 rows")


def test_rows_move(lab):
    """A mask that stays in the row when its request has left it; the two halves of a swap."""
    processor = lab.make_logits_processor(Base)(None, "cpu", False)
    start = [[0, None], [1, {"without": 5}], [2, None], [3, {"without": 9}]]
    four, one = [[3, {"without": 4}]], [[0, {"without": 1}]]
    for update, want in (
        ({"removed": [], "added": start, "moved": []}, [[1, 5], [3, 9]]),
        ({"removed": [1], "added": [], "moved": [[3, 1, "UNIDIRECTIONAL"]]}, [[1, 9]]),
        ({"removed": [], "added": four, "moved": [[1, 0, "SWAP"]]}, [[0, 9], [3, 4]]),
        ({"removed": [], "added": [[3, None]], "moved": [[0, 2, "SWAP"]]}, [[2, 9]]),
        ({"removed": [], "added": one, "moved": [[0, 2, "SWAP"]]}, [[0, 9], [2, 1]]),
    ):  # fmt: skip
        processor.update_state(update_of(update))
        same(masked(processor, 4), want, f"[row, token] after {update}")


def test_the_real_engines_batch(lab):
    """Every change of a real server's batch."""
    lines = [n for n in recorded()["served"]["notes"] if n["what"] == "rows"]
    assert any(n["update"] and n["update"]["moved"] for n in lines), "expected rows that move"
    difference = walk(lab, lines)
    assert not difference, f"expected the rows that vLLM means\ncame a difference: {difference}"


def test_vllms_own_bookkeeping(lab):
    """Twelve random batches, by `process_dict_updates`."""
    for number, lines in enumerate(recorded()["booked"]):
        difference = walk(lab, lines)
        assert not difference, f"expected what vLLM means in batch {number}\ncame {difference}"


# --- stat logger ----------------------------------------------------------------------------------


def test_the_logger_writes_what_there_is(lab, tmp_path, monkeypatch):
    """An attribute of None; a line that is lost."""
    monkeypatch.setenv("COURSE_NOTES", str(tmp_path))
    logger = lab.make_stat_logger(Base)(None, 0)
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.5)
    iteration = SimpleNamespace(num_generation_tokens=7, finished_requests=["a", "b"])
    logger.record(scheduler, iteration)
    logger.record(None, iteration, mm_cache_stats=None, engine_idx=0)
    logger.record(scheduler, None)
    logger.record(None, None)
    logger.log_engine_initialized()
    got = [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()]
    first = {"running": 3, "waiting": 1, "usage": 0.5}
    second = {"generated": 7, "finished": 2}
    same(got, [first | second, second, first, {}], "the lines of four steps")


def test_the_logger_never_raises_into_the_engine(lab, tmp_path, monkeypatch):
    """A full disk that ends the server; lines in whatever folder it was started."""
    monkeypatch.setenv("COURSE_NOTES", str(tmp_path / "nowhere"))
    scheduler = SimpleNamespace(num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.5)
    try:
        lab.make_stat_logger(Base)(None, 0).record(scheduler, None)
    except Exception as error:
        raise AssertionError(f"expected nothing to be raised\ncame     {error!r}") from None
    assert not (tmp_path / "nowhere").exists(), "expected no folder to be made: the user names it"
    monkeypatch.chdir(tmp_path)
    for value in (None, ""):
        if value is None:
            monkeypatch.delenv("COURSE_NOTES")
        else:
            monkeypatch.setenv("COURSE_NOTES", value)
        lab.make_stat_logger(Base)(None, 0).record(scheduler, None)
        came = [path.name for path in tmp_path.iterdir()]
        same(came, [], f"files in the server's own folder, COURSE_NOTES={value!r}")


# --- io processor ---------------------------------------------------------------------------------


def io_processor(lab):
    return lab.make_io_processor(Base, lambda **given: given)()


def test_texts_become_cosines(lab):
    """Vectors that are not normalised; an order that is lost."""
    processor = io_processor(lab)
    texts = processor.parse_data({"texts": ["a", "b", "c"]})
    same(processor.pre_process(texts), ["a", "b", "c"], "the prompts")
    same(processor.merge_pooling_params(), {"task": "embed"}, "what is asked of the model")
    vectors = ([3.0, 4.0], [8.0, -6.0], [0.5, 0.0])
    outputs = [SimpleNamespace(outputs=SimpleNamespace(data=np.array(v))) for v in vectors]
    got = processor.post_process(outputs)
    want = [[1.0, 0.0, 0.6], [0.0, 1.0, 0.8], [0.6, 0.8, 1.0]]
    assert np.allclose(got, want, atol=1e-12), (
        f"cosines of {vectors}\nexpected {want}\ncame     {got}"
    )
    same(type(got[0][0]), float, "of JSON types: a plain float")


@pytest.mark.parametrize(
    "data",
    [None, "text", {}, {"texts": "ab"}, {"texts": ["one"]}, ["a", "b"], {"texts": [1, None]},
     {"texts": ["a", "b", 3]}],
)  # fmt: skip
def test_a_request_that_is_none(lab, data):
    """A string whose letters are taken for texts; numbers that are taken for them."""
    refused(lambda: io_processor(lab).parse_data(data), f"data={data!r}")


# --- resolver -------------------------------------------------------------------------------------


def test_an_adapter_is_found_by_its_name(lab, tmp_path):
    """A name that leads out of the folder, or by a way of its own into it; no adapter there."""
    for name in ("inside/shout", "inside/deep/er", "inside/empty", "outside", "inside-evil"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("inside/deep/er", "outside", "inside-evil"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    made = lab.make_resolver(Base, lambda *given: given)(str(tmp_path / "inside"))
    (tmp_path / "inside" / "shout" / "adapter_config.json").write_text("{}")  # it came later

    def find(name):
        try:
            made.resolve_lora("base", name).send(None)
        except StopIteration as done:
            return done.value
        raise AssertionError("expected an answer from the folder, came an await of something else")

    name, number, path = find("shout")
    same((name, path), ("shout", str(tmp_path / "inside" / "shout")), "the request for shout")
    assert isinstance(number, int) and number > 0, f"expected a number above 0, came {number!r}"
    outside = ("../outside", "../inside-evil", "../inside/shout", str(tmp_path / "outside"))
    ways = ("./shout", "shout/", "shout/.", "empty/../shout", str(tmp_path / "inside" / "shout"))
    below = ("deep/er", "deep", "er", "shout/adapter_config.json")
    for name in (
        "empty", "nothing", "", ".", "*", *outside, *ways, *below, "shout\0", "x" * 300,
    ):  # fmt: skip
        try:
            came = find(name)
        except (OSError, ValueError) as error:
            raise AssertionError(
                f"a name from a client: expected None for {name!r}\ncame     {error!r}"
            ) from None
        same(came, None, f"an adapter of the name {name!r}")


# --- an operator ----------------------------------------------------------------------------------


def test_the_operator_is_rms_norm(lab):
    """A mean of all axes; an epsilon outside of the root."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3, 5, 8)), rng.normal(size=8)
    want = weight * x / np.sqrt(np.square(x).mean(-1)[..., None] + 0.1)
    gap = float(np.abs(lab.rms_norm(x, weight, 0.1) - want).max())
    assert gap < 1e-12, (
        f"weight * x / sqrt(mean(x^2) + 0.1)\nexpected a gap below 1e-12, came {gap}"
    )
    same(lab.supports_args(x, weight, 0.1), True, "a weight, the whole axis")
    same(lab.supports_args(x, None, 0.1), False, "no weight")
    same(lab.supports_args(x, weight, 0.1, 4), False, "a part of the axis")


def test_which_implementation_serves(lab, record_property):
    """Every order and kind of two providers, as vLLM IR itself answered."""
    for case in recorded()["dispatched"]:
        impls = {name: tuple(kind) for name, kind in case["impls"].items()}
        kept, serves = lab.chosen(case["priority"], impls)
        same((kept, serves), (case["kept"], case["serves"]), f"{case['priority']} of {impls}")
    native = (True, None)
    record_property("measured.serves", lab.chosen(["a", "b", "native"], {
        "a": (False, None), "b": (True, False), "native": native})[1])  # fmt: skip
    refused(lambda: lab.chosen(["c"], {"native": native}), "a provider that is not registered")


# --- in the real engine ---------------------------------------------------------------------------


def test_what_the_real_engine_did(lab, record_property):
    """What the page says of the recording."""
    served, cosines = recorded()["served"], recorded()["embedded"]["cosines"]
    asked = [("vllm_xargs" in b, t) for b, t in zip(served["bodies"], served["texts"], strict=True)]
    same([t for wants, t in asked if wants and "e" in t], [], "texts that hold a forbidden e")
    assert any("e" in t for wants, t in asked if not wants), "expected an e where none is forbidden"
    tokens = sum(len(t.encode()) for _, t in asked) + len(served["adapted"]["shout"]["text"])
    same(sum(s.get("generated", 0) for s in served["stats"]), tokens, "tokens that were logged")
    same(served["adapted"]["nothing"], {"status": 404}, "an adapter that is not there")
    assert served["adapted"]["shout"]["text"].isupper(), "expected shout to shout"
    cache = SimpleNamespace(block_size=None, user_specified_block_size=False)
    lab.make_platform(Cpu).check_and_update_config(SimpleNamespace(cache_config=cache))
    same(cache.block_size, served["block_size"], "the platform's block size, in the metrics")
    calls = [n for n in served["notes"] if n["what"] == "rms_norm"]
    impls = {"course": (True, True), "native": (True, None)}
    kept, serves = lab.chosen(["course", "native"], impls)
    same({tuple(n["kept"]) for n in calls}, {tuple(kept)}, "the operator's order in the server")
    same(serves, "course", "who serves a layer's norm, which has a weight")
    assert max(n["calls"] for n in calls) >= 50, "expected calls of the operator by the model"
    gap = abs(np.array(cosines) - np.array(cosines).T).max()
    assert gap < 1e-6 and np.allclose(np.diag(cosines), 1), f"expected cosines, came {cosines}"
    record_property("measured.block_size", served["block_size"])


@pytest.mark.engine
def test_the_real_engine_loads_them(lab, tmp_path):
    """All of them, of this file, in a server and an engine that are started now."""
    found = environment.look(environment.folder(ROOT))
    assert found is not None, "course engine install"
    out = tmp_path / "plugins.jsonl.gz"
    done = subprocess.run(
        [str(found.python), "-m", "conformance.plugins", str(out), lab.__file__],
        cwd=ROOT, env=environment.variables(found, ROOT), timeout=900, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-30:])
    with gzip.open(out, "rt") as file:
        now = json.loads(file.read())
    for name in ("texts", "adapted", "block_size"):
        same(now["served"][name], recorded()["served"][name], f"{name}, as recorded")
    same(now["embedded"]["refused"], recorded()["embedded"]["refused"], "what is refused")
    same(now["dispatched"], recorded()["dispatched"], "vLLM IR's choices")
    gap = abs(np.array(now["embedded"]["cosines"]) - recorded()["embedded"]["cosines"]).max()
    assert gap < 1e-4, f"cosines, float32\nexpected the recorded ones to 1e-4, came a gap of {gap}"
