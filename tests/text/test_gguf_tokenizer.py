import random

import numpy as np
import pytest
from tests.artifacts.gguf_writing import LLAMA, write_gguf, write_llama
from tests.text.tiny_tokenizers import SPECIAL, random_text, sentencepiece_parts

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ModelFileError
from octavo.text.detokenizer import byte_alphabet
from octavo.text.gguf_tokenizer import GGUFVocabulary, build_gguf_backend
from octavo.text.pre_tokenizers import SPLITS
from octavo.text.text_model import TextModel
from octavo.text.tokenizer import Tokenizer

STRINGS = [
    "",
    " ",
    "Hello world",
    "  leading and trailing  ",
    "tabs\tand\nlines\r\n\r\nend",
    "\n\n\n",
    "    indented = 1\n        deeper()\n",
    "don't you've we'll I'M",
    "1 22 333 4444 3.14159 1e-9 0x1F 100,000",
    "a1b2c3 v1.2.3 2024-05-06T07:08:09",
    "   12   345",
    "1. one\n2. two",
    "naïve café résumé Ångström",
    "e\u0301 vs é, ﬁ ligature, ½ ² Ⅷ",
    "猫が好きです。안녕하세요 Привет мир שלום عالم ไทย हिन्दी",
    "🙂👍🏽👩‍👩‍👧🇫🇷",
    "\u200b\u200d\ufeff\u00a0\u3000\u2028|\ufffd",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "<|im_start|><|im_start|>x<|im_end|> <|im_end|>",
    "<|im_start |> <| im_end|> <repo_name>a<file_sep>b <empty_output>",
    "def f(x: int) -> str:\n    return f'{x!r}'  # ok\n\n\nclass A(B):\n\tpass",
    "for(int i=0;i<n;++i){a[i]+=b[i]*2;}/* end */",
    '{"key": [1, 2, {"nested": null}], "s": "a\\"b"}',
    "https://example.org/a?b=c&d=%20#frag user@example.org",
    "\x00\x01\x7f\x80\xff",
    "$x^2 + \\frac{1}{2}$ — “quotes” … •",
    "ĠĊ Ä the byte letters themselves",
]


def test_the_default_models_ids_equal_transformers(default_model, transformers_tokenizer):
    rng = random.Random(0)
    alphabet = "the quick brown \n\t 0123 .,!? éü 猫 <|im_end|> _{}[]() 🙂"
    texts = STRINGS + [random_text(rng, 20) for _ in range(1500)]
    texts += ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(500)]
    for text in texts:
        for add in (True, False):
            assert default_model.tokenizer.encode(text, add) == transformers_tokenizer.encode(
                text, add_special_tokens=add
            )


def test_the_default_model_cuts_out_each_digit(default_model):
    tokenizer = default_model.tokenizer
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("\n\n1. In  2024")]
    assert pieces == ["\n\n", "1", ".", " In", "  ", "2", "0", "2", "4"]


def test_the_default_models_texts_equal_transformers(default_model, transformers_tokenizer):
    rng = random.Random(1)
    tokenizer = default_model.tokenizer
    cases = [tokenizer.encode(text) for text in STRINGS]
    cases += [[rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(20))] for _ in range(1000)]
    for ids in cases:
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == transformers_tokenizer.decode(ids, skip_special_tokens=skip)


def test_the_default_models_special_tokens(default_model, transformers_tokenizer):
    tokenizer = default_model.tokenizer
    theirs = {i for i, token in transformers_tokenizer.added_tokens_decoder.items() if token.special}
    assert tokenizer.special_ids == frozenset(range(17)) == theirs
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (1, (2,))
    assert tokenizer.vocab_size == len(transformers_tokenizer) == 49152
    for name, token in tokenizer.special_tokens.items():
        assert getattr(transformers_tokenizer, name) == token


def byte_level(**changes):
    """Metadata of a tiny byte-level vocabulary with merges, digits among them."""
    letters = {byte: letter for letter, byte in byte_alphabet().items()}
    merges = [
        ("t", "h"),
        ("th", "e"),
        ("Ġ", "the"),
        ("1", "2"),
        ("12", "3"),
        ("Ċ", "Ċ"),
        ("Ġ", "Ġ"),
        ("'", "s"),
        ("x", "é"),
    ]
    merges[-1] = ("Ã", "©")
    tokens = [
        "<s>",
        "</s>",
        "<think>",
        *(letters[b] for b in range(256)),
        *("".join(m) for m in merges),
        "two words",
        "Ġthexy",
    ]
    types = [3, 3, 4, *[1] * (256 + len(merges)), 3, 1]
    metadata = {"model": "gpt2", "pre": "default", "tokens": tokens, "merges": [" ".join(m) for m in merges],
                "token_type": types, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    return metadata | changes


def sentencepiece(**changes):
    tokens, _ = sentencepiece_parts()
    scores = [0.0] * (len(SPECIAL) + 256) + [-float(rank) for rank in range(len(tokens) - len(SPECIAL) - 256)]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - len(SPECIAL) - 256)]
    metadata = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types,
                "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}  # fmt: skip
    return metadata | changes


