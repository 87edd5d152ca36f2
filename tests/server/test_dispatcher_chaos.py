"""Random interleavings of everything that can happen to a stream, with the dispatcher's balance checked all the way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable

import pytest
from support.dispatching import ManualEngine, ending, idle, make_call, make_pool, serving, until

from mini_infer.engines.api import EngineKind, FinishReason
from mini_infer.engines.errors import (
    DeadlineExceeded,
    Draining,
    EngineFailed,
    NoReadyEngine,
    OutOfMemory,
    Overloaded,
    QueueTimeout,
    StreamFailed,
)
from mini_infer.engines.scripted_engine import Script, ScriptedEngine
from mini_infer.server.dispatcher import Dispatcher

ME = "ipv4:127.0.0.1"
NUM_ACTIONS = 250
ALLOWED = {
    FinishReason.EOS,
    FinishReason.CANCELLED,
    DeadlineExceeded,
    Draining,
    EngineFailed,
    NoReadyEngine,
    OutOfMemory,
    QueueTimeout,
    asyncio.CancelledError,
}


def assert_balanced(dispatcher: Dispatcher) -> None:
    """Every live stream waits or runs, in one place; nothing is over its bound; nobody waits beside a free slot."""
    for queue in dispatcher._queues.values():
        assert len(queue.waiting) <= queue.config.max_queue
        places = Counter(list(queue.waiting))
        for slots in queue.slots:
            assert len(slots.assigned) <= slots.engine.max_running
            places.update(list(slots.assigned))
        assert all(count == 1 for count in places.values())
        assert set(dispatcher._live) <= set(places)
        assert all(not stream.ended for stream in queue.waiting.values())
        for stream in queue.waiting.values():
            matching = queue._placement.matching(stream.call)
            assert any(slots.ready for slots in matching)
            assert stream.prepared is None or not any(slots.can_take for slots in matching)


class Storm:
    """One seeded run against engines that are moved by hand."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        kinds = [EngineKind.SCRIPTED, EngineKind.SCRIPTED, EngineKind.REPLICA]
        self.engines = [
            ManualEngine(f"e/{n}", max_running=self.rng.randint(1, 3), kind=kind, obedient=self.rng.random() < 0.7)
            for n, kind in enumerate(kinds)
        ]
        policy = self.rng.choice(["least_loaded", "round_robin", "pack"])
        self.pool = make_pool(
            *self.engines, policy=policy, knee=1 if policy == "pack" else None, max_queue=self.rng.randint(1, 12)
        )
        self.readers: dict[str, asyncio.Task[object]] = {}

    async def blow(self, dispatcher: Dispatcher) -> None:
        actions: list[tuple[Callable[[Dispatcher], None], int]] = [
            (self.enter, 10),
            (self.cancel, 3),
            (self.leave, 3),
            (self.move, 16),
            (self.kill, 1 if self.rng.random() < 0.3 else 0),
        ]
        for _ in range(NUM_ACTIONS):
            action = self.rng.choices([action for action, _ in actions], [weight for _, weight in actions])[0]
            action(dispatcher)
            if self.rng.random() < 0.7:
                await asyncio.sleep(self.rng.choice([0, 0, 0, 0.0005, 0.002]))
            # What the engines say is on its way for one turn of the loop; the balance holds between turns.
            assert_balanced(dispatcher)

    def enter(self, dispatcher: Dispatcher) -> None:
        rng = self.rng
        call = make_call(
            deadline_s=rng.choice([None, None, None, 0.001, 0.01, 60.0]),
            max_queue_ns=rng.choice([None, None, None, 0, 1_000_000, 5_000_000]),
            engine_id=rng.choice([None, None, None, "e/0", "e/1"]),
            session_id=rng.choice(["", "s", "t"]),
            label=rng.choice(["", "x", "y"]),
        )
        try:
            stream = dispatcher.enter(call)
        except (Overloaded, NoReadyEngine, DeadlineExceeded):
            return
        self.readers[stream.key] = asyncio.create_task(ending(stream))
        self.readers[stream.key].add_done_callback(lambda _: stream.close())  # a task can end before it begins

    def cancel(self, dispatcher: Dispatcher) -> None:
        known = [*self.readers, "x", "y", "nothing"]
        dispatcher.cancel(self.rng.sample(known, k=min(2, len(known))), ME)

    def leave(self, dispatcher: Dispatcher) -> None:
        if self.readers:
            self.rng.choice(list(self.readers.values())).cancel()

    def move(self, dispatcher: Dispatcher) -> None:
        holders = [engine for engine in self.engines if engine.held]
        if holders:
            engine = self.rng.choice(holders)
            key = self.rng.choice(list(engine.held))
            fail = lambda key: engine.fail(key, OutOfMemory("too big"))  # noqa: E731
            self.rng.choice([engine.begin, engine.token, engine.token, engine.finish, engine.finish, fail])(key)

    def kill(self, dispatcher: Dispatcher) -> None:
        engine = self.rng.choice(self.engines)
        if engine.state != "failed":
            engine.die(loudly=self.rng.random() < 0.8)

    async def settle(self, dispatcher: Dispatcher) -> Counter[object]:
        """Lets everything come to its end; returns how the readers ended."""
        if self.rng.random() < 0.5:
            await dispatcher.drain(self.rng.choice([0.0, 0.003]))
        while not all(reader.done() for reader in self.readers.values()):
            self.move(dispatcher)
            await asyncio.sleep(0.0005)
        for engine in self.engines:
            for key in list(engine.held):
                engine.finish(key)
        results = await asyncio.gather(*self.readers.values(), return_exceptions=True)
        return Counter(type(result) if isinstance(result, BaseException) else result for result in results)


