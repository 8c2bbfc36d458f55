"""The hooks of pre-commit are the checks with which the tests begin."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_hooks_are_the_checks_with_which_the_tests_begin():
    hooks = re.findall(r"^ *entry: (.+)$", (ROOT / ".pre-commit-config.yaml").read_text(), re.MULTILINE)
    run = (ROOT / "tests" / "run").read_text()
    checks = re.findall(r"^(\.venv/bin/python -m ruff .+) \.$", run, re.MULTILINE)
    assert hooks == checks and len(checks) == 2
