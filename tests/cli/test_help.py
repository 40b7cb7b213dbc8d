"""octavo completions and octavo help WORD: every command and flag is found."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any

import pytest
import shtab

from octavo.cli import COMMANDS, main
from octavo.cli.help import parser_of_all


@pytest.fixture(scope="module")
def script() -> str:
    return str(shtab.complete(parser_of_all(), "bash"))


def completed(script: str, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    listed = " ".join(f"'{word}'" for word in ("octavo", *words))
    ask = f'COMP_WORDS=({listed}); COMP_CWORD={len(words)}; _shtab_octavo; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script + "\n" + ask], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout.split()


def test_I05_bash_completes_commands_flags_and_values(script: str) -> None:
    assert completed(script, "se") == ["serve"]
    assert set(completed(script, "")) >= {name.split()[0] for name in COMMANDS}
    assert "offline" in completed(script, "bench", "") and "serve" not in completed(script, "bench", "")
    assert "--max-num-seqs" in completed(script, "serve", "--max-n")
    assert completed(script, "serve", "--port", "1", "--dtype", "b") == ["bfloat16"]
    assert "--origin" in completed(script, "config", "show", "--")
    assert completed(script, "completions", "z") == ["zsh"]


def test_where_nothing_is_known_files_are_offered(script: str, tmp_path: Any) -> None:
    (tmp_path / "questions.jsonl").touch()
    assert completed(script, "batch", f"{tmp_path}/quest") == [f"{tmp_path}/questions.jsonl"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_gets_every_command(shell: str, capsys: Any) -> None:
    assert main(["completions", shell]) == 0
    said = capsys.readouterr().out
    assert all(word in said for name in COMMANDS for word in name.split())
    if shutil.which(shell) is not None:
        subprocess.run([shell, "-n"], input=said, text=True, check=True, timeout=30)


def test_another_shell_is_refused(capsys: Any) -> None:
    assert main(["completions", "tcsh"]) == 2
    assert "bash" in capsys.readouterr().err


def test_help_finds_commands_and_flags_by_a_word(capsys: Any) -> None:
    assert main(["help", "prefix"]) == 0
    said = capsys.readouterr().out
    assert "--enable-prefix-caching" in said and "of: serve" in said and "--dtype" not in said
    assert main(["help", "stop"]) == 0
    assert "usage: octavo stop" in capsys.readouterr().out
    assert main(["help", "BATCH", "openai"]) == 0
    assert "octavo batch" in capsys.readouterr().out
    assert main(["help", "config", "show"]) == 0
    assert "--origin" in capsys.readouterr().out
    assert main(["help", "port"]) == 0
    said = capsys.readouterr().out
    assert said.index("\n--port\n") < said.index("importance"), "flags of that name come first"
    assert main(["help", "master-port"]) == 0
    assert "[29501]" in capsys.readouterr().out
    assert main(["help", "zebra"]) == 1
    assert "unknown word 'zebra'" in capsys.readouterr().out
