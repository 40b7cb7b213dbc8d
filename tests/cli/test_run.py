"""`octavo run` with a fake model: words, template, sampling, streaming, cancelling, the closing line."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import sys
from array import array
from types import SimpleNamespace

import pytest
from tests.adapters import RandomAdapter
from tests.tiny_models import make_tiny_model

from octavo import cli
from octavo.artifacts.resolve import find_wheel_model
from octavo.cli.answers import LocalAnswerer, print_text, sampling_params
from octavo.cli.flags import UsageError
from octavo.cli.run import RunRequest, prompt_of, read_words
from octavo.core.request import FinishError, FinishReason, SamplingParams
from octavo.errors import EngineError, ErrorKind, InvalidRequestError
from octavo.frontend.sessions import TextDelta, Usage
from octavo.text.text_model import TextModel

USAGE = Usage(prompt_tokens=5, completion_tokens=3, cached_tokens=0, queue_s=0.0, ttft_s=0.5, e2e_s=1.5)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class FakeSession:
    def __init__(self, *deltas, hangs=False):
        self.deltas, self.hangs, self.cancelled = deltas, hangs, False

    async def __aiter__(self):
        for delta in self.deltas:
            yield delta
        if self.hangs:
            await asyncio.Event().wait()

    async def cancel(self):
        self.cancelled = True


def _delta(text, reason=None, message=None):
    usage = USAGE if reason is not None else None
    return TextDelta(
        0, text, array("i", [1]), None, reason, None, usage, message and FinishError(ErrorKind.ENGINE, message)
    )


def _text(template=True):
    return SimpleNamespace(
        chat_template=object() if template else None,
        tokenizer=SimpleNamespace(encode=lambda prompt: [len(prompt)]),
        prompt_ids_from_messages=lambda messages, tools=None: [(m["role"], m["content"]) for m in messages],
    )


def _words(words, stdin, *, raw=False, system=None, is_named=False):
    return read_words(words, argparse.Namespace(raw=raw, system=system, image=[]), stdin, is_named=is_named)


def test_one_word_is_the_prompt_two_are_model_and_prompt() -> None:
    assert _words(["Hi"], Terminal()) == RunRequest("Hi", None, False, None)
    assert _words(["m", "Hi"], Terminal(), raw=True) == RunRequest("Hi", "m", True, None)


def test_a_pipe_is_the_prompt() -> None:
    assert _words([], io.StringIO("Hi\n")).prompt == "Hi\n"
    assert _words(["m", "-"], io.StringIO("Hi")).model == "m"
    assert _words(["smollm2"], io.StringIO("Hi")) == RunRequest("Hi", "smollm2", False, None)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a model, beside a cache with one repository."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "hub" / "models--owner--name" / "snapshots").mkdir(parents=True)
    for folder in (tmp_path, tmp_path / "folder"):
        folder.mkdir(exist_ok=True)
        (folder / "tiny.gguf").touch()
    (tmp_path / "notes.md").touch()


@pytest.mark.parametrize(
    "word",
    ["smollm2", "smollm2:135m", "qwen3:0.6b", "tiny.gguf", "folder", "owner/name", "owner/name:Q8_0", "scripted:a"],
)
def test_a_model_alone_is_talked_with_and_a_pipe_is_its_prompt(here, word) -> None:
    assert _words([word], Terminal()) == RunRequest(None, word, False, None)
    assert _words([word], io.StringIO("Hi")) == RunRequest("Hi", word, False, None)
    assert _words([word], Terminal(), is_named=True) == RunRequest(word, None, False, None)
    told = f'{word} is a model, and the prompt is missing: octavo run {word} "Hello"'
    for stdin, raw in ((io.StringIO(""), False), (Terminal(), True)):
        with pytest.raises(UsageError, match=told):
            _words([word], stdin, raw=raw)


@pytest.mark.parametrize("word", ["Hello", "and/or", "Why is the sky blue?", "smollm", "x" * 5000, "a\0b"])
def test_any_other_word_is_the_prompt(here, word) -> None:
    assert _words([word], Terminal()) == RunRequest(word, None, False, None)


@pytest.mark.parametrize("words", [["hi"], []])
def test_a_file_that_is_no_model_is_told(here, capsys, words) -> None:
    assert cli.main(["run", "notes.md", *words]) == 2
    assert capsys.readouterr().err.startswith("error: notes.md: not a GGUF file; give a .gguf file, or a folder")
    assert cli.main(["run", "hub", *words]) == 2
    assert capsys.readouterr().err.startswith("error: hub: holds neither config.json with .safetensors files nor")


@pytest.mark.parametrize(
    ("word", "note"),
    [
        ("smolm2", "note: 'smolm2' is taken as the prompt, for no model has that name; did you mean 'smollm2'?\n"),
        ("some/model", "note: 'some/model' is taken as the prompt; octavo chat some/model downloads that model"),
        ("Hello", ""),
    ],
)
def test_a_prompt_that_looks_like_a_model_is_remarked(here, capsys, monkeypatch, word, note) -> None:
    def stop(config):
        raise InvalidRequestError("far enough")

    monkeypatch.setattr("octavo.assembly.build_local", stop)
    assert cli.main(["run", word]) == 2
    err = capsys.readouterr().err
    assert err.startswith(note) and err.endswith("error: far enough\n") and err.count("\n") == 1 + bool(note)
    assert cli.main(["run", word, "--quiet"]) == 2
    assert capsys.readouterr().err == "error: far enough\n"


def test_a_model_alone_becomes_a_conversation(here, monkeypatch) -> None:
    seen = []
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("octavo.cli.run.converse", lambda args, config, _: seen.append((args, config)) or 0)
    assert cli.main(["run", "tiny.gguf", "--system", "Be brief."]) == 0
    ((args, config),) = seen
    assert (args.system, args.max_tokens, config.model.model) == ("Be brief.", None, "tiny.gguf")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the prompt is missing"),
        ([" "], "the prompt is empty"),
        (["why", "is", "it"], 'put the prompt in quotes: octavo run "why is it"'),
    ],
)
def test_mistaken_words(words, message) -> None:
    with pytest.raises(UsageError, match=message):
        _words(words, Terminal())


def test_system_needs_a_template() -> None:
    with pytest.raises(UsageError, match="leave out --raw"):
        _words(["Hi"], Terminal(), raw=True, system="Be brief.")
    with pytest.raises(UsageError, match="no chat template"):
        prompt_of(_text(template=False), RunRequest("Hi", None, False, "Be brief."))


def test_prompts_go_through_the_template_unless_raw() -> None:
    def ids(text, *request):
        session = FakeSession(_delta(".", FinishReason.STOP))
        asyncio.run(_print(session, prompt_of(text, RunRequest(*request)), text))
        return session.prompt_ids

    assert ids(_text(), "Hi", None, False, "S") == [("system", "S"), ("user", "Hi")]
    assert ids(_text(), "Hi", None, True, None) == [2]
    assert ids(_text(template=False), "Hi", None, False, None) == [2]


def _args(**given):
    return argparse.Namespace(**{"max_tokens": 9, "temperature": None, "top_p": None, "top_k": None, **given})


def test_flags_beat_the_models_config_beats_the_default() -> None:
    assert sampling_params(_args(), {}) == SamplingParams(max_tokens=9)
    model = {"temperature": 0.2, "top_p": 0.9}
    assert (sampling_params(_args(), model).temperature, sampling_params(_args(), model).top_p) == (0.2, 0.9)
    params = sampling_params(_args(temperature=0.0, top_k=5), model)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.0, 0.9, 5, 9)
    with pytest.raises(InvalidRequestError, match="temperature is -1"):
        sampling_params(_args(temperature=-1.0), model)


def _answerer(session, text=None):
    async def submit(ids, params, **_):
        session.prompt_ids = ids
        return session

    engine = SimpleNamespace(text=text or _text(), sessions=SimpleNamespace(submit=submit))
    return LocalAnswerer(engine, SamplingParams(max_tokens=3))


async def _print(session, prompt="Hi", text=None):
    answerer = _answerer(session, text)
    await print_text(answerer.stream(prompt), [])
    return answerer


def test_deltas_are_streamed(capsys) -> None:
    session = FakeSession(_delta("Hel"), _delta("lo"), _delta(".", FinishReason.STOP))
    answerer = asyncio.run(_print(session))
    assert answerer.usage == USAGE
    assert answerer.note == "3 tokens, 2.0 tokens/s, first after 500 ms"
    assert capsys.readouterr().out == "Hello."


def test_a_failed_request_says_why() -> None:
    session = FakeSession(_delta("Hel"), _delta("", FinishReason.ERROR, "the pool is gone"))
    with pytest.raises(EngineError, match="the pool is gone"):
        asyncio.run(_print(session))


def test_ctrl_c_cancels_the_request() -> None:
    session = FakeSession(_delta("Hel"), hangs=True)

    async def interrupted():
        task = asyncio.create_task(_print(session))
        await asyncio.sleep(0.01)
        assert not session.cancelled
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert session.cancelled


def test_a_reader_that_leaves_cancels_the_request(monkeypatch) -> None:
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    session = FakeSession(_delta("Hel"))
    monkeypatch.setattr(sys, "stdout", Closed())
    with pytest.raises(BrokenPipeError):
        asyncio.run(_print(session))
    assert session.cancelled


def test_an_answer_that_was_cut_is_noted() -> None:
    answerer = asyncio.run(_print(FakeSession(_delta("a", FinishReason.LENGTH))))
    assert answerer.note == "3 tokens (cut by max_tokens), 2.0 tokens/s, first after 500 ms"


def test_the_default_model_samples_as_its_card_recommends() -> None:
    files = find_wheel_model()
    if files is None:
        pytest.skip("the wheel with the default model is not installed")
    generation = TextModel.load(files).spec.generation
    assert sampling_params(_args(), generation).temperature == 0.2


def test_answers_go_through_an_adapter_and_lines_of_generate_name_theirs(tmp_path, capsys) -> None:
    base = make_tiny_model("llama3", tmp_path / "base", eos_token_id=None)
    given = ["--lora-modules", f"a={RandomAdapter.of(base, 1, rank=8).write(tmp_path / 'a')}"]
    engine = ["--model", str(base), "--dtype", "float32", "--threads", "1", "--temperature", "0", "-n", "12", "-q"]

    def answer(*options: str) -> str:
        assert cli.main(["run", "hello", *engine, *options]) == 0
        return capsys.readouterr().out.removesuffix("\n")

    plain, adapted = answer(), answer(*given)
    assert plain != adapted
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"prompt": "hello", "model": name}) for name in ("base", "a", "none")))
    assert cli.main(["generate", str(lines), *engine, *given]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row.get("text") for row in rows] == [plain, adapted, None]
    assert "no model 'none'" in rows[2]["error"]["message"]
    assert cli.main(["run", "hello", *engine, *given, "--lora-modules", f"b={tmp_path / 'a'}"]) == 2
    assert "answers here come through one adapter" in capsys.readouterr().err
