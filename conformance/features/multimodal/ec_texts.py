"""Real vLLM decodes what our tower encoded, and ours what its tower encoded, through files of the
pin's connector for rows of pictures.

    course engine run -m conformance.record texts-ec-connector   # record: the real engine
    course engine run -m conformance.record texts-ec-producer    # the other way round
    python -m conformance.features.multimodal.ec_texts           # compare: any machine

The questions are those of `texts`. A real `ec_consumer` is asked them with files that our encoder
saved, under our names of pictures (`multi_modal_uuids`); then some of them once more under other
names, whose files hold the rows of another picture, so that an answer shows whose rows it is of.
In the other direction a real `ec_producer` is asked, and the rows in its files are recorded: of
all pictures how far they are from ours, of `WHOLE` of them every number. Our decoder answers from
these. The real engine is a process of its own.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from conformance import recording
from conformance.features.multimodal import texts
from conformance.real_engine import provenance
from mini_vllm import LLM, SamplingParams
from mini_vllm.ec_transfer.example import FILE, TENSOR
from mini_vllm.multimodal.hasher import hash_picture

KEPT, KEPT_PRODUCER = "texts-ec-connector", "texts-ec-producer"
WHOLE = (0, 2, 4, 6)
"""Questions with one picture each whose rows are recorded."""
SWAPPED = tuple((i, i + 2) for i in (0, 2, 4, 6, 8, 10))
"""Questions with one picture each: the first is asked with the rows of the second's picture."""
_SAID = "recorded: "


def recorded() -> Iterator[dict[str, Any]]:
    """A real decoder with our rows, float32 and greedy: one line."""
    with tempfile.TemporaryDirectory() as folder:
        _encode(folder)
        for first, second in swapped():
            rows = load_file(Path(folder) / _name(second) / FILE)[TENSOR]
            other = Path(folder) / f"swapped-{first}"
            other.mkdir()
            save_file({TENSOR: rows}, other / FILE)
        consumer = _in_a_process(folder, "consumer")
    names = {hash_picture(p) for _, shown in texts.questions() for p in shown}
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"),
        "mark": texts.mark_of(texts.questions()), "consumer": consumer, "pictures": len(names),
    }  # fmt: skip


def recorded_producer() -> Iterator[dict[str, Any]]:
    """A real encoder's rows beside ours, float32: one line."""
    with tempfile.TemporaryDirectory() as theirs, tempfile.TemporaryDirectory() as ours:
        said = _in_a_process(theirs, "producer")
        _encode(ours)
        found = {}
        for name in sorted(os.listdir(theirs)):
            of = [load_file(Path(f) / name / FILE)[TENSOR] for f in (theirs, ours)]
            found[name] = [list(of[0].shape), str(of[0].dtype), float(np.abs(of[0] - of[1]).max())]
        rows = {
            _name(i): base64.b64encode(
                load_file(Path(theirs) / _name(i) / FILE)[TENSOR].tobytes()
            ).decode()
            for i in WHOLE
        }
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"),
        "mark": texts.mark_of(texts.questions()), "producer": said, "files": found, "rows": rows,
    }  # fmt: skip


def answers_from(rows: Mapping[str, str], files: Mapping[str, Any]) -> tuple[list[list[int]], Any]:
    """Our decoder's tokens of `WHOLE`, from files with a real encoder's rows, and its counts."""
    asked = texts.questions()
    with tempfile.TemporaryDirectory() as folder:
        for name, data in rows.items():
            (Path(folder) / name).mkdir()
            shape, dtype, _ = files[name]
            array = np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
            save_file({TENSOR: array}, Path(folder) / name / FILE)
        config = {
            "ec_connector": "ECExampleConnector", "ec_role": "ec_consumer",
            "ec_connector_extra_config": {"shared_storage_path": folder},
        }  # fmt: skip
        llm = LLM(
            texts.MODEL, dtype="float32", num_blocks=600, max_model_len=texts.MAX_MODEL_LEN,
            ec_transfer_config=config,
        )  # fmt: skip
        batch = [{"prompt": asked[i][0], "multi_modal_data": {"image": asked[i][1]}} for i in WHOLE]
        params = SamplingParams(max_tokens=texts.MAX_TOKENS)
        outputs = [list(answer.outputs[0].token_ids) for answer in llm.generate(batch, params)]
        return outputs, llm.llm_engine.feature("multimodal").stats()


def swapped() -> list[tuple[int, int]]:
    """The pairs of `SWAPPED` that have one picture each, two different ones."""
    asked = texts.questions()
    single = [pair for pair in SWAPPED if all(len(asked[i][1]) == 1 for i in pair)]
    return [pair for pair in single if _name(pair[0]) != _name(pair[1])]


def _name(question: int) -> str:
    return hash_picture(texts.questions()[question][1][0])


