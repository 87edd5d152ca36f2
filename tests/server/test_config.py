"""Settings from flags, environment and file: which one wins, and how each mistake is told."""

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from mini_infer.engines.api import Sampling
from mini_infer.server import options
from mini_infer.server.config import EngineGroup, ServerConfig, load_config
from mini_infer.server.options import OPTIONS, ConfigError


def config(*argv: str, file: Path | None = None, **environ: str) -> ServerConfig:
    words = [*argv, *(["--config", str(file)] if file else [])]
    return load_config(words, environ)


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(text: str) -> Path:
        path = tmp_path / "server.toml"
        path.write_text(inspect.cleandoc(text))
        return path

    return write


def test_defaults() -> None:
    told = config()
    (model,) = told.models
    assert (told.host, told.port, model.pool.max_queue) == ("127.0.0.1", 50051, 256)
    assert (model.pool.model, model.engine.model) == ("smollm2-135m-instruct", "default")
    assert model.groups == (EngineGroup(kind="auto", devices=()),)
    with pytest.raises(AttributeError):
        told.port = 1  # type: ignore[misc]


def test_flags_before_environment_before_file_before_defaults(write: Write) -> None:
    file = write("[server]\nport = 1\nmax_queue = 1\ngrace = 1\nlog_level = 'error'")
    told = config("--port", "3", file=file, MINI_INFER_PORT="2", MINI_INFER_MAX_QUEUE="2")
    assert (told.port, told.models[0].pool.max_queue, told.grace_s, told.log_level) == (3, 2, 1.0, "error")
    assert told.stall_timeout_s == 600


def test_every_option_has_three_names_by_one_rule(write: Write) -> None:
    for option in OPTIONS:
        assert option.flag == "--" + option.name.replace("_", "-")
        assert option.variable == "MINI_INFER_" + option.name.upper()
    values = {"model": "m", "host": "::1", "port": "7", "devices": "cpu,cpu:1", "max_context": "9", "dtype": "float16"}
    flags = [word for name, value in values.items() for word in ("--" + name.replace("_", "-"), value)]
    environ = {"MINI_INFER_" + name.upper(): value for name, value in values.items()}
    file = write(
        "[server]\nmodel = 'm'\nhost = '::1'\nport = 7\ndevices = ['cpu', 'cpu:1']\nmax_context = 9\ndtype='float16'"
    )
    assert config(*flags) == config(**environ) == config(file=file)
    assert config(*flags).models[0].groups == (EngineGroup(devices=("cpu", "cpu:1")),)


def test_the_file_can_be_named_in_the_environment(write: Write) -> None:
    assert config(MINI_INFER_CONFIG=str(write("[server]\nport = 9"))).port == 9


def test_an_empty_variable_says_nothing() -> None:
    assert config(MINI_INFER_PORT="", MINI_INFER_MODEL="") == config()


def test_the_clients_variable_is_none_of_the_servers() -> None:
    assert config(MINI_INFER_ADDRESS="other:1", MY_MINI_INFER="1") == config()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("off", False), ("0", False)])
def test_switches(text: str, value: bool) -> None:
    assert config(MINI_INFER_TRUST_REMOTE_CODE=text).models[0].engine.trust_remote_code is value
    assert config("--trust-remote-code").models[0].engine.trust_remote_code
    assert not config("--no-trust-remote-code", MINI_INFER_TRUST_REMOTE_CODE="1").models[0].engine.trust_remote_code


@pytest.mark.parametrize(
    ("model", "name"),
    [("/models/Some-Model/", "Some-Model"), ("org/Some-Model", "Some-Model"), ("/models/m.gguf", "m.gguf")],
)
def test_a_model_is_called_after_the_last_part_of_its_source(model: str, name: str) -> None:
    assert config("--model", model).models[0].pool.model == name
    assert config("--model", model, "--served-model-name", "mine").models[0].pool.model == "mine"


FULL = """
    [server]
    port = 0
    max_queue = 8
    dtype = "float16"

    [models."one"]
    source = "org/one"
    revision = "v1"
    policy = "pack"
    knee = 2
    max_queue = 4
    sampling = { temperature = 0.7, top_k = 5, seed = 7 }
    [[models."one".engines]]
    kind = "generate"
    devices = ["cuda:0", "cuda:1"]
    [[models."one".engines]]
    devices = ["cpu"]

    [models."two"]
    source = "tiny"
    load_format = "dummy"
    dtype = "float32"
"""


