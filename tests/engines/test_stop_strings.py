from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mini_infer.engines.stop_strings import StopMatcher

strings = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def reference(text: str, stops: list[str], first_end: int = 1) -> tuple[str, str | None]:
    """Text before the stop string that ends first, at ``first_end`` characters or later; the longest of those."""
    for end in range(first_end, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            matched = max(ending, key=len)
            return text[:end].removesuffix(matched), matched
    return text, None


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include=include)
    text = "".join(map(matcher.feed, pieces)) + matcher.flush()
    return text, matcher.matched


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(at % (len(text) + 1) for at in cuts)})
    return [text[start:end] for start, end in pairwise(edges)]


@given(text=st.text("abc", max_size=40), stops=strings, cuts=st.lists(st.integers(0, 99)), include=st.booleans())
def test_it_agrees_with_the_naive_search_however_the_text_is_cut(text, stops, cuts, include):
    before, matched = reference(text, stops)
    expected = before + (matched or "") if include else before
    assert run(cut(text, cuts), stops, include=include) == (expected, matched)


@given(text=st.text(max_size=40), stops=st.lists(st.text(min_size=1, max_size=3), min_size=1, max_size=16))
def test_any_characters_will_do(text, stops):
    assert run(list(text), stops) == reference(text, stops)
    assert run([text], stops) == reference(text, stops)
    wrapped = text + stops[0] + text
    assert run([wrapped], stops) == reference(wrapped, stops)


@given(text=st.text("abc", max_size=40), stops=strings, cuts=st.lists(st.integers(0, 99)))
def test_it_holds_back_exactly_the_longest_suffix_that_may_become_a_stop_string(text, stops, cuts):
    matcher, fed, released = StopMatcher(stops), "", ""
    prefixes = {stop[:length] for stop in stops for length in range(len(stop))}
    for piece in cut(text, cuts):
        fed += piece
        released += matcher.feed(piece, counts=False)
        held = next(fed[start:] for start in range(len(fed) + 1) if fed[start:] in prefixes)
        assert released + held == fed
    assert released + matcher.flush() == text
    assert matcher.matched is None


@given(text=st.text("abc", max_size=40), stops=strings, first=st.integers(0, 40))
def test_a_match_that_ends_too_early_does_not_count(text, stops, first):
    matcher = StopMatcher(stops)
    out = "".join(matcher.feed(letter, counts=end >= first) for end, letter in enumerate(text, 1)) + matcher.flush()
    assert (out, matcher.matched) == reference(text, stops, max(first, 1))


def test_overlapping_stops_end_at_the_first_that_is_complete():
    assert run(["abcd"], ["abcd", "bc"]) == ("a", "bc")
    assert run(["xabc"], ["c", "abc", "bc"]) == ("x", "abc")
    assert run(["aab"], ["ab"]) == ("a", "ab")


def test_after_a_match_nothing_comes_through():
    matcher = StopMatcher(["."])
    assert matcher.feed("One. Two.") == "One"
    assert matcher.feed(" Three.") == ""
    assert matcher.flush() == ""
    assert matcher.matched == "."


@pytest.mark.parametrize("strings", [[], [""], ["a", ""]])
def test_nothing_to_look_for_is_refused(strings):
    with pytest.raises(ValueError, match="must not be empty"):
        StopMatcher(strings)


class CountingList(list[int]):
    """Counts how often it is read: each fall back to a shorter suffix is one read."""

    num_reads = 0

    def __getitem__(self, index):
        self.num_reads += 1
        return super().__getitem__(index)


@pytest.mark.parametrize("stop", ["a" * 1024, "a" * 1023 + "b", "ab" * 511 + "ac", "a" * 511 + "b" + "a" * 512])
@pytest.mark.parametrize("letters", ["a", "ab", "a" * 1023 + "c"])
def test_self_similar_strings_cost_a_constant_per_character(stop, letters):
    text = (letters * 20_000)[:20_000]
    matcher = StopMatcher([stop, "b" * 1000])
    suffix = matcher._suffix = CountingList(matcher._suffix)
    for letter in text:
        matcher.feed(letter, counts=False)
    assert suffix.num_reads <= len(text) + 1024
