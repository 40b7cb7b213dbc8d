"""The chat page's logic without its page: streams however they are cut, markdown whatever it holds, figures, code."""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from octavo.dashboard.page import STATIC
from tests.browser.browsing import watched
from tests.browser.scripts import MARKDOWN, script
from tests.fake_server import RealServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STREAM = (
    b'\xef\xbb\xbfdata: {"a":"\xc3\xa4\xf0\x9d\x84\x9e"}\n\n: keep alive\n\n'
    b"event: note\r\ndata: one\r\ndata:two\r\n\r\n"
    b"id: 7\rdata\rdata:  spaced\r\rdata: [DONE]\n\n"
)
EVENTS = [
    {"type": "message", "data": '{"a":"ä𝄞"}'},
    {"type": "note", "data": "one\ntwo"},
    {"type": "message", "data": "\n spaced"},
    {"type": "message", "data": "[DONE]"},
]
FRAGMENTS = [
    *"<>\"'`*_~[]()!#-+.|\\\n&:=/ ab1", "\n\n", "```", "~~~", "**", "__", "](", "![", "- ", "1. ", "> ", "    ", "\t",
    "| a | b |\n|---|---|\n", "<script>window.pwned=1</script>", "<img src=x onerror=window.pwned=1>", "javascript:",
    "[x](javascript:window.pwned=1)", "[x](JaVaScRiPt&#58;window.pwned=1)",
    "[x](data:text/html,<script>window.pwned=1</script>)", "[x](\x01javascript:window.pwned=1)",
    "<javascript:window.pwned=1>", "https://example.org/", "http://a\" onclick=\"x", "mailto:a@b", "</code></pre>",
    "[x](https://example.org/\"onmouseover=\"window.pwned=1)", "<svg onload=window.pwned=1>", "<br>", "&lt;script&gt;",
    "<style>*{display:none}</style>", "<iframe srcdoc='<script>window.pwned=1</script>'>", "- [ ] ", "//evil.example/x",
    "<https://example.org>", "\u2028", "\u0000", "\ud7ff", "é", "𝄞", "{{", "${", "onerror=", "vbscript:x",
]  # fmt: skip
ATTRIBUTES = {
    "A": {"href", "rel", "target", "title"}, "BUTTON": {"type", "class", "aria-label"}, "OL": {"start"}, "P": {"dir"},
    "DIV": {"class", "tabindex", "role", "aria-label"}, "PRE": {"tabindex"}, "SPAN": {"class", "role", "aria-label"},
    "TD": {"class", "dir"}, "TH": {"class", "scope", "dir"}, "LI": {"class", "dir"},
    "BLOCKQUOTE": {"dir"}, **{f"H{level}": {"dir"} for level in range(3, 7)},
}  # fmt: skip
SHOWN = """
  const box = document.createElement("div");
  new m.Markdown(box).show(given);
  return box.innerHTML.replaceAll(' dir="auto"', "");"""
