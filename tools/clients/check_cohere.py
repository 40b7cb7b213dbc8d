"""Check Cohere's package against a server: reranking, with both of its clients."""

from __future__ import annotations

import sys

import cohere
from checking import MODEL, URL, run

CLIENT = "cohere"
PACKAGES = ["cohere"]
SERVER = ["--model", "smollm2"]
DOCUMENTS = ["Berlin is in Germany.", "What is the capital of France?", "Cheese is made of milk."]


def check_rerank_v2() -> None:
    """Documents come ordered, the one that is the query itself first."""
    client = cohere.ClientV2(api_key="none", base_url=URL)
    answer = client.rerank(model=MODEL, query=DOCUMENTS[1], documents=DOCUMENTS)
    scores = [result.relevance_score for result in answer.results]
    assert answer.results[0].index == 1 and scores == sorted(scores, reverse=True), answer
    assert abs(scores[0] - 1.0) < 1e-3 and len(scores) == len(DOCUMENTS)


def check_rerank_v1() -> None:
    """So they do with the older client, each with its text, as many as were asked for."""
    client = cohere.Client(api_key="none", base_url=URL)
    answer = client.rerank(model=MODEL, query=DOCUMENTS[1], documents=DOCUMENTS, top_n=2, return_documents=True)
    assert len(answer.results) == 2
    assert answer.results[0].document is not None and answer.results[0].document.text == DOCUMENTS[1]


if __name__ == "__main__":
    sys.exit(run(__name__))
