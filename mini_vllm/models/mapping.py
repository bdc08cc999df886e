"""From the tensors of a checkpoint to the parameters of a model, by a table of rules.

Promises: every row of every parameter is written exactly once, or nothing is loaded; what does not
fit is a ValueError that names the tensor, its shape and what was expected, for any rules.
Rules match whole parts of a name, so `v_proj` never matches `qkv_proj`. Mirrors
`vllm/model_executor/models/utils.py:42` `WeightsMapper` and the rows that
`vllm/model_executor/models/llama.py:436` `LlamaModel.load_weights` walks through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Prefixed:
    """Tensors begin with a prefix that parameters do not have: `Prefixed("language_model")`."""

    prefix: str
    new: str = ""


@dataclass(frozen=True, slots=True)
class Renamed:
    """One part of a name, or several that follow each other, is called otherwise."""

    tensor: str
    parameter: str


@dataclass(frozen=True, slots=True)
class Stacked:
    """Several tensors lie one below the other in one parameter, in this order."""

    parameter: str
    shards: tuple[tuple[str, int], ...]
    """Of each tensor its part of the name, and its rows."""


@dataclass(frozen=True, slots=True)
class Split:
    """One tensor holds several parameters, one below the other."""

    tensor: str
    parameters: tuple[tuple[str, int], ...]
    """Of each parameter its part of the name, and its rows."""


@dataclass(frozen=True, slots=True)
class Tied:
    """A parameter that is another one, and that a checkpoint need not hold."""

    parameter: str
    to: str


Rule = Prefixed | Renamed | Stacked | Split | Tied


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor, or some rows of it, goes."""

    parameter: str
    rows: slice | None = None
    """Of the parameter; None: all of them."""
    part: slice | None = None
    """Rows of the tensor; None: all of them."""


def places_of(name: str, rules: Sequence[Rule]) -> list[Place]:
    """Where the tensor `name` goes: the rules in their order, each once at most.

    The first `Stacked` or `Split` that matches ends the walk.
    """
    for rule in rules:
        match rule:
            case Prefixed(prefix, new):
                if name.startswith(prefix + "."):
                    name = ".".join(filter(None, (new, name[len(prefix) + 1 :])))
            case Renamed(tensor, parameter):
                name = _replace(name, tensor, parameter) or name
            case Stacked(parameter, shards):
                start = 0
                for shard, rows in shards:
                    if target := _replace(name, shard, parameter):
                        return [Place(target, slice(start, start + rows))]
                    start += rows
            case Split(tensor, parameters):
                if _replace(name, tensor, tensor):
                    found, start = [], 0
                    for parameter, rows in parameters:
                        target = _replace(name, tensor, parameter) or name
                        found.append(Place(target, None, slice(start, start + rows)))
                        start += rows
                    return found
    return [Place(name)]


def _replace(name: str, old: str, new: str) -> str | None:
    """`name` with the parts `old` replaced; None if it does not have them."""
    framed = f".{name}."
    if f".{old}." not in framed:
        return None
    return framed.replace(f".{old}.", f".{new}." if new else ".", 1)[1:-1]


@dataclass(frozen=True, slots=True)
class Entry:
    """One copy: rows of a tensor into rows of a parameter."""

    tensor: str
    place: Place
    shape: tuple[int, ...]
    """What the copied part must look like."""


def plan_of(
    tensors: Mapping[str, tuple[int, ...]],
    parameters: Mapping[str, tuple[int, ...]],
    rules: Sequence[Rule] = (),
    source: object = "checkpoint",
) -> list[Entry]:
    """All copies that fill the parameters. Tensors that no parameter has a place for are left out.

    Args:
        tensors: shape by name, of what the checkpoint holds.
        parameters: shape by name, of what the model needs.
        rules: see the classes above.
        source: what messages begin with, such as the file.

    Raises:
        ValueError: rows that nothing fills, or that two tensors fill; a tensor of another shape; a
            parameter that is tied to one of another shape; a shape that is not one.
    """
    _check_parameters(parameters)
    tied = {rule.parameter: rule.to for rule in rules if isinstance(rule, Tied)}
    filled: dict[str, list[tuple[int, int, str]]] = {name: [] for name in parameters}
    entries: list[Entry] = []
    for tensor, shape in tensors.items():
        for place in places_of(tensor, rules):
            whole = parameters.get(place.parameter)
            if whole is None:
                continue
            rows = whole[0] if whole else 1
            start, stop = (place.rows.start, place.rows.stop) if place.rows else (0, rows)
            if stop > rows:
                raise ValueError(
                    f"{source}: {tensor} goes to rows {start} to {stop} of {place.parameter}, "
                    f"which has {rows}"
                )
            need = (stop - start, *whole[1:]) if whole else ()
            _check_shape(tensor, shape, place, need, source)
            entries.append(Entry(tensor, place, need))
            filled[place.parameter].append((start, stop, tensor))
    for parameter, parts in filled.items():
        if not parts and (to := tied.get(parameter, "")) in parameters:
            is_tied = to in tied and not filled[to]
            if is_tied or parameters[to] != parameters[parameter]:
                raise ValueError(
                    f"{source}: {parameter}, {parameters[parameter]}, is tied to {to}, which "
                    + ("is tied itself" if is_tied else f"has shape {parameters[to]}")
                )
            continue
        _check_coverage(parameter, parameters[parameter], parts, rules, source)
    return entries


