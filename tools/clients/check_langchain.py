"""langchain-openai's ChatOpenAI under langchain-tests' suite for chat models."""

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from checking import MODEL, URL, report

CLIENT = "langchain-openai"
PACKAGES = ["langchain-openai", "langchain-tests"]
# Answers that a model of 135M parameters cannot be held to come from a script.
SERVER = ["--model", "scripted:langchain.yaml", "--served-model-name", "scripted"]

SUITE = """
import os
import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestOctavo(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict:
        return {"model": os.environ["CHECK_MODEL"], "base_url": os.environ["CHECK_URL"] + "/v1", "api_key": "none",
                "max_tokens": 400, "stream_usage": True, "max_retries": 0}

    @property
    def structured_output_kwargs(self) -> dict:
        return {"method": "json_schema"}

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def has_tool_calling(self) -> bool:
        return True
"""


def main() -> int:
    """Run the suite; one line a test."""
    folder = Path(tempfile.mkdtemp(prefix="octavo-langchain-"))
    (folder / "test_octavo.py").write_text(SUITE)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-o", "asyncio_mode=auto"),
        *("-o", "asyncio_default_fixture_loop_scope=session", "-o", "asyncio_default_test_loop_scope=session"),
        *("--disable-socket", "--allow-hosts=127.0.0.1", "--junitxml=report.xml", "test_octavo.py"),
    ]
    environ = os.environ | {"CHECK_URL": URL, "CHECK_MODEL": MODEL}
    done = subprocess.run(command, cwd=folder, env=environ, stdout=sys.stderr, check=False)
    if not (folder / "report.xml").exists():
        report("suite", "fail", f"pytest ended with status {done.returncode} and no report")
        return 1
    num_failed = 0
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        failed = [child for child in case if child.tag in ("failure", "error")]
        skipped = [child for child in case if child.tag == "skipped"]
        status = "fail" if failed else "skip" if skipped else "pass"
        detail = " ".join((child.get("message") or "").strip() for child in (*failed, *skipped))
        report(case.get("name", "?"), status, detail, seconds=float(case.get("time", 0)))
        num_failed += bool(failed)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
