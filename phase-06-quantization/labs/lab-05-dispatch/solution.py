"""Lab 05: from a checkpoint's config to a method per layer and a kernel per method.

Four parts, from the top. The overrides, the kernels with their objections, the base class and
`UnquantizedMethod` are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

KNOWN = ("awq", "awq_marlin", "gptq", "auto_gptq", "fp8", "int8_online")
"""Names that may be asked for."""

FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
"""Layers of the engine that a checkpoint stores in parts: `packed_modules_mapping`."""

# --- 1. one name for the model --------------------------------------------------------------------

Override = Callable[[Mapping[str, object], "str | None"], "str | None"]
"""Looks at a checkpoint's config and the user's wish; another method's name, or None to pass."""


def gptq_override(config: Mapping[str, object], user: str | None) -> str | None:
    """`vllm/model_executor/layers/quantization/auto_gptq.py:217`
    `AutoGPTQConfig.override_quantization_method`."""
    wishes = (None, "gptq", "gptq_marlin", "auto_gptq", "marlin")
    return "auto_gptq" if config.get("quant_method") == "gptq" and user in wishes else None


def awq_override(config: Mapping[str, object], user: str | None) -> str | None:
    """`vllm/model_executor/layers/quantization/awq_marlin.py:250`
    `AWQMarlinConfig.override_quantization_method`."""
    fits = config.get("bits") == 4 and config.get("group_size") in (-1, 32, 64, 128)
    fits = fits and config.get("zero_point") is True and config.get("quant_method") == "awq"
    return "awq_marlin" if fits and user in (None, "marlin", "awq_marlin") else None


OVERRIDES: tuple[Override, ...] = (gptq_override, awq_override)


def resolve_method(
    config: Mapping[str, object] | None,
    user: str | None,
    overrides: Sequence[Override] = OVERRIDES,
) -> str | None:
    """The name of the method for the whole model; None for no quantization.

    1. Without a checkpoint config, it is what the user asked for.
    2. Otherwise the config's `quant_method` counts ("" is None), unless an override speaks up. The
       first that does decides, for the checkpoint and for the user's wish.
    3. A user who asked for something else than that is an error.
    4. So is a name that is not in `KNOWN`.

    Args:
        config: `quantization_config` of the checkpoint's config.json, or None.
        user: what `quantization=` says, or None.
        overrides: in order of preference.

    Raises:
        ValueError: rules 3 and 4; the message has the names.

    Source: `vllm/config/model.py:1002` `ModelConfig._verify_quantization`.
    """
    if config is not None:
        method = str(config["quant_method"]) or None
        for override in overrides:
            answer = override(config, user)
            if answer is not None:
                method = user = answer
                break
        if user is None:
            user = method
        elif user != method:
            raise ValueError(f"the checkpoint is {method!r}, quantization={user!r} was asked for")
    if user is not None and user not in KNOWN:
        raise ValueError(f"unknown quantization method {user!r}; known: {', '.join(KNOWN)}")
    return user


# --- 2. which layers ------------------------------------------------------------------------------


def is_layer_skipped(
    prefix: str,
    ignored: Sequence[str],
    fused: Mapping[str, Sequence[str]] = FUSED,
    *,
    substring: bool = False,
) -> bool:
    """Whether a layer stays in 16 bits because the checkpoint's ignore list says so.

    A name of the list must equal the prefix, or, with `substring`, occur in it. A fused layer is
    judged by its parts: for `a.qkv_proj` those are `a.q_proj`, `a.k_proj` and `a.v_proj`, and the
    fused name itself does not count. The parts must agree.

    Args:
        prefix: the layer's full name, such as `model.layers.0.self_attn.qkv_proj`.
        ignored: names from the checkpoint.
        fused: last name of a fused layer to the last names of its parts.
        substring: AWQ's rule instead of FP8's.

    Raises:
        ValueError: some parts are ignored and others are not; the message has the prefix.

    Source: `vllm/model_executor/layers/quantization/utils/quant_utils.py:464` `is_layer_skipped`,
    without its branch for experts.
    """
    parent, _, name = prefix.rpartition(".")
    parts = [f"{parent}.{part}" if parent else part for part in fused.get(name, [name])]
    if substring:
        skipped = [any(entry in part for entry in ignored) for part in parts]
    else:
        skipped = [part in ignored for part in parts]
    if any(skipped) != all(skipped):
        which = [part for part, skip in zip(parts, skipped, strict=True) if skip]
        raise ValueError(f"{prefix}: only {', '.join(which)} of its parts is ignored; all or none")
    return all(skipped)