RENDER = """async (texts) => {
  const { Markdown, ELEMENTS } = await import("./static/chat-render.js");
  return texts.map((text) => {
    const box = document.createElement("div");
    document.body.append(box);
    const markdown = new Markdown(box);
    for (let end = 0; end < text.length; end += Math.ceil(text.length / 3)) markdown.show(text.slice(0, end));
    markdown.show(text);
    const grown = box.innerHTML;
    const fresh = document.createElement("div");
    new Markdown(fresh).show(text);
    const all = [...box.querySelectorAll("*")];
    const found = {
      isSame: grown === fresh.innerHTML,
      text: box.textContent,
      tags: [...new Set(all.map((one) => one.tagName))].filter((tag) => !ELEMENTS.includes(tag)),
      attributes: [...new Set(all.flatMap((one) => [...one.attributes].map((a) => `${one.tagName} ${a.name}`)))],
      links: all.filter((one) => one.tagName === "A").map((one) => one.href),
      depth: Math.max(0, ...all.map((one) => {
        let depth = 0;
        for (let at = one; at !== box; at = at.parentElement) depth += 1;
        return depth;
      })),
    };
    box.remove();
    return found;
  });
}"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("modules")
    with RealServer(script(folder), folder / "log") as running:
        yield running


@pytest.fixture(scope="module")
def page(browser: Browser, server: RealServer) -> Iterator[Page]:
    with watched(browser, server.url) as (opened, _):
        opened.goto("/")
        yield opened


def call(page: Page, module: str, words: str, given: Any = None) -> Any:
    """The value of an expression over a module `m` and what is `given`."""
    return page.evaluate(
        f"""async (given) => {{
          const m = await import("./static/{module}");
          return await (async () => {{ {words} }})();
        }}""",
        given,
    )


def test_a_stream_gives_the_same_events_however_its_bytes_are_cut(page: Page) -> None:
    words = """
      const bytes = new Uint8Array(given.bytes);
      return given.cuts.map((cuts) => {
        const parser = new m.SseParser();
        const events = [];
        let start = 0;
        for (const end of [...cuts, bytes.length]) {
          events.push(...parser.push(bytes.slice(start, end)));
          start = end;
        }
        return [events, parser.isOpen];
      });"""
    size = len(STREAM)
    source = random.Random(6)
    cuts = [[], list(range(1, size)), *([place] for place in range(size))]
    cuts += [sorted(source.sample(range(size), source.randrange(1, 12))) for _ in range(300)]
    found = call(page, "chat-sse.js", words, {"bytes": list(STREAM), "cuts": cuts})
    assert all(one == [EVENTS, False] for one in found)


def test_a_stream_that_ends_within_an_event_was_cut_and_one_without_end_is_given_up(page: Page) -> None:
    words = """
      const parser = new m.SseParser();
      const events = parser.push(new TextEncoder().encode("data: one\\n\\ndata: tw"));
      const body = (text) => new Blob([text]).stream();
      const read = async (text) => {
        const seen = [];
        try {
          for await (const event of m.readEvents(body(text))) seen.push(event.data);
        } catch (error) { seen.push(`Error: ${error.message}`); }
        return seen;
      };
      const endless = new m.SseParser();
      let rounds = 0;
      try {
        const piece = new TextEncoder().encode("x".repeat(1 << 20));
        for (; rounds < 64; rounds += 1) endless.push(piece);
      } catch { /* as it should be */ }
      return [events.length, parser.isOpen, await read("data: a\\n\\ndata: b"), await read("data: a\\n\\n"), rounds];"""
    first, is_open, cut, whole, rounds = call(page, "chat-sse.js", words)
    assert (first, is_open) == (1, True)
    assert cut == ["a", "Error: the stream was cut"] and whole == ["a"]
    assert rounds == 32, "bounded by MAX_EVENT_CHARACTERS"


def test_markdown_becomes_the_elements_it_says(page: Page) -> None:
    [found] = page.evaluate(RENDER, [MARKDOWN])
    html = call(
        page,
        "chat-render.js",
        SHOWN,
        MARKDOWN,
    )
    for part in (
        "<h3>A title</h3>",
        "<strong>bold</strong>, <em>slanted</em> and <code>plain</code> words",
        "<li>second<ul><li>inner</li></ul></li>",
        '<th class="side-right" scope="col">value</th>',
        '<code>print("&lt;b&gt;hello&lt;/b&gt;")</code>',
        "<blockquote><p>quoted</p></blockquote>",
        "picture: a picture</a>",
        "&lt;script&gt;window.pwned = 1&lt;/script&gt;",
    ):
        assert part in html, html
    assert found["links"] == ["https://example.org/page", "https://example.org/x.png"]
    assert "<img" not in html, "nothing is fetched for a model"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a * b * c and 2*3", "<p>a * b * c and 2*3</p>"),
        ("snake_case_name and _slanted_", "<p>snake_case_name and <em>slanted</em></p>"),
        ("***both*** ~~gone~~ ~one~", "<p><em><strong>both</strong></em> <del>gone</del> ~one~</p>"),
        ("`` a`b `` and `open", "<p><code>a`b</code> and `open</p>"),
        (r"\*no\* \[x\](y)", "<p>*no* [x](y)</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("3. three\n4. four", '<ol start="3"><li>three</li><li>four</li></ol>'),
        ("- a\n\n- b\n\nend", "<ul><li>a</li><li>b</li></ul><p>end</p>"),
        ("1. a\n   ```\n   x\n\n\n   y\n   ```\n2. b", None),
        ("- [x] done\n- [ ] open", None),
        ("2024. A year", '<ol start="2024"><li>A year</li></ol>'),
        ("In\n2024. A year", "<p>In<br>2024. A year</p>"),
        ("a | b\n--|--\n`x\\|y` | z | more", None),
        ("#hash and # not a title", "<p>#hash and # not a title</p>"),
        ("&lt;b&gt; &amp;c", "<p>&lt;b&gt; &amp;c</p>"),
        ("---", "<hr>"),
        ("", ""),
    ],
)
def test_markdown_as_models_write_it(page: Page, text: str, html: str | None) -> None:
    words = SHOWN
    found = call(page, "chat-render.js", words, text)
    if html is not None:
        assert found == html
    elif text.startswith("1."):
        assert "<code>x\n\n\ny</code>" in found and found.endswith("<li>b</li></ol>")
    elif text.startswith("- ["):
        assert found.count("task-item") == 2 and 'aria-label="done"' in found and 'aria-label="to do"' in found
    else:
        assert "<code>x|y</code>" in found and "more" not in found, "a row has as many cells as the head"


def test_no_text_becomes_anything_but_text_and_harmless_elements(page: Page) -> None:
    source = random.Random(20)
    texts = ["".join(source.choices(FRAGMENTS, k=source.randrange(1, 24))) for _ in range(3000)]
    texts += ["".join(fragment for fragment in FRAGMENTS), *FRAGMENTS]
    for start in range(0, len(texts), 500):
        batch = texts[start : start + 500]
        for text, found in zip(batch, page.evaluate(RENDER, batch), strict=True):
            assert found["tags"] == [], text
            for one in found["attributes"]:
                tag, name = one.split()
                assert name in ATTRIBUTES.get(tag, set()), (text, one)
            assert all(re.match(r"(https?|mailto):", link) for link in found["links"]), (text, found["links"])
            assert found["isSame"], f"grown in pieces it is another: {text!r}"
            assert found["depth"] < 64, text
    assert page.evaluate("window.pwned") is None


def test_no_word_of_a_text_is_lost(page: Page) -> None:
    source = random.Random(21)
    marks = ["*", "**", "_", "`", "~~", "[", "]", "\n", "\n\n", "- ", "1. ", "> ", "# ", " ", " ", " ", "|", "\n```\n"]
    texts = []
    for _ in range(1500):
        parts = [source.choice(marks) if source.random() < 0.6 else f"w{number}x" for number in range(30)]
        texts.append("".join(parts))
    for text, found in zip(texts, page.evaluate(RENDER, texts), strict=True):
        shown = found["text"]
        fences = re.findall(r"(?:```|~~~)[^\n]*", text)  # the first word behind a fence is shown, as the language
        missing = [word for word in re.findall(r"w\d+x", text) if word not in shown and word not in "".join(fences)]
        table = "|" in text and "-" in text  # cells beyond the head's are dropped, as everywhere
        assert not missing or table, (text, missing)


# By a size: texts that some part of a parser may read again and again.
GROWING: dict[str, Callable[[int], str]] = {
    "heading": lambda n: "# a" + " " * n + "x",
    "heading of hashes": lambda n: "# " + "#" * n + "x",
    "heading with a separator": lambda n: "# " + " " * n + "\u2028",
    "closing hashes": lambda n: "# a" + " #" * (n // 2) + "x",
    "fence of tildes": lambda n: "~" * n + "`",
    "fence with spaces": lambda n: "~~~" + " " * n + "`",
    "fences": lambda n: "````\n" + "```\n" * (n // 4),
    "item": lambda n: "- " + " " * n + "\u2028",
    "delimiters": lambda n: "a|b\n-|-" + " " * n + "x",
    "more delimiters": lambda n: "a|b\n" + "-|" * (n // 2) + "x",
    "rule": lambda n: "* " * (n // 2) + "x",
    "code": lambda n: "` " + "a" * n + "`",
    "code of words": lambda n: "`" + "h " * (n // 2) + "`",
    "ticks": lambda n: "`` ` " * (n // 5),
    "address": lambda n: "http://a" + "." * n,
    "addresses": lambda n: "http://[" * (n // 8),
    "links": lambda n: "[](" * (n // 3),
    "long links": lambda n: ("[](" + "a" * 2000) * (n // 2000),
    "brackets": lambda n: "[" * (n // 2) + "](http://a)" * (n // 20),
    "emphasis": lambda n: "*a " * (n // 3),
    "strong": lambda n: "a* *b" * (n // 5),
    "nested": lambda n: ("*a " * 31 + "b* " * 31) * (n // 200),
    "lists": lambda n: "- " * (n // 2),
    "quotes": lambda n: ("> " * 8 + "a\n") * (n // 18),
    "blanks": lambda n: "- a\n" + "\n" * n + "  b",
    "items apart": lambda n: "- a\n\n\n\n" * (n // 7),
    "rows": lambda n: "a" + "|b" * 63 + "\n" + "-|" * 64 + "\n" + "|\n" * (n // 2),
    "columns": lambda n: "|a" * (n // 2) + "\n" + "|-" * (n // 2),
    "tags": lambda n: "<http://" * (n // 8),
    "indents": lambda n: (" " * 100 + "x\n") * (n // 102),
    "escapes": lambda n: "\\" * n,
    "entities": lambda n: "&" * n,
    "left brackets": lambda n: "<" * n,
    "right brackets": lambda n: ">" * n,
    "one run of ticks": lambda n: "`" * n,
    "one run of underscores": lambda n: "_" * n,
    "empty lines": lambda n: "\n" * n,
}
LINEAR = """
  const timed = (text) => {
    let best = Infinity;
    for (let round = 0; round < 3; round += 1) {
      const begun = performance.now();
      m.parse(text);
      best = Math.min(best, performance.now() - begun);
    }
    return best;
  };
  return given.map(([short, long]) => {
    let ratio = Infinity;
    for (let attempt = 0; attempt < 4 && ratio > 8; attempt += 1) {
      ratio = Math.min(ratio, timed(long) / Math.max(10, timed(short))); // less than 10 ms is noise
    }
    return ratio;
  });"""


def test_row_36_markdown_takes_time_by_its_length(page: Page) -> None:
    """Four times the text takes about four times as long, where a quadratic parser takes sixteen times."""
    texts = [[made(40_000), made(160_000)] for made in GROWING.values()]
    ratios = dict(zip(GROWING, call(page, "chat-markdown.js", LINEAR, texts), strict=True))
    assert {name: ratio for name, ratio in ratios.items() if ratio > 8} == {}


def test_a_text_that_grows_is_parsed_like_one_that_is_whole(page: Page) -> None:
    words = """
      return given.filter((text) => {
        const growing = new m.GrowingText();
        for (let end = 0; end <= text.length; end += 1) {
          const [grown, whole] = [growing.parse(text.slice(0, end)), m.parse(text.slice(0, end))];
          if (JSON.stringify(grown) !== JSON.stringify(whole)) return true;
        }
        const another = JSON.stringify(growing.parse("other " + text)) !== JSON.stringify(m.parse("other " + text));
        return another;
      });"""
    source = random.Random(22)
    marks = [
        "# ",
        "#",
        "- ",
        "1. ",
        "  ",
        "> ",
        "```",
        "~~~",
        "\n",
        "\n",
        "\n\n",
        "a",
        "b|c",
        "|",
        "-|-",
        "---",
        "\r",
        "\r\n",
        "\t",
        "*",
    ]
    texts = ["".join(source.choices(marks, k=source.randrange(1, 40))) for _ in range(600)]
    assert call(page, "chat-markdown.js", words, texts) == []


def test_a_stream_is_not_parsed_from_its_beginning_again(page: Page) -> None:
    """By the characters that are read: those of all pieces for many blocks, few readings of one long block."""
    words = """
      const growing = new m.GrowingText();
      let read = 0;
      for (let end = 10; end <= given.length; end += 10) {
        read += growing.unsettled(given.slice(0, end));
        growing.parse(given.slice(0, end));
      }
      return read;"""
    text = "A paragraph of some words.\n\n- an item\n- another\n\n```\ncode\n```\n\n"
    short, long = (call(page, "chat-markdown.js", words, text * times) for times in (50, 200))
    assert long < 5 * short and long < 20 * len(text) * 200
    drawn = """
      const box = document.createElement("div");
      const markdown = new m.Markdown(box);
      const real = performance.now;
      performance.now = () => 0;
      let num = 0;
      try {
        for (let end = 20; end <= given.length; end += 20) num += markdown.showGrowing(given.slice(0, end));
      } finally {
        performance.now = real;
      }
      const partly = box.textContent.length;
      markdown.show(given);
      return [num, partly, box.textContent.length];"""
    paragraph = "word " * 16_000
    num, partly, whole = call(page, "chat-render.js", drawn, paragraph)
    assert num < 400 and whole == len(paragraph) and partly > 0.95 * whole


def test_more_parts_than_a_call_takes_arguments(page: Page) -> None:
    many = "- a\n" + "\n" * 300_000 + "  b"
    assert call(page, "chat-markdown.js", "return m.parse(given)[0].items[0].blocks.length;", many) == 2
    words = 'return m.make("p", {}, Array(given).fill("x")).textContent.length;'
    assert call(page, "chat-dom.js", words, 200_000) == 200_000


def test_chunks_are_put_together_by_choice(page: Page) -> None:
    words = """
      const assembly = new m.Assembly(2, 0);
      const none = { logprobs: null, finish_reason: null };
      const say = (index, delta, more = {}) => ({ id: "x", choices: [{ index, delta, ...none, ...more }] });
      assembly.push(say(0, { role: "assistant", content: "" }), 1);
      const first = assembly.firstMs;
      assembly.push(say(1, { content: "B" }), 2);
      assembly.push(say(0, { reasoning: "hm", reasoning_content: "hm" }), 3);
      const begin = { index: 0, id: "c", function: { name: "f", arguments: "{" } };
      assembly.push(say(0, { tool_calls: [begin] }), 4);
      assembly.push(say(0, { tool_calls: [{ index: 0, function: { arguments: "}" } }] }), 5);
      assembly.push(say(1, { content: "C" }, { finish_reason: "length", stop_reason: null }), 6);
      assembly.push(say(7, { content: "nobody's" }), 6);
      assembly.push({ id: "x", choices: [], usage: { completion_tokens: 5 }, timings: { tokens_per_s: 9 } }, 7);
      let error = null;
      try { assembly.push({ error: { message: "broke", code: "engine_error" } }, 8); }
      catch (e) { error = [e.message, e.code]; }
      const { answers, firstMs, pieces, usage } = assembly;
      return { first, answers, firstMs, pieces, usage, error };"""
    found = call(page, "chat-answer.js", words)
    one, two = found["answers"]
    assert found["first"] is None, "the role alone is no text"
    assert (found["firstMs"], found["pieces"]) == (2, 5)
    assert one["reasoning"] == "hm" and one["calls"] == [{"id": "c", "name": "f", "arguments": "{}"}]
    assert (two["content"], two["finish"]) == ("BC", "length")
    assert found["usage"] == {"completion_tokens": 5} and found["error"] == ["broke", "engine_error"]


def test_figures_in_words(page: Page) -> None:
    words = """
      const tokens = [{ t: "a", p: Math.log(0.5) }, { t: "b", p: Math.log(0.125) }];
      const half = (byte) => ({ t: "\\ufffd", b: [byte] });
      return [
        [0.0012, 0.05, 0.3, 1.234, 12.34, 123.4].map(m.seconds), [0.1234, 12.345, 1234.5].map(m.number),
        m.perplexity(tokens), m.perplexity([]),
        [0, -0.2, -1, -2, -5].map(m.surprise), [0, -0.7, -5, -9, -30].map(m.percent),
        m.tokenTexts([{ t: "x" }, half(0xe2), half(0x82), half(0xac), { t: "y" }]),
        m.tokenTexts([half(0xe2), { t: "y" }, half(0x41)]),
      ];"""
    times, numbers, doubt, none, levels, parts, texts, broken = call(page, "chat-stats.js", words)
    assert times == ["1.2 ms", "50 ms", "300 ms", "1.23 s", "12.3 s", "123 s"]
    assert numbers == ["0.123", "12.3", "1,235"]
    assert doubt == pytest.approx(4.0) and none is None
    assert levels == [0, 1, 2, 3, 4]
    assert parts == ["100 %", "49.7 %", "0.7 %", "0.01 %", "< 0.001 %"]
    assert texts == ["x", "", "", "€", "y"] and broken == ["", "y", "A"]


def test_the_story_of_a_request(page: Page) -> None:
    words = """
      const events = [
        { event: "admitted", time_s: 0.5, step: 3, num_tokens: 24, cached_tokens: 0 },
        { event: "preempted", time_s: 1.5, step: 9, by: null, num_tokens_lost: 5 },
      ];
      const spent = { earlier: 0, queue: 1, prefill: 0, decode: 3, preempted: 0, recompute: 0, total: 4 };
      return [m.phasesOf(spent), m.phasesOf(undefined), m.eventsOf({ events }), m.eventsOf({})];"""
    phases, none, events, empty = call(page, "chat-story.js", words)
    assert phases == [
        {"name": "queue", "words": "1.00 s", "share": 0.25},
        {"name": "decode", "words": "3.00 s", "share": 0.75},
    ]
    assert events == [
        {"when": "500 ms", "words": "admitted: tokens 24"},
        {"when": "1.50 s", "words": "preempted: tokens lost 5"},
    ]
    assert none == empty == []


SETTINGS = {
    "temperature": "0.5", "top_k": "20", "min_p": "0.1", "n": "2", "stop": "END\n\\n\\n", "logprobs": True,
    "top_logprobs": "3", "response_format": "json_schema", "schema": '{"type": "object"}',
    "system": "Be 'brief' \"now\"\\n ☃ \u2028", "extra": '{"typical_p": 0.9}',
}  # fmt: skip
BODY = """
  const settings = { ...m.DEFAULTS, ...given };
  try { return m.bodyOf("model", settings, [{ role: "user", content: "it's $HOME `x` \\\\ \\n" }]); }
  catch (error) { return [error.field, error.message]; }"""


def test_settings_become_fields_and_what_is_left_empty_is_not_sent(page: Page) -> None:
    plain = call(page, "chat-request.js", BODY, {})
    assert set(plain) == {"model", "messages", "stream", "stream_options"}
    body = call(page, "chat-request.js", BODY, SETTINGS)
    assert body["temperature"] == 0.5 and body["top_k"] == 20 and body["n"] == 2 and body["typical_p"] == 0.9
    assert body["stop"] == ["END", "\n\n"] and (body["logprobs"], body["top_logprobs"]) == (True, 3)
    assert body["response_format"] == {
        "type": "json_schema",
        "json_schema": {"name": "answer", "schema": {"type": "object"}},
    }
    assert body["messages"][0] == {"role": "system", "content": SETTINGS["system"]}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"top_k": "1.5"}, "top_k"),
        ({"response_format": "json_schema", "schema": "{"}, "schema"),
        ({"response_format": "json_schema", "schema": "[]"}, "schema"),
        ({"tools": "{}"}, "tools"),
        ({"extra": "1"}, "extra"),
    ],
)
def test_settings_that_cannot_be_sent_are_told_by_field(page: Page, given: dict[str, str], field: str) -> None:
    found, message = call(page, "chat-request.js", BODY, given)
    assert found == field and len(message) > 10


def test_copied_curl_gives_the_shell_the_very_body(page: Page, tmp_path: Path) -> None:
    words = f"const body = await (async () => {{ {BODY} }})(); return [body, m.curlOf('http://h:1/x/', body, true)];"
    body, command = call(page, "chat-request.js", words, SETTINGS)
    (tmp_path / "curl").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    (tmp_path / "curl").chmod(0o755)
    done = subprocess.run(
        ["sh", "-c", command],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "OCTAVO_API_KEY": "k"},
        capture_output=True,
        check=True,
    )
    arguments = done.stdout.decode().split("\0")
    assert arguments[1] == "http://h:1/x/v1/chat/completions"
    assert "Authorization: Bearer k" in arguments
    assert json.loads(arguments[arguments.index("-d") + 1]) == body


def test_copied_python_is_python_and_names_the_very_fields(page: Page) -> None:
    words = f"const body = await (async () => {{ {BODY} }})(); return [body, m.pythonOf('http://h:1/', body, false)];"
    body, program = call(page, "chat-request.js", words, SETTINGS)
    calls = [node for node in ast.walk(ast.parse(program)) if isinstance(node, ast.Call) and len(node.keywords) > 3]
    given = {word.arg: ast.literal_eval(word.value) for word in calls[0].keywords}
    extra = given.pop("extra_body")
    assert {**given, **extra} == body
    assert set(extra) == {"top_k", "min_p", "typical_p"}, "what OpenAI's client has no name for"


def test_what_browsers_keep_is_checked_when_it_is_read(page: Page) -> None:
    words = """
      const odd = JSON.stringify({ id: "b", messages: [{ role: "system" }] });
      const kept = new Map([["octavo.chat.c.a", "{"], ["octavo.chat.c.b", odd], ["other", "x"]]);
      const storage = {
        get length() { return kept.size; }, key: (i) => [...kept.keys()][i],
        getItem: (key) => kept.get(key) ?? null, removeItem: (key) => kept.delete(key),
        setItem: (key, value) => {
          if (value.length > 3000) throw new DOMException("full", "QuotaExceededError");
          kept.set(key, value);
        },
      };
      const store = new m.Store(storage);
      const none = store.list().length;
      const one = m.newConversation({ temperature: "0.7" });
      const tokens = Array(300).fill({ t: "x", p: -1 });
      const answer = { content: "hi", reasoning: "", calls: [], tokens, finish: "stop", stats: null };
      const asked = { role: "user", content: "a title" };
      one.messages.push(asked, { role: "assistant", answers: [answer], from: 0, picked: 0 });
      const fits = store.save(one);
      const again = new m.Store(storage).list()[0];
      one.messages[0].content = "x".repeat(5000);
      const tooBig = store.save(one);
      const file = m.fileOf([again]);
      const read = m.readFile(file)[0];
      const files = ["{", "[]", "{}", JSON.stringify({ kind: "octavo-conversations", conversations: [1] })];
      const wrong = files.map((text) => {
        try { return m.readFile(text) && null; }
        catch (error) { return error.message; }
      });
      return {
        none, fits, tooBig, wrong, tokens: again.messages[1].answers[0].tokens.length, title: m.titleOf(again),
        temperature: again.settings.temperature, isNewId: read.id !== again.id,
        same: JSON.stringify(read.messages) === JSON.stringify(again.messages),
      };"""
    found = call(page, "chat-store.js", words)
    assert found["none"] == 0, "what cannot be read is passed over"
    assert found["fits"] is True and found["tokens"] == 0, "without room log-probabilities go first"
    assert found["tooBig"] is False
    assert (found["temperature"], found["title"], found["isNewId"], found["same"]) == ("0.7", "a title", True, True)
    assert all(found["wrong"]), found["wrong"]


def test_when_a_refused_request_is_sent_again(page: Page) -> None:
    words = """
      const { ServerError } = await import("./static/chat-answer.js");
      const delay = (more, attempt = 0) => m.retryDelay(new ServerError("x", { isFinal: false, ...more }), attempt);
      return [
        delay({ status: 429, retryAfterS: 3 }), delay({ status: 503 }, 2), delay({ status: 503, retryAfterS: 9999 }),
        delay({ status: 500 }), delay({ status: 429, isFinal: true }),
        delay({ status: 503 }, m.MAX_RETRIES),
        m.retryDelay(new Error("y"), 0),
      ];"""
    assert call(page, "chat-client.js", words) == [3, 4, None, None, None, None, None]


def test_no_module_of_the_page_makes_html_or_code_of_text_or_asks_another_server() -> None:
    banned = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|setTimeout\(\s*[\"'`]"
        r"|https?://(?!\S*\[)(?![\\^(])"
    )
    for path in sorted(STATIC.glob("chat*")):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.split("// ")[0] if path.suffix == ".js" else line
            assert not banned.search(code), f"{path.name}:{number}: {line}"
    page = (STATIC / "chat.html").read_text()
    assert "<script>" not in page and not re.search(r"\son\w+=|\sstyle=", page), "the policy forbids them"


def test_the_modules_are_small() -> None:
    for path in sorted(STATIC.glob("chat*.js")):
        assert path.read_text().count("\n") <= 400, path.name
    assert sum(len(path.read_bytes()) for path in STATIC.glob("chat*")) < 200_000
