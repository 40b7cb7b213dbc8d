"""Read an encoder's specification from config.json and the files of sentence_transformers beside it.

Owns: the keys of both; the meaning of modules.json, 1_Pooling, 2_Dense, sentence_bert_config.json and
config_sentence_transformers.json. Does not: know a family by name; encoder_families.py has each family's differences.
Invariant: nothing is guessed. A module or a setting that would change the result is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.artifacts.encoder_families import ENCODER_FAMILIES, LINEARS, EncoderFamily, Positions
from octavo.artifacts.encoder_spec import MAX_LABELS, DenseLayer, EncoderSpec
from octavo.artifacts.json_file import read_json
from octavo.artifacts.model_spec import ModelSpec
from octavo.artifacts.settings import FULL, SLIDING, Settings
from octavo.errors import ModelFileError

_BERT_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
_ACTIVATIONS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "tanh")
_HEADS = ("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "ForNextSentencePrediction")
_SENTENCE_FILE = "sentence_bert_config.json"
# The pooling of sentence_transformers: its keys of 1_Pooling/config.json, and the value of the newer `pooling_mode`.
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
    "lasttoken": "last",
}
_DENSE_ACTIVATIONS = {"Identity": "", "Tanh": "tanh"}
_CLASSIFIER_POOLINGS = ("cls", "mean", "last", "late")
_SCORE_ACTIVATIONS = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}


def is_encoder(model_type: object) -> bool:
    """Return True if config.json's `model_type` is an encoder's."""
    return isinstance(model_type, str) and model_type in ENCODER_FAMILIES


def read_encoder_spec(root: Path) -> ModelSpec:
    """Read the specification of an encoder's folder. Raises ModelFileError."""
    path = root / "config.json"
    values = read_json(path)
    family = ENCODER_FAMILIES[values["model_type"]]
    older = {family.older_keys[key]: value for key, value in values.items() if key in family.older_keys}
    config = _EncoderConfig(path, {**_family_defaults(family), **older, **values}, family)
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    _refuse_arithmetic(config)
    rope_theta, sliding_theta = _rope_thetas(config)
    encoder = _encoder(root, config, hidden)
    vocab_size = config.integer("vocab_size")
    eos = config.values.get("eos_token_id")
    return ModelSpec(
        family=family.model_type,
        vocab_size=vocab_size,
        hidden_size=hidden,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=config.integer("num_key_value_heads", heads),
        head_dim=config.integer("head_dim", hidden // max(heads, 1)),
        intermediate_size=config.integer("intermediate_size"),
        rms_norm_eps=config.number("layer_norm_eps"),
        rope_theta=rope_theta,
        max_model_len=_cut_at(root, config.integer("max_position_embeddings") - encoder.first_position),
        tie_word_embeddings=True,
        layer_windows=_windows(config),
        sliding_rope_theta=sliding_theta,
        eos_token_ids=(eos,) if isinstance(eos, int) and 0 <= eos < vocab_size else (),
        dtype=config.dtype(),
        encoder=encoder,
    ).check(path)


def _architectures(values: Mapping[str, Any]) -> list[str]:
    names = values.get("architectures")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def as_encoder(root: Path, spec: ModelSpec, values: Mapping[str, Any]) -> ModelSpec | None:
    """Return a decoder's specification as that of an encoder if its checkpoint is one, else None.

    It is one if its tokens see their whole text, if it is a sequence classifier, or if it was saved without the head
    that generates and with sentence_transformers' files. Raises ModelFileError.
    """
    architectures = _architectures(values)
    is_causal = not values.get("use_bidirectional_attention")
    path = root / "config.json"
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        parts = _classifier(root, path, {**values, "classifier_pooling": "last"}, "")
    elif not is_causal or (any(map(_is_headless, architectures)) and (root / "modules.json").is_file()):
        parts = _sentence_transformer(root, spec.hidden_size)
    else:
        return None
    parts |= {"lowercases": _lowercases(root), "is_causal": is_causal}
    encoder = EncoderSpec("", (), False, spec.hidden_size, **parts)
    max_len = _cut_at(root, spec.max_model_len)
    return replace(spec, encoder=encoder, max_model_len=max_len, tie_word_embeddings=True)


def _is_headless(architecture: str) -> bool:
    return architecture.endswith("Model") and not architecture.endswith("LMHeadModel")


class _EncoderConfig(Settings):
    """config.json by BERT's keys."""

    def __init__(self, path: Path, values: Mapping[str, Any], family: EncoderFamily) -> None:
        super().__init__(path, values, family.config_keys)
        self.family = family


def _family_defaults(family: EncoderFamily) -> dict[str, Any]:
    return {**{family.config_keys.get(key, key): value for key, value in _BERT_DEFAULTS.items()}, **family.defaults}


def _refuse_arithmetic(config: _EncoderConfig) -> None:
    values = config.values
    if config.get("hidden_act") not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelFileError(config.path, f"hidden_act {config.get('hidden_act')!r} is not supported; {known} are")
    kind = values.get("position_embedding_type") or "absolute"
    if config.family.positions is Positions.LEARNED and kind != "absolute":
        raise ModelFileError(config.path, f"position_embedding_type {kind!r} is not supported; 'absolute' is")
    for key, value in config.family.required.items():
        if values.get(key) not in (None, value):
            raise ModelFileError(config.path, f"{key} is {values[key]!r}; {value!r} is supported")
    for key in ("is_decoder", "add_cross_attention", "quantization_config"):
        if values.get(key):
            raise ModelFileError(config.path, f"{key} of a {config.family.model_type} encoder is not supported")


def _rope_thetas(config: _EncoderConfig) -> tuple[float, float | None]:
    """Return the rope of layers that see all, and of those with a window if theirs differs."""
    family, values = config.family, config.values
    if family.positions is not Positions.ROTARY:
        return family.rope_theta, None
    table = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if family.has_windows and isinstance(table, dict):
        tables = {kind: table.get(kind) or {} for kind in (FULL, SLIDING)}
    else:
        tables = {FULL: table}
    for entry in tables.values():
        kind = entry.get("rope_type", entry.get("type", "default")) if isinstance(entry, dict) else entry
        if kind not in ("default", None) or not isinstance(entry, dict):
            raise ModelFileError(config.path, f"rope scaling {kind!r} of an encoder is not supported")
    own = {FULL: ("global_rope_theta", "rotary_emb_base", "rope_theta"), SLIDING: ("local_rope_theta",)}
    defaults = {FULL: family.rope_theta, SLIDING: 10000.0}
    found = []
    for kind, entry in tables.items():
        given = [values[key] for key in own[kind] if values.get(key) is not None]
        theta = entry.get("rope_theta", given[0] if given else defaults[kind])
        if not isinstance(theta, (int, float)) or isinstance(theta, bool):
            raise ModelFileError(config.path, f"rope_theta is {theta!r}; a number is needed")
        found.append(float(theta))
    return found[0], found[1] if len(found) > 1 else None


def _windows(config: _EncoderConfig) -> tuple[int | None, ...]:
    """Return the positions that a token of each layer sees, half of them on each side of its own; None: all."""
    if not config.family.has_windows:
        return ()
    layers, window = config.num_layers(), config.integer("local_attention")
    every = config.values.get("global_attn_every_n_layers", 3)
    if not isinstance(every, int) or every < 1:
        raise ModelFileError(config.path, f"global_attn_every_n_layers is {every!r}; 1 or more is needed")
    kinds = config.values.get("layer_types")
    if kinds is None:
        kinds = [SLIDING if layer % every else FULL for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in (FULL, SLIDING) for kind in kinds):
        raise ModelFileError(config.path, f"layer_types {str(kinds)[:99]} of {layers} layers is not supported")
    return tuple(2 * (window // 2) + 1 if kind == SLIDING else None for kind in kinds)


def _cut_at(root: Path, longest: int) -> int:
    """Return the most tokens of a text: the model's, or the length at which sentence_transformers cuts."""
    path = root / _SENTENCE_FILE
    given = read_json(path, optional=True).get("max_seq_length")
    if given is None:
        return longest
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ModelFileError(path, f"max_seq_length is {given!r}; a whole number above 0 is needed")
    return min(longest, given)


def _lowercases(root: Path) -> bool:
    return read_json(root / _SENTENCE_FILE, optional=True).get("do_lower_case") is True


def _encoder(root: Path, config: _EncoderConfig, hidden: int) -> EncoderSpec:
    family, values = config.family, config.values
    biased = family.biased
    if family.has_bias_flags:
        flags = {"attention_bias": ("qkv", "output"), "mlp_bias": ("up", "down")}
        biased = frozenset(name for flag, names in flags.items() if values.get(flag) is True for name in names)
    num_types = config.integer("type_vocab_size", 0)
    has_padding = family.has_padding_positions
    parts: dict[str, Any] = {
        "lowercases": _lowercases(root),
        "activation": config.get("hidden_act"),
        "biased": tuple(name for name in LINEARS if name in biased),
        "norm_bias": not family.rms_norm and values.get("norm_bias", not family.has_bias_flags) is True,
        "embedding_size": config.integer("embedding_size", hidden),
        "first_position": config.integer("pad_token_id") + 1 if has_padding else 0,
        "num_token_types": num_types,
    }
    if family.positions is Positions.RELATIVE:
        parts["num_position_buckets"] = config.integer("relative_attention_num_buckets")
    architectures = _architectures(values)
    for name in architectures:
        if name.endswith(_HEADS):
            raise ModelFileError(config.path, f"{name} is not supported; encoders embed texts or classify sequences")
    if any(name.endswith("ForSequenceClassification") for name in architectures):
        parts |= _classifier(root, config.path, values, family.head_activation)
        return EncoderSpec(**parts, separator_id=_separator(root) if num_types > 1 else None)
    return EncoderSpec(**parts, **_sentence_transformer(root, hidden))


def _classifier(root: Path, path: Path, values: Mapping[str, Any], head_activation: str) -> dict[str, Any]:
    names, count = values.get("id2label"), values.get("num_labels")
    if count is None:
        count = len(names) if isinstance(names, dict) else 2
    if not isinstance(count, int) or not 1 <= count <= MAX_LABELS:
        raise ModelFileError(path, f"the model has {count!r} labels; 1 to {MAX_LABELS} are supported")
    names = names if isinstance(names, dict) else {}
    kind = values.get("problem_type")
    pooling, activation = values.get("classifier_pooling", "cls"), values.get("classifier_activation")
    pooling, activation = "cls" if pooling == "bos" else pooling, activation or head_activation
    for key, value, known in (
        ("classifier_pooling", pooling, _CLASSIFIER_POOLINGS),
        ("classifier_activation", activation, ("", *_ACTIVATIONS)),
    ):
        if value not in known:
            raise ModelFileError(path, f"{key} is {value!r}; one of {', '.join(filter(None, known))} is needed")
    is_sigmoid = count == 1 or kind == "multi_label_classification"
    return {
        "labels": tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(count)),
        "pooling": pooling,
        "normalize": False,
        "head_activation": activation,
        "head_bias": values.get("classifier_bias", True) is True,
        "score_activation": _score_activation(path, values) or ("sigmoid" if is_sigmoid else "softmax"),
        "prompts": _prompts(root)[0],
    }


def _score_activation(path: Path, values: Mapping[str, Any]) -> str | None:
    """Return the activation that the configuration of a CrossEncoder names, if any."""
    own = values.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or values.get("sbert_ce_default_activation_function")
    if name is None:
        return None
    found = _SCORE_ACTIVATIONS.get(str(name).rpartition(".")[2])
    if found is None:
        raise ModelFileError(path, f"activation_fn {name!r} is not supported; {[*_SCORE_ACTIVATIONS]} are")
    return found


def _separator(root: Path) -> int | None:
    """Return the id of the token between the two texts of a pair, from the tokenizer's files."""
    named = [root / "tokenizer_config.json", root / "special_tokens_map.json"]
    token = next((t for path in named if (t := read_json(path, optional=True).get("sep_token"))), "[SEP]")
    text = token.get("content") if isinstance(token, dict) else token
    path = root / "tokenizer.json"
    entries = read_json(path, optional=True).get("added_tokens")
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("content") == text and isinstance(entry.get("id"), int):
            return int(entry["id"])
    raise ModelFileError(path, f"has no token {text!r}, which separates the two texts of a pair")


def _prompts(root: Path) -> tuple[dict[str, str], str | None]:
    path = root / "config_sentence_transformers.json"
    values = read_json(path, optional=True)
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    is_table = isinstance(prompts, dict) and all(isinstance(text, str) for text in prompts.values())
    if not is_table or (default is not None and default not in [*prompts]):
        raise ModelFileError(path, f"prompts {str(prompts)[:99]} with the default {default!r} are not supported")
    return prompts, default


def _sentence_transformer(root: Path, hidden: int) -> dict[str, Any]:
    """Return the fields after the encoder's layers; without modules.json: the mean, scaled to length 1."""
    path = root / "modules.json"
    prompts, default = _prompts(root)
    found: dict[str, Any] = {"prompts": prompts, "default_prompt": default}
    if not path.is_file():
        return found
    found |= {"normalize": False, "pooling": ""}
    dense: list[DenseLayer] = []
    for entry in read_modules(path):
        kind, folder = str(entry.get("type", "")).rpartition(".")[2], str(entry.get("path", ""))
        if Path(folder).is_absolute() or ".." in Path(folder).parts:
            raise ModelFileError(path, f"names the folder {folder!r}, which lies outside its own")
        if kind == "Transformer" and not found["pooling"]:
            continue
        if kind == "Pooling" and not found["pooling"]:
            found["pooling"] = _pooling(root / folder / "config.json", bool(prompts))
        elif kind == "Dense" and found["pooling"] and not found["normalize"]:
            dense.append(_dense(root, folder, dense[-1].outputs if dense else hidden))
        elif kind == "Normalize" and found["pooling"]:
            found["normalize"] = True
        else:
            raise ModelFileError(path, f"the module {entry.get('type')!r} at this place is not supported")
    if not found["pooling"]:
        raise ModelFileError(path, "has no Pooling module, so it does not say how a text becomes a vector")
    return {**found, "dense": tuple(dense)}


def read_modules(path: Path) -> list[dict[str, Any]]:
    """Return the entries of modules.json, which is a list. Raises ModelFileError."""
    entries: list[dict[str, Any]] = read_json(path, list)
    if len(entries) > 99 or not all(isinstance(entry, dict) for entry in entries):
        raise ModelFileError(path, "is no list of modules")
    return entries


def _pooling(path: Path, has_prompts: bool) -> str:
    values = read_json(path)
    modes = [kind for key, kind in _POOLING.items() if values.get(key) is True]
    mode = values.get("pooling_mode")
    if isinstance(mode, str):
        modes = [_POOLING.get(mode, mode)]
    others = [key for key, on in values.items() if key.startswith("pooling_mode_") and on is True]
    if len(modes) != 1 or modes[0] not in _POOLING.values() or (len(others) > 1 and mode is None):
        raise ModelFileError(path, f"pooling {modes or others} is not supported; cls, mean, max or lasttoken alone is")
    if has_prompts and values.get("include_prompt") is False:
        raise ModelFileError(path, "include_prompt false, which leaves prompts out of the pooling, is not supported")
    return modes[0]


def _dense(root: Path, folder: str, inputs: int) -> DenseLayer:
    path = root / folder / "config.json"
    values = read_json(path)
    outputs, given = values.get("out_features"), values.get("in_features")
    activation = str(values.get("activation_function", "Tanh")).rpartition(".")[2]
    if given != inputs or not isinstance(outputs, int) or not 1 <= outputs <= 1 << 20:
        raise ModelFileError(path, f"a layer of {given!r} inputs and {outputs!r} outputs after {inputs} does not fit")
    if activation not in _DENSE_ACTIVATIONS:
        raise ModelFileError(path, f"activation_function {activation!r} is not supported; {[*_DENSE_ACTIVATIONS]} are")
    return DenseLayer(folder, inputs, outputs, values.get("bias", True) is True, _DENSE_ACTIVATIONS[activation])
