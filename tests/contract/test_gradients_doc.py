"""docs/gradients.md: its blocks run, and the tests that it names are there."""

from __future__ import annotations

from tests.docs_blocks import check_named_tests, run_python


def test_python(tmp_path):
    run_python("gradients.md", tmp_path)


def test_what_it_names_is_there():
    check_named_tests("gradients.md", 3)
