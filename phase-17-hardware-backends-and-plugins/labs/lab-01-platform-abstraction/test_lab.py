"""What lab 17-01 pins: who answers for the hardware, and that it can come from outside."""

from __future__ import annotations

import gzip
import inspect
import itertools
import json
import warnings
from pathlib import Path

import pytest

from labkit import refused, same

RECORDINGS = Path(__file__).parent / "recordings"


def read(name):
    """What the pin's own functions said."""
    with gzip.open(RECORDINGS / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def tpu(lab, **changes):
    """A platform that does not come with the engine."""
    told = {
        "name": "mytpu", "device_type": "tpu", "attention_backend": "pallas",
        "supported_dtypes": ("bfloat16", "float32"), "supports_graphs": False, **changes,
    }  # fmt: skip
    return lab.Platform(**told)


def test_worked_example(lab):
    """The first device taken, or the first platform."""
    registry = lab.make_default_platforms()
    cuda = lab.plan_startup(lab.resolve_platform(registry, ["cuda"]), "bfloat16")
    expected = {
        "platform": "cuda", "attention_backend": "flash_attn", "dtype": "bfloat16",
        "use_graphs": True,
    }  # fmt: skip
    same(cuda, expected, "what an engine decides on a machine with a GPU")
    expected = {
        "platform": "cpu", "attention_backend": "cpu_attn", "dtype": "bfloat16",
        "use_graphs": False,
    }  # fmt: skip
    for devices in ([], ["cpu"], ["fpga", "npu"]):
        cpu = lab.plan_startup(lab.resolve_platform(registry, devices), "bfloat16")
        same(cpu, expected, f"devices {devices}: the CPU is the floor")
    same([p.in_tree for p in registry.values()], [True, True], "both come with the engine")


def test_the_order_of_devices_is_nothing(lab):
    """The first of the list decides."""
    registry = lab.make_default_platforms()
    for devices in itertools.permutations(["cpu", "cuda", "fpga"]):
        same(lab.resolve_platform(registry, devices).name, "cuda", f"devices {devices}")


def test_an_override_wins_and_an_unknown_one_is_loud(lab):
    """A slip of the pen that serves on the CPU."""
    registry = lab.make_default_platforms()
    same(lab.resolve_platform(registry, ["cuda"], "cpu").name, "cpu", "the override decides")
    same(lab.resolve_platform(registry, [], "cuda").name, "cuda", "whatever the machine has")
    refused(lambda: lab.resolve_platform(registry, ["cuda"], ""), "an override that names nothing")
    with pytest.raises(ValueError) as refusal:
        lab.resolve_platform(registry, ["cuda"], "cudda")
    said = str(refusal.value)
    assert "cudda" in said and "cpu" in said and "cuda" in said, (
        f"expected the wrong name and the registered ones in the message, came {said!r}"
    )


def test_dtypes_are_negotiated(lab):
    """The first supported dtype as what is left, or a refusal, or silence."""
    cpu = lab.make_default_platforms()["cpu"]
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        same(cpu.check_dtype("float16"), "float16", "a supported one stays")
        same(len(heard), 0, "nothing to warn of")
        same(cpu.check_dtype("float8_e4m3fn"), "float32", "known, and not supported")
        same([each.category for each in heard], [UserWarning], "one warning, on the fallback")
        said = str(heard[0].message)
        assert "float8_e4m3fn" in said and "float32" in said, (
            f"expected what was asked for and what is served in the warning, came {said!r}"
        )
        same(tpu(lab).check_dtype("float16"), "float32", "this platform has no float16")
    refused(lambda: cpu.check_dtype("int3"), "a dtype that is none")


def test_a_platform_from_outside_changes_what_is_planned(lab):
    """A match by name, or a special case in the engine."""
    registry = lab.make_default_platforms()
    engine = inspect.getsource(lab.plan_startup)
    lab.register_platform(registry, tpu(lab))
    for devices in (["tpu"], ["cuda", "tpu"], ["tpu", "cuda"]):
        plan = lab.plan_startup(lab.resolve_platform(registry, devices), "bfloat16")
        same((plan["platform"], plan["attention_backend"]), ("mytpu", "pallas"), f"{devices}")
    same(lab.resolve_platform(registry, ["cuda"]).name, "cuda", "its device is not there")
    lab.register_platform(registry, tpu(lab, name="zen", device_type="cpu"))
    same(lab.resolve_platform(registry, ["cpu", "cuda"]).name, "cuda", "zen's device is a cpu")
    same(lab.resolve_platform(registry, ["cpu"]).name, "cpu", "the floor is the one called cpu")
    assert "tpu" not in engine, f"the engine names no platform; came\n{engine}"


def test_a_taken_name_is_refused(lab):
    """An entry overwritten without a word."""
    registry = lab.make_default_platforms()
    lab.register_platform(registry, tpu(lab))
    before = dict(registry)
    for name in ("cpu", "cuda", "mytpu"):
        other = tpu(lab, name=name, attention_backend="other")
        refused(lambda other=other: lab.register_platform(registry, other), f"a second {name}")
    same(registry, before, "a refused registration changes nothing")


def test_two_that_are_there_are_an_error(lab):
    """The first one wins."""
    registry = lab.make_default_platforms()
    lab.register_platform(registry, tpu(lab))
    lab.register_platform(registry, tpu(lab, name="theirs", device_type="npu"))
    with pytest.raises(RuntimeError) as refusal:
        lab.resolve_platform(registry, ["npu", "tpu", "cuda"])
    said = str(refusal.value)
    assert "mytpu" in said and "theirs" in said, (
        f"expected both names in the message, came {said!r}"
    )
    same(lab.resolve_platform(registry, ["npu", "cuda"]).name, "theirs", "one of them is there")
    lab.register_platform(registry, tpu(lab, name="rocm", device_type="gfx", in_tree=True))
    same(lab.resolve_platform(registry, ["gfx", "npu", "cuda"]).name, "theirs", "of three")
    with pytest.raises(RuntimeError) as refusal:
        lab.resolve_platform(registry, ["cuda", "gfx"])
    said = str(refusal.value)
    assert "cuda" in said and "rocm" in said, (
        f"two of the tree: expected both names in the message, came {said!r}"
    )


def test_where_the_pin_agrees(lab, record_property):
    """A built-in that goes before a plugin, or a plugin that needs no device."""
    told = {case["case"]: case for case in read("resolution")}
    assert len(told) == 11, f"expected 11 recorded cases, came {len(told)}"
    paths = {"vendor.There": "vendor", "vendor.Also": "other", "built-in.cpu": "cpu"}
    agreed = ("a CPU wheel", "a plugin on a GPU", "a plugin without its device", "two plugins")
    for name in agreed:
        case = told[name]
        registry, devices = lab.make_default_platforms(), list(case["there"])
        for package in case["packages"]:
            for point, function in package.items():
                platform = tpu(lab, name=point, device_type=f"{point}-device")
                lab.register_platform(registry, platform)
                devices += [platform.device_type] if function != "absent" else []
        try:
            came = lab.resolve_platform(registry, devices).name
        except RuntimeError:
            came = "an error"
        expected = paths[case["platform"]] if "platform" in case else "an error"
        same(came, expected, f"{name}: the pin's own functions on installed packages")
    answers = {"built-in.cpu": "the built-in", "vendor.There": "the plugin"}
    silent = told["a plugin that fails"]
    log = "without a line" if not silent["said"] else "with a line in the log"
    record_property("measured.fails", f"{answers[silent['platform']]}, {log}")
    record_property("measured.called_cpu", answers[told["a plugin called cpu"]["platform"]])
    nothing = told["a CUDA wheel without a GPU"]["platform"].rpartition(".")[2]
    record_property("measured.nothing", "the CPU" if "Cpu" in nothing else nothing)


def test_registries_are_independent(lab):
    """One dict for all."""
    lab.register_platform(lab.make_default_platforms(), tpu(lab))
    same(sorted(lab.make_default_platforms()), ["cpu", "cuda"], "a new registry each time")


def test_the_engine_asks_the_interface_alone(lab):
    """A name that only one platform has."""
    asked = set()
    inner = lab.make_default_platforms()["cuda"]

    class Proxy:
        def __getattr__(self, name):
            asked.add(name)
            return getattr(inner, name)

    plan = lab.plan_startup(Proxy(), "float16")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        served = [type(inner).check_dtype(Proxy(), dtype) for dtype in ("float16", "float8_e4m3fn")]
    known = {*lab.Platform.__dataclass_fields__, "check_dtype"}
    assert plan["dtype"] == "float16" and asked <= known, (
        f"expected names of Platform alone, came {sorted(asked - known)}, plan {plan}"
    )
    same(served, ["float16", "float32"], "check_dtype of an object that has the interface alone")


def test_auto_is_what_vllm_makes_of_it(lab):
    """float32 kept for a float32 checkpoint; float32 as what is left."""
    cases = read("auto_dtype")
    assert len(cases) == 90, f"expected 90 recorded cases, came {len(cases)}"
    for case in cases:
        platform = tpu(lab, supported_dtypes=tuple(case["supported"]))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            came = lab.resolve_auto_dtype(platform, case["dtype"], case["pooling"])
        same(
            (came, bool(heard)), (case["came"], case["warned"]),
            f"a checkpoint in {case['dtype']}, pooling {case['pooling']}, on a platform with "
            f"{case['supported']}: the pin's dtype, and whether it warns",
        )  # fmt: skip


@pytest.mark.slow
def test_the_recording_is_the_pins(lab):
    """The pin's own function on the same cases."""
    from conformance.features.engine import auto_dtype, resolution
    from conformance.real_core import why_not

    if problem := why_not():
        pytest.skip(f"course upstream fetch: {problem}")
    cases = list(auto_dtype.cases())
    for name, now in (("auto_dtype", cases), ("resolution", list(resolution.cases()))):
        same(json.loads(json.dumps(now)), read(name), f"{name}: what is kept is what the pin says")
    for case in cases:
        platform = tpu(lab, supported_dtypes=tuple(case["supported"]))
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            came = lab.resolve_auto_dtype(platform, case["dtype"], case["pooling"])
        same(came, case["came"], f"the pin says so of {case}")
