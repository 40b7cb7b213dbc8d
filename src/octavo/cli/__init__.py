"""The `octavo` command: finds the command's module, parses the arguments, runs it, and prints an error in one line.

Owns: the table of commands, dispatch, exit codes (0 done, 1 a check failed, 2 an error, 130 Ctrl-C).
Does not: import a command before it is chosen, so that `octavo --help` needs neither torch nor a server.
Invariant: an OctavoError never shows a traceback; any other exception is a bug and shows one.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from octavo.cli.flags import Parser, UsageError
from octavo.cli.hide_keys import hide_keys
from octavo.config.spelling import unknown
from octavo.errors import InvariantError, OctavoError
from octavo.machine import needing_torch
from octavo.observe.log import open_missing_streams

# Command words -> (module, one line of help). The module has `add_arguments` and `run`. A module with several commands
# is written as module:VERB, and has `add_VERB_arguments` and `run_VERB`.
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("octavo.cli.serve", "serve a model over HTTP, with OpenAI's interface"),
    "fleet": ("octavo.cli.fleet", "serve a model with several engines behind one endpoint"),
    "run": ("octavo.cli.run", "answer one prompt in the terminal"),
    "chat": ("octavo.cli.chat", "chat with a model in the terminal"),
    "generate": ("octavo.cli.batch:generate", "answer a file of prompts, one per line"),
    "batch": ("octavo.cli.batch:batch", "answer a file of requests in OpenAI's batch format"),
    "bench offline": ("octavo.cli.bench:offline", "measure this engine on a workload, beside the memory floor"),
    "bench online": ("octavo.cli.bench_servers:online", "benchmark a server under timed arrivals"),
    "bench latency": ("octavo.cli.bench:latency", "measure first token and time per token at several batch sizes"),
    "bench sweep": ("octavo.cli.bench:sweep", "measure over concurrency and over the context, and draw it"),
    "bench startup": ("octavo.cli.bench:startup", "measure a cold process up to its first token, in parts"),
    "bench compare": ("octavo.cli.bench_servers:compare", "measure this engine beside others on the same workloads"),
    "bench kernel": ("octavo.cli.bench:kernel", "measure the kernels of a step, each alone"),
    "bench scheduler": ("octavo.cli.bench:scheduler", "measure the scheduler alone: plan, commit, admission"),
    "bench router": ("octavo.cli.bench:router", "measure how long a fleet's router takes to choose a replica"),
    "bench simulator": ("octavo.cli.bench:simulator", "measure how many requests a second a simulation handles"),
    "simulate": ("octavo.cli.simulate", "predict how engines would serve a workload, without running a model"),
    "plan": ("octavo.cli.plan", "show what a model needs and how much fits, without loading it"),
    "ps": ("octavo.cli.servers:ps", "list the servers that run here"),
    "top": ("octavo.cli.top", "watch a running server in the terminal"),
    "explain": ("octavo.cli.explain", "explain why a request waits, runs or ended"),
    "stop": ("octavo.cli.servers:stop", "stop a server that runs here, after its open requests finish"),
    "admin": ("octavo.cli.admin", "query or control a running server"),
    "chaos": ("octavo.cli.chaos", "kill the engine of a server here while it streams, and count lost tokens"),
    "record": ("octavo.cli.record", "write the last minutes of a running server as a recording"),
    "replay": ("octavo.cli.replay", "check that a recording repeats its decisions, or try other settings"),
    "trace": ("octavo.cli.trace", "write a recording as a trace for Perfetto, or as a page"),
    "doctor": ("octavo.cli.doctor", "check this installation and machine, and suggest fixes"),
    "pull": ("octavo.cli.models:pull", "download a model"),
    "list": ("octavo.cli.models:list", "list the models on this machine, with sizes"),
    "rm": ("octavo.cli.models:rm", "remove a downloaded model"),
    "completions": ("octavo.cli.help:completions", "print a script that completes commands and flags in a shell"),
    "config show": ("octavo.cli.config_show", "show the settings in effect and where each comes from"),
}
_HEADINGS = {  # first command of a group in the list of all -> the group
    "serve": "answer requests",
    "bench offline": "measure and predict",
    "ps": "watch and control servers, and their recordings",
    "doctor": "this installation and its models",
}
# Other programs' command words -> Octavo's.
RENAMED_COMMANDS = {
    "start": "serve", "server": "serve", "api": "serve", "up": "serve", "launch": "serve", "complete": "run",
    "ask": "run", "ls": "list", "models": "list", "tags": "list", "download": "pull", "fetch": "pull", "kill": "stop",
    "shutdown": "stop", "status": "ps", "benchmark": "bench", "show": "plan", "info": "plan", "check": "doctor",
    "remove": "rm", "delete": "rm", "run-batch": "batch",
}  # fmt: skip
_USAGE = """usage: octavo {family}COMMAND [options]

