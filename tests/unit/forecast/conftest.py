"""Tests of a module with ``RUNS_IN_CHILD = True`` run in one child process.

A device that is registered stays so.
"""

from __future__ import annotations

import functools
import os
import tempfile
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.prepared import run_prepared

_ROOT = Path(__file__).parents[3]
_IN_CHILD = "FORECAST_TESTS_IN_CHILD"


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Fail as the test has failed in the child."""
    if _IN_CHILD in os.environ or not getattr(pyfuncitem.module, "RUNS_IN_CHILD", False):
        return None
    failure = _failures(pyfuncitem.path).get(pyfuncitem.name, "the child has not run it")
    if failure:
        pytest.fail(failure, pytrace=False)
    return True


@functools.cache
def _failures(file: Path) -> dict[str, str]:
    """Run the tests of a file in a child; return what failed in each, empty if nothing did."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ["-m", "", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = {**os.environ, _IN_CHILD: "1"}
        done = run_prepared(
            ["-m", "pytest", file, *options], cwd=_ROOT, timeout=280, env=environment
        )
        assert report.exists(), done.stdout + done.stderr
        cases = ET.parse(report).iter("testcase")
        return {
            case.get("name", ""): "\n".join(
                one.text or "" for one in case if one.tag in ("failure", "error")
            )
            for case in cases
        }
