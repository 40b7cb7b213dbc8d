"""The script of a scripted model: rules that map prompts to answers.

Owns: the file's format, its bounds, and the choice of the rule for a prompt; the vocabulary (special tokens, then the
bytes) and the chat template, which has ChatML's marks and writes tools and calls as for Hermes models.
Does not: generate (executors.scripted_executor does). docs/testing.md describes the format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.vision_spec import VisionSpec
from octavo.config.sources import read_yaml
from octavo.errors import ModelFileError

PREFIX = "scripted:"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the first ids; those of the bytes follow
VOCAB_SIZE = len(SPECIAL) + 256
IMAGE_ID = 0  # <|endoftext|>, which stands for images
IMAGE_TOKENS = 4  # of each image
END_ID = 2  # <|im_end|>, which ends a message
HIDDEN_SIZE = 64  # of embeddings
MAX_FILE_BYTES = 4 << 20
MAX_RULES = 4096
MAX_DELAY_MS = 2000.0  # the watchdog ends an engine whose step takes 5 s
_SPECIAL_TEXT = re.compile(f"({'|'.join(map(re.escape, SPECIAL))})")

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

Text = Annotated[str, Meta(max_length=65_536)]
Delay = Annotated[float, Meta(ge=0.0, le=MAX_DELAY_MS)]
Count = Annotated[int, Meta(ge=0, le=1 << 20)]
Logprob = Annotated[float, Meta(ge=-100.0, le=0.0)]


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tool call. `text` is the call in the format of the model's template."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    arguments: dict[str, Any] = {}

    @property
    def text(self) -> str:
        """The call as the model writes it."""
        call = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{call}\n</tool_call>"


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rule: conditions and an answer. All given conditions must hold; a rule without any matches every prompt."""

    contains: Text | None = None
    equals: Text | None = None
    regex: Annotated[str, Meta(max_length=1024)] | None = None
    where: Literal["last", "prompt"] = "last"
    role: Literal["system", "user", "assistant", "tool"] | None = None
    say: Text | Annotated[list[Text], Meta(min_length=1, max_length=64)] | None = None
    echo: bool = False
    think: Text | None = None
    call: ScriptedCall | Annotated[list[ScriptedCall], Meta(max_length=64)] | None = None
    finish: Literal["stop", "length"] = "stop"
    first_delay_ms: Delay = 0.0
    delay_ms: Delay = 0.0
    logprob: Logprob | None = None
    fail_after: Count | None = None
    crash_after: Count | None = None

    def matches(self, request: ScriptedRequest) -> bool:
        """Return True if the rule matches a prompt."""
        text = request.last if self.where == "last" else request.prompt
        return (
            (self.role is None or self.role == request.role)
            and (self.contains is None or self.contains in text)
            and (self.equals is None or self.equals == text)
            and (self.regex is None or re.search(self.regex, text) is not None)
        )

    def answer(self, request: ScriptedRequest, choice: int = 0) -> str:
        """Return the answer to a prompt: reasoning, then text, then calls."""
        says = self.say if isinstance(self.say, list) else [self.say or ""]
        text = request.last if self.echo else says[choice % len(says)]
        calls = self.call if isinstance(self.call, list) else [self.call] if self.call is not None else []
        thoughts = f"<think>\n{self.think}\n</think>\n\n" if self.think is not None else ""
        return thoughts + "\n".join([*([text] if text else []), *(call.text for call in calls)])


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """A prompt to match: its whole text, its last message and that message's role. A plain prompt is a user message."""

    prompt: str
    last: str
    role: str = "user"


def encode(text: str) -> list[int]:
    """Return the ids of a text, as the model's tokenizer does: special tokens that it spells out become their ids."""
    ids: list[int] = []
    for part in _SPECIAL_TEXT.split(text):
        ids += [SPECIAL.index(part)] if part in SPECIAL else [len(SPECIAL) + byte for byte in part.encode()]
    return ids


