"""Row 25: a tenant never hits a prefix that another cached, by whatever salt; its own it nearly always does."""

import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from octavo.config import Config, ServingConfig
from octavo.core.limits import Limits
from octavo.core.scheduler import Scheduler
from octavo.engine.loop import EngineLoop
from octavo.executors.protocol import ExecutorSpec
from octavo.frontend.local_client import LocalClient
from octavo.frontend.sessions import Sessions
from octavo.server.app import create_app
from tests.fake_model import FakeExecutor
from tests.reliability.scorecard import Score
from tests.server.fakes import Harness, make_text

VOCAB = 258
BLOCK = 16
LENGTH = 8 * BLOCK + 4
NAMES = ("alice", "bob", "carol")


@asynccontextmanager
async def served(tmp_path: Path) -> AsyncIterator[Harness]:
    """An app with three tenants over the real scheduler and prefix cache."""
    path = tmp_path / "keys.yaml"
    path.write_text("keys: [" + ", ".join(f"{{name: {name}, key: sk-of-{name}}}" for name in NAMES) + "]")
    path.chmod(0o600)
    limits = Limits(block_size=BLOCK, num_blocks=(512,), max_model_len=512, vocab_size=VOCAB, max_batch_tokens=1024)
    executor = FakeExecutor(vocab_size=VOCAB, max_model_len=512)
    executor.open(ExecutorSpec(limits.max_sequences, limits.max_batch_tokens, BLOCK, num_blocks=512))
    client = LocalClient(EngineLoop(Scheduler(limits), executor))
    harness = Harness(config=Config(serving=ServingConfig(api_key_file=str(path))))
    harness.app = create_app(Sessions(client, harness.text), make_text(), harness.config, client.statistics)
    try:
        yield harness
    finally:
        await client.close()


async def cached(harness: Harness, who: str, prompt: list[int], salt: str | None = None) -> int:
    """Prompt tokens that came from the cache."""
    headers = {"authorization": f"Bearer sk-of-{who}"}
    response = await harness.complete(headers=headers, prompt=prompt, max_tokens=1, cache_salt=salt)
    assert response.status_code == 200, response.text
    tokens: int = response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


async def test_row_25_another_tenants_prefix_is_never_hit(tmp_path: Path, score: Score) -> None:
    rng = random.Random(25)
    num_probes = score.dose(120, 1000)
    hits = own_hits = own = 0
    async with served(tmp_path) as harness:
        for probe in range(num_probes):
            owner, *others = rng.sample(NAMES, 3)
            salt = rng.choice((None, "x", owner, "alice", "\0"))
            prompt = [rng.randrange(2, VOCAB) for _ in range(LENGTH)]
            assert await cached(harness, owner, prompt, salt) == 0
            guess = rng.choice((salt, None, owner, f"{owner}\0{salt or ''}", "sk-of-" + owner))
            hits += await cached(harness, others[probe % 2], prompt, guess) > 0
            own_hits += await cached(harness, owner, prompt, salt) > 0
            own += 1
            if salt is not None:  # a salt narrows: without it even its owner does not share
                hits += await cached(harness, owner, prompt, None) > 0
    score.tell("probes", num_probes)
    score.count("hits of another tenant, or of another salt", hits)
    score.least("hits of the same tenant, share", own_hits / own, 0.99)


async def test_row_25_a_tenant_that_was_alone_keeps_its_prefixes_to_itself(tmp_path: Path, score: Score) -> None:
    """Keys that come and go do not open what was cached before: even one key's tenant has a salt."""
    rng = random.Random(26)
    prompt = [rng.randrange(2, VOCAB) for _ in range(LENGTH)]
    async with served(tmp_path) as harness:
        context = harness.app.state.context
        path = Path(harness.config.serving.api_key_file or "")
        path.write_text("keys: [{name: alice, key: sk-of-alice}]")
        context.keys.reload()
        assert await cached(harness, "alice", prompt) == 0
        path.write_text("keys: [{name: bob, key: sk-of-bob}]")
        context.keys.reload()
        score.count("hits after the keys were changed", await cached(harness, "bob", prompt))
        path.write_text("keys: [{name: bob, key: sk-of-bob}, {name: alice, key: sk-of-alice}]")
        context.keys.reload()
        score.least("own tokens that a tenant finds again", await cached(harness, "alice", prompt), 8 * BLOCK)
