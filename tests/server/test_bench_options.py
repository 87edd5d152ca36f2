"""The command line of `bench`: its own options beside the server's, and how each mistake is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from mini_infer.server.bench.options import MEASUREMENTS, OPTIONS, read_options
from mini_infer.server.options import OPTIONS as SERVER_OPTIONS
from mini_infer.server.options import ConfigError

ROOT = Path(__file__).parents[2]


def test_defaults() -> None:
    told = read_options([], {})
    assert (told.streams, told.prompt_tokens, told.new_tokens, told.rounds) == ((1, 8), 128, 64, 3)
    assert (told.prefix_tokens, told.only, told.json) == (1024, MEASUREMENTS, None)
    assert told.model.engine.model == "default"


def test_its_own_options_and_the_servers_go_together(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    argv = ["--streams", "2,16", "--model", "tiny", "--load-format=dummy", "--new-tokens", "5", "--threads", "3"]
    told = read_options([*argv, "--only", "prefix,grpc", "--json", str(file), "--devices", "cpu:1"], {})
    assert (told.streams, told.new_tokens, told.only, told.json) == ((2, 16), 5, ("prefix", "grpc"), file)
    engine = told.model.engine
    assert (engine.model, engine.load_format, engine.num_threads) == ("tiny", "dummy", 3)
    assert told.model.groups[0].devices == ("cpu:1",)


def test_the_servers_environment_counts() -> None:
    told = read_options(["--rounds", "1"], {"MINI_INFER_MODEL": "tiny", "MINI_INFER_PORT": "7"})
    assert told.model.engine.model == "tiny"


def test_no_option_has_two_meanings() -> None:
    assert not {option.name for option in OPTIONS} & {option.name for option in SERVER_OPTIONS}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--streams", "0"], ["--streams", "from 1 to", "not 0"]),
        (["--streams", "1,x"], ["--streams", "not x"]),
        (["--rounds", "0"], ["--rounds", "from 1"]),
        (["--new-tokens", "x"], ["--new-tokens", "whole number", "'x'"]),
        (["--only", "engine,speed"], ["--only", "engine, grpc, prefix", "'speed'"]),
        (["--json", "/no/such/folder/x.json"], ["--json /no/such/folder/x.json", "no file"]),
        (["--json", "/"], ["--json /", "no file"]),
        (["--json"], ["--json", "expected one argument", "bench --help"]),
        (["--port", "1"], ["--port has no say"]),
        (["--stream", "1"], ["--stream"]),
        (["engine"], ["unrecognized arguments: engine"]),
        (["--devices", "cpu,cpu:1"], ["one engine on one device"]),
    ],
)
def test_a_wrong_option_is_told(argv: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as told:
        read_options(argv, {})
    assert all(word in str(told.value) for word in words), told.value
    assert "\n" not in str(told.value)


def test_one_model_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text("[models.a]\nsource = 'default'\n[models.b]\nsource = 'default'\n")
    with pytest.raises(ConfigError, match="one model, and the configuration names 2"):
        read_options(["--config", str(file)], {})


def test_help_names_every_option_and_loads_no_torch() -> None:
    program = (
        "import sys; from mini_infer.server.__main__ import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'grpc'} & set(sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", program, "bench", "--help"], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert all(option.flag in told.stdout for option in OPTIONS)


def test_the_readme_tells_its_options() -> None:
    section = (ROOT / "README.md").read_text().split("\n## Measuring\n")[1].split("\n## ")[0]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert told[2:] == [
        [f"`{option.flag}`", f"`{option.default}`" if option.default else "", option.help] for option in OPTIONS
    ]
