"""All that the text side of a model needs: tokenizer, template, specification.

Owns: loading them from the same files, once.
Does not: load torch or weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
from octavo.text.tokenizer import Tokenizer
from octavo.text.tool_prompt import NO_SYSTEM, with_short_ids, with_tools


@dataclass(frozen=True, slots=True)
class Conversation:
    """Checked messages and what else the template is given; `is_continued` when the last message is to go on."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: Sequence[Mapping[str, Any]] | None
    variables: dict[str, Any]
    is_continued: bool

    def finish(self, prompt: str) -> str:
        """Return the prompt to be used, from the one that the template made. Raises InvalidRequestError."""
        return cut_at_continuation(prompt) if self.is_continued else prompt


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model's text side. `chat_template` is None for a model without one."""

    name: str
    spec: ModelSpec
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None = None

    @classmethod
    def load(cls, files: ModelFiles, chat_template_file: str | Path | None = None) -> TextModel:
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
        template = None if found is None else ChatTemplate(found[0], tokenizer.special_tokens, path=found[1])
        return cls(files.name, spec, tokenizer, template)

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
        assert self.chat_template is not None
        made = self.chat_template.render(asked.messages, asked.add_generation_prompt, asked.tools, **asked.variables)
        return asked.finish(made)

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
        variables = dict(variables or {})
        check_variables(variables)
        if takes_tools(self.chat_template.source):
            plain = with_short_ids(plain) if "[TOOL_CALLS]" in self.chat_template.source else plain
        else:
            plain, tools = with_tools(plain, tools, NO_SYSTEM not in self.chat_template.source), None
        if continue_final_message:
            return Conversation(mark_continuation(plain), False, tools, variables, True)
        return Conversation(plain, add_generation_prompt, tools, variables, False)

    def prompt_ids_from_messages(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """Return the prompt ids of a chat; `options` are those of prompt_from_messages.

        The template writes the beginning-of-sequence token where the model wants one, so none is added here.
        """
        return self.tokenizer.encode(self.prompt_from_messages(messages, **options), add_special_tokens=False)


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
