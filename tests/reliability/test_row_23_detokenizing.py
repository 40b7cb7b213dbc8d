"""Row 23: whatever the text and however its ids are cut up, the deltas are the whole text; and no token costs more."""

import random
import time

from octavo.artifacts.resolve import find_wheel_model
from octavo.text.detokenizer import Detokenizer
from octavo.text.text_model import TextModel
from octavo.text.tokenizer import Tokenizer
from tests.reliability.scorecard import Score
from tests.text.tiny_tokenizers import KINDS, random_text, tiny_tokenizer

_SCRIPTS = (
    (0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x600), (0x900, 0xE00), (0x1100, 0x1200), (0x2000, 0x2070),
    (0x3040, 0x3100), (0x4E00, 0x9FFF), (0xAC00, 0xD7A4), (0xFE00, 0xFE10), (0x1F000, 0x1FAFF), (0xE0100, 0xE01F0),
    (0x1, 0xD800), (0xE000, 0x110000),
)  # fmt: skip
NUM_TOKENS = 32_000


def tokenizers() -> dict[str, Tokenizer]:
    made = {kind: tiny_tokenizer(kind) for kind in KINDS}
    files = find_wheel_model()
    if files is not None:
        made["default model"] = TextModel.load(files).tokenizer
    return made


def any_text(rng: random.Random) -> str:
    """Hard pieces, or characters of one script, or of all."""
    if rng.random() < 0.4:
        return random_text(rng, 24)
    first, end = rng.choice(_SCRIPTS)
    return "".join(chr(rng.randrange(first, end)) for _ in range(rng.randrange(40)))


def streamed(tokenizer: Tokenizer, ids: list[int], rng: random.Random, skip: bool) -> str:
    stream, text, start = Detokenizer(tokenizer, skip), [], 0
    while start < len(ids):
        end = start + rng.choice((1, 1, 1, 2, 3, 7, 30))
        text.append(stream.push(ids[start:end]))
        start = end
    return "".join([*text, stream.flush()])


def test_row_23_deltas_concatenate_to_the_full_decode(score: Score) -> None:
    """The library's own decode is the reference for texts; for random ids, seldom UTF-8, ours in one piece is."""
    count = score.dose(600, 10_000)
    rng = random.Random(23)
    mismatches = lost = 0
    kinds = tokenizers()
    for tokenizer in kinds.values():
        for _ in range(count):
            text, skip = any_text(rng), rng.random() < 0.5
            ids = tokenizer.encode(text)
            made = streamed(tokenizer, ids, rng, skip)
            mismatches += made != tokenizer.backend.decode(ids, skip_special_tokens=skip)
            lost += any("\ud800" <= character < "\ue000" for character in made)
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randrange(16))]
            mismatches += streamed(tokenizer, ids, rng, skip) != tokenizer.decode(ids, skip)
    score.tell("tokenizer kinds", ", ".join(kinds))
    score.tell("strings of each kind", count)
    score.count("deltas that are not the full decode", mismatches)
    score.count("halves of characters", lost)


def test_row_23_the_last_of_many_tokens_costs_what_the_first_did(score: Score) -> None:
    """The fastest of several blocks of 500 tokens and of several runs: neighbours on the machine only add."""
    worst = 0.0
    for tokenizer in tokenizers().values():
        rng = random.Random(1)
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(NUM_TOKENS)]
        firsts, lasts = [], []
        for _ in range(score.dose(3, 9)):
            stream = Detokenizer(tokenizer)
            times = []
            for start in range(0, NUM_TOKENS, 500):
                begun = time.thread_time()
                for token_id in ids[start : start + 500]:
                    stream.push([token_id])
                times.append(time.thread_time() - begun)
            firsts.append(min(times[1:9]))  # the first block fills the cache of pieces
            lasts.append(min(times[-8:]))
        worst = max(worst, min(lasts) / min(firsts))
    score.time("cost of the 32,000th token / cost of the first", worst, 1.5)
