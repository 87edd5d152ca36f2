"""A packed step of a stage gives each row what the model by itself gives, on many architectures."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.models import PACKABLE, build_model
from support.packing import attention_step, deal_blocks

from mini_infer.engines.guard import pack
from mini_infer.engines.kv_cache import KVCache
from mini_infer.engines.stage import StepInputs

pytestmark = [
    pytest.mark.floor,
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),  # transformers 5.17 scripts gpt_bigcode
]
PROMPTS = [random.Random(n).choices(range(256), k=n) for n in (20, 3, 33, 8)]
MAX_LENGTH = 48


class Packed:
    """A stage with its cache, and the ids of some sequences."""

    def __init__(self, model, sequences, block_size=4, scattered=True):
        self.stage = pack(model)
        self.sequences = [list(ids) for ids in sequences]
        self.block_size = block_size
        self.blocks = deal_blocks([MAX_LENGTH] * len(sequences), block_size, scattered=scattered)
        num_blocks = sum(map(len, self.blocks)) + 1
        self.cache = KVCache(self.stage.shapes, num_blocks, block_size, torch.float32, "cpu")
        for part in self.cache.keys + self.cache.values:
            part.fill_(float("nan"))  # what a former owner may have left
        self.stage.bind(self.cache)

    def inputs(self, rows, samples=None):
        """rows: (sequence, from, to); samples: indices of the rows whose logits are wanted."""
        step = attention_step([(start, end - start, self.blocks[row]) for row, start, end in rows], self.block_size)
        ends = [span.end - 1 for span in step.spans]
        return StepInputs(
            token_ids=torch.tensor([token for row, start, end in rows for token in self.sequences[row][start:end]]),
            positions=torch.tensor([position for _, start, end in rows for position in range(start, end)]),
            sample_index=torch.tensor(
                [ends[index] for index in (range(len(rows)) if samples is None else samples)]
            ).long(),
            attention=step,
        )

    def run(self, rows, samples=None):
        with torch.inference_mode():
            return self.stage.run(self.inputs(rows, samples))

    def decode(self):
        """Logits after all that the sequences hold; the last token of each is fed."""
        return self.run([(row, len(ids) - 1, len(ids)) for row, ids in enumerate(self.sequences)])


def own_logprobs(model, ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].log_softmax(-1)


@pytest.fixture(scope="module", params=list(PACKABLE))
def name(request):
    return request.param


@pytest.mark.parametrize("block_size", [4, 32])
def test_chunks_and_decodes_beside_each_other(name, block_size):
    model = build_model(name)
    expected = [own_logprobs(model, ids) for ids in PROMPTS]
    packed = Packed(model, PROMPTS, block_size)
    steps = [
        [(0, 0, 9), (1, 0, 1)],
        [(1, 1, 2), (0, 9, 18), (2, 0, 12), (3, 0, 7)],
        [(2, 12, 31), (0, 18, 19)],
        [(0, 19, 20), (1, 2, 3), (2, 31, 32), (3, 7, 8)],
        [(2, 32, 33)],
    ]
    for rows in steps:
        logprobs = packed.run(rows).log_softmax(-1)
        for got, (row, _, end) in zip(logprobs, rows, strict=True):
            torch.testing.assert_close(got, expected[row][end - 1], atol=1e-4, rtol=0)


def test_greedy_answers_depend_on_the_prompt_and_are_the_models_own(name):
    model = build_model(name)
    expected = []
    for prompt in PROMPTS:
        ids = list(prompt)
        for _ in range(12):
            ids.append(int(own_logprobs(model, ids)[-1].argmax()))
        expected.append(ids[len(prompt) :])
    packed = Packed(model, PROMPTS)
    logits = packed.run([(row, 0, len(ids)) for row, ids in enumerate(packed.sequences)])
    for _ in range(12):
        for ids, row in zip(packed.sequences, logits, strict=True):
            ids.append(int(row.argmax()))
        logits = packed.decode()
    answers = [ids[len(prompt) :] for ids, prompt in zip(packed.sequences, PROMPTS, strict=True)]
    assert answers == expected
    assert len(set(map(tuple, answers))) == len(PROMPTS), "the answers do not depend on the prompts"


def test_logits_only_of_the_tokens_that_are_asked_for():
    packed = Packed(build_model("rand"), PROMPTS)
    rows = [(0, 0, 5), (1, 0, 3)]
    assert packed.run(rows, samples=[]).shape == (0, packed.stage.vocab_size)
    assert packed.run(rows, samples=[1]).shape == (1, packed.stage.vocab_size)
    torch.testing.assert_close(packed.run(rows, samples=[1]), packed.run(rows)[1:], atol=1e-5, rtol=0)


def test_a_row_of_nan_spoils_no_other_and_no_later_owner_of_its_blocks():
    model = build_model("rand")
    expected = own_logprobs(model, PROMPTS[0])
    with torch.no_grad():
        model.get_input_embeddings().weight[300] = float("nan")
    model.requires_grad_(False)
    packed = Packed(model, [PROMPTS[0], [300] * 40])
    logprobs = packed.run([(1, 0, 40), (0, 0, 18)]).log_softmax(-1)
    assert logprobs[0].isnan().all()
    torch.testing.assert_close(logprobs[1], expected[17], atol=1e-4, rtol=0)
    logprobs = packed.run([(1, 39, 40), (0, 18, 19)]).log_softmax(-1)
    torch.testing.assert_close(logprobs[1], expected[18], atol=1e-4, rtol=0)
    packed.blocks.reverse()  # the sequence moves into the spoilt blocks
    packed.run([(0, 0, 18)])
    torch.testing.assert_close(packed.run([(0, 18, 19)]).log_softmax(-1)[0], expected[18], atol=1e-4, rtol=0)


def test_a_failed_step_can_be_run_again():
    model = build_model("rand")
    expected = own_logprobs(model, PROMPTS[1])
    packed = Packed(model, PROMPTS)
    inputs = packed.inputs([(1, 0, 3)])
    hook = model.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), torch.inference_mode():
        packed.stage.run(inputs)
    hook.remove()
    with torch.inference_mode():
        torch.testing.assert_close(packed.stage.run(inputs).log_softmax(-1)[0], expected[-1], atol=1e-4, rtol=0)


def test_two_models_in_two_threads_do_not_meet():
    names = ["rand", "gemma2_capped", "mistral", "gpt_oss"]
    models = [build_model(name) for name in names]
    expected = [[own_logprobs(model, ids)[-1] for ids in PROMPTS] for model in models]
    packed = [Packed(model, PROMPTS) for model in models]
    start = threading.Barrier(len(names))

    def work(packed, expected):
        start.wait()
        for _ in range(20):
            packed.run([(row, 0, len(ids) - 1) for row, ids in enumerate(PROMPTS)])
            torch.testing.assert_close(packed.decode().log_softmax(-1), torch.stack(expected), atol=1e-4, rtol=0)

    with ThreadPoolExecutor(len(names)) as threads:
        for done in [threads.submit(work, *each) for each in zip(packed, expected, strict=True)]:
            done.result()