def read_prompt(ids: Sequence[int]) -> ScriptedRequest:
    """Decode a prompt. Return its last message if the template rendered it, else the whole prompt."""
    pieces = (SPECIAL[i].encode() if i < len(SPECIAL) else bytes((i - len(SPECIAL),)) for i in ids)
    prompt = b"".join(pieces).decode(errors="replace").replace(SPECIAL[IMAGE_ID] * IMAGE_TOKENS, "[image]")
    start, end = SPECIAL[1:]
    last = ""
    for part in prompt.split(start)[1:]:
        if end in part:
            last = part
    role, is_message, content = last.partition("\n")
    if not is_message:
        return ScriptedRequest(prompt, prompt)
    return ScriptedRequest(prompt, content.rpartition(end)[0], role)


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A script file. A prompt that matches no rule is echoed."""

    rules: Annotated[list[Rule], Meta(max_length=MAX_RULES)] = []
    step_ms: Delay = 0.0
    logprob: Logprob = -0.125
    max_model_len: Annotated[int, Meta(ge=16, le=1 << 20)] = 32_768
    images: bool = False  # messages may have images; rules see each as [image]

    def rule_for(self, request: ScriptedRequest) -> Rule:
        """Return the first rule that matches the prompt."""
        return next((rule for rule in self.rules if rule.matches(request)), _ECHO)


_ECHO = Rule(echo=True)
# msgspec resolves the types of a Struct at its first use, and the process dies (SIGSEGV, msgspec 0.22) if two threads
# do that at once, as the executor's thread and the fingerprint's may at a start. So they are resolved here.
msgspec.json.Decoder(Script)


def read_script(path: Path) -> Script:
    """Read a .yaml, .json or .jsonl (one rule per line) script. Raises ModelFileError, which names the place."""
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelFileError(path, f"has {size} bytes; a script may have {MAX_FILE_BYTES}")
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFileError(path, f"cannot be read ({getattr(error, 'strerror', None) or error})") from error
    values = _lines(path, text) if path.suffix == ".jsonl" else _value(path, text)
    try:
        script = msgspec.convert(values, Script)
    except msgspec.ValidationError as error:
        raise ModelFileError(path, f"is no script: {error}") from error
    for number, rule in enumerate(script.rules):
        _check(path, number, rule)
    return script


def _lines(path: Path, text: str) -> dict[str, object]:
    rules = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                rules.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise ModelFileError(path, f"line {number} is not JSON ({error})") from error
    return {"rules": rules}


def _value(path: Path, text: str) -> object:
    """Parse a mapping with `rules`, or a list of rules."""
    try:
        value = json.loads(text) if path.suffix == ".json" else read_yaml(text)
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not well formed ({error})") from error
    return {"rules": value} if isinstance(value, list) else {} if value is None else value


def _check(path: Path, number: int, rule: Rule) -> None:
    """Check what the types of the fields do not express."""
    path_in_file = f"rules[{number}]"
    if rule.regex is not None:
        try:
            re.compile(rule.regex)
        except (re.error, RecursionError, OverflowError) as error:
            raise ModelFileError(path, f"{path_in_file}.regex is not a regular expression ({error})") from error
    if rule.echo and rule.say is not None:
        raise ModelFileError(path, f"{path_in_file} has both say and echo; give one")
    if not (rule.echo or rule.say is not None or rule.call is not None or rule.think is not None):
        raise ModelFileError(
            path, f'{path_in_file} says nothing; give say, echo, call or think (say: "" for an empty answer)'
        )


def _vision() -> VisionSpec:
    """Return how a scripted model reads images: scaled to a few pixels, since nothing looks at them."""
    half = (0.5, 0.5, 0.5)
    return VisionSpec("llava", IMAGE_ID, IMAGE_ID, half, half, 1 / 255, 3, 4, (8, 8), IMAGE_TOKENS, shortest_edge=8)


def script_spec(path: Path) -> ModelSpec:
    """Return the specification of a scripted model. Only vocabulary, length and embedding size are meaningful."""
    script = read_script(path)
    return ModelSpec(
        family="llama",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=HIDDEN_SIZE,
        intermediate_size=HIDDEN_SIZE,
        rms_norm_eps=1e-5,
        rope_theta=1e4,
        max_model_len=script.max_model_len,
        eos_token_ids=(END_ID,),
        vision=_vision() if script.images else None,
    )
