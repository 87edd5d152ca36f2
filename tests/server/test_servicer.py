"""GenerationService over a real channel: what a call that goes well looks like."""

import asyncio
import threading
import time
from copy import deepcopy

import grpc
import pytest
from support.dispatching import GatedText
from support.serving import log_everything, log_lines, outcome, serving, serving_pools

from mini_infer.engines.scripted_engine import Gate, Script, ScriptedEngine
from mini_infer.engines.scripted_text import END_ID, ScriptedText
from mini_infer.server.pool import Pool, PoolConfig
from mini_infer.server.server_info import MAX_MESSAGE_BYTES
from mini_infer.v1 import generation_pb2 as pb

WORDS = ["Once", " upon", " a", " time"]


def request(prompt: str = "tell", **fields: object) -> pb.GenerateRequest:
    return pb.GenerateRequest(prompt=prompt, **fields)


async def test_a_stream_starts_flows_and_finishes_once() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=WORDS))) as served:
        told = await outcome(served.generation.GenerateStream(request()))
    assert told.code is grpc.StatusCode.OK
    kinds = [response.WhichOneof("event") for response in told.responses]
    assert kinds == ["started", *["delta"] * 4, "finished"]
    assert told.text == "Once upon a time"
    assert {response.request_id for response in told.responses} == {told.header["mini-infer-request-id"]}
    started, finished = told.responses[0].started, told.responses[-1].finished
    assert started.engine == finished.engine
    assert started.engine.engine_id == "scripted/0"
    assert started.prompt_tokens == finished.usage.prompt_tokens == 1
    assert (finished.reason, finished.matched_token_id) == (pb.FINISH_REASON_EOS, END_ID)
    assert finished.usage.completion_tokens == 5
    assert [response.delta.cumulative_tokens for response in told.responses[1:-1]] == [1, 2, 3, 4]


async def test_the_unary_answer_is_the_stream_joined() -> None:
    output = pb.OutputOptions(token_ids=True, logprobs=True, top_logprobs=2)
    async with serving(ScriptedEngine(scripts=Script(tokens=WORDS))) as served:
        streamed = await outcome(served.generation.GenerateStream(request(output=output)))
        whole = await served.generation.Generate(request(output=output))
    deltas = [response.delta for response in streamed.responses if response.HasField("delta")]
    assert whole.text == streamed.text
    assert list(whole.token_ids) == [token_id for delta in deltas for token_id in delta.token_ids]
    assert len(whole.logprobs) == len(whole.token_ids) == whole.finished.usage.completion_tokens == 5
    assert all(len(logprob.top) == 2 for logprob in whole.logprobs)
    assert whole.finished.reason == pb.FINISH_REASON_EOS
    assert whole.request_id != streamed.header["mini-infer-request-id"]


async def test_the_header_is_there_while_the_prompt_is_worked_on() -> None:
    gate = Gate()
    async with serving(ScriptedEngine(scripts=Script(tokens=WORDS, gate=gate))) as served:
        call = served.generation.GenerateStream(request())
        header = dict(await call.initial_metadata())
        gate.open()
        told = await outcome(call)
    assert header["mini-infer-request-id"] == told.responses[0].request_id


async def test_a_unary_answer_has_the_header_too() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=WORDS))) as served:
        told = await outcome(served.generation.Generate(request()))
    assert told.responses[0].request_id == told.header["mini-infer-request-id"]


async def test_ids_come_only_when_asked_for() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=WORDS))) as served:
        told = await outcome(served.generation.GenerateStream(request()))
        assert not any(response.delta.token_ids for response in told.responses)


async def test_messages_that_were_sent_do_not_change() -> None:
    async with serving(ScriptedEngine(scripts=Script(tokens=[f" {n}" for n in range(10)]))) as served:
        kept, copies = [], []
        async for response in served.generation.GenerateStream(request(output=pb.OutputOptions(logprobs=True))):
            kept.append(response)
            copies.append(deepcopy(response))
        assert len(kept) > 10
        assert kept == copies


