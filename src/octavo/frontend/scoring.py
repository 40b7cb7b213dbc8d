"""What vectors and logits mean: similarities, probabilities of labels, scores of pairs, and the order of documents.

Owns: this arithmetic, for the library and the HTTP endpoints. Does not: submit requests, or tokenize.
A generator's and an embedding model's score of two texts is the cosine of their vectors. A classifier with one label
reads both texts at once; its score is that label's, after the model's own activation.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import TypeAlias

from octavo.artifacts.encoder_spec import EncoderSpec, TextInput
from octavo.errors import InvalidRequestError

Vector: TypeAlias = "array[float]"  # float32
QUERY_PROMPTS = ("query",)  # names of sentence_transformers' prompts, the first that a model has
DOCUMENT_PROMPTS = ("document", "passage", "corpus")


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Texts to score in pairs; `pairs` are indices into `firsts` and `seconds`.

    `roles` are the names of the prompts before the first texts, and before the second ones.
    """

    firsts: Sequence[str]
    seconds: Sequence[str]
    pairs: Sequence[tuple[int, int]]
    roles: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    @classmethod
    def of(cls, firsts: Sequence[str], seconds: Sequence[str]) -> TextPairs:
        """Compare one text with all of the second list, or each with its counterpart. Raises InvalidRequestError."""
        return cls(firsts, seconds, pair_indices(len(firsts), len(seconds)))

    @classmethod
    def of_documents(cls, query: str, documents: Sequence[str]) -> TextPairs:
        """Compare a query with documents."""
        return cls([query], documents, pair_indices(1, len(documents)), (QUERY_PROMPTS, DOCUMENT_PROMPTS))

    def texts(self, encoder: EncoderSpec | None) -> list[TextInput]:
        """Return what to compute: pairs for a classifier, else each text once, the first ones first."""
        if encoder is not None and encoder.is_classifier:
            return [TextInput(self.firsts[one], self.seconds[other]) for one, other in self.pairs]
        prefixes = [None if encoder is None else encoder.prefix(*names) for names in self.roles]
        sides = zip(prefixes, (self.firsts, self.seconds), strict=True)
        return [TextInput(text, prefix=prefix) for prefix, texts in sides for text in texts]

    def scores(self, encoder: EncoderSpec | None, outputs: Sequence[Vector]) -> list[float]:
        """Return the score of each pair from the outputs for `texts`."""
        if encoder is not None and encoder.is_classifier:
            return [probabilities(logits, encoder)[0] for logits in outputs]
        vectors = outputs if encoder is None or encoder.normalize else [unit(each) for each in outputs]
        return [similarity(vectors[one], vectors[len(self.firsts) + other]) for one, other in self.pairs]


def similarity(one: Vector, other: Vector) -> float:
    """Return the cosine of two vectors: -1 to 1. Vectors of length 1 are not scaled again."""
    cosine: float = sum(map(mul, one, other))
    return max(-1.0, min(1.0, cosine))


def unit(vector: Vector) -> Vector:
    """Return a vector scaled to length 1; one of zeros stays as it is."""
    length = math.sqrt(sum(map(mul, vector, vector)))
    return array("f", [value / length for value in vector]) if length > 0 else vector


def probabilities(logits: Sequence[float], encoder: EncoderSpec) -> list[float]:
    """Return the probability of each label, by the model's own activation; raw logits if it has none."""
    if encoder.score_activation == "sigmoid":
        return [_sigmoid(value) for value in logits]
    if encoder.score_activation == "softmax":
        most = max(logits)
        parts = [math.exp(value - most) for value in logits]
        total = math.fsum(parts)
        return [part / total for part in parts]
    return list(logits)


def likeliest(logits: Sequence[float], encoder: EncoderSpec | None) -> tuple[str, list[float]]:
    """Return a text's likeliest label, and the probabilities of all of a classifier's labels."""
    assert encoder is not None, "a classifier"
    probs = probabilities(logits, encoder)
    return encoder.labels[probs.index(max(probs))], probs


def _sigmoid(value: float) -> float:
    if value >= 0:
        return 1.0 / (1.0 + math.exp(-value))
    power = math.exp(value)
    return power / (1.0 + power)


def pair_indices(num_first: int, num_second: int) -> list[tuple[int, int]]:
    """Return the pairs to score: one text with all of the second list, or each with its counterpart.

    Raises InvalidRequestError for lists that cannot be paired.
    """
    if num_first not in (1, num_second):
        message = f"text_1 has {num_first} texts and text_2 has {num_second}; give one, or as many as text_2 has"
        raise InvalidRequestError(message, "text_1")
    firsts = [0] * num_second if num_first == 1 else range(num_first)
    return list(zip(firsts, range(num_second), strict=True))


def ranked(scores: Sequence[float], top_n: int | None = None) -> list[int]:
    """Return the indices of the best scores, best first; of equal ones the lower index. None or 0 means all."""
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    return order[: top_n or None]
