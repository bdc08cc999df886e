"""What is long is named, with its lines; what is not, and tests, are not."""

from __future__ import annotations

from course.truth import sizes


def test_long_modules_and_functions_are_named(tmp_path):
    body = "".join(f"    x = {i}\n" for i in range(sizes.FUNCTION_LINES))
    folder = tmp_path / "mini_vllm"
    (folder / "tests").mkdir(parents=True)
    (folder / "long.py").write_text(f'def f():\n    """One."""\n{body}' + "y = 1\n" * 400)
    (folder / "short.py").write_text("def g():\n    return 1\n")
    (folder / "tests" / "test_long.py").write_text("y = 1\n" * 500)
    found = {name: lines for lines, name in sizes.unusual(tmp_path)}
    assert found.keys() == {"mini_vllm/long.py", "mini_vllm/long.py, f"}
    assert found["mini_vllm/long.py, f"] == sizes.FUNCTION_LINES + 1
