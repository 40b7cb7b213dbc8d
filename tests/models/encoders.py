"""Tiny random encoders of every family, made by transformers, with a tokenizer of their kind.

Owns: each family's tiny configuration. Invariant: equal arguments give equal files; every parameter is random, so that
a tensor loaded into the wrong place changes the output.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

VOCAB_SIZE = 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
CLS_ID, SEP_ID = 2, 3
_TEXT = """the cat sat on a mat while another hat was there seven sheep slept under old oak tree hello world good
morning bread is baked in an oven rain falls from dark clouds music plays softly"""
WORDS = _TEXT.split()

_BERT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
}
_ROBERTA = {**_BERT, "max_position_embeddings": 98, "type_vocab_size": 1, "pad_token_id": 1}
TINY: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": {**_BERT, "embedding_size": 16},
    "distilbert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 32,
        "n_layers": 3,
        "n_heads": 4,
        "hidden_dim": 64,
        "max_position_embeddings": 96,
    },
    "mpnet": {**_BERT, "max_position_embeddings": 98, "pad_token_id": 1},
    "modernbert": {
        **_BERT,
        "num_hidden_layers": 4,
        "local_attention": 8,
        "bos_token_id": 2,
        "eos_token_id": 3,
        "cls_token_id": 2,
        "sep_token_id": 3,
    },
    "nomic_bert": _BERT,
    "gte": _BERT,
    "jina_embeddings_v3": {**_BERT, "type_vocab_size": 1},
    "gemma3_text": {
        **_BERT,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "query_pre_attn_scalar": 12,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_bidirectional_attention": True,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "mistral": {**_BERT, "num_key_value_heads": 2, "sliding_window": 16, "bos_token_id": 2, "eos_token_id": 3},
    "eurobert": {**_BERT, "num_key_value_heads": 2, "bos_token_id": 2, "eos_token_id": 3},
}


def make_tiny_encoder(model_type: str, folder: Path, *, num_labels: int = 0, **overrides: Any) -> Any:
    """Write a tiny encoder into `folder`; return transformers' model. `num_labels` > 0 makes a classifier."""
    from transformers import AutoModel, AutoModelForSequenceClassification
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    labels = {"num_labels": num_labels} if num_labels else {}
    config = CONFIG_MAPPING[model_type](**{**TINY[model_type], **labels, **overrides})
    torch.manual_seed(7)
    kind = AutoModelForSequenceClassification if num_labels else AutoModel
    model = kind.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_norm else 0.3 * noise)
    model.save_pretrained(folder)
    write_word_tokenizer(folder)
    return model


def write_word_tokenizer(folder: Path) -> None:
    """Write a WordPiece tokenizer with BERT's templates for one text and for a pair."""
    pieces = [*SPECIAL, *WORDS, *"abcdefghijklmnopqrstuvwxyz", *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"), "."]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    assert len(vocab) <= VOCAB_SIZE, len(vocab)
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS_ID), ("[SEP]", SEP_ID)],
    )
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    config = {"tokenizer_class": "BertTokenizerFast", **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_sentence_transformer(
    folder: Path, pooling: dict[str, Any], modules: tuple[str, ...] = ("Normalize",), **more: Any
) -> None:
    """Write the files of sentence_transformers: the pooling's config, and modules after it. `more`: whole files."""
    names = ["Transformer", "Pooling", *modules]
    entries = [
        {"idx": i, "name": str(i), "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, value in more.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
