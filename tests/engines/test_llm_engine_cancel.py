"""LLMEngine on SCRIPT: whatever ends a stream, wherever it is, its slot and its blocks are free at once."""

import contextlib
import random
import threading
import time
from types import SimpleNamespace

import pytest
from support.events import ask, assert_lawful
from support.scripted_model import AHEAD, ENDLESS, EOS, HELLO, LONG, PACKED, Gate, ModelScript, assert_rested, running

from mini_infer.engines import owner
from mini_infer.engines.api import Delta, EngineState, Finished, FinishReason, StopConditions
from mini_infer.engines.errors import DeadlineExceeded, StreamFailed

RAW = ModelScript(raw=True)
BLOCK = 4
KINDS = pytest.mark.parametrize("kind", [PACKED, AHEAD])


class Stand:
    """An engine that makes one step for each that is let, with a neighbour that decodes, and a clock to advance.

    The neighbour's answer is the model's own, so that every mistake in its cache shows.
    """

    def __init__(self, engine, model, recorder, monkeypatch):
        self.engine, self.model, self.recorder = engine, model, recorder
        self._late_ns = 0
        clock = SimpleNamespace(monotonic_ns=lambda: time.monotonic_ns() + self._late_ns)
        monkeypatch.setattr(owner, "time", clock)
        ask(engine, "alone", "neighbour", stop=StopConditions(max_new_tokens=60, ignore_eos=True))
        recorder.wait_end("alone")
        self.gate = self.model.gate = Gate()
        ask(engine, "neighbour", "neighbour", stop=StopConditions(max_new_tokens=60, ignore_eos=True))
        self.gate.wait_arrived(1)

    def step(self, number=1):
        """Lets some steps be made, and returns when the next one is about to be."""
        arrived = self.gate.num_arrived
        self.gate.let(number)
        self.gate.wait_arrived(arrived + number)

    def step_until(self, condition):
        for _ in range(300):
            if condition():
                return
            self.step()
        raise AssertionError("it never came to that")

    def of(self, key):
        return self.engine.scheduler.get(key)

    def let_deadlines_pass(self):
        self._late_ns += int(7200e9)

    def assert_gone(self, key):
        """Nothing of the stream is left, though the engine works on; what is taken belongs to those who are here."""
        scheduler, pool = self.engine.scheduler, self.engine.pool
        assert scheduler.get(key) is None
        assert scheduler.get("neighbour") is not None, "the engine is about to rest"
        pool.check()
        taken = {block for sequence in scheduler.sequences for block in sequence.blocks}
        assert pool.num_free == pool.capacity - len(taken)
        assert len(scheduler._free_slots) == self.engine.max_running - scheduler.num_running
        assert key not in self.engine._begun

    def finish(self, *keys):
        """Lets the rest run, and looks at the whole: every stream had one end, and the neighbour its own answer."""
        self.gate.open()
        for key in ("neighbour", *keys):
            self.recorder.wait_end(key)
            assert_lawful(self.recorder, key)
        assert self.recorder.ids("neighbour") == self.recorder.ids("alone")
        assert_rested(self.engine)


@contextlib.contextmanager
def standing(scripts, monkeypatch, **options):
    """A `Stand` on an engine that goes on freely in the end."""
    with running({None: HELLO, "neighbour": RAW, **scripts}, **options) as (engine, model, recorder):
        stand = Stand(engine, model, recorder, monkeypatch)
        try:
            yield stand
        finally:
            stand.gate.open()


def soon_ns():
    return time.monotonic_ns() + int(3600e9)


# --- the places where a stream may be: each brings "victim" there and leaves the engine before a step ---


def queued(stand):
    ask(stand.engine, "second", "other", stop=LONG)
    stand.step_until(lambda: stand.of("second") is not None and stand.of("second").slot is not None)
    ask(stand.engine, "victim", "vi", stop=LONG, deadline_ns=soon_ns())
    stand.step(3)
    assert stand.of("victim") is None
    return {"second"}


def waiting_for_blocks(stand):
    ask(stand.engine, "victim", "v" * 137, stop=StopConditions(max_new_tokens=5), deadline_ns=soon_ns())
    stand.step(3)
    assert stand.of("victim").slot is None
    assert "victim" not in stand.engine._begun
    return set()


