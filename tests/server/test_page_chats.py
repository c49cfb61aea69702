"""The page's conversations, in a browser with a scripted server: kept, branched, continued."""

from __future__ import annotations

import json

import pytest

from tests.server.support.browser import Page
from tests.server.support.mock_page_server import Gate, Json, MockServer, answer, refusal, step
from tests.server.support.page_actions import (
    HELLO,
    IDLE,
    SORTED,
    ask,
    ask_and_wait,
    figures,
    origins,
    show,
    visit,
)

pytestmark = pytest.mark.full

SAID = ".message p"
ANSWERED = ".reading > .prose"


def say(text: str, finish: str | None = "stop") -> Json:
    return step((text, False), drafted=0, finish=finish)


def press(page: Page, label: str, turn: int = -1) -> None:
    """Press a button of a turn, by its label."""
    page.evaluate(
        f"""[...[...document.querySelectorAll(".turn")].at({turn}).querySelectorAll("button")]
        .find((one) => (one.ariaLabel ?? one.textContent) == {json.dumps(label)}).click()"""
    )


def wait(page: Page) -> None:
    """Wait until the answers are complete and stored."""
    page.until(f"{IDLE} && (innerWidth < 1100 || document.querySelector('[aria-current=true]'))")


def give_file(page: Page, selector: str, name: str, content: str) -> None:
    """Choose a file in a file field, as a user would."""
    page.evaluate(
        f"""(() => {{
          const files = new DataTransfer();
          files.items.add(new File([{json.dumps(content)}], {json.dumps(name)}));
          const field = document.querySelector({json.dumps(selector)});
          field.files = files.files;
          field.dispatchEvent(new Event("change", {{bubbles: true}}));
        }})()"""
    )


def saved(page: Page, label: str) -> str:
    """Press a button of the menu of the first conversation and return the file that it saves."""
    page.evaluate("URL.createObjectURL = (blob) => ((window.saved = blob.text()), 'blob:x'), 0")
    page.evaluate("HTMLAnchorElement.prototype.click = function () {}, 0")
    page.click("#conversations .more")
    choose(page, label)
    return page.evaluate("window.saved")


def choose(page: Page, label: str) -> None:
    page.evaluate(
        "[...document.querySelectorAll('#menu button')]"
        f".find((one) => one.textContent == {json.dumps(label)}).click()"
    )


@pytest.fixture
def wide(page: Page, mock: MockServer) -> Page:
    """A page that is wide enough for the list of conversations."""
    page.resize(1400, 800)
    return visit(page, mock.url, "reading")


# ---- kept ----


def test_conversation_is_kept_and_opened_again(wide: Page, mock: MockServer):
    mock.reply(answer(*SORTED, seconds=0.07), answer(HELLO))
    ask_and_wait(wide, "Sort **these**")
    wait(wide)
    assert wide.texts("#conversations li li > :first-child") == ["Sort **these**"]
    assert "#" in wide.evaluate("location.href")
    wide.reload()
    wide.until("document.querySelector('.answer')")
    assert wide.texts(SAID) == ["Sort **these**"]
    wide.until(f"document.querySelector('{ANSWERED}')?.textContent.endsWith('plum!')")
    assert wide.evaluate("document.querySelector('[aria-current=true]').textContent")
    show(wide, "tokens")
    assert [kind for _, kind in origins(wide)].count("accepted") == 4
    assert figures(wide)["tokens/s"] == "100"
    ask_and_wait(wide, "go on")
    assert [m["content"] for m in mock.received[1]["messages"]] == [
        "Sort **these**", "Sorted: fig, pear,\n  plum!", "go on",
    ]  # fmt: skip
    assert wide.problems == []


