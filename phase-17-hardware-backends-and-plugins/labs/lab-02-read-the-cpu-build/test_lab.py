"""What lab 17-02 pins: a contract counted from source, a cache by hand, a real start's log."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest

from labkit import refused, same

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
INTERFACE = """
class Other:
    def memory(self): ...
class Platform:
    name: str
    kinds = ("a",)
    @property
    def dtypes(self):
        return []
    @classmethod
    def memory(cls):
        raise NotImplementedError
    def seed(self):
        def inner():
            raise NotImplementedError
        return inner
    def uuid(self):
        '''Which one.'''
        raise NotImplementedError("no uuid here")
    def check(self, config):
        if config is None:
            raise NotImplementedError
        return config
    def stop(self):
        raise ValueError("NotImplementedError")
"""
MINE = """
class Helper:
    def memory(self): ...
class Mine(Platform):
    name: str = "mine"
    kinds = ("a", "b")
    backend: str
    @property
    def dtypes(self):
        def memory(): ...
        return ["x"]
    async def seed(self):
        return 1
    def pack(self): ...
"""


@functools.cache
def captured() -> str:
    """What `course gpu run 17-02 --cpu` printed."""
    return json.loads((HERE / "captured" / "cpu.json").read_text(encoding="utf-8"))["output"]


def test_worked_example(lab, record_property):
    """K without V; query heads; a GiB of 1e9 bytes; tokens that are not whole blocks."""
    plan = lab.kv_plan(24, 2, 64, 2, 4 << 30, 1024)
    same(plan.bytes_per_token, 12_288, "24 layers, 2 KV heads of 64, 2 bytes, K and V")
    same(plan.num_blocks, 2_730, "4 GiB in blocks of 128 tokens")
    same(plan.num_tokens, 349_440, "tokens, in whole blocks")
    same(plan.concurrency, 341.25, "requests of 1,024 tokens at once")
    record_property("measured.tokens", plan.num_tokens)


@pytest.mark.parametrize(
    ("sizes", "want"),
    [
        ((32, 8, 128, 2, 10 << 30, 8192, 16), (131_072, 5_120, 81_920, 10.0)),
        ((4, 2, 64, 4, 1 << 30, 256, 128), (4_096, 2_048, 262_144, 1_024.0)),
        ((24, 2, 64, 2, 4 << 30, 1000, 128), (12_288, 2_730, 349_440, 341.25)),
        ((3, 1, 5, 2, 1_000_003, 7, 4), (60, 4_166, 16_664, 2_083.0)),
        ((2, 1, 1, 1, 33, 9, 4), (4, 2, 8, 0.67)),
    ],
)
def test_whole_blocks_and_whole_requests(lab, sizes, want):
    """A longest request in tokens instead of blocks; half a block that counts."""
    plan = lab.kv_plan(*sizes)
    got = (plan.bytes_per_token, plan.num_blocks, plan.num_tokens, plan.concurrency)
    same(got, want, f"per token, blocks, tokens, concurrency of {sizes}")


def test_sizes_that_cannot_be(lab):
    """A cache of 0 blocks that is served."""
    refused(lambda: lab.kv_plan(4, 2, 64, 2, 1000, 256), "a budget below one block")
    refused(lambda: lab.kv_plan(0, 2, 64, 2, 1 << 30, 256), "no layer")
    refused(lambda: lab.decode_ceiling(0, 2, 50e9), "no weight")
    refused(lambda: lab.decode_ceiling(1, 2, 0.0), "no bandwidth")
    refused(lambda: lab.decode_ceiling(1, 0, 50e9), "weights of no bytes")


def test_the_ceiling_of_decoding(lab, record_property):
    """Weights that are read once per layer, or bits that are taken for bytes."""
    found = lab.decode_ceiling(494_032_768, 2, 50e9)
    same(round(found, 1), 50.6, "tokens per second of 0.5 B weights in bf16 at 50 GB/s")
    same(round(lab.decode_ceiling(8_030_261_248, 0.5, 3.35e12)), 834, "8 B in 4 bits, an H100")
    record_property("measured.ceiling", round(found, 1))


def test_what_a_class_overrides(lab):
    """Nested functions counted; a property taken for an attribute; another class's methods."""
    report = lab.overrides(INTERFACE, MINE, "Platform", "Mine")
    same(report.overridden, ["dtypes", "seed"], "methods and properties that the interface has")
    same(report.new, ["pack"], "methods that it has not")
    same(
        report.attributes,
        ["name", "kinds"],
        "attributes that the class sets; `backend: str` is none",
    )
    same(report.unimplemented, ["memory", "uuid"], "those that still raise NotImplementedError")


