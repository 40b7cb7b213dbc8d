"""Keep special tokens that messages spell out as text, so that a user's `<|im_end|>` ends no message.

Owns: which tokens are guarded, marking these tokens in a conversation before its template is rendered, and encoding the
rendered prompt so that only the tokens of the template and of the assistant's messages become ids.
Does not: render, or change a conversation without such tokens.

A mark of random digits is put inside each occurrence; digits survive what templates do to text (trim, upper, tojson).
The template's own tokens are those without a mark. Private names replace them; a second tokenizer over the same model
has these names instead of the guarded tokens, so the rest is encoded as any other text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from octavo.errors import InvalidRequestError
from octavo.text.tokenizer import Tokenizer, check_text

_MARK_DIGITS = 16
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_PRIVATE = "octavoprivate"  # each private name begins with this and a random part


class SpecialTextGuard:
    """Encoder that keeps special tokens in messages as text. Safe to share between threads.

    It guards the special added tokens, and other added tokens that the template's source spells out, such as
    `<tool_call>`.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self._tokenizer = tokenizer
        self._added = tokenizer.backend.get_added_tokens_decoder()
        self.guarded = frozenset(
            token.content
            for token in self._added.values()
            if len(token.content) > 1 and (token.special or _is_marker(token.content, template or ""))
        )
        self._rests = tuple(sorted(token[1:] for token in self.guarded))
        self._heads = frozenset(rest[:end] for rest in self._rests for end in range(1, len(rest)))
        self._tails = frozenset(token[:end] for token in self.guarded for end in range(2, len(token)))
        self._firsts = frozenset(token[0] for token in self.guarded)
        self._longest = max(map(len, self.guarded), default=0)
        self._pattern = _any_of(self.guarded) if self.guarded else None
        normalizer = tokenizer.backend.normalizer
        folds = any(token.normalized and token.content in self.guarded for token in self._added.values())
        self._normalizer = normalizer if folds else None

    def mark(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, variables: dict[str, Any]
    ) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None, dict[str, Any], str | None]:
        """Return messages, tools and variables with marks in guarded tokens, and the mark (None if none was needed).

        Assistant messages are not marked; other messages, tools, and the variable `documents` are.
        """
        marking = _Marking(self)
        shown: list[dict[str, Any]] = []
        for message in messages:
            if message["role"] != "assistant":
                message = dict(message)
                for key, value in message.items():
                    if key != "role":
                        message[key] = marking.of(value, True)
            shown.append(message)
        shown_tools = tools if tools is None else [marking.of(tool, False) for tool in tools]
        documents = {"documents": marking.of(variables["documents"], False)} if variables.get("documents") else {}
        if not marking.is_used:
            return list(messages), tools, variables, None
        return shown, shown_tools, {**variables, **documents}, marking.mark

    def places(self, text: str, has_edges: bool) -> list[int]:
        """Return the indexes for marks in a text: inside each guarded token, and in partial tokens at the text's ends.

        `has_edges`: the template may put other text directly beside this text, which could complete a token.
        """
        if self._pattern is None:
            return []
        positions, at = [], self._pattern.search(text)
        while at is not None:
            positions.append(at.start() + 1)
            at = self._pattern.search(text, at.start() + 1)
        if self._normalizer is not None and self._pattern.search(self._normalizer.normalize_str(text)):
            positions.append(0)
        if has_edges:
            inner, end = text.strip(), len(text.rstrip())
            if inner.startswith(self._rests) or inner in self._heads:
                positions.append(text.index(inner))
            starts = range(max(0, end - self._longest + 1), end - 1)
            positions += [i + 1 for i in starts if text[i] in self._firsts and text[i:end] in self._tails]
        return sorted(set(positions))

    def encode(self, prompt: str, mark: str, add_special_tokens: bool, num_kept: int | None) -> list[int]:
        """Return the ids of a rendered prompt, or the last `num_kept` of them. Raises InvalidRequestError."""
        parts = prompt.split(mark)
        text = "".join(self._named(part) for part in parts)
        if any(piece in text for piece in (mark[: _MARK_DIGITS // 2], mark[_MARK_DIGITS // 2 :])):
            reason = "the chat template cuts a text that spells a special token; leave that token out of the messages"
            raise InvalidRequestError(reason, "messages")
        if num_kept is not None:
            text = text[-num_kept * max(self._tokenizer.longest_piece, *map(len, self._names.values())) :]
        check_text(text)
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = []
        for token_id in encoding.ids:
            if (spelled := self._spelled.get(token_id)) is None:
                ids.append(self._own_ids.get(token_id, token_id))
            else:  # the model formed this token from plain text
                ids += [piece.id for character in spelled for piece in self._backend.model.tokenize(character)]
        if add_special_tokens:
            before, after = self._around
            ids = [*before, *ids, *after]
        return ids if num_kept is None else ids[-num_kept:]

    def _named(self, part: str) -> str:
        """Return a part of the template's text with its guarded tokens replaced by private names."""
        return self._any_added.sub(lambda match: self._names.get(match[0], match[0]), part)

    @cached_property
    def _any_added(self) -> re.Pattern[str]:
        return _any_of(token.content for token in self._added.values())

    @cached_property
    def _names(self) -> dict[str, str]:
        """A private name for each guarded token, in lower-case letters, which every normalizer leaves unchanged."""
        secret = "".join(secrets.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(20))
        letters = str.maketrans("0123456789", "abcdefghij")
        return {
            token: f"{_PRIVATE}{secret}{f'{index:06d}'.translate(letters)}"
            for index, token in enumerate(sorted(self.guarded))
        }

    @cached_property
    def _own_ids(self) -> dict[int, int]:
        """The tokenizer's own id of each added token, by the token's id in `_backend`."""
        own_ids: dict[int, int] = {}
        for token_id, token in self._added.items():
            name = self._names.get(token.content, token.content)
            other = self._backend.token_to_id(name)
            assert other is not None
            if other != token_id and self._backend.model.id_to_token(other) is not None:
                reason = "the ids of this model's tokenizer have gaps, so special tokens cannot be text in messages"
                raise InvalidRequestError(reason, "messages")
            own_ids[other] = token_id
        return own_ids

    @cached_property
    def _backend(self) -> Backend:
        """A tokenizer over the same model (its memory is shared), with private names for the guarded tokens."""
        own = self._tokenizer.backend
        backend = Backend(own.model)
        if own.normalizer is not None:
            backend.normalizer = own.normalizer
        if own.pre_tokenizer is not None:
            backend.pre_tokenizer = own.pre_tokenizer
        for _, token in sorted(self._added.items()):
            flags = {name: getattr(token, name) for name in _FLAGS}
            backend.add_tokens([AddedToken(self._names.get(token.content, token.content), **flags)])
        return backend

    @cached_property
    def _spelled(self) -> dict[int, str]:
        """The guarded tokens, by id, that are also pieces of the vocabulary: the model may form them from plain text.

        The token for unknown characters is left out, since it represents these characters.
        """
        model = self._tokenizer.backend.model
        unknown = {getattr(model, "unk_token", None), self._tokenizer.special_tokens.get("unk_token")}
        ids = {token: model.token_to_id(token) for token in sorted(self.guarded - unknown)}
        return {token_id: token for token, token_id in ids.items() if token_id is not None}

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after a text."""
        bare = self._tokenizer.encode("a", add_special_tokens=False)
        whole = self._tokenizer.encode("a")
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]


class _Marking:
    """The mark of one conversation, and the values marked with it."""

    def __init__(self, guard: SpecialTextGuard) -> None:
        self._guard = guard
        self.mark = f"{secrets.randbelow(10**_MARK_DIGITS):0{_MARK_DIGITS}d}"
        self.is_used = False

    def of(self, value: Any, has_edges: bool) -> Any:
        """Return a copy of a value with marks in all its strings, including the names of its fields."""
        if isinstance(value, str):
            places = self._guard.places(value, has_edges)
            if not places:
                return value
            self.is_used = True
            return self.mark.join(value[i:j] for i, j in zip([0, *places], [*places, len(value)], strict=True))
        if isinstance(value, Mapping):
            return {self.of(key, False): self.of(inner, has_edges) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.of(inner, has_edges) for inner in value]
        return value


def _is_marker(token: str, template: str) -> bool:
    """Return True if a template uses this added token, which is not special, as a delimiter."""
    return token in template and any(not character.isalnum() and not character.isspace() for character in token)


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """Return an expression that matches the longest of these words. Its time does not grow with the number of words."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    try:
        return re.compile(_branches(tree))
    except RecursionError:
        raise InvalidRequestError("the tokenizer has added tokens that are nested too deeply", "messages") from None


def _branches(node: dict[str, Any]) -> str:
    chain = ""
    while len(node) == 1 and "" not in node:  # without a choice, no group
        [(character, node)] = node.items()
        chain += re.escape(character)
    branches = [re.escape(character) + _branches(inner) for character, inner in node.items() if character]
    if not branches:
        return chain
    return f"{chain}(?:{'|'.join(branches)})" + ("?" if "" in node else "")
