"""The text of a chat's prompt, as a model's template renders it."""

from collections.abc import Mapping, Sequence
from typing import Any

from octavo.text.text_model import TextModel


def prompt_text(
    model: TextModel,
    messages: Sequence[Mapping[str, Any]],
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> str:
    """Return the prompt whose ids TextModel.prompt_ids_from_messages returns, without marks."""
    names = ("add_generation_prompt", "continue_final_message", "tools")
    given = {name: options.pop(name) for name in names if name in options}
    conversation = model.conversation(messages, **given, variables={**(template_kwargs or {}), **options})
    prompt = model._rendered(conversation)
    return prompt if conversation.mark is None else prompt.replace(conversation.mark, "")