def test_a_class_that_is_not_there(lab):
    """The first class of a source, whatever its name."""
    refused(lambda: lab.overrides(INTERFACE, MINE, "Platform", "Yours"), "no such class")
    refused(lambda: lab.overrides(MINE, MINE, "Platform", "Mine"), "no interface in the source")


def test_a_log_is_read(lab):
    """Commas; the second number of a pair; a line that is not there; one log taken for all."""
    log = (
        "DEBUG [x.py:1] Automatically detected platform cpu.\n"
        "INFO [y.py:2] Asynchronous scheduling is enabled.\n"
        "INFO [z.py:3] Explicitly set (4.0/31.2) GiB for KV cache on node 0.\n"
        "INFO [k.py:4] GPU KV cache size: 349,440 tokens\n"
        "INFO [k.py:5] Maximum concurrency for 1,024 tokens per request: 341.25x\n"
    )
    want = {"platform": "cpu", "kv_gib": 4.0, "num_tokens": 349_440, "concurrency": 341.25,
            "max_model_len": 1_024, "announced_async": True}  # fmt: skip
    same(lab.read_log(log), want, "what the log says; it names no layout")
    same(lab.read_log("nothing"), {}, "a log without any of the lines")
    log = (
        "DEBUG Automatically detected platform xpu.\n"
        "INFO Asynchronous scheduling is disabled.\n"
        "INFO Using NHD KV cache layout for FLASH_ATTN backend.\n"
        "INFO Asynchronous scheduling is enabled.\n"
    )
    want = {"platform": "xpu", "announced_async": False, "layout": "NHD"}
    same(lab.read_log(log), want, "another machine's log, whose first line says disabled")


def test_the_real_start_says_what_was_predicted(lab, record_property):
    """A prediction that was never held against a start."""
    said = lab.read_log(captured())
    config = json.loads((ROOT / "models" / "byte-llama" / "config.json").read_text())
    plan = lab.kv_plan(
        config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"], 4, 1 << 30,
        said["max_model_len"],
    )  # fmt: skip
    same(said["platform"], "cpu", "the platform of the log")
    same(said["num_tokens"], plan.num_tokens, "GPU KV cache size, float32, 1 GiB")
    same(said["concurrency"], plan.concurrency, "Maximum concurrency, x")
    same(said["layout"], "HND", "the layout of CPU_ATTN")
    final = dict(line.split(" ", 1) for line in captured().splitlines() if line.count(" "))
    same(final["async_scheduling"], "False", "the final configuration, whatever the log announced")
    assert said["announced_async"], "the log announces asynchronous scheduling: expected True"
    record_property("measured.announced", "enabled, and then it is off")


@pytest.mark.parametrize(
    ("file", "name", "counts"),
    [
        ("cpu", "CpuPlatform", (15, 3, 6, 5)), ("xpu", "XPUPlatform", (26, 4, 7, 2)),
        ("rocm", "RocmPlatform", (31, 7, 9, 0)), ("cuda", "CudaPlatformBase", (27, 7, 8, 1)),
    ],
)  # fmt: skip
def test_the_pins_platforms(lab, file, name, counts):
    """A count that holds for a small class alone."""
    from conformance.real_core import why_not
    from conformance.real_core.places import tree_of

    if problem := why_not():
        pytest.skip(f"course upstream fetch: {problem}")
    folder = tree_of("0.22.1") / "vllm" / "platforms"
    interface, source = (folder / f"{each}.py" for each in ("interface", file))
    report = lab.overrides(interface.read_text(), source.read_text(), "Platform", name)
    got = tuple(map(len, (report.overridden, report.new, report.attributes, report.unimplemented)))
    same(got, counts, f"{name}: overridden, new, attributes, unimplemented")
    if file == "cpu":
        scheduling = [each for each in report.overridden if "schedul" in each or "sampl" in each]
        same(scheduling, [], "overrides that concern the scheduler or the sampler")