def test_conversations_are_searched_renamed_and_deleted(wide: Page, mock: MockServer):
    names = "#conversations li li > :first-child"
    for prompt, reply in (("one", "An apple."), ("two", "A pear.")):
        mock.reply(answer(say(reply)))
        ask_and_wait(wide, prompt)
        wait(wide)
        wide.click("#new-chat")
    assert wide.texts(names) == ["two", "one"]
    wide.click("#search")
    wide.type("APPLE an")
    assert wide.texts(names) == ["one"]
    wide.click(names)
    assert wide.texts(SAID) == ["one"]
    wide.click("#conversations .more")
    choose(wide, "Rename")
    wide.type("Fruit with an apple")
    wide.press("Enter")
    wide.until(f"document.querySelector('{names}').textContent == 'Fruit with an apple'")
    wide.click("#conversations .more")
    choose(wide, "Delete")
    wide.until("document.querySelector('#no-conversations').textContent")
    assert wide.texts(".turn") == []
    assert wide.text("#sidebar-note") == "Deleted “Fruit with an apple”. Undo"
    wide.click("#sidebar-note button")
    wide.until(f"document.querySelector('{names}')")
    wide.reload()
    wide.until(f"document.querySelectorAll('{names}').length == 2")
    assert wide.texts(names) == ["two", "Fruit with an apple"]


def test_list_names_days_and_pins(wide: Page, mock: MockServer):
    for prompt in ("one", "two"):
        mock.reply(answer(HELLO))
        ask_and_wait(wide, prompt)
        wait(wide)
        wide.click("#new-chat")
    assert wide.texts("#conversations h2") == ["Today"]
    wide.click("#conversations li li:last-child .more")
    choose(wide, "Pin")
    wide.until("document.querySelector('#conversations h2').textContent == 'Pinned'")
    assert wide.texts("#conversations > li") == ["Pinnedone⋯", "Todaytwo⋯"]
    wide.reload()
    wide.until("document.querySelectorAll('#conversations h2').length == 2")
    wide.click("#conversations .more")
    choose(wide, "Unpin")
    wide.until("document.querySelectorAll('#conversations h2').length == 1")
    now = "Date.UTC(2026, 10, 27, 12)"
    days = wide.evaluate(
        f"""import("./sidebar.js").then(({{ dayOf }}) => [0, 1, 3, 20, 40]
        .map((days) => dayOf({now} - days * 86400000, {now})))"""
    )
    assert days == ["Today", "Yesterday", "Tuesday", "7 November", "October 2026"]


def test_list_is_the_same_in_two_tabs(wide: Page, mock: MockServer):
    """The other tab is a frame, since browsers draw only one tab at a time."""
    wide.evaluate(
        "document.body.append(Object.assign(document.createElement('iframe'), {src: '/'})), 0"
    )
    other = "frames[0].document"
    wide.until(f"{other}.title == 'strobe-demo · Strobe'")
    mock.reply(answer(say("a")), answer(say("b")), answer(say("c")))
    ask_and_wait(wide, "one")
    wait(wide)
    wide.until(f"{other}.querySelector('#conversations li li')")
    wide.evaluate(f"{other}.querySelector('#conversations li li button').click()")
    wide.evaluate(f"{other}.querySelector('#prompt').value = 'two'")
    wide.evaluate(f"{other}.querySelector('#send').click()")
    wide.until("document.querySelectorAll('.turn').length == 2")
    assert wide.texts(SAID) == ["one", "two"]
    ask_and_wait(wide, "three")
    assert [m["content"] for m in mock.received[2]["messages"]] == ["one", "a", "two", "b", "three"]
    wide.click("#conversations .more")
    choose(wide, "Rename")
    wide.type("Numbers")
    wide.press("Enter")
    wide.until(f"{other}.querySelector('#conversations li li')?.textContent.startsWith('Numbers')")
    wide.click("#conversations .more")
    choose(wide, "Delete")
    wide.until(f"!{other}.querySelector('#conversations li')")


