"""How the byte-level vocabularies of GGUF files split text before they merge bytes, by `tokenizer.ggml.pre`.

Owns: one entry per name, made of the steps of the families' published tokenizer.json. Does not: normalise (GGUF
metadata has no normaliser), or build tokenizers (gguf_tokenizer.py does).
Invariant: a name that is not here is refused, because ids of another split would be wrong without a sign of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Punctuation, Split
from tokenizers.pre_tokenizers import Sequence as Steps

_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE_CASED = r"[^\r\n\p{L}\p{N}]?"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_OR_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""

# The letters of DeepSeek LLM's pattern: those of scripts with two cases.
_CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _pattern(*parts: str) -> str:
    return "|".join(parts)


def _cased(end: str, digits: str) -> str:
    """Words that change case once at most, followed by `end`."""
    words = (f"{_BEFORE_CASED}{_UPPER}*{_LOWER}+{end}", f"{_BEFORE_CASED}{_UPPER}+{_LOWER}*{end}")
    return _pattern(*words, digits, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _SPACES)


@dataclass(frozen=True, slots=True)
class TextSplit:
    """The steps; a string is a pattern whose matches are cut out. One step, a ByteLevel, maps bytes to letters.

    `ignore_merges`: a piece that is in the vocabulary is kept whole. `add_bos` and `add_sep` apply to files that do not
    have these settings.
    """

    steps: tuple[str | PreTokenizer, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    add_sep: bool = False

    def build(self) -> PreTokenizer:
        """Return the pre-tokenizer."""
        return Steps(
            [Split(Regex(step), behavior="isolated") if isinstance(step, str) else step for step in self.steps]
        )


_BYTES: PreTokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2: PreTokenizer = ByteLevel(add_prefix_space=False)  # after GPT-2's pattern, which is built in
_EACH_DIGIT: PreTokenizer = Digits(individual_digits=True)

_THREE_DIGITS = _pattern(_CONTRACTION, _WORD, r"\p{N}{1,3}", _SYMBOLS, _SPACES)  # cl100k, which Llama 3 has too
_ONE_DIGIT = _pattern(_CONTRACTION, _WORD, r"\p{N}", _SYMBOLS, _SPACES)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_V3 = _pattern(
    _PUNCTUATION + "[A-Za-z]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+", r" ?[\p{P}\p{S}]+[\r\n]*", _SPACES
)
_NO_HAN = "&&[^\\p{Han}]]"

_SPLITS: dict[tuple[str, ...], TextSplit] = {
    (
        *("default", "gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion", "granite-docling", "gigachat", "a.x-4.0"),
        *("mellum", "modern-bert", "exaone4", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
    ): TextSplit((_GPT2,)),
    ("jina-v1-en", "jina-v2-code", "roberta-bpe"): TextSplit((_GPT2,), add_bos=True, add_sep=True),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"): TextSplit(
        (_EACH_DIGIT, _GPT2)
    ),
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ): TextSplit((_THREE_DIGITS, _BYTES), ignore_merges=True, add_bos=True),
    ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"): TextSplit((_THREE_DIGITS, _BYTES)),
    (
        *("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez", "solar-open", "grok-2", "kormo", "f2llmv2"),
    ): TextSplit((_ONE_DIGIT, _BYTES)),
    ("qwen35",): TextSplit(
        (
            _pattern(
                _CONTRACTION,
                r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
                _SPACES,
            ),
            _BYTES,
        )
    ),
    ("tekken",): TextSplit((_cased("", r"\p{N}"), _BYTES), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): TextSplit(
        (_cased(_CONTRACTION + "?", r"\p{N}{1,3}"), _BYTES)
    ),
    ("kimi-k2",): TextSplit(
        (
            _pattern(
                r"[\p{Han}]+",
                f"{_BEFORE_CASED}{_UPPER[:-1]}{_NO_HAN}*{_LOWER[:-1]}{_NO_HAN}+{_CONTRACTION}?",
                f"{_BEFORE_CASED}{_UPPER[:-1]}{_NO_HAN}+{_LOWER[:-1]}{_NO_HAN}*{_CONTRACTION}?",
                r"\p{N}{1,3}",
                _SYMBOLS,
                _SPACES,
            ),
            _BYTES,
        )
    ),
    ("deepseek-llm",): TextSplit(
        (
            *(r"[\r\n]", rf"\s?[{_CASED}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            *(r"\s+$", _HAN_OR_HANGUL, _EACH_DIGIT, _BYTES),
        )
    ),
    ("deepseek-coder",): TextSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_OR_HANGUL, _EACH_DIGIT, _BYTES)),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm"): TextSplit((r"\p{N}{1,3}", _CJK, _DEEPSEEK_V3, _BYTES)),
    ("falcon",): TextSplit((Punctuation("contiguous"), _GPT2, Digits(individual_digits=False), "[0-9][0-9][0-9]")),
    ("bloom", "poro-chat", "gpt3-finnish"): TextSplit((_BLOOM, _BYTES)),
    ("viking",): TextSplit((_BLOOM, _EACH_DIGIT, _BYTES)),
    ("superbpe",): TextSplit((r"\p{N}+", r"(?=(\d{3})+(?!\d))", _BYTES)),
    ("bailingmoe", "bailingmoe2", "llada-moe"): TextSplit(
        (
            _pattern(
                "'(?i:[sdmt]|ll|ve|re)",
                r"[^\r\n\p{L}\p{N}]?+\p{L}+",
                r"\p{N}",
                r" ?[^\s\p{L}\p{N}]++[\r\n]*",
                r"\s*[\r\n]|\s+(?!\S)|\s+",
            ),
            _BYTES,
        )
    ),
    ("seed-coder",): TextSplit(
        (_pattern(_CONTRACTION, _WORD, r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+", _SPACES), _BYTES)
    ),
    ("minicpm5",): TextSplit(
        (r"\p{N}{1,3}", _pattern(_CONTRACTION, _WORD, r"\p{N}+", _SYMBOLS, _SPACES), _BYTES), ignore_merges=True
    ),
}
SPLITS: dict[str, TextSplit] = {name: split for names, split in _SPLITS.items() for name in names}
