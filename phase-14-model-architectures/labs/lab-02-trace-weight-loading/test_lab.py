"""What lab 14-02 pins: headers, places, counts, and the pinned loader's own verdicts."""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from labkit import same
from labkit.modules import sibling

HERE = Path(__file__).parent
damages = sibling(__file__, "damages")
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "tie_word_embeddings": False,
}  # fmt: skip
SMALL = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "tie_word_embeddings": True,
}  # fmt: skip


def outcomes():
    """What the real loader said, by damage."""
    captured = json.loads((HERE / "captured" / "cpu.json").read_text())
    lines = [line for line in captured["output"].splitlines() if line.startswith("{")]
    return {found["damage"]: found for found in map(json.loads, lines)}


# --- the file -------------------------------------------------------------------------------------


def test_worked_example(lab):
    """Rows of k counted in query heads, or offsets from the start of the parameter's shard."""
    name = "model.layers.0.self_attn.k_proj.weight"
    same(
        tuple(lab.trace(name, LLAMA_8B)),
        ("model.layers.0.self_attn.qkv_proj.weight", "k", (4096, 5120)),
        f"{name} of a Llama with 32 heads and 8 KV heads of 128 (L2)",
    )


def test_header_round_trip(lab, tmp_path):
    """A big-endian length; offsets from the file's start; `__metadata__` taken for a tensor."""
    import safetensors.numpy

    arrays = {
        "b.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a.weight": np.arange(4, dtype=np.float16),
        "empty": np.zeros((0, 5), dtype=np.float32),
    }
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(arrays, path, metadata={"format": "np"})
    header = lab.read_header(path)
    same(sorted(header), sorted(arrays), "the tensors of the file; __metadata__ is none (L1)")
    raw = path.read_bytes()
    for name, array in arrays.items():
        dtype, shape, start = header[name]
        same((dtype, shape), ({4: "F32", 2: "F16"}[array.itemsize], array.shape), name)
        found = np.frombuffer(raw[start : start + array.nbytes], array.dtype).reshape(shape)
        assert np.array_equal(found, array), (
            f"{name}: at byte {start} of the file\nexpected {array.tolist()}\ncame     "
            f"{found.tolist()}"
        )


def test_only_the_header_is_read(lab, tmp_path):
    """A checkpoint of 16 GB that is read to learn its names."""
    path = tmp_path / "large.safetensors"
    entry = {"w": {"dtype": "F32", "shape": [1 << 13, 1024], "data_offsets": [0, 32 << 20]}}
    text = json.dumps(entry).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + (32 << 20))  # a hole: no disk is used
    tracemalloc.start()
    header = lab.read_header(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    same(header, {"w": ("F32", (1 << 13, 1024), 8 + len(text))}, "a file of 32 MiB")
    assert most < 1 << 20, (
        f"a header of {len(text)} bytes before 32 MiB of tensors: {most:,} bytes were taken; "
        "expected the header's, a checkpoint may have 100 GB"
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "an empty file"),
        (b"\x05\x00\x00", "three bytes"),
        (struct.pack("<Q", 99) + b"{}", "a header longer than the file"),
        (struct.pack("<Q", 3) + b"{]}", "a header that is not JSON"),
        (struct.pack("<Q", 2) + b"[]", "a header that is a list"),
    ],
)
def test_a_broken_file_is_refused(lab, tmp_path, content, what):
    """A damaged file that looks like one without tensors."""
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        lab.read_header(path)
    assert "broken.safetensors" in str(caught.value), (
        f"{what}: the message must name the file; came {caught.value}"
    )


# --- the places -----------------------------------------------------------------------------------


