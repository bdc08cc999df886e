"""What lab 14-03 pins: names and rows that follow from rules, and a load that is whole."""

from __future__ import annotations

import random

import numpy as np
import pytest

from labkit import refused, same

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 12, 10, 4, 2, 3, 2
LAYER = "model.layers.{}."


def sizes():
    """Name on disk to shape, of a small Llama with biases on its attention."""
    found = {"model.embed_tokens.weight": (7, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        at = LAYER.format(number)
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            found[f"{at}self_attn.{name}_proj.weight"] = (rows * HEAD_DIM, HIDDEN)
            found[f"{at}self_attn.{name}_proj.bias"] = (rows * HEAD_DIM,)
        found |= {
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.up_proj.weight": (INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}input_layernorm.weight": (HIDDEN,),
        }
    return found


def checkpoint(seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape) for name, shape in sizes().items()}


def parameters(dtype=np.float64):
    """What the engine keeps, full of NaN: what no tensor fills is seen."""
    fused = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    found = {"model.embed_tokens.weight": (7, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for number in range(LAYERS):
        at = LAYER.format(number)
        found |= {
            f"{at}self_attn.qkv_proj.weight": (fused, HIDDEN),
            f"{at}self_attn.qkv_proj.bias": (fused,),
            f"{at}self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"{at}mlp.gate_up_proj.weight": (2 * INNER, HIDDEN),
            f"{at}mlp.down_proj.weight": (HIDDEN, INNER),
            f"{at}input_layernorm.weight": (HIDDEN,),
        }
    return {name: np.full(shape, np.nan, dtype) for name, shape in found.items()}


def slices(lab):
    return {
        "qkv_proj": lab.qkv_slices(HEADS, KV_HEADS, HEAD_DIM),
        "gate_up_proj": {0: slice(0, INNER), 1: slice(INNER, 2 * INNER)},
    }


def named(call, name, what):
    """`call()` is refused and the message has `name`."""
    with pytest.raises(ValueError) as caught:
        call()
    assert name in str(caught.value), (
        f"{what}: the message must have {name!r}, so that somebody can look it up\n"
        f"came {caught.value}"
    )


# --- names and rows -------------------------------------------------------------------------------


def test_worked_example(lab):
    """Rows of k and v counted in query heads."""
    same(
        lab.map_weight_name("model.layers.3.self_attn.q_proj.weight"),
        ("model.layers.3.self_attn.qkv_proj.weight", "q"),
        "a tensor of the query projection",
    )
    found = lab.qkv_slices(8, 2, 16)
    same(
        {name: (rows.start, rows.stop) for name, rows in found.items()},
        {"q": (0, 128), "k": (128, 160), "v": (160, 192)},
        "8 heads of 16 and 2 KV heads: 128 rows, then 32, then 32 (M2)",
    )


def test_name_mapping(lab):
    """`up_proj` found inside `gate_up_proj`, `v_proj` inside `qkv_proj`."""
    at = "model.layers.11.mlp."
    for disk, expected in {
        f"{at}gate_proj.weight": (f"{at}gate_up_proj.weight", 0),
        f"{at}up_proj.weight": (f"{at}gate_up_proj.weight", 1),
        "model.layers.0.self_attn.k_proj.bias": ("model.layers.0.self_attn.qkv_proj.bias", "k"),
        "v_proj.weight": ("qkv_proj.weight", "v"),
    }.items():
        same(lab.map_weight_name(disk), expected, f"{disk} (M1)")


def test_unstacked_names_pass_through(lab):
    """A rewrite of what only contains a component's letters."""
    for name in (
        "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight",
        "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mamba.dt_up_proj2.weight",
        "model.q_proj_norm.weight",
    ):  # fmt: skip
        same(lab.map_weight_name(name), (name, None), f"{name}: no component of it is in the table")
    for name in sizes():
        once, _ = lab.map_weight_name(name)
        same(lab.map_weight_name(once), (once, None), f"{name} mapped twice: as once (M1)")


def test_qkv_slices_account_for_gqa(lab):
    """Gaps, overlaps, v in front of k."""
    for heads, kv_heads, dim in ((32, 8, 128), (32, 32, 128), (9, 3, 64), (1, 1, 1), (24, 2, 6)):
        found = lab.qkv_slices(heads, kv_heads, dim)
        bounds = [(found[name].start, found[name].stop) for name in ("q", "k", "v")]
        q, kv = heads * dim, kv_heads * dim
        same(
            bounds, [(0, q), (q, q + kv), (q + kv, q + 2 * kv)],
            f"{heads} heads, {kv_heads} KV heads of {dim}: q, k, v without gap or overlap (M2)",
        )  # fmt: skip
    for wrong in ((0, 1, 4), (8, 0, 4), (8, 2, 0), (8, 3, 16), (2, 8, 16), (-8, -2, 4)):
        refused(lambda wrong=wrong: lab.qkv_slices(*wrong), f"heads, KV heads, size {wrong}")


def test_fused_matmul_equals_separate_projections(lab):
    """Shards in each other's rows: the text is fluent and wrong."""
    found, store = checkpoint(1), parameters()
    lab.load_checkpoint(store, slices(lab), found.items())
    x = np.random.default_rng(2).standard_normal((5, HIDDEN))
    for number in range(LAYERS):
        at = LAYER.format(number)
        fused = (
            x @ store[f"{at}self_attn.qkv_proj.weight"].T + store[f"{at}self_attn.qkv_proj.bias"]
        )
        for name, rows in lab.qkv_slices(HEADS, KV_HEADS, HEAD_DIM).items():
            disk = f"{at}self_attn.{name}_proj."
            alone = x @ found[f"{disk}weight"].T + found[f"{disk}bias"]
            worst = np.abs(fused[:, rows] - alone).max()
            assert worst < 1e-12, (
                f"{disk}weight: its columns of the fused product differ from its own product by "
                f"{worst:.2g}; float64 leaves 1e-12"
            )


# --- a tensor fills its place ---------------------------------------------------------------------


def test_shape_mismatch_is_loud(lab):
    """numpy repeats [1, n] and [n], and clips rows past the end: three quiet ways to be wrong."""
    for shard, rows, why in (
        ((8, 3), slice(0, 4), "k of 8 rows for a place of 4: upstream cuts it"),
        ((1, 3), slice(0, 4), "one row for four: numpy repeats it"),
        ((3,), slice(0, 4), "a vector for four rows: numpy repeats it"),
        ((4, 1), slice(0, 4), "one column for three: numpy repeats it"),
        ((2, 3), slice(6, 10), "rows past the end: numpy clips them"),
        ((4, 3), slice(6, 10), "four rows for a place that is half outside"),
        ((3, 4), slice(0, 4), "a transposed tensor"),
    ):
        fused = np.full((8, 3), np.nan)
        call = lambda s=shard, r=rows, f=fused: lab.load_stacked(f, np.ones(s), r)  # noqa: E731
        named(call, str(shard), why)
        assert np.isnan(fused).all(), f"{why}: refused, so nothing may have been written (M3)"
    whole = np.full((8, 3), np.nan)
    lab.load_stacked(whole, np.ones((4, 3)), slice(2, 6))
    same(np.isnan(whole[:, 0]).tolist(), [True] * 2 + [False] * 4 + [True] * 2, "rows 2 to 6 alone")


def test_a_parameter_keeps_its_dtype(lab):
    """The array of the checkpoint put in the parameter's place."""
    store = parameters(np.float32)
    kept = dict(store)
    lab.load_checkpoint(store, slices(lab), checkpoint(3).items())
    for name, array in kept.items():
        assert store[name] is array and array.dtype == np.float32, (
            f"{name}: expected the engine's own float32 array, filled; came {store[name].dtype}"
        )


# --- a load is whole ------------------------------------------------------------------------------


def test_order_is_nothing(lab):
    """A load that counts on q, k and v coming one after the other."""
    found = list(checkpoint(4).items())
    first = parameters()
    lab.load_checkpoint(first, slices(lab), found)
    for seed in range(5):
        random.Random(seed).shuffle(found)
        store = parameters()
        lab.load_checkpoint(store, slices(lab), iter(found))
        for name, array in store.items():
            assert np.array_equal(array, first[name]), (
                f"{name}: other values than in the file's own order, shuffled with seed {seed}"
            )


def test_what_is_fused_on_disk_comes_whole(lab):
    """A fused tensor taken for one of its shards, or counted as three that are missing."""
    found, store = checkpoint(5), parameters()
    at = LAYER.format(1) + "self_attn."
    parts = [found.pop(f"{at}{name}_proj.weight") for name in "qkv"]
    found[f"{at}qkv_proj.weight"] = np.concatenate(parts)
    lab.load_checkpoint(store, slices(lab), found.items())
    assert np.array_equal(store[f"{at}qkv_proj.weight"], np.concatenate(parts)), (
        "qkv_proj.weight stands in the file as the engine keeps it: expected all its rows"
    )


DISK = LAYER.format(1) + "self_attn.k_proj.weight"
FUSED = LAYER.format(1) + "self_attn.qkv_proj.weight"


def damaged(what):
    """A checkpoint with one thing wrong, and the name that the error must have."""
    found = list(checkpoint(6).items())
    place = [name for name, _ in found].index(DISK)
    tensor = found[place][1]
    if what == "missing":
        del found[place]
        return found, FUSED
    if what == "a norm missing":
        return [each for each in found if each[0] != "model.norm.weight"], "model.norm.weight"
    if what == "twice":
        return [*found, (DISK, tensor)], DISK
    if what == "twice, once inside a fused one":
        return [*found, (FUSED, np.zeros(((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN)))], FUSED
    if what == "renamed":
        name = DISK.replace("k_proj", "kk_proj")
        return [*found[:place], (name, tensor), *found[place + 1 :]], name
    if what == "one too many":
        return [*found, ("foo.bar.weight", tensor)], "foo.bar.weight"
    if what == "a layer too many":
        name = LAYER.format(2) + "self_attn.k_proj.weight"
        return [*found, (name, tensor)], name
    if what == "k as wide as q":
        found[place] = (DISK, np.ones((HEADS * HEAD_DIM, HIDDEN)))
    if what == "k of one head":
        found[place] = (DISK, tensor[:HEAD_DIM])
    if what == "another hidden size":
        found[place] = (DISK, tensor[:, :-1])
    return found, DISK


DAMAGES = (
    "missing", "a norm missing", "twice", "twice, once inside a fused one", "renamed",
    "one too many", "a layer too many", "k as wide as q", "k of one head", "another hidden size",
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named(lab, damage):
    """A checkpoint that loads although something is wrong: upstream takes two of these ten."""
    found, name = damaged(damage)
    named(lambda: lab.load_checkpoint(parameters(), slices(lab), found), name, f"damage: {damage}")


def test_a_missing_shard_is_named_with_its_shard(lab, record_property):
    """Tracking by parameter: two thirds of a fused weight count as loaded."""
    for shard in ("q", "k", "v"):
        found = [
            e for e in checkpoint(7).items() if e[0] != DISK.replace("k_proj", f"{shard}_proj")
        ]
        with pytest.raises(ValueError) as caught:
            lab.load_checkpoint(parameters(), slices(lab), found)
        said = str(caught.value)
        assert FUSED in said and f"shard {shard}" in said, (
            f"{shard} of layer 1 is missing\nexpected a message with {FUSED} and 'shard {shard}'\n"
            f"came     {said}"
        )
    record_property("measured.rows", (HEADS + 2 * KV_HEADS) * HEAD_DIM)
