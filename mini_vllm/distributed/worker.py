"""What runs in a rank's process: wait for a call, make it, answer.

Promises: it ends when the engine's end of its pipe closes, however the engine ended; what goes
wrong is said before it ends; Ctrl-C is the engine's business. Mirrors
`vllm/v1/executor/multiproc_executor.py:944` `WorkerProc.worker_busy_loop`.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.distributed.collectives import CommStats, Communicator
from mini_vllm.distributed.model import RankModel, RankSpec
from mini_vllm.distributed.transport import (
    PeerLateError,
    PeerLostError,
    SharedMemoryEnd,
    Transport,
    connect_sockets,
    listen,
)

BATCH_FIELDS = (
    "token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables",
    "logits_indices", "block_size",
)  # fmt: skip
"""What a rank receives of a step. It has its K and V itself."""


class Worker:
    """The methods that the engine may call in every rank."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.stats = CommStats()
        self.model: RankModel | None = None
        self.state: dict[str, Any] = {}
        """What functions of `run` keep for a later call. Another model begins without it."""

    def load(self, spec: RankSpec) -> dict[str, Any] | None:
        """Build this rank's part of a model; what it holds. None if it has no part."""
        self.model, self.state = None, {}
        self.stats.take()
        if self.transport.rank >= spec.parallel.world_size:
            return None
        self.model = RankModel(spec, self.transport, self.stats)
        return {
            "pid": os.getpid(),
            "weights": self.model.weights.num_read,
            "kv_shape": self.model.kv_cache.shape,
            "layers": list(self.model.indices),
        }

    def execute(self, fields: tuple[Any, ...]) -> np.ndarray | None:
        """Run one step."""
        if self.model is None:
            return None
        self.stats.take()
        return self.model.forward(ForwardBatch(**dict(zip(BATCH_FIELDS, fields, strict=True))))

    def comm_stats(self) -> CommStats:
        """What the last step has sent."""
        return self.stats.take()

    def run(self, function: Any, *args: Any) -> Any:
        """Call a function with this worker: `LLM.collective_rpc` of the real engine."""
        return function(self, *args)

    def group(self, size: int) -> Communicator:
        """The first `size` ranks."""
        return Communicator(self.transport, range(size), self.stats)


def connect(
    rank: int, pipe: Connection, end: SharedMemoryEnd | None, secret: bytes, timeout_s: float
) -> Transport:
    """Reach the other ranks; over sockets the engine tells each the ports of all."""
    if end is not None:
        return end.connect(rank, timeout_s)
    server = listen()
    pipe.send(("port", rank, server.getsockname()[1]))
    return connect_sockets(rank, server, pipe.recv(), secret, timeout_s)


def main(
    rank: int, pipe: Connection, end: SharedMemoryEnd | None, secret: bytes, timeout_s: float
) -> None:
    """The life of a rank. Messages to the engine are (kind, number of the call, content)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    number, transport = -1, None
    try:
        transport = connect(rank, pipe, end, secret, timeout_s)
        worker = Worker(transport)
        pipe.send(("ready", -1, None))
        while True:
            number, method, args, answers = pickle.loads(pipe.recv_bytes())
            try:
                result = getattr(worker, method)(*args)
            except ValueError as error:
                if method != "load":
                    raise
                pipe.send(("refused", number, str(error)))
                continue
            if answers is None or rank in answers:
                pipe.send(("answer", number, result))
    except (EOFError, BrokenPipeError):
        pass  # the engine is gone
    except PeerLostError as error:
        _say(pipe, ("lost", number, ({error.peer}, str(error))))
    except PeerLateError as error:
        _say(pipe, ("late", number, (error.peers, str(error))))
    except BaseException as error:
        why = f"{type(error).__name__}: {error}"
        _say(pipe, ("failed", number, (why, traceback.format_exc())))
    finally:
        if transport is not None:
            transport.close()


def _say(pipe: Connection, message: tuple[str, int, Any]) -> None:
    with suppress(OSError):
        pipe.send(message)
