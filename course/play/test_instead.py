"""The stand-in for `safetensors` beside the library: the same bytes, the same refusals."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors
from safetensors.numpy import load_file, save

from course.play.instead import safetensors as ours
from course.play.instead.safetensors import numpy as ours_numpy
from mini_vllm.models.loader import MODELS

SHIPPED = sorted(MODELS.glob("*/*.safetensors")) + sorted(MODELS.glob("*/*/*.safetensors"))
WELL = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def file_of(header: object, data: bytes = bytes(8)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_every_shipped_file_is_read_byte_for_byte_as_the_library_reads_it(path):
    expected, came = load_file(path), ours_numpy.load_file(path)
    assert came.keys() == expected.keys(), "the same tensors"
    for name, array in expected.items():
        assert (came[name].dtype, came[name].shape) == (array.dtype, array.shape), name
        assert came[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("metadata", [None, {"format": "pt", "made": "by ü"}])
def test_what_is_saved_is_byte_for_byte_what_the_library_saves(metadata):
    rng = np.random.default_rng(0)
    tensors = {
        f"{dtype}.{shape}": np.array(rng.normal(size=shape) * 50, dtype)
        for dtype in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8",
                      "uint16", "uint32", "uint64", "bool")
        for shape in ((3, 2), (0,), (), (5,))
    }  # fmt: skip
    if metadata is None:
        assert ours_numpy.save(tensors) == save(tensors)
    else:  # the library keeps metadata in no order of its own: what is read back must be equal
        one = {"x": tensors["float32.(3, 2)"]}
        assert _read(ours_numpy.save(one, metadata)) == _read(save(one, metadata))


def _read(data: bytes) -> object:
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"1234567",
        (1 << 40).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        file_of(b"{not json"),
        file_of(b"\xff\xfe"),
        file_of(b"[1]", b""),
        file_of(WELL, bytes(7)),
        file_of(WELL, bytes(9)),
        file_of({"a": {**WELL["a"], "dtype": "F31"}}),
        file_of({"a": {**WELL["a"], "shape": [3]}}),
        file_of({"a": {**WELL["a"], "shape": [-2]}}),
        file_of({"a": {**WELL["a"], "data_offsets": [8, 0]}}),
        file_of({"a": {**WELL["a"], "data_offsets": [4, 12]}}, bytes(12)),
        file_of({"a": WELL["a"], "b": WELL["a"]}),
        file_of({"a": {"dtype": "F32", "shape": [2]}}),
        file_of({"__metadata__": {"a": 1}}, b""),
    ],
)
def test_what_the_library_refuses_is_refused(data, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(path, framework="numpy")
    with pytest.raises(ours.SafetensorError):
        ours.safe_open(path, framework="numpy")


def test_a_file_without_tensors_is_read_by_both(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of({}, b""))
    assert load_file(path) == ours_numpy.load_file(path) == {}


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(file_of(WELL))
    with (
        ours.safe_open(path, framework="numpy") as file,
        pytest.raises(ours.SafetensorError, match="nobody"),
    ):
        file.get_tensor("nobody")
