"""Checks of the settings of speculation, before anything is loaded.

Owns: finding the draft model's files, and the refusal of models and settings with which there can be no drafts.
Does not: load a model. Every message names the setting, its value and the remedy.
"""

from __future__ import annotations

from octavo.artifacts.fingerprint import tokenizer_fingerprint
from octavo.artifacts.read_spec import read_model_spec
from octavo.artifacts.resolve import ModelFiles, resolve_model
from octavo.config import Config
from octavo.errors import ConfigError, UnknownModelError
from octavo.executors.protocol import Capacity
from octavo.text.tokenizer import Tokenizer


def check_rejection(config: Config, files: ModelFiles) -> None:
    """Raise ConfigError if rejection sampling is configured and this engine does not support it."""
    speculation, num_ranks = config.speculation, config.parallel.num_ranks
    if speculation.speculate_sampling == "exact":
        return
    value = f"speculate_sampling is {speculation.speculate_sampling!r}"
    if not speculation.has_ngrams and speculation.draft_model is None:
        raise ConfigError(f"{value}, but there are no drafts; give --speculate too, or leave it out")
    if files.kind == "scripted":
        raise ConfigError(f"{value}, but a scripted model has no probabilities; give exact")
    if num_ranks > 1:
        raise ConfigError(f"{value}, but the engine has {num_ranks} ranks; give exact, or leave out the ranks")
    if read_model_spec(files).encoder is not None:
        raise ConfigError(f"{value}, but an encoder generates nothing; leave it out")


def looks_up(config: Config, capacity: Capacity) -> bool:
    """Return True if earlier text is a source of drafts in an opened engine.

    By default it is where drafts can change no bit of an answer and steps are timed: in the native decoder. Plans that
    overlap would wait for each other, so --pipeline-depth switches it off too.
    """
    if config.speculation.speculate != "auto":
        return config.speculation.has_ngrams
    return capacity.decoder == "native" and (config.execution.depth or 1) == 1


def is_paced(config: Config, capacity: Capacity) -> bool:
    """Return True if measured times decide which lookups are verified: on a CPU, where steps have their own times."""
    has_times = capacity.device == "cpu" and capacity.decoder != ""
    return has_times and config.speculation.draft_model is None and looks_up(config, capacity)


def check_draft_model(config: Config, files: ModelFiles) -> ModelFiles | None:
    """Return the files of the draft model for the model in `files`; None if no draft model is configured.

    Raises ConfigError, UnknownModelError, ModelFileError.
    """
    name = config.speculation.draft_model
    if name is None:
        return None
    value = f"speculate is {config.speculation.speculate!r}"
    if config.parallel.num_ranks > 1 or config.parallel.tp_invariant:
        raise ConfigError(f"{value}, but a draft model runs beside one rank only; give ngram, or leave out the ranks")
    try:
        drafts = resolve_model(name, None, config.model.offline)
    except UnknownModelError as error:
        raise UnknownModelError(f"{value}: {error}") from None
    if "scripted" in (files.kind, drafts.kind):
        raise ConfigError(f"{value}, but a scripted model neither drafts nor has a draft model; give ngram")
    spec = read_model_spec(drafts)
    if read_model_spec(files).encoder is not None or spec.encoder is not None:
        raise ConfigError(f"{value}, but an encoder generates nothing; leave it out")
    if spec.vision is not None:
        raise ConfigError(f"{value}, which takes images, but drafts are of text; give a model of text alone, or ngram")
    if tokenizer_fingerprint(files) != tokenizer_fingerprint(drafts):
        difference = Tokenizer.from_files(files).describe_difference(Tokenizer.from_files(drafts))
        if difference is not None:
            raise ConfigError(
                f"{value}, and its tokenizer differs from that of {files.name}: {difference}; "
                "give a smaller model of the same family, or ngram"
            )
    return drafts
