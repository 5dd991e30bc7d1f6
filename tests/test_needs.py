"""What is missing is told, and not passed over where it is required."""

from __future__ import annotations

import pytest

from tests import needs
from tests.conftest import SLOW


@pytest.fixture(autouse=True)
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """clang is not there, gcc is; nothing is required."""
    monkeypatch.setitem(needs.PROBLEMS, "clang", lambda: "there is no clang")
    monkeypatch.setitem(needs.PROBLEMS, "gcc", lambda: "")
    monkeypatch.delenv("MONOPLAN_REQUIRE", raising=False)


def test_what_is_missing_is_skipped() -> None:
    needs.check("gcc")
    with pytest.raises(pytest.skip.Exception, match="there is no clang"):
        needs.check("clang")


def test_what_is_required_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_REQUIRE", "gcc,clang")
    needs.check("gcc")
    with pytest.raises(pytest.fail.Exception, match="there is no clang"):
        needs.check("clang")


def test_names_that_nobody_knows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOPLAN_REQUIRE", "gcc,klang")
    with pytest.raises(pytest.UsageError, match="klang"):
        needs.check("gcc")


def test_a_mark_is_one_that_is_known() -> None:
    with pytest.raises(AssertionError, match="klang"):
        needs.needs("klang")


def test_the_list_of_slow_tests_is_current() -> None:
    """A test that was renamed would come back to the README's command unseen."""
    lines = SLOW.read_text("utf-8").splitlines()
    assert lines == sorted(set(lines))
    for line in lines:
        path, _, name = line.partition("::")
        assert f"def {name.partition('[')[0]}(" in (SLOW.parents[1] / path).read_text("utf-8"), line
