"""A platform is asked, believed where it can be, and refused by name where it cannot."""

from __future__ import annotations

import sys

import pytest

from mini_vllm import LLM, SamplingParams, platforms
from mini_vllm.config import EngineConfig
from mini_vllm.platforms import CpuPlatform, Platform, PlatformError, check_memory, fit, resolve

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)

VENDOR = """
from mini_vllm.platforms import Platform

class Slow(Platform):
    name = "slow"
    attention_backend = "REFERENCE"
    def memory(self):
        return 1 << 30, 1 << 29
    def defaults(self):
        return {"block_size": 8}

class Unknown(Slow):
    name = "unknown"
    attention_backend = "FLASH"

class Lies(Slow):
    name = "lies"
    def memory(self):
        return 1 << 20, 1 << 30

class Boasts(Slow):
    name = "boasts"
    on_host = True
    def memory(self):
        return 1 << 60, 1 << 60

class Silent(Platform):
    name = "silent"

class Small(Slow):
    name = "small"
    def memory(self):
        return 1 << 20, 100

class Foreign:
    pass

def slow(): return "vendor_platform.Slow"
def unknown(): return "vendor_platform.Unknown"
def lies(): return "vendor_platform.Lies"
def boasts(): return "vendor_platform.Boasts"
def silent(): return "vendor_platform.Silent"
def small(): return "vendor_platform.Small"
def foreign(): return "vendor_platform.Foreign"
def missing(): return "vendor_platform.Missing"
def absent(): return None
def fails(): raise OSError("no driver")
def nonsense(): return 7
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package with these entry points: a folder on the path holds its metadata."""
    (tmp_path / "vendor_platform.py").write_text(VENDOR)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "vendor_platform", raising=False)

    def installed(package: str, **points: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {target}" for name, target in points.items()]
        (folder / "entry_points.txt").write_text("\n".join([f"[{platforms.GROUP}]", *lines]))

    yield installed
    sys.modules.pop("vendor_platform", None)


def points(*names: str) -> dict[str, str]:
    return {name: f"vendor_platform:{name}" for name in names}


def test_without_a_plugin_it_is_the_cpu():
    assert isinstance(resolve(), CpuPlatform) and isinstance(resolve("cpu"), CpuPlatform)


def test_a_plugin_goes_before_what_is_built_in(install):
    install("vendor", **points("slow", "absent"))
    assert resolve().name == "slow"
    assert isinstance(resolve("cpu"), CpuPlatform)


def test_a_plugin_without_its_hardware_is_passed_over_unless_it_was_named(install):
    install("vendor", **points("absent"))
    assert isinstance(resolve(), CpuPlatform)
    with pytest.raises(PlatformError, match=r"'absent'.*found no hardware"):
        resolve("absent")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("fails", "'fails': its plugin failed: OSError.*no driver"),
        ("missing", "'missing': vendor_platform.Missing does not load"),
        ("nonsense", "'nonsense': its plugin gave 7"),
        ("foreign", "'foreign': vendor_platform.Foreign made a Foreign: need a subclass"),
        ("nowhere", "'nowhere': vendor_platform:nowhere does not load"),
        ("unknown", "'unknown': attention_backend='FLASH': need one of PAGED, REFERENCE"),
        ("lies", r"'lies': memory\(\) gave \(1048576, 1073741824\)"),
        ("boasts", "'boasts': .* this machine has"),
        ("silent", "'silent': its class does not define memory"),
        ("small", "'small': the KV cache needs .* 100 are free"),
    ],
)
def test_the_engine_refuses_to_start_and_says_which(install, name, says):
    install("vendor", **points(name))
    with pytest.raises(PlatformError, match=says):
        LLM(platform="auto", num_blocks=16)


def test_two_at_once_and_two_of_one_name_are_refused(install):
    install("vendor", slow="vendor_platform:slow", other="vendor_platform:small")
    with pytest.raises(PlatformError, match=r"slow.*other|other.*slow"):
        resolve()
    assert resolve("other").name == "small"
    install("second", slow="vendor_platform:small")
    with pytest.raises(PlatformError, match=r"'slow': .* has the name of another platform"):
        resolve("cpu")


def test_a_plugin_called_as_a_built_in_is_refused(install):
    install("vendor", cpu="vendor_platform:slow")
    with pytest.raises(
        PlatformError, match="'cpu': vendor_platform:slow has the name of another platform"
    ):
        resolve()


def test_a_name_that_is_not_there():
    with pytest.raises(PlatformError, match="platform='cudda': need auto or one of cpu"):
        LLM(platform="cudda")


def test_defaults_move_and_what_was_asked_for_stays():
    parts, config, others = fit(CpuPlatform(), None, {"num_blocks": 20, "enable_lora": True})
    assert (config.cache.block_size, config.cache.num_blocks) == (128, 20)
    assert config.scheduler.max_num_batched_tokens == 4096 and others == {"enable_lora": True}
    assert fit(CpuPlatform(), None, {"block_size": 16})[1].cache.block_size == 16
    assert not fit(CpuPlatform(), None, {"async_scheduling": True})[1].scheduler.async_scheduling
    assert EngineConfig().cache.block_size == 16 and parts.attention is platforms.ATTENTION["PAGED"]


def test_a_default_and_a_dtype_that_are_not_the_engines():
    class Odd(CpuPlatform):
        name = "odd"
        supported_dtypes = ("float32",)

        def defaults(self):
            return {"blocksize": 3}

    class Narrow(CpuPlatform):
        name = "narrow"
        supported_dtypes = ("float32",)

    with pytest.raises(PlatformError, match=r"'odd': defaults.. sets 'blocksize'"):
        fit(Odd(), None, {})
    with pytest.raises(PlatformError, match="'narrow': dtype='float64': need one of float32"):
        fit(Narrow(), None, {"dtype": "float64"})
    with pytest.raises(ValueError, match="config and platform"):
        LLM("toy", EngineConfig(), platform="cpu")


@pytest.mark.slow
def test_a_plugin_changes_the_attention_and_no_text(install):
    """float64: the two attentions agree in every greedy token."""
    install("vendor", **points("slow"))
    prompts = ["The quick brown fox", "Once"]

    def texts(**more):
        llm = LLM(num_blocks=32, dtype="float64", **more)
        return [out.outputs[0].token_ids for out in llm.generate(prompts, PARAMS)], llm.llm_engine

    plain, _ = texts()
    for name, block_size in (("slow", 8), ("cpu", 128)):
        came, engine = texts(platform=name)
        assert came == plain and engine.config.cache.block_size == block_size
        backend = resolve(name).attention_backend
        assert engine.parts.attention is platforms.ATTENTION[backend]


def test_the_engine_reads_names_of_the_interface_alone():
    asked = set()

    class Proxy(CpuPlatform):
        def __getattribute__(self, name):
            asked.add(name)
            return super().__getattribute__(name)

    proxy = Proxy()
    fit(proxy, None, {})
    check_memory(proxy, 0)
    assert {"attention_backend", "defaults", "memory"} <= asked <= set(vars(Platform))


def test_nothing_is_resolved_unless_it_is_asked_for(monkeypatch):
    def refuse(**_):
        raise AssertionError("entry points were read")

    monkeypatch.setattr(platforms, "entry_points", refuse)
    LLM("toy")
