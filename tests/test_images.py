"""Images from a program to the tokens of a tiny LLaVA: those of transformers with its own image processor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from octavo import LLM
from octavo.errors import InvalidRequestError
from tests.media.items import data_url, file_of, make_image
from tests.models.vision import COUNT, FAMILIES, IMAGE, VOCAB_SIZE, TinyVision

pytest.importorskip("transformers")
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

# As LLaVA 1.5's template: images first, then the text.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' }}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image> ' }}{% endfor %}"
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'w9' }}{% endif %}"
)
GREEDY = {"max_tokens": COUNT, "temperature": 0.0, "ignore_eos": True}
PICTURE, OTHER = make_image(70, 100), make_image(90, 60)


def write_tokenizer(folder: Path) -> None:
    """Words as tokens; `<image>` is a special one."""
    words = ["<unk>", "<s>", "</s>", "user", "assistant", *(f"w{number}" for number in range(IMAGE - 5))]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(word, special=True) for word in ("<unk>", "<s>", "</s>", "<image>")])
    backend.post_processor = None
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE, "tokenizer_class": "X"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert backend.get_vocab_size() == VOCAB_SIZE and backend.token_to_id("<image>") == IMAGE


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyVision:
    model = TinyVision(FAMILIES["llava"], tmp_path_factory.mktemp("llava"))
    write_tokenizer(model.folder)
    return model


@pytest.fixture(scope="module")
def llm(tiny: TinyVision) -> Iterator[LLM]:
    with LLM(str(tiny.folder), dtype="float32", threads=1, kv_cache_tokens=2048) as engine:
        yield engine


def expected(tiny: TinyVision, ids: list[int], images: list[Any]) -> list[int]:
    """What transformers generates with its own image processor."""
    processor = CLIPImageProcessorPil(
        size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}, image_mean=[0.48, 0.45, 0.4],
        image_std=[0.26, 0.27, 0.28],
    )  # fmt: skip
    pixels = processor(images=images, return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        found = tiny.model.generate(
            input_ids=torch.tensor([ids]), pixel_values=pixels, do_sample=False, max_new_tokens=COUNT,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    answer: list[int] = found[0, len(ids) :].tolist()
    return answer


def message(*parts: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


TEXT = {"type": "text", "text": "w1 w2 w3"}


def test_X06_E01_a_chat_with_images_is_that_of_transformers(tiny: TinyVision, llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "picture.png"
    path.write_bytes(file_of(PICTURE))
    forms: list[Any] = [
        {"type": "image", "image": PICTURE},
        {"type": "image", "image": str(path)},
        {"type": "image_pil", "image_pil": PICTURE},
        {"type": "image_url", "image_url": {"url": data_url(file_of(PICTURE))}},
        {"type": "image", "image": file_of(PICTURE)},
    ]
    conversations = [message(form, TEXT) for form in forms]
    two = message({"type": "image", "image": OTHER}, TEXT, {"type": "image", "image": PICTURE})
    outputs = llm.chat([*conversations, two, message(TEXT)], GREEDY)
    word = llm.text.tokenizer.backend.token_to_id
    ids = [word("user"), *[IMAGE] * 16, word("w1"), word("w2"), word("w3"), word("w9")]
    assert {tuple(output.prompt_token_ids) for output in outputs[:-2]} == {tuple(ids)}
    answer = expected(tiny, ids, [PICTURE])
    assert [list(output.outputs[0].token_ids) for output in outputs[:-2]] == [answer] * len(forms)
    both = [ids[0], *[IMAGE] * 32, *ids[17:]]
    assert list(outputs[-2].prompt_token_ids) == both
    assert list(outputs[-2].outputs[0].token_ids) == expected(tiny, both, [OTHER, PICTURE])
    assert IMAGE not in outputs[-1].prompt_token_ids


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (3, "an image is a int"),
        ("/nowhere/a.png", "cannot be read"),
        ("https://example.com/a.png", "not fetched"),
        ("data:image/png;base64,a", "not base64"),
        (b"<svg/>", "no known format"),
        (make_image(1, 300), "at most 200 times"),
    ],
)
def test_other_images_are_refused(llm: LLM, image: object, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=why):
        llm.chat(message({"type": "image", "image": image}, TEXT), GREEDY)


def test_a_part_without_an_image_and_a_spelled_image_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="give one of image_url"):
        llm.chat(message({"type": "image"}, TEXT), GREEDY)
    spelled = {"type": "text", "text": "w1 <image> w2"}
    [output] = llm.chat(message(spelled, {"type": "image", "image": PICTURE}), GREEDY)
    assert list(output.prompt_token_ids).count(IMAGE) == 16
