"""The page at `/` in Chromium, with a scripted server."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from strobe.server.page import files
from tests.server.support.browser import Page
from tests.server.support.mock_page_server import (
    Gate,
    Json,
    MockServer,
    Reply,
    answer,
    refusal,
    step,
)
from tests.server.support.page_actions import (
    HELLO,
    IDLE,
    SORTED,
    THOUGHT,
    WIDE,
    WIDTH,
    ask,
    ask_and_wait,
    bars,
    contrast,
    figures,
    origins,
    rounds,
    run,
    visit,
)

pytestmark = pytest.mark.full

LIBRARIES = ("/katex.js", "/markdown-it.js", "/highlight.js")
"""Other projects' files."""

# ---- files ----


def test_page_files_exist_and_reference_only_this_server():
    served = files()
    assert served["/"][0] == "text/html; charset=utf-8"
    assert served["/page.css"][0].startswith("text/css")
    assert served["/page.js"][0].startswith("text/javascript")
    for path, (_, body) in served.items():
        text = body.decode()
        if path in LIBRARIES:
            assert "sourceMappingURL" not in text
            assert re.search("MIT License|BSD 3-Clause License", text), path
            continue
        assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/)\w[\w.-]*\.\w+/", text), path
        for name in re.findall(r"""(?:from "\./|href="|src=")([^"]+)""", text):
            assert f"/{name}" in served, f"{path} wants {name}"


def test_page_loads_without_errors_or_foreign_requests(chat: Page, mock: MockServer):
    mock.reply(answer(*SORTED))
    ask_and_wait(chat, "sort")
    assert chat.problems == []
    assert {f"{mock.url}{name}" for name in ("", "page.css", "page.js", "server_info")} <= {
        *chat.requests
    }
    assert [url for url in chat.requests if not url.startswith(mock.url)] == []
    assert chat.text("#model") == "strobe-demo · Strobe 0.1.0 · context 2,048"


def test_content_policy_blocks_inline_code_and_markup(chat: Page):
    assert chat.evaluate(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } })()"
    ) == ("TypeError")
    chat.evaluate("document.querySelector('main').setAttribute('style', 'display: none')")
    assert chat.evaluate("getComputedStyle(document.querySelector('main')).display") == "block"


# ---- one answer ----


def test_answer_streams_as_tokens_coloured_by_origin(chat: Page, mock: MockServer):
    gates = [Gate() for _ in range(4)]
    parts = [part for pair in zip(gates, SORTED, strict=True) for part in pair]
    mock.reply(answer(*parts))
    ask(chat, "Sort them")
    chat.until("document.querySelector('#stop').checkVisibility()")
    assert chat.texts(".message p") == ["Sort them"]
    assert chat.evaluate("document.querySelector('#prompt').value") == ""
    gates[0].open()
    chat.until("document.querySelectorAll('.answer .token').length == 1")
    assert origins(chat) == [["Sort", "own"]]
    assert bars(chat) == []  # the prefill verifies nothing
    gates[1].open()
    chat.until("document.querySelectorAll('.bar').length == 1")
    assert origins(chat)[1:] == [["ed", "accepted"], [": ", "accepted"], ["fig", "own"]]
    assert chat.text(".strip .mean") == "mean 3.0 in 1 step"
    gates[2].open()
    gates[3].open()
    chat.until(IDLE)
    assert "".join(chat.texts(".answer .token")) == "Sorted: fig, pear,\n  plum!"
    assert bars(chat) == [[2, 1, 16], [0, 1, 16], [2, 1, 16]]
    reported = figures(chat)
    assert float(reported.pop("tokens/s").replace(",", "")) > 0
    assert re.fullmatch(r"[\d.,]+ ms", reported.pop("first token"))
    assert reported == {
        "acceptance length": "2.3",
        "verify steps": "3",
        "tokens": "8",
        "method": "dflash",
    }
    assert chat.problems == []


def test_origins_differ_without_colour(chat: Page, mock: MockServer):
    mock.reply(answer(*SORTED))
    ask_and_wait(chat, "sort")
    style = "getComputedStyle(document.querySelector('.answer .token.%s')).textDecorationLine"
    assert chat.evaluate(style % "own") == "underline"
    assert chat.evaluate(style % "accepted") == "none"
    legend = chat.texts(".legend .token")
    assert len(legend) == 4


