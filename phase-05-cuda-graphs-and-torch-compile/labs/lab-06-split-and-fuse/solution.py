"""A compiler small enough to read: cut a graph at marked operations, rewrite the pieces, count.

Part A works on plain data and needs numpy only. Part B does the same to a `torch.fx` graph. The
cut mirrors `vllm/compilation/backends.py:548` `split_graph`; the rewrite stands for the passes of
`vllm/compilation/passes/pass_manager.py:81` `PostGradPassManager`.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

NO_KERNEL = frozenset({"placeholder", "output", "chunk", "getitem"})
"""Operations that launch nothing: ends of the graph, and views of what is there."""

SPLITTING = frozenset({"attention", "kv_write"})
"""Where vLLM cuts by default: attention, and the write of K and V before it."""


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. It reads the values named in `inputs` and defines the value `name`."""

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    attr: str = ""
    """A constant it needs: the index of a getitem, the layer that attention belongs to."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Operations that are compiled, or left alone, together; in the order of the graph."""

    nodes: tuple[Node, ...]
    splits: bool
    """Whether it consists of splitting operations: never compiled, never captured."""


def decoder(num_layers: int) -> list[Node]:
    """The graph of a decoder: what a compiler sees after tracing. Weights are left out."""
    graph = [Node("tokens", "placeholder"), Node("h0", "embed", ("tokens",))]

    def add(name: str, op: str, *inputs: str, attr: str = "") -> str:
        graph.append(Node(name, op, inputs, attr))
        return name

    h = "h0"
    for i in range(num_layers):
        where = f"layers.{i}"
        add(f"norm{i}a", "norm", h)
        add(f"qkv{i}", "linear", f"norm{i}a")
        add(f"parts{i}", "chunk", f"qkv{i}")
        q, k, v = (add(f"{x}{i}", "getitem", f"parts{i}", attr=str(n)) for n, x in enumerate("qkv"))
        add(f"rope{i}", "rope", q, k)
        q, k = (add(f"{x}r{i}", "getitem", f"rope{i}", attr=str(n)) for n, x in enumerate("qk"))
        add(f"kv{i}", "kv_write", k, v, attr=where)
        add(f"attn{i}", "attention", q, k, v, f"kv{i}", attr=where)
        add(f"out{i}", "linear", f"attn{i}")
        h = add(f"h{i}a", "add", h, f"out{i}")
        add(f"norm{i}b", "norm", h)
        add(f"wide{i}", "linear", f"norm{i}b")
        add(f"halves{i}", "chunk", f"wide{i}")
        gate, up = (
            add(f"{x}{i}", "getitem", f"halves{i}", attr=str(n)) for n, x in enumerate(("g", "u"))
        )
        add(f"silu{i}", "silu", gate)
        add(f"act{i}", "mul", f"silu{i}", up)
        add(f"down{i}", "linear", f"act{i}")
        h = add(f"h{i + 1}", "add", h, f"down{i}")
    add("last", "norm", h)
    graph.append(Node("output", "output", ("last",)))
    return graph


# --- Part A: plain data ---------------------------------------------------------------------------


def kernels(nodes: Iterable[Node]) -> int:
    """How many of them launch a kernel."""
    return sum(node.op not in NO_KERNEL for node in nodes)


def split(graph: Sequence[Node], splitting: Collection[str] = SPLITTING) -> list[Piece]:
    """Cut the graph before and after each splitting operation.

    Splitting operations that follow each other directly share a piece. A getitem goes where its
    input is, wherever it stands, so that no tuple crosses a cut; two splitting operations with a
    getitem between them do not follow each other directly, even if it goes elsewhere. Placeholders
    and the output are in no piece; no piece is empty; pieces and their nodes keep the order of the
    graph.

    Source: `vllm/compilation/backends.py:548` `split_graph`.
    """
    part, previous = 0, False
    part_of: dict[str, int] = {}
    parts: dict[int, list[Node]] = {}
    for node in graph:
        if node.op in ("placeholder", "output"):
            continue
        splits = node.op in splitting
        part += splits != previous
        previous = splits
        if node.op == "getitem" and node.inputs[0] in part_of:
            part_of[node.name] = part_of[node.inputs[0]]
        else:
            part_of[node.name] = part
        parts.setdefault(part_of[node.name], []).append(node)
    return [Piece(tuple(nodes), nodes[0].op in splitting) for _, nodes in sorted(parts.items())]