def _encode(folder: str) -> None:
    """Our tower's rows of every picture, in files."""
    config = {
        "ec_connector": "ECExampleConnector", "ec_role": "ec_producer",
        "ec_connector_extra_config": {"shared_storage_path": folder},
    }  # fmt: skip
    llm = LLM(
        texts.MODEL, dtype="float32", num_blocks=600, max_num_seqs=16,
        max_num_batched_tokens=texts.BUDGET, max_model_len=texts.MAX_MODEL_LEN,
        ec_transfer_config=config,
    )  # fmt: skip
    batch = [
        {"prompt": text, "multi_modal_data": {"image": shown}} if shown else {"prompt": text}
        for text, shown in texts.questions()
    ]
    llm.generate(batch, SamplingParams(max_tokens=1))


def _in_a_process(folder: str, role: str) -> dict[str, Any]:
    """What a real engine says; its process is gone then."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, folder, role], check=True, text=True,
        stdout=subprocess.PIPE, timeout=3600,
    )  # fmt: skip
    [line] = [line for line in done.stdout.splitlines() if line.startswith(_SAID)]
    found: dict[str, Any] = json.loads(line.removeprefix(_SAID))
    return found


def answer(folder: str, role: str) -> dict[str, Any]:
    """In a process of its own: a real engine's outputs, and what its scheduler had loaded.

    An `ec_producer` runs with prefix caching off, since an assertion ends its start with it on, and
    computes each prompt in one step, since it reports a token for every chunk.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from PIL import Image
    from vllm.config import ECTransferConfig

    llm = vllm.LLM(
        model=str(texts.MODEL), dtype="float32", seed=0, max_model_len=texts.MAX_MODEL_LEN,
        max_num_seqs=16, enforce_eager=True,
        max_num_batched_tokens=texts.BUDGET if role == "consumer" else texts.MAX_MODEL_LEN,
        gpu_memory_utilization=0.4, limit_mm_per_prompt={"image": 2},
        enable_prefix_caching=role == "consumer",
        ec_transfer_config=ECTransferConfig(
            ec_connector="ECExampleConnector", ec_role=f"ec_{role}",
            ec_connector_extra_config={"shared_storage_path": folder},
        ),
    )  # fmt: skip
    loads: list[list[Any]] = []
    scheduler: Any = llm.llm_engine.engine_core.engine_core.scheduler
    build = scheduler.ec_connector.build_connector_meta

    def noted(plan: Any) -> Any:
        meta = build(plan)
        loads.extend([load.mm_hash, load.num_token] for load in meta.mm_datas)
        return meta

    scheduler.ec_connector.build_connector_meta = noted

    def said(batch: list[tuple[str, list[np.ndarray], list[str]]]) -> list[list[int]]:
        most = texts.MAX_TOKENS if role == "consumer" else 1
        params = vllm.SamplingParams(temperature=0.0, max_tokens=most)
        prompts: Any = [
            {
                "prompt": text,
                "multi_modal_data": {"image": [Image.fromarray(p) for p in shown]},
                "multi_modal_uuids": {"image": names},
            }
            if shown
            else {"prompt": text}
            for text, shown, names in batch
        ]
        return [list(a.outputs[0].token_ids) for a in llm.generate(prompts, params)]

    asked = texts.questions()
    outputs = said([(text, shown, [hash_picture(p) for p in shown]) for text, shown in asked])
    found: dict[str, Any] = {"outputs": outputs, "loads": loads.copy()}
    if role == "producer":
        return found
    found["swapped"] = said([(*asked[i], [f"swapped-{i}"]) for i, _ in swapped()])
    return found


def kept(name: str = KEPT) -> dict[str, Any]:
    """A recording of this module."""
    return texts.kept(name)


def of_the_other_picture() -> list[list[int]]:
    """What our engine, without a connector, answers to each swapped question about the picture
    whose rows it was given."""
    llm = LLM(texts.MODEL, dtype="float32", num_blocks=600, max_model_len=texts.MAX_MODEL_LEN)
    asked = texts.questions()
    batch = [
        {"prompt": asked[i][0], "multi_modal_data": {"image": asked[j][1]}} for i, j in swapped()
    ]
    params = SamplingParams(max_tokens=texts.MAX_TOKENS)
    return [list(answer.outputs[0].token_ids) for answer in llm.generate(batch, params)]


def differing(found: Mapping[str, Any]) -> dict[str, int]:
    """How many answers differ, by who was asked: from the real engine without a connector, or, for
    the swapped ones, from ours about the other picture."""
    alone = texts.kept()["outputs"]

    def count(got: list[Any], want: list[Any]) -> int:
        return sum(a != b for a, b in zip(got, want, strict=True))

    return {
        "real decoder, our rows": count(found["consumer"]["outputs"], alone),
        "real decoder, another's rows": count(found["consumer"]["swapped"], of_the_other_picture()),
    }


def main() -> int:
    """Compare; returns the exit status."""
    apart = differing(kept())
    for asked, number in apart.items():
        print(f"{asked}: {number} differ")
    return 1 if any(apart.values()) else 0


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(_SAID + json.dumps(answer(*sys.argv[1:])), flush=True)
    else:
        raise SystemExit(main())
