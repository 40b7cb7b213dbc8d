import json
import random

import pytest
from tests.text.tiny_tokenizers import KINDS, random_text, tiny_backend_json, tiny_tokenizer
from tokenizers import Tokenizer as Backend
from tokenizers import processors

from octavo.errors import InvalidRequestError, ModelFileError
from octavo.text.tokenizer import Tokenizer


@pytest.fixture
def load(tmp_path):
    def load(backend_json=None, **files):
        (tmp_path / "tokenizer.json").write_text(backend_json or tiny_backend_json("byte_level"), encoding="utf-8")
        for name, value in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(value))
        return Tokenizer.from_folder(tmp_path)

    return load


NAMED = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "unk_token": None}


def test_a_folder(load):
    tokenizer = load(tokenizer_config=NAMED, generation_config={"eos_token_id": [7, 2]}, config={"eos_token_id": 5})
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (7, 2))
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 318
    assert load(tokenizer_config={}, generation_config={}, config={"eos_token_id": 5}).eos_token_ids == (5,)


def test_bos_and_eos_are_those_of_tokenizer_json(load):
    backend = Backend.from_str(tiny_backend_json("byte_level"))
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    plain = load(tokenizer_config=NAMED | {"add_bos_token": True}).encode("the")
    both = load(backend.to_str(), tokenizer_config=NAMED | {"add_bos_token": False})
    assert both.encode("the") == [1, *plain, 2]
    assert both.encode("the", add_special_tokens=False) == plain


def test_special_tokens_in_a_text_become_their_ids(load):
    tokenizer = load()
    ids = tokenizer.encode("the<s>cat</s>")
    assert 1 in ids and ids[-1] == 2
    assert (tokenizer.decode(ids), tokenizer.decode(ids, False)) == ("thecat", "the<s>cat</s>")


def test_tokens_that_only_the_configuration_knows_are_added(load):
    entries = {
        "319": {"content": "<b>", "special": False},
        "318": {"content": "<a>", "special": True},
        "1": {"content": "<s>"},
    }
    tokenizer = load(tokenizer_config={"added_tokens_decoder": entries})
    assert tokenizer.encode("<a><b>") == [318, 319]
    assert tokenizer.special_ids == {0, 1, 2, 318}


def test_bug_35_prompts_are_never_cut_or_padded(load):
    backend = Backend.from_str(tiny_backend_json("byte_level"))
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    tokenizer = load(backend.to_str())
    assert len(tokenizer.encode("the cat sat on the mat " * 5)) > 8
    assert len(tokenizer.encode("the")) < 8


@pytest.mark.parametrize("kind", KINDS)
def test_token_bytes_join_to_the_text(kind):
    tokenizer, rng = tiny_tokenizer(kind), random.Random(3)
    for _ in range(200):
        ids = tokenizer.encode(random_text(rng))
        joined = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")
        assert joined.lstrip(" ") == tokenizer.decode(ids, skip_special_tokens=False).lstrip(" ")


def test_pieces_and_bytes_of_single_ids():
    byte_level, sentencepiece = tiny_tokenizer("byte_level"), tiny_tokenizer("sentencepiece")
    the = byte_level.encode(" the")[0]
    assert (byte_level.id_to_piece(the), byte_level.token_bytes(the)) == ("Ġthe", b" the")
    assert sentencepiece.token_bytes(3 + 0xE7) == b"\xe7"
    assert sentencepiece.id_to_piece(3 + 0xE7) == "<0xE7>"
    assert (byte_level.id_to_piece(99999), byte_level.token_bytes(99999)) == ("", b"")


def test_lone_surrogates_and_impossible_ids_are_refused():
    tokenizer = tiny_tokenizer("byte_level")
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 1"):
        tokenizer.encode("a\ud800")
    for bad in (-1, 1 << 31):
        with pytest.raises(InvalidRequestError, match="token ids"):
            tokenizer.decode([bad])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"model": {"type": "BPE"}}', "\xff"])
def test_damaged_files_are_refused(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path):
    with pytest.raises(ModelFileError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer.from_folder(tmp_path)


def test_truncated_and_mutated_files_are_read_or_refused(tmp_path):
    rng = random.Random(4)
    whole = tiny_backend_json("sentencepiece")
    refused = 0
    for _ in range(60):
        at = rng.randrange(len(whole))
        text = whole[:at] if rng.random() < 0.5 else whole[:at] + rng.choice('{}[]",:0x\\') + whole[at + 1 :]
        (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
        try:
            Tokenizer.from_folder(tmp_path).encode("the cat")
        except ModelFileError:
            refused += 1
    assert refused > 30


def test_equal_to_transformers_from_the_same_folder(load, tmp_path):
    transformers = pytest.importorskip("transformers")
    rng = random.Random(6)
    for kind in ("byte_level", "sentencepiece"):
        for flags in ({}, {"add_bos_token": True}):
            config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **flags}
            mine = load(tiny_backend_json(kind), tokenizer_config=config)
            theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
            for _ in range(100):
                text = random_text(rng)
                assert mine.encode(text) == theirs.encode(text)