def test_rejected_drafts_are_struck_through_at_their_place(chat: Page, mock: MockServer):
    first = step(("ed", True), (":", False), rejected=[" by", "\n"], confidence=[0.995, 0.4, 0.7])
    mock.reply(answer(SORTED[0], first, step((" fig", False), rejected=["."], confidence=[])))
    ask_and_wait(chat, "sort")
    assert chat.texts(".answer .tokens > div > *") == ["Sort", "ed", "by", ":", ".", " fig"]
    assert chat.texts(".answer del") == ["by", "."]
    strike = "getComputedStyle(document.querySelector('.answer del')).textDecorationLine"
    assert chat.evaluate(strike) == "line-through"
    assert chat.evaluate("document.querySelector('.answer .accepted').classList[2]") == "sure-3"
    shades = "[...document.querySelectorAll('.answer del span')].map(({ className }) => className)"
    assert chat.evaluate(shades) == ["sure-0", ""]
    chat.click(".answer .accepted")
    assert "ed drafted and accepted, confidence 99 %" in chat.text("#token-note")
    assert chat.text("#token-note").endswith("Rejected: ␣by↵")
    chat.click(".answer del")
    assert chat.text("#token-note") == "Step 1: 1 of 15 drafts accepted. Rejected: ␣by↵"
    assert [text for text in chat.texts(".token.lit") if text] == ["ed", ":"]


def test_steps_without_drafts_fold_into_one_mark(chat: Page, mock: MockServer):
    plain = [step((f" {n}", False), drafted=0) for n in range(12)]
    mock.reply(answer(*SORTED[:2], *plain, SORTED[3]))
    ask_and_wait(chat, "count")
    assert chat.texts(".strip .bars > :is(.bar, .plain)") == ["", "12", ""]
    assert chat.text(".strip .mean") == "mean 3.0 in 2 steps, and 12 without drafts"
    chat.click(".strip .plain")
    assert chat.text("#token-note") == "Steps 2 to 13: nothing was drafted."
    assert len(chat.texts(".token.lit")) == 12


def test_answer_without_drafts_has_no_strip(chat: Page, mock: MockServer):
    mock.reply(answer(*[step((word, False), drafted=0) for word in ("a", "b", "c")]))
    ask_and_wait(chat, "go")
    assert not chat.evaluate("document.querySelector('.strip').checkVisibility()")


def test_markup_in_token_or_prompt_stays_text(chat: Page, mock: MockServer):
    evil = "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
    mock.reply(answer(step((evil, False), drafted=0), step(("<b>", True), ("&amp;", False))))
    ask_and_wait(chat, evil)
    assert chat.texts(".answer .token") == [evil, "<b>", "&amp;"]
    assert chat.texts(".message p") == [evil]
    assert chat.evaluate("document.querySelectorAll('#log :is(script, img, b)').length") == 0
    assert chat.evaluate("window.hit") is None


def test_thinking_is_separate_and_folds_after_streaming(chat: Page, mock: MockServer):
    gate = Gate()
    mock.reply(answer(*THOUGHT[:2], gate, *THOUGHT[2:]))
    ask(chat, "think")
    chat.until("document.querySelectorAll('.bar').length == 1")
    assert chat.evaluate("document.querySelector('.thinking').open")
    assert chat.texts(".thinking .token") == ["<think>", "\n", "Hm", ","]
    gate.open()
    chat.until(IDLE)
    assert not chat.evaluate("document.querySelector('.thinking').open")
    assert chat.text(".thinking summary") == "Thought for 8 tokens"
    assert "".join(chat.texts(".thinking .token")) == "<think>\nHm, t\n</think>\n\n"
    assert chat.texts(".parts > .tokens .token") == ["t", " is", " <", " 5", "."]
    markers = [text for text in chat.texts(".token.marker") if text.strip()]
    assert markers == ["<think>", "</think>"]
    mock.reply(answer(HELLO))
    ask_and_wait(chat, "go on")
    assert mock.received[1]["messages"][1] == {"role": "assistant", "content": "t is < 5."}


