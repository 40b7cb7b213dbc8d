"""Images in `octavo run` and `octavo chat`: answers are transformers', and models without images refuse them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
from tests.media.items import file_of, make_image
from tests.models.vision import COUNT, MARGIN
from tests.models.vision_chat import ChattingModel
from tests.tiny_models import make_tiny_model

from octavo.cli import main

FLAGS = ["--dtype", "float32", "--threads", "1", "--temperature", "0", "--max-tokens", str(COUNT)]
SIZES = {"one.png": (70, 100), "two.jpg": (90, 60)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChattingModel:
    folder = tmp_path_factory.mktemp("llava")
    for name, size in SIZES.items():
        (folder / name).write_bytes(file_of(make_image(*size), "PNG"))
    return ChattingModel("llava", folder)


def asked(model: ChattingModel) -> tuple[str, str]:
    """A question after both images, and transformers' text up to its end-of-sequence token."""
    images = [{"type": "image", "image": make_image(*size)} for size in SIZES.values()]
    for number in range(16):
        question = f"What is it? no. {number}"
        content = [*images, {"type": "text", "text": question}]
        _, ids, margin = model.answer([{"role": "user", "content": content}])
        text = str(model.processor.tokenizer.decode(ids, skip_special_tokens=True))
        if margin > MARGIN and 2 not in ids and text:
            return question, text
    raise AssertionError("no clear question")


def test_I05_run_gives_images_to_the_model(model: ChattingModel, capsys: Any) -> None:
    question, text = asked(model)
    flags = [word for name in SIZES for word in ("--image", str(model.folder / name))]
    assert main(["run", str(model.folder), *flags, *FLAGS, question]) == 0
    assert capsys.readouterr().out == text + "\n"


def test_I05_chat_takes_images(model: ChattingModel, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    question, text = asked(model)
    lines = [f"/image {model.folder / name}" for name in SIZES]
    lines = ["/image /nowhere.png", f"/image {model.folder / 'config.json'}", lines[0], "/image", *lines, question]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main(["chat", str(model.folder), *FLAGS]) == 0
    printed = capsys.readouterr()
    assert printed.out == text + "\n"
    assert "the image '/nowhere.png' cannot be read (No such file or directory)" in printed.err
    assert "has no known suffix; give a file of png" in printed.err
    told = [line.rpartition("has ")[2] for line in printed.err.splitlines() if "the next message has" in line]
    assert told == ["1 image", "0 images", "1 image", "2 images"]


def test_a_model_without_images_refuses_them(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model("smollm2", tmp_path / "tiny")
    (tmp_path / "a.png").write_bytes(file_of(make_image(9, 9)))
    image = str(tmp_path / "a.png")
    flags = [*FLAGS, "--num-gpu-blocks-override", "32"]
    assert main(["run", str(model), "--image", image, *flags, "What?"]) == 2
    assert "tiny takes no images; leave them out" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO(f"/image {image}\nWhat?\n"))
    assert main(["chat", str(model), *flags]) == 0
    assert "error: tiny takes no images; leave them out" in capsys.readouterr().err
    assert main(["run", str(model), "--image", image, "--raw", *flags, "What?"]) == 2
    assert "--image needs the chat template; leave out --raw" in capsys.readouterr().err
