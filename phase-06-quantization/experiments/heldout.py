"""Text that the shipped model never saw, and the bits it needs per byte of it.

The model's own held-out files were chosen by a hash of their names (`models/train.py`). Of them,
those from the Python standard library are wherever Python is, so these experiments use those
alone: docstrings, file by file, and topics of `help()`. The rest of the library was training text
and serves for calibration. No upstream counterpart.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Linear, Transformer

ROOT = Path(__file__).resolve().parents[2]


EOS = 256
CONTEXT = 512
"""Tokens per window; each window after a file's first scores its second half only."""
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
FOLDABLE = ("qkv_proj", "gate_up_proj")
"""Their input comes from a norm, whose gain can take a factor per channel."""
OUTLIERS, LOUDNESS = (17, 101), 80.0
"""What `plant` plants."""


def docstrings_of(path: Path) -> str:
    """All docstrings of a file in source order, each behind the name of its owner."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return ""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        (node.body[0].lineno, f"{getattr(node, 'name', path.stem)}\n{inspect.cleandoc(words)}")
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (words := ast.get_docstring(node, clean=False))
    ]
    return "\n\n".join(words for _, words in sorted(found))


def is_held_out(name: str) -> bool:
    """One name in 32, by its hash: the rule that chose the model's held-out files."""
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % 32 == 0


def library(held_out: bool, limit: int | None = None) -> dict[str, bytes]:
    """Files of the standard library with at least 64 characters of docstrings, by name.

    Args:
        held_out: those kept apart from training, or those trained on.
        limit: at most so many files.
    """
    found: dict[str, bytes] = {}
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder)
        name = f"stdlib/{relative.as_posix()}"
        skipped = {"site-packages", "test", "tests", "lib2to3"} & set(relative.parts)
        if skipped or is_held_out(name) != held_out:
            continue
        text = docstrings_of(path)
        if len(text) >= 64:
            found[name] = text.encode("utf-8", "replace")
        if limit is not None and len(found) == limit:
            return found
    from pydoc_data.topics import topics

    for topic, text in sorted(topics.items()):
        if is_held_out(f"stdlib/topics/{topic}") == held_out and len(text) >= 64:
            found[f"stdlib/topics/{topic}"] = text.encode("utf-8", "replace")
    return found


@functools.cache
def weights() -> tuple[object, dict[str, np.ndarray]]:
    """Config and weights of the shipped model."""
    checkpoint = load_checkpoint("byte-llama")
    return checkpoint.config, checkpoint.weights


def model(dtype: str = "float32") -> Transformer:
    """The shipped model, its layers free to be replaced."""
    config, arrays = weights()
    return Transformer(config, arrays, dtype)  # type: ignore[arg-type]


def linear_layers(transformer: Transformer) -> dict[str, tuple[object, str]]:
    """Name to (layer, attribute) of the 16 linear layers; head and embedding are not among them."""
    return {
        f"layers.{index}.{name}": (layer, name)
        for index, layer in enumerate(transformer.layers)
        for name in LINEARS
    }


def plant(model: Transformer) -> Transformer:
    """Make two input channels of each norm-fed layer 80 times louder, without changing any output.

    The norm's gain grows, the weight's columns shrink: what training does to larger models.
    """
    for layer in model.layers:
        norms = (("input_norm", "qkv_proj"), ("post_attention_norm", "gate_up_proj"))
        for norm, linear in norms:
            gain = getattr(layer, norm).copy()
            gain[list(OUTLIERS)] *= model.dtype.type(LOUDNESS)
            setattr(layer, norm, gain)
            weight = getattr(layer, linear).weight.copy()  # [in_features, out_features]
            weight[list(OUTLIERS)] /= model.dtype.type(LOUDNESS)
            getattr(layer, linear).weight = weight
    return model


def weight_of(linear: Linear) -> np.ndarray:
    """[out_features, in_features]."""
    return np.ascontiguousarray(linear.weight.T)


def logits(transformer: Transformer, tokens: np.ndarray) -> np.ndarray:
    """Logits [num_tokens, vocab_size] of every position, in one pass."""
    length = len(tokens)
    layers, kv_heads, head_dim = transformer.kv_shape
    batch = ForwardBatch(
        token_ids=tokens,
        positions=np.arange(length),
        slot_mapping=np.arange(length),
        query_start_loc=np.array([0, length]),
        seq_lens=np.array([length]),
        block_tables=np.zeros((1, 1), dtype=np.int64),
        logits_indices=np.arange(length),
        block_size=length,
        kv_cache=np.zeros((layers, 2, 1, length, kv_heads, head_dim), dtype=transformer.dtype),
    )
    return transformer.forward(batch)


def bits_of(transformer: Transformer, text: bytes) -> float:
    """Bits the model needs for `text`: -log2 p of each byte after an EOS, summed."""
    stream = np.array([EOS, *text])
    half, total = CONTEXT // 2, 0.0
    for start in range(0, len(stream) - 1, half):
        window = stream[start : start + CONTEXT + 1]
        skip = 0 if start == 0 else half
        if len(window) - 1 <= skip:
            break
        scores = logits(transformer, window[:-1])[skip:].astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        chosen = np.take_along_axis(scores, window[skip + 1 :, None], axis=1)[:, 0]
        total += float((np.log(np.exp(scores).sum(axis=1)) - chosen).sum())
    return total / float(np.log(2))


def capture(transformer: Transformer, texts: list[bytes]) -> dict[str, np.ndarray]:
    """What each linear layer is given for `texts`: name to [num_tokens, in_features]."""
    seen: dict[str, list[np.ndarray]] = {}
    layers = linear_layers(transformer)
    kept = {name: getattr(layer, attribute) for name, (layer, attribute) in layers.items()}

    def watch(name: str) -> Callable[[np.ndarray], np.ndarray]:
        def call(x: np.ndarray) -> np.ndarray:
            seen.setdefault(name, []).append(x.copy())
            result: np.ndarray = kept[name](x)
            return result

        return call

    for name, (layer, attribute) in layers.items():
        setattr(layer, attribute, watch(name))
    try:
        for text in texts:
            logits(transformer, np.array([EOS, *text[: CONTEXT - 1]]))
    finally:
        for name, (layer, attribute) in layers.items():
            setattr(layer, attribute, kept[name])
    return {name: np.concatenate(rows) for name, rows in seen.items()}