def write(path, metadata, more=()):
    values = {f"llama.{key}": value for key, value in LLAMA.items()} | dict(more)
    values |= {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}
    return write_gguf(path, values, {"token_embd.weight": np.zeros((300, 64), np.float32)})


@pytest.fixture
def load(tmp_path):
    def load(metadata):
        path = write(tmp_path / "m.gguf", metadata)
        return Tokenizer.from_files(ModelFiles("m", "gguf", tmp_path, (path,)))

    return load


@pytest.mark.parametrize(
    "metadata",
    [
        byte_level(),
        byte_level(pre="gpt-2", add_bos_token=True, add_eos_token=True),
        byte_level(pre="qwen2", add_bos_token=False),
        byte_level(pre=None),
        sentencepiece(),
        sentencepiece(add_bos_token=False, add_eos_token=True),
    ],
    ids=["default", "gpt-2", "qwen2", "no-pre", "sentencepiece", "sentencepiece-eos"],
)
def test_tiny_vocabularies_equal_transformers(load, tmp_path, metadata):
    transformers = pytest.importorskip("transformers")
    mine = load(metadata)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    rng = random.Random(2)
    for text in STRINGS + [random_text(rng) for _ in range(300)] + ["the 12345 two words<think> the</s>"]:
        text = text.replace("<|endoftext|>", "")  # transformers' GPT-2 class adds it beyond the vocabulary
        ids = mine.encode(text)
        assert ids == theirs.encode(text), text
        assert mine.encode(text, False) == theirs.encode(text, add_special_tokens=False)
        assert mine.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_llama3_vocabularies_begin_with_bos_and_take_whole_words(load):
    """As in their own tokenizer.json (ignore_merges, BOS in the template); transformers' conversion has neither."""
    tokenizer = load(byte_level(pre="llama-bpe"))
    whole = tokenizer.backend.token_to_id("Ġthexy")
    assert tokenizer.encode(" thexy") == [0, whole]
    assert load(byte_level(pre="llama-bpe", add_bos_token=False)).encode(" thexy") == [whole]
    assert whole not in load(byte_level()).encode(" thexy")
    digits = [tokenizer.id_to_piece(i) for i in tokenizer.encode("12345", False)]
    assert digits == ["123", "4", "5"]
    assert [tokenizer.id_to_piece(i) for i in load(byte_level(pre="qwen2")).encode("123")] == ["1", "2", "3"]


@pytest.mark.parametrize("pre", SPLITS)
def test_every_split_loads_and_gives_texts_back(load, pre):
    tokenizer = load(byte_level(pre=pre))
    for text in [*STRINGS[:12], "the 12345 猫 don't"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_separator_is_added(load):
    assert load(byte_level(pre="roberta-bpe")).encode("the")[::2] == [0, 1]
    assert load(byte_level(pre="roberta-bpe", seperator_token_id=2)).encode("the")[-1] == 2
    assert 1 not in load(byte_level(pre="roberta-bpe", add_sep_token=False)).encode("the")


WORD_PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "the", "cat", "cafe", "un", "##aff", "##able",
               "猫", ",", "!", "2", "##0", "##s", "hello", "[", "]"]  # fmt: skip


def word_pieces(pieces=WORD_PIECES, **changes):
    """BERT's vocabulary as the conversion to GGUF writes it."""
    marked = [p if p[0] == "[" and len(p) > 1 else p[2:] if p[:2] == "##" else f"\u2581{p}" for p in pieces]
    types = [3 if piece in WORD_PIECES[:5] else 1 for piece in pieces]
    ids = {"unknown": 1, "cls": 2, "bos": 2, "seperator": 3, "padding": 0, "mask": 4}
    metadata = {"model": "bert", "tokens": marked, "token_type": types}
    return metadata | {f"{name}_token_id": token_id for name, token_id in ids.items()} | changes


