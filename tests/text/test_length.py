"""A text that fits is never said to be too long, and one that is far too long is found out early."""

import random

import pytest
from tests.text.tiny_tokenizers import KINDS, random_text, tiny_tokenizer

from octavo.text import tokenizer as length
from octavo.text.tokenizer import Tokenizer


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a few hundred characters, looked at in every text."""
    monkeypatch.setattr(length, "PART_CHARS", 200)
    monkeypatch.setattr(length, "_SEARCH_CHARS", 50)
    monkeypatch.setattr(length, "_LIKELY_CHARS", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_fits_is_never_refused(kind: str, small_parts: None) -> None:
    rng, tokenizer = random.Random(kind), tiny_tokenizer(kind)
    for _ in range(150):
        text = random_text(rng, 200) + " the cat" * rng.randrange(100)
        num = len(tokenizer.encode(text, False))
        for most in (num, num + 1, 2 * num + 1):
            assert tokenizer.num_tokens_if_over(text, most) is None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_said_is_no_more_than_there_are(kind: str, small_parts: None) -> None:
    rng, tokenizer = random.Random(kind), tiny_tokenizer(kind)
    found = 0
    for _ in range(150):
        text = random_text(rng, 400) * rng.choice((1, 3))
        num = len(tokenizer.encode(text, False))
        told = tokenizer.num_tokens_if_over(text, max(1, num // 3))
        assert told is None or num // 3 < told <= num
        found += told is not None
    assert found > 50 or kind in ("unigram", "words"), "these say one <unk> for many characters"


def test_the_parts_are_the_text_and_divide_no_word(small_parts: None) -> None:
    rng = random.Random(5)
    for _ in range(100):
        text = " ".join("x" * rng.randrange(1, 30) for _ in range(100)) + "y" * 500 + "  " * 300
        parts = list(length._parts(text))
        assert "".join(parts) == text and max(map(len, parts)) <= 200
        assert all(part[-1] not in " " for part in parts[:5])


def test_most_of_a_hopeless_text_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer("byte_level")
    seen: list[int] = []
    count = Tokenizer.count

    def counted(self: Tokenizer, text: str) -> int:
        seen.append(len(text))
        return count(self, text)

    monkeypatch.setattr(Tokenizer, "count", counted)
    text = "".join(chr(0x4E00 + index % 5000) for index in range(300_000))
    told = tokenizer.num_tokens_if_over(text, 30_000)
    assert told is not None and told > 30_000 and sum(seen) < 40_000
    assert tokenizer.num_tokens_if_over("x" * 10_000_000, 1000) == 10_000_000 // tokenizer.longest_piece
    assert sum(seen) < 40_000, "the length alone is enough"


def test_a_short_text_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "count", lambda *_: pytest.fail("it was"))
    assert tiny_tokenizer("byte_level").num_tokens_if_over("the cat " * 1000, 7000) is None
