"""What is installed: commands that tell the one version, and a wheel that holds every room and the stubs."""

import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TRAVELS = (".py", ".pyi", ".typed", ".proto", ".jinja")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names in a wheel built from this tree, by the backend that is already installed."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def installed() -> bool:
    try:
        return bool(metadata.version(PROJECT["name"]))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.parametrize("module", ["mini_infer.server", "mini_infer.client"])
def test_version_is_the_projects(module: str) -> None:
    if not installed():
        pytest.skip("runs from a source tree, which has no version")
    told = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.split()[-1] == PROJECT["version"]


def test_commands_are_those_of_the_readme() -> None:
    assert set(PROJECT["scripts"]) == {"mini-infer", "mini-infer-server"}


@pytest.mark.parametrize("room", ["protos", "engines", "server", "client"])
def test_wheel_holds_every_file_of_a_room(wheel: set[str], room: str) -> None:
    there = {str(path.relative_to(ROOT / room)) for path in (ROOT / room).rglob("*") if path.suffix in TRAVELS}
    assert there
    assert there <= wheel


def test_wheel_holds_stubs_types_and_nothing_foreign(wheel: set[str]) -> None:
    for room in ("v1", "engines", "server", "client"):
        assert f"mini_infer/{room}/py.typed" in wheel
    for stub in ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"):
        assert {f"mini_infer/v1/generation{stub}", f"mini_infer/v1/admin{stub}"} <= wheel
    assert {name.split("/")[0] for name in wheel} == {"mini_infer", f"mini_infer-{PROJECT['version']}.dist-info"}
    assert "mini_infer/__init__.py" not in wheel


def test_the_base_is_a_light_client() -> None:
    heavy = ("torch", "transformers", "accelerate", "numpy", "gguf")
    assert not [need for need in PROJECT["dependencies"] if need.startswith(heavy)]
