"""The guard lets a model through only where the packed forward is right, and leaves a refused one as it was."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers
from support.models import PACKABLE, PACKABLE_LATELY, REFUSED, build_model
from transformers.models.mistral import modeling_mistral

from mini_infer.engines import attention
from mini_infer.engines.errors import LoadError, NotExact
from mini_infer.engines.guard import pack

pytestmark = [
    pytest.mark.floor,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers 5.17 scripts gpt_bigcode
]
IDS = torch.tensor([[72, 101, 108, 108, 111, 33, 32, 87, 104, 121, 63, 7, 200, 13]])


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


def refusal(model):
    """Why the model is refused, after a look that nothing of ours is left of it."""
    before, implementation = logits(model), model.config._attn_implementation
    attributes = [set(module.__dict__) for module in model.modules()]
    with pytest.raises(NotExact) as caught:
        pack(model)
    assert isinstance(caught.value, LoadError)
    assert model.config._attn_implementation == implementation
    assert [set(module.__dict__) for module in model.modules()] == attributes
    assert torch.equal(logits(model), before)
    assert "\n" not in caught.value.message
    assert type(model).__name__ in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("name", PACKABLE)
def test_packable(name):
    model = build_model(name)
    stage = pack(model)
    assert len(stage.shapes) == model.config.num_hidden_layers
    assert stage.vocab_size == model.config.vocab_size
    assert (stage.device, stage.dtype) == (model.device, torch.float32)


@pytest.mark.parametrize("name", PACKABLE_LATELY)
def test_packable_with_later_versions(name):
    model = build_model(name)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24):
        refusal(model)
    else:
        pack(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rand", "mistral", "gemma2_capped", "gpt_oss"])
def test_packable_in_coarser_types(name, dtype):
    assert pack(build_model(name).to(dtype)).dtype == dtype


def test_layers_may_differ_in_shape_of_keys_and_values():
    shape = pack(build_model("deepseek_v3")).shapes[0]
    assert (shape.num_kv_heads, shape.key_dim, shape.value_dim) == (4, 24, 16)


REASONS = {
    "bloom": "0 of its 2 layers",
    "dynamic_rope": "dynamic",
    "falcon": "masks of its own",
    "falcon_alibi": "masks of its own",
    "llama4": "chunks",
    "longrope": "longrope",
    "mamba": "0 of its 2 layers",
    "minimax": "1 of its 2 layers",
    "mpt": "masks of its own",
    "qwen3_next": "1 of its 2 layers",
    "xglm": "0 of its 2 layers",
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    assert REASONS[name] in refusal(build_model(name))


def test_a_model_that_looks_ahead_is_refused():
    model = build_model("rand")
    model.config.is_causal = False
    assert "another rule" in refusal(model)


def test_a_window_that_only_the_mask_knows_is_refused(monkeypatch):
    make = modeling_mistral.create_sliding_window_causal_mask

    def narrower(config, *args, **kwargs):
        config = copy.copy(config)
        config.sliding_window = 4096  # far longer than the probe
        return make(config, *args, **kwargs)

    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", narrower)
    model = build_model("mistral")
    model.config.sliding_window = 5000
    assert "another rule" in refusal(model)


def test_logits_that_are_no_numbers_are_refused():
    model = build_model("rand")
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NotExact, match="logits are off"):
        pack(model)


def test_a_model_that_fails_in_its_packed_forward_is_refused(monkeypatch):
    monkeypatch.setattr(attention, "write_cache", lambda *_: 1 / 0)
    assert "division by zero" in refusal(build_model("rand"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mistral", {"window": None}),
        ("mistral", {"window": 7}),
        ("mistral", {"window": 9}),
        ("gemma3", {"window": None}),
        ("gemma2_capped", {"softcap": None}),
        ("gemma2_capped", {"window": None}),
        ("gpt_oss", {"sinks": None}),
        ("gemma", {"scaling": 0.2}),
    ],
)
def test_attention_that_forgets_something_is_noticed(monkeypatch, name, changes):
    right = attention.paged_attention

    def wrong(query, keys, values, step, options):
        return right(query, keys, values, step, replace(options, **changes))

    monkeypatch.setattr(attention, "paged_attention", wrong)
    assert "logits are off" in refusal(build_model(name))


def _decode_forgets_the_last_token(step):
    if step.is_decode:
        step.lengths = (step.lengths - 1).clamp(min=1)


def _rows_take_each_others_blocks(step):
    step.block_table = step.block_table.flip(0)


def _writes_go_astray(step):
    step.cache_index = step.cache_index.flip(0)


@pytest.mark.parametrize(
    "harm", [_decode_forgets_the_last_token, _rows_take_each_others_blocks, _writes_go_astray], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("name", ["rand", "gpt2"])
def test_a_wrong_cache_is_noticed(monkeypatch, name, harm):
    right = attention.write_cache

    def wrong(key, value, keys, values, step):
        if not hasattr(step, "harmed"):
            step.harmed = True
            harm(step)
        right(key, value, keys, values, step)

    monkeypatch.setattr(attention, "write_cache", wrong)
    assert "logits are off" in refusal(build_model(name))


def test_the_probe_is_a_few_short_forwards(monkeypatch):
    model = build_model("mistral")
    fed = []
    model.register_forward_pre_hook(lambda _, args, kwargs: fed.append(kwargs["input_ids"].numel()), with_kwargs=True)
    pack(model)
    assert len(fed) <= 10
    assert sum(fed) <= 120
