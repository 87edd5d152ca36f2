"""The client and the real server, over scripted engines."""

import asyncio
import threading

import pytest
from support.serving import serving

from mini_infer.client import (
    Client,
    ClientClosed,
    DeadlineExceeded,
    EngineFailed,
    EngineNotFound,
    InvalidArgument,
    ModelNotFound,
    NoReadyEngine,
    QueueFull,
    QueueTimeout,
    StreamFailed,
)
from mini_infer.engines.errors import LoadError
from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine


async def test_joined_deltas_are_the_unary_text_and_the_decoded_ids():
    texts = ["Hello", " wör", "ld \N{GRINNING FACE}".encode()[:6], "ld \N{GRINNING FACE}".encode()[6:], "\n  x"]
    async with serving(ScriptedEngine(scripts=Script(tokens=texts))) as served, Client(served.address) as client:
        stream = client.stream(prompt="Hi", output_token_ids=True, logprobs=True)
        deltas = [delta async for delta in stream]
        unary = await client.generate(prompt="Hi", output_token_ids=True, logprobs=True)
        assert "".join(delta.text for delta in deltas) == unary.text == stream.result.text
        assert stream.result.token_ids == unary.token_ids
        assert stream.result.logprobs == unary.logprobs
        assert await client.detokenize(unary.token_ids) == unary.text
        assert deltas[-1].cumulative_tokens == unary.usage.completion_tokens == len(unary.token_ids)
        assert not any("\ufffd" in delta.text for delta in deltas)


async def test_the_times_add_up():
    async with serving() as served, Client(served.address) as client:
        stream = client.stream(prompt="one two three")
        (first, *others) = [delta.first_token async for delta in stream]
        assert others == [None, None]
        for times in (first, stream.result.timing):
            parts = times.tokenize_s + times.queue_s + times.prefill_s
            assert parts == pytest.approx(times.time_to_first_token_s, abs=1e-8)
        assert stream.result.timing.time_to_first_token_s == first.time_to_first_token_s
        assert stream.result.timing.total_s >= stream.result.timing.time_to_first_token_s
        assert stream.result.timing.arrival_time.utcoffset().total_seconds() == 0


async def test_a_seed_that_the_server_drew_is_told():
    async with serving() as served, Client(served.address) as client:
        assert (await client.generate(prompt="a", temperature=0)).seed is None
        assert (await client.generate(prompt="a", temperature=1, seed=0)).seed == 0


async def test_what_ended_an_answer():
    async with serving() as served, Client(served.address) as client:
        stopped = await client.generate(prompt="one two three", stop=[" two"])
        assert (stopped.text, stopped.finish_reason, stopped.matched) == ("one", "stop_string", " two")
        cut = await client.generate(prompt="one two three", max_new_tokens=1)
        assert (cut.text, cut.finish_reason, cut.matched) == ("one", "max_new_tokens", None)


async def test_leaving_early_frees_the_slot():
    script = Script(tokens=["a"], repeat=True, step_s=0.01)
    async with serving(ScriptedEngine(scripts=script)) as served, Client(served.address) as client:
        for _ in range(3):  # the engine has one slot, so each stream needs the one before to have left
            async for _ in client.stream(prompt="Hi", max_new_tokens=4000, timeout_s=10):
                break
        await asyncio.wait_for(until_idle(client), 10)


async def test_cancelling_by_id_ends_the_stream_well():
    script = Script(tokens=["a"], repeat=True, step_s=0.01)
    async with serving(ScriptedEngine(scripts=script)) as served, Client(served.address) as client:
        stream = client.stream(prompt="Hi", max_new_tokens=4000)
        async for _ in stream:
            found = await client.cancel([stream.request_id, "nobody"])
            assert found.not_found in (("nobody",), ("nobody", stream.request_id))
        assert stream.result.finish_reason == "cancelled"
        assert stream.result.usage.completion_tokens == stream.num_tokens


