"""An answer on a terminal: streamed as text, then shown as Markdown block by block."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from strobe.server.parsers.format_protocols import ReasoningFormat
from strobe.server.parsers.formats import make_parser
from strobe.server.parsers.segment import Parser, Segment
from strobe.terminal.wrapping import Wrapping

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.console import Console

_PLAIN = {"paragraph_open", "paragraph_close", "inline", "text", "softbreak"}
"""Types of tokens that look the same as text and as Markdown."""


class AnswerView:
    """Prints an answer. Its thinking is dimmed on a terminal and left out elsewhere.

    On a terminal, each block of Markdown, such as a paragraph, a list or a table, replaces its text
    when it has ended, unless it is taller than the screen.
    """

    def __init__(self, console: Console, form: ReasoningFormat | None, column: int = 0):
        """column: the cursor's column."""
        self.console = console
        self.form = form
        self.content = ""
        self.at_line_start = False
        self._parser: Parser | None = None
        self._thinking = False
        self._renders = console.is_terminal and not console.is_dumb_terminal
        self._wrapping = Wrapping(console, column)
        self._start_block(column)

    def begin(self, prompt: str) -> None:
        """Prepare the parser. prompt: the conversation as rendered for the model."""
        if self.form is not None:
            opened = self.form.opened_by(prompt)
            self._parser = make_parser(None, self.form.name, tools=None, thinking_open=opened)

    def push(self, text: str) -> None:
        """Show more of the answer."""
        if self._parser is None:
            self._show(text)
        else:
            self._take(self._parser.push(text))

    def end(self) -> None:
        """Show text that the parser held back, and the last block as Markdown."""
        if self._parser is not None:
            self._take(self._parser.finish())
        self._turn(False)
        if self._renders:
            self._end_blocks()
            self.at_line_start = self._replace(self._block)

    def _take(self, segments: list[Segment]) -> None:
        for segment in segments:
            if segment.kind == "content":
                if self._thinking:
                    self._turn(False)
                    self._print("\n\n")
                    self._start_block()
                self._show(segment.text)
            elif self.console.is_terminal:
                self._turn(True)
                self._print(segment.text)

    def _show(self, text: str) -> None:
        self.content += text
        for line in _lines(text):
            self._print(line)
            self._block += line
            if self._renders and line.endswith("\n"):
                self._end_blocks()

    def _end_blocks(self) -> None:
        """Show blocks that have ended, which are followed by the beginning of another one."""
        starts = _block_starts(self._block)
        if len(starts) < 2:
            return
        lines = _lines(self._block)
        rest = "".join(lines[starts[-1] :])
        if self._replace("".join(lines[: starts[-1]])):
            self._print("\n")
            self._start_block()
            self._print(rest)
        else:  # the rest is on the screen already
            self._start_block(rows=Wrapping(self.console).wrap(rest).count("\n"))
        self._block = rest

    def _replace(self, ended: str) -> bool:
        """Erase the current block and show the part that has ended as Markdown. Returns False, and
        changes nothing, if that looks the same or the block has left the screen."""
        tokens = _parse(ended)
        rows = self._rows()
        if rows >= self.console.height - 1 or all(map(_is_plain, tokens)):
            return False
        from rich.markdown import Markdown

        shown = Markdown("", code_theme="ansi_dark", hyperlinks=False)
        shown.parsed = tokens
        up = f"\033[{rows}A" if rows else ""
        right = f"\033[{self._column}C\033[J\n" if self._column else "\033[J"
        self._write(f"{up}\r{right}")
        self.console.print(shown)
        self._wrapping = Wrapping(self.console)
        return True

    def _start_block(self, column: int = 0, rows: int = 0) -> None:
        """Begin a block. column: where it begins; rows: its line breaks on the screen so far."""
        self._block = ""
        self._column = column
        self._first_row = self._wrapping.rows - rows

    def _rows(self) -> int:
        """Rows between the current block's first one and the cursor."""
        return self._wrapping.rows - self._first_row

    def _print(self, text: str) -> None:
        self._write(self._wrapping.wrap(text))

    def _turn(self, thinking: bool) -> None:
        if thinking != self._thinking and not self.console.no_color:
            self._write("\033[2m" if thinking else "\033[0m")
        self._thinking = thinking

    def _write(self, text: str) -> None:
        print(text, end="", flush=True, file=self.console.file)


def _parse(text: str) -> list[Token]:
    """Return the tokens of Markdown in which HTML is text."""
    from markdown_it import MarkdownIt

    return MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).parse(text)


def _lines(text: str) -> list[str]:
    """Split a text after its line breaks, as Markdown counts them."""
    return [line for line in re.split(r"(?<=\n)", text) if line]


def _is_plain(token: Token) -> bool:
    return token.type in _PLAIN and all(map(_is_plain, token.children or ()))


def _block_starts(text: str) -> list[int]:
    """Return the first line of each block."""
    return [token.map[0] for token in _parse(text) if token.level == 0 and token.map]
