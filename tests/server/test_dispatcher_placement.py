"""Which engine serves a stream, and the reason that it is told."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.dispatching import ManualEngine, engine_ids, make_call, make_pool, placed, serving, until

from mini_infer.engines.api import EngineKind, EngineState
from mini_infer.engines.errors import LoadError, NoReadyEngine
from mini_infer.server import placement
from mini_infer.server.call import PlacementReason
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.server.stream import Stream


def engines(number: int, **settings: Any) -> list[ManualEngine]:
    return [ManualEngine(f"e/{position}", **({"max_running": 4} | settings)) for position in range(number)]


async def put(dispatcher: Dispatcher, **fields: Any) -> Stream:
    stream = dispatcher.enter(make_call(**fields))
    await placed(stream)
    return stream


def reason(stream: Stream) -> PlacementReason:
    assert stream.served_by is not None
    return stream.served_by.reason


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"policy": "least_loaded"}, ["e/0", "e/1", "e/0", "e/1", "e/0", "e/1", "e/0", "e/1"]),
        ({"policy": "round_robin"}, ["e/0", "e/1", "e/0", "e/1", "e/0", "e/1", "e/0", "e/1"]),
        ({"policy": "pack", "knee": 2}, ["e/0", "e/0", "e/1", "e/1", "e/0", "e/1", "e/0", "e/1"]),
        ({"policy": "pack", "knee": 9}, ["e/0", "e/0", "e/0", "e/0", "e/1", "e/1", "e/1", "e/1"]),
    ],
)
async def test_policies_end_to_end(config: dict[str, Any], expected: list[str]) -> None:
    async with serving(make_pool(*engines(2), **config)) as dispatcher:
        streams = [await put(dispatcher) for _ in range(8)]
        assert engine_ids(streams) == expected
        assert {reason(stream) for stream in streams} == {PlacementReason(config["policy"])}


async def test_least_loaded_sees_slots_come_free() -> None:
    first, second = engines(2)
    async with serving(make_pool(first, second)) as dispatcher:
        streams = [await put(dispatcher) for _ in range(4)]
        for stream in streams:
            if stream.key in second.held:
                second.finish(stream.key)
        await until(lambda: dispatcher.engines[1].num_running == 0)
        assert engine_ids([await put(dispatcher), await put(dispatcher)]) == ["e/1", "e/1"]


async def test_the_only_engine_is_called_that() -> None:
    async with serving(make_pool(*engines(1), policy="round_robin")) as dispatcher:
        assert reason(await put(dispatcher)) is PlacementReason.ONLY_ENGINE
        assert reason(await put(dispatcher, engine_id="e/0")) is PlacementReason.PINNED


async def test_a_pin_is_kept_and_waited_for_without_holding_up_others() -> None:
    first, second = engines(2, max_running=1)
    async with serving(make_pool(first, second)) as dispatcher:
        holder = await put(dispatcher, engine_id="e/0")
        pinned = [dispatcher.enter(make_call(engine_id="e/0")) for _ in range(2)]
        await asyncio.gather(*(stream.prepare() for stream in pinned))
        behind = await put(dispatcher)
        assert engine_ids([holder, *pinned, behind]) == ["e/0", None, None, "e/1"]
        first.finish(holder.key)
        await until(lambda: pinned[0].served_by is not None)
        assert (reason(pinned[0]), pinned[1].served_by) == (PlacementReason.PINNED, None)


async def test_a_kind_is_a_pin_to_all_engines_of_that_kind() -> None:
    pool = make_pool(
        ManualEngine("g", kind=EngineKind.GENERATE),
        ManualEngine("r/0", kind=EngineKind.REPLICA),
        ManualEngine("r/1", kind=EngineKind.REPLICA),
    )
    async with serving(pool) as dispatcher:
        streams = [await put(dispatcher, engine_kind=EngineKind.REPLICA) for _ in range(2)]
        assert engine_ids(streams) == ["r/0", "r/1"]
        assert {reason(stream) for stream in streams} == {PlacementReason.PINNED}
        third = dispatcher.enter(make_call(engine_kind=EngineKind.REPLICA))
        await third.prepare()
        assert third.served_by is None


async def test_a_pin_to_an_engine_that_is_not_ready_is_refused() -> None:
    ready, dead, loading = ManualEngine("a"), ManualEngine("b"), ManualEngine("c", loads=False)
    async with serving(make_pool(ready, dead, loading), ready=False) as dispatcher:
        await until(lambda: dispatcher.engines[1].state is EngineState.READY)
        dead.die()
        await until(lambda: dispatcher.engines[1].state is EngineState.FAILED)
        for engine_id in ("b", "c"):
            with pytest.raises(NoReadyEngine):
                dispatcher.enter(make_call(engine_id=engine_id))
        assert engine_ids([await put(dispatcher)]) == ["a"]


async def test_a_session_returns_to_its_engine_while_that_has_room_and_moves_with_it() -> None:
    first, second = engines(2, max_running=2)
    async with serving(make_pool(first, second)) as dispatcher:
        one = await put(dispatcher, session_id="s")
        two = await put(dispatcher, session_id="s")
        assert engine_ids([one, two]) == ["e/0", "e/0"]
        assert (reason(one), reason(two)) == (PlacementReason.LEAST_LOADED, PlacementReason.SESSION)
        moved = await put(dispatcher, session_id="s")
        assert (engine_ids([moved]), reason(moved)) == (["e/1"], PlacementReason.LEAST_LOADED)
        first.finish(one.key)
        first.finish(two.key)
        await until(lambda: dispatcher.engines[0].num_running == 0)
        stays = await put(dispatcher, session_id="s")
        assert (engine_ids([stays]), reason(stays)) == (["e/1"], PlacementReason.SESSION)


async def test_a_session_leaves_a_dead_engine() -> None:
    first, second = engines(2)
    async with serving(make_pool(first, second)) as dispatcher:
        await put(dispatcher, session_id="s")
        first.die()
        await until(lambda: dispatcher.engines[0].state is EngineState.FAILED)
        assert engine_ids([await put(dispatcher, session_id="s")]) == ["e/1"]


async def test_a_pin_moves_the_session() -> None:
    async with serving(make_pool(*engines(2))) as dispatcher:
        streams = [await put(dispatcher, session_id="s", engine_id="e/1"), await put(dispatcher, session_id="s")]
        assert engine_ids(streams) == ["e/1", "e/1"]
        assert reason(streams[1]) is PlacementReason.SESSION


async def test_the_session_unused_for_longest_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MAX_SESSIONS", 2)
    async with serving(make_pool(*engines(2, max_running=64))) as dispatcher:
        reasons = [reason(await put(dispatcher, session_id=session_id)) for session_id in "abacab"]
        sessions = dispatcher._queues["m"]._placement._sessions
        assert list(sessions) == ["a", "b"]
        assert [r is PlacementReason.SESSION for r in reasons] == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    "wrong",
    [
        {"model": ""},
        {"policy": "random"},
        {"max_queue": 0},
        {"policy": "pack"},
        {"policy": "pack", "knee": 0},
        {"policy": "least_loaded", "knee": 4},
    ],
)
def test_a_pool_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        PoolConfig(**({"model": "m", "policy": "least_loaded", "max_queue": 1} | wrong))


def test_a_pool_without_engines_and_names_used_twice_are_refused() -> None:
    with pytest.raises(LoadError):
        Pool(config=PoolConfig(model="m"), engines=[])
    with pytest.raises(LoadError, match="engines"):
        Dispatcher([make_pool(ManualEngine("x"), ManualEngine("x"))])
    with pytest.raises(LoadError, match="models"):
        Dispatcher([make_pool(ManualEngine("x")), make_pool(ManualEngine("y"))])
