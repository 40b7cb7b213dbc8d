"""What people write, as they mean it."""

import re

import pytest
from tests.grammar.random_walk import allows

from octavo.grammar.compile import ascii_digits, compile_grammar, is_lark


@pytest.mark.parametrize(
    ("pattern", "made"),
    [
        (r"\d{3}-\d+", "[0-9]{3}-[0-9]+"),
        (r"[\d.]+", "[0-9.]+"),
        (r"[^\d]\D", r"[^\d]\D"),
        (r"[a[^\d]\d]\d", r"[a[^\d]0-9][0-9]"),
        (r"\\d\\\d", r"\\d\\[0-9]"),
        (r"[]\d]\d", "[]0-9][0-9]"),
        (r"[^]\d]\d", r"[^]\d][0-9]"),
        (r"\[\d\]", r"\[[0-9]\]"),
        (r"[[:alpha:]\d]", "[[:alpha:]0-9]"),
        (r"\p{Nd}\w", r"\p{Nd}\w"),
        ("", ""),
    ],
)
def test_digits_are_those_from_0_to_9(pattern: str, made: str) -> None:
    assert ascii_digits(pattern) == made
    if ":" not in pattern and "p{" not in pattern and "[a[" not in pattern:
        for text in ("123-4", "1.2", "a1", r"\d", r"\1", "]]", "[5]", "x"):
            assert (re.fullmatch(made, text) is None) is (re.fullmatch(pattern, text) is None)


def test_no_other_digits_are_said() -> None:
    grammar = compile_grammar("regex", r"\d\d|[\d]x")
    assert allows(grammar, "12") and allows(grammar, "3x")
    assert not allows(grammar, "٣٤") and not allows(grammar, "٣x")


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        ('root ::= "a\nb" # say "hi\n', "a\nb", "a"),
        (r'root ::= "- " [a-z]+ "\n"', "- ab\n", "- ab"),
        ('root ::= item+\nitem ::= "x" | "y"  # "one"\n', "xyx", "xz"),
        ('?start: sum\n?sum: NUM ("+" NUM)*\nNUM: /[0-9]+/\n%ignore " "', "1 + 2", "1 2"),
        ('!start: "a" "b"i', "aB", "A"),
        ("start[temperature=0.5]: /x+/", "xx", "y"),
    ],
)
def test_grammars_in_both_dialects(source: str, good: str, bad: str) -> None:
    grammar = compile_grammar("lark", source)
    assert allows(grammar, good) and not allows(grammar, bad)
    assert is_lark(source) is not source.startswith("root")
