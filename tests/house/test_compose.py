"""The compose files, judged by the real Docker Compose (which validates without an engine)."""

import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mini_infer.server.app import LAST_WORDS_S
from mini_infer.server.options import OPTIONS

ROOT = Path(__file__).parents[2]
BASE = ROOT / "docker-compose.yml"
GPU = ROOT / "docker-compose.gpu.yml"


def compose(*files: Path, args: tuple[str, ...] = ("config",)) -> subprocess.CompletedProcess[str]:
    """What Docker Compose says. The package's own script hides the exit status, so its binary is called."""
    (folder,) = importlib.util.find_spec("compose").submodule_search_locations
    command = [f"{folder}/docker-compose", *(word for file in files for word in ("-f", str(file))), *args]
    env = {name: value for name, value in os.environ.items() if name not in ("MINI_INFER_PORT", "TORCH_INDEX_URL")}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def server(*files: Path) -> dict[str, Any]:
    told = compose(*files)
    assert told.returncode == 0, told.stderr
    return yaml.safe_load(told.stdout)["services"]["server"]


def seconds(duration: str) -> int:
    minutes, _, rest = duration.rpartition("m")
    return 60 * int(minutes or 0) + int(rest.removesuffix("s") or 0)


@pytest.mark.parametrize("files", [(BASE,), (BASE, GPU)], ids=["base", "gpu"])
def test_files_are_valid(files: tuple[Path, ...]) -> None:
    told = compose(*files, args=("config", "-q"))
    assert (told.returncode, told.stdout, told.stderr) == (0, "", "")


def test_a_broken_file_is_told_apart(tmp_path: Path) -> None:
    broken = tmp_path / "docker-compose.yml"
    broken.write_text(BASE.read_text().replace("healthcheck:", "healthchekc:"))
    assert "healthchekc" in broken.read_text()
    told = compose(broken, args=("config", "-q"))
    assert told.returncode != 0
    assert "healthchekc" in told.stderr


def test_the_base_needs_no_gpu() -> None:
    assert "deploy" not in server(BASE)


def test_the_override_asks_for_gpus_with_one_filter_only() -> None:
    gpu = server(BASE, GPU)
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    # A device filter renumbers the GPUs; CUDA_VISIBLE_DEVICES on top of it would choose wrong ones.
    assert "CUDA_VISIBLE_DEVICES" not in (gpu.get("environment") or {})
    assert "CUDA_VISIBLE_DEVICES" not in (ROOT / "Dockerfile").read_text()


def test_the_port_is_published_on_loopback_only() -> None:
    assert {port["host_ip"] for port in server(BASE)["ports"]} == {"127.0.0.1"}


def test_needs_no_big_shared_memory() -> None:
    assert not {"shm_size", "ipc"} & set(server(BASE))


def test_models_live_in_a_volume() -> None:
    (volume,) = server(BASE)["volumes"]
    assert volume["type"] == "volume"
    assert f"VOLUME {volume['target']}\n" in (ROOT / "Dockerfile").read_text()


def test_the_health_check_is_the_dockerfiles() -> None:
    health = server(BASE)["healthcheck"]
    words = ", ".join(f'"{word}"' for word in health["test"][1:])
    assert f"CMD [{words}]\n" in (ROOT / "Dockerfile").read_text()
    assert f"--start-period={seconds(health['start_period'])}s" in (ROOT / "Dockerfile").read_text()


def test_loading_may_take_as_long_as_the_readme_says() -> None:
    start_s = seconds(server(BASE)["healthcheck"]["start_period"])
    assert f" {start_s} s of loading" in (ROOT / "README.md").read_text()


def test_running_streams_get_their_grace_when_it_stops() -> None:
    defaults = {option.name: option.default for option in OPTIONS}
    needed_s = defaults["grace"] + defaults["propagation"] + LAST_WORDS_S
    assert seconds(server(BASE)["stop_grace_period"]) > needed_s


def test_it_comes_back_after_a_crash() -> None:
    assert server(BASE)["restart"] == "unless-stopped"
