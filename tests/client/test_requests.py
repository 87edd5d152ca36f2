"""The builder against the contract itself: every field of GenerateRequest is reachable, and nothing is set unasked."""

import pytest

from mini_infer.client import InvalidArgument
from mini_infer.client.requests import PATHS, GenerateOptions, generate_request
from mini_infer.v1 import generation_pb2 as pb

VALUES = {
    "prompt": "Hi",
    "prompt_token_ids": [1, 2],
    "messages": [{"role": "user", "content": "Hi"}],
    "model": "m",
    "request_id": "label",
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "seed": 2**64 - 1,
    "logit_bias": {5: -100.0},
    "max_new_tokens": 1,
    "min_new_tokens": 0,
    "stop": ["a", "b"],
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop_string": True,
    "output_token_ids": True,
    "logprobs": True,
    "top_logprobs": 2,
    "skip_special_tokens": False,
    "engine_id": "tiny/0",
    "engine_kind": "replica",
    "session_id": "s",
    "priority": 3,
    "max_queue_duration_s": 0.0,
}
INPUTS = {"prompt", "prompt_token_ids", "messages"}


def leaves(descriptor, prefix=""):
    """Paths of all fields below a message; a list or map of anything is a leaf."""
    for field in descriptor.fields:
        path = prefix + field.name
        nested = field.message_type
        if nested is None or field.is_repeated or nested.full_name.startswith("google.protobuf."):
            yield path
        else:
            yield from leaves(nested, f"{path}.")


def test_every_field_of_the_request_has_its_keyword():
    assert set(PATHS.values()) == set(leaves(pb.GenerateRequest.DESCRIPTOR))
    assert set(PATHS) == set(GenerateOptions.__annotations__) == set(VALUES)


@pytest.mark.parametrize("name", sorted(set(VALUES) - INPUTS))
def test_a_keyword_sets_its_field_and_no_other(name):
    options = {"prompt": "Hi", name: VALUES[name]}
    if name == "engine_kind":
        assert generate_request(options).placement.engine_kind == pb.ENGINE_KIND_REPLICA
    bare, request = generate_request({"prompt": "Hi"}), generate_request(options)
    *parents, field = PATHS[name].split(".")
    target = request
    for parent in parents:
        target = getattr(target, parent)
    assert request != bare
    target.ClearField(field)
    for parent in parents:
        request.ClearField(parent)
    assert request == bare


@pytest.mark.parametrize("name", sorted(INPUTS))
def test_each_input_alone_is_a_request(name):
    request = generate_request({name: VALUES[name]})
    assert request.WhichOneof("input") == PATHS[name].split(".")[0]


def test_nothing_is_sent_for_what_is_not_given():
    assert generate_request({"prompt": "Hi", "temperature": None, "stop": None}) == pb.GenerateRequest(prompt="Hi")


def test_zero_is_sent_where_it_differs_from_absent():
    request = generate_request({"prompt": "Hi", "temperature": 0, "max_queue_duration_s": 0})
    assert request.sampling.HasField("temperature")
    assert request.HasField("max_queue_duration")


def test_an_empty_prompt_is_the_servers_to_judge():
    assert generate_request({"prompt": ""}).WhichOneof("input") == "prompt"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "input"),
        ({"prompt": "a", "messages": []}, "input"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": b"bytes\xff"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids.ids"),
        ({"prompt_token_ids": "12"}, "prompt_token_ids.ids"),
        ({"messages": [{"role": "user"}]}, "chat.messages"),
        ({"messages": "Hi"}, "chat.messages"),
        ({"prompt": "a", "max_new_tokens": -1}, "stop.max_new_tokens"),
        ({"prompt": "a", "max_new_tokens": 2**32}, "stop.max_new_tokens"),
        ({"prompt": "a", "top_k": 1.5}, "sampling.top_k"),
        ({"prompt": "a", "seed": 2**64}, "sampling.seed"),
        ({"prompt": "a", "temperature": "hot"}, "sampling.temperature"),
        ({"prompt": "a", "logit_bias": {-1: 2.0}}, "sampling.logit_bias"),
        ({"prompt": "a", "stop": "END"}, "stop.strings"),
        ({"prompt": "a", "stop_token_ids": True}, "stop.token_ids"),
        ({"prompt": "a", "engine_kind": "warp"}, "placement.engine_kind"),
        ({"prompt": "a", "max_queue_duration_s": float("nan")}, "max_queue_duration"),
        ({"prompt": "a", "max_queue_duration_s": float("inf")}, "max_queue_duration"),
    ],
)
def test_what_no_field_can_hold_is_refused_with_its_path(options, field):
    with pytest.raises(InvalidArgument, match=field) as caught:
        generate_request(options)
    assert [wrong.field for wrong in caught.value.field_violations] == [field]
    assert len(str(caught.value)) < 300


def test_an_unknown_keyword_is_a_mistake_in_the_program():
    with pytest.raises(TypeError, match="max_tokens"):
        generate_request({"prompt": "a", "max_tokens": 5})
