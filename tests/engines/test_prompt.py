"""Requests against a model's limits, and plain texts against Hugging Face's own ids."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from support.prompts import CONTEXT, preparer, refusal, user
from support.tokenizers import CHAT_TEMPLATE, MARKERS, TEXTS, ZOO, byte_level, sentencepiece_like, slow_byte_level

from mini_infer.engines.api import FinishReason, OutputOptions, Request, Sampling, StopConditions
from mini_infer.engines.errors import InvalidRequest
from mini_infer.engines.preparation import BUILT_IN_SAMPLING

TEXT = preparer()


def test_defaults_are_filled_in() -> None:
    prepared = TEXT.prepare(Request(key="k", prompt="Hello", output=OutputOptions(logprobs=True), deadline_ns=7))
    assert prepared.prompt_ids == tuple(byte_level().encode("Hello"))
    assert (prepared.key, prepared.deadline_ns, prepared.output.logprobs) == ("k", 7, True)
    assert prepared.sampling == BUILT_IN_SAMPLING
    assert prepared.stop == StopConditions(max_new_tokens=CONTEXT - 5)
    assert prepared.limit_reason == FinishReason.CONTEXT_LENGTH
    assert prepared.eos_token_ids == {256}
    assert pickle.loads(pickle.dumps(prepared)) == prepared


@pytest.mark.parametrize(
    ("context", "asked", "limit", "reason"),
    [
        (1000, None, 512, FinishReason.MAX_NEW_TOKENS),
        (517, None, 512, FinishReason.MAX_NEW_TOKENS),
        (516, None, 511, FinishReason.CONTEXT_LENGTH),
        (1000, 700, 700, FinishReason.MAX_NEW_TOKENS),
        (1000, 995, 995, FinishReason.MAX_NEW_TOKENS),
        (1000, 996, 995, FinishReason.CONTEXT_LENGTH),
        (1000, 2**31, 995, FinishReason.CONTEXT_LENGTH),
        (6, 1, 1, FinishReason.MAX_NEW_TOKENS),
        (6, 2, 1, FinishReason.CONTEXT_LENGTH),
    ],
)
def test_new_tokens_are_cut_to_what_the_context_leaves(
    context: int, asked: int | None, limit: int, reason: FinishReason
) -> None:
    text = preparer(context_length=context)
    prepared = text.prepare(Request(key="k", prompt="Hello", stop=StopConditions(max_new_tokens=asked)))
    assert (prepared.stop.max_new_tokens, prepared.limit_reason) == (limit, reason)


@pytest.mark.parametrize("field", ["prompt", "prompt_token_ids.ids", "chat"])
def test_prompt_must_leave_room_for_one_token(field: str) -> None:
    frame = len(TEXT.tokenize(user("")))

    def request(length: int) -> Request:
        if field == "prompt":
            return Request(key="k", prompt="x" * length)
        if field == "chat":
            return Request(key="k", chat=user("x" * (length - frame)))
        return Request(key="k", prompt_token_ids=(65,) * length)

    prepared = TEXT.prepare(request(CONTEXT - 1))
    assert (len(prepared.prompt_ids), prepared.stop.max_new_tokens) == (CONTEXT - 1, 1)
    for length in (CONTEXT, CONTEXT + 1, CONTEXT * 50):
        error = refusal(request(length), TEXT)
        assert (error.field, error.reason) == (field, "PROMPT_TOO_LONG")
        assert str(length) in error.message
        assert str(CONTEXT) in error.message


def test_least_new_tokens_against_most() -> None:
    def stop(least: int, most: int | None) -> Request:
        return Request(key="k", prompt="Hello", stop=StopConditions(min_new_tokens=least, max_new_tokens=most))

    assert TEXT.prepare(stop(5, 5)).stop.min_new_tokens == 5
    assert refusal(stop(6, 5), TEXT).field == "stop.min_new_tokens"
    assert refusal(stop(513, None), TEXT).field == "stop.min_new_tokens"
    assert TEXT.prepare(stop(500, 500)).stop.min_new_tokens == CONTEXT - 5  # cut with max_new_tokens


@pytest.mark.parametrize(
    ("field", "request_"),
    [
        ("prompt_token_ids.ids", Request(key="k", prompt_token_ids=(1, 600))),
        ("prompt_token_ids.ids", Request(key="k", prompt_token_ids=(2**32 - 1,))),
        ("prompt_token_ids.ids", Request(key="k", prompt_token_ids=(-1,))),
        ("prompt_token_ids.ids", Request(key="k", prompt_token_ids=())),
        ("stop.token_ids", Request(key="k", prompt="x", stop=StopConditions(token_ids=(5, 600)))),
        ("sampling.logit_bias", Request(key="k", prompt="x", sampling=Sampling(logit_bias={600: 1.0}))),
        ("prompt", Request(key="k", prompt="")),
        ("prompt", Request(key="k")),
        ("chat", Request(key="k", chat=())),
    ],
)
def test_fields_are_named(field: str, request_: Request) -> None:
    assert refusal(request_, TEXT).field == field


def test_the_last_id_of_the_vocabulary_is_good() -> None:
    stop, sampling = StopConditions(token_ids=(0, 599)), Sampling(logit_bias={0: 1.0, 599: -1.0})
    prepared = TEXT.prepare(Request(key="k", prompt_token_ids=(0, 599), stop=stop, sampling=sampling))
    assert (prepared.prompt_ids, prepared.stop.token_ids) == ((0, 599), (0, 599))
    assert prepared.sampling.logit_bias == {0: 1.0, 599: -1.0}


def test_a_prompt_that_the_model_has_no_row_for() -> None:
    error = refusal(Request(key="k", prompt="x<|im_end|>"), preparer(vocab_size=257))
    assert error.field == "prompt"
    assert "token id 258" in error.message


def test_ignore_eos_takes_the_end_tokens_away() -> None:
    request = Request(key="k", prompt="x", stop=StopConditions(ignore_eos=True))
    assert TEXT.prepare(request).eos_token_ids == frozenset()


def test_seed_is_drawn_for_sampling_only() -> None:
    def seed(**sampling: Any) -> int | None:
        return TEXT.prepare(Request(key="k", prompt="x", sampling=Sampling(**sampling))).sampling.seed

    assert seed() is None
    assert seed(temperature=0.0, seed=3) is None
    assert seed(temperature=0.5, top_k=1, seed=3) is None
    assert seed(temperature=0.5, min_p=1.0, seed=3) is None
    assert seed(temperature=0.5, seed=0) == 0
    assert seed(temperature=0.5, seed=2**64 - 1) == 2**64 - 1
    drawn = {seed(temperature=0.5) for _ in range(50)}
    assert len(drawn) == 50
    assert all(isinstance(value, int) and 0 <= value < 2**64 for value in drawn)


def test_odd_numbers_are_the_servers_business() -> None:
    for number in (float("nan"), float("inf"), -1.0, 1e308):
        TEXT.prepare(Request(key="k", prompt="x", sampling=Sampling(temperature=number, top_p=number)))


@pytest.mark.parametrize("name", ZOO)
def test_plain_texts_are_tokenized_as_the_tokenizer_does(name: str) -> None:
    tokenizer = ZOO[name](None)
    text = preparer(tokenizer, vocab_size=10_000)
    for sample in (*TEXTS, " x", "x ", "\n", MARKERS[0]):
        ids = text.tokenize(sample)
        assert list(ids) == tokenizer.encode(sample)
        assert text.detokenize(ids) == tokenizer.decode(list(ids), skip_special_tokens=True)


def test_begin_token_makes_an_empty_prompt_good() -> None:
    assert preparer(sentencepiece_like()).prepare(Request(key="k", prompt="")).prompt_ids == (1,)
    with pytest.raises(InvalidRequest, match=r"^prompt: the prompt is empty, and this model's tokenizer adds no token"):
        TEXT.prepare(Request(key="k", prompt=""))


def test_control_tokens_in_a_plain_prompt_are_control_tokens() -> None:
    assert 258 in TEXT.tokenize("a<|im_end|>b")


def test_detokenize() -> None:
    ids = TEXT.tokenize("Hi<|im_end|>👋")
    assert TEXT.detokenize(ids) == "Hi👋"
    assert TEXT.detokenize(ids, skip_special_tokens=False) == "Hi<|im_end|>👋"
    assert TEXT.detokenize(()) == ""
    assert TEXT.detokenize((599,)) == ""  # a row of the model without a piece of text
    assert TEXT.detokenize(ids[-1:]) == "\N{REPLACEMENT CHARACTER}"
    for bad in (600, -1, 2**31, 2**40):
        with pytest.raises(InvalidRequest) as caught:
            TEXT.detokenize((1, bad))
        assert caught.value.field == "token_ids"


def longest_hold(work: Callable[[], object]) -> float:
    """The longest time in which no other thread came to run, as a share of the time that the work took."""
    ticks = [time.monotonic()]
    done = threading.Event()

    def tick() -> None:
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    begin = time.monotonic()
    work()
    end = time.monotonic()
    done.set()
    thread.join()
    during = [begin, *(at for at in ticks if begin < at < end), end]
    return max(later - earlier for earlier, later in pairwise(during)) / (end - begin)


def test_other_threads_run_while_a_long_text_is_tokenized() -> None:
    """Or else all streams and health checks of a server would stand still for that second."""
    text = preparer()
    words = "word " * 200_000
    assert longest_hold(lambda: text.tokenize(words)) < 0.5
    assert longest_hold(lambda: text.tokenize(user(words))) < 0.5
    assert longest_hold(lambda: text.tokenize(user(words + MARKERS[0]))) < 0.5
    ids = text.tokenize(words)
    assert longest_hold(lambda: text.detokenize(ids)) < 0.5


def test_a_truncating_tokenizer_file_does_not_truncate() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert len(preparer(tokenizer).tokenize("x" * 50)) == 50


@pytest.mark.parametrize("build", [byte_level, slow_byte_level])
def test_many_threads(build: Any) -> None:
    text = preparer(build(CHAT_TEMPLATE))
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        try:
            start.wait()
            for turn in range(60):
                content = f"{number} {turn} <|im_end|>" if build is byte_level else f"{number} {turn}"
                prepared = text.prepare(Request(key="k", chat=user(content)))
                assert content in text.detokenize(prepared.prompt_ids, skip_special_tokens=False)
                assert text.detokenize(text.tokenize(content * 3), skip_special_tokens=False) == content * 3
        except BaseException as error:  # noqa: BLE001 - the main thread asserts
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
