"""`mini-infer-server bench` as a process: every measurement once, at a size that says nothing about speed."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
from support.process import TINY

COMMAND = [sys.executable, "-m", "mini_infer.server", "bench", *TINY, "--threads", "1"]
SMALL = ["--streams", "1,2", "--prompt-tokens", "6", "--new-tokens", "3", "--rounds", "1", "--prefix-tokens", "40"]
WAIT_S = 100


def bench(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *argv], capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_every_measurement_is_told_and_written(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    told = bench(*SMALL, "--json", str(path))
    assert told.returncode == 0, told.stderr
    lines = told.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if ": " in line and " " not in line.split(":")[0]] == [
        "engine",
        "grpc",
        "prefix",
    ]
    data = json.loads(path.read_text())
    facts = data["facts"]
    assert facts["command"].startswith("mini-infer-server bench --model tiny ")
    assert {"machine", "device", "python", "torch", "transformers", "mini-infer", "engine"} <= set(facts)
    assert (facts["model"], facts["dtype"], facts["threads"]) == ("tiny", "float32", 1)
    assert facts["engine"] == "replica, up to 16 streams at once"
    assert any(line.split() == ["torch", facts["torch"]] for line in lines)
    sides = {each["name"]: [side["name"] for side in each["comparisons"][0]["sides"]] for each in data["measurements"]}
    assert sides == {"engine": ["engine", "plain"], "grpc": ["grpc", "engine"], "prefix": ["new", "known"]}
    assert [pair["streams"] for pair in data["measurements"][0]["comparisons"]] == [1, 2]
    for measurement in data["measurements"]:
        for pair in measurement["comparisons"]:
            # With so few tokens a stream may end before another has begun: then there is no decode phase of all.
            told = {name: ratio for name, ratio in pair["ratios"].items() if name != "decode_tokens_per_s"}
            assert told
            assert all(ratio > 0 for ratio in told.values())


def test_what_does_not_work_is_one_line() -> None:
    told = bench("--prompt-tokens", "5000", "--log-level", "error", "--only", "engine")
    (line,) = told.stderr.splitlines()
    assert line.startswith("mini-infer-server: error: the context of ")
    assert told.returncode == 1
    told = bench("--rounds", "0")
    (line,) = told.stderr.splitlines()
    assert line == "mini-infer-server: error: --rounds must be from 1 to 1000000, not 0"
    assert (told.returncode, told.stdout) == (2, "")


def test_a_signal_ends_the_server_too() -> None:
    process = subprocess.Popen(
        [*COMMAND, "--only", "grpc", "--rounds", "100000"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    for line in process.stderr:
        if "grpc" in line and "round" in line:
            break
    children = psutil.Process(process.pid).children()
    assert len(children) == 1
    process.send_signal(signal.SIGTERM)
    assert "Traceback" not in process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 128 + signal.SIGTERM
    assert not psutil.wait_procs(children, timeout=WAIT_S)[1]