def test_json_export_is_imported_as_it_was(wide: Page, mock: MockServer):
    mock.reply(answer(*SORTED), answer(HELLO))
    ask_and_wait(wide, "sort")
    press(wide, "Regenerate")
    wait(wide)
    exported = saved(wide, "Export as JSON")
    wide.click("#conversations .more")
    choose(wide, "Delete")
    wide.until("!document.querySelector('#conversations li')")
    give_file(wide, "#import", "x.json", exported)
    wide.until("document.querySelector('#conversations li')")
    assert wide.text("#sidebar-note") == "Imported 1 conversation."
    wide.click("#conversations li li > button")
    assert wide.texts(".answer + * .versions, .turn > .actions .versions") == ["\u20392 / 2\u203a"]
    assert json.loads(saved(wide, "Export as JSON")) == json.loads(exported)


def test_markdown_export_is_imported_as_text(wide: Page, mock: MockServer):
    mock.reply(answer(say("# A\n\n## You\n\nb")), answer(say("c")))
    ask_and_wait(wide, "one\n## Assistant")
    ask_and_wait(wide, "two")
    wait(wide)
    exported = saved(wide, "Export as Markdown")
    head = "# one ## Assistant\n\n## You\n\none\n\\## Assistant\n\n## Assistant"
    assert exported.startswith(head)
    give_file(wide, "#import", "x.md", exported)
    wide.until("document.querySelectorAll('#conversations li li').length == 2")
    wide.click("#conversations li li:not(:has([aria-current])) > button")
    assert wide.texts(SAID) == ["one\n## Assistant", "two"]
    mock.reply(answer(HELLO))
    ask_and_wait(wide, "three")
    contents = [m["content"] for m in mock.received[2]["messages"]]
    assert contents == ["one\n## Assistant", "# A\n\n## You\n\nb", "two", "c", "three"]


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.json", "{", "a.json cannot be imported: "),
        ("a.json", '{"conversations": [{}]}', "a.json cannot be imported: a conversation has no "),
        ("a.md", "nothing", "a.md cannot be imported: it has no heading “## You” or "),
    ],
)
def test_import_of_another_file_is_one_sentence(
    name: str, content: str, why: str, wide: Page, mock: MockServer
):
    give_file(wide, "#import", name, content)
    wide.until("document.querySelector('#sidebar-note').textContent")
    assert wide.text("#sidebar-note").startswith(why)
    assert wide.problems == []


def test_list_is_a_drawer_on_narrow_pages(page: Page, mock: MockServer):
    page.resize(360, 740, phone=True)
    visit(page, mock.url, "reading")
    shown = "document.querySelector('#sidebar').checkVisibility()"
    assert not page.evaluate(shown)
    mock.reply(answer(HELLO))
    ask_and_wait(page, "hi")
    page.until("document.querySelector('#conversations li')")
    page.click("#open-sidebar")
    assert page.evaluate(shown)
    assert page.evaluate("document.activeElement.id") == "search"
    page.press("Escape")
    assert not page.evaluate(shown)
    page.click("#open-sidebar")
    page.click("#conversations li li > button")
    assert not page.evaluate(shown)


def test_conversations_stored_while_the_database_is_deleted_are_kept(wide: Page, mock: MockServer):
    """As another page deletes it, or a newer one changes its version."""
    deletion = "indexedDB.deleteDatabase('strobe')"
    wide.evaluate(f"new Promise((done) => ({deletion}.onsuccess = () => done(0)))")
    mock.reply(answer(HELLO))
    ask_and_wait(wide, "hi")
    wait(wide)
    wide.reload()
    wide.until("document.querySelector('.answer')")
    assert wide.texts(SAID) == ["hi"]
    assert wide.problems == []


# ---- branched and continued ----