def test_tool_call_is_readable_and_result_is_sent_back(chat: Page, mock: MockServer):
    def call(**function: str) -> list[Json]:
        named = {"id": "call_7", "type": "function"} if "name" in function else {}
        return [{"index": 0, "function": function, **named}]

    mock.reply(
        answer(
            step(("<think>", False), drafted=0, calls=[]),
            step(("\n", True), ("Ask.", False), thinking="Ask."),
            step(("\n", True), ("</think>", True), ("\n\n", True), ("<tool_call>", True),
                 ('{"name": "get_weather", ', False), calls=call(name="get_weather", arguments="")),
            step(('"arguments": {"city": ', True), ('"Oslo"', False), calls=call(arguments='{"ci')),
            step(("}}</tool_call>", False), calls=call(arguments='ty": "Oslo"}')),
        )
    )  # fmt: skip
    ask_and_wait(chat, "How is Oslo?")
    assert chat.texts(".call .readable b") == ["get_weather"]
    assert chat.texts(".call .readable :is(dt, dd)") == ["city", "Oslo"]
    raw = '<tool_call>{"name": "get_weather", "arguments": {"city": "Oslo"}}</tool_call>'
    assert "".join(chat.texts(".call .token")) == raw
    assert "".join(chat.texts(".thinking .token")) == "<think>\nAsk.\n</think>\n\n"
    assert chat.text("#prompt-label") == "Result of get_weather"
    mock.reply(answer(step(("Cold.", False), drafted=0)))
    ask_and_wait(chat, '{"degrees": 3}')
    sent_call, result = mock.received[1]["messages"][1:]
    called = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert sent_call["tool_calls"] == [{"id": "call_7", "type": "function", "function": called}]
    assert result["role"] == "tool"
    assert result["tool_call_id"] == "call_7"
    assert result["content"] == '{"degrees": 3}'
    assert "get_weather" not in chat.evaluate("document.querySelector('#prompt').placeholder")


def test_answer_cut_by_limit_is_marked(chat: Page, mock: MockServer):
    mock.reply(answer(THOUGHT[0], step(("So", False), thinking="So", finish="length")))
    ask_and_wait(chat, "think")
    assert chat.texts(".notes .note") == ["Stopped at 2 tokens, its limit."]
    assert chat.text(".thinking summary") == "Thought for 2 tokens"
    assert chat.evaluate("document.querySelector('.thinking').open")  # nothing follows it


def test_stream_without_steps_shows_text(chat: Page, mock: MockServer):
    deltas = [{"role": "assistant"}, {"reasoning_content": "Hm."}, {"content": "Yes"}]
    parts = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    mock.reply(Reply(parts))
    ask_and_wait(chat, "well?")
    assert origins(chat) == [["Hm.", "unknown"], ["Yes", "unknown"]]
    assert chat.texts(".thinking .token") == ["Hm."]
    assert chat.texts(".strip .bar") == []
    assert chat.problems == []


def test_events_cut_at_any_byte_are_parsed(chat: Page):
    chat.evaluate(
        r"""(() => {
          const event = (text) => "data: " + JSON.stringify({choices: [{delta: {content: text},
            step: {tokens: [[text, false]], drafted: 0, accepted: 0}}]}) + "\r\n\r\n";
          const text = ": a comment\n\n" + event("é€") + event("\u{1F600}\n") + "data: [DONE]\n\n";
          const bytes = new TextEncoder().encode(text);
          window.fetch = async () => new Response(new ReadableStream({start(controller) {
            for (const byte of bytes) controller.enqueue(new Uint8Array([byte]));
            controller.close();
          }}));
        })()"""
    )
    ask_and_wait(chat, "é")
    assert chat.texts(".answer .token") == ["é€", "\U0001f600\n"]
    assert chat.problems == []


# ---- conversations ----


def test_conversation_is_sent_and_new_chat_clears_it(chat: Page, mock: MockServer):
    mock.reply(answer(*SORTED), answer(HELLO), answer(HELLO))
    ask_and_wait(chat, "one")
    ask_and_wait(chat, "two")
    assert mock.received[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Sorted: fig, pear,\n  plum!"},
        {"role": "user", "content": "two"},
    ]
    chat.click("#new-chat")
    assert chat.texts(".turn") == []
    assert chat.evaluate("document.querySelector('#welcome').checkVisibility()")
    ask_and_wait(chat, "three")
    assert mock.received[2]["messages"] == [{"role": "user", "content": "three"}]