# --- 3. which kernel ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Request:
    """What a layer with packed weights needs of a kernel. Sizes are those of one rank."""

    weight_type: str
    """uint4b8 (GPTQ, 4 bits), uint8b128 (GPTQ, 8 bits) or uint4 (AWQ, with zero-points)"""
    act_type: str
    """float16 or bfloat16"""
    group_size: int
    """-1 is one group per column"""
    zero_points: bool
    in_features: int
    out_features: int
    full_in_features: int
    """before tensor parallelism"""
    act_order: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel as its chooser sees it: a name, a backend, a least capability, and objections."""

    name: str
    backend: str
    min_capability: int
    objection: Callable[[Request, int], str]
    """(request, capability) to the reason why not, or "" """


def _machete(r: Request, capability: int) -> str:
    if capability != 90:
        return "needs capability 90, no more and no less"
    if r.act_order and r.in_features != r.full_in_features:
        return "no act order on a layer split along its inputs"
    if r.weight_type not in (("uint4", "uint8") if r.zero_points else ("uint4b8", "uint8b128")):
        return f"no weights of type {r.weight_type}"
    if r.group_size not in (-1, 64, 128):
        return f"no groups of {r.group_size}"
    fits = r.in_features % 64 == 0 and r.out_features % 128 == 0
    return "" if fits else "in_features must be a multiple of 64, out_features of 128"


def _allspark(r: Request, capability: int) -> str:
    if r.act_order or r.zero_points:
        return "neither act order nor zero-points"
    if not 80 <= capability < 90:
        return "needs capability 80 to 89"
    if r.group_size != -1 or r.weight_type != "uint8b128":
        return "8-bit weights with one group only"
    return "" if r.in_features % 16 == r.out_features % 16 == 0 else "sizes must be multiples of 16"


def _marlin(r: Request, capability: int) -> str:
    if r.weight_type not in (("uint4",) if r.zero_points else ("uint4b8", "uint8b128")):
        return f"no weights of type {r.weight_type}"
    if r.group_size not in (-1, 32, 64, 128):
        return f"no groups of {r.group_size}"
    if r.out_features % 64 or r.in_features % 128:
        return "out_features must be a multiple of 64, in_features of 128"
    whole = r.group_size >= r.full_in_features or r.in_features % r.group_size == 0
    return "" if whole else f"in_features {r.in_features} is not whole groups"


def _exllama(r: Request, capability: int) -> str:
    if r.act_order and r.in_features != r.full_in_features:
        return "no act order on a layer split along its inputs"
    if r.out_features % (4 if r.weight_type == "uint8b128" else 8):
        return "out_features must fill packed words"
    if r.act_type != "float16":
        return "float16 activations only"
    if r.weight_type not in ("uint4b8", "uint8b128"):
        return f"no weights of type {r.weight_type}"
    if r.group_size <= 0 or r.full_in_features % r.group_size:
        return f"no groups of {r.group_size} in {r.full_in_features}"
    return ""


KERNELS = (
    Kernel("CutlassW4A8LinearKernel", "cutlass", 90, lambda r, c: "FP8 activations only"),
    Kernel("MacheteLinearKernel", "machete", 90, _machete),
    Kernel("AllSparkLinearKernel", "allspark", 80, _allspark),
    Kernel("MarlinLinearKernel", "marlin", 75, _marlin),
    Kernel("ConchLinearKernel", "conch", 80, lambda r, c: "its package is not installed"),
    Kernel("ExllamaLinearKernel", "exllama", 60, _exllama),
)
"""Fastest first: `vllm/model_executor/kernels/linear/__init__.py:337` `_POSSIBLE_KERNELS`."""


def choose_kernel(
    request: Request,
    capability: int,
    kernels: Sequence[Kernel] = KERNELS,
    *,
    disabled: Sequence[str] = (),
    backend: str = "auto",
) -> Kernel:
    """The first kernel in the list that does not object.

    A kernel is turned down because it is disabled, because the device is below its
    `min_capability`, or because it objects: in this order, and only the first reason is given. Its
    `objection` is asked only once the other two are settled.

    Args:
        request: the layer.
        capability: the device, 90 for 9.0.
        kernels: in order of preference.
        disabled: names, `VLLM_DISABLED_KERNELS`.
        backend: consider only kernels of this backend, `--linear-backend`; "auto" is all.

    Raises:
        ValueError: none is left of `backend`, and the message has its name; or all were turned
            down. Then the message has a line for each, in order: the kernel's name and the reason,
            which is "disabled", the capability it needs, or its objection.

    Source: `vllm/model_executor/kernels/linear/__init__.py:618` `choose_mp_linear_kernel`.
    """
    if backend != "auto":
        kernels = [kernel for kernel in kernels if kernel.backend == backend]
        if not kernels:
            raise ValueError(f"backend={backend!r}: no kernel of that backend for this layer")
    reasons = []
    for kernel in kernels:
        if kernel.name in disabled:
            reason = "disabled"
        elif capability < kernel.min_capability:
            reason = f"needs capability {kernel.min_capability}, this device has {capability}"
        else:
            reason = kernel.objection(request, capability)
        if not reason:
            return kernel
        reasons.append(f"{kernel.name}: {reason}")
    raise ValueError("no kernel for this layer:\n" + "\n".join(reasons))


# --- 4. methods and layers ------------------------------------------------------------------------


class QuantMethod:
    """What a layer delegates to: `QuantizeMethodBase`. Tensors become attributes of the layer."""

    def create_weights(self, layer: Linear) -> None:
        """Allocate what the checkpoint will be loaded into."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Repack or quantize, once, when everything is loaded."""

    def apply(self, layer: Linear, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        raise NotImplementedError


class UnquantizedMethod(QuantMethod):
    """The weight as it is: `vllm/model_executor/layers/linear.py:182` `UnquantizedLinearMethod`."""

    def create_weights(self, layer: Linear) -> None:
        layer.weight = np.empty((layer.out_features, layer.in_features), layer.dtype)

    def apply(self, layer: Linear, x: np.ndarray) -> np.ndarray:
        return x @ layer.weight.T


class Int8OnlineMethod(QuantMethod):
    """A 16-bit checkpoint, quantized to int8 per output row after loading.

    `layer.weight` is floating point until then and int8 [out, in] afterwards, in [-127, 127];
    `layer.weight_scale` is float32 [out], 1 for a row of zeros.
    """

    def create_weights(self, layer: Linear) -> None:
        """Allocate `weight` [out_features, in_features] in `layer.dtype`, to load into."""
        layer.weight = np.empty((layer.out_features, layer.in_features), layer.dtype)

    def process_weights_after_loading(self, layer: Linear) -> None:
        """Replace `weight` by its codes and set `weight_scale`."""
        scale = (np.abs(layer.weight).max(axis=1) / 127).astype(np.float32)
        scale[scale == 0] = 1.0
        codes = np.rint(layer.weight / scale[:, None])
        layer.weight = np.clip(codes, -127, 127).astype(np.int8)
        layer.weight_scale = scale

    def apply(self, layer: Linear, x: np.ndarray) -> np.ndarray:
        """x @ codes.T, with each output times its row's scale; in the dtype of x."""
        y = x @ layer.weight.T.astype(x.dtype)
        y *= layer.weight_scale
        return y


@dataclass
class QuantConfig:
    """Chosen once for the model, asked for a method by every layer: `QuantizationConfig`."""

    make_method: Callable[[], QuantMethod]
    ignored: Sequence[str] = ()
    fused: Mapping[str, Sequence[str]] = field(default_factory=lambda: FUSED)
    substring: bool = False

    def get_quant_method(self, layer: object, prefix: str) -> QuantMethod | None:
        """The method of one layer.

        A `Linear` gets `UnquantizedMethod` if the ignore list has it, else a method of its own from
        `make_method`. Anything else, such as an embedding, gets None.

        Source: `vllm/model_executor/layers/quantization/fp8.py:176` `Fp8Config.get_quant_method`.
        """
        if not isinstance(layer, Linear):
            return None
        if is_layer_skipped(prefix, self.ignored, self.fused, substring=self.substring):
            return UnquantizedMethod()
        return self.make_method()


class Linear:
    """A linear layer that knows no format. `vllm/model_executor/layers/linear.py:231`
    `LinearBase`."""

    weight: np.ndarray
    weight_scale: np.ndarray

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: QuantConfig | None = None,
        prefix: str = "",
        dtype: np.dtype | type | str = np.float32,
    ) -> None:
        """Find the method and let it create the weights.

        Sets `in_features`, `out_features`, `prefix`, `dtype` and `quant_method`; the first four
        before anybody is asked, since methods read them.

        Without a config it is `UnquantizedMethod`. With one, the config decides, and None is an
        error: a linear layer that nobody computes would be a hole in the model.

        Raises:
            ValueError: the config has no method for this layer; the message has the prefix.
        """
        self.in_features, self.out_features = in_features, out_features
        self.prefix, self.dtype = prefix, np.dtype(dtype)
        method = UnquantizedMethod() if config is None else config.get_quant_method(self, prefix)
        if method is None:
            raise ValueError(f"{prefix}: the quantization config has no method for a linear layer")
        self.quant_method = method
        method.create_weights(self)

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """[num_tokens, in_features] to [num_tokens, out_features]."""
        return self.quant_method.apply(self, x)


def load_weights(
    layers: Sequence[Linear],
    checkpoint: Mapping[str, np.ndarray],
    fused: Mapping[str, Sequence[str]] = FUSED,
) -> None:
    """Fill every layer from a checkpoint, then let every method process its layer, once.

    A layer `a.o_proj` is stored as `a.o_proj.weight`. A fused one is stored in parts, which fill
    its rows from the top, in the order of `fused`.

    Raises:
        ValueError: a tensor is missing, named in the message, and no layer has been processed.

    Source: the post-load pass is `vllm/model_executor/model_loader/utils.py:99`
    `process_weights_after_loading`.
    """
    for layer in layers:
        parent, _, name = layer.prefix.rpartition(".")
        row = 0
        for part in fused.get(name, [name]):
            key = f"{parent}.{part}.weight" if parent else f"{part}.weight"
            if key not in checkpoint:
                raise ValueError(f"{layer.prefix}: the checkpoint lacks {key}")
            tensor = checkpoint[key]
            layer.weight[row : row + len(tensor)] = tensor
            row += len(tensor)
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
