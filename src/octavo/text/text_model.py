"""All that the text side of a model needs: tokenizer, template, specification.

Owns: loading them from the same files, once.
Does not: load torch or weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.artifacts.gguf_file import GGUFFile
from octavo.artifacts.json_file import read_json
from octavo.artifacts.model_spec import ModelSpec, read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.text.chat_template import ChatTemplate, check_variables
from octavo.text.dialect import takes_tools
from octavo.text.messages import cut_at_continuation, mark_continuation, plain_messages
from octavo.text.scripted_text import TEMPLATE, scripted_tokenizer
from octavo.text.special_text import SpecialTextGuard
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import NO_SYSTEM, with_short_ids, with_tools


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages and what else the template is given; `is_continued` when the last message is to go on.

    `mark` is inside each special token that the messages spell; None where they spell none (special_text.py).
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: Sequence[Mapping[str, Any]] | None
    variables: dict[str, Any]
    is_continued: bool
    mark: str | None = None


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side. `chat_template` is None for a model without one.

    `special_tokens_in_text`: special tokens spelled in messages become their ids, as in transformers.
    """

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None
    special_tokens_in_text: bool = False
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
        """Read everything. `chat_template_file` replaces the model's template. Raises ModelFileError."""
        spec = read_model_spec(files)
        found: tuple[str, Path] | None
        if files.kind == "scripted":
            path = files.weights[0]
            tokenizer, found = scripted_tokenizer(path), (TEMPLATE, path)
        elif files.kind == "gguf":
            first = GGUFFile.open(files.weights[0])
            tokenizer, found = Tokenizer.from_gguf(first), _gguf_template(first)
        else:
            tokenizer = Tokenizer.from_folder(files.root)
            found = _folder_template(files.root)
        if chat_template_file is not None:
            found = _read_text(Path(chat_template_file)), Path(chat_template_file)
        template = None
        if found is not None:
            source, path = found
            is_trusted = trust_template or source is TEMPLATE
            template = ChatTemplate(source, tokenizer.special_tokens, path=path, is_trusted=is_trusted)
        return cls(files.name, spec, tokenizer, template, special_tokens_in_text)

    def prompt_from_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt text of a chat. Raises InvalidRequestError.

        The template sees `template_kwargs` (from a client: any name may be in them) and `variables` alike.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        asked = self.conversation(messages, **options, tools=tools, variables={**(template_kwargs or {}), **variables})
        prompt = self._rendered(asked)
        return prompt if asked.mark is None else prompt.replace(asked.mark, "")

    def _rendered(self, asked: Conversation) -> str:
        assert self.chat_template is not None
        made = self.chat_template.render(asked.messages, asked.add_generation_prompt, asked.tools, **asked.variables)
        return cut_at_continuation(made) if asked.is_continued else made

    def conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Conversation:
        """Check what a template is to render, here or elsewhere. Raises InvalidRequestError.

        For a template that knows no tools they are put into the messages.
        """
        if self.chat_template is None:
            reason = f"{self.name} has no chat template; start with --chat-template FILE, or use plain completions"
            raise InvalidRequestError(reason, "messages")
        plain = plain_messages(messages)
        variables, mark = dict(variables or {}), None
        if variables:
            check_variables(variables)
        if not self.special_tokens_in_text:  # before Octavo's own words are put among the messages
            plain, tools, variables, mark = self.guard.mark(plain, tools, variables)
        if takes_tools(self.chat_template.source):
            plain = with_short_ids(plain) if "[TOOL_CALLS]" in self.chat_template.source else plain
        else:
            plain, tools = with_tools(plain, tools, NO_SYSTEM not in self.chat_template.source), None
        if continue_final_message:
            return Conversation(mark_continuation(plain), False, tools, variables, True, mark)
        return Conversation(plain, add_generation_prompt, tools, variables, False, mark)

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
        """Return the prompt ids of a chat; the arguments are those of prompt_from_messages.

        The template writes the beginning-of-sequence token where the model wants one, so none is added here.
        """
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        asked = self.conversation(messages, **options, tools=tools, variables={**(template_kwargs or {}), **variables})
        return self.encode_prompt(self._rendered(asked), asked.mark)

    def encode_prompt(
        self, prompt: str, mark: str | None, add_special_tokens: bool = False, num_kept: int | None = None
    ) -> list[int]:
        """Return the ids of a rendered prompt, of which the last `num_kept` are kept. Raises InvalidRequestError."""
        if mark is not None:
            return self.guard.encode(prompt, mark, add_special_tokens, num_kept)
        if num_kept is None:
            return self.tokenizer.encode(prompt, add_special_tokens)
        # No token stands for more characters than the longest piece.
        return self.tokenizer.encode(prompt[-num_kept * self.tokenizer.longest_piece :], add_special_tokens)[-num_kept:]


def _gguf_template(file: GGUFFile) -> tuple[str, Path] | None:
    source = file.metadata.get("tokenizer.chat_template")
    if source is not None and not isinstance(source, str):
        raise ModelFileError(file.path, "tokenizer.chat_template is no string")
    return (source, file.path) if source else None


def _folder_template(root: Path) -> tuple[str, Path] | None:
    """chat_template.jinja, else the (default) one of tokenizer_config.json."""
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
