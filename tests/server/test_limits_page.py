"""docs/limits.md has every limit as the code has it."""

from dataclasses import fields
from importlib import import_module
from pkgutil import walk_packages

from octavo.config import SETTINGS
from octavo.core.request import SamplingParams
from octavo.grammar import limits
from octavo.sandbox import checks
from octavo.server import api
from octavo.server.admission import _BOUNDS, MAX_RETRY_S, Load
from octavo.server.http import keys
from octavo.server.http.limits import HttpLimits, JsonLimits
from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
HTTP = {
    "max_body_bytes": "bytes of a body",
    "max_upload_bytes": "bytes of an uploaded file, without `--batch-dir` ([batches](batch.md))",
    "max_header_bytes": "bytes of headers",
    "max_headers": "headers",
    "max_prompts": "prompts of a text completion",
    "max_choices": "choices, generated or returned, and beams",
    "max_head_bytes": "bytes of a head that are read",
    "head_timeout_s": "seconds for a head",
    "handshake_timeout_s": "seconds of a TLS handshake",
    "max_connections": "connections",
    "max_pipelined": "requests sent ahead on one connection",
    "body_timeout_s": "seconds for a body",
    "body_grace_s": "further seconds until its connection is cut",
    "upload_grace_s": "seconds of an upload after which its speed is checked",
    "min_upload_bytes_per_s": "bytes a second that an upload must then have on average",
    "unauthenticated_body_timeout_s": "seconds for a body without a valid key, if keys are set",
    "max_unauthenticated_bodies": "unfinished bodies without a valid key, if keys are set",
    "stall_timeout_s": "seconds that a client may not read a stream",
    "max_unread_bytes": "bytes of a stream that may wait for its reader, besides its connection's buffer of 64 KB",
    "keep_alive_s": "seconds between keep-alive comments",
}
JSON = {
    "max_depth": "depth of JSON",
    "max_parts": "strings, objects and lists in a body",
    "max_values": "numbers and constants in a body",
}
BODIES = {
    "MAX_MESSAGES": "messages",
    "MAX_SYSTEM_BLOCKS": "blocks of a system prompt",
    "MAX_TOOL_ID_CHARACTERS": "characters of a call's id in Ollama's messages",
    "MAX_BLOCK_ID_CHARACTERS": "characters of a call's id in a block",
    "MAX_TOOLS": "tools",
    "MAX_TOOL_DESCRIPTION_CHARACTERS": "characters of a tool's description",
    "MAX_CALLS": "calls in one message",
    "MAX_SERVER_CALLS": "calls of tools of MCP servers in a response: 16 by default, at most",
    "MAX_CALL_ID_CHARACTERS": "characters of a call's id",
    "MAX_STOPS": "stop strings",
    "MAX_STOP_CHARACTERS": "characters of a stop string",
    "MAX_BIASES": "biases, each from -100 to 100",
    "MAX_STOP_IDS": "stop ids",
    "MAX_BAD_WORDS": "bad words",
    "MAX_BREAKERS": "sequence breakers",
    "MAX_WORD_CHARACTERS": "characters of a bad word or breaker",
    "MAX_ALLOWED_IDS": "allowed ids",
    "MAX_FILE_ID_CHARACTERS": "characters of a file's id",
    "MAX_TIMEOUT_S": "seconds of a timeout or objective",
    "MAX_PROMPT_SCORES": "log-probabilities of prompts in one answer",
    "MAX_INPUTS": "texts to embed or compare",
    "MAX_TOKENIZED_CHARACTERS": "characters to tokenize",
    "MAX_DETOKENIZED": "ids to detokenize",
    "MAX_SCHEMA_BYTES": "bytes of a JSON schema",
    "MAX_PATTERN_BYTES": "bytes of a regular expression",
    "MAX_ALTERNATIVES": "alternatives of a choice",
    "MAX_ALTERNATIVE_CHARACTERS": "characters of an alternative, together 65536 bytes",
    "MAX_GRAMMAR_CHARACTERS": "characters of a grammar",
    "MAX_WHITESPACE_CHARACTERS": "characters of a whitespace pattern",
    "MAX_FORMAT_NAME_CHARACTERS": "characters of a schema's name",
    "MAX_FORMAT_DESCRIPTION_CHARACTERS": "characters of a schema's description",
    "MAX_INPUT_ITEMS": "items of a response's input",
    "MAX_ITEM_ID_CHARACTERS": "characters of an item's or call's id, and of a called function's name",
    "MAX_METADATA": "pairs of metadata",
    "MAX_METADATA_KEY_CHARACTERS": "characters of a key of metadata",
    "MAX_METADATA_CHARACTERS": "characters of a value of metadata",
    "MAX_LABEL_CHARACTERS": "characters of a label",
    "MAX_DOCUMENTS": "documents for the chat template",
    "MAX_PATHS": "ignored fields that are named in an answer",
    "MAX_PATH_CHARACTERS": "characters of each of them",
}


