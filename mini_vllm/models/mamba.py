"""A Mamba-2 layer: a short convolution, then one state per head that every token decays and feeds.

Promises: what a layer knows of a sequence is a state of fixed size, read from the block that the
last computed token is in and written to every block that this step ends or is in, so a full block
holds the state at its end for ever. Mirrors `vllm/model_executor/layers/mamba/mamba_mixer2.py:234`
`MambaMixer2`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mini_vllm.batch import ForwardBatch

_CHUNK = 64
"""Tokens that a scan takes in one product."""


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes of a Mamba-2 layer; names are those of `config.json` without `mamba_`."""

    n_heads: int
    d_head: int
    d_state: int
    d_conv: int = 4
    n_groups: int = 1
    """Heads of a group share what they write to and read from their states by."""
    chunk_size: int = 256
    """Blocks are a multiple of it where prefixes are cached."""
    conv_bias: bool = True
    proj_bias: bool = False

    @property
    def inner(self) -> int:
        """Channels that the states work on."""
        return self.n_heads * self.d_head

    @property
    def channels(self) -> int:
        """Channels of the convolution: those, and what is written and read by."""
        return self.inner + 2 * self.n_groups * self.d_state

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The last inputs of the convolution, and the states.

        As `vllm/model_executor/layers/mamba/mamba_utils.py:162`
        `MambaStateShapeCalculator.mamba2_state_shape`.
        """
        conv = (self.d_conv - 1, self.channels)
        return conv, (self.n_heads, self.d_head, self.d_state)

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """The layer's tensors, by the last parts of their names."""
        projected = self.inner + self.channels + self.n_heads
        shapes: dict[str, tuple[int, ...]] = {
            "in_proj.weight": (projected, hidden_size),
            "conv1d.weight": (self.channels, 1, self.d_conv),
            "dt_bias": (self.n_heads,),
            "A_log": (self.n_heads,),
            "D": (self.n_heads,),
            "norm.weight": (self.inner,),
            "out_proj.weight": (hidden_size, self.inner),
        }
        if self.conv_bias:
            shapes["conv1d.bias"] = (self.channels,)
        if self.proj_bias:
            shapes |= {"in_proj.bias": (projected,), "out_proj.bias": (hidden_size,)}
        return shapes


