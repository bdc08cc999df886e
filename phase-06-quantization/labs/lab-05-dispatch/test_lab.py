"""What lab 06-05 pins: one name, one answer per layer, one kernel, and the order of the steps."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from mini_vllm.batch import ForwardBatch
from mini_vllm.models import transformer
from mini_vllm.models.loader import load_checkpoint

HERE = Path(__file__).parent
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
QKV = "model.layers.3.self_attn.qkv_proj"


def request(lab, **changes):
    """A 4-bit GPTQ layer of 4,096 by 4,096 in groups of 128, with changes."""
    usual = {
        "weight_type": "uint4b8",
        "act_type": "float16",
        "group_size": 128,
        "zero_points": False,
        "in_features": 4096,
        "out_features": 4096,
        "full_in_features": 4096,
        "act_order": False,
    }
    return lab.Request(**{**usual, **changes})


def refused(function, *arguments, **named):
    """What a call is refused with; fails when it is not."""
    with pytest.raises(ValueError) as error:
        function(*arguments, **named)
    return str(error.value)


# --- one name for the model -----------------------------------------------------------------------


def test_the_checkpoint_names_the_method(lab):
    cases = (
        (None, None, None, "nothing asked for, nothing stored"),
        (None, "fp8", "fp8", "no config in the checkpoint: the user decides"),
        ({"quant_method": "fp8"}, None, "fp8", "the checkpoint decides"),
        ({"quant_method": "fp8"}, "fp8", "fp8", "both say the same"),
        ({"quant_method": ""}, None, None, "an empty name is none"),
        (AWQ, "awq", "awq", "the user insists on the plain kernels, and no override speaks up"),
        ({**AWQ, "group_size": 48}, None, "awq", "Marlin has no groups of 48: no override"),
    )
    for config, user, expected, why in cases:
        got = lab.resolve_method(config, user)
        assert got == expected, (
            f"checkpoint {config}, quantization={user!r}: {why}.\nexpected {expected!r}\n"
            f"came     {got!r}"
        )


def test_an_override_renames_both_sides(lab):
    cases = (
        (AWQ, None, "awq_marlin"),
        (AWQ, "awq_marlin", "awq_marlin"),
        (AWQ, "marlin", "awq_marlin"),
        (GPTQ, None, "auto_gptq"),
        (GPTQ, "gptq", "auto_gptq"),
    )
    for config, user, expected in cases:
        got = lab.resolve_method(config, user)
        assert got == expected, (
            f"an {config['quant_method']} checkpoint, quantization={user!r}: an override names "
            "another method for the same file, and from then on the checkpoint and the user are "
            f"taken to mean that one.\nexpected {expected!r}\ncame     {got!r}"
        )


def test_the_first_override_wins(lab):
    asked = []

    def says(answer):
        def override(config, user):
            asked.append(answer)
            return answer

        return override

    overrides = [says(None), says("fp8"), says("awq"), says("gptq")]
    got = lab.resolve_method(AWQ, "int8_online", overrides)
    assert got == "fp8" and asked == [None, "fp8"], (
        "overrides are asked in order until one speaks up: None passes, 'fp8' decides, and the two "
        f"after it are not asked.\nexpected 'fp8' after [None, 'fp8']\ncame     {got!r} after "
        f"{asked}"
    )


def test_a_contradiction_is_an_error(lab):
    said = refused(lab.resolve_method, AWQ, "fp8")
    assert "awq" in said and "fp8" in said, (
        f"the checkpoint is awq, the user wants fp8: an error with both names; came {said!r}"
    )
    said = refused(lab.resolve_method, {"quant_method": ""}, "fp8")
    assert "fp8" in said, (
        "the checkpoint has a config, and it says none; the user wants fp8: a contradiction like "
        f"any other; came {said!r}"
    )
    for config, user in ((None, "int3"), ({"quant_method": "int3"}, None)):
        said = refused(lab.resolve_method, config, user)
        assert "int3" in said, f"int3 is not among KNOWN: an error with its name; came {said!r}"


# --- which layers ---------------------------------------------------------------------------------


def test_ignored_by_full_name(lab):
    ignored = ["model.layers.1.mlp.down_proj", "lm_head", "model.layers.2", "up_proj"]
    cases = {
        "model.layers.1.mlp.down_proj": True,
        "model.layers.11.mlp.down_proj": False,
        "model.layers.2.mlp.down_proj": False,
        "lm_head": True,
        "down_proj": False,
        "model.layers.5.mlp.up_proj": False,
    }
    for prefix, expected in cases.items():
        got = lab.is_layer_skipped(prefix, ignored)
        assert got is expected, (
            f"ignore list {ignored}: {prefix} {'is in it' if expected else 'is not in it'}. Names "
            f"are compared whole.\nexpected {expected}\ncame     {got}"
        )


def test_ignored_by_part_of_the_name(lab):
    cases = {
        "model.layers.1.mlp.down_proj": True,
        "model.layers.11.mlp.down_proj": True,
        "model.layers.2.mlp.down_proj": False,
    }
    for prefix, expected in cases.items():
        got = lab.is_layer_skipped(prefix, ["layers.1"], substring=True)
        assert got is expected, (
            "AWQ's rule: an entry counts wherever it occurs, so layers.1 has layers.11, too.\n"
            f"expected {expected} for {prefix}\ncame     {got}"
        )


def test_a_fused_layer_is_judged_by_its_parts(lab):
    parts = [f"model.layers.3.self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj")]
    cases = (
        (parts, True, "all three parts are listed"),
        ([], False, "none is"),
        ([QKV], False, "the file knows no qkv_proj, so that name means nothing"),
        ([part.replace("3", "4") for part in parts], False, "another layer's parts are"),
    )
    for ignored, expected, why in cases:
        got = lab.is_layer_skipped(QKV, ignored)
        assert got is expected, (
            f"{QKV}, ignore list {ignored}: {why}.\nexpected {expected}\ncame     {got}"
        )
    got = lab.is_layer_skipped("qkv_proj", ["q_proj", "k_proj", "v_proj"])
    assert got is True, f"a prefix without a dot has parts without one; came {got}"
    got = lab.is_layer_skipped(QKV, ["qkv_proj"], substring=True)
    assert got is False, (
        f"by substring, too, it is the parts that are searched, and none has qkv_proj in its name."
        f"\nexpected False\ncame     {got}"
    )


def test_the_model_says_what_is_fused(lab):
    whole = {"qkv_proj": ["qkv_proj"]}  # Phi-3: stored as one matrix, and listed under that name
    other = {"wqkv": ["wq", "wk", "wv"]}
    for prefix, ignored, fused, expected in (
        ("a.qkv_proj", ["a.qkv_proj"], whole, True),
        ("a.wqkv", ["a.wq", "a.wk", "a.wv"], other, True),
        ("a.wqkv", ["a.wqkv"], other, False),
        ("a.qkv_proj", ["a.q_proj"], other, False),
    ):
        got = lab.is_layer_skipped(prefix, ignored, fused)
        assert got is expected, (
            f"{prefix}, ignore list {ignored}, fused {fused}: each model class brings its own map, "
            f"and FUSED is only the default.\nexpected {expected}\ncame     {got}"
        )


def test_parts_that_disagree_are_an_error(lab):
    for some in (["q_proj"], ["v_proj"], ["k_proj", "v_proj"]):
        ignored = [f"model.layers.3.self_attn.{part}" for part in some]
        said = refused(lab.is_layer_skipped, QKV, ignored)
        assert QKV in said, (
            f"{some} in 16 bits and the rest quantized cannot be one matrix: an error that names "
            f"{QKV}; came {said!r}"
        )
    said = refused(lab.is_layer_skipped, QKV, ["q_proj"], substring=True)
    assert QKV in said, f"the same by substring; came {said!r}"


@pytest.mark.upstream
def test_the_real_skip_rule_agrees(lab):
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    rng = random.Random(1)
    leaves = ["q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "gate_up_proj", "gate_proj",
              "up_proj", "down_proj"]  # fmt: skip
    names = [f"model.layers.{i}.mlp.{leaf}" for i in (1, 11) for leaf in leaves]
    entries = [*names, "layers.1.", "layers.1", "proj", "up_proj", "q_proj"]
    for _ in range(2000):
        prefix, substring = rng.choice(names), rng.random() < 0.5
        ignored = rng.sample(entries, rng.choice((0, 1, 1, 2, 3, 8)))
        found = []
        for function, named in (
            (is_layer_skipped, {"skip_with_substr": substring}),
            (lab.is_layer_skipped, {"substring": substring}),
        ):
            try:
                found.append(function(prefix, ignored, lab.FUSED, **named))
            except ValueError:
                found.append("an error")
        assert found[0] == found[1], (
            f"{prefix}, ignored {ignored}, substring {substring}: the pinned tree says {found[0]}, "
            f"you say {found[1]}"
        )


# --- which kernel ---------------------------------------------------------------------------------


def test_the_first_kernel_that_can(lab):
    cases = (
        ({}, 90, "MacheteLinearKernel", "Hopper: the first that does not object"),
        ({}, 80, "MarlinLinearKernel", "Machete is for 9.0; AllSpark wants 8 bits"),
        ({}, 100, "MarlinLinearKernel", "Machete is for 9.0 and not for more"),
        ({"group_size": 32}, 90, "MarlinLinearKernel", "Machete has no groups of 32"),
        ({"weight_type": "uint8b128", "group_size": -1}, 86, "AllSparkLinearKernel", "Ampere"),
        ({"out_features": 4104}, 90, "ExllamaLinearKernel", "4,104 is no multiple of 64"),
    )
    for changes, capability, expected, why in cases:
        got = lab.choose_kernel(request(lab, **changes), capability)
        name = getattr(got, "name", got)
        assert name == expected, (
            f"capability {capability}, {changes or 'GPTQ, groups of 128'}: {why}.\n"
            f"expected {expected}\ncame     {name}"
        )


def test_every_refusal_is_listed_in_order(lab):
    said = refused(
        lab.choose_kernel,
        request(lab, act_type="bfloat16", out_features=4104),
        80,
        disabled=["AllSparkLinearKernel"],
    )
    positions = [said.find(kernel.name) for kernel in lab.KERNELS]
    assert -1 not in positions and positions == sorted(positions), (
        "nothing fits bfloat16 with 4,104 outputs: the error has a line for each kernel, in the "
        f"order of the list.\ncame {said!r}"
    )
    lines = said.splitlines()
    too_new = [lab.Kernel("off", "x", 100, lambda r, c: "objection")]
    first = refused(lab.choose_kernel, request(lab), 80, too_new, disabled=["off"])
    assert "disabled" in first and "100" not in first, (
        "a kernel that is disabled and wants capability 100 was turned down for the first of the "
        f"two: the word disabled, and no capability.\ncame {first!r}"
    )
    old = [lab.Kernel("old", "x", 70, lambda r, c: ""), lab.Kernel("new", "x", 75, lambda r, c: "")]
    for capability, wanted in ((75, "new"), (74, "old")):
        got = lab.choose_kernel(request(lab), capability, old[::-1])
        assert getattr(got, "name", got) == wanted, (
            f"capability {capability}, kernels that need 75 and 70: expected {wanted}, came {got}"
        )
    got = lab.choose_kernel(request(lab), 90, backend="marlin", disabled=["marlin"])
    assert getattr(got, "name", got) == "MarlinLinearKernel", (
        f"disabled holds kernels' names, and marlin is a backend's: expected Marlin, came {got}"
    )
    expected = {
        "MacheteLinearKernel": "90",
        "AllSparkLinearKernel": "disabled",
        "MarlinLinearKernel": "multiple of 64",
        "ExllamaLinearKernel": "float16",
    }
    for name, words in expected.items():
        line = next(line for line in lines if name in line)
        assert words in line, f"{name} was turned down because of {words!r}; came {line!r}"


def test_an_objection_is_asked_for_last(lab):
    asked = []

    def kernel(name, capability, reason):
        def objection(request, device):
            asked.append(name)
            return reason

        return lab.Kernel(name, "x", capability, objection)

    kernels = [
        kernel("off", 10, ""),
        kernel("too new", 90, ""),
        kernel("cannot", 80, "no"),
        kernel("can", 80, ""),
        kernel("can too", 80, ""),
    ]
    got = lab.choose_kernel(request(lab), 80, kernels, disabled=["off"])
    assert getattr(got, "name", got) == "can" and asked == ["cannot", "can"], (
        "a disabled kernel and one that needs another device are not asked at all (their code may "
        "not even load here); after the first that can, nobody is.\nexpected 'can' after "
        f"['cannot', 'can']\ncame     {got} after {asked}"
    )


def test_a_backend_narrows_the_list(lab):
    got = lab.choose_kernel(request(lab), 90, backend="marlin")
    assert getattr(got, "name", got) == "MarlinLinearKernel", (
        f"--linear-backend marlin on Hopper: Machete is not considered; came {got}"
    )
    said = refused(lab.choose_kernel, request(lab), 90, backend="triton")
    assert "triton" in said, f"no such kernel for these layers: name the backend; came {said!r}"
    said = refused(lab.choose_kernel, request(lab), 80, backend="machete")
    assert "MacheteLinearKernel" in said and "Marlin" not in said, (
        f"machete on capability 80: its own refusal and no other, since no other was asked; {said}"
    )


def test_the_choices_of_the_real_list(lab):
    recorded = json.loads((HERE / "recorded.json").read_text(encoding="utf-8"))
    for row in recorded["cases"]:
        case = dict(zip(recorded["keys"], row, strict=True))
        shown, expected = dict(case), case.pop("chosen")
        capability, backend = case.pop("capability"), case.pop("backend")
        disabled = case.pop("disabled")
        try:
            got = lab.choose_kernel(
                lab.Request(**case), capability, disabled=disabled, backend=backend
            )
            name = getattr(got, "name", got)
        except ValueError:
            name = None
        assert name == expected, (
            f"{shown}\nrecorded from vLLM 0.22.1 (None is an error): {expected}\ncame: {name}"
        )


# --- methods and layers ---------------------------------------------------------------------------


def test_a_config_answers_for_every_layer(lab):
    made = []

    class Method(lab.QuantMethod):
        def __init__(self):
            made.append(self)

        def create_weights(self, layer):
            layer.weight = np.zeros((layer.out_features, layer.in_features))

    config = lab.QuantConfig(Method, ignored=["a.o_proj"])
    layers = [lab.Linear(4, 4, config, prefix) for prefix in ("a.o_proj", "b.o_proj", "c.o_proj")]
    kinds = [type(getattr(layer, "quant_method", None)).__name__ for layer in layers]
    assert kinds == ["UnquantizedMethod", "Method", "Method"], (
        f"a.o_proj is on the ignore list, the others get the config's method; came {kinds}"
    )
    assert len(made) == 2 and made[0] is not made[1], (
        "each layer has a method of its own, since a method may keep something about its layer; "
        f"{len(made)} were made for 2 layers"
    )
    got = config.get_quant_method(object(), "model.embed_tokens")
    assert got is None, f"an embedding is no Linear: None, whatever its name is; came {got}"
    got = config.get_quant_method(object(), "a.o_proj")
    assert got is None, (
        "no Linear, and its name is on the ignore list: None still, since UnquantizedMethod is a "
        f"linear layer's; came {got}"
    )


def test_a_layer_without_a_config_or_a_method(lab):
    layer = lab.Linear(3, 2, None, "a.o_proj")
    kind = type(getattr(layer, "quant_method", None)).__name__
    assert kind == "UnquantizedMethod", f"no config: 16 bits as ever; came {kind}"
    assert layer.weight.shape == (2, 3), (
        f"the method creates the weights, [out_features, in_features]; came {layer.weight.shape}"
    )

    asked = []

    class Curious(lab.QuantConfig):
        def get_quant_method(self, layer, prefix):
            asked.append((layer.in_features, layer.out_features, layer.prefix, layer.dtype.name))
            return lab.UnquantizedMethod()

    try:
        lab.Linear(3, 2, Curious(lab.UnquantizedMethod), "a.o_proj", "float16")
    except AttributeError as error:
        asked.append(str(error))
    assert asked == [(3, 2, "a.o_proj", "float16")], (
        "a config may look at the layer it is asked about: sizes, prefix and dtype are set.\n"
        f"expected [(3, 2, 'a.o_proj', 'float16')]\ncame     {asked}"
    )

    class Silent(lab.QuantConfig):
        def get_quant_method(self, layer, prefix):
            return None

    said = refused(lab.Linear, 3, 2, Silent(lab.UnquantizedMethod), "a.o_proj")
    assert "a.o_proj" in said, (
        f"None for a linear layer is an error that names the layer, not a fallback; came {said!r}"
    )


def test_int8_after_loading(lab):
    W = np.array([[0.5, -0.9, 0.25, 2.0], [100, -40, 25, -12.5], [0, 0, 0, 0]], np.float32)
    layer = lab.Linear(4, 3, lab.QuantConfig(lab.Int8OnlineMethod), "a.o_proj")
    assert layer.weight.dtype == np.float32 and layer.weight.shape == (3, 4), (
        "before loading the weight is in the checkpoint's type: int8 would cut it off; came "
        f"{layer.weight.dtype} {layer.weight.shape}"
    )
    with np.errstate(divide="raise", invalid="raise"):
        lab.load_weights([layer], {"a.o_proj.weight": W})
    expected = [[32, -57, 16, 127], [127, -51, 32, -16], [0, 0, 0, 0]]
    assert layer.weight.dtype == np.int8 and layer.weight.tolist() == expected, (
        "afterwards it holds int8 codes, rint(W / (max|row| / 127)): the worked example of lab "
        f"06-01.\nexpected {expected}\ncame     {layer.weight.dtype} {layer.weight.tolist()}"
    )
    scales = np.asarray(layer.weight_scale, float)
    assert np.allclose(scales, [2 / 127, 100 / 127, 1]), f"a scale per row, 1 for zeros; {scales}"
    turned = lab.Linear(4, 3, lab.QuantConfig(lab.Int8OnlineMethod), "a.o_proj", "float64")
    assert turned.weight.dtype == np.float64, (
        f"a layer of float64 is loaded into float64; came {turned.weight.dtype}"
    )
    with np.errstate(all="ignore"):
        lab.load_weights([turned], {"a.o_proj.weight": -W})
    assert turned.weight.tolist() == (-np.array(expected)).tolist(), (
        "the same with the signs turned: the largest magnitude of a row gets -127.\n"
        f"expected {(-np.array(expected)).tolist()}\ncame     {turned.weight.tolist()}"
    )
    x = np.array([[1.0, 2, 3, 4], [0, 1, 0, -1]])
    got = layer(x)
    assert got.dtype == x.dtype and np.allclose(
        got, [[7.46457, 44.88189, 0], [-2.89764, -27.55905, 0]], atol=1e-5
    ), f"x @ (codes * scale).T in the dtype of x; came {got.dtype} {got}"
    for kind in (np.float16, np.float32):
        got = layer(x.astype(kind))
        assert got.dtype == kind, (
            f"x is {np.dtype(kind)}, and the next layer expects the same; came {got.dtype}. A "
            "float32 scale widens a float16 product"
        )


def test_all_parts_are_loaded_before_any_is_processed(lab):
    seen = []

    class Watching(lab.QuantMethod):
        def create_weights(self, layer):
            layer.weight = np.full((layer.out_features, layer.in_features), np.nan)

        def process_weights_after_loading(self, layer):
            complete = [bool(np.isfinite(each.weight).all()) for each in layers]
            seen.append((layer.prefix, complete))

    config = lab.QuantConfig(Watching)
    layers = [lab.Linear(2, 5, config, "a.qkv_proj"), lab.Linear(2, 2, config, "a.o_proj")]
    sizes = {"q_proj": 3, "k_proj": 1, "v_proj": 1, "o_proj": 2}
    checkpoint = {
        f"a.{name}.weight": np.full((rows, 2), float(k))
        for k, (name, rows) in enumerate(sizes.items())
    }
    lab.load_weights(layers, checkpoint)
    assert seen == [("a.qkv_proj", [True, True]), ("a.o_proj", [True, True])], (
        "first every tensor of every layer is loaded, then each layer is processed once. A layer "
        "that is processed when its first part arrives takes its scales from a third of it.\n"
        f"came {seen}"
    )
    rows = layers[0].weight[:, 0].tolist()
    assert rows == [0, 0, 0, 1, 2], (
        f"q, k and v fill the rows of qkv_proj from the top.\nexpected [0, 0, 0, 1, 2]\n"
        f"came     {rows}"
    )
    plain = lab.Linear(2, 2, None, "a.o_proj", "float64")
    lab.load_weights(
        [plain], checkpoint := {k: v.astype(np.float32) for k, v in checkpoint.items()}
    )
    checkpoint["a.o_proj.weight"][:] = 7
    assert (plain.weight.dtype, plain.weight[0, 0]) == (np.float64, 3), (
        "a checkpoint in float32 fills the weight that the method made, in its dtype; the file's "
        f"own array is not kept.\nexpected float64, 3\ncame     {plain.weight.dtype}, "
        f"{plain.weight[0, 0]}"
    )
    del checkpoint["a.o_proj.weight"]
    seen.clear()
    said = refused(lab.load_weights, layers, checkpoint)
    assert "a.o_proj.weight" in said and not seen, (
        f"a missing tensor is named, and nothing is processed; came {said!r}, {seen}"
    )


def test_config_and_loader_use_the_map_they_are_given(lab):
    other = {"wqkv": ["wq", "wk", "wv"]}

    def refuse():
        raise AssertionError(
            "get_quant_method must hand the config's `fused` on to is_layer_skipped: with "
            f"{other} all parts of a.wqkv are ignored, and the layer needs no quantized method"
        )

    lab.Linear(2, 3, lab.QuantConfig(refuse, ["a.wq", "a.wk", "a.wv"], other), "a.wqkv")
    layer = lab.Linear(2, 3, None, "a.wqkv")
    stored = {f"a.{name}.weight": np.full((1, 2), k) for k, name in enumerate(other["wqkv"])}
    lab.load_weights([layer], stored, other)
    rows = layer.weight[:, 0].tolist()
    assert rows == [0, 1, 2], (
        f"load_weights with {other}: wq, wk and wv fill the rows of a.wqkv.\n"
        f"expected [0, 1, 2]\ncame     {rows}"
    )


# --- the whole model ------------------------------------------------------------------------------


def forward(lab, config):
    """The shipped model with the lab's layers in float64: its logits, and the layers."""
    checkpoint = load_checkpoint("byte-llama")
    layers = []

    def linear(weight, bias, name):
        if name == "lm_head":  # the head is no linear layer, and no format touches it
            return transformer.Linear(weight, bias, name)
        rows, columns = weight.shape
        layers.append(lab.Linear(columns, rows, config, name, "float64"))
        return layers[-1]

    model = transformer.Transformer(checkpoint.config, checkpoint.weights, "float64", linear=linear)
    lab.load_weights(layers, checkpoint.weights)
    tokens = np.frombuffer(b"A block table maps logical blocks", np.uint8).astype(np.int64)
    count = len(tokens)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=np.arange(count),
        slot_mapping=np.arange(count),
        query_start_loc=np.array([0, count]),
        seq_lens=np.array([count]),
        block_tables=np.arange(3)[None, :],
        logits_indices=np.arange(count),
        kv_cache=np.zeros((4, 2, 3, 16, 2, 64)),
    )
    return model.forward(batch), layers


@pytest.mark.slow
def test_the_model_never_knows(lab):
    exact, _ = forward(lab, None)
    everything = [
        f"model.layers.{i}.{part}"
        for i in range(4)
        for part in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                     "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    ]  # fmt: skip
    got, _ = forward(lab, lab.QuantConfig(lab.Int8OnlineMethod, ignored=everything))
    assert np.array_equal(got, exact), (
        "every layer ignored: the model is the unquantized one, to the last bit"
    )
    errors = {}
    for name, ignored in (("all", []), ("but down_proj", everything[6::7])):
        got, layers = forward(lab, lab.QuantConfig(lab.Int8OnlineMethod, ignored=ignored))
        errors[name] = float(np.linalg.norm(got - exact) / np.linalg.norm(exact))
        kept = sum(layer.weight.dtype != np.int8 for layer in layers)
        assert len(layers) == 16 and kept == len(ignored), (
            f"int8 {name}: {len(ignored)} of 16 layers are ignored; {kept} are not int8"
        )
    assert 0 < errors["but down_proj"] < errors["all"] < 0.05, (
        "int8 per row moves the logits of the shipped model by 0.4 %, and by less with "
        f"down_proj left alone; came {errors}"
    )