@pytest.mark.parametrize("way", ["button", "Escape", "new chat"])
def test_stopping_disconnects_from_the_server(way: str, chat: Page, mock: MockServer):
    reply = Reply([HELLO, Gate()])
    mock.reply(reply, answer(HELLO))
    ask(chat, "long")
    chat.until("document.querySelector('.answer .token')")
    if way == "Escape":
        chat.press("Escape")
    else:
        chat.click("#stop" if way == "button" else "#new-chat")
    assert reply.gone.wait(10)
    chat.until(IDLE)
    assert chat.texts(".notes .note") == ([] if way == "new chat" else ["Stopped."])
    ask_and_wait(chat, "next")
    before = [] if way == "new chat" else ["long", "Hel"]
    assert [m["content"] for m in mock.received[1]["messages"]] == [*before, "next"]
    assert chat.problems == []


ERRORS = {
    "refused": (refusal(400, "top_p is 7."), "top_p is 7."),
    "busy": (refusal(429, "It is full.", **{"retry-after": "3"}), "It is full. Try again in 3 s."),
    "no words": (
        Reply(status=502, body="oops"),
        "The server answered with HTTP status 502 and no explanation.",
    ),
    "in the stream": (Reply([{"error": {"message": "It has died."}}]), "It has died."),
    "cut": (
        Reply([{"choices": []}], complete=False),
        "The connection ended before the answer was complete.",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_error_is_shown_and_message_restored(case: str, chat: Page, mock: MockServer):
    reply, sentence = ERRORS[case]
    mock.reply(reply, answer(HELLO))
    ask_and_wait(chat, "try")
    assert chat.texts(".notes .error[role=alert]") == [sentence]
    assert chat.evaluate("document.querySelector('#prompt').value") == "try"
    chat.press("Enter")
    chat.until(f"document.querySelector('.answer .token') && {IDLE}")
    assert mock.received[1]["messages"] == [{"role": "user", "content": "try"}]
    assert len(chat.texts(".turn")) == 1


def test_unreachable_server_is_reported(page: Page):
    server = MockServer()
    visit(page, server.url)
    server.close()
    ask_and_wait(page, "anyone?")
    assert page.text("#server-note") == "The server cannot be reached. Is it still running?"
    assert page.texts(".notes p") == []  # it is told once
    assert "reached" not in page.text("#live")
    assert page.evaluate("document.querySelector('#prompt').value") == "anyone?"


def test_server_that_dies_is_told_once_and_covers_no_answer(page: Page):
    server = MockServer()
    server.reply(Reply([HELLO, Gate()]))
    visit(page, server.url)
    ask(page, "long")
    page.until("document.querySelector('.answer .token')")
    server.close()
    page.until(f"{IDLE} && !document.querySelector('#server-note').hidden")
    sentence = "The server cannot be reached. Is it still running?"
    assert page.evaluate("document.body.innerText").count("server") == 1
    assert page.text("#server-note") == sentence
    assert page.texts(".notes p") == ["The answer was cut off."]
    low, high = page.evaluate(
        "['.answer', '#server-note'].map((name) => document.querySelector(name))"
        ".map((one, i) => one.getBoundingClientRect()[i ? 'top' : 'bottom'])"
    )
    assert low <= high


def test_page_waits_for_a_starting_server(page: Page, mock: MockServer):
    mock.state = {"problem": "The engine is still starting."}
    visit(page, mock.url)
    assert page.text("#server-note") == "The engine is still starting."
    mock.state = {"problem": None}
    page.until("document.title == 'strobe-demo · Strobe'")
    assert not page.evaluate("document.querySelector('#server-note').checkVisibility()")


def test_key_is_prompted_sent_and_kept_per_tab(page: Page, mock: MockServer):
    mock.api_key = "sesame"
    visit(page, mock.url)
    assert "requires an API key" in page.text("#server-note")
    ask_and_wait(page, "hello")
    assert page.texts(".notes .error") == [
        "This server requires an API key. Enter it in the settings."
    ]
    page.click(".notes button")
    assert page.evaluate("document.activeElement.name") == "key"
    page.type("wrong")
    page.press("Enter")
    page.until("document.querySelector('#server-note').textContent.includes('not accept')")
    page.click("#server-note button")
    page.evaluate("document.querySelector('[name=key]').value = ''")
    page.type("sesame")
    page.press("Enter")
    page.until("document.querySelector('#model').textContent.startsWith('strobe-demo')")
    assert not page.evaluate("document.querySelector('#server-note').checkVisibility()")
    mock.reply(answer(HELLO))
    ask_and_wait(page, "")
    assert mock.keys[-1] == "Bearer sesame"
    assert "sesame" not in page.evaluate("JSON.stringify({...localStorage}) + document.cookie")
    assert "sesame" in page.evaluate("JSON.stringify({...sessionStorage})")
    assert "sesame" not in str(mock.received) + str(page.requests)


# ---- comparing ----


@pytest.mark.parametrize(
    ("last", "words"),
    [("four", "The texts are identical."), ("five", "The texts differ from token 4 on.")],
)
def test_compare_sends_two_requests_and_shows_difference(
    last: str, words: str, chat: Page, mock: MockServer
):
    gate = Gate()
    off = run("one ", "two ", "three ", "four", drafted=0, seconds=0.3)
    off.parts = [*off.parts[:2], gate, *off.parts[2:]]
    more = rounds([0.3, 0.3], [0.03, 0.03])
    mock.reply(off, run("one ", "two ", "three ", last, drafted=15, seconds=0.03), *more)
    ask(chat, "count", "#compare")
    chat.until("document.querySelectorAll('.answer .token').length == 2")
    assert chat.texts(".answer h3") == ["Speculation off", "Speculation on"]
    assert len(mock.received) == 1  # one runs after the other
    gate.open()
    chat.until("document.querySelector('.verdict')")
    sent = list(mock.received)
    assert [body.pop("speculation") for body in sent] == [False, {"return_drafts": True}] * 3
    plain = sent[0]
    assert sent == [plain] * 6
    assert isinstance(plain["seed"], int)
    first, second = ".answer:nth-child(1)", ".answer:nth-child(2)"
    assert [kind for _, kind in origins(chat, first)] == ["own"] * 4
    assert [kind for _, kind in origins(chat, second)] == ["own", "accepted", "accepted", "own"]
    assert figures(chat, first)["speculation"] == "off"
    assert figures(chat, second)["method"] == "dflash"
    assert figures(chat, first)["tokens/s"] == "10"
    assert figures(chat, second)["tokens/s"] == "100"
    assert chat.text(".verdict").startswith(
        "10\u00d7 as fast with speculation. 10 and 100 tokens/s, "
    )
    assert len(chat.texts(".answer")) == 2  # further rounds are not shown
    assert words in chat.text(".verdict")
    left, right = chat.evaluate(
        "[...document.querySelectorAll('.answer')].map((e) => e.getBoundingClientRect().x)"
    )
    assert left < right
    mock.reply(answer(HELLO))
    ask_and_wait(chat, "more")
    assert mock.received[6]["messages"][1]["content"] == f"one two three {last}"


@pytest.mark.parametrize(
    ("off", "on", "words"),
    [
        ((0.3, 3.0, 0.2), (0.02, 0.03, 0.06), "10\u00d7 as fast with speculation. 10 and 100 "
         "tokens/s, medians of 3 runs each. The texts are"),
        ((0.3, 0.2, 0.6), (0.25, 0.2, 0.1), "The difference in speed is noise: 5 to 15 tokens/s "
         "without and 12 to 30 with speculation. The texts are"),
        ((0.1, 0.1, 0.2), (0.3, 0.3, 0.3), "0.3\u00d7 as fast with speculation. "),
    ],
)  # fmt: skip
def test_compare_shows_median_or_noise(
    off: Sequence[float], on: Sequence[float], words: str, chat: Page, mock: MockServer
):
    mock.reply(*rounds(off, on))
    ask(chat, "count", "#compare")
    chat.until("document.querySelector('.verdict')")
    assert chat.text(".verdict").startswith(words)
    assert chat.text(".verdict small").endswith("by the engine\u2019s clock.")


def test_rate_uses_the_engine_clock(chat: Page, mock: MockServer):
    """All chunks arrive at once."""
    mock.reply(answer(*SORTED, seconds=0.07))
    ask_and_wait(chat, "sort")
    assert figures(chat)["tokens/s"] == "100"


def test_compare_without_input_repeats_last_prompt(chat: Page, mock: MockServer):
    mock.reply(answer(*SORTED), run("a", "b", drafted=0), run("a", "b", drafted=15))
    chat.click("#compare")
    assert chat.text("#status") == "Type a message first."
    ask_and_wait(chat, "sort")
    chat.click("#compare")
    chat.until("document.querySelector('.verdict')")
    for body in mock.received:
        assert body["messages"] == [{"role": "user", "content": "sort"}]
    assert chat.text(".verdict small").endswith("as seen in this browser.")


def test_compare_says_why_the_server_did_not_speculate(chat: Page, mock: MockServer):
    plain = [step(("a", False), drafted=0), step(("b", False), drafted=0)]
    mock.reply(answer(*plain), answer(*plain, off_reason="no drafter is loaded"))
    ask(chat, "x", "#compare")
    chat.until("document.querySelector('.verdict')")
    assert chat.text(".verdict").startswith("The server did not speculate: no drafter is loaded.")
    assert "as fast" not in chat.text(".verdict")
    reported = figures(chat, ".answer:nth-child(2)")
    assert reported["speculation"] == "off, because no drafter is loaded"


def test_drafting_that_rested_is_not_called_off(chat: Page, mock: MockServer):
    plain = [step(("a", False), drafted=0), step(("b", False), drafted=0)]
    mock.reply(answer(*plain), answer(*plain, off_reason="it cost too much", rested=True))
    ask(chat, "x", "#compare")
    chat.until("document.querySelector('.verdict')")
    assert chat.text(".verdict").startswith("Drafting rested: it cost too much.")
    reported = figures(chat, ".answer:nth-child(2)")
    assert reported["drafting"] == "rested, because it cost too much"
    assert "speculation" not in reported


def test_compare_draws_its_progress_and_the_ranges(chat: Page, mock: MockServer):
    replies = rounds([0.3, 0.6, 0.3], [0.03, 0.03, 0.06])
    gate = Gate()
    replies[2].parts = [replies[2].parts[0], gate, *replies[2].parts[1:]]
    mock.reply(*replies)
    ask(chat, "count", "#compare")
    chat.until("document.querySelector('.progress span')?.textContent.startsWith('Run 2 of 3')")
    assert chat.text(".progress span") == "Run 2 of 3, speculation off"
    assert chat.evaluate("document.querySelector('progress').value") == pytest.approx(1.125 / 3)
    gate.open()
    chat.until("document.querySelector('.verdict')")
    assert chat.texts(".progress") == []
    ranges = chat.evaluate(
        "[...document.querySelectorAll('.whisker')].map((one) => "
        "['--from', '--to'].map((name) => +one.style.getPropertyValue(name)))"
    )
    assert ranges == [pytest.approx([0.5, 1]), pytest.approx([0.05, 0.1])]
    assert chat.texts(".race dd") == ["0.40 s (0.40 to 0.80)", "0.04 s (0.04 to 0.08)"]


def test_stopped_comparison_shows_no_result(chat: Page, mock: MockServer):
    reply = Reply([HELLO, Gate()])
    mock.reply(reply)
    ask(chat, "x", "#compare")
    chat.until("document.querySelector('.answer .token')")
    chat.press("Escape")
    assert reply.gone.wait(10)
    chat.until(f"document.querySelector('.verdict') && {IDLE}")
    assert chat.text(".verdict") == "No comparison: not both answers were completed."
    assert len(mock.received) == 1


# ---- settings and examples ----


def test_settings_reach_the_request_and_survive_a_reload(chat: Page, mock: MockServer):
    mock.reply(answer(HELLO), answer(HELLO))
    ask_and_wait(chat, "plain")
    chat.click("#open-settings")
    for name, text in {"system": "Be brief.", "temperature": "0.5", "max_tokens": "40", "seed": "7",
                       "tools": '[{"type": "function"}]'}.items():  # fmt: skip
        chat.evaluate(f"document.querySelector('[name={name}]').focus()")
        chat.type(text)
    chat.click("[name=thinking]")
    chat.evaluate(
        """(() => { const field = document.querySelector('[name=speculation]');
        field.value = "off"; field.dispatchEvent(new Event("input", {bubbles: true})); })()"""
    )
    chat.press("Escape")
    visit(chat, mock.url)
    assert chat.text("#in-effect").startswith("thinking off · speculation off · temperature 0.5")
    ask_and_wait(chat, "set")
    plain, configured = mock.received
    assert isinstance(plain.pop("seed"), int)
    common = {
        "model": "strobe-demo",
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_speculation": True,
    }
    assert plain == common | {
        "messages": [{"role": "user", "content": "plain"}],
        "speculation": {"return_drafts": True},
        "chat_template_kwargs": {"enable_thinking": True},
    }
    assert configured == common | {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "set"},
        ],
        "speculation": False,
        "chat_template_kwargs": {"enable_thinking": False},
        "temperature": 0.5,
        "max_tokens": 40,
        "seed": 7,
        "tools": [{"type": "function"}],
    }


