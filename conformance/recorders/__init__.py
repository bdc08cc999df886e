"""One module per part of the real engine that is recorded; `conformance.record` runs them."""
