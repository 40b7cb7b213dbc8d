"""The words at start-up, and the status line of a busy server."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.models.encoders import make_tiny_encoder
from tests.settings import load_config

from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles
from octavo.cli import main
from octavo.cli.api_process import ApiTask
from octavo.cli.api_server import call_report, detail_report, startup_report
from octavo.cli.terminal import limit_remarks
from octavo.core.limits import GroupKind, GroupSpec
from octavo.executors.protocol import Capacity
from octavo.observe.statistics import StatusLine

FILES = ModelFiles("smollm2", "gguf", Path("/m"), (Path("/m/a.gguf"),), None)
CAPACITY = Capacity(
    (GroupSpec(block_bytes=2**14),),
    (128,),
    16,
    4,
    1024,
    300,
    weight_bytes=2**20,
    kv_bytes_per_token=2**10,
    num_threads=2,
)


def test_K07_K10_report_counts_every_group_and_the_host_tier() -> None:
    groups = (GroupSpec(block_bytes=2**14), GroupSpec(GroupKind.SLIDING, 64, 2**16))
    capacity = replace(CAPACITY, groups=groups, num_blocks=(128, 32), host_blocks=(64, 16))
    lines = "\n".join(startup_report(load_config({}), FILES, capacity))
    assert "KV pool   2,048 tokens, 4 MiB: 2.0 requests of full length" in lines
    assert "host KV   1,024 tokens, 2 MiB" in lines


def test_report_names_what_a_user_asks_for() -> None:
    lines = "\n".join(startup_report(load_config({}), FILES, CAPACITY))
    assert "smollm2, 1 MiB of weights, float32, cpu, 2 threads" in lines
    assert "2,048 tokens, 2 MiB: 2.0 requests of full length (1,024), 4 running at most" in lines
    assert "off  " not in lines, "by default nothing is off that a user has to know"


def test_report_says_what_is_off_and_who_may_call() -> None:
    config = load_config({"enable_prefix_caching": False, "in_process": True, "host": "10.0.0.1", "insecure": True})
    lines = "\n".join(startup_report(config, FILES, CAPACITY))
    assert "--no-enable-prefix-caching" in lines
    assert "--in-process" in lines
    assert "ANYONE" in lines


def test_report_says_who_runs_and_what_a_crash_would_do() -> None:
    kept: Any = SimpleNamespace(processes={"engine": 7, "standby": 8})
    lines = "\n".join(
        detail_report(ApiTask(load_config({"standby": True}), "/run/admin.sock", supervisor_pid=5), kept, FILES, 1.25)
    )
    assert f"supervisor 5, api {os.getpid()}, engine 7, standby 8" in lines
    assert "a standby takes over" in lines and "admin socket /run/admin.sock" in lines
    assert "1.2 s" in lines and "/m/a.gguf" in lines
    alone: Any = SimpleNamespace(processes={})
    task = ApiTask(load_config({"in_process": True}), "/run/admin.sock")
    lines = "\n".join(detail_report(task, alone, FILES, 1.25))
    assert "no crash protection (--in-process)" in lines and "supervisor" not in lines


def test_curl_has_the_key_only_where_one_is_needed() -> None:
    assert "Bearer" not in "\n".join(call_report(ApiTask(load_config({}), ""), "smollm2", "http://127.0.0.1:8000"))
    lines = "\n".join(call_report(ApiTask(load_config({"api_key": ["k3y"]}), ""), "smollm2", "http://[::1]:8001"))
    assert "Bearer" in lines
    assert "k3y" not in lines
    assert "http://[::1]:8001/v1" in lines


def test_limits_not_given_are_remarked() -> None:
    assert list(limit_remarks(load_config({"max_model_len": 1024}), CAPACITY)) == []
    assert "this model holds 1024" in next(iter(limit_remarks(load_config({"max_model_len": 1025}), CAPACITY)))


def test_a_pool_that_is_shorter_than_the_model_is_remarked() -> None:
    small = replace(CAPACITY, usable_len=992)
    (remark,) = limit_remarks(load_config({}), small)
    assert "can use 992 tokens" in remark and "not 1,024" in remark and "--max-model-len 992" in remark
    assert list(limit_remarks(load_config({}), replace(CAPACITY, usable_len=1024))) == []


def _statistics(computed, produced, running=1, hits=0):
    values = {"num_computed_tokens": computed, "num_output_tokens": produced, "num_running": running, "num_waiting": 0}
    return {
        "scheduler": {
            **values,
            "prefix_queried_tokens": 100 * (hits > 0),
            "prefix_hit_tokens": hits,
            "num_blocks": 10,
            "num_blocks_used": 4,
        }
    }


def test_status_line_is_silent_when_idle() -> None:
    status = StatusLine()
    assert status.line(_statistics(0, 0), 0.0) is None
    line = status.line(_statistics(600, 100, hits=50), 5.0)
    assert line == "100 prompt + 20 output tokens/s, 1 running, 0 waiting, KV 40%, prefix hits 50%"
    assert status.line(_statistics(600, 100, running=0, hits=50), 10.0) is None


def test_status_line_starts_anew_with_a_new_engine() -> None:
    status = StatusLine()
    status.line(_statistics(600, 100), 0.0)
    assert status.line(_statistics(50, 10), 5.0) is None
    assert status.line(_statistics(150, 60), 10.0) == "10 prompt + 10 output tokens/s, 1 running, 0 waiting, KV 40%"


def test_report_says_what_an_encoder_is_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert", "vocab_size": 64}')
    files = ModelFiles("all-minilm", "hf", tmp_path, (tmp_path / "model.safetensors",), None)
    spec = read_model_spec(files)
    capacity = replace(CAPACITY, groups=(GroupSpec(),), max_model_len=256, is_encoder=True)
    lines = "\n".join(startup_report(load_config({}), files, capacity))
    assert "encoder   embeds texts: /v1/embeddings" in lines and "at most 256 tokens" in lines
    assert "KV pool" not in lines
    for labels, path in (((), "v1/embeddings"), (("LABEL_0",), "v1/rerank"), (("calm", "glad"), "classify")):
        assert spec.encoder is not None
        encoder = replace(spec.encoder, labels=labels)
        lines = "\n".join(call_report(ApiTask(load_config({}), ""), "enc", "http://127.0.0.1:8000", encoder))
        assert f"curl http://127.0.0.1:8000/{path} " in lines and "chat" not in lines


def test_an_encoder_is_no_partner_of_a_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    make_tiny_encoder("bert", tmp_path)
    for words in (["run", str(tmp_path), "Hello"], ["chat", str(tmp_path)]):
        assert main([*words, "--threads", "1"]) != 0
        assert "is an encoder, which generates no text; it embeds texts" in capsys.readouterr().err