async def test_eight_streams_of_one_channel_all_finish() -> None:
    async with serving(ScriptedEngine(scripts=None, max_running=3)) as served:
        prompts = [" ".join(f"w{number}{n}" for n in range(20)) for number in range(8)]
        told = await asyncio.gather(*(outcome(served.generation.GenerateStream(request(each))) for each in prompts))
        assert [each.text for each in told] == prompts
        await served.idle()


async def test_models_are_chosen_by_name() -> None:
    pools = [
        Pool(config=PoolConfig(model=name), engines=[ScriptedEngine(f"{name}/0", Script(tokens=[name]))])
        for name in ("one", "two")
    ]
    async with serving_pools(pools) as served:
        assert (await served.generation.Generate(request(model="two"))).text == "two"
        models = (await served.generation.ListModels(pb.ListModelsRequest())).models
        assert [(model.name, list(model.engine_ids)) for model in models] == [("one", ["one/0"]), ("two", ["two/0"])]
        nameless = await outcome(served.generation.Generate(request()))
        assert (nameless.code, nameless.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_models_tell_what_callers_may_know() -> None:
    async with serving(ScriptedEngine(text=ScriptedText(context_length=99, vocab_size=300))) as served:
        (model,) = (await served.generation.ListModels(pb.ListModelsRequest())).models
    assert (model.name, model.context_length, model.vocab_size, model.has_chat_template) == ("scripted", 99, 300, True)
    assert list(model.eos_token_ids) == [END_ID]
    assert model.default_sampling.HasField("temperature")
    assert model.default_sampling.temperature == 0
    assert not model.default_sampling.HasField("seed")


async def test_server_info_tells_versions_and_limits() -> None:
    before_ns = time.time_ns()
    async with serving(max_queue=7) as served:
        info = await served.generation.GetServerInfo(pb.GetServerInfoRequest())
    assert info.version
    assert info.library_versions["torch"].split(".")[0].isdecimal()
    assert {"transformers", "grpcio", "protobuf"} <= set(info.library_versions)
    assert before_ns <= info.start_time.ToNanoseconds() <= time.time_ns()
    assert (info.max_message_bytes, info.max_prompt_bytes, info.max_queue) == (MAX_MESSAGE_BYTES, 2**20, 7)


async def test_tokenize_and_detokenize_go_there_and_back() -> None:
    async with serving() as served:
        tokens = await served.generation.Tokenize(pb.TokenizeRequest(text="Hello big world"))
        assert len(tokens.token_ids) == 3
        assert tokens.context_length == 4096
        text = await served.generation.Detokenize(pb.DetokenizeRequest(token_ids=[*tokens.token_ids, END_ID]))
        assert text.text == "Hello big world"
        special = pb.DetokenizeRequest(token_ids=[END_ID], skip_special_tokens=False)
        assert (await served.generation.Detokenize(special)).text == "<|end|>"
        empty = await served.generation.Tokenize(pb.TokenizeRequest(text=""))
        assert not empty.token_ids
        outside = await outcome(served.generation.Detokenize(pb.DetokenizeRequest(token_ids=[2**32 - 1])))
        assert outside.code is grpc.StatusCode.INVALID_ARGUMENT
        nowhere = await outcome(served.generation.Tokenize(pb.TokenizeRequest(text="x", model="other")))
        assert nowhere.reason == "MODEL_NOT_FOUND"


async def test_a_text_too_large_for_one_message_is_refused() -> None:
    text = ScriptedText()
    large = text.token_id("x" * 100_000)
    async with serving(ScriptedEngine(text=text)) as served:
        told = await outcome(served.generation.Detokenize(pb.DetokenizeRequest(token_ids=[large] * 170)))
        assert (told.code, told.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


class SlowText(ScriptedText):
    """A tokenizer that waits; with `tokenize` on the event loop nothing else would be answered."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def tokenize(self, text: object) -> tuple[int, ...]:
        if text == "slow":
            assert self.gate.wait(20)
        return super().tokenize(text)


async def test_tokenizing_does_not_hold_up_others() -> None:
    text = SlowText()
    async with serving(ScriptedEngine(text=text)) as served:
        slow = asyncio.ensure_future(served.generation.Tokenize(pb.TokenizeRequest(text="slow")))
        assert (await served.generation.Generate(request("quick"))).text == "quick"
        assert not slow.done()
        text.gate.set()
        assert len((await slow).token_ids) == 1


async def test_a_prompt_that_tokenizes_for_long_does_not_hold_up_health() -> None:
    text = GatedText()
    async with serving(ScriptedEngine(text=text)) as served:
        call = served.generation.GenerateStream(request())
        assert (await served.generation.GetServerInfo(pb.GetServerInfoRequest())).version
        text.gate.set()
        assert (await outcome(call)).text == "tell"


async def test_cancel_ends_a_stream_well_by_id_and_by_label(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    engine = ScriptedEngine(scripts=lambda _: Script(tokens=["x"], repeat=True, gate=Gate(3)), max_running=4)
    async with serving(engine) as served:
        for label in ("", "mine"):
            call = served.generation.GenerateStream(request(request_id=label))
            own_id = dict(await call.initial_metadata())["mini-infer-request-id"]
            for _ in range(4):
                await call.read()
            name = label or own_id
            told = await served.generation.CancelGeneration(pb.CancelGenerationRequest(request_ids=[name, "other"]))
            assert list(told.cancelled_request_ids) == [own_id]
            assert list(told.not_found_request_ids) == ["other"]
            last = await call.read()
            assert last.finished.reason == pb.FINISH_REASON_CANCELLED
            assert last.finished.usage.completion_tokens == 3
            assert await call.code() is grpc.StatusCode.OK
            again = await served.generation.CancelGeneration(pb.CancelGenerationRequest(request_ids=[own_id]))
            assert list(again.not_found_request_ids) == [own_id]
        await served.idle()
    assert [line["outcome"] for line in log_lines(caplog)] == ["cancelled", "cancelled"]


async def test_a_queued_stream_can_be_cancelled() -> None:
    gate = Gate()
    async with serving(ScriptedEngine(scripts=Script(gate=gate))) as served:
        running = served.generation.GenerateStream(request())
        await running.read()
        queued = served.generation.GenerateStream(request(request_id="mine"))
        await queued.initial_metadata()
        await served.generation.CancelGeneration(pb.CancelGenerationRequest(request_ids=["mine"]))
        told = await outcome(queued)
        assert told.code is grpc.StatusCode.OK
        (only,) = told.responses
        assert only.finished.reason == pb.FINISH_REASON_CANCELLED
        assert not only.finished.HasField("engine")
        gate.open()
        await outcome(running)
        await served.idle()


async def test_one_line_is_logged_per_stream_without_its_prompt(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    async with serving(ScriptedEngine(scripts=Script(tokens=WORDS))) as served:
        label = 'a label" id=forged\nid=forged'
        told = await outcome(served.generation.GenerateStream(request("a secret", request_id=label, model="scripted")))
    (line,) = log_lines(caplog)
    assert line["id"] == told.header["mini-infer-request-id"]
    assert line["label"] == '"a label\\" id=forged\\nid=forged"'
    assert (line["model"], line["engine"], line["outcome"]) == ("scripted", "scripted/0", "eos")
    assert (line["prompt_tokens"], line["tokens"]) == ("2", "5")
    assert 0 <= float(line["queue_ms"]) <= float(line["ttft_ms"]) <= float(line["total_ms"])
    assert "secret" not in caplog.text


async def test_the_log_names_the_model_that_a_request_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log_everything(caplog)
    async with serving() as served:
        await outcome(served.generation.GenerateStream(request()))
        await outcome(served.generation.GenerateStream(request(placement=pb.Placement(engine_id="other/0"))))
        await outcome(served.generation.GenerateStream(request(model="other")))
    assert [line["model"] for line in log_lines(caplog)] == ["scripted", "scripted", "other"]
