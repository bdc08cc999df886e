"""Labs whose contract is smaller than the engine's slot: what stands between the two.

Promises: the learner's function decides, and what the engine needs besides is taken from the
engine; an answer that a slot cannot use is an error that names the part. Of the engine only slots
are known here, and the engine knows nothing of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from mini_vllm.detokenizer import IncrementalDetokenizer
from mini_vllm.request import Request, RequestStatus
from mini_vllm.tokenizer import ByteTokenizer, Tokenizer

_UNFINISHED = "\ufffd"


def request(stop_status: Callable[..., RequestStatus | None]) -> type[Request]:
    """The slot `request`, from `stop_status(request, max_model_len)` of lab 01-05.

    The lab answers with a status. Which token id stopped the request, `stop_reason`, is added here.
    """

    class StopChecked(Request):
        """A request that ends when the learner's check says so."""

        __slots__ = ()

        def maybe_finish(self, max_model_len: int | None = None) -> bool:
            status = stop_status(self, max_model_len)
            if status is None:
                return False
            if status not in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH):
                raise RuntimeError(
                    f"stop_check part: returned {status!r}, need FINISHED_STOPPED, FINISHED_LENGTH "
                    "or None"
                )
            last, params = self.all_token_ids[-1], self.sampling_params
            is_eos = last == self.eos_token_id and not params.ignore_eos
            if status == RequestStatus.FINISHED_STOPPED and not is_eos:
                self.stop_reason = last
            self.status = status
            return True

    return StopChecked


def detokenizer(streaming: Callable[[], Any]) -> Callable[[Tokenizer], Any]:
    """The slot `detokenizer`, from `StreamingDetokenizer` of lab 16-03.

    The lab's tokens are bytes. With a tokenizer whose tokens are not, the engine's own serves.
    """

    class ByByte:
        """`update` of all tokens so far, by `feed` of each new one."""

        def __init__(self) -> None:
            self.text = ""
            self._stream, self._fed, self._num_fed = streaming(), "", 0

        def update(self, token_ids: Sequence[int]) -> str:
            """As `IncrementalDetokenizer.update`.

            A replacement character at the end is not shown before something follows it: the
            engine drops it where the output ends.
            """
            for token_id in token_ids[self._num_fed :]:
                piece = self._stream.feed(token_id)
                if not isinstance(piece, str):
                    raise RuntimeError(
                        f"detokenizer part: feed({token_id}) returned {piece!r}, need a str"
                    )
                self._fed += piece
            self._num_fed = len(token_ids)
            before, self.text = len(self.text), self._fed.rstrip(_UNFINISHED)
            return self.text[before:]

    def make(tokenizer: Tokenizer) -> Any:
        return (
            ByByte() if isinstance(tokenizer, ByteTokenizer) else IncrementalDetokenizer(tokenizer)
        )

    return make


def shards(lab: ModuleType) -> Callable[..., dict[str, np.ndarray]]:
    """The slot `shards` of the ranks, from the functions of lab 10-01.

    The lab cuts q, k and v stored as one, and gate and up stored as one. A checkpoint holds each by
    itself, so they are put together before they are cut, and taken apart after.
    """

    def cut(
        tensors: dict[str, np.ndarray], num_heads: int, num_kv_heads: int, rank: int, world: int
    ) -> dict[str, np.ndarray]:
        if len(tensors) == 1:
            [(name, tensor)] = tensors.items()
            cut_one = lab.shard_rows if name in ("o_proj", "down_proj", "w2") else lab.shard_columns
            return {name: cut_one(tensor, rank, world)}
        whole = list(tensors.values())
        sizes = [len(each) for each in whole]
        stacked = np.concatenate([each.reshape(len(each), -1) for each in whole])
        if len(whole) == 3:
            held = lab.shard_qkv(stacked, num_heads, num_kv_heads, rank, world)
            copies = max(1, world // num_kv_heads)  # ranks that hold the same KV head
            sizes = [sizes[0], *(size * copies for size in sizes[1:])]
        else:
            held = lab.shard_merged(stacked, sizes, rank, world)
        parts = np.split(np.asarray(held), np.cumsum(sizes)[:-1] // world)
        return {
            name: part.reshape(-1, *tensor.shape[1:])
            for (name, tensor), part in zip(tensors.items(), parts, strict=True)
        }

    return cut
