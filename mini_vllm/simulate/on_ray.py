"""A sweep's settings on the machines of a Ray cluster.

Promises: the rows that this process would have made, in any order; what a worker or a machine that
dies was doing is done again elsewhere; this package and the trace travel with the work, so that a
machine needs Python of the same version, numpy and Ray. Ray is an extra: `pip install '.[ray]'`.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mini_vllm

RETRIES = 8
"""How often a setting is begun again after its worker died."""


def run(
    address: str, one: Callable[..., Any], setup: Any, settings: Mapping[int, Mapping[str, Any]],
    arguments: Sequence[Any],
) -> Iterator[tuple[int, Any]]:  # fmt: skip
    """Yield (index, `one(setup, setting, *arguments)`) for every setting, as each is done.

    Args:
        address: of a cluster that runs ("auto", "HOST:6379", "ray://HOST:10001"), or "local".

    Raises:
        ValueError: Ray is not installed, or no cluster answers there.
    """
    try:
        import ray
    except ImportError:
        raise ValueError(
            "--ray: Ray is not installed (pip install 'mini-vllm-course[ray]')"
        ) from None
    _need_listener(address)
    mine = not ray.is_initialized()
    if mine:
        try:
            ray.init(
                address=None if address == "local" else address,
                runtime_env={"py_modules": [mini_vllm]}, log_to_driver=False,
                logging_level="error",
            )  # fmt: skip
        except (ConnectionError, OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"--ray {address}: no cluster answers ({error})") from None
    try:
        files = ray.put(_contents(setup.trace))
        given = ray.put((setup, *arguments))

        @ray.remote(max_retries=RETRIES)
        def work(setting: Mapping[str, Any], files: dict[str, bytes], given: Any) -> Any:
            setup, *arguments = given
            with tempfile.TemporaryDirectory() as folder:
                setup = replace(setup, trace=_written(Path(folder), setup.trace.name, files))
                return one(setup, setting, *arguments)

        waiting = {work.remote(setting, files, given): index for index, setting in settings.items()}
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            yield waiting.pop(done), ray.get(done)
    finally:
        if mine:
            ray.shutdown()


def _need_listener(address: str) -> None:
    """Raises ValueError where nothing listens: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        return
    try:
        socket.create_connection((host, int(port)), timeout=10).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ValueError(f"--ray {address}: no cluster answers ({error})") from None


def _contents(trace: Path) -> dict[str, bytes]:
    """The file of a trace, or the files of a recording's folder, by their names."""
    if trace.is_dir():
        return {each.name: each.read_bytes() for each in trace.iterdir() if each.is_file()}
    return {"": trace.read_bytes()}


def _written(folder: Path, name: str, files: Mapping[str, bytes]) -> Path:
    place = folder / name
    if "" in files:
        place.write_bytes(files[""])
        return place
    place.mkdir()
    for each, content in files.items():
        (place / each).write_bytes(content)
    return place