@pytest.mark.parametrize(("name", "text"), [("temperature", "-1"), ("tools", "{}")])
def test_invalid_setting_is_shown_and_not_sent(name: str, text: str, chat: Page, mock: MockServer):
    chat.evaluate(f"document.querySelector('[name={name}]').value = {text!r}")
    ask(chat, "x")
    chat.until("document.querySelector('#settings').open")
    assert chat.evaluate("document.activeElement.name") == name
    assert chat.evaluate("document.activeElement.validationMessage")
    assert mock.received == []


def test_examples_suit_the_served_model(page: Page, mock: MockServer):
    note = "document.querySelector('#demo-note').checkVisibility()"
    visit(page, mock.url)
    assert page.evaluate(note)
    assert "a click fills in the message" in page.text("#examples h3")
    page.click("#examples li:last-child button")
    assert "weather" in page.evaluate("document.querySelector('#prompt').value")
    assert page.text("#in-effect").endswith("tools: get_weather")
    page.click("#examples li:first-child button")
    assert "tools" not in page.text("#in-effect")
    mock.model = "Qwen/Qwen3-8B"
    visit(page, mock.url)
    assert not page.evaluate(note)
    page.click("#examples li:first-child button")
    assert page.evaluate("document.querySelector('#prompt').value").endswith("of France?")
    assert page.text("#in-effect").startswith("thinking off")


