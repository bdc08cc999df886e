"""Five hundred damaged checkpoints: each is served with finite logits, or refused by file name."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.tests.test_checkpoint import CONFIG, random_weights, write_checkpoint

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
NAMES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "chat_template.jinja", "model.safetensors", "model.safetensors.index.json",
    "part-0.safetensors", "part-1.safetensors",
)  # fmt: skip
QWEN_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 4,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
}
DEEP, DIGITS = "@deep@", "@digits@"
"""Stand for what `json.dumps` cannot write; replaced in its text."""
HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 4, 100, 3_000_000, 2**31, 10**30, 10**400, 1.5, -1.5, 1e-308,
    1e308, float("nan"), float("inf"), -float("inf"), "", "abc", "1", "a\0b", "\ud800",
    "/etc/passwd", "../b.safetensors", [], {}, [[]], [None], ["a"], [-1], [1.5], {"a": 1},
    {"rope_type": "yarn"}, LLAMA3, DEEP, DIGITS,
)  # fmt: skip


def tiny_folder(folder: Path, config: dict[str, Any], dtype: Any, num_shards: int) -> Path:
    """A sound checkpoint of a few kilobytes; those of several files have every optional one."""
    raw = CONFIG | config
    write_checkpoint(folder, config, random_weights(raw, dtype))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    if num_shards > 1:
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "model.safetensors").unlink()
        weights, weight_map = random_weights(raw, dtype), {}
        for number in range(num_shards):
            part = {name: weights[name] for name in sorted(weights)[number::num_shards]}
            save_file(part, folder / f"part-{number}.safetensors")
            weight_map |= dict.fromkeys(part, f"part-{number}.safetensors")
        text = json.dumps({"metadata": {}, "weight_map": weight_map})
        (folder / "model.safetensors.index.json").write_text(text)
    return folder


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a JSON value holds values, itself excluded."""
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    nested = [(key, v) for key, v in items if isinstance(v, dict | list)]
    return [(*path, key) for key, _ in items] + [
        place for key, v in nested for place in places(v, (*path, key))
    ]


def with_hostile_value(raw: Any, chance: random.Random) -> str:
    """JSON text with one value replaced, removed, or put under another key."""
    crowd = [place for place in places(raw) if "vocab" not in place[:-1]]
    *path, key = chance.choice(crowd or places(raw))
    holder = raw
    for step in path:
        holder = holder[step]
    if chance.random() < 0.15:
        del holder[key]
    else:
        holder[key] = chance.choice(HOSTILE)
    text = json.dumps(raw)
    return text.replace(f'"{DEEP}"', "[" * 100_000).replace(f'"{DIGITS}"', "9" * 5000)


# ------------------------------------------------------------------ damage: returns what it changed


def change_json(path: Path, chance: random.Random) -> Path:
    if path.suffix == ".json":
        path.write_text(with_hostile_value(json.loads(path.read_text()), chance))
    elif path.suffix == ".safetensors":
        data = path.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = with_hostile_value(json.loads(data[8:end]), chance).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + data[end:])
    else:
        path.write_bytes(b"\xff\xfe")
    return path


def change_config(path: Path, chance: random.Random) -> Path:
    return change_json(path.parent / "config.json", chance)


def flip_bytes(path: Path, chance: random.Random) -> Path:
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 4)):
        data[chance.randrange(len(data))] = chance.randrange(256)
    path.write_bytes(data)
    return path


def cut_or_extend(path: Path, chance: random.Random) -> Path:
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))] if chance.random() < 0.7 else data + b"}")
    return path


def replace_file(path: Path, chance: random.Random) -> Path:
    path.unlink()
    kind = chance.randrange(6)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.name)
    elif kind == 2 and hasattr(os, "mkfifo"):
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to("/dev/zero")
    elif kind == 4:
        path.symlink_to(__file__)
    return path


def change_index(path: Path, chance: random.Random) -> Path:
    index = path.parent / "model.safetensors.index.json"
    if not index.exists():
        return change_json(path.parent / "config.json", chance)
    raw = json.loads(index.read_text())
    name = chance.choice(sorted(raw["weight_map"]))
    tricks = [
        "part-0.safetensors",
        "part-1.safetensors",
        "part-9.safetensors",
        "./part-0.safetensors",
    ]
    tricks += ["../outside.safetensors", str(path.parent / "part-0.safetensors"), "config.json", ""]
    raw["weight_map"][name] = chance.choice([*tricks, None, 3, [], {}])
    index.write_text(json.dumps(raw))
    return index


