"""The command: builds the two sides of each measurement, one after the other, and reports. Measures nothing itself."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from mini_infer.engines.api import ModelInfo, Sampling
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.devices import default_device
from mini_infer.engines.errors import MiniInferError
from mini_infer.engines.model import load_model
from mini_infer.server.bench.engine_side import EngineSide, running
from mini_infer.server.bench.facts import facts_of
from mini_infer.server.bench.figures import Measurement
from mini_infer.server.bench.grpc_side import GrpcSide
from mini_infer.server.bench.measure import OWN_TOKENS, compare_prefix, compare_streams
from mini_infer.server.bench.options import BenchOptions
from mini_infer.server.bench.plain_side import PlainSide
from mini_infer.server.bench.prompts import Prompts
from mini_infer.server.bench.report import Report
from mini_infer.server.bench.server_process import running_server
from mini_infer.server.bench.side import BenchError, Side
from mini_infer.server.build import make_engine
from mini_infer.server.run import EXIT_FAILED, complain

CACHE_BLOCK_TOKENS = 64
"""What a stream may waste of the cache by filling its last block in part; no less than the size of a block."""


def run_bench(options: BenchOptions) -> int:
    """Measures and reports. Returns an exit code; what goes wrong is one line on stderr."""
    signal.signal(signal.SIGINT, _leave)
    signal.signal(signal.SIGTERM, _leave)
    report = Report(options.json)
    measure = {"engine": _engine, "grpc": _grpc, "prefix": _prefix}
    try:
        for name in options.only:
            report.add(measure[name](options, report))
            gc.collect()
            torch.cuda.empty_cache()  # the server process of the next measurement may need what this one had
    except (BenchError, MiniInferError, OSError) as error:
        complain(error)
        return EXIT_FAILED
    return 0


def _leave(number: int, _: object) -> None:
    """Unwinds, so that no server is left behind."""
    raise SystemExit(128 + number)


def _engine(options: BenchOptions, report: Report) -> Measurement:
    with ExitStack() as stack:
        config = _config(options, prefix_cache=False)
        plain = PlainSide(load_model(config))  # weights of its own: an engine may change how its model attends
        engine = stack.enter_context(_running_engine(options, config, report))
        title = "the engine against model.generate with one batch, each with the same weights of its own"
        return _compare("engine", title, (engine, plain), engine.engine.text.info, options)


def _grpc(options: BenchOptions, report: Report) -> Measurement:
    with ExitStack() as stack:
        config = _config(options, prefix_cache=False)
        engine = stack.enter_context(_running_engine(options, config, report))
        server = running_server(config, options.model.groups[0].kind, max(options.streams))
        grpc = stack.enter_context(GrpcSide(stack.enter_context(server)))
        title = "a server process over gRPC against the same engine called directly"
        return _compare("grpc", title, (grpc, engine), engine.engine.text.info, options)


def _prefix(options: BenchOptions, report: Report) -> Measurement:
    with _running_engine(options, _config(options, prefix_cache=True), report) as engine:
        info = engine.engine.text.info
        _require_room(info, options.prefix_tokens + OWN_TOKENS, 1)
        return compare_prefix(
            engine, Prompts(info.vocab_size), prefix_tokens=options.prefix_tokens, rounds=options.rounds
        )


def _compare(name: str, title: str, sides: tuple[Side, Side], info: ModelInfo, options: BenchOptions) -> Measurement:
    _require_room(info, options.prompt_tokens, options.new_tokens)
    return compare_streams(
        name,
        title,
        sides,
        Prompts(info.vocab_size),
        streams=options.streams,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        rounds=options.rounds,
    )


@contextmanager
def _running_engine(options: BenchOptions, config: EngineConfig, report: Report) -> Iterator[EngineSide]:
    with running(make_engine(options.model.groups[0].kind, config, "bench/0")) as side:
        report.begin(facts_of(options, config, side.engine))
        yield side


def _config(options: BenchOptions, *, prefix_cache: bool) -> EngineConfig:
    """What was asked for, on one device, without an operator's sampling, with room for what will run.

    By default an engine takes all of a GPU's free memory, and there is somebody beside it here.
    """
    config = options.model.engine
    labels = options.model.groups[0].devices or (default_device(),)
    return replace(
        config,
        device=labels[0],
        default_sampling=Sampling(),
        prefix_cache=prefix_cache,
        cache_tokens=config.cache_tokens or 2 * _tokens_at_once(options),
    )


def _tokens_at_once(options: BenchOptions) -> int:
    """The most that any measurement has in the cache at the same time."""
    streams = max(options.streams) * (options.prompt_tokens + options.new_tokens + CACHE_BLOCK_TOKENS)
    return max(streams, options.prefix_tokens + OWN_TOKENS + CACHE_BLOCK_TOKENS)


def _require_room(info: ModelInfo, prompt_tokens: int, new_tokens: int) -> None:
    if prompt_tokens + new_tokens > info.context_length:
        raise BenchError(
            f"the context of {info.context_length} tokens does not hold {prompt_tokens} of prompt and {new_tokens} new"
        )
