"""A server, spoken to over gRPC as its clients do, all streams on one channel. Knows nothing of how it was started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import grpc

from mini_infer.engines.preparation import BUILT_IN_SAMPLING
from mini_infer.server.bench.prompts import Prompt
from mini_infer.server.bench.side import ROUND_TIMEOUT_S, BenchError, Run, finished_run
from mini_infer.v1 import generation_pb2 as pb
from mini_infer.v1 import generation_pb2_grpc


class GrpcSide:
    """Answers through the server at an address. A context manager, for its channel."""

    name = "grpc"

    def __init__(self, address: str) -> None:
        self._address = address
        self._loop = asyncio.Runner()

    def __enter__(self) -> Self:
        self._channel = self._loop.run(self._connect())
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run(self._channel.close())
        self._loop.close()

    def run(self, prompts: Sequence[Prompt], num_new_tokens: int) -> Run:
        """Calls `GenerateStream` for all prompts at once and reads them to their ends."""
        return self._loop.run(self._run([_request(prompt, num_new_tokens) for prompt in prompts], num_new_tokens))

    async def _connect(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(self._address)

    async def _run(self, requests: Sequence[pb.GenerateRequest], num_new_tokens: int) -> Run:
        begin_ns = time.monotonic_ns()
        try:
            token_ns = await asyncio.gather(*map(self._stream, requests))
        except grpc.aio.AioRpcError as error:
            raise BenchError(f"the server ended a stream: {error.code().name}, {error.details()}") from error
        return finished_run(self.name, begin_ns, token_ns, num_new_tokens)

    async def _stream(self, request: pb.GenerateRequest) -> list[int]:
        token_ns: list[int] = []
        async for response in self._stub.GenerateStream(request, timeout=ROUND_TIMEOUT_S):
            token_ns += [time.monotonic_ns()] * response.delta.num_tokens
        return token_ns


def _request(prompt: Prompt, num_new_tokens: int) -> pb.GenerateRequest:
    """What `EngineSide` asks for, in the wire's words."""
    return pb.GenerateRequest(
        prompt_token_ids=pb.TokenIds(ids=prompt),
        sampling=pb.SamplingParams(
            temperature=BUILT_IN_SAMPLING.temperature,
            repetition_penalty=BUILT_IN_SAMPLING.repetition_penalty,
            presence_penalty=BUILT_IN_SAMPLING.presence_penalty,
            frequency_penalty=BUILT_IN_SAMPLING.frequency_penalty,
        ),
        stop=pb.StopConditions(max_new_tokens=num_new_tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True),
    )
