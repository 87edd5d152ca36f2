"""The server process over a scripted engine: `python scripted_server.py '{"step_s": 0.1}'` with a `Script`'s fields.

Two fields are ours: ``load_s`` holds up the load, ``grace_s`` is the time that streams get at shutdown.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys

from mini_infer.engines.scripted_engine import Script, ScriptedEngine
from mini_infer.server.app import App
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.server.run import run


async def serve(load_s: float = 0.0, grace_s: float = 10.0, max_running: int = 8, **script: object) -> int:
    engine = ScriptedEngine(scripts=Script(**script), load_s=load_s, max_running=max_running)
    dispatcher = Dispatcher([Pool(config=PoolConfig(model="scripted"), engines=[engine])])
    return await run(App(dispatcher, grace_s=grace_s))


if __name__ == "__main__":
    logging.basicConfig(level="INFO", stream=sys.stderr)
    sys.exit(asyncio.run(serve(**json.loads(sys.argv[1]))))