@pytest.mark.parametrize("pieces", [WORD_PIECES, [*WORD_PIECES, "Hello", "Café"]], ids=["uncased", "cased"])
def test_word_pieces_equal_transformers(tmp_path, pieces):
    transformers = pytest.importorskip("transformers")

    def encode(text, special=True, **changes):
        file = GGUFFile.open(write(tmp_path / "m.gguf", word_pieces(pieces, **changes)))
        return build_gguf_backend(GGUFVocabulary(file.metadata, file.path)).encode(text, add_special_tokens=special).ids

    (tmp_path / "vocab.txt").write_text("\n".join(pieces), encoding="utf-8")
    theirs = transformers.BertTokenizer(str(tmp_path / "vocab.txt"), do_lower_case=pieces is WORD_PIECES)
    for text in [*STRINGS, "The cat, Café unaffable!", "Hello [MASK] 猫猫s 200", "[CLS] [unused0] []"]:
        assert encode(text) == theirs.encode(text), text
        assert encode(text, False) == theirs.encode(text, add_special_tokens=False)
    assert encode("the")[::2] == [2, 3]
    assert encode("Hello", **{"normalizer.lowercase": False})[1:-1] != [18]


def test_sentencepiece_without_the_space_prefix(load):
    tokenizer = load(sentencepiece(add_space_prefix=False, add_bos_token=False))
    for text in ("the cat", " the", "猫 x🙂"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_phi3_tokens_take_the_space_after_them(tmp_path):
    def ids(architecture, text):
        values = {"general.architecture": architecture}
        values |= {f"tokenizer.ggml.{key}": value for key, value in sentencepiece(add_space_prefix=False).items()}
        for key in ("scores", "token_type"):
            values[f"tokenizer.ggml.{key}"] = np.array(values[f"tokenizer.ggml.{key}"])
        return build_gguf_backend(GGUFVocabulary(values, tmp_path)).encode(text, add_special_tokens=False).ids

    assert ids("phi3", "</s>\n the") == ids("phi3", "</s>the") == ids("llama", "</s>the")
    assert ids("llama", "</s>\n the") != ids("llama", "</s>the")
    assert ids("phi3", "<s>\nthe") == ids("llama", "<s>\nthe")


def test_all_end_ids_are_kept(load):
    tokenizer = load(byte_level(eot_token_id=2, eom_token_id=1))
    assert tokenizer.eos_token_ids == (1, 2)


@pytest.mark.parametrize(
    "metadata, word",
    [
        (byte_level(model="rwkv"), "'rwkv' is not supported"),
        (byte_level(pre="afmoe"), "pre 'afmoe' is not supported, and ids of another split of text would be wrong"),
        (byte_level(tokens=None), "has no tokenizer.ggml.tokens"),
        (byte_level(tokens="text"), "tokens is a str"),
        (byte_level(token_type="x"), "token_type is a str"),
        (sentencepiece(scores=["x"]), "scores is a list"),
        (byte_level(token_type=[1]), "token_type has 1 entries"),
        (byte_level(merges=["th e", "a"]), "merge 1 is 'a'"),
        (byte_level(merges=["t h", "q zz"]), "names a piece"),
        (byte_level(eos_token_id=100000), "eos_token_id is 100000"),
        (byte_level(eos_token_id="x"), "eos_token_id is a str"),
        (byte_level(add_bos_token="yes"), "add_bos_token is a str"),
        (sentencepiece(scores=None), "neither"),
        (sentencepiece(scores=[0.5]), "scores has 1 entries"),
    ],
)
def test_damaged_metadata_is_refused(load, metadata, word):
    with pytest.raises(ModelFileError) as caught:
        load(metadata)
    assert word in str(caught.value)
    assert "m.gguf" in str(caught.value)


def test_a_token_too_long_to_split_is_refused(load):
    metadata = sentencepiece()
    metadata["tokens"][-1] = "x" * 5000
    with pytest.raises(ModelFileError, match="5000 characters"):
        load(metadata)


def test_a_file_without_a_tokenizer(tmp_path):
    path = write_llama(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"tokenizer\.ggml\.tokens"):
        Tokenizer.from_gguf(GGUFFile.open(path))


def test_row_28_mutated_files_load_or_are_refused(tmp_path):
    rng = random.Random(9)
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for kind, metadata in (("b", byte_level(pre="llama-bpe")), ("s", sentencepiece())):
        whole = write(tmp_path / f"{kind}.gguf", metadata, {"tokenizer.chat_template": template}).read_bytes()
        header = whole.rfind(b"token_embd.weight") + 60
        path = tmp_path / "m.gguf"
        refused = 0
        for _ in range(250):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(header)] = rng.choice((0, 1, 3, 255, ord(" "), rng.randrange(256)))
            path.write_bytes(data)
            try:
                model = TextModel.load(ModelFiles("m", "gguf", tmp_path, (path,)))
                model.tokenizer.decode(model.tokenizer.encode("the 猫 12"))
            except ModelFileError:
                refused += 1
        assert 100 < refused < 250
