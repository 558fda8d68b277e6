"""Cases URL-05 to URL-07 with names: a real gateway, a name server that lies, two web servers.

All of it in network and mount namespaces of its own (`tests.cases.names`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cases.names import NAMES
from tests.e2e.forks import ROOT

Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    if os.geteuid() or not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("needs root, unshare and ip")
    made = subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no namespaces here: {made.stderr.strip()}")
    folder = tmp_path_factory.mktemp("names")
    line = [sys.executable, "-m", "tests.cases.names", str(folder)]
    command = ["unshare", "--net", "--mount", "--", *line]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr + _log(folder)
    return {line["name"]: line for line in map(json.loads, ran.stdout.splitlines())}


def _log(folder: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))


@pytest.mark.parametrize("name", ["honest.example", "rebinds.example"])
def test_url_05_a_name_is_looked_up_once_and_dialled_there(found: Found, name: str) -> None:
    """Whatever the name server says next."""
    seen = found[name]
    assert seen["status"] == 200, seen
    assert (seen["site"], seen["inner"], seen["asked"]) == (1, 0, 1)


@pytest.mark.parametrize("name", ["inner", "mixed", "mixed6", "mapped", "nat64", "link"])
def test_url_05_no_name_leads_inside(found: Found, name: str) -> None:
    seen = found[f"{name}.example"]
    assert seen["status"] == 400
    assert "not on the public internet" in seen["said"]
    assert (seen["site"], seen["inner"]) == (0, 0)


@pytest.mark.parametrize("name", ["redirects.example", "turns.example"])
def test_url_06_a_redirect_is_looked_up_anew(found: Found, name: str) -> None:
    """Also one to the same name, which is somewhere else by now."""
    seen = found[name]
    assert seen["status"] == 400
    assert "not on the public internet" in seen["said"]
    assert (seen["site"], seen["inner"]) == (1, 0)


def test_url_10_a_name_without_an_address(found: Found) -> None:
    seen = found["nothing.example"]
    assert (seen["status"], seen["site"]) == (400, 0)
    assert "can't be resolved" in seen["said"]


def test_url_09_name_servers_that_say_nothing_hold_up_nobody(found: Found) -> None:
    seen = found["after silent ones"]
    assert set(seen["silent"]) <= {"400", "429"}
    assert seen["status"] == 200, seen


def test_all_names_were_asked_for(found: Found) -> None:
    assert found.keys() == {*NAMES, "after silent ones"}