def test_every_tensor_of_a_layer_has_its_place(lab):
    """gate and up exchanged; `o_proj` as wide as the hidden size only by luck."""
    at = "model.layers.3."
    for name, expected in {
        f"{at}self_attn.q_proj.weight": (f"{at}self_attn.qkv_proj.weight", "q", (0, 4096)),
        f"{at}self_attn.v_proj.weight": (f"{at}self_attn.qkv_proj.weight", "v", (5120, 6144)),
        f"{at}self_attn.v_proj.bias": (f"{at}self_attn.qkv_proj.bias", "v", (5120, 6144)),
        f"{at}mlp.gate_proj.weight": (f"{at}mlp.gate_up_proj.weight", 0, (0, 14336)),
        f"{at}mlp.up_proj.weight": (f"{at}mlp.gate_up_proj.weight", 1, (14336, 28672)),
        f"{at}mlp.down_proj.weight": (f"{at}mlp.down_proj.weight", None, (0, 4096)),
        f"{at}self_attn.o_proj.weight": (f"{at}self_attn.o_proj.weight", None, (0, 4096)),
        f"{at}input_layernorm.weight": (f"{at}input_layernorm.weight", None, (0, 4096)),
        "model.embed_tokens.weight": ("model.embed_tokens.weight", None, (0, 128256)),
        "lm_head.weight": ("lm_head.weight", None, (0, 128256)),
        f"{at}self_attn.qkv_proj.weight": (f"{at}self_attn.qkv_proj.weight", None, (0, 6144)),
    }.items():
        same(tuple(lab.trace(name, LLAMA_8B)), expected, name)


def test_the_head_size_is_the_configurations(lab):
    """Hidden size over heads, where the configuration says otherwise."""
    wide = LLAMA_8B | {"head_dim": 256}
    name = "model.layers.0.self_attn.v_proj.weight"
    rows = lab.trace(name, wide).rows
    same(tuple(rows), (10240, 12288), "32 heads and 8 KV heads of 256 in a hidden size of 4096")


def test_tensor_and_parameter_counts(lab, record_property):
    """A tied head counted; a layer's nine tensors counted as its six parameters."""
    same(tuple(lab.counts(LLAMA_8B)), (291, 195), "32 layers: 9 and 6 of each, and 3 more")
    same(tuple(lab.counts(SMALL)), (272, 182), "30 layers, tied: 9 and 6 of each, and 2 more")
    places = [lab.trace(name, damages.CONFIG) for name in damages.shapes_of(damages.CONFIG)]
    same(
        (len(places), len({place.parameter for place in places})),
        tuple(lab.counts(damages.CONFIG)),
        "the lab's own checkpoint, tensor by tensor",
    )


# --- the loader -----------------------------------------------------------------------------------

GROUPS = {
    "whole": ("nothing", "tied"),
    "missing": ("missing",),
    "too many": ("too many", "fused on disk"),
    "shapes": (" is (",),
    "configuration": ("the configuration says",),
}


@pytest.mark.parametrize("group", GROUPS)
def test_the_pinned_loader_agrees(lab, group):
    """A check that is not there, or one that you did not find."""
    recorded, differ, asked = outcomes(), [], 0
    for what, config, shapes in damages.damages():
        if not any(word in what for word in GROUPS[group]):
            continue
        asked += 1
        real, mine = recorded[what]["outcome"], lab.verdict(config, shapes)
        if mine != real:
            said = recorded[what].get("said", "")
            differ.append(f"  {what}: vLLM {real}{f' ({said})' if said else ''}; yours {mine}")
    assert asked, f"no damage of the group {group}"
    assert not differ, (
        f"{len(differ)} of {asked} checkpoints ({group}); the first ones:\n" + "\n".join(differ[:4])
    )


def test_how_much_is_let_in(lab, record_property):
    """Not a fault: it counts."""
    recorded = outcomes()
    quiet = [
        what for what, _, _ in damages.damages()
        if recorded[what]["outcome"] == "loads" and what != "nothing" and "tied" not in what
        and "fused" not in what
    ]  # fmt: skip
    same(len(recorded), len(list(damages.damages())), "each damage has its outcome in the capture")
    record_property("measured.quiet", len(quiet))
    record_property("measured.k_missing", "it loads")
    assert recorded["self_attn.k_proj of layer 0 missing"]["outcome"] == "loads", "recorded: loads"
    same(lab.verdict(damages.CONFIG, {}), "ValueError", "an empty checkpoint: the norms are missed")
