"""Releases after the pin: which were compared, and where their recordings are.

`python -m conformance.releases.record VERSION` drives a release's own scheduler from its source
archive; `python -m conformance.replay --release VERSION` replays what it decided on
`mini_vllm.releases`' parts. The parts live in the engine's package, since the engine may not import
this one; the proof lives here.
"""

from __future__ import annotations

from conformance.known_releases import FOLDER, RELEASES, SEEDS, Release, release_of
from conformance.replay import builders

__all__ = ["FOLDER", "RELEASES", "SEEDS", "Release", "builders", "release_of"]