# ---- keyboard, screen readers, phones ----


def test_page_works_with_the_keyboard_alone(chat: Page, mock: MockServer):
    focus = "document.activeElement.id || document.activeElement.className"
    mock.reply(answer(*SORTED))
    assert chat.evaluate(focus) == "prompt"
    chat.type("one")
    chat.press("Enter", shift=True)
    chat.type("two")
    assert mock.received == []
    chat.press("Enter")
    chat.until(f"document.querySelector('.answer') && {IDLE}")
    assert mock.received[0]["messages"][0]["content"] == "one\ntwo"
    assert chat.evaluate(focus) == "prompt"
    seen: list[str] = []
    for _ in range(9):
        chat.press("Tab", shift=True)
        seen.append(chat.evaluate(focus))
        if seen[-1] == "token own lit":
            break
    assert seen == ["quiet"] * 4 + ["token own lit"]  # one tab stop for all tokens
    assert "Sort the first token" in chat.text("#token-note")
    chat.press("ArrowRight")
    chat.press("ArrowRight")
    assert chat.evaluate("document.activeElement.textContent") == ": "
    assert ":␣ drafted and accepted" in chat.text("#token-note")
    assert "Step 1: 2 of 15 drafts accepted." in chat.text("#token-note")
    assert chat.texts(".lit") == ["ed", ": ", "fig", ""]  # the step, and its bar
    chat.press("ArrowDown")
    assert chat.evaluate("document.activeElement.textContent") == ", pear"
    chat.press("End")
    assert "! the target\u2019s own" in chat.text("#token-note")
    outline = chat.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    chat.press("Escape")
    assert not chat.evaluate("document.querySelector('#token-note').checkVisibility()")
    order: list[str] = []
    for _ in range(8):
        chat.press("Tab")
        order.append(chat.evaluate(focus))
    assert order == ["quiet"] * 4 + ["prompt", "attach", "compare", "send"]