def test_regenerating_uses_another_seed_and_keeps_both(reading: Page, mock: MockServer):
    mock.reply(answer(say("one")), answer(say("two")), answer(HELLO))
    ask_and_wait(reading, "count")
    press(reading, "Regenerate")
    wait(reading)
    assert reading.texts(ANSWERED) == ["two"]
    first, second = mock.received
    assert first.pop("seed") != second.pop("seed")
    assert first == second
    assert reading.texts(".versions") == ["\u20392 / 2\u203a"]
    press(reading, "Previous version of the answer")
    reading.until(f"document.querySelector('{ANSWERED}').textContent == 'one'")
    ask_and_wait(reading, "go on")
    assert [m["content"] for m in mock.received[2]["messages"]] == ["count", "one", "go on"]
    assert reading.problems == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": "0"}, "at temperature 0 the likeliest token is taken every time"),
        ({"top_k": "1"}, "at top-k 1 the likeliest token"),
        ({}, "although the seed is another one"),
    ],
)
def test_regenerating_says_why_it_is_the_same(
    fields: dict[str, str], words: str, reading: Page, mock: MockServer
):
    for name, value in fields.items():
        reading.evaluate(f"document.querySelector('[name={name}]').value = '{value}'")
    mock.reply(answer(say("one")), answer(say("one")), answer(say("two")))
    ask_and_wait(reading, "count")
    press(reading, "Regenerate")
    reading.until("document.querySelector('.notes p')")
    assert words in reading.text(".notes")
    press(reading, "Regenerate")
    reading.until(f"document.querySelector('{ANSWERED}')?.textContent == 'two'")
    wait(reading)
    assert reading.texts(".notes p") == []


def test_edited_message_begins_a_branch(reading: Page, mock: MockServer):
    mock.reply(answer(say("A.")), answer(say("B.")), answer(say("C.")))
    ask_and_wait(reading, "first")
    ask_and_wait(reading, "second")
    press(reading, "Edit", 0)
    assert reading.evaluate("document.activeElement.value") == "first"
    reading.type(" one")
    reading.press("Enter")
    reading.until("document.querySelectorAll('.turn').length == 1")
    wait(reading)
    assert mock.received[2]["messages"] == [{"role": "user", "content": "first one"}]
    assert reading.texts(SAID) == ["first one"]
    press(reading, "Previous version of the message")
    reading.until("document.querySelectorAll('.turn').length == 2")
    assert reading.texts(SAID) == ["first", "second"]
    press(reading, "Edit", 0)
    reading.press("Escape")
    assert reading.texts(SAID) == ["first", "second"]


def test_cut_answer_continues(reading: Page, mock: MockServer):
    mock.reply(answer(*SORTED[:3], say(", pl", "length"), seconds=1.0), answer(say("um!")))
    ask_and_wait(reading, "sort")
    assert "limit" in reading.text(".notes")
    press(reading, "Continue")
    wait(reading)
    sent = mock.received[1]
    assert sent["continue_final_message"] is True
    assert sent["messages"][-1] == {"role": "assistant", "content": "Sorted: fig, pear, pl"}
    reading.until(f"document.querySelector('{ANSWERED}').textContent == 'Sorted: fig, pear, plum!'")
    assert reading.texts(".notes p") == []
    assert figures(reading)["tokens"] == "7"
    assert "Continue" not in reading.texts(".turn > .actions button")
    reading.reload()
    reading.until(f"document.querySelector('{ANSWERED}')?.textContent.endsWith('plum!')")


@pytest.mark.parametrize("change", ["Regenerate", "Edit"])
def test_failed_change_keeps_what_was_there(reading: Page, mock: MockServer, change: str):
    mock.reply(answer(say("one")), refusal(500, "It failed."), answer(say("two")))
    ask_and_wait(reading, "count")
    press(reading, change, 0)
    if change == "Edit":
        reading.type(" again")
        reading.press("Enter")
    reading.until("document.querySelector('.turn.failed')")
    assert reading.texts(".notes .error") == ["It failed."]
    ask_and_wait(reading, "go on")
    assert [m["content"] for m in mock.received[2]["messages"]] == ["count", "one", "go on"]
    reading.until(f"document.querySelectorAll('{ANSWERED}').length == 2")
    assert reading.texts(ANSWERED) == ["one", "two"]


def test_leaving_a_conversation_keeps_what_was_answered(wide: Page, mock: MockServer):
    mock.reply(answer(say("half", None), Gate()))
    ask(wide, "long")
    wide.until(f"document.querySelector('{ANSWERED}')?.textContent == 'half'")
    wide.click("#new-chat")
    wide.until("document.querySelector('#conversations li')")
    assert wide.texts(".turn") == []
    wide.click("#conversations li li > button")
    wide.until(f"document.querySelector('{ANSWERED}')?.textContent == 'half'")
    assert wide.texts(".notes p") == ["Stopped."]


