"""Facts read from configurations of different shapes."""

from __future__ import annotations

import pytest
from support.tokenizers import byte_level
from transformers import GenerationConfig, GPT2Config, LlamaConfig, PretrainedConfig

from mini_infer.engines.api import Sampling
from mini_infer.engines.errors import LoadError
from mini_infer.engines.generation_defaults import context_length, default_sampling, eos_token_ids
from mini_infer.engines.preparation import BUILT_IN_SAMPLING, overlay


class Wrapper(PretrainedConfig):
    """A model of text and images: what concerns text is one level down."""

    def __init__(self) -> None:
        super().__init__(eos_token_id=5)
        self.text_config = LlamaConfig(max_position_embeddings=77, eos_token_id=[6, 7])


@pytest.mark.parametrize(
    ("config", "expected"),
    [(LlamaConfig(max_position_embeddings=50), 50), (GPT2Config(n_positions=60), 60), (Wrapper(), 77)],
)
def test_context_length_has_many_names(config: PretrainedConfig, expected: int) -> None:
    assert context_length(config, None) == expected
    assert context_length(config, 20) == 20


def test_context_length_that_nobody_names_must_be_given() -> None:
    with pytest.raises(LoadError, match="set max_context"):
        context_length(PretrainedConfig(), None)
    assert context_length(PretrainedConfig(), 99) == 99


def test_end_tokens_of_a_wrapper() -> None:
    assert eos_token_ids(byte_level(), Wrapper(), GenerationConfig(eos_token_id=8)) == {5, 6, 7, 8, 256}


def test_overlay_takes_zero_for_an_answer() -> None:
    merged = overlay(Sampling(temperature=0.0, logit_bias={3: 1.0}), Sampling(temperature=0.7, top_k=5))
    assert merged == Sampling(temperature=0.0, top_k=5, logit_bias={3: 1.0})


def test_no_default_is_left_open() -> None:
    assert default_sampling(Sampling(), GenerationConfig()) == BUILT_IN_SAMPLING
    sampled = default_sampling(Sampling(top_p=0.5), GenerationConfig(do_sample=True, top_k=None))
    assert (sampled.temperature, sampled.top_k, sampled.top_p) == (1.0, 0, 0.5)
