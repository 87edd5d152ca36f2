"""AdminService over a real channel."""

import grpc
import pytest
from support.dispatching import until
from support.serving import outcome, serving

from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.v1 import admin_pb2, generation_pb2


async def test_engines_are_shown_as_they_are() -> None:
    gate = Gate(2)
    engine = ScriptedEngine("m/0", Script(tokens=["a"], repeat=True, gate=gate), max_running=2, devices=("cpu:1",))
    async with serving(engine, model="m") as served:
        (idle,) = (await served.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
        assert (idle.engine_id, idle.model, list(idle.devices)) == ("m/0", "m", ["cpu:1"])
        assert (idle.kind, idle.state) == (generation_pb2.ENGINE_KIND_SCRIPTED, admin_pb2.ENGINE_STATE_READY)
        assert (idle.num_running, idle.num_waiting, idle.max_running, idle.generated_tokens) == (0, 0, 2, 0)
        assert not idle.HasField("since_last_token")
        calls = [served.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="x")) for _ in range(3)]
        for call in calls:
            await call.initial_metadata()
        await until(lambda: engine.stats().generated_tokens == 2)
        (busy,) = (await served.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
        assert (busy.num_running, busy.num_waiting, busy.generated_tokens) == (2, 1, 2)
        assert busy.since_last_token.ToNanoseconds() > 0
        for call in calls:
            call.cancel()
        await served.idle()


async def test_a_failed_engine_says_why() -> None:
    async with serving(ScriptedEngine(scripts=Script(fail_at=1, error=RuntimeError("CUDA error")))) as served:
        await outcome(served.generation.GenerateStream(generation_pb2.GenerateRequest(prompt="x")))
        (engine,) = (await served.admin.ListEngines(admin_pb2.ListEnginesRequest())).engines
    assert engine.state == admin_pb2.ENGINE_STATE_FAILED
    assert "CUDA error" in engine.failure


@pytest.mark.parametrize("method", ["WatchEngines", "DrainEngine", "ResumeEngine"])
async def test_what_is_not_here_yet_says_so(method: str) -> None:
    async with serving() as served:
        request = getattr(admin_pb2, f"{method}Request")()
        told = await outcome(getattr(served.admin, method)(request))
    assert told.code is grpc.StatusCode.UNIMPLEMENTED
    assert method in told.message
