import random
from types import SimpleNamespace

import pytest
from tests.text.tiny_tokenizers import KINDS, random_text, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models

from octavo.errors import ModelFileError
from octavo.text.detokenizer import Detokenizer, TokenBytes


def chunks(rng, items):
    start = 0
    while start < len(items):
        end = start + rng.choice((1, 1, 1, 2, 3, 7))
        yield items[start:end]
        start = end


def deltas(tokenizer, ids, rng, skip=True):
    stream = Detokenizer(tokenizer, skip)
    out = [stream.push(part) for part in chunks(rng, ids)]
    return [*out, stream.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_L02_deltas_concatenate_to_the_full_decode_of_the_library(kind):
    rng, tokenizer = random.Random(kind), tiny_tokenizer(kind)
    for _ in range(2000):
        ids = tokenizer.encode(random_text(rng))
        for skip in (True, False):
            full = tokenizer.backend.decode(ids, skip_special_tokens=skip)
            assert "".join(deltas(tokenizer, ids, rng, skip)) == full == tokenizer.decode(ids, skip)


@pytest.mark.parametrize("kind", KINDS)
def test_L02_random_ids_too(kind):
    """Random ids are mostly no UTF-8. A byte-level library decode is met exactly; byte fallback by Unicode's rule."""
    rng, tokenizer = random.Random(kind), tiny_tokenizer(kind)
    num_compared = 0
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(12))]
        skip = rng.random() < 0.5
        out = deltas(tokenizer, ids, rng, skip)
        full = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert "".join(out) == tokenizer.decode(ids, skip)
        if kind == "byte_level" or "\ufffd" not in full:
            num_compared += 1
            assert "".join(out) == full
    assert num_compared > 400


def test_L02_never_half_a_character():
    for kind in ("byte_level", "sentencepiece"):
        tokenizer = tiny_tokenizer(kind)
        ids = tokenizer.encode("xไ🙂y한")
        stream = Detokenizer(tokenizer)
        out = [stream.push([token_id]) for token_id in ids]
        assert "".join(out) == "xไ🙂y한"
        assert stream.flush() == ""
        assert not any("\ufffd" in delta for delta in out)
        assert any(delta == "" for delta in out)


def test_L02_an_unfinished_character_comes_at_the_end():
    tokenizer = tiny_tokenizer("byte_level")
    ids = tokenizer.encode("한")[:2]
    stream = Detokenizer(tokenizer)
    assert stream.push(ids) == ""
    assert stream.flush() == "\ufffd" == tokenizer.backend.decode(ids)


def test_L02_a_later_bad_byte_does_not_destroy_a_character_already_sent():
    """tokenizers' ByteFallback would turn the whole run of byte tokens into U+FFFD."""
    tokenizer = tiny_tokenizer("sentencepiece")
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in (0xC3, 0xBC, 0xFF)]
    assert tokenizer.decode(ids) == "ü\ufffd"
    assert tokenizer.backend.decode(ids) == "\ufffd\ufffd\ufffd"


def test_L02_the_first_space_of_sentencepiece_is_cut_once():
    tokenizer = tiny_tokenizer("sentencepiece")
    for text, shown in (("the cat", "the cat"), ("", ""), ("  the", " the")):
        ids = tokenizer.encode(text)
        stream = Detokenizer(tokenizer)
        assert "".join([*(stream.push([i]) for i in [1, *ids]), stream.flush()]) == shown
        assert tokenizer.backend.decode([1, *ids]) == shown


class CountedPieces:
    """A tokenizer's pieces, which count how often they are asked for one."""

    strip_start = 0

    def __init__(self, pieces):
        self._pieces = pieces
        self.num = 0

    def __getitem__(self, token_id):
        self.num += 1
        return self._pieces[token_id]

    def at_start(self, token_id):
        self.num += 1
        return self._pieces.at_start(token_id)


def test_row_23_the_32000th_token_costs_what_the_first_did():
    """The state is at most three bytes, and each id is looked at once, whether or not it ever makes valid UTF-8."""
    tokenizer = tiny_tokenizer("byte_level")
    continuation = tokenizer.backend.token_to_id("Ģ")  # byte 0x80, which can begin nothing
    mixed = tokenizer.encode("the cat 猫 🙂 ")
    for ids in ([continuation] * 32_000, (mixed * (32_000 // len(mixed) + 1))[:32_000]):
        lookups = CountedPieces(tokenizer.pieces)
        stream = Detokenizer(SimpleNamespace(pieces=lookups, special_ids=tokenizer.special_ids))
        for count, token_id in enumerate(ids, 1):
            stream.push([token_id])
            assert lookups.num == count
            assert len(stream._utf8.getstate()[0]) <= 3
        assert set(Detokenizer.__slots__) == {"_has_text", "_pieces", "_skipped_ids", "_strip", "_utf8"}


def test_nothing_in_nothing_out():
    for kind in KINDS:
        stream = Detokenizer(tiny_tokenizer(kind))
        assert stream.push([]) + stream.push([1, 2]) + stream.flush() == ""


def test_ids_without_a_token_add_nothing():
    tokenizer = tiny_tokenizer("byte_level")
    the = tokenizer.encode("the")
    assert tokenizer.decode([*the, tokenizer.vocab_size + 5, *the]) == "thethe"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.CTC(),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Replace("x", "y"),
    ],
)
def test_decoders_that_cannot_stream_exactly_are_refused(decoder, tmp_path):
    backend = Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoder
    with pytest.raises(ModelFileError, match=r"decoder .* is not supported"):
        TokenBytes(backend, tmp_path / "tokenizer.json")
