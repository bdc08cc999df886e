"""The vocabulary of gpt-oss's harmony format, which the package `openai_harmony` does not hold.

It asks for a file `o200k_base.tiktoken` in the folder that `TIKTOKEN_ENCODINGS_BASE` names. The npm
package `tiktoken` holds the same table in a form of its own: `npm pack` brings it.

    python -m conformance.features.entrypoints.harmony_vocabulary FOLDER
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PACKAGE, MEMBER = "tiktoken@1.0.22", "package/encoders/o200k_base.json"
NAME = "o200k_base.tiktoken"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
"""Of the file that is written; `openai_harmony` checks the same."""
VARIABLE = "TIKTOKEN_ENCODINGS_BASE"


def lines_of(table: dict[str, Any]) -> bytes:
    """The file: a token's bytes in base64 and its id in each line.

    Args:
        table: `bpe_ranks` is lines of a mark, the first id, and tokens with ids that count up.

    Raises:
        ValueError: the bytes are not those of the table that `openai_harmony` takes.
    """
    found = []
    for line in table["bpe_ranks"].splitlines():
        _, first, *tokens = line.split(" ")
        found += [f"{token} {number}\n" for number, token in enumerate(tokens, int(first))]
    content = "".join(found).encode()
    if (digest := hashlib.sha256(content).hexdigest()) != SHA256:
        raise ValueError(f"{PACKAGE}: sha256 of the table is {digest}: need {SHA256}")
    return content


def write(folder: Path) -> Path:
    """Bring the package by npm, and write the table into a folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise RuntimeError(f"npm is not installed: need it for {PACKAGE}, or {VARIABLE}")
    with tempfile.TemporaryDirectory() as scratch:
        command = [npm, "pack", "--silent", PACKAGE]
        subprocess.run(command, cwd=scratch, check=True, stdout=subprocess.DEVNULL)
        (package,) = Path(scratch).glob("*.tgz")
        with tarfile.open(package) as archive:
            member = archive.extractfile(MEMBER)
            assert member is not None
            content = lines_of(json.load(member))
    path = folder / NAME
    path.write_bytes(content)
    return path


def find() -> None:
    """Have `openai_harmony` find the table: where the variable says, or brought by npm for now."""
    if VARIABLE not in os.environ:
        folder = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        write(Path(folder))
        os.environ[VARIABLE] = folder


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
