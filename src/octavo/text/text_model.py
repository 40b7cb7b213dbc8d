"""The text side of a model: tokenizer, chat template, specification.

Owns: loading all three from the same files, once; converting messages to the form that templates expect; cutting a
prompt inside its last message. Does not: load torch or weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.artifacts.encoder_spec import TextInput
from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.json_file import read_json
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.artifacts.script import TEMPLATE
from octavo.core.request import Span
from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.media.placeholders import Images, find_spans, insert_placeholders
from octavo.text.chat_template import ChatTemplate, check_variables
from octavo.text.dialect import takes_tools
from octavo.text.special_text import SpecialTextGuard
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import NO_SYSTEM, with_short_ids, with_tools

_CONTINUE_MARK = "\ue000octavo-continues-here\ue001"  # private-use characters, which no message has
IMAGE_MARK = "\ue000octavo-image\ue001"  # the place of an image in a message's text
_IMAGE_PARTS = re.compile(r"""['"]image['"]""")  # in templates that get messages as lists of parts
_CONVERSATION_OPTIONS = ("add_generation_prompt", "continue_final_message", "tools")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # templates read the first two


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages and the template's other inputs. `is_continued`: the model continues the last message.

    `mark` was put inside each special token that the messages spell out; None if there was none (special_text.py).
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: Sequence[Mapping[str, Any]] | None
    variables: dict[str, Any]
    is_continued: bool
    mark: str | None = None

    def cut_at_continuation(self, prompt: str) -> str:
        """Return a rendered prompt up to the place where the model continues. Raises InvalidRequestError."""
        head, mark, tail = prompt.rpartition(_CONTINUE_MARK)
        if not mark:
            reason = "the chat template does not show the last message, so it cannot be continued"
            raise InvalidRequestError(reason, "messages")
        return head if tail.startswith(" ") else head.rstrip()  # a template that trims also trimmed the message's end


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side. `chat_template` is None if the model has none.

    `special_tokens_in_text`: special tokens that messages spell out become ids, as in transformers. `weight_format`:
    "gguf" or "safetensors".
    """

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    special_tokens_in_text: bool = False
    weight_format: str = "safetensors"
    guard: SpecialTextGuard = field(init=False)

    def __post_init__(self) -> None:
        source = None if self.chat_template is None else self.chat_template.source
        object.__setattr__(self, "guard", SpecialTextGuard(self.tokenizer, source))

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        chat_template_file: str | Path | None = None,
        *,
        trust_template: bool = False,
        special_tokens_in_text: bool = False,
    ) -> TextModel:
        """Read all files. `chat_template_file` replaces the model's template. Raises ModelFileError."""
        spec = read_model_spec(files)
        source: tuple[str, Path] | None
        if files.kind == "scripted":
            path = files.weights[0]
            tokenizer, source = Tokenizer.scripted(path), (TEMPLATE, path)
        elif files.kind == "gguf":
            first = GGUFFile.open(files.weights[0])
            tokenizer, source = Tokenizer.from_gguf(first), _gguf_template(first)
        else:
            tokenizer = Tokenizer.from_folder(files.root)
            source = _folder_template(files.root)
        if chat_template_file is not None:
            source = _read_text(Path(chat_template_file)), Path(chat_template_file)
        template = None
        if source is not None:
            text, path = source
            is_trusted = trust_template or text is TEMPLATE
            template = ChatTemplate(text, tokenizer.special_tokens, path=path, is_trusted=is_trusted)
        weight_format = "gguf" if files.kind == "gguf" else "safetensors"
        return cls(files.name, spec, tokenizer, template, special_tokens_in_text, weight_format)

    def encode_input(
        self, given: str | TextInput, *, keep: int | None = None, add_special_tokens: bool = True
    ) -> list[int]:
        """Return the ids of a text or a pair; an encoder's, of at most `keep` tokens. Raises InvalidRequestError."""
        text, second, prefix = (given, None, None) if isinstance(given, str) else given
        encoder = self.spec.encoder
        if encoder is None:
            assert second is None, "a pair is an encoder's"
            return self.tokenizer.encode(text, add_special_tokens)
        if second is None:
            text = (encoder.prefix() if prefix is None else prefix) + text
        if encoder.lowercases:
            text, second = text.lower(), None if second is None else second.lower()
        return self.tokenizer.encode_start(text, second, keep, add_special_tokens)

    def check_generates(self) -> None:
        """Raise InvalidRequestError if the model is an encoder."""
        if self.spec.encoder is not None:
            reason = f"{self.name} is an encoder, which generates no text; it {self.spec.encoder.purpose}"
            raise InvalidRequestError(reason, "model")

    def check_output(self, wanted: str) -> None:
        """Raise InvalidRequestError if the model's output is not `wanted`: "vectors", "labels" or "scores" of pairs."""
        encoder = self.spec.encoder
        labels = () if encoder is None else encoder.labels
        can = {"vectors": not labels, "labels": bool(labels), "scores": len(labels) < 2}
        if not can[wanted]:
            purpose = "generates text" if encoder is None else encoder.purpose
            reason = f"{self.name} gives no {wanted}; it {purpose}"
            raise InvalidRequestError(reason, "model")

    def _rendered(self, conversation: Conversation) -> str:
        assert self.chat_template is not None
        prompt = self.chat_template.render(
            conversation.messages, conversation.add_generation_prompt, conversation.tools, **conversation.variables
        )
        return conversation.cut_at_continuation(prompt) if conversation.is_continued else prompt

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Check a template's inputs, which another process may render. Raises InvalidRequestError.

        If the template renders no tools, the messages describe the tools.
        """
        self.check_generates()
        if self.chat_template is None:
            reason = f"{self.name} has no chat template; start with --chat-template FILE, or use plain completions"
            raise InvalidRequestError(reason, "messages")
        takes_images = self.spec.vision is not None
        has_parts = takes_images and _IMAGE_PARTS.search(self.chat_template.source) is not None
        plain = plain_messages(messages, takes_images, between="" if has_parts else "\n")
        variables, mark = dict(variables or {}), None
        if variables:
            check_variables(variables)
        if not self.special_tokens_in_text:  # before Octavo's own texts are added to the messages
            plain, tools, variables, mark = self.guard.mark(plain, tools, variables)
        if takes_tools(self.chat_template.source):
            plain = with_short_ids(plain) if "[TOOL_CALLS]" in self.chat_template.source else plain
        else:
            plain, tools = with_tools(plain, tools, NO_SYSTEM not in self.chat_template.source), None
        if continue_final_message:
            plain, add_generation_prompt = _mark_continuation(plain), False
        if takes_images:
            form = _parts_of if has_parts else _lines_of
            plain = [{**message, "content": form(message["content"])} for message in plain]
        return Conversation(plain, add_generation_prompt, tools, variables, continue_final_message, mark)

    def encode_images(
        self, prompt: str, mark: str | None, images: Images, add_special_tokens: bool = False
    ) -> tuple[list[int], tuple[Span, ...]]:
        """Return the ids of a rendered prompt with images, and their spans. Raises InvalidRequestError.

        As in transformers' processors, a prompt that does not begin with the beginning-of-sequence token gets it.
        """
        vision = self.spec.vision
        assert vision is not None
        place = self.tokenizer.id_to_piece(vision.prompt_token_id)
        prompt = insert_placeholders(prompt.replace(IMAGE_MARK, place), vision, images, self.tokenizer.id_to_piece)
        bos = self.tokenizer.special_tokens.get("bos_token")
        is_begun = bos is None or prompt.startswith(bos)
        ids = self.encode_prompt(prompt, mark, add_special_tokens or not is_begun)
        return ids, find_spans(ids, vision, images)

    def prompt_ids_from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Return the prompt ids of a chat. Raises InvalidRequestError.

        The template gets `template_kwargs` (from a client, with any names) and `variables` as variables. No
        beginning-of-sequence token is added, because the template writes it if the model needs it.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        conversation = self.conversation(
            messages, **options, tools=tools, variables={**(template_kwargs or {}), **variables}
        )
        return self.encode_prompt(self._rendered(conversation), conversation.mark)

    def prompt_with_images(
        self, messages: Sequence[Mapping[str, Any]], images: Images, **options: Any
    ) -> tuple[list[int], tuple[Span, ...]]:
        """Return the prompt ids of a chat, and the spans of its images, whose parts are {"type": "image"}.

        `options` are those of prompt_ids_from_messages.
        """
        given = {name: options.pop(name) for name in _CONVERSATION_OPTIONS if name in options}
        variables = {**(options.pop("template_kwargs", None) or {}), **options}
        conversation = self.conversation(messages, **given, variables=variables)
        return self.encode_images(self._rendered(conversation), conversation.mark, images)

    def encode_prompt(
        self, prompt: str, mark: str | None, add_special_tokens: bool = False, num_kept: int | None = None
    ) -> list[int]:
        """Return the ids of a rendered prompt, or the last `num_kept` of them. Raises InvalidRequestError."""
        if mark is not None:
            return self.guard.encode(prompt, mark, add_special_tokens, num_kept)
        if num_kept is None:
            return self.tokenizer.encode(prompt, add_special_tokens)
        # No token has more characters than the longest piece.
        return self.tokenizer.encode(prompt[-num_kept * self.tokenizer.longest_piece :], add_special_tokens)[-num_kept:]


def plain_messages(
    messages: Sequence[Mapping[str, Any]], takes_images: bool = False, between: str = "\n"
) -> list[dict[str, Any]]:
    """Return copies with string content and parsed tool arguments. Raises InvalidRequestError.

    `between` joins adjacent text parts; missing content becomes "". With `takes_images` a part may be
    {"type": "image"}, which becomes IMAGE_MARK.
    """
    if not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list of at least one message", "messages")
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"message {index} must be an object with a role", f"messages.{index}")
        plain = dict(message)
        content = message.get("content")
        plain["content"] = (
            content if isinstance(content, str) else _plain_content(content, index, takes_images, between)
        )
        for name in _REASONING_FIELDS:
            reasoning = message.get(name)
            if reasoning is not None:
                plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
                break
        calls = message.get("tool_calls") or []
        if not isinstance(calls, Sequence):
            raise InvalidRequestError(
                f"the tool_calls of message {index} must be a list", f"messages.{index}.tool_calls"
            )
        if calls:
            plain["tool_calls"] = [_plain_tool_call(call, index) for call in calls]
        found.append(plain)
    return found


def _plain_content(content: object, index: int, takes_images: bool, between: str) -> str:
    if content is None:
        return ""
    param = f"messages.{index}.content"
    if not isinstance(content, Sequence):
        raise InvalidRequestError(f"the content of message {index} must be a string or a list of parts", param)
    texts: list[str] = []
    for part in content:
        if takes_images and part == {"type": "image"}:
            texts.append(IMAGE_MARK)
            continue
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or (isinstance(part, Mapping) and part.get("type", "text") != "text"):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise InvalidRequestError(f"message {index} has a part of type {kind!r}; this model takes text only", param)
        texts.append(text)
    text = between.join(texts)
    return text.replace(between + IMAGE_MARK, IMAGE_MARK).replace(IMAGE_MARK + between, IMAGE_MARK)


def _parts_of(content: str) -> list[dict[str, str]]:
    """Return a message's text as the parts that templates of models with images take."""
    parts: list[dict[str, str]] = []
    for index, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if index else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def _lines_of(content: str) -> str:
    """Return a message's text with each image's mark on a line of its own."""
    lines: list[str] = []
    for index, text in enumerate(content.split(IMAGE_MARK)):
        lines += [IMAGE_MARK] if index else []
        lines += [text] if text else []
    return "\n".join(lines)