def prefilling(stand):
    ask(stand.engine, "victim", "v" * 40, stop=LONG, deadline_ns=soon_ns())
    stand.step_until(lambda: stand.of("victim") is not None and 0 < stand.of("victim").num_computed < 40)
    stand.step()
    assert not stand.of("victim").pending
    return set()


def decoding(stand):
    ask(stand.engine, "victim", "vi", stop=StopConditions(max_new_tokens=90), deadline_ns=soon_ns())
    stand.step_until(lambda: stand.recorder.num_tokens("victim") >= 2)
    return set()


def preempted_while_prefilling(stand):
    return preempted(stand, 110)


def preempted(stand, num_prompt_tokens=84):
    wishes = {"stop": StopConditions(max_new_tokens=30), "deadline_ns": soon_ns()}
    ask(stand.engine, "victim", "v" * num_prompt_tokens, **wishes)
    stand.step_until(lambda: stand.of("victim") is not None and stand.of("victim").slot is not None)
    stand.step_until(lambda: stand.of("victim").slot is None)
    assert "victim" in stand.engine._begun
    assert (stand.of("victim").num_answer_tokens > 0) == (num_prompt_tokens == 84)
    return set()


def readmitted(stand):
    ask(stand.engine, "third", "other", stop=StopConditions(max_new_tokens=40, ignore_eos=True))
    ask(stand.engine, "victim", "v" * 78, stop=StopConditions(max_new_tokens=30), deadline_ns=soon_ns())
    stand.step_until(lambda: stand.of("victim") is not None and stand.of("victim").num_admissions == 2)
    return {"third"}


PLACES = [queued, waiting_for_blocks, prefilling, decoding, preempted_while_prefilling, preempted, readmitted]


def options_of(place, kind):
    """A cache of 36 blocks of 4 tokens; prompts go in chunks of 2 to 8."""
    num_slots = 2 if place is queued else 4
    return {"kind": kind, "block_size": BLOCK, "max_running": num_slots, "cache_tokens": 144, "prefill_tokens": 8}


@KINDS
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("way", ["cancel", "deadline"])
def test_an_interrupted_stream_leaves_nothing_wherever_it_is(place, way, kind, monkeypatch):
    with standing({"other": RAW}, monkeypatch, **options_of(place, kind)) as stand:
        engine, recorder = stand.engine, stand.recorder
        others = place(stand)
        num_tokens = recorder.num_tokens("victim")
        if way == "cancel":
            engine.cancel("victim")
            engine.cancel("victim")
        else:
            stand.let_deadlines_pass()
        stand.step()
        stand.assert_gone("victim")
        end = recorder.wait_end("victim")
        stand.finish("victim", *others)
        if way == "cancel":
            assert end.reason is FinishReason.CANCELLED
            assert end.usage.completion_tokens == recorder.num_tokens("victim")
        else:
            assert isinstance(end.error, DeadlineExceeded)
        assert num_tokens <= recorder.num_tokens("victim") <= num_tokens + 2
        assert recorder.text("victim") == "Hello"[: recorder.num_tokens("victim")]


ENDS = {
    "eos": (ModelScript(ids=b"abc"), StopConditions(), FinishReason.EOS, "abc"),
    "stop token": (ENDLESS, StopConditions(token_ids=(ord("c"),)), FinishReason.STOP_TOKEN, "ab"),
    "stop string": (ENDLESS, StopConditions(strings=("c a",)), FinishReason.STOP_STRING, "ab"),
    "limit": (ENDLESS, StopConditions(max_new_tokens=6), FinishReason.MAX_NEW_TOKENS, "abc ab"),
    "no number": (ModelScript(ids=b"abc", nan_at=3), StopConditions(), StreamFailed, "ab"),
    "no text": (ENDLESS, StopConditions(strings=("",)), StreamFailed, ""),  # what it asks for breaks the text side
}


@KINDS
@pytest.mark.parametrize("way", ENDS)
@pytest.mark.parametrize("prompt", ["vi", "v" * 21], ids=["short", "in chunks"])
def test_a_stream_that_ends_by_itself_leaves_nothing(way, prompt, kind, monkeypatch):
    script, stop, why, text = ENDS[way]
    with standing({prompt: script}, monkeypatch, **options_of(decoding, kind)) as stand:
        ask(stand.engine, "victim", prompt, stop=stop)
        stand.step_until(lambda: stand.recorder.ends("victim"))
        stand.step(2)
        stand.assert_gone("victim")
        stand.finish("victim")
        end = stand.recorder.ends("victim")[0]
        assert end.reason is why if isinstance(end, Finished) else type(end.error) is why
        assert stand.recorder.text("victim") == text