def boundary(
    graph: Sequence[Node], pieces: Sequence[Piece]
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What each piece reads from outside, and what it defines that is read outside.

    Inputs in the order of first use, each once; outputs in the order of definition. "Outside" is
    any other piece, a placeholder, or the graph's output.
    """
    wanted = [{name for node in piece.nodes for name in node.inputs} for piece in pieces]
    returned = {name for node in graph if node.op == "output" for name in node.inputs}
    found = []
    for number, piece in enumerate(pieces):
        inside = {node.name for node in piece.nodes}
        used = dict.fromkeys(name for node in piece.nodes for name in node.inputs)
        elsewhere = returned.union(*(names for n, names in enumerate(wanted) if n != number))
        outputs = tuple(node.name for node in piece.nodes if node.name in elsewhere)
        found.append((tuple(name for name in used if name not in inside), outputs))
    return found


def num_different(graph: Sequence[Node], pieces: Sequence[Piece]) -> int:
    """How many pieces must be compiled: those that do not split, equal ones counted once.

    Two pieces are equal if they have the same operations with the same attributes, wired in the
    same way, and hand out the same of their values. Names do not count.
    """
    different = set()
    for piece, (inputs, outputs) in zip(pieces, boundary(graph, pieces), strict=True):
        if piece.splits:
            continue
        names = [*inputs, *(node.name for node in piece.nodes)]
        number = {name: index for index, name in enumerate(names)}
        body = [(n.op, n.attr, tuple(number[name] for name in n.inputs)) for n in piece.nodes]
        different.add((len(inputs), tuple(body), tuple(number[name] for name in outputs)))
    return len(different)


def fuse(nodes: Sequence[Node], keep: Collection[str]) -> list[Node]:
    """Rewrite `mul(silu(x), y)`, in either order, into one `silu_mul(x, y)`.

    The new node has the name and the place of the product; the silu goes. That is allowed only if
    nothing else reads the silu: no other node, not the product's second operand, and nobody
    outside, which `keep` names. Of two silus that could go, the first operand does.
    """
    uses = Counter(name for node in nodes for name in node.inputs)
    silu = {
        node.name: node.inputs[0]
        for node in nodes
        if node.op == "silu" and uses[node.name] == 1 and node.name not in keep
    }
    gone, fused = set(), []
    for node in nodes:
        inner = [name for name in node.inputs if name in silu] if node.op == "mul" else []
        if inner:
            first = inner[0]
            (other,) = (name for name in node.inputs if name != first)
            gone.add(first)
            node = Node(node.name, "silu_mul", (silu[first], other))
        fused.append(node)
    return [node for node in fused if node.name not in gone]


def compile_pieces(graph: Sequence[Node], splitting: Collection[str] = SPLITTING) -> list[Piece]:
    """Cut, then rewrite each piece by itself; splitting pieces stay as they are.

    A pattern that lies across a cut is not found, since no rewrite sees both halves.
    """
    pieces = split(graph, splitting)
    return [
        piece if piece.splits else Piece(tuple(fuse(piece.nodes, outputs)), False)
        for piece, (_, outputs) in zip(pieces, boundary(graph, pieces), strict=True)
    ]


def submissions(pieces: Sequence[Piece], mode: str) -> int:
    """Launches of one step: "eager", "piecewise" or "full".

    Eager launches each kernel. Piecewise launches one graph for each piece that has a kernel,
    and the kernels of splitting pieces one by one. Full is one graph.

    Raises:
        ValueError: another mode.
    """
    if mode == "eager":
        return sum(kernels(piece.nodes) for piece in pieces)
    if mode == "piecewise":
        each = ((piece.splits, kernels(piece.nodes)) for piece in pieces)
        return sum(count if splits else min(count, 1) for splits, count in each)
    if mode == "full":
        return 1
    raise ValueError(f"mode={mode!r}: need eager, piecewise or full")


# --- Part B: torch.fx -----------------------------------------------------------------------------


def count_fx(model: GraphModule) -> int:
    """Kernels of a `torch.fx` graph, those of the graphs it calls included.

    A call of a function launches one, except `operator.getitem` and `torch.chunk`. A call of a
    module launches one, unless the module is itself a GraphModule: then its kernels count.
    """
    import torch

    total = 0
    for node in model.graph.nodes:
        if node.op == "call_module":
            inner = model.get_submodule(node.target)
            total += count_fx(inner) if isinstance(inner, torch.fx.GraphModule) else 1
        elif node.op == "call_function":
            total += node.target not in (operator.getitem, torch.chunk)
    return total


def split_fx(
    model: GraphModule, splitting: Collection[Callable[..., Any]]
) -> tuple[GraphModule, list[str]]:
    """`split` for `torch.fx`: a graph that calls one submodule per piece, in order.

    Args:
        model: a traced module; not changed. Parameters are shared with it.
        splitting: functions; a `call_function` node of one of them splits.

    Returns:
        The new module, and the names of its submodules that consist of splitting calls. Write the
        rule, and leave the surgery to `torch.fx.passes.split_module.split_module`.
    """
    from torch.fx.passes.split_module import split_module

    part, previous = 0, False
    part_of: dict[Any, int] = {}
    splitting_parts = set()
    for node in model.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        splits = node.op == "call_function" and node.target in splitting
        part += splits != previous
        previous = splits
        part_of[node] = part
        if node.op == "call_function" and node.target is operator.getitem:
            part_of[node] = part_of.get(node.args[0], part)
        if splits:
            splitting_parts.add(part)
    result = split_module(model, None, part_of.__getitem__, keep_original_order=True)
    names = [name for name, _ in result.named_children()]
    return result, [name for name in names if int(name.rpartition("_")[2]) in splitting_parts]


def fuse_fx(model: GraphModule, fused: Callable[..., Any]) -> int:
    """`fuse` for `torch.fx`, in place: `torch.mul(silu(x), y)` becomes `fused(x, y)`.

    Both `torch.mul` and `operator.mul` are products, in either order, and `y` may be a number;
    `torch.nn.functional.silu` is the silu. Same conditions as `fuse`. No other node may go: a call
    whose result nobody reads may be there for what it does. Recompiles the module.

    Returns:
        How many products were rewritten.
    """
    import torch

    def is_silu(argument: Any) -> bool:
        return (
            isinstance(argument, torch.fx.Node)
            and argument.target is torch.nn.functional.silu
            and len(argument.users) == 1
        )

    count = 0
    for node in list(model.graph.nodes):
        if node.op != "call_function" or node.target not in (torch.mul, operator.mul):
            continue
        first, second = node.args
        if first is second or not (is_silu(first) or is_silu(second)):
            continue
        silu, other = (first, second) if is_silu(first) else (second, first)
        with model.graph.inserting_before(node):
            new = model.graph.call_function(fused, (silu.args[0], other))
        node.replace_all_uses_with(new)
        model.graph.erase_node(node)
        model.graph.erase_node(silu)
        count += 1
    model.graph.lint()
    model.recompile()
    return count