# Other bounds of these modules: of what the server keeps, runs at once or sends.
NOT_OF_BODIES = {
    "MAX_CACHED",
    "MAX_CACHED_CHARACTERS",
    "MAX_ENDED_BATCHES",
    "MAX_EXPLANATIONS",
    "MAX_FORCED_CALLS",
    "MAX_ID_CHARACTERS",
    "MAX_LINE_BYTES",
    "MAX_LINE_ERRORS",
    "MAX_LISTED",
    "MAX_LOGIN_BYTES",
    "MAX_RESULT_CHARACTERS",
    "MAX_RESUMABLE",
    "MAX_DETACHED",
    "MAX_DETACHED_BYTES",
    "MAX_UPLOADS",
    "MAX_UPLOAD_WAIT_S",
    "MAX_WAITING_UPLOADS",
}


def bounds_of_bodies() -> dict[str, float]:
    modules = [import_module(module.name) for module in walk_packages(api.__path__, "octavo.server.api.")]
    found = {name: value for module in modules for name, value in vars(module).items() if name.startswith("MAX_")}
    return {name: value for name, value in found.items() if name not in NOT_OF_BODIES}


def told(words: str, value: float) -> bool:
    return f"| {words} | {value:.0f} |" in PAGE


def test_the_page_has_every_limit_of_a_connection_a_body_and_a_request() -> None:
    assert set(HTTP) | {"json"} == {field.name for field in fields(HttpLimits)}, "add it to docs/limits.md"
    assert set(JSON) == {field.name for field in fields(JsonLimits)}
    found = bounds_of_bodies()
    assert set(BODIES) == set(found), "add it to docs/limits.md"
    for name, words in BODIES.items():
        assert told(words, found[name]), f"{name} is {found[name]}, docs/limits.md says otherwise"
    limits = HttpLimits()
    for owner, names in ((limits, HTTP), (limits.json, JSON)):
        for name, words in names.items():
            assert told(words, getattr(owner, name)), f"{name} is {getattr(owner, name)}, docs/limits.md says otherwise"


def test_the_page_has_the_queues_limits_and_levels() -> None:
    for name in ("max_waiting", "max_waiting_tokens"):
        setting = next(setting for setting in SETTINGS if setting.name == name)
        assert f"| `{setting.flags[0]}` | {setting.default} |" in PAGE
    assert MAX_RETRY_S == 60 and "at most 60" in PAGE
    for level, share in zip((Load.BUSY, Load.CROWDED), ("1/2", "3/4"), strict=True):
        assert f"| {level.value} {level.name.lower()} | {share} |" in PAGE
        top, bottom = share.split("/")
        assert _BOUNDS[level - 1] == int(top) / int(bottom)
    assert f"at most {keys.MAX_KEYS}" in PAGE
    for name in {*keys.KeyInfo.__struct_fields__, "key", "key_sha256"} - {"digest", "salt"}:
        assert name in PAGE, f"docs/limits.md lacks {name}"
    assert SamplingParams(logprobs=20) and "| 20 | `top_logprobs`" in PAGE


def test_the_bounds_of_forms_are_on_their_page() -> None:
    page = (ROOT / "docs" / "structured-output.md").read_text(encoding="utf-8")
    for bound in (
        limits.MAX_OPTIONAL_PROPERTIES,
        limits.MAX_ROW_ITEMS,
        limits.MAX_STEP_ITEMS,
        limits.MAX_STEP_FUEL,
        limits.MAX_LEXER_STATES,
        limits.MAX_GRAMMAR_SYMBOLS,
        checks.MAX_SCHEMA_DEPTH,
        checks.MAX_EXPANDED,
        checks.MAX_REFERENCES_IN_ROW,
        checks.MAX_PATTERNS,
        checks.MAX_COUNT,
        checks.MAX_WEIGHT,
        checks.MAX_GROUP_DEPTH,
        checks.MAX_ANSWER_BYTES,
        checks.MAX_COMPILED_CHARACTERS,
    ):
        assert f"| {bound} |" in page, bound
