"""Numbers on their way out of protobuf messages."""

import math
import struct

import pytest

from mini_infer.client import convert
from mini_infer.v1 import generation_pb2 as pb


@pytest.mark.parametrize("number", [0.7, 0.95, 1.1, -0.1, 0.0, 1e-38, 123456.7, 3.4028235e38, 1e-45, -math.inf])
def test_a_float_field_comes_out_as_it_was_written(number):
    model = pb.Model(default_sampling=pb.SamplingParams(temperature=number, top_k=20, logit_bias={5: number}))
    sampling = convert.model(model).default_sampling
    same = struct.unpack("f", struct.pack("f", number))[0]
    assert struct.unpack("f", struct.pack("f", sampling["temperature"]))[0] == same
    assert repr(sampling["temperature"]) == repr(number) or number == 1e-45  # whose one digit says more than it has
    assert (sampling["top_k"], sampling["logit_bias"]) == (20, {5: sampling["temperature"]})


def test_log_probabilities_lose_nothing():
    top = [pb.TopLogprob(token_id=2, token=b"b", logprob=math.nan)]
    told = pb.TokenLogprob(token_id=1, token=b"a", logprob=-2.3456789, top=top)
    (logprob,) = convert.delta(pb.GenerationDelta(logprobs=[told])).logprobs
    assert struct.pack("f", logprob.logprob) == struct.pack("f", told.logprob)
    assert len(repr(logprob.logprob)) <= len("-2.3456789")
    assert math.isnan(logprob.top[0].logprob)