def test_several_models(write: Write) -> None:
    one, two = config(file=write(FULL)).models
    assert (one.pool.model, one.pool.policy, one.pool.knee, one.pool.max_queue) == ("one", "pack", 2, 4)
    assert (one.engine.model, one.engine.revision, one.engine.dtype) == ("org/one", "v1", "float16")
    assert one.engine.default_sampling == Sampling(temperature=0.7, top_k=5, seed=7)
    assert one.groups == (
        EngineGroup(kind="generate", devices=("cuda:0", "cuda:1")),
        EngineGroup(kind="auto", devices=("cpu",)),
    )
    assert (two.pool.max_queue, two.engine.dtype, two.engine.load_format) == (8, "float32", "dummy")


def test_flags_go_before_a_models_own_table(write: Write) -> None:
    one, two = config("--max-queue", "3", "--devices", "cpu", file=write(FULL)).models
    assert (one.pool.max_queue, two.pool.max_queue) == (3, 3)
    assert one.groups == two.groups == (EngineGroup(devices=("cpu",)),)


MISTAKES: list[tuple[list[str], dict[str, str], str]] = [
    (["--foo"], {}, "--foo"),
    (["--por", "1"], {}, "--por"),
    (["word"], {}, "word"),
    (["--port", "x"], {}, "--port must be a whole number, not 'x'"),
    (["--port"], {}, "--port"),
    (["--port", "65536"], {}, "port must be from 0 to 65535, not 65536"),
    (["--grace", "nan"], {}, "grace must be from 0"),
    (["--grace", "-1"], {}, "grace must be from 0"),
    (["--stall-timeout", "0"], {}, "stall_timeout must be above 0"),
    (["--propagation", "inf"], {}, "propagation must be from 0"),
    (["--dtype", "int4"], {}, "--dtype must be one of auto, float32, bfloat16, float16, not 'int4'"),
    (["--load-format", "gguf"], {}, "--load-format must be one of auto, dummy"),
    (["--log-level", "loud"], {}, "--log-level must be one of"),
    (["--policy", "random"], {}, "--policy must be one of"),
    (["--policy", "pack"], {}, "knee"),
    (["--knee", "2"], {}, "knee"),
    (["--max-queue", "0"], {}, "max_queue must be 1 or more, not 0"),
    (["--max-context", "0"], {}, "max_context must be 2 or more, one token of prompt and one of answer, not 0"),
    (["--threads", "0"], {}, "threads must be from 1 to 1024, not 0"),
    (["--model", ""], {}, "model must not be empty"),
    (["--host", ""], {}, "host must not be empty"),
    (["--devices", "gpu"], {}, "device must look like cpu or cuda:0, not 'gpu'"),
    (["--devices", ""], {}, "device must look like cpu or cuda:0, not ''"),
    (["--devices", "cpu,cpu"], {}, "'cpu' is named twice"),
    (["--devices", "cuda:0,cuda"], {}, "named twice"),
    (["--devices", "cuda:1,cuda:01"], {}, "named twice"),
    (["--devices", "cuda:" + "9" * 5000], {}, "device must look like cpu or cuda:0"),
    (["--engine", "fast"], {}, "--engine must be one of"),
    *[
        (["--engine", kind], {}, f"engine '{kind}' is not in this version; use auto, single, generate")
        for kind in ("replica", "pipeline")
    ],
    (["--engine", "single", "--devices", "cpu,cpu:1"], {}, "engine single takes one device, not cpu, cpu:1"),
    (["--max-running", "0"], {}, "max_running must be from 1 to 4096, not 0"),
    (["--cache-tokens", "0"], {}, "cache_tokens must be 1 or more, not 0"),
    (["--prefill-tokens", "-1"], {}, "prefill_tokens must be 1 or more, not -1"),
    ([], {"MINI_INFER_PORT": "x"}, "MINI_INFER_PORT must be a whole number, not 'x'"),
    ([], {"MINI_INFER_TRUST_REMOTE_CODE": "maybe"}, "MINI_INFER_TRUST_REMOTE_CODE must be true or false"),
    ([], {"MINI_INFER_ENGINE": "replica"}, "engine 'replica' is not in this version"),
    ([], {"MINI_INFER_BOGUS": "1"}, "the environment sets 'MINI_INFER_BOGUS', which is no setting"),
    ([], {"MINI_INFER_PRT": ""}, "MINI_INFER_PRT"),
    ([], {"MINI_INFER_a\nb\udcff": "1"}, "which is no setting"),
    (["--config", "/no/such/file.toml"], {}, "/no/such/file.toml: No such file"),
    (["--config", "/"], {}, "/: Is a directory"),
    (["--served-model-name", "a\udcff"], {}, "--served-model-name must be UTF-8 without NUL, not 'a\\udcff'"),
    ([], {"MINI_INFER_MODEL": "\udcff"}, "MINI_INFER_MODEL must be UTF-8"),
]


