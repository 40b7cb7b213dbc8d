"""The command line as users meet it: help, near names, one-line errors, exit codes, no torch at start."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys

import pytest
import shtab
from tests.settings import load_config

from octavo import cli
from octavo.cli.flags import Parser, UsageError, add_settings, config_from, respell, settings_given
from octavo.cli.help import parser_of_all
from octavo.config import SETTINGS
from octavo.errors import InvariantError


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(capsys, words) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in cli.COMMANDS)


def test_a_family_lists_its_members(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert "bench offline" in out
    assert "doctor" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["srve"], "unknown command 'srve'; did you mean 'serve'?"),
        (["qqq"], "unknown command 'qqq'; see octavo --help"),
        (["models"], "unknown command 'models'; did you mean 'list'?"),
        (["bench", "onlin"], "unknown bench command 'onlin'; did you mean 'online'?"),
        (["bench", "gpu"], "unknown bench command 'gpu'; give one of offline, online"),
        (["admin", "statistic"], "unknown verb 'statistic'; did you mean 'statistics'?"),
        (["completions", "tcsh"], "unknown shell 'tcsh'; give one of bash, zsh, fish"),
        (["config", "show", "--max-num-seq", "3"], "unknown flag '--max-num-seq'; did you mean '--max-num-seqs'?"),
        (["config", "show", "--thread=3"], "unknown flag '--thread'; did you mean '--threads'?"),
        (["config", "show", "extra"], "unknown argument 'extra'; see octavo config show --help"),
        (
            ["config", "show", "--threads"],
            "argument --threads/-t: expected one argument; see octavo config show --help",
        ),
        (["config", "show", "--threads", "two"], "--threads is 'two'; give a whole number from 1 to 1024"),
        (["config", "show", "--config", "/none.yaml"], "config file not found: /none.yaml"),
    ],
)
def test_mistakes_are_one_line_and_code_2(capsys, words, message) -> None:
    assert cli.main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_bugs_are_not_dressed_up(monkeypatch) -> None:
    def broken(words):
        raise InvariantError("x")

    monkeypatch.setattr(cli, "_dispatch", broken)
    with pytest.raises(InvariantError):
        cli.main([])


def test_ctrl_c_is_130(monkeypatch) -> None:
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_dispatch", interrupted)
    assert cli.main([]) == 130


def test_every_command_explains_itself_without_torch() -> None:
    code = """
import io, sys
from contextlib import redirect_stdout
from octavo.cli import COMMANDS, main

for name in COMMANDS:
    with redirect_stdout(io.StringIO()) as printed:
        try:
            main([*name.split(), "--help"])
        except SystemExit as end:
            assert end.code == 0, name
    assert printed.getvalue().startswith(f"usage: octavo {name}"), name
    assert "torch" not in sys.modules, name
print(len(COMMANDS))
"""
    environ = {**os.environ, "PYTHONPATH": "src"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{len(cli.COMMANDS)}\n"


def test_every_command_has_a_module() -> None:
    for name, (_, text) in cli.COMMANDS.items():
        assert callable(cli.load_command(name, Parser()))
        assert text


def _parse(*words):
    parser = Parser(prog="octavo test")
    add_settings(parser)
    return parser.parse(words)


def test_every_setting_has_its_flags() -> None:
    parser = Parser(prog="octavo test")
    add_settings(parser)
    known = set(parser._option_string_actions)
    assert all(flag in known for setting in SETTINGS for flag in setting.flags)
    assert "--no-enable-prefix-caching" in known


def test_every_setting_is_listed_by_the_full_help() -> None:
    parser = Parser(prog="octavo test")
    add_settings(parser)
    text = parser.format_help_all()
    assert all(setting.key in text for setting in SETTINGS)
    completions = shtab.complete(parser_of_all(), "bash")
    assert all(setting.flags[0] in completions for setting in SETTINGS)


def test_only_given_flags_count() -> None:
    assert settings_given(_parse()) == {}
    args = _parse("-np", "4", "--no-enable-prefix-caching", "--api-key", "a", "--api-key", "b", "-c", "8K")
    assert settings_given(args) == {
        "max_sequences": "4",
        "enable_prefix_caching": False,
        "api_key": ["a", "b"],
        "max_model_len": "8K",
    }


def test_served_names_are_words_behind_one_flag_or_repeated() -> None:
    assert settings_given(_parse("--served-model-name", "a", "b", "-a", "c")) == {"served_model_name": ["a", "b", "c"]}
    args = _parse("-a", "a", "b")
    assert settings_given(_parse(*respell(args))) == {"served_model_name": ["a", "b"]}
    assert load_config({}, {"OCTAVO_SERVED_MODEL_NAME": "a, b"}).model.served_model_name == ("a", "b")


def test_positional_model_and_flag_must_agree(monkeypatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert config_from(_parse(), model="x.gguf").model.model == "x.gguf"
    assert config_from(_parse("-m", "x.gguf"), model="x.gguf").model.model == "x.gguf"
    with pytest.raises(UsageError, match="model is given twice"):
        config_from(_parse("-m", "y.gguf"), model="x.gguf")


def test_config_show_tells_the_models_own_sampling(capsys) -> None:
    assert cli.main(["config", "show", "--sampling", "--origin", "--changed", "--temperature", "1"]) == 2
    capsys.readouterr()
    assert cli.main(["config", "show", "--sampling", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["sampling.temperature"] == {"value": 0.2, "origin": "generation config of smollm2"}
    assert shown["sampling.top_k"] == {"value": 0, "origin": "default"}


def test_config_show_json_hides_keys(capsys, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "hunter2")
    assert cli.main(["config", "show", "--json", "--changed", "-np", "4"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    shown = json.loads(out)
    assert shown["max-num-seqs"] == {"value": 4, "origin": "--max-num-seqs"}
    assert shown["api-key"] == {"value": ["***"], "origin": "OCTAVO_API_KEY"}


def test_remarks_go_to_stderr(capsys, monkeypatch) -> None:
    monkeypatch.setenv("OCTAVO_MAX_NUM_SEQ", "4")
    assert cli.main(["config", "show"]) == 0
    assert "warning: unknown variable 'OCTAVO_MAX_NUM_SEQ' has no effect; did you mean" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_short_help_fits_a_screen_and_the_whole_one_has_every_option(name, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser(prog=f"octavo {name}")
    cli.load_command(name, parser)
    texts = []
    for flag in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            cli.main([*name.split(), flag])
        texts.append(capsys.readouterr().out)
    short, whole = texts
    assert short.count("\n") <= 42
    visible = [action for action in parser._actions if action.help != argparse.SUPPRESS]
    spelled = whole.replace("--[no-]", "--")
    assert all(action.option_strings[0] in spelled for action in visible if action.option_strings)
    values = (short + whole).replace("[29501]", "")  # a port is typed as it stands
    assert not re.search(r"\[\(|\(\)|\d{5}\]|'\*'", values), "a value as Python writes it"
    assert max(map(len, whole.splitlines())) < 80 or name == "simulate"
    assert ("--help-all" in short) == (short.count("\n  -") < whole.count("\n  -") - 1)


def test_defaults_are_written_as_people_write_them(capsys) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help-all"])
    out = " ".join(capsys.readouterr().out.split())
    for text in (
        "[20 GiB]",
        "[64 MiB]",
        "request [*]",
        "[4,194,304]",
        "[on]",
        "[127.0.0.1]",
        "while one is connected) [none]",
    ):
        assert text in out
