"""The Dockerfile without an engine: what it must say, and its own commands run, as they stand, where nothing is."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IGNORED_WITHOUT = {"Dockerfile", "docker-compose.yml", "tests", ".git", ".venv", "Makefile"}


def instructions() -> list[tuple[str, str]]:
    """(word, rest) of each instruction, comments and line ends taken out."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]


def said(word: str) -> list[str]:
    return [rest for first, rest in instructions() if first == word]


def exec_form(text: str) -> list[str]:
    """The JSON list that an exec form is; fails for a shell form, whose shell would keep signals to itself."""
    return json.loads(text[text.index("[") :])


def test_stops_and_starts_as_a_container_should() -> None:
    assert said("STOPSIGNAL") == ["SIGTERM"]
    assert exec_form(said("ENTRYPOINT")[0]) == ["mini-infer-server"]
    assert said("EXPOSE") == ["50051"]
    assert said("VOLUME")


def test_does_not_run_as_root() -> None:
    assert said("USER")[-1] not in ("root", "0")
    last_user = max(i for i, (word, _) in enumerate(instructions()) if word == "USER")
    assert last_user < [word for word, _ in instructions()].index("ENTRYPOINT")


def test_says_which_torch_by_argument() -> None:
    assert said("ARG") == ["TORCH_INDEX_URL="]
    # The first installation decides; what needs torch later finds it there.
    assert '--extra-index-url "$TORCH_INDEX_URL"} torch' in said("RUN")[0]


def test_copies_only_what_dockerignore_lets_through() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    sources = {name for rest in said("COPY") for name in rest.split()[:-1]}
    assert sources <= {line[1:] for line in lines if line.startswith("!")}
    assert not sources & IGNORED_WITHOUT


def test_base_is_a_python_that_the_project_takes() -> None:
    (image,) = said("FROM")
    assert tuple(map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim", image).groups())) >= (3, 11)


class Container:
    """Stands in for the running image: a fresh virtual environment and folder, filled by the Dockerfile's commands."""

    def __init__(self, folder: Path) -> None:
        self.app = folder / "app"
        self.env_bin = folder / "venv" / "bin"
        self.port = free_port()
        kept = {name: os.environ[name] for name in os.environ if name.startswith("PIP_") or name in ("HOME", "TMPDIR")}
        self.environ = kept | {"PATH": f"{self.env_bin}:/usr/bin:/bin"}
        self.moves = {"/var/cache/mini-infer": str(folder / "cache"), "0.0.0.0": "127.0.0.1", "50051": str(self.port)}

    def build(self) -> None:
        """COPY as told, and every RUN that installs; users and folders of the image have no place here."""
        subprocess.run([sys.executable, "-m", "venv", self.env_bin.parent], check=True)
        self.app.mkdir()
        for word, rest in instructions():
            if word == "COPY":
                *sources, target = rest.split()
                subprocess.run(["cp", "-r", *sources, self.app / target], cwd=ROOT, check=True)
            elif word == "ENV":
                self.environ |= dict(
                    self.here(part).split("=", 1) for part in shlex.split(rest) if "NO_CACHE" not in part
                )
            elif word == "RUN" and rest.startswith(("pip ", "python ", "mini-infer")):
                self.run(["sh", "-c", self.here(rest)], check=True, stdout=subprocess.DEVNULL)

    def here(self, text: str) -> str:
        """A text of the Dockerfile with its paths, address and port moved to where this one may use them."""
        for there, here in self.moves.items():
            text = text.replace(there, here)
        return text

    def run(self, command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=self.app, env=self.environ, text=True, **options)

    def start(self, **environ: str) -> subprocess.Popen[str]:
        command = [self.here(word) for word in exec_form(said("ENTRYPOINT")[0])]
        command[0] = str(self.env_bin / command[0])
        return subprocess.Popen(command, cwd=self.app, env=self.environ | environ, text=True, stdout=subprocess.PIPE)

    def probe(self) -> int:
        command = [self.here(word) for word in exec_form(said("HEALTHCHECK")[0])]
        return self.run([str(self.env_bin / command[0]), *command[1:]], check=False, timeout=30).returncode


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def container(tmp_path_factory: pytest.TempPathFactory) -> Container:
    made = Container(tmp_path_factory.mktemp("image"))
    made.build()
    return made


@pytest.fixture
def running(container: Container, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The server, slow to load: it finds no model that was made ready when the image was built."""
    process = container.start(MINI_INFER_CACHE_DIR=str(tmp_path))
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


@pytest.mark.full
@pytest.mark.timeout(900)
def test_image_holds_the_default_model_ready_to_load(container: Container) -> None:
    (weights,) = Path(container.moves["/var/cache/mini-infer"]).rglob("model.safetensors")
    assert weights.stat().st_size > 2**20


@pytest.mark.full
@pytest.mark.timeout(900)
def test_probe_fails_while_nothing_listens(container: Container) -> None:
    assert container.probe() == 1


@pytest.mark.full
@pytest.mark.timeout(900)
def test_probe_follows_the_server_from_loading_to_stop(container: Container, running: subprocess.Popen[str]) -> None:
    wait_for_line(running, " listening on ")
    assert container.probe() == 1  # bound, its model still loading
    wait_for_line(running, " serving on ")
    assert container.probe() == 0
    running.send_signal(getattr(signal, said("STOPSIGNAL")[0]))
    assert running.wait(60) == 0
    assert container.probe() == 1


def wait_for_line(process: subprocess.Popen[str], part: str) -> None:
    """Read what the server says up to the line that holds ``part``; the test's own time limit ends a wait in vain."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if part in line:
            return
    raise AssertionError(f"ended without saying {part!r}: {seen}")
