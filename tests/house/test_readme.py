"""The README is true: its commands exist, its example runs, its tables are the code's, its links lead somewhere."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.process import TINY, ServerProcess, running_server

from mini_infer.engines import errors as engine_errors
from mini_infer.engines.errors import MiniInferError
from mini_infer.server.errors import CODES
from mini_infer.server.options import OPTIONS, Option

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
UNSEEN = {"LoadError": "ends the server's start", "MiniInferError": "the root"}


def fenced(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def section(title: str) -> str:
    return re.search(rf"^#+ {title}\n(.*?)(?=^## |\Z)", README, flags=re.MULTILINE | re.DOTALL).group(1)


def rows(title: str) -> list[list[str]]:
    """The cells of the table in a section, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture(scope="module")
def tiny() -> Iterator[ServerProcess]:
    with running_server(*TINY) as server:
        yield server


def test_its_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set(re.findall(r"(?:^    |`|^)make ([a-z-]+)", README, flags=re.MULTILINE))
    assert {"demo", "test", "test-full", "check"} <= named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text())
    assert not [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_its_python_example_runs(tiny: ServerProcess) -> None:
    example, _ = fenced("python")
    assert 'Client("localhost:50051")' in example
    program = example.replace("localhost:50051", tiny.address)
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert re.search(r"\n\d+ ms to the first token\n$", told.stdout)


def test_its_offline_example_runs() -> None:
    _, example = fenced("python")
    assert 'EngineConfig(model="default")' in example
    program = example.replace('model="default"', 'model="tiny", load_format="dummy", num_threads=1')
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr
    assert len(told.stdout.splitlines()) >= 2


def test_its_client_commands_exist() -> None:
    commands = {
        shlex.split(line, comments=True)[1]
        for line in "".join(fenced("sh")).splitlines()
        if line.startswith("mini-infer ")
    }
    assert commands == {"generate", "chat", "models", "engines", "health"}
    for command in commands:
        told = subprocess.run(
            [sys.executable, "-m", "mini_infer.client", command, "--help"], capture_output=True, check=False
        )
        assert told.returncode == 0


def row(option: Option) -> list[str]:
    default = (
        ""
        if option.default in (None, ())
        else f"`{str(option.default).lower() if option.kind is bool else option.default}`"
    )
    choices = f" ({', '.join(f'`{choice}`' for choice in option.choices)})" if option.choices else ""
    return [f"`{option.flag}`", default, option.help + choices]


def test_its_table_of_settings_is_the_servers() -> None:
    assert rows("Configuration")[: len(OPTIONS)] == [row(option) for option in OPTIONS]


def test_its_table_of_errors_is_the_servers() -> None:
    told = {reason: cells[1].strip("`") for cells in rows("Errors") for reason in re.findall(r"`(\w+)`", cells[2])}
    for error in vars(engine_errors).values():
        if (
            isinstance(error, type)
            and issubclass(error, MiniInferError)
            and "reason" in vars(error)
            and error.__name__ not in UNSEEN
        ):
            code = next(CODES[cls] for cls in error.__mro__ if cls in CODES)
            assert told.get(error.reason) == code.name


def test_its_tree_shows_what_is_there() -> None:
    folders: list[str] = []
    (tree,) = re.findall(r"^```\n(.*?)^```$", section("The house"), flags=re.MULTILINE | re.DOTALL)
    for line in tree.splitlines():
        indent, name = re.match(r"( *)(\S+)", line).groups()
        folders[len(indent) // 2 :] = [name]
        assert (ROOT / "".join(folders)).exists(), line


def test_its_example_file_is_one_that_the_server_takes(tmp_path: Path) -> None:
    from mini_infer.server.config import load_config

    (example,) = fenced("toml")
    path = tmp_path / "server.toml"
    path.write_text(example)
    config = load_config(["--config", str(path)], {})
    assert (config.port, config.grace_s) == (50051, 20.0)