# ---- files ----


def test_attached_files_are_sent_as_text(reading: Page, mock: MockServer):
    mock.reply(answer(HELLO))
    give_file(reading, "#files", "a.py", "x = '```'\n")
    reading.until("document.querySelector('#attachments li')")
    give_file(reading, "#files", "b.bin", "a\0b")
    reading.until("!document.querySelector('#page-note').hidden")
    assert reading.text("#page-note") == "b.bin is not a text file."
    ask_and_wait(reading, "What is it?")
    assert mock.received[0]["messages"][0]["content"] == (
        "a.py:\n````\nx = '```'\n````\n\nWhat is it?"
    )
    assert reading.texts(".message .chip summary") == ["a.py"]
    assert reading.texts("#attachments li") == []


def test_attached_file_may_be_removed(reading: Page):
    give_file(reading, "#files", "a.txt", "x")
    reading.until("document.querySelector('#attachments li')")
    reading.click("#attachments button")
    assert reading.texts("#attachments li") == []
    reading.click("#send")
    assert reading.text("#status") == "Type a message first."


# ---- sampling ----


def test_every_sampling_option_reaches_the_request(reading: Page, mock: MockServer):
    values = {
        "temperature": 0.5, "top_p": 0.8, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.1, "seed": 7, "max_tokens": 50,
        "min_tokens": 2,
    }  # fmt: skip
    texts = {"stop": "END\nSTOP", "schema": '{"type": "object"}', "speculation": "ngram"}
    for name, value in {**values, **texts}.items():
        reading.evaluate(f"document.querySelector('[name={name}]').value = {json.dumps(value)}")
    mock.reply(answer(HELLO))
    ask_and_wait(reading, "hi")
    sent = mock.received[0]
    assert {name: sent[name] for name in values} == values
    assert sent["stop"] == ["END", "STOP"]
    assert sent["structured_outputs"] == {"json": {"type": "object"}}
    assert sent["speculation"] == {"method": "ngram", "return_drafts": True}


def test_drafting_in_every_step_is_requested(reading: Page, mock: MockServer):
    reading.click("#open-settings")
    reading.click("[name=always]")
    reading.press("Escape")
    assert reading.text("#in-effect").endswith("speculation on, in every step")
    mock.reply(answer(HELLO))
    ask_and_wait(reading, "hi")
    assert mock.received[0]["speculation"] == {"return_drafts": True, "always": True}


def test_defaults_of_the_server_are_shown(reading: Page):
    default = "document.querySelector('[name=%s]').placeholder"
    assert reading.evaluate(default % "top_p") == "0.9"
    assert reading.evaluate(default % "top_k") == "off"


def test_presets_are_chosen_kept_and_removed(reading: Page, mock: MockServer):
    preset = "document.querySelector('#preset').value"

    def pick(name: str) -> None:
        reading.evaluate(
            f"""(() => {{ const field = document.querySelector("#preset");
            field.value = {json.dumps(name)}; field.dispatchEvent(new Event("change")); }})()"""
        )

    reading.click("#open-settings")
    assert reading.evaluate(preset) == "Model\u2019s own"
    pick("Greedy")
    assert reading.text("#in-effect").endswith("temperature 0")
    reading.evaluate("document.querySelector('[name=top_k]').focus()")
    reading.type("5")
    assert reading.evaluate(preset) == ""
    reading.click("#new-preset")
    reading.type("Mine")
    reading.click("#save-preset")
    assert reading.evaluate(preset) == "Mine"
    pick("Model\u2019s own")
    visit(reading, mock.url, "reading")
    pick("Mine")
    assert reading.text("#in-effect").endswith("temperature 0 · top-k 5")
    reading.click("#open-settings")
    reading.click("#remove-preset")
    assert reading.evaluate(preset) == ""
