"""docs/cases.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| ([A-Z]{3}-\d\d) \| [123] \| .* \| (.*) \|$", re.MULTILINE)


def rows() -> dict[str, str]:
    return dict(_ROW.findall((ROOT / "docs" / "cases.md").read_text()))


def test_every_case_has_a_row() -> None:
    assert len(rows()) == 138


def test_named_tests_exist_and_carry_the_id() -> None:
    sources = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("tests/**/*.py")}
    everything = "\n".join(sources.values())
    for case, here in rows().items():
        named = re.findall(r"`(test_\w+)`", here)
        for name in named:
            assert f"def {name}(" in everything, f"{case}: {name} does not exist"
        for file in re.findall(r"`(tests/[\w/.]+\.py)`", here):
            assert file in sources, f"{case}: {file} does not exist"


def test_every_case_that_can_occur_has_a_test_of_its_id_among_the_cases() -> None:
    sources = "\n".join(path.read_text() for path in ROOT.glob("tests/cases/test_*.py"))
    for case, here in rows().items():
        prefix = case.lower().replace("-", "_")
        named = [n for n in re.findall(r"`(test_\w+)`", here) if prefix in n]
        if not any(f"def {name}(" in sources for name in named):
            assert here.startswith("can't occur"), case
