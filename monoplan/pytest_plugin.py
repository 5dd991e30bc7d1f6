"""pytest plugin: golden tests for compiled modules.

    def test_block(golden):
        fast = mp.compile(Block(), mp.spec("batch", 64))
        golden.check(fast, x)

Goldens lie in `golden/<test file>/<class>/<test>/` beside the test file (no <class> for a plain function).
`--golden-update` records them.
"""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

_TAKEN = pytest.StashKey[dict[Path, str]]()  # golden folders of this session -> the test that uses them


def pytest_addoption(parser: pytest.Parser) -> None:
    """--golden-update and --golden-force."""
    group = parser.getgroup("monoplan")
    group.addoption("--golden-update", action="store_true", help="record the golden results of the tests that run")
    group.addoption("--golden-force", action="store_true", help="let --golden-update work where CI is set")


def pytest_configure(config: pytest.Config) -> None:
    """Goldens that the run itself writes can't detect anything: in CI that must be meant."""
    if config.getoption("--golden-update") and os.environ.get("CI") and not config.getoption("--golden-force"):
        raise pytest.UsageError("--golden-update is refused because CI is set; --golden-force insists")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Any:
    """`golden.check(fast, *args)`: the call's outputs must be the recorded ones."""
    from monoplan.inspect.golden import GoldenFixture

    path = request.node.path
    name = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    classes = [node.name for node in request.node.listchain() if isinstance(node, pytest.Class)]
    folder = path.parent.joinpath("golden", path.stem, *classes, name)
    update = bool(request.config.getoption("--golden-update"))
    # The id of a test begins with a path from the root directory; the command is for where pytest was started.
    place = os.path.relpath(path, request.config.invocation_params.dir)
    test = "::".join([place, request.node.nodeid.partition("::")[2]])
    command = shlex.join(["pytest", test, "--golden-update"])
    return GoldenFixture(folder, update, request.node.nodeid, request.config.stash.setdefault(_TAKEN, {}), command)