@pytest.mark.parametrize("seed", range(40))
async def test_engines_moved_by_hand(seed: int) -> None:
    storm = Storm(seed)
    async with serving(storm.pool, stall_timeout_s=1.0) as dispatcher:
        await storm.blow(dispatcher)
        ends = await storm.settle(dispatcher)
        assert set(ends) <= ALLOWED
        assert sum(ends.values()) == len(storm.readers)
        assert not dispatcher._live
        assert dispatcher.models[0].num_waiting == 0


@pytest.mark.parametrize("seed", range(6))
async def test_engines_on_their_own_threads(seed: int) -> None:
    rng = random.Random(seed)
    fates = [Script(tokens=["a"] * 3)] * 6 + [Script(tokens=["a"], fail_at=1), Script(tokens=["a"], step_s=0.001)]
    deadly = Script(tokens=["a"], fail_at=2, error=RuntimeError("boom"))
    engines = [
        ScriptedEngine(f"e/{n}", scripts=lambda _: rng.choice(fates), max_running=rng.randint(1, 4)) for n in range(2)
    ]
    engines.append(ScriptedEngine("e/2", scripts=lambda _: deadly if rng.random() < 0.05 else fates[0], max_running=2))
    readers: list[asyncio.Task[object]] = []
    async with serving(make_pool(*engines, max_queue=64)) as dispatcher:
        for _ in range(400):
            try:
                stream = dispatcher.enter(make_call(deadline_s=rng.choice([None, None, 0.002, 60.0])))
                readers.append(asyncio.create_task(ending(stream)))
                readers[-1].add_done_callback(lambda _, stream=stream: stream.close())
            except (Overloaded, DeadlineExceeded):
                pass
            if rng.random() < 0.2:
                rng.choice(readers).cancel()
            if rng.random() < 0.2 and dispatcher._live:
                dispatcher.cancel([rng.choice(list(dispatcher._live))], ME)
            if rng.random() < 0.6:
                await asyncio.sleep(rng.choice([0, 0.0005]))
            assert_balanced(dispatcher)
        results = await asyncio.gather(*readers, return_exceptions=True)
        await idle(dispatcher)
        assert all(engine.peak_running <= engine.max_running for engine in engines)
    reasons = {type(result) if isinstance(result, BaseException) else result for result in results}
    assert reasons <= {*ALLOWED, StreamFailed}


@pytest.mark.parametrize("seed", range(5))
async def test_streams_of_one_pin_start_in_the_order_in_which_they_came(seed: int) -> None:
    rng = random.Random(seed)
    engines = [ManualEngine(f"e/{n}", max_running=2) for n in range(2)]
    async with serving(make_pool(*engines)) as dispatcher:
        pins = [rng.choice([None, "e/0", "e/1"]) for _ in range(60)]
        holders = [dispatcher.enter(make_call()) for _ in range(4)]
        for holder in holders:
            await holder.prepare()
        streams = [dispatcher.enter(make_call(key=f"{number:03}", engine_id=pin)) for number, pin in enumerate(pins)]
        await asyncio.gather(*(stream.prepare() for stream in rng.sample(streams, len(streams))))
        started: list[str] = []
        while any(engine.held for engine in engines):
            engine = rng.choice([engine for engine in engines if engine.held])
            engine.finish(rng.choice(list(engine.held)))
            before = {key for engine in engines for key in engine.submitted}
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            started += [key for engine in engines for key in engine.submitted if key not in before]
        await until(lambda: all(stream.ended for stream in streams))
        for pin in (None, "e/0", "e/1"):
            of_pin = [key for key in started if key.isdigit() and pins[int(key)] == pin]
            assert of_pin == sorted(of_pin)
            assert len(of_pin) == pins.count(pin)