def change_weight(path: Path, chance: random.Random) -> Path:
    """One number of one tensor becomes NaN, infinite, huge, or just another."""
    file = chance.choice(sorted(path.parent.glob("*.safetensors")))
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    kind = "<f2" if b'"F16"' in data[:start] else "<f4"
    numbers = np.frombuffer(data, kind, offset=start)
    values = [np.nan, np.inf, -np.inf, 6e4, 3e38 if kind == "<f4" else 1.0, -1e-7]
    numbers[chance.randrange(len(numbers))] = chance.choice(values)
    file.write_bytes(data)
    return file


DAMAGE: tuple[Callable[[Path, random.Random], Path], ...] = (
    change_config, change_config, change_json, change_json, flip_bytes, cut_or_extend, replace_file,
    change_index, change_weight,
)  # fmt: skip


# ------------------------------------------------------------------ what must hold


def serve(folder: Path) -> str:
    """Load and generate; "served", or the file that a ValueError names. Anything else raises."""
    try:
        engine = LLMEngine(folder, num_blocks=8, block_size=4)
    except ValueError as refusal:
        named = [name for name in NAMES if name in str(refusal)]
        assert named, f"no file is named: {refusal}"
        assert "\n" not in str(refusal)
        assert len(str(refusal)) < 1000
        return max(named, key=len)
    model = engine.model

    class Watched:
        def forward(self, batch: Any) -> np.ndarray:
            logits = model.forward(batch)
            assert np.isfinite(logits).all()
            assert np.ptp(logits) > 0, "all logits are equal: the model computed nothing"
            return logits

    engine.model = Watched()
    params = SamplingParams(max_tokens=min(2, engine.max_model_len - 1), ignore_eos=True)
    (output,) = engine.generate([[1]], params)
    assert output.outputs[0].finish_reason == "length"
    assert len(output.outputs[0].token_ids) == params.max_tokens
    return "served"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Sound checkpoints, of one file and of two, in all dtypes, rotary kinds and with experts."""
    home = tmp_path_factory.mktemp("checkpoints")
    return [
        tiny_folder(home / "llama", {}, np.float32, 1),
        tiny_folder(home / "llama3", {"rope_scaling": LLAMA3, "head_dim": 4}, np.float16, 2),
        tiny_folder(
            home / "qwen3",
            {
                "architectures": ["Qwen3ForCausalLM"],
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
                "tie_word_embeddings": False,
            },
            np.float32,
            2,
        ),
        tiny_folder(home / "qwen3-moe", QWEN_MOE, np.float32, 2),
        tiny_folder(home / "mixtral", MIXTRAL, np.float16, 1),
    ]


def test_the_sound_checkpoints_are_served(sound):
    assert [serve(folder) for folder in sound] == ["served"] * len(sound)


@pytest.mark.slow
def test_500_damaged_checkpoints_are_served_or_refused_by_file_name(sound):
    intact = {path: path.read_bytes() for folder in sound for path in sorted(folder.iterdir())}
    ends: Counter[str] = Counter()
    for seed in range(500):
        chance = random.Random(seed)
        folder = sound[seed % len(sound)]
        path = chance.choice([path for path in intact if path.parent == folder])
        damage = DAMAGE[seed % len(DAMAGE)]
        changed = damage(path, chance)
        try:
            ends[serve(folder)] += 1
        except Exception as error:
            raise AssertionError(
                f"seed {seed}, {damage.__name__} of {changed}: {error!r}"
            ) from error
        if changed.is_dir() and not changed.is_symlink():
            changed.rmdir()
        else:
            changed.unlink(missing_ok=True)
        changed.write_bytes(intact[changed])
    assert ends["served"] > 50, ends
    assert ends.keys() == {"served", *NAMES}, ends
    assert [serve(folder) for folder in sound] == ["served"] * len(sound)


# ------------------------------------------------------------------ where files may lie


def test_a_hub_cache_of_links_to_its_blobs_loads(sound, tmp_path):
    """As huggingface_hub lays it out: `snapshots/<commit>/name` leads to `../../blobs/<hash>`."""
    blobs, snapshot = tmp_path / "m" / "blobs", tmp_path / "m" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(sound[1].iterdir())):
        shutil.copy(path, blobs / f"hash{number}")
        (snapshot / path.name).symlink_to(Path("..", "..", "blobs", f"hash{number}"))
    assert load_checkpoint(snapshot).weights.keys() == load_checkpoint(sound[1]).weights.keys()


def test_a_link_within_the_folder_and_a_link_to_the_folder_load(sound, tmp_path):
    folder = shutil.copytree(sound[0], tmp_path / "real")
    (folder / "model.safetensors").rename(folder / "weights.bin")
    (folder / "model.safetensors").symlink_to("weights.bin")
    (tmp_path / "link").symlink_to(folder)
    assert load_checkpoint(tmp_path / "link").config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_link_out_of_the_folder_is_refused(sound, tmp_path, name):
    folder = shutil.copytree(sound[0], tmp_path / "model")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"{name}: leads to .*elsewhere, outside the checkpoint"):
        load_checkpoint(folder)
