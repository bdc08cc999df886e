"""An encoder and a decoder as two processes, and the client that leads a prompt through both.

    with EncodeDecode("byte-sees") as pair:
        outputs = pair.generate([{"prompt": "<image>what is this?\\n", ...}], SamplingParams())

Promises: a picture's rows go from process to process beside the client; a prompt whose encoder is
gone, slow or unwilling goes to the decoder, which encodes it; at the end no process is left. As in
upstream's proxy, the decoder gets a prompt when its pictures have been encoded. There each picture
is a request to an encoder of its own, and a picture that fails fails the prompt:
`examples/disaggregated/disaggregated_encoder/disagg_epd_proxy.py:76` `fanout_encoder_primer`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from mini_vllm.kv_transfer.processes import (
    Answer,
    EngineLostError,
    EnginePair,
    EngineProcess,
    answer_all,
    engine_of,
    kill,
)
from mini_vllm.sampling_params import SamplingParams


def serve(connection: Connection, model: Any, knobs: Mapping[str, Any]) -> None:
    """The loop of an engine process; it says first where it listens, if it does."""
    engine = engine_of(connection, model, knobs)
    connection.send(engine.feature("multimodal").ec_transfer.address)
    answer_all(engine, connection)


class EncodeDecode(EnginePair):
    """One producer, one consumer, and the proxy between a caller and both."""

    def __init__(
        self, model: Any = "byte-sees", extra: Mapping[str, Any] | None = None,
        encode_timeout_s: float = 60.0, **knobs: Any,
    ) -> None:  # fmt: skip
        """Start both engines.

        Args:
            model: as for `LLM`.
            extra: `ec_connector_extra_config` of both.
            encode_timeout_s: how long the prompts of one call wait for the encoder, all in all.
            knobs: of both engines, such as `num_blocks`.

        Raises:
            ValueError: an engine refuses what is given.
        """
        self.engines = {}
        self.encode_timeout_s = encode_timeout_s
        self.num_fallbacks = 0
        """Prompts with pictures that the encoder did not answer in time, or refused."""
        self._num_requests = 0
        port = 0
        try:
            for role in ("ec_producer", "ec_consumer"):
                config = {
                    "ec_connector": "ECSocketConnector", "ec_role": role, "ec_port": port,
                    "ec_connector_extra_config": extra or {},
                }  # fmt: skip
                made = {**knobs, "ec_transfer_config": config}
                self.engines[role] = EngineProcess(model, made, serve)
                if role == "ec_producer":
                    _, port = self.engines[role].said
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Any], params: SamplingParams) -> list[Answer]:
        """Each prompt's pictures through the producer, then all prompts through the consumer.

        Raises:
            EngineLostError: the consumer is gone.
        """
        jobs: dict[str, Any] = {}
        for prompt in prompts:
            jobs[f"ec-{self._num_requests}"] = prompt
            self._num_requests += 1
        shown = [
            name for name, prompt in jobs.items()
            if isinstance(prompt, Mapping) and prompt.get("multi_modal_data")
        ]  # fmt: skip
        self.num_fallbacks += len(shown) - self._encode(jobs, shown, params)
        decoder, answers = self.engines["ec_consumer"], dict[str, Answer]()
        for name, prompt in jobs.items():
            decoder.submit(name, prompt, params)
        while len(answers) < len(jobs):
            answer = decoder.receive()
            answers[answer.request_id] = answer
        return [answers[name] for name in jobs]

    def _encode(self, jobs: Mapping[str, Any], shown: Sequence[str], params: SamplingParams) -> int:
        """How many of the prompts with pictures the encoder has done within its time.

        An encoder that has not even read them by then is ended: the pipe to it is full.
        """
        encoder, waiting, num_encoded = self.engines["ec_producer"], set(shown), 0
        first = replace(params, max_tokens=1, min_tokens=0, ignore_eos=True)
        deadline = time.monotonic() + self.encode_timeout_s

        def submit() -> None:
            with suppress(EngineLostError):
                for name in shown:
                    encoder.submit(name, jobs[name], first)

        submitting = threading.Thread(target=submit, name="ec-submit", daemon=True)
        submitting.start()
        try:
            while waiting and encoder.connection.poll(max(0.0, deadline - time.monotonic())):
                answer = encoder.receive()  # perhaps of a prompt that was given up before
                num_encoded += answer.request_id in waiting and answer.finish_reason == "length"
                waiting.discard(answer.request_id)
        except (EngineLostError, OSError):
            pass
        submitting.join(max(0.0, deadline - time.monotonic()))
        if submitting.is_alive():
            kill(encoder)
            submitting.join()
        return num_encoded
