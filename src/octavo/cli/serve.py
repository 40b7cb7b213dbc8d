"""`octavo serve [MODEL]`, and for `octavo fleet` too: the parent of all serving processes.

Owns: the listening socket (opened first, so that a port in use is reported at once); the server's folder and record;
the choice between a supervised api process, a single process, and an engine for another machine (agent).
Does not: import torch or a web framework, or read a model's files (the children do).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from octavo.cli.agent import is_agent, run_agent, run_rank_host
from octavo.cli.api_process import COMMAND, ApiProcess, ApiTask
from octavo.cli.flags import UsageError, add_settings, resolve_args
from octavo.cli.server_registry import ServerRecord, find_servers, open_server_folder, process_start_ticks
from octavo.cli.servers import port_in_use_message
from octavo.config import Config
from octavo.config.sources import Resolved
from octavo.errors import ConfigError, InvariantError, OctavoError
from octavo.fleet.model_configs import ServedModelConfig, served_models
from octavo.frontend.api_supervisor import READY, ApiSupervisor, ChildSpec
from octavo.mcp import read_specs
from octavo.observe.log import close_log, print_notice, set_up_log, stderr_of_children
from octavo.observe.otel import check_endpoint
from octavo.observe.recording.recorder import prepare_folder
from octavo.restarts import RestartBudget
from octavo.server.http.listener import PortInUseError, check_web, open_socket, url_of

EXIT_ERROR = 2  # the same status as for every command
NOTIFY_SOCKET = "NOTIFY_SOCKET"
# Settings that only octavo fleet reads.
FLEET_SETTINGS = ("replicas", "router", "hosts", "ray", "plan", "fleet_address")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to serve [smollm2]")
    parser.add_argument("--quiet", "-q", action="store_true", help="print nothing at start-up and while busy")
    add_settings(parser, without=FLEET_SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return 0 after a clean drain (docs/serving.md lists the other statuses)."""
    return run_server(partial(_config, args), is_quiet=args.quiet)


def run_server(
    read_config: Callable[[], Config], *, is_quiet: bool, is_fleet: bool = False, words: Sequence[str] = ()
) -> int:
    """Serve with these settings until a signal; return the exit status. An error is printed in one line.

    `words` name the models of a fleet, the default one first; without them it has the model of the settings.
    """
    set_up_log("text", "warning", "supervisor")  # until the settings are known
    try:
        config = read_config()
        set_up_log(config.telemetry.log_format, config.telemetry.log_level, "supervisor")
        if config.parallel.node_rank > 0 and not is_fleet:
            return run_rank_host(config)
        if is_agent(config) and not is_fleet:
            return run_agent(config, is_quiet=is_quiet)
        models = _models(config, words) if is_fleet else _model(config)
        return _serve(config, models, is_quiet=is_quiet, is_fleet=is_fleet)
    except InvariantError:
        raise
    except OctavoError as error:
        print_notice(f"error: {error}")
        return EXIT_ERROR
    finally:
        close_log()


def _config(args: argparse.Namespace) -> Config:
    """Return the settings in force. Raises ConfigError, UsageError."""
    return check_config(resolve_args(args, model=args.model))


def check_config(resolved: Resolved) -> Config:
    """Return the Config if it can be served. Raises ConfigError, UsageError."""
    config = resolved.config
    if len(config.model.served_model_name) > 1 and resolved.origins["model"] == "default":
        names = " ".join(config.model.served_model_name)  # the user may have meant the last name as MODEL
        raise UsageError(f"MODEL is missing; give it first: octavo serve MODEL --served-model-name {names}")
    check_endpoint(config.telemetry.otlp_traces_endpoint)
    read_specs(config.mcp, needs_names=True)
    return config


def _serve(config: Config, models: tuple[ServedModelConfig, ...], *, is_quiet: bool, is_fleet: bool) -> int:
    check_web(config.web)
    config = models[0].config if models else config
    if config.recording.record is not None:
        prepare_folder(Path(config.recording.record))
    with contextlib.closing(_listen(config)) as listener, open_server_folder() as folder:
        task = ApiTask(
            config,
            str(folder.admin_path(config.serving.admin_socket)),
            is_quiet=is_quiet,
            is_fleet=is_fleet,
            models=models,
        )
        name, url, pid = config.model.shown_name(config.model.model), url_of(listener, config.web), os.getpid()
        folder.publish(ServerRecord(pid, url, name, task.admin_socket, time.time(), process_start_ticks(pid)))
        find_servers()  # removes the folders of killed servers
        if config.serving.in_process:
            return _run_here(task, listener)
        return _supervise(task, listener)


def _models(config: Config, words: Sequence[str]) -> tuple[ServedModelConfig, ...]:
    """Return the models of a fleet; nothing for one that always runs. Raises ConfigError."""
    found = served_models(config, words)
    is_one = len(found) == 1 and config.models.models_file is None
    return () if is_one and config.models.keep_alive_s < 0 else found


def _model(config: Config) -> tuple[ServedModelConfig, ...]:
    """Return the model if it is unloaded when it is idle; else nothing: its engine always runs. Raises ConfigError."""
    if config.models.models_file is not None:
        raise ConfigError("--models is of octavo fleet; octavo serve has one model")
    if config.models.keep_alive_s < 0:
        return ()
    if config.serving.in_process:
        raise ConfigError("--keep-alive needs an engine in a process of its own; leave --in-process out")
    return served_models(config, ())


def _listen(config: Config) -> socket.socket:
    """Open the listening socket. Raises ConfigError naming the program that uses the port."""
    try:
        return open_socket(config.serving)
    except PortInUseError:
        raise ConfigError(port_in_use_message(config.serving.host, config.serving.port)) from None


def _supervise(task: ApiTask, listener: socket.socket) -> int:
    def make_line(run_number: int) -> bytes:
        return msgspec.structs.replace(task, run_number=run_number, supervisor_pid=os.getpid()).line()

    drain_s = task.config.serving.drain_timeout_s
    has_file = task.config.serving.api_key_file is not None
    passed = (signal.SIGHUP,) if has_file else ()
    child = ChildSpec(COMMAND, listener.fileno(), make_line, drain_s, passed, stderr=stderr_of_children())
    return ApiSupervisor(child, RestartBudget(), print_notice, lambda: notify_systemd("READY=1")).run()


def _run_here(task: ApiTask, listener: socket.socket) -> int:
    from octavo.assembly import InProcessEngine  # a slow import, which the supervisor does not need

    def report(word: bytes) -> None:
        if word == READY:
            notify_systemd("READY=1")

    return ApiProcess(task, listener, report).run(InProcessEngine.start)


def notify_systemd(state: str) -> None:
    """Report a state, such as READY=1, to systemd (Type=notify); do nothing elsewhere. Source: sd_notify(3)."""
    address = os.environ.get(NOTIFY_SOCKET, "")
    if not address.startswith(("/", "@")):
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto(state.encode(), address.replace("@", "\0", 1) if address.startswith("@") else address)
