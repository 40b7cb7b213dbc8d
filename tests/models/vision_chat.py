"""Tiny random vision models that chat, with a tokenizer, a template, and transformers' processor of their family."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import (
    Gemma3Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen2_5_VLProcessor,
    Qwen2VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.models.vision import COUNT, FAMILIES, IMAGE, IMAGES, MARGIN, VOCAB_SIZE, Family, TinyVision

Messages = list[dict[str, Any]]


class WithoutVideos(ProcessorMixin):
    """A processor that is made with None for its processor of videos, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        if argument_name == "video_processor":
            return type(None)
        return super().check_argument_for_proper_class(argument_name, argument)


class Qwen2VLImagesProcessor(WithoutVideos, Qwen2VLProcessor):
    """See WithoutVideos."""


class Qwen25VLImagesProcessor(WithoutVideos, Qwen2_5_VLProcessor):
    """See WithoutVideos."""


@dataclass(frozen=True)
class Chat:
    """How a family chats: its special tokens from the last id downwards, its template's parts, and its processor.

    `place` is what the template writes for an image, `turn` what it writes around a message ("{}" is its role), and
    `roles` are the tokens that the tokenizer names.
    """

    special: tuple[str, ...]
    place: str
    processor: Callable[..., Any]
    image_processor: Callable[..., Any]
    settings: Mapping[str, Any]
    roles: Mapping[str, str]
    turn: tuple[str, str] = ("<|{}|>\n", "\n")


_LLAVA = Chat(
    ("<image>",),
    "<image>\n",
    LlavaProcessor,
    LlavaImageProcessorPil,
    {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    {},
    turn=("{}: ", " "),
)
_QWEN = Chat(
    ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"),
    "<|vision_start|><|image_pad|><|vision_end|>",
    Qwen2VLImagesProcessor,
    Qwen2VLImageProcessorPil,
    {},
    {},
    turn=("<|im_start|>{}\n", "<|im_end|>\n"),
)
_TILES = tuple(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2))
CHATS = {
    "llava": _LLAVA,
    "llava_next": replace(_LLAVA, processor=LlavaNextProcessor, image_processor=LlavaNextImageProcessorPil),
    "idefics3": Chat(
        ("<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_TILES),
        "<image>",
        Idefics3Processor,
        Idefics3ImageProcessorPil,
        {"image_seq_len": 4},
        {},
        turn=("{}:", "<end_of_utterance>\n"),
    ),
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": replace(_QWEN, processor=Qwen25VLImagesProcessor),
    "gemma3": Chat(
        ("<image_soft_token>", "<end_of_image>", "<start_of_image>", "<start_of_turn>", "<end_of_turn>"),
        "<start_of_image>",
        Gemma3Processor,
        Gemma3ImageProcessorPil,
        {"image_seq_length": 4},
        {
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        turn=("<start_of_turn>{}\n", "<end_of_turn>\n"),
    ),
}


def template_of(chat: Chat) -> str:
    """A template that writes the parts of a message in their order."""
    begin, end = (json.dumps(part) for part in chat.turn)
    header = f"{begin}.replace('{{}}', message['role'])"
    return (
        f"{{{{ bos_token }}}}{{% for message in messages %}}{{{{ {header} }}}}"
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ {json.dumps(chat.place)} }}}}{{% else %}}{{{{ part['text'] }}}}"
        f"{{% endif %}}{{% endfor %}}{{% endif %}}{{{{ {end} }}}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {begin}.replace('{{}}', 'assistant') }}}}{{% endif %}}"
    )


class ChattingModel:
    """A TinyVision, and transformers' processor of its family, which writes the folder's files of texts and images."""

    def __init__(self, model_type: str, folder: Path) -> None:
        self.chat = CHATS[model_type]
        family: Family = FAMILIES[model_type]
        self.tiny = TinyVision(family, folder)
        self.folder = folder
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=self._make_tokenizer(), bos_token="<s>", eos_token="</s>", pad_token="<pad>",
            extra_special_tokens=dict(self.chat.roles),
        )  # fmt: skip
        images = self.chat.image_processor(**{**IMAGES, **family.images})
        template = template_of(self.chat)
        self.processor = self.chat.processor(
            image_processor=images, tokenizer=tokenizer, chat_template=template, **self.chat.settings
        )
        (folder / "preprocessor_config.json").unlink()
        if isinstance(self.processor, WithoutVideos):
            tokenizer.chat_template = template
            tokenizer.save_pretrained(folder)
            images.save_pretrained(folder)
        else:
            self.processor.save_pretrained(folder)

    def _make_tokenizer(self) -> Tokenizer:
        """Characters as tokens, two newlines as one token; the family's special tokens from the last id downwards."""
        characters = [*ascii_letters, *digits, *" \n.,:;!?'-|<>_/", "\n\n"]
        words = ["<pad>", "<s>", "</s>", "<unk>", *characters]
        words += [f"<unused_{number}>" for number in range(VOCAB_SIZE - len(words) - len(self.chat.special))]
        words += reversed(self.chat.special)
        assert len(words) == len(set(words)) == VOCAB_SIZE and words[IMAGE] == self.chat.special[0]
        vocabulary = {word: index for index, word in enumerate(words)}
        backend = Tokenizer(models.BPE(vocabulary, [("\n", "\n")], unk_token="<unk>"))
        backend.decoder = decoders.Fuse()
        special = ["<pad>", "<s>", "</s>", *self.chat.special]
        backend.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
        return backend

    def inputs(self, messages: Messages) -> Any:
        """What transformers makes of messages, whose images are PIL's."""
        return self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )

    @torch.inference_mode()
    def answer(self, messages: Messages) -> tuple[list[int], list[int], float]:
        """The prompt's ids, a greedy answer's, and the least difference between its two best logits."""
        inputs = self.inputs(messages)
        found = self.tiny.model.generate(
            **inputs, do_sample=False, max_new_tokens=COUNT, eos_token_id=None, pad_token_id=0, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat(found.logits).topk(2).values
        prompt = inputs["input_ids"][0].tolist()
        return prompt, found.sequences[0, len(prompt) :].tolist(), float((best[:, 0] - best[:, 1]).min())


def clear_answer(model: ChattingModel, images: list[Image.Image]) -> tuple[Messages, list[int], list[int]]:
    """Messages with these images whose greedy answer is clear, with the prompt's ids and the answer's."""
    for number in range(16):
        parts: list[dict[str, Any]] = [{"type": "text", "text": f"Look, no. {number}: "}]
        for image in images:
            parts += [{"type": "image", "image": image}, {"type": "text", "text": " and"}]
        messages: Messages = [
            {"role": "user", "content": [{"type": "text", "text": "Hi!"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
            {"role": "user", "content": [*parts, {"type": "text", "text": " what?"}]},
        ]
        prompt, answer, margin = model.answer(messages)
        if margin > MARGIN:
            return messages, prompt, answer
    raise AssertionError("no text gives a clear greedy choice")
