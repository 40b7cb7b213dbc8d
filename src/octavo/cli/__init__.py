"""The `octavo` command: find the command's module, parse, run, and say errors in one line.

Owns: the table of commands, dispatch, exit codes (0 done, 1 a check failed, 2 an error, 130 Ctrl-C).
Does not: import a command before it is chosen, so that `octavo --help` needs neither torch nor a server.
Invariant: an OctavoError never shows a traceback; anything else does, for it is a bug.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from octavo.cli.flags import Parser, UsageError
from octavo.cli.hide_keys import hide_keys
from octavo.config.spelling import unknown
from octavo.errors import InvariantError, OctavoError
from octavo.machine import needing_torch
from octavo.observe.log import open_missing_streams

# command words -> (module with add_arguments and run, one line of help)
COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("octavo.cli.serve", "serve a model over HTTP, with OpenAI's interface"),
    "run": ("octavo.cli.run", "answer one prompt in the terminal"),
    "chat": ("octavo.cli.chat", "talk with a model in the terminal"),
    "generate": ("octavo.cli.generate", "answer a file of prompts, a line each"),
    "batch": ("octavo.cli.batch", "answer a file of requests in OpenAI's batch format"),
    "bench offline": ("octavo.cli.bench_offline", "measure this engine on a workload, beside the memory floor"),
    "bench online": ("octavo.cli.bench_online", "benchmark a server under timed arrivals"),
    "bench latency": ("octavo.cli.bench_latency", "measure first token and time per token at several batch sizes"),
    "bench sweep": ("octavo.cli.bench_sweep", "measure over concurrency and over the context, and draw it"),
    "bench startup": ("octavo.cli.bench_startup", "measure a cold process up to its first token, in parts"),
    "bench compare": ("octavo.cli.bench_compare", "measure this engine beside others on the same workloads"),
    "bench kernel": ("octavo.cli.bench_kernel", "measure the kernels of a step, each alone"),
    "bench scheduler": ("octavo.cli.bench_scheduler", "measure the scheduler alone: plan, commit, admission"),
    "bench simulator": ("octavo.cli.bench_simulator", "measure how many requests a simulation gets through"),
    "simulate": ("octavo.cli.simulate", "predict how engines would serve a workload, without running a model"),
    "plan": ("octavo.cli.plan", "what a model takes and how much fits, without loading it"),
    "ps": ("octavo.cli.ps", "list the servers that run here"),
    "top": ("octavo.cli.top", "watch a running server in the terminal"),
    "explain": ("octavo.cli.explain", "say why a request waits, what it does, or what became of it"),
    "stop": ("octavo.cli.stop", "end a server that runs here, once its open requests are done"),
    "admin": ("octavo.cli.admin", "query or control a running server"),
    "chaos": ("octavo.cli.chaos", "drill a server here: kill its engine under streams, and count what is lost"),
    "replay": ("octavo.cli.replay", "check that a recording's decisions come out the same, or try other settings"),
    "trace": ("octavo.cli.trace", "write a recording as a trace for Perfetto, or as a page"),
    "doctor": ("octavo.cli.doctor", "check this installation and machine, with remedies"),
    "pull": ("octavo.cli.pull", "download a model"),
    "list": ("octavo.cli.list_models", "list the models on this machine, with sizes"),
    "rm": ("octavo.cli.remove", "remove a downloaded model"),
    "completions": ("octavo.cli.completions", "print a script that completes commands and flags in a shell"),
    "config show": ("octavo.cli.config_show", "show the settings in force and where each comes from"),
}
# Other programs' words -> ours.
RENAMED_COMMANDS = {
    "start": "serve", "server": "serve", "api": "serve", "up": "serve", "launch": "serve", "complete": "run",
    "ask": "run", "ls": "list", "models": "list", "tags": "list", "download": "pull", "fetch": "pull", "kill": "stop",
    "shutdown": "stop", "status": "ps", "benchmark": "bench", "show": "plan", "info": "plan", "check": "doctor",
    "remove": "rm", "delete": "rm", "run-batch": "batch",
}  # fmt: skip
_USAGE = """usage: octavo COMMAND [options]

{commands}

octavo COMMAND --help shows what most people need, --help-all every option; octavo help WORD searches them.
octavo --version prints the version.
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
    except BrokenPipeError:  # the reader of our output closed it: there is nothing left to print
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    if words and words[0] in ("--version", "-V", "version"):
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        return 0
    if len(words) > 1 and words[0] == "help":
        from octavo.cli.help import run_help

        return run_help(words[1:], COMMANDS)
    name, rest = _find(words)
    if name is None:
        print(_usage(), end="", file=sys.stdout)
        return 0
    module_name, text = COMMANDS[name]
    module = importlib.import_module(module_name)
    parser = Parser(prog=f"octavo {name}", description=text[0].upper() + text[1:] + ".")
    module.add_arguments(parser)
    code: int = module.run(parser.parse(rest))
    sys.stdout.flush()
    return code


def _find(words: list[str]) -> tuple[str | None, list[str]]:
    """Return the command that the words begin with, and the words after it; None asks for help."""
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
    firsts = [name.split()[0] for name in COMMANDS]
    meant = RENAMED_COMMANDS.get(words[0])
    if meant in firsts:
        raise UsageError(unknown("command", words[0], (), f"did you mean {meant!r}?"))
    raise UsageError(unknown("command", words[0], firsts, "see octavo --help"))


def _usage(prefix: str = "") -> str:
    names = [name for name in COMMANDS if name.startswith(prefix)]
    width = max(map(len, names)) + 3
    return _USAGE.format(commands="\n".join(f"  {name:{width}}{COMMANDS[name][1]}" for name in names))
