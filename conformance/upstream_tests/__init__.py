"""Upstream's own tests, unchanged, on the mini engine's parts.

    python -m conformance.upstream_tests mini           # those in scope, on mini_vllm
    python -m conformance.upstream_tests real -k order  # any of them, on the real scheduler

`scope.yaml` says of every function whether it is in scope, `facade` puts upstream's interface over
mini's parts, `harness` puts that into the names the tests import.
"""
