"""An encoder's parts besides the sizes of a ModelSpec, how its states are pooled, and what its output means.

Owns: EncoderSpec, and the texts that encoders take. Does not: read files (read_encoder.py does) or know families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_LABELS = 1 << 16


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A linear layer after pooling: the folder with its weights, its sizes, and its activation ("tanh" or "")."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool
    activation: str


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """The specification of an encoder, beside the ModelSpec that holds it.

    `activation` is the MLP's. `biased` names the linear layers that have biases. `first_position` is the row of the
    position table for a text's first token. A model of token types counts a token's type from the separators before it
    (`separator_id`), which gives the two texts of a pair their types. `embedding_size` is that of the tables.

    `pooling` makes one vector of a text's states: "cls" (its first token), "mean", "max", "last" or "late" (the mean of
    the head's outputs). `dense` layers and `normalize` follow. A classifier has `labels` and a head, and gives logits,
    of which `score_activation` ("sigmoid", "softmax" or "none") makes probabilities or scores. `prompts` are texts
    before a text, by name; `default_prompt` names one that every text gets. `lowercases`: texts are lower-cased before
    the tokenizer reads them. `is_causal`: a token sees the tokens before it only, as in a decoder with another head.
    """

    activation: str
    biased: tuple[str, ...]
    norm_bias: bool
    embedding_size: int
    first_position: int = 0
    num_token_types: int = 0
    separator_id: int | None = None
    num_position_buckets: int = 0
    pooling: str = "mean"
    normalize: bool = True
    dense: tuple[DenseLayer, ...] = ()
    labels: tuple[str, ...] = ()
    head_activation: str = ""
    head_bias: bool = True
    score_activation: str = "none"
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lowercases: bool = False
    is_causal: bool = False

    @property
    def is_classifier(self) -> bool:
        """True if the output is logits of labels, not a vector."""
        return bool(self.labels)

    def output_size(self, hidden_size: int) -> int:
        """Return the size of the output for one text."""
        if self.labels:
            return len(self.labels)
        return self.dense[-1].outputs if self.dense else hidden_size

    @property
    def purpose(self) -> str:
        """What the model is for, and where."""
        if not self.labels:
            return "embeds texts: /v1/embeddings, /rerank, /score and LLM.embed"
        ways = "/classify and LLM.classify"
        return f"classifies texts: {ways}" if len(self.labels) > 1 else f"scores pairs: /rerank, /score, {ways}"

    def prefix(self, *names: str) -> str:
        """Return the first of these prompts that the model has, else its default prompt, else ""."""
        found = [name for name in (*names, self.default_prompt) if name is not None and name in self.prompts]
        return self.prompts[found[0]] if found else ""


class TextInput(NamedTuple):
    """A text with the prompt before it (None: an encoder's default prompt), or a pair of texts for a classifier."""

    text: str
    second: str | None = None
    prefix: str | None = None

    @property
    def num_characters(self) -> int:
        """The characters of the text, or of both."""
        return len(self.text) + len(self.second or "")
