"""From a configuration to the server that it asks for. The place where the server meets torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mini_infer.engines.api import Engine
from mini_infer.engines.auto_engine import AutoEngine
from mini_infer.engines.config import EngineConfig
from mini_infer.engines.devices import default_device, resolve_device
from mini_infer.engines.generate_engine import GenerateEngine
from mini_infer.engines.llm_engine import LLMEngine
from mini_infer.server.app import App
from mini_infer.server.config import EngineGroup, ModelConfig, ServerConfig
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import Pool
from mini_infer.server.server_info import version


def build_app(config: ServerConfig) -> App:
    """The server, not started. Raises `LoadError` where a device is not of this machine."""
    dispatcher = Dispatcher([_pool(model) for model in config.models], stall_timeout_s=config.stall_timeout_s)
    return App(
        dispatcher, host=config.host, port=config.port, grace_s=config.grace_s, propagation_s=config.propagation_s
    )


def decisions(config: ServerConfig) -> Iterator[str]:
    """What will be served and how, line by line, with the reason of each choice."""
    yield (
        f"version {version()}, grace {config.grace_s:g} s, propagation {config.propagation_s:g} s, "
        f"stall timeout {config.stall_timeout_s:g} s"
    )
    for model in config.models:
        pool, engine = model.pool, model.engine
        knee = "" if pool.knee is None else f" with knee {pool.knee}"
        yield (
            f"model {pool.model}: source {engine.model}, load format {engine.load_format}, dtype {engine.dtype}, "
            f"policy {pool.policy}{knee}, queue of {pool.max_queue}"
        )
        for group in model.groups:
            where = "as asked" if group.devices else "the first CUDA device, else the CPU"
            yield f"model {pool.model}: engine {_KINDS[group.kind]} on {', '.join(_devices(group))} ({where})"


_KINDS = {
    "auto": "auto (batching where that is exact for the model, else model.generate)",
    "single": "single (batching, as asked)",
    "generate": "generate (model.generate, as asked)",
}


def _pool(config: ModelConfig) -> Pool:
    places = [(group.kind, label) for group in config.groups for label in _devices(group)]
    engines = [
        make_engine(kind, replace(config.engine, device=label), f"{config.pool.model}/{index}")
        for index, (kind, label) in enumerate(places)
    ]
    return Pool(config=config.pool, engines=engines)


def make_engine(kind: str, config: EngineConfig, engine_id: str) -> Engine:
    """An engine of a configured kind, not started."""
    if kind == "generate":
        return GenerateEngine(config, engine_id)
    return LLMEngine(config, engine_id) if kind == "single" else AutoEngine(config, engine_id)


def _devices(group: EngineGroup) -> tuple[str, ...]:
    labels = group.devices or (default_device(),)
    for label in labels:
        resolve_device(label)
    return labels
