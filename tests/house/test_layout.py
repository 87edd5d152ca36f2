"""The shape of the house: rooms without a shared roof, files that fit in a head, nothing heavy in the tree."""

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("protos", "engines", "server", "client")
SOURCES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "_pb2" not in path.name]


def files_of_the_project() -> list[Path]:
    """Every file that git has, or would take."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_there_are_sources_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in SOURCES} >= {"engines", "server", "client"}


def test_no_room_claims_the_namespace() -> None:
    # One __init__.py in a mini_infer/ folder would hide the other rooms from every editable install.
    claims = [
        path for path in files_of_the_project() if path.name == "__init__.py" and path.parent.name == "mini_infer"
    ]
    assert not claims


def test_test_folders_are_no_packages() -> None:
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize(
    "room",
    ["protos/mini_infer/v1", "engines/mini_infer/engines", "server/mini_infer/server", "client/mini_infer/client"],
)
def test_each_room_tells_that_it_is_typed(room: str) -> None:
    assert (ROOT / room / "py.typed").is_file()


def test_files_fit_in_a_head() -> None:
    too_long = {str(path): num for path in SOURCES if (num := len(path.read_text().splitlines())) > 400}
    assert not too_long


def test_functions_fit_on_a_screen() -> None:
    sizes = {
        f"{path}:{f.lineno} {f.name}": f.end_lineno - f.lineno + 1
        for path in SOURCES
        for f in functions(path)
        if f.end_lineno
    }
    assert not {name: num for name, num in sizes.items() if num > 60}


def test_every_module_says_what_it_knows() -> None:
    assert not [str(path) for path in SOURCES if not ast.get_docstring(ast.parse(path.read_text()))]


def test_nothing_heavy_is_kept() -> None:
    assert not {str(path): size for path in files_of_the_project() if (size := path.stat().st_size) > 2**20}