@KINDS
def test_an_answer_whose_text_ends_while_its_stream_was_sent_back_to_wait(kind, monkeypatch):
    with standing({}, monkeypatch, **options_of(preempted, kind)) as stand:
        preempted(stand)
        stand.engine._text_side.finish("victim", FinishReason.STOP_STRING)
        stand.recorder.wait_end("victim")
        stand.engine._note_ended(["victim"])  # as where the text of its last token has just shown the string
        stand.step()
        stand.assert_gone("victim")
        stand.finish("victim")


@KINDS
def test_an_unknown_key_and_one_that_has_ended_are_ignored(kind):
    with running(kind=kind) as (engine, _, recorder):
        engine.cancel("nobody")
        ask(engine, "a")
        assert recorder.wait_end("a").reason is FinishReason.EOS
        engine.cancel("a")
        ask(engine, "a")  # the same key anew is another stream
        recorder.wait_for(lambda: len(recorder.ends("a")) == 2)
        assert recorder.ends("a")[1].reason is FinishReason.EOS
        assert recorder.text("a") == "HelloHello"
        assert_rested(engine)


@KINDS
def test_cancels_at_random_moments_around_the_last_token(kind):
    with running(ModelScript(ids=b"ab"), kind=kind, max_running=4) as (engine, _, recorder):
        rng = random.Random(0)
        keys = [f"{i}" for i in range(400)]
        reasons = []
        for turn in range(0, len(keys), 4):
            for key in keys[turn : turn + 4]:
                ask(engine, key)
            threading.Event().wait(rng.uniform(0, 0.012))
            for key in keys[turn : turn + 4] * rng.randint(1, 2):
                engine.cancel(key)
        for key in keys:
            end = recorder.wait_end(key)
            reasons.append(end.reason)
            assert end.reason in (FinishReason.CANCELLED, FinishReason.EOS)
            assert end.usage.completion_tokens == recorder.num_tokens(key)
            assert "ab".startswith(recorder.text(key))
            assert end.reason is FinishReason.CANCELLED or recorder.ids(key) == [*b"ab", EOS]
            assert_lawful(recorder, key)
        assert set(reasons) == {FinishReason.CANCELLED, FinishReason.EOS}
        assert_rested(engine)


@KINDS
def test_a_key_that_is_used_again_right_after_its_end(kind):
    """The next stream comes from the very call that hands over the end, and half of them are cancelled meanwhile."""
    ends = {
        "eos": StopConditions(),
        "string": StopConditions(strings=("b",)),
        "limit": StopConditions(max_new_tokens=2),
    }
    with running(ModelScript(ids=b"abc"), kind=kind, max_running=2) as (engine, _, _):
        rng = random.Random(1)
        num_rounds, done = 150, threading.Event()
        reasons = {key: [] for key in ends}
        texts = dict.fromkeys(ends, "")

        def again(events):
            for event in events:
                if isinstance(event, Delta):
                    texts[event.key] += event.text
                elif isinstance(event, Finished):
                    next_one(event)

        def next_one(end):
            key, text = end.key, texts[end.key]
            whole = {"eos": "abc", "string": "a", "limit": "ab"}[key]
            assert text == whole or (end.reason is FinishReason.CANCELLED and whole.startswith(text))
            reasons[key].append(end.reason)
            texts[key] = ""
            if len(reasons[key]) < num_rounds:
                ask(engine, key, stop=ends[key])
            elif min(map(len, reasons.values())) == num_rounds:
                done.set()

        engine._delivery._emit = again
        for key, stop in ends.items():
            ask(engine, key, stop=stop)
        while not done.wait(rng.uniform(0, 0.01)) and engine.state is EngineState.READY:
            engine.cancel(rng.choice(sorted(ends)))
        assert_rested(engine)
        assert engine.state is EngineState.READY
        assert set().union(*reasons.values()) == {
            FinishReason.CANCELLED,
            FinishReason.EOS,
            FinishReason.STOP_STRING,
            FinishReason.MAX_NEW_TOKENS,
        }
