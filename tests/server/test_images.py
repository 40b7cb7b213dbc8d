"""Images through every API of a server, up to a scripted engine: official clients, refusals, fetching, the prompt."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from octavo.assembly import LocalEngine, build_local
from octavo.config.sources import config_from_keywords
from octavo.core.request import Request
from octavo.media.item import MediaItem
from octavo.server.app import create_app
from tests.media.items import data_url, file_of, make_image

PNG, JPEG = file_of(make_image(20, 30)), file_of(make_image(40, 10), "JPEG")
RULES = [{"contains": "[image]", "say": "I see an image."}, {"contains": "hello", "say": "Hi."}]


class Served:
    """A server in this process, and what its engine was sent."""

    def __init__(
        self, http: httpx.AsyncClient, app: Any, engine: LocalEngine, sent: list[tuple[Request, tuple[MediaItem, ...]]]
    ) -> None:
        self.http = http
        self.app = app
        self.engine = engine
        self.sent = sent

    def client(self) -> httpx.AsyncClient:
        """A client of its own, which an official client closes."""
        return httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://localhost")

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body, timeout=60)

    async def chat(self, *parts: object, **fields: Any) -> httpx.Response:
        messages = [{"role": "user", "content": list(parts)}]
        return await self.post("/v1/chat/completions", messages=messages, **fields)


@asynccontextmanager
async def serving_model(model: str, **settings: Any) -> AsyncIterator[Served]:
    config = config_from_keywords(model, settings)
    engine = build_local(config)
    sent: list[tuple[Request, tuple[MediaItem, ...]]] = []
    submit = engine.client.submit

    async def noting(request: Request, media: tuple[MediaItem, ...] = ()) -> Any:
        sent.append((request, media))
        return await submit(request, media)

    engine.sessions.client.submit = noting  # type: ignore[method-assign]
    app = create_app(engine.sessions, engine.text, config, engine.client.statistics)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
        yield Served(http, app, engine, sent)
    await app.state.context.sandbox.close()
    await app.state.context.images.close()
    await engine.client.close()


@asynccontextmanager
async def serving(folder: Path, images: bool = True, **settings: Any) -> AsyncIterator[Served]:
    path = folder / "script.json"
    path.write_text(json.dumps({"rules": RULES, "images": images}))
    async with serving_model(f"scripted:{path}", **settings) as server:
        yield server


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path) as server:
        yield server


def part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, "detail": "high"}}


TEXT = {"type": "text", "text": "what is it?"}


async def test_an_image_becomes_a_span_and_an_item(served: Served) -> None:
    answer = await served.chat(TEXT, part(data_url(PNG)), part(data_url(JPEG, "jpeg")))
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "I see an image."
    [(request, media)] = served.sent
    assert [span.key for span in request.spans] == [item.key for item in media] and len({*request.spans}) == 2
    assert answer.json()["usage"]["prompt_tokens"] == request.num_prompt_tokens
    for span, item in zip(request.spans, media, strict=True):
        ids = request.prompt_token_ids
        assert ids is not None and list(ids[span.start : span.start + span.length]) == [0] * 4
        assert item.shape == (1, 8, 8) and item.kind == "image"
    assert [item.size for item in media] == [(20, 30), (40, 10)]


async def test_a_repeated_image_is_sent_once_and_decoded_once(served: Served) -> None:
    for _ in range(2):
        answer = await served.chat(part(data_url(PNG)), part(data_url(PNG)), TEXT)
        assert answer.status_code == 200, answer.text
    for request, media in served.sent:
        assert len(request.spans) == 2 and len(media) == 1
    assert served.app.state.context.images._sandbox.counters.jobs == 1


async def test_the_openai_client_sends_images(served: Served) -> None:
    openai = pytest.importorskip("openai")
    async with openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="x", http_client=served.client()) as client:
        content = [{"type": "text", "text": "look"}, part(data_url(PNG))]
        chat = await client.chat.completions.create(
            model=served.app.state.context.model, messages=[{"role": "user", "content": content}]
        )
        assert chat.choices[0].message.content == "I see an image."
        parts = [{"type": "input_text", "text": "look"}, {"type": "input_image", "image_url": data_url(PNG)}]
        response = await client.responses.create(
            model=served.app.state.context.model, input=[{"role": "user", "content": parts}]
        )
        assert response.output_text == "I see an image."
        again = await client.responses.create(
            model=served.app.state.context.model, input="and now?", previous_response_id=response.id
        )
        assert again.output_text
        stored = await client.responses.input_items.list(response.id)
        assert stored.data[0].content[1].type == "input_image"
        count = await client.responses.input_tokens.count(
            model=served.app.state.context.model, input=[{"role": "user", "content": parts}]
        )
        assert count.input_tokens == response.usage.input_tokens
    assert [len(request.spans) for request, _ in served.sent] == [1, 1, 1]


async def test_the_anthropic_client_sends_images(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "look"}]
    model = served.app.state.context.model
    httpx2 = pytest.importorskip("httpx2")
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(served.app), base_url="http://localhost")
    async with anthropic.AsyncAnthropic(base_url="http://localhost", api_key="x", http_client=http) as client:
        message = await client.messages.create(
            model=model, max_tokens=30, messages=[{"role": "user", "content": content}]
        )
        assert message.content[0].text == "I see an image."
        count = await client.messages.count_tokens(model=model, messages=[{"role": "user", "content": content}])
        assert count.input_tokens == message.usage.input_tokens
        use = {"type": "tool_use", "id": "toolu_1", "name": "screenshot", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": source}]}
        messages = [
            {"role": "user", "content": "take one"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        answer = await client.messages.create(model=model, max_tokens=30, messages=messages)
        assert answer.content[0].text == "I see an image."
    assert [len(request.spans) for request, _ in served.sent] == [1, 1]


async def test_the_ollama_client_sends_images(served: Served) -> None:
    ollama = pytest.importorskip("ollama")
    model = served.app.state.context.model
    client = ollama.AsyncClient(host="http://localhost")
    client._client = served.client()
    chat = await client.chat(model=model, messages=[{"role": "user", "content": "look", "images": [PNG]}])
    assert chat.message.content == "I see an image."
    generated = await client.generate(model=model, prompt="look", images=[PNG, JPEG])
    assert generated.response == "I see an image."
    assert [len(request.spans) for request, _ in served.sent] == [1, 2]
    bad = await served.post("/api/chat", model=model, messages=[{"role": "user", "content": "x", "images": ["aGk="]}])
    assert bad.status_code == 400 and "messages[0].images[0]: the image is in no known format" in bad.text
    bad = await served.post("/api/generate", model=model, prompt="x", images=[base64.b64encode(PNG).decode(), "?"])
    assert bad.status_code == 400 and "images[1]: the image is not base64" in bad.text


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([part("data:image/svg+xml;base64,PHN2Zy8+")], "no known format; give PNG, JPEG, WebP, GIF or BMP"),
        ([part("data:image/png,abc")], "must be base64"),
        ([part("data:image/png;base64,a")], "not base64"),
        ([part("https://example.com/a.png")], "images are not fetched from example.com"),
        ([part("file:///etc/passwd")], "must be a data URL, or http(s)"),
        ([part("data:;base64," + base64.b64encode(PNG[:90]).decode())], "damaged PNG file"),
        ([{"type": "image_url"}], "messages[0].content[0].image_url is missing"),
        ([{"type": "input_audio", "input_audio": {}}], "does not accept audio"),
        ([part(data_url(PNG))] * 17, "the request has 17 images; at most 16 are allowed (--limit-mm-per-prompt)"),
    ],
)
async def test_bad_images_are_400s_that_name_the_part(served: Served, parts: list[Any], why: str) -> None:
    answer = await served.chat(*parts)
    assert answer.status_code == 400 and why in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"]["param"].startswith("messages[0].content[") and not served.sent


async def test_other_refusals(served: Served) -> None:
    body = {"messages": [{"role": "assistant", "content": [part(data_url(PNG))]}]}
    answer = await served.post("/v1/chat/completions", **body)
    assert answer.status_code == 400 and "does not accept images" in answer.text
    answer = await served.chat(part(data_url(PNG)), truncate_prompt_tokens=8)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "truncate_prompt_tokens"


async def test_a_text_cannot_spell_an_image(served: Served) -> None:
    spelled = {"type": "text", "text": "<|endoftext|><|endoftext|>"}
    assert (await served.chat(spelled)).status_code == 200
    answer = await served.chat(spelled, part(data_url(PNG)))
    assert answer.status_code == 200 and len(served.sent[-1][0].spans) == 1
    mark = {"type": "text", "text": "\ue000octavo-image\ue001"}
    answer = await served.chat(mark, part(data_url(PNG)))
    assert answer.status_code == 400 and "places" in answer.text


async def test_a_text_model_refuses_images_as_before(tmp_path: Path) -> None:
    async with serving(tmp_path, images=False) as server:
        openai = [{"role": "user", "content": [part("x")]}]
        item = {"role": "user", "content": [{"type": "input_image"}]}
        block = {"role": "user", "content": [{"type": "image"}]}
        for path, body, param in (
            ("/v1/chat/completions", {"messages": openai}, "messages[0].content[0].type"),
            ("/v1/responses", {"input": [item]}, "input[0].content[0].type"),
            ("/v1/messages", {"max_tokens": 1, "messages": [block]}, None),
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]}, None),
            ("/api/generate", {"prompt": "x", "images": ["aa"]}, None),
        ):
            answer = await server.post(path, **body)
            assert answer.status_code == 400, (path, answer.text)
            if param is not None:
                assert answer.json()["error"]["param"] == param
        assert not server.sent


async def test_the_orientation_of_a_photo_is_applied_and_transparency_dropped(served: Served) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = file_of(make_image(10, 40), "JPEG", exif=exif)
    clear = file_of(Image.new("RGBA", (5, 7), (200, 10, 20, 0)))
    answer = await served.chat(part(data_url(turned)), part(data_url(clear)), TEXT)
    assert answer.status_code == 200, answer.text
    photo, flat = served.sent[0][1]
    assert photo.size == (40, 10) and flat.data[:3] == bytes((200, 10, 20))


SOUND = base64.b64encode(b"RIFF\0\0\0\0WAVE").decode()
AUDIO = {"type": "input_audio", "input_audio": {"data": SOUND, "format": "wav"}}


@pytest.mark.parametrize("has_images", [True, False])
async def test_audio_is_refused_by_name_in_every_api(tmp_path: Path, has_images: bool) -> None:
    url = {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{SOUND}"}}
    chats = [[{"role": "user", "content": [TEXT, part]}] for part in (AUDIO, url)]
    block = {"type": "audio", "source": {"type": "base64", "media_type": "audio/wav", "data": SOUND}}
    async with serving(tmp_path, images=has_images) as server:
        for path, body, where in (
            ("/v1/chat/completions", {"messages": chats[0]}, "messages[0].content[1]"),
            ("/v1/chat/completions", {"messages": chats[1]}, "messages[0].content[1]"),
            ("/v1/chat/completions", {"messages": chats[0], "modalities": ["text", "audio"]}, "modalities"),
            ("/v1/responses", {"input": [{"role": "user", "content": [AUDIO]}]}, "input[0].content[0]"),
            ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}, "messages[0]"),
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "audio": [SOUND]}]}, "audio"),
            ("/api/chat", {"messages": [{"role": "user", "content": "x", "images": [SOUND]}]}, "messages[0].images"),
            ("/api/generate", {"prompt": "x", "audio": [SOUND]}, "audio"),
            ("/tokenize", {"messages": chats[0]}, "messages[0].content[1]"),
        ):
            answer = await server.post(path, **body)
            assert answer.status_code == 400 and where in answer.text, (path, body, answer.text)
            assert "audio" in answer.text or "images" in where, (path, body, answer.text)
        assert not server.sent


@pytest.mark.parametrize("has_images", [True, False])
async def test_the_descriptions_of_a_model_tell_what_it_takes(tmp_path: Path, has_images: bool) -> None:
    async with serving(tmp_path, images=has_images) as server:
        model = server.app.state.context.model
        cards = [(await server.http.get(path)).json() for path in ("/v1/models", f"/v1/models/{model}", "/props")]
        modalities = ["text", "image"] if has_images else ["text"]
        assert cards[0]["data"][0]["input_modalities"] == cards[1]["input_modalities"] == modalities
        assert cards[2]["modalities"] == {"vision": has_images, "audio": False}
        shown = (await server.post("/api/show", model=model)).json()
        assert ("vision" in shown["capabilities"]) == has_images