def _check_parameters(parameters: Mapping[str, tuple[int, ...]]) -> None:
    if not isinstance(parameters, Mapping):
        raise ValueError(f"parameters={parameters!r}: need a mapping from names to shapes")
    for name, shape in parameters.items():
        is_shape = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
        if not isinstance(name, str) or not is_shape:
            raise ValueError(f"parameters[{name!r}]={shape!r}: need a tuple of sizes")


def _check_shape(
    tensor: str, shape: tuple[int, ...], place: Place, need: tuple[int, ...], source: object
) -> None:
    part = place.part
    if part is None:
        if shape != need:
            of = f" for {place.parameter}" if place.parameter != tensor else ""
            raise ValueError(f"{source}: {tensor} has shape {shape}, need {need}{of}")
    elif not shape or part.stop > shape[0] or (part.stop - part.start, *shape[1:]) != need:
        raise ValueError(
            f"{source}: {tensor} has shape {shape}: need rows {part.start} to {part.stop} of it, "
            f"{need}, for {place.parameter}"
        )


def _check_coverage(
    parameter: str, shape: tuple[int, ...], parts: list[tuple[int, int, str]],
    rules: Sequence[Rule], source: object,
) -> None:  # fmt: skip
    """Every row once: the parts, in the order of their rows, follow each other without a gap."""
    end, last, rows = 0, "", shape[0] if shape else 1
    for start, stop, tensor in sorted(parts):
        if start < end:
            raise ValueError(
                f"{source}: rows {start} to {min(end, stop)} of {parameter} are written twice, by "
                f"{last} and {tensor}"
            )
        if start > end:
            break
        end, last = stop, tensor
    else:
        if end == rows:
            return
        start = rows
    missing = _tensor_for(parameter, end, rules)
    raise ValueError(
        f"{source}: checkpoint lacks {missing}: rows {end} to {start} of {parameter}, {shape}"
        if parts or missing != parameter
        else f"{source}: checkpoint lacks {parameter}, {shape}"
    )


def _tensor_for(parameter: str, row: int, rules: Sequence[Rule]) -> str:
    """What a checkpoint calls the tensor of this row, as far as the rules tell."""
    name = parameter
    for rule in reversed(rules):
        match rule:
            case Stacked(stacked, shards):
                start = 0
                for shard, rows in shards:
                    if start <= row < start + rows and (found := _replace(name, stacked, shard)):
                        name = found
                        break
                    start += rows
            case Split(tensor, parameters):
                for part, _ in parameters:
                    name = _replace(name, part, tensor) or name
            case Renamed(tensor, renamed):
                name = _replace(name, renamed, tensor) or name
            case Prefixed(prefix, new):
                if not new or name.startswith(new + "."):
                    name = f"{prefix}.{name[len(new) + 1 :] if new else name}"
    return name


def load_parameters(
    tensors: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    parameters: Mapping[str, tuple[int, ...]],
    rules: Sequence[Rule] = (),
    source: object = "checkpoint",
    dtype: np.dtype | type | str = np.float32,
) -> dict[str, np.ndarray]:
    """The parameters, filled. Each tensor is read once.

    Args:
        tensors: shape by name, of what the checkpoint holds.
        read: gives one of them.
        parameters: shape by name, of what the model needs.
        rules: how names and rows go from one to the other.
        source: what messages begin with.
        dtype: of the parameters.

    Raises:
        ValueError: see `plan_of`; nothing is read then. No dtype.
    """
    try:
        dtype = np.dtype(dtype)
    except TypeError:
        raise ValueError(f"dtype={dtype!r}: need a numpy dtype") from None
    entries = plan_of(tensors, parameters, rules, source)
    held: dict[str, list[Entry]] = {}
    for entry in entries:
        held.setdefault(entry.tensor, []).append(entry)
    filled = {entry.place.parameter for entry in entries}
    out = {n: np.empty(s, dtype) for n, s in parameters.items() if n in filled}
    for tensor, copies in held.items():
        array = read(tensor)
        for entry in copies:
            rows, part = entry.place.rows, entry.place.part
            out[entry.place.parameter][rows or ...] = array if part is None else array[part]
    for rule in rules:
        if isinstance(rule, Tied) and rule.parameter in parameters:
            out.setdefault(rule.parameter, out[rule.to])
    return out


def check_rules(rules: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules as a tuple.

    Raises:
        ValueError: one that is not a rule, a name that is empty, twice there or tied to itself, or
            rows below 1.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(
            f"rules={rules!r}: need Prefixed, Renamed, Stacked, Split or Tied, in order"
        )
    rules = tuple(rules)
    for rule in rules:
        if not isinstance(rule, Rule):
            raise ValueError(f"rules hold {rule!r}: need Prefixed, Renamed, Stacked, Split or Tied")
        match rule:
            case Stacked(name, parts) | Split(name, parts):
                is_right = _is_name(name) and _are_parts(parts)
            case Prefixed(name, other):
                is_right = _is_name(name) and isinstance(other, str)
            case Renamed(name, other):
                is_right = _is_name(name) and isinstance(other, str)
            case Tied(name, other):
                is_right = _is_name(name) and _is_name(other) and name != other
        if not is_right:
            raise ValueError(
                f"rules hold {rule!r}: need names, each once, and at least 1 row of each"
            )
    return rules


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _are_parts(parts: object) -> bool:
    """Names, each once, and their rows."""
    return (
        isinstance(parts, tuple | list)
        and bool(parts)
        and all(isinstance(part, tuple | list) and len(part) == 2 for part in parts)
        and all(_is_name(name) and type(rows) is int and rows >= 1 for name, rows in parts)
        and len({name for name, _ in parts}) == len(parts)
    )