class MambaMixer:
    """One layer's projections, convolution and scan."""

    def __init__(
        self,
        config: MambaConfig,
        get: Callable[[str], np.ndarray],
        linear: Callable[[str], Callable[[np.ndarray], np.ndarray]],
        eps: float,
    ) -> None:
        """Args: `get`, a tensor of `MambaConfig.shapes` by name; `linear`, a projection by name."""
        self.config, self.eps = config, eps
        self.in_proj, self.out_proj = linear("in_proj"), linear("out_proj")
        self.conv_weight = np.ascontiguousarray(get("conv1d.weight")[:, 0].T)  # [d_conv, channels]
        self.conv_bias = get("conv1d.bias") if config.conv_bias else None
        self.dt_bias, self.D, self.norm = get("dt_bias"), get("D"), get("norm.weight")
        self.A = -np.exp(get("A_log"))  # [n_heads], what a state loses by

    def __call__(self, x: np.ndarray, pages: np.ndarray, batch: ForwardBatch) -> np.ndarray:
        """Advance every request's state.

        Args:
            x: [num_tokens, hidden_size], normed.
            pages: [2, num_blocks, half a page] of this layer, changed in place.
            batch: as the group of the layers with states sees it.

        Returns:
            [num_tokens, hidden_size].
        """
        c = self.config
        projected = self.in_proj(x)
        gate, mixed, dt = np.split(projected, [c.inner, c.inner + c.channels], axis=1)
        dt = np.logaddexp(dt + self.dt_bias, 0).astype(x.dtype, copy=False)  # softplus
        out = np.empty((len(x), c.n_heads, c.d_head), dtype=x.dtype)
        lens = np.diff(batch.query_start_loc)
        starts = batch.seq_lens - lens
        single = np.flatnonzero(lens == 1)
        if len(single):
            tokens = batch.query_start_loc[single]
            out[tokens] = self._decode(
                mixed[tokens], dt[tokens], starts[single], single, pages, batch
            )
        for i in np.flatnonzero(lens > 1).tolist():
            span = slice(batch.query_start_loc[i], batch.query_start_loc[i + 1])
            out[span] = self._prefill(mixed[span], dt[span], int(starts[i]), i, pages, batch)
        flat = out.reshape(len(x), c.inner)
        flat *= silu(gate)
        groups = flat.reshape(len(x), c.n_groups, -1)
        mean_square = np.einsum("tgi,tgi->tg", groups, groups) / groups.shape[2]
        groups /= np.sqrt(mean_square + x.dtype.type(self.eps))[:, :, None]
        flat *= self.norm
        return self.out_proj(flat)

    def _decode(
        self, mixed: np.ndarray, dt: np.ndarray, starts: np.ndarray, rows: np.ndarray,
        pages: np.ndarray, batch: ForwardBatch,
    ) -> np.ndarray:  # fmt: skip
        """One token each: mixed [n, channels], dt [n, n_heads] to [n, n_heads, d_head]."""
        size = batch.block_size
        window, state = self._read(
            pages, batch.block_tables[rows, np.maximum(starts - 1, 0) // size]
        )
        window[starts == 0], state[starts == 0] = 0, 0
        window = np.concatenate([window, mixed[:, None]], axis=1)  # [n, d_conv, channels]
        x, write, read = self._split(
            self._activate(np.einsum("nkc,kc->nc", window, self.conv_weight))
        )
        state *= np.exp(dt * self.A)[:, :, None, None]
        state += (x * dt[:, :, None])[..., None] * write[:, :, None]
        self._write(pages, batch.block_tables[rows, starts // size], window[:, 1:], state)
        return np.einsum("nhds,nhs->nhd", state, read) + x * self.D[:, None]

    def _prefill(
        self, mixed: np.ndarray, dt: np.ndarray, start: int, row: int, pages: np.ndarray,
        batch: ForwardBatch,
    ) -> np.ndarray:  # fmt: skip
        """Several tokens of one request: mixed [t, channels], dt [t, heads] to [t, heads, dim]."""
        c, size, table = self.config, batch.block_size, batch.block_tables[row]
        keep = c.d_conv - 1
        if start:
            before, state = (a[0] for a in self._read(pages, table[[(start - 1) // size]]))
        else:
            before = np.zeros((keep, c.channels), mixed.dtype)
            state = np.zeros((c.n_heads, c.d_head, c.d_state), mixed.dtype)
        inputs = np.concatenate([before, mixed])  # [keep + t, channels]
        convolved = sum(inputs[k : k + len(mixed)] * self.conv_weight[k] for k in range(c.d_conv))
        x, write, read = self._split(self._activate(np.asarray(convolved)))
        decay, out = dt * self.A, x * self.D[:, None]
        fed = x * dt[:, :, None]
        begin = 0
        while begin < len(mixed):
            end = min(begin + _CHUNK, len(mixed), begin + size - (start + begin) % size)
            part = slice(begin, end)
            y, state = scan(fed[part], decay[part], write[part], read[part], state)
            out[part] += y
            if (start + end) % size == 0 or end == len(mixed):
                block = table[[(start + end - 1) // size]]
                if block[0]:  # with mode "align" null but at the end of the step
                    self._write(pages, block, inputs[None, end : end + keep], state[None])
            begin = end
        return out

    def _activate(self, convolved: np.ndarray) -> np.ndarray:
        return silu(convolved if self.conv_bias is None else convolved + self.conv_bias)

    def _split(self, mixed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of [t, channels]: what goes in [t, heads, dim], and by what it is written and read, both
        [t, heads, d_state]."""
        c, n = self.config, len(mixed)
        states = c.n_groups * c.d_state
        x, write, read = np.split(mixed, [c.inner, c.inner + states], axis=1)
        per_group = c.n_heads // c.n_groups
        write, read = (
            a.reshape(n, c.n_groups, 1, c.d_state).repeat(per_group, 2).reshape(n, c.n_heads, -1)
            for a in (write, read)
        )
        return x.reshape(n, c.n_heads, c.d_head), write, read

    def _read(self, pages: np.ndarray, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of what these blocks hold: [n, d_conv - 1, channels], [n, heads, dim, state]."""
        conv, ssm = self.config.state_shapes
        flat = pages[:, blocks].transpose(1, 0, 2).reshape(len(blocks), -1)
        split = conv[0] * conv[1]
        rest = flat[:, split : split + ssm[0] * ssm[1] * ssm[2]]
        return flat[:, :split].reshape(-1, *conv).copy(), rest.reshape(-1, *ssm).copy()

    def _write(
        self, pages: np.ndarray, blocks: np.ndarray, window: np.ndarray, state: np.ndarray
    ) -> None:
        flat = np.zeros((len(blocks), 2 * pages.shape[2]), dtype=pages.dtype)
        split = window[0].size
        flat[:, :split] = window.reshape(len(blocks), -1)
        flat[:, split : split + state[0].size] = state.reshape(len(blocks), -1)
        pages[:, blocks] = flat.reshape(len(blocks), 2, -1).transpose(1, 0, 2)


def scan(
    fed: np.ndarray, decay: np.ndarray, write: np.ndarray, read: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`state` decays by exp(decay[t]) and takes in fed[t] x write[t]; y[t] = state @ read[t].

    All tokens in one product, each weighted by what of it is left: [Dao and Gu 2024, section 6].

    Args:
        fed: [t, heads, dim]; decay: [t, heads], at most 0; write and read: [t, heads, d_state].
        state: [heads, dim, d_state] before the first token.

    Returns:
        y [t, heads, dim], and the state after the last token.
    """
    sums = decay.cumsum(axis=0).T  # [heads, t]
    gaps = sums[:, :, None] - sums[:, None, :]  # [heads, to, from]
    later = np.tri(len(fed), dtype=bool)
    kept = np.exp(np.where(later, gaps, -np.inf))
    fed, write, read = (a.transpose(1, 0, 2) for a in (fed, write, read))  # [heads, t, ...]
    y = (read @ write.transpose(0, 2, 1) * kept) @ fed
    y += (read @ state.transpose(0, 2, 1)) * np.exp(sums)[:, :, None]
    left = np.exp(sums[:, -1:] - sums)[:, :, None]  # [heads, t, 1] of each token at the end
    state = state * np.exp(sums[:, -1])[:, None, None] + (fed * left).transpose(0, 2, 1) @ write
    return y.transpose(1, 0, 2), state


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x), with the sigmoid written as tanh so that no input overflows."""
    half = x * x.dtype.type(0.5)
    return half * (np.tanh(half) + 1)