def _plain_tool_call(call: object, index: int) -> object:
    """Return a tool call with parsed arguments, since templates convert arguments to JSON themselves."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        raise InvalidRequestError(f"message {index} has a tool call without a function", f"messages.{index}.tool_calls")
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"] or "{}")
        except (ValueError, RecursionError) as error:
            reason = f"messages[{index}].tool_calls has arguments that are not JSON ({error}); give an object's text"
            raise InvalidRequestError(reason, f"messages.{index}.tool_calls") from None
    return {**call, "function": function}


def _mark_continuation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mark the end of the last message, where the model continues."""
    last = messages[-1]
    if last["role"] != "assistant":
        raise InvalidRequestError("continue_final_message needs a last message of the assistant", "messages")
    return [*messages[:-1], {**last, "content": last["content"] + _CONTINUE_MARK + " "}]


def _gguf_template(file: GGUFFile) -> tuple[str, Path] | None:
    source = file.metadata.get("tokenizer.chat_template")
    if source is not None and not isinstance(source, str):
        raise ModelFileError(file.path, "tokenizer.chat_template is no string")
    return (source, file.path) if source else None


def _folder_template(root: Path) -> tuple[str, Path] | None:
    """Return the text and path of chat_template.jinja, or else of tokenizer_config.json's (default) template."""
    path = root / "chat_template.jinja"
    if path.is_file():
        return _read_text(path), path
    path = root / "tokenizer_config.json"
    value = read_json(path).get("chat_template") if path.is_file() else None
    if isinstance(value, list):
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise ModelFileError(path, "chat_template is no string")
    return (value, path) if value else None


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"file not found: {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
