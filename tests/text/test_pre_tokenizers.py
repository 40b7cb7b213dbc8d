"""How GGUF's byte-level vocabularies split text, beside the definitions of the families' own tokenizer.json."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tests.text.test_gguf_tokenizer import STRINGS
from tests.text.tiny_tokenizers import random_text
from tokenizers import Tokenizer, models

from octavo.text.pre_tokenizers import SPLITS

Definition = list[dict[str, Any]]


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def digits(individual: bool) -> dict[str, Any]:
    return {"type": "Digits", "individual_digits": individual}


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_K2 = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥ"
    "ῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
CJK_OR_HANGUL = "[一-龥ࠀ-一가-퟿]+"
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SEED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
MINICPM = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

DEFINITIONS: dict[str, Definition] = {
    "gpt-2": [byte_level(True)],
    "roberta-bpe": [byte_level(True)],
    "smollm": [digits(True), byte_level(True)],
    "llama-bpe": [split(LLAMA3), byte_level(False)],
    "dbrx": [split(LLAMA3), byte_level(False)],
    "qwen2": [split(QWEN2), byte_level(False)],
    "qwen35": [split(QWEN35), byte_level(False)],
    "tekken": [split(TEKKEN), byte_level(False)],
    "gpt-4o": [split(GPT4O), byte_level(False)],
    "kimi-k2": [split(KIMI_K2), byte_level(False)],
    "deepseek-llm": [
        *(split("[\r\n]"), split(DEEPSEEK_LETTERS), split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"), split("\\s+$")),
        *(split(CJK_OR_HANGUL), digits(True), byte_level(False)),
    ],
    "deepseek-coder": [
        *(split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split(CJK_OR_HANGUL)),
        *(digits(True), byte_level(False)),
    ],
    "deepseek-v3": [split("\\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), byte_level(False)],
    "falcon": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        byte_level(True),
        digits(False),
        split("[0-9][0-9][0-9]"),
    ],
    "bloom": [split(BLOOM), byte_level(False)],
    "viking": [split(BLOOM), digits(True), byte_level(False)],
    "superbpe": [split(r"\p{N}+"), split(r"(?=(\d{3})+(?!\d))"), byte_level(False)],
    "bailingmoe": [split(BAILING), byte_level(False)],
    "seed-coder": [split(SEED), byte_level(False)],
    "minicpm5": [split(r"\p{N}{1,3}"), split(MINICPM), byte_level(False)],
}
HARD = [
    "123456789 1234 12 1,234.56 ½²³ Ⅷ ٣٤٥ 二〇二四",
    "I'M we'Ve they'LL it'S 'tis rock'n'roll don\u2019t",
    "camelCaseWord HTTPServer iPhone ǅungla aBCdE",
    "漢字とかな カタカナ 한국어 中文，标点。「」 ＡＢＣ　ｄ",
    "e\u0301a\u0308 क्षि नमस्ते ที่ \u200dx\ufe0f",
    "  \t\n  \r\n\n x   y\u00a0\u3000z  ",
    "😀👩‍💻🇩🇪a1!?...---__init__(self)/*c*//\n",
    "#include <a.h> $x+=1; `b` ~^|=<> @user \\n",
    "word.\n\nNext/\n/ end   ",
]


def pieces(definition: Definition, text: str) -> list[str]:
    state = json.loads(Tokenizer(models.BPE()).to_str())
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": definition}
    return [piece for piece, _ in Tokenizer.from_str(json.dumps(state)).pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", DEFINITIONS)
def test_text_is_split_as_the_family_does(name: str) -> None:
    rng, mine = random.Random(0), SPLITS[name].build()
    texts = HARD + STRINGS + [random_text(rng, 20) for _ in range(100)]
    joined = "\x00|".join(texts)
    for text in (*texts[: len(HARD) + len(STRINGS)], joined):
        assert [piece for piece, _ in mine.pre_tokenize_str(text)] == pieces(DEFINITIONS[name], text), text


def test_every_split_has_a_definition() -> None:
    assert {split.steps for split in SPLITS.values()} == {SPLITS[name].steps for name in DEFINITIONS}


def test_the_names_of_families_have_their_splits() -> None:
    same = {"olmo": "gpt-2", "starcoder": "smollm", "refact": "smollm", "command-r": "smollm", "exaone": "smollm",
            "glm4": "dbrx", "chatglm-bpe": "dbrx", "smaug-bpe": "dbrx", "stablelm2": "qwen2",
            "llama4": "gpt-4o"}  # fmt: skip
    for name, other in same.items():
        assert SPLITS[name] == SPLITS[other]
    assert SPLITS["llama-bpe"].ignore_merges and SPLITS["llama-bpe"].add_bos and not SPLITS["dbrx"].ignore_merges
