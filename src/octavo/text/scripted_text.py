"""The text side of a scripted model: a byte tokenizer and a chat template, both defined here.

Owns: the vocabulary (three special tokens, then the bytes), the template, and reading a prompt back from its ids.
Does not: know rules (artifacts.script does).
The template has ChatML's marks; tools and calls are written as for Hermes models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from octavo.artifacts.script import END_ID, IMAGE_ID, IMAGE_TOKENS, VOCAB_SIZE, ScriptedRequest
from octavo.text.detokenizer import byte_alphabet
from octavo.text.tokenizer import Tokenizer

_START, _END = "<|im_start|>", "<|im_end|>"
_SPECIAL = ("<|endoftext|>", _START, _END)

TEMPLATE = """\
{%- if tools -%}
<|im_start|>system
You may call these functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>
Write each call as <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined and message.reasoning_content -%}
<think>
{{ message.reasoning_content }}
</think>

{% endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def scripted_tokenizer(path: Path) -> Tokenizer:
    """Return a tokenizer with one id per byte, after the special ids. Errors name `path`."""
    pieces = sorted(byte_alphabet(), key=byte_alphabet().__getitem__)
    vocab = {piece: index for index, piece in enumerate((*_SPECIAL, *pieces))}
    assert len(vocab) == VOCAB_SIZE and vocab[_END] == END_ID
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(_SPECIAL))
    return Tokenizer(backend, {"eos_token": _END}, [END_ID], path)


class ScriptedText:
    """Encodes a script's answers and decodes prompts, for the scripted executor."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = scripted_tokenizer(path)

    def encode(self, text: str) -> list[int]:
        """Return the ids of an answer."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def read(self, ids: Sequence[int]) -> ScriptedRequest:
        """Decode a prompt. Return its last message if the template rendered it, else the whole prompt."""
        prompt = self._tokenizer.decode(ids, skip_special_tokens=False)
        prompt = prompt.replace(_SPECIAL[IMAGE_ID] * IMAGE_TOKENS, "[image]")
        last = ""
        for part in prompt.split(_START)[1:]:
            if _END in part:
                last = part
        role, is_message, content = last.partition("\n")
        if not is_message:
            return ScriptedRequest(prompt, prompt)
        return ScriptedRequest(prompt, content.rpartition(_END)[0], role)
