"""From messages and prompts to token ids, without blocking the event loop.

Owns: where work is done (the event loop, a thread or a sandbox process), and the refusal of texts that cannot fit.
Does not: know templates or vocabularies (TextModel does).
Invariant: the event loop itself handles only short texts and small conversations.

Tokenizing releases the interpreter's lock, so a thread is enough. Rendering a template does not release it, and one
operation of a template can take minutes inside C. So templates are rendered in a sandbox process, which can be killed,
unless the template is trusted and the conversation is small.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.core.request import Span
from octavo.errors import OctavoError, RequestError, TooComplexError
from octavo.media.item import MediaItem
from octavo.media.placeholders import Images, unique_items
from octavo.sandbox.pool import RENDER
from octavo.sandbox.wire import RenderChat
from octavo.server.api.completions.bodies import ChatBody
from octavo.server.http.body import off_loop
from octavo.server.http.errors import bad_field, from_exception, too_long
from octavo.text.dialect import Dialect

if TYPE_CHECKING:
    from octavo.sandbox.pool import Sandbox
    from octavo.server.images import ImageReader
    from octavo.text.chat_template import ChatTemplate
    from octavo.text.text_model import Conversation, TextModel

_log = logging.getLogger(__name__)
HERE_CHARS = 4096  # a text of this length is tokenized in 2 ms
HERE_JSON = 65_536  # characters of JSON that are parsed in under a millisecond
HERE_WORK = 16_384  # of a conversation, as `_work_of` counts: 1 to 2 ms of rendering
THREAD_WORK = 131_072
SLOW_RENDER_S = 0.05  # a template that took longer is rendered in the sandbox process from then on
RENDER_LIMIT_S = 5.0
_PER_MESSAGE = 128  # characters of work for each message
_PER_VALUE = 16
_INDEX = re.compile(r"^messages\.(\d+)")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation's ids, the spans of its images, and each of these images once."""

    ids: list[int]
    spans: tuple[Span, ...] = ()
    media: tuple[MediaItem, ...] = ()