@pytest.mark.parametrize(("argv", "environ", "words"), MISTAKES)
def test_a_mistake_is_told_in_one_line(argv: list[str], environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(*argv, **environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


FILE_MISTAKES = [
    ("port = 1", "unknown key 'port'"),
    ("[server]\nprot = 1", "[server] unknown key 'prot'"),
    ("[server]\nport = '1'", "[server] port must be a whole number, not '1'"),
    ("[server]\nport = true", "[server] port must be a whole number, not True"),
    ("[server]\ngrace = 'x'", "[server] grace must be a number"),
    ("[server]\ndevices = [1]", "[server] devices must be a list of texts"),
    ("[server]\ntrust_remote_code = 1", "[server] trust_remote_code must be true or false"),
    ("[server]\ndtype = 'int4'", "[server] dtype must be one of"),
    ("server = 1", "[server] must be a table"),
    ("[models]\none = 1", '[models."one"] must be a table'),
    ("[models.one]", '[models."one"] source must be text'),
    (
        "[models.one]\nsource = 'x'\nport = 1",
        "[models.\"one\"] unknown key 'port'; known are source, sampling, engines, ",
    ),
    ("[models.one]\nmodel = 'tiny'", "[models.\"one\"] unknown key 'model': the model to load is named by source"),
    ("[models.one]\nsource = 'x'\nsampling = { heat = 1 }", "sampling unknown key 'heat'; known are temperature, "),
    ("[models.one]\nsource = 'x'\nsampling = { temperature = 'hot' }", "sampling temperature must be a number"),
    ("[models.one]\nsource = 'x'\nsampling = { temperature = 101 }", "sampling temperature must be from 0 to 100"),
    ("[models.one]\nsource = 'x'\nsampling = { top_k = 1.5 }", "sampling top_k must be a whole number"),
    ("[models.one]\nsource = 'x'\nsampling = { seed = -1 }", "sampling seed must be from 0 to"),
    ("[models.one]\nsource = 'x'\nengines = 1", "engines must be a list of tables"),
    ("[models.one]\nsource = 'x'\n[[models.one.engines]]\nkind = 'replica'", "engine 'replica' is not in this version"),
    (
        "[models.one]\nsource = 'x'\n[[models.one.engines]]\nsize = 1",
        "engines unknown key 'size'; known are kind, devices",
    ),
    ("[server]\nmodel = 'x'\n[models.one]\nsource = 'x'", "model cannot be set beside the file's [models]"),
    ("[server\n", "not TOML"),
    ("a = " + 5000 * "[", "not TOML"),
    ("a = " + 5000 * "1", "not TOML"),
    ("[server]\ngrace = 1" + 400 * "0", "[server] grace must be a number"),
    ("[models.one]\nsource = 'x'\nsampling = { temperature = 1" + 400 * "0" + " }", "a number that is too large"),
    ("[server]\nhost = 'unix:a\\u0000'".replace("'", '"'), "[server] host must be UTF-8 without NUL"),
    ('[models.one]\nsource = "a\\u0000"', "source must be UTF-8 without NUL"),
]


@pytest.mark.parametrize(("text", "words"), FILE_MISTAKES)
def test_a_mistake_in_the_file_names_file_and_key(text: str, words: str, write: Write) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        config(file=path)
    assert words in str(caught.value)
    if "engine 'replica'" not in words and "beside" not in words:
        assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        config(file=path)


def test_the_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        config("--help")
    assert caught.value.code == 0
    told = capsys.readouterr().out
    assert all(option.flag in told for option in OPTIONS)


def test_every_option_is_used() -> None:
    source = Path(options.__file__).with_name("config.py").read_text()
    assert all(f'settings["{option.name}"]' in source for option in OPTIONS)


def test_what_kubernetes_says_of_a_service_of_our_name_is_no_setting() -> None:
    links = {
        "MINI_INFER_SERVICE_HOST": "10.0.0.7",
        "MINI_INFER_SERVICE_PORT": "50051",
        "MINI_INFER_SERVICE_PORT_GRPC": "50051",
        "MINI_INFER_PORT": "tcp://10.0.0.7:50051",
        "MINI_INFER_PORT_50051_TCP": "tcp://10.0.0.7:50051",
        "MINI_INFER_PORT_50051_TCP_ADDR": "10.0.0.7",
        "MINI_INFER_SERVER_PORT": "tcp://10.0.0.8:50051",
    }
    assert load_config([], links).port == 50051
    assert load_config([], {**links, "MINI_INFER_PORT": "8000"}).port == 8000
