"""GenerationService over a dispatcher: converts requests and responses. How one generation runs is in `generation`."""

# ruff: noqa: ARG002, N802  # gRPC gives the methods their names and arguments

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from mini_infer.engines.errors import InvalidRequest
from mini_infer.server import convert_request, convert_response
from mini_infer.server.dispatcher import Dispatcher
from mini_infer.server.generation import Generation
from mini_infer.server.interceptors import Context
from mini_infer.server.peer import caller_of
from mini_infer.server.server_info import ServerInfo
from mini_infer.v1 import generation_pb2 as pb
from mini_infer.v1 import generation_pb2_grpc


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """The service that callers use."""

    def __init__(self, dispatcher: Dispatcher, info: ServerInfo) -> None:
        self._dispatcher = dispatcher
        self._info = info

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """The same stream, collected."""
        responses = Generation(self._dispatcher, request, context, self._info.max_message_bytes).responses()
        async with aclosing(responses):
            return convert_response.whole([response async for response in responses])

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[pb.GenerateStreamResponse, None]:
        """Events as they come."""
        async with aclosing(Generation(self._dispatcher, request, context).responses()) as responses:
            async for response in responses:
                yield response

    async def CancelGeneration(
        self, request: pb.CancelGenerationRequest, context: Context
    ) -> pb.CancelGenerationResponse:
        """Ends generations of the same peer."""
        ids = convert_request.cancel_ids_of(request)
        cancelled, not_found = self._dispatcher.cancel(ids, caller_of(context.peer()))
        return pb.CancelGenerationResponse(cancelled_request_ids=cancelled, not_found_request_ids=not_found)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Ids of a text or a conversation."""
        text = convert_request.text_of(request)
        model = self._dispatcher.text_model(request.model)
        token_ids = await model.tokenize(text)
        return pb.TokenizeResponse(token_ids=token_ids, context_length=model.info.context_length)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """Text of ids."""
        token_ids = convert_request.token_ids_of(request)
        skip_special_tokens = convert_request.skip_special_tokens_of(request)
        model = self._dispatcher.text_model(request.model)
        text = await model.detokenize(token_ids, skip_special_tokens=skip_special_tokens)
        response = pb.DetokenizeResponse(text=text)
        if response.ByteSize() > self._info.max_message_bytes:
            raise InvalidRequest("token_ids", "their text is too large for one message")
        return response

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """What is served."""
        return pb.ListModelsResponse(models=[convert_response.model(each) for each in self._dispatcher.models])

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Context) -> pb.GetServerInfoResponse:
        """Versions, limits and start time."""
        max_queue = max(each.max_queue for each in self._dispatcher.models)
        return convert_response.server_info(self._info, max_queue)