class PromptReader:
    """Makes prompt token ids for one model. `max_len` is the most tokens that a prompt may have."""

    def __init__(
        self, text: TextModel, max_len: int, sandbox: Sandbox, dialect: Dialect, images: ImageReader | None = None
    ) -> None:
        self._text = text
        self._dialect = dialect
        self.max_len = max_len
        self._sandbox = sandbox
        self._images = images
        self._is_slow = False

    async def chat(self, body: ChatBody, num_kept: int | None = None) -> ChatPrompt:
        """Render the conversation with the model's template, tokenize it, and read its images. Raises ApiError.

        `num_kept`: keep this number of last tokens; None keeps all.
        """
        if body.continue_final_message and body.add_generation_prompt:
            message = "continue_final_message goes on with the last message; leave add_generation_prompt out"
            raise bad_field("add_generation_prompt", message)
        tools = body.usable_tools if body.tools else []
        size = body.num_characters
        for each in body.messages:
            size += len(each.name or "")
        begins_answer = (
            not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
        )
        variables = effort_variables(self._dialect, body) if self._dialect.effort_variables else {}
        if body.documents:
            variables["documents"] = self._documents(body)
        variables |= body.chat_template_kwargs

        has_vision = self._text.spec.vision is not None
        images = await self._read_images(body, num_kept) if has_vision else ()

        def make_conversation() -> Conversation:
            return self._text.conversation(
                [message.shown() for message in body.messages],
                add_generation_prompt=begins_answer,
                continue_final_message=body.continue_final_message,
                tools=[tool.shown() for tool in tools] if tools else None,
                variables=variables,
            )

        try:
            if size > HERE_CHARS and num_kept is None:
                await off_loop(lambda: self._check_size("messages", size))
            conversation = make_conversation() if size <= HERE_JSON else await off_loop(make_conversation)
            prompt = await self._render(conversation, _work_of(size, conversation))
            if has_vision and num_kept is None:
                return await self._encode_images(prompt, body, images, conversation.mark)
            ids = await self._encode("messages", prompt, body.add_special_tokens, num_kept, conversation.mark)
        except RequestError as error:
            error.param = _INDEX.sub(r"messages[\1]", error.param or "messages")  # as in this server's other messages
            raise from_exception(error) from None
        if not ids:
            raise bad_field("messages", "messages make an empty prompt")
        return ChatPrompt(ids)

    async def _read_images(self, body: ChatBody, num_kept: int | None) -> Images:
        """Return the items of each image. Raises ApiError."""
        vision, urls = self._text.spec.vision, body.image_urls
        if not urls:
            return ()
        assert vision is not None and self._images is not None, "bodies of other models have no images"
        if num_kept is not None:
            message = "truncate_prompt_tokens cannot be used with images; leave it out"
            raise bad_field("truncate_prompt_tokens", message)
        return await self._images.read(urls, vision)

    async def _encode_images(self, prompt: str, body: ChatBody, images: Images, mark: str | None) -> ChatPrompt:
        def encode() -> ChatPrompt:
            if len(prompt) > HERE_CHARS:
                self._check_size("messages", len(prompt), prompt)
            ids, spans = self._text.encode_images(prompt, mark, images, body.add_special_tokens)
            return ChatPrompt(ids, spans, unique_items(images))

        num_bytes = sum(len(item.data) for image in images for item in image)
        if num_bytes + len(prompt) <= HERE_CHARS:
            return encode()
        return await off_loop(encode, len(prompt))

    def _documents(self, body: ChatBody) -> object:
        """Return the documents for the template. Raises ApiError if the template does not use documents."""
        template = self._text.chat_template
        if template is None or "documents" not in template.source:
            message = "documents: the chat template of this model shows none; give their text in a message"
            raise bad_field("documents", message, "unsupported_field")
        return body.documents

    async def _render(self, conversation: Conversation, work: int) -> str:
        template = self._text.chat_template
        assert template is not None

        def render() -> str:
            started = time.thread_time()
            prompt = template.render(
                conversation.messages, conversation.add_generation_prompt, conversation.tools, **conversation.variables
            )
            self._is_slow |= time.thread_time() - started > SLOW_RENDER_S
            return prompt

        if template.is_trusted and not self._is_slow and work <= THREAD_WORK:
            prompt = render() if work <= HERE_WORK else await off_loop(render)
        else:
            prompt = await self._render_elsewhere(template, conversation)
        return conversation.cut_at_continuation(prompt) if conversation.is_continued else prompt

    async def _render_elsewhere(self, template: ChatTemplate, conversation: Conversation) -> str:
        command = RenderChat(
            template.source,
            template.tokens,
            conversation.messages,
            conversation.add_generation_prompt,
            tools=None if conversation.tools is None else [dict(tool) for tool in conversation.tools],
            variables=conversation.variables,
        )
        try:
            return str(await self._sandbox.run(RENDER, command, RENDER_LIMIT_S))
        except TooComplexError as error:
            raise TooComplexError(f"the chat template is too slow or too large for these messages: {error}") from None

    async def warm_up(self) -> None:
        """Start a sandbox process and compile the template there, before the first request needs it."""
        template = self._text.chat_template
        if template is None or template.is_trusted:
            return
        try:
            probe = self._text.conversation([{"role": "user", "content": "x"}])
            await self._render_elsewhere(template, probe)
        except RequestError:
            pass  # the template refuses the probe, but is compiled now
        except OctavoError as error:
            _log.warning("chat templates cannot be rendered now: %s", error)

    async def completion(
        self, prompts: Sequence[str | list[int]], num_kept: int | None = None, add_special_tokens: bool = True
    ) -> list[Sequence[int]]:
        """Return the token ids of prompts given as text or ids, at most the last `num_kept` each. Raises ApiError."""
        return [await self._one(prompt, num_kept, add_special_tokens) for prompt in prompts]

    async def _one(self, prompt: str | list[int], num_kept: int | None, add_special_tokens: bool) -> Sequence[int]:
        if not prompt:
            raise bad_field("prompt", "prompt is empty; give at least one token")
        if isinstance(prompt, list):
            prompt = prompt if num_kept is None else prompt[-num_kept:]
            if len(prompt) > self.max_len:
                raise too_long("prompt", self.max_len, f"the prompt has {len(prompt)}")
            return prompt  # Sessions checks the ids
        try:
            return await self._encode("prompt", prompt, add_special_tokens, num_kept, None)
        except RequestError as error:
            raise from_exception(error, {"prompt_token_ids": "prompt"}) from None

    async def echo(self, prompts: Sequence[str | Sequence[int]]) -> list[str]:
        """Return the prompts as text."""
        decode = self._text.tokenizer.decode

        def texts() -> list[str]:
            return [prompt if isinstance(prompt, str) else decode(prompt) for prompt in prompts]

        num_ids = sum(len(prompt) for prompt in prompts if not isinstance(prompt, str))
        return texts() if num_ids <= HERE_CHARS else await off_loop(texts, num_ids)

    async def _encode(
        self, param: str, text: str, add_special_tokens: bool, num_kept: int | None, mark: str | None
    ) -> list[int]:
        if len(text) <= HERE_CHARS:
            return self._text.encode_prompt(text, mark, add_special_tokens, num_kept)

        def encode() -> list[int]:
            if num_kept is None:
                self._check_size(param, len(text), text)
            return self._text.encode_prompt(text, mark, add_special_tokens, num_kept)

        return await off_loop(encode, len(text))

    def _check_size(self, param: str, num_characters: int, text: str | None = None) -> None:
        """Refuse a text that cannot fit, by its length or (given `text`) by its first tokens. Raises ApiError."""
        tokenizer = self._text.tokenizer
        if text is None:
            min_tokens: int | None = num_characters // tokenizer.longest_piece
        else:
            min_tokens = tokenizer.num_tokens_if_over(text, self.max_len)
        if min_tokens is not None and min_tokens > self.max_len:
            size = f"the prompt has {num_characters} characters, so at least {min_tokens} tokens"
            raise too_long(param, self.max_len, size)


def _work_of(size: int, conversation: Conversation) -> int:
    """Return the approximate work of rendering a conversation, in characters."""
    work = size + _PER_MESSAGE * len(conversation.messages)
    pending: list[Any] = [conversation.variables, *(conversation.tools or ())]
    for message in conversation.messages:
        if message.get("tool_calls"):
            pending.append(message["tool_calls"])
    while pending and work <= THREAD_WORK:
        value = pending.pop()
        work += _PER_VALUE + (len(value) if isinstance(value, str) else 0)
        if isinstance(value, dict):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            pending += value
    return work


def effort_variables(dialect: Dialect, body: ChatBody) -> dict[str, object]:
    """Return the template's variables for the reasoning effort; empty for a template without them."""
    effort = body.effort
    if effort is not None:
        return {name: effort if name == "reasoning_effort" else effort != "none" for name in dialect.effort_variables}
    if body.thinking is not None:
        return {name: True for name in dialect.effort_variables if name != "reasoning_effort"}
    return {}
