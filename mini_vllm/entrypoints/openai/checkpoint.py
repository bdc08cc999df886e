"""What a server reads of a checkpoint besides the engine: names of tokens, defaults of sampling.

Promises: what a file holds is checked when the server starts, so a wrong value is one line there
and not every client's error. Mirrors `vllm/config/model.py:1465`
`ModelConfig.get_diff_sampling_param`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mini_vllm.models.files import MOST_TABLE_BYTES, read_json
from mini_vllm.sampling_params import CHECKPOINT_KNOBS, SamplingParams


def names_of_tokens(folder: Path) -> tuple[dict[int, str], dict[int, str]]:
    """From a checkpoint's `tokenizer.json`, if it has one: every token's name by its id, and those
    of special ones.

    Raises:
        ValueError: the file cannot be read, or holds something else; it is named.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}, {}
    raw = read_json(path, MOST_TABLE_BYTES)
    model, added = raw.get("model"), raw.get("added_tokens", [])
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        raise ValueError(f"{path}: need model.vocab, names and ids")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise ValueError(f"{path}: need a list of objects as added_tokens")
    pairs = [(token.get("content"), token.get("id")) for token in added]
    names: dict[int, str] = {}
    for name, number in [*vocab.items(), *pairs]:
        if not isinstance(name, str) or type(number) is not int or number < 0:
            raise ValueError(f"{path}: token {name!r} has id {number!r}: need a text and 0 or more")
        names[number] = name
    return names, {token["id"]: token["content"] for token in added if token.get("special")}


def generation_defaults(folder: Path) -> dict[str, Any]:
    """Sampling parameters that a checkpoint's `generation_config.json` sets, if it has one.

    Raises:
        ValueError: the file cannot be read, or a value that no request could be sampled with.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    raw = read_json(path)
    found = {name: raw[name] for name in CHECKPOINT_KNOBS if raw.get(name) is not None}
    if raw.get("max_new_tokens") is not None:
        found["max_tokens"] = raw["max_new_tokens"]
    try:
        SamplingParams(**found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return found