{commands}

octavo {family}COMMAND --help shows the common options, --help-all all of them; octavo help WORD searches them.
"""
_START = """octavo --version prints the version.
Start here:  octavo run "Why is the sky blue?"      octavo serve
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    open_missing_streams()
    warning = hide_keys(words)
    if warning is not None:
        print(f"warning: {warning}", file=sys.stderr)
    try:
        with needing_torch():
            return _dispatch(words)
    except InvariantError:
        raise
    except OctavoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader closed our stdout, so stop printing
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V", "version"):
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        return 0
    if len(words) > 1 and words[0] == "help" and words[1] not in ("-h", "--help"):
        code: int = importlib.import_module("octavo.cli.help").run_help(words[1:])
        return code
    name, rest = _find(words)
    if name is None:
        print(_usage(), end="")
        return 0
    parser = Parser(prog=f"octavo {name}")
    run = load_command(name, parser)
    code = run(parser.parse(rest))
    sys.stdout.flush()
    return code


def load_command(name: str, parser: Parser) -> Callable[[argparse.Namespace], int]:
    """Import a command's module, add its description and arguments to the parser, and return its `run`."""
    target, text = COMMANDS[name]
    module_name, _, verb = target.partition(":")
    module = importlib.import_module(module_name)
    parser.description = f"{text[0].upper()}{text[1:]}."
    add_arguments = getattr(module, f"add_{verb}_arguments" if verb else "add_arguments")
    add_arguments(parser)
    run: Callable[[argparse.Namespace], int] = getattr(module, f"run_{verb}" if verb else "run")
    return run


def _find(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the command that the words begin with, and the other words; the command is None if help is requested."""
    if not words or words[0] in ("-h", "--help", "help"):
        return None, []
    for length in (2, 1):
        name = " ".join(words[:length])
        if name in COMMANDS:
            return name, words[length:]
    family = [name for name in COMMANDS if name.startswith(words[0] + " ")]
    if family and (len(words) == 1 or words[1] in ("-h", "--help")):
        print(_usage(words[0] + " "), end="")
        raise SystemExit(0 if len(words) > 1 else 2)
    if family:
        raise UsageError(unknown(f"{words[0]} command", words[1], [name.split()[1] for name in family]))
    first_words = [name.split()[0] for name in COMMANDS]
    our_name = RENAMED_COMMANDS.get(words[0])
    if our_name in first_words:
        raise UsageError(unknown("command", words[0], (), f"did you mean {our_name!r}?"))
    raise UsageError(unknown("command", words[0], first_words, "see octavo --help"))


def _usage(family: str = "") -> str:
    names = [name for name in COMMANDS if name.startswith(family)]
    width = max(map(len, names)) + 3
    headings = {} if family else {name: f"{text}:\n" for name, text in _HEADINGS.items()}
    commands = "\n".join(f"{headings.get(n, '')}  {n:{width}}{COMMANDS[n][1]}" for n in names)
    return _USAGE.format(family=family, commands=commands) + ("" if family else _START)
