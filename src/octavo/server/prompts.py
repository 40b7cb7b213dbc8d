"""From messages and prompts to token ids, without holding up the event loop.

Owns: which work leaves the loop, and the refusal of texts that cannot fit before they are tokenised.
Does not: know templates or vocabularies (TextModel does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from octavo.errors import RequestError
from octavo.server.faults import bad_field, from_exception
from octavo.server.limits import OFF_LOOP_BYTES
from octavo.server.schema import ChatBody, Message

if TYPE_CHECKING:
    from octavo.text.text_model import TextModel

T = TypeVar("T")
_ROLES = {"developer": "system"}


class PromptReader:
    """Makes prompt ids for one model. `max_len` is the most tokens a prompt may have."""

    def __init__(self, text: TextModel, max_len: int) -> None:
        self._text = text
        self._max_len = max_len
        self._longest_piece = 0

    async def chat(self, body: ChatBody) -> list[int]:
        """Render the conversation with the model's template and tokenise it."""
        messages = [_shown(message) for message in body.messages]
        if body.continue_final_message and body.add_generation_prompt:
            message = "continue_final_message goes on with the last message; leave add_generation_prompt out"
            raise bad_field("add_generation_prompt", message)
        size = sum(len(message["content"]) for message in messages)

        def render() -> list[int]:
            self._check_size("messages", size)
            begins_answer = (
                not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
            )
            return self._text.prompt_ids_from_messages(
                messages,
                add_generation_prompt=begins_answer,
                continue_final_message=body.continue_final_message,
                template_kwargs=body.chat_template_kwargs,
            )

        ids = await self._run("messages", size, render)
        if not ids:
            raise bad_field("messages", "messages make an empty prompt")
        return ids

    async def completion(self, prompts: Sequence[object]) -> list[Sequence[int]]:
        """Token ids of each prompt, given as text or as ids."""
        return [await self._one(prompt) for prompt in prompts]

    async def _one(self, prompt: object) -> Sequence[int]:
        if not prompt:
            raise bad_field("prompt", "prompt is empty; give at least one token")
        if isinstance(prompt, list):
            return prompt  # Sessions checks the ids
        assert isinstance(prompt, str)

        def encode() -> list[int]:
            self._check_size("prompt", len(prompt))
            return self._text.tokenizer.encode(prompt)

        return await self._run("prompt", len(prompt), encode)

    async def echo(self, prompts: Sequence[object]) -> list[str]:
        """The prompts as text."""
        decode = self._text.tokenizer.decode
        return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]  # type: ignore[arg-type]

    async def _run(self, param: str, size: int, work: Callable[[], T]) -> T:
        try:
            return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()
        except RequestError as error:
            raise from_exception(error, {"prompt_token_ids": param}) from None

    def _check_size(self, param: str, num_characters: int) -> None:
        """Refuse a text that has more tokens than fit even if each were the vocabulary's longest piece."""
        if num_characters <= OFF_LOOP_BYTES:
            return
        if not self._longest_piece:
            self._longest_piece = max(map(len, self._text.tokenizer.backend.get_vocab(with_added_tokens=True)))
        least = num_characters // self._longest_piece
        if least > self._max_len:
            size = f"{param} has {num_characters} characters, so at least {least} tokens"
            raise bad_field(param, f"{size}; this model holds {self._max_len}", "context_length_exceeded")


def _shown(message: Message) -> dict[str, str]:
    plain = {"role": _ROLES.get(message.role, message.role), "content": message.text}
    return plain if message.name is None else {**plain, "name": message.name}