def test_pointer_shows_token_and_step(chat: Page, mock: MockServer):
    mock.reply(answer(*SORTED))
    ask_and_wait(chat, "sort")
    chat.click(".answer .token.accepted")
    assert "ed drafted and accepted" in chat.text("#token-note")
    chat.click(".bar:last-child")
    assert chat.text("#token-note") == "Step 3: 2 of 15 drafts accepted."
    assert chat.texts(".token.lit") == [",\n  ", "plum", "!"]


def test_screen_reader_is_notified(chat: Page, mock: MockServer):
    gate = Gate()
    mock.reply(answer(SORTED[0], gate, *SORTED[1:]))
    ask(chat, "sort")
    chat.until("document.querySelector('.answer .token')")
    assert chat.text("#status") == "Answering …"
    assert chat.evaluate("document.querySelector('#log').ariaBusy") == "true"
    gate.open()
    chat.until(IDLE)
    assert chat.texts("#status") == ["Sorted: fig, pear,\n  plum! 8 tokens."]
    assert chat.evaluate("document.querySelector('#log').ariaBusy") == "false"
    chat.click("#open-settings")
    for selector, name in {
        "#settings": "Settings", "[name=temperature]": "Temperature", "[name=key]": "API key",
    }.items():  # fmt: skip
        assert chat.has_name(selector, name)
    chat.press("Escape")
    for selector, name in {
        "#prompt": "Message", "#send": "Send", ".bars": "Tokens per step: mean 2.3 in 3 steps",
    }.items():  # fmt: skip
        assert chat.has_name(selector, name)


