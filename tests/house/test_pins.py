"""The pin files: whole, of one mind with pyproject.toml, and with a floor that is the promised one."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
GROUPS = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
NEEDS = [Requirement(need) for group in GROUPS for need in group]


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[a-z0-9.]+", line) for line in lines)
    return dict(line.split("==") for line in lines)


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-floor.txt"])
@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.name)
def test_every_need_is_pinned_within_its_range(name: str, need: Requirement) -> None:
    assert need.specifier.contains(pins(name)[canonical(need.name)])


def test_floor_is_the_oldest_transformers_that_is_promised() -> None:
    (promised,) = [need for need in NEEDS if need.name == "transformers"]
    floor = pins("constraints-floor.txt")
    assert f">={'.'.join(floor['transformers'].split('.')[:2])}" == str(promised.specifier)
    assert Version(floor["huggingface-hub"]) < Version("2")


def test_stubs_can_be_imported_by_the_oldest_promised_grpcio() -> None:
    generator = pins("constraints-protos.txt")["grpcio-tools"]
    (promised,) = [need for need in NEEDS if need.name == "grpcio"]
    assert str(promised.specifier) == f">={generator}"


def test_torch_is_pinned_without_a_build() -> None:
    # "2.13.0" is met by a CPU build and by a CUDA build alike; "2.13.0+cpu" would shut out the others.
    assert "+" not in pins("constraints.txt")["torch"]
