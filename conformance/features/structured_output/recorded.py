"""What is recorded of grammars and masks."""

from conformance.features import Part, run, workloads


def _library(name: str, module: str, what: str, by: str) -> Part:
    function = f"features.structured_output.{module}:cases"
    return Part(f"parts/{name}.jsonl.gz", function, what, by, needs="engine")


PARTS = {
    "grammar": workloads(
        "structured_output", "grammar", "record",
        "the same `Scheduler` with grammars that are late, or refuse a token",
    ),
    "grammar_masks": _library(
        "grammar_masks", "masks",
        "xgrammar's and llguidance's masks after every prefix of texts, regexes and choices, over "
        "bytes and over words",
        "`test_grammar.py`",
    ),
    "grammar_rows": _library(
        "grammar_rows", "rows",
        "`vllm/v1/structured_output/__init__.py:204` `StructuredOutputManager.grammar_bitmask` "
        "under drafts, `Scheduler.update_draft_token_ids_in_output` before it, "
        "`apply_grammar_bitmask` after it",
        "lab 12-04",
    ),
    "grammar_reasoning": _library(
        "grammar_reasoning", "reasoning",
        "the real scheduler and manager with a reasoning parser: which rows are masked and which "
        "tokens a grammar reads, with drafts and with a step in flight",
        "`test_reasoning.py`",
    ),
    "grammar_tags": _library(
        "grammar_tags", "tags",
        "structural tags: what the real front door takes, and xgrammar's masks in the real "
        "backend's grammars, over bytes and over words",
        "`test_tags.py`",
    ),
    "grammar_tags_runs": _library(
        "grammar_tags_runs", "tags_runs",
        "the real scheduler and manager with structural tags: plans, drafts, masks and texts, with "
        "drafts and with a step in flight",
        "`test_tags.py`",
    ),
    "grammar_language": _library(
        "grammar_language", "language",
        "which texts xgrammar and llguidance take as JSON of a schema, beside `jsonschema`",
        "`suite.py`, `test_grammar.py`",
    ),
    "grammar_suite": _library(
        "grammar_suite", "suite",
        "the published suite of JSON Schema 2020-12 with xgrammar's and llguidance's verdicts",
        "`suite.py`, `test_grammar.py`",
    ),
    "texts-structured": run(
        "texts-structured", "features.structured_output.texts:recorded",
        "greedy texts under 50 constraints: regex, choice, grammar, JSON Schema",
        "`texts structured_output`",
    ),
}  # fmt: skip