async def test_tokens_there_and_back():
    async with serving() as served, Client(served.address) as client:
        tokens = await client.tokenize("Hello world")
        assert await client.detokenize(tokens.token_ids) == "Hello world"
        assert tokens.context_length == 4096
        assert (await client.generate(prompt_token_ids=tokens.token_ids)).text == "Hello world"
        chat = [{"role": "user", "content": "Hello"}]
        num_tokens = len((await client.tokenize(chat)).token_ids)
        assert (await client.generate(messages=chat)).usage.prompt_tokens == num_tokens


@pytest.mark.parametrize(
    ("field", "ask"),
    [
        ("text", lambda client: client.tokenize("\ud800")),
        ("chat.messages", lambda client: client.tokenize([{"role": "user"}])),
        ("model", lambda client: client.tokenize("x", model=5)),
        ("token_ids", lambda client: client.detokenize([-1])),
        ("token_ids", lambda client: client.detokenize("12")),
        ("request_ids", lambda client: client.cancel(["\ud800"])),
        ("request_ids", lambda client: client.cancel("12")),
        ("service", lambda client: client.health("\ud800")),
        ("service", lambda client: anext(client.watch_health("\ud800"))),
    ],
)
async def test_what_no_field_can_hold_is_refused(field, ask):
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument, match=field) as caught:
            await ask(client)
    assert [wrong.field for wrong in caught.value.field_violations] == [field]


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e300, 1e11])
async def test_an_endless_timeout_is_none(timeout_s):
    async with serving() as server, Client(server.address) as client:
        assert (await client.generate(prompt="Hi", timeout_s=timeout_s)).text == "Hi"
        assert await anext(client.watch_health(timeout_s=timeout_s)) == "SERVING"


async def test_what_the_server_is():
    async with serving() as served, Client(served.address) as client:
        (engine,) = await client.engines()
        (model,) = await client.models()
        server = await client.server_info()
        assert (engine.state, engine.kind, engine.model) == ("ready", "scripted", model.name)
        assert model.engine_ids == (engine.engine_id,)
        assert model.default_sampling["temperature"] == 0
        assert server.max_message_bytes == 16 << 20
        assert await client.health() == "SERVING"
        assert await client.health("mini_infer.live") == "SERVING"
        assert await client.health("nobody") == "SERVICE_UNKNOWN"


async def test_every_failure_of_the_server_is_typed():
    failing = {
        "stream": Script(fail_at=1, tokens=["a"]),
        "later": Script(fail_at=2, tokens=["a", "b"]),
    }
    async with serving(ScriptedEngine(scripts=failing)) as served, Client(served.address) as client:
        with pytest.raises(StreamFailed):
            await client.generate(prompt="stream")
        with pytest.raises(StreamFailed) as caught:
            async for _ in client.stream(prompt="later"):
                pass
        assert (caught.value.text, caught.value.generated_tokens) == ("a", 1)
        assert caught.value.request_id
        with pytest.raises(InvalidArgument, match=r"sampling\.top_p"):
            await client.generate(prompt="stream", top_p=2.0)
        with pytest.raises(ModelNotFound, match="nobody"):
            await client.generate(prompt="stream", model="nobody")
        with pytest.raises(EngineNotFound):
            await client.generate(prompt="stream", engine_id="nobody/0")


async def test_an_engine_that_dies_before_any_token_is_tried_again_elsewhere():
    died = threading.Event()

    def script(request):
        if died.is_set():
            return Script(tokens=["fine"])
        died.set()
        return Script(fail_at=1, error=RuntimeError("broken"))

    engines = [ScriptedEngine(f"scripted/{number}", scripts=script) for number in range(2)]
    async with serving(*engines) as served, Client(served.address) as client:
        assert (await client.generate(prompt="Hi")).text == "fine"
        assert sorted(engine.state for engine in await client.engines()) == ["failed", "ready"]