def test_phone_layout_fits_and_keeps_the_input_visible(page: Page, mock: MockServer):
    page.resize(WIDTH, 740, phone=True)
    visit(page, mock.url)
    assert page.evaluate(WIDE) == WIDTH
    long = step(("x" * 300, False), drafted=0)
    many = [step(("word ", False)) for _ in range(200)]
    mock.reply(answer(long, *many), answer(long, *many))
    page.evaluate("document.querySelector('#prompt').focus()")
    page.type("y" * 300)
    page.tap("#compare")
    assert page.evaluate("document.activeElement.id") != "prompt"  # no on-screen keyboard
    page.until("document.querySelector('.verdict')")
    assert page.evaluate(WIDE) == WIDTH
    tops = page.evaluate(
        "[...document.querySelectorAll('.answer')].map((e) => e.getBoundingClientRect().top)"
    )
    assert tops[0] < tops[1]  # stacked
    for place in (0, 1e6):
        page.evaluate(f"scrollTo(0, {place})")
        box = page.evaluate("document.querySelector('#prompt').getBoundingClientRect().toJSON()")
        assert 0 < box["top"] < box["bottom"] < 740
    page.click("#open-settings")
    assert page.evaluate("document.querySelector('#settings').scrollWidth") <= WIDTH
    assert page.evaluate(WIDE) == WIDTH


def test_page_follows_the_answer_until_the_reader_scrolls_up(chat: Page, mock: MockServer):
    gates = [Gate(), Gate()]
    lines = [step((f"line {n}\n", False)) for n in range(60)]
    mock.reply(answer(*lines[:40], gates[0], *lines[40:50], gates[1], *lines[50:]))
    ask(chat, "much")
    place = "document.documentElement.scrollHeight - innerHeight - scrollY"
    chat.until(f"document.querySelectorAll('.bar').length == 40 && scrollY > 0 && {place} < 2")
    gates[0].open()
    chat.until(f"document.querySelectorAll('.bar').length == 50 && {place} < 2")
    chat.evaluate("scrollTo(0, 0), new Promise((done) => addEventListener('scroll', done))")
    gates[1].open()
    chat.until(IDLE)
    chat.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert chat.evaluate("scrollY") == 0


def test_page_works_with_a_real_server(page: Page, page_server: str):
    """End to end, with the demo models."""
    visit(page, page_server)
    page.click("#examples li:nth-child(4) button")  # code: short, and without thinking
    ask_and_wait(page, "")
    assert "def longest(message):" in "".join(page.texts(".answer .token"))
    assert {origin for _, origin in origins(page)} == {"own", "accepted"}
    reported = figures(page)
    assert reported["method"] == "dflash"
    assert int(reported["verify steps"]) == len(bars(page))
    page.click("#compare")
    page.until("document.querySelector('.verdict')")
    assert "The texts are identical." in page.text(".verdict")
    assert page.problems == []
    assert [url for url in page.requests if not url.startswith(page_server)] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_have_enough_contrast(scheme: str, chat: Page, mock: MockServer):
    chat.prefer(scheme=scheme)
    mock.reply(answer(*SORTED))
    ask_and_wait(chat, "sort")
    for name in ("own", "accepted"):
        ink, paper = chat.evaluate(
            f"""(({{color, backgroundColor}}) => [color, backgroundColor])(
              getComputedStyle(document.querySelector('.answer .token.{name}')))"""
        )
        assert contrast(ink, paper) >= 7, (name, ink, paper)
