"""What may never be in the code: ways to run what somebody sends."""

from __future__ import annotations

import ast

import pytest

from tests.tracked import tracked
from tests.unit.test_policy_repository import STAGES

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {
    "eval", "exec", "compile", "__import__",
    "os.system", "os.popen", "torch.load", "numpy.load", "np.load", "yaml.load",
}  # fmt: skip
PACKAGES = ("epd", *STAGES)


def faults_of(source: str) -> list[str]:
    """What is banned in a module's text."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [name for name in names if name.partition(".")[0] in BANNED_MODULES]
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in BANNED_CALLS:
                found.append(f"{name}()")
            for keyword in node.keywords:
                value = keyword.value
                true = isinstance(value, ast.Constant) and value.value is True
                if keyword.arg in ("shell", "trust_remote_code", "allow_pickle") and true:
                    found.append(f"{keyword.arg}=True")
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_runs_what_somebody_sends(package: str) -> None:
    modules = tracked(f"{package}/*.py")
    assert modules
    faults = {str(path): found for path in modules if (found := faults_of(path.read_text()))}
    assert not faults


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.x; torch.load(f)",
        "eval('1')",
        "subprocess.run(x, shell=True)",
        "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_check_finds_it(line: str) -> None:
    assert faults_of(line)


def test_names_of_code_never_come_from_the_wire() -> None:
    """`import_module` takes names from one file only, which gets them from our own code."""
    users = [
        path
        for package in PACKAGES
        for path in tracked(f"{package}/*.py")
        if "import_module" in path.read_text()
    ]
    assert [path.name for path in users] == ["sandbox_worker.py"]
    calls = [
        ast.unparse(node.args[0])
        for package in PACKAGES
        for path in tracked(f"{package}/*.py")
        if "Sandbox" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Sandbox") and node.args
    ]
    assert calls
    assert all(call.startswith("'") for call in calls), calls