async def test_an_engine_that_dies_with_text_out_is_not():
    script = Script(fail_at=2, tokens=["a"], error=RuntimeError("broken"))
    engines = [ScriptedEngine(f"scripted/{number}", scripts=script) for number in range(2)]
    async with serving(*engines) as served, Client(served.address) as client:
        with pytest.raises(EngineFailed) as caught:
            async for _ in client.stream(prompt="Hi"):
                pass
        assert (caught.value.text, caught.value.generated_tokens) == ("a", 1)
        assert sorted(engine.state for engine in await client.engines()) == ["failed", "ready"]


async def test_queue_limits_are_typed():
    gate = Gate()
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=gate))
    async with serving(engine, max_queue=1) as served, Client(served.address, max_attempts=1) as client:
        running = client.stream(prompt="1")
        waiting = client.stream(prompt="2")
        async with running:
            await running.wait_started()
            with pytest.raises(QueueTimeout):
                async for _ in client.stream(prompt="3", max_queue_duration_s=0.05):
                    pass
            async with waiting:
                with pytest.raises(QueueFull) as caught:
                    await client.generate(prompt="4")
                assert caught.value.retry_after_s > 0
        gate.open()
        await asyncio.wait_for(until_idle(client), 10)


async def test_the_deadline_is_the_servers_too():
    engine = ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate()))
    async with serving(engine) as served, Client(served.address) as client:
        with pytest.raises(DeadlineExceeded):
            await client.generate(prompt="Hi", timeout_s=0.2)
        await asyncio.wait_for(until_idle(client), 10)


async def test_waiting_for_a_model_to_load():
    loaded = threading.Event()
    seen = []

    def watch(engines):
        seen.extend(engine.state for engine in engines)
        if seen:
            loaded.set()

    engine = ScriptedEngine(load_gate=loaded)
    async with serving(engine, wait_ready=False) as served, Client(served.address, max_attempts=1) as client:
        with pytest.raises(NoReadyEngine):
            await client.generate(prompt="Hi")
        with pytest.raises(DeadlineExceeded, match="scripted/0 is loading"):
            await client.wait_ready(1)
        await client.wait_ready(30, watch)
        assert seen[0] == "loading"
        assert (await client.generate(prompt="Hi")).text == "Hi"


async def test_waiting_ends_where_every_engine_has_failed():
    engine = ScriptedEngine(load_error=LoadError("no such folder"))
    async with serving(engine, wait_ready=False) as served, Client(served.address) as client:
        with pytest.raises(NoReadyEngine, match="no such folder"):
            await client.wait_ready(30)


async def test_waiting_where_there_is_no_server():
    seen = []
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1:1"):
            await client.wait_ready(0.3, seen.append)
    assert seen[0] == ()


async def test_watching_health_sees_the_change():
    loaded = threading.Event()
    engine = ScriptedEngine(load_gate=loaded)
    async with serving(engine, wait_ready=False) as served, Client(served.address) as client:
        seen = []
        async for status in client.watch_health():
            seen.append(status)
            loaded.set()
            if status == "SERVING":
                break
        assert seen == ["NOT_SERVING", "SERVING"]


async def test_many_streams_on_one_channel_keep_apart():
    async with serving(ScriptedEngine(max_running=8)) as served, Client(served.address) as client:
        texts = await asyncio.gather(*(client.generate(prompt=f"{number} is {number}") for number in range(150)))
        assert [answer.text for answer in texts] == [f"{number} is {number}" for number in range(150)]


async def test_closing_under_a_unary_call():
    async with serving(ScriptedEngine(scripts=Script(tokens=["a"], gate=Gate()))) as served:
        client = Client(served.address)
        async with client:
            call = asyncio.create_task(client.generate(prompt="Hi"))
            async with Client(served.address) as other:
                await asyncio.wait_for(until_busy(other), 10)
            await client.close()
            with pytest.raises(ClientClosed):
                await call


async def until_idle(client):
    while any(engine.num_running or engine.num_waiting for engine in await client.engines()):  # noqa: ASYNC110  # a server is asked
        await asyncio.sleep(0.01)


async def until_busy(client):
    while not any(engine.num_running for engine in await client.engines()):  # noqa: ASYNC110  # a server is asked
        await asyncio.sleep(0.01)
