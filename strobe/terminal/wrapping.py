"""Word wrapping for text that streams to a terminal."""

from __future__ import annotations

from rich.cells import get_character_cell_size
from rich.console import Console


class Wrapping:
    """Wraps text while it streams: a word that reaches the right edge is erased and moved to the
    next line. Text that does not go to a terminal is left as it is. rows: line breaks so far."""

    def __init__(self, console: Console, column: int = 0):
        """column: the cursor's column."""
        self._console = console
        self._column = column
        self.rows = 0
        self._word: list[str] = []  # printed characters of the last word, with their styles
        self._width = 0  # of the word

    def wrap(self, text: str, before: str = "", after: str = "") -> str:
        """Return what to print for the text. before, after: escapes around each character."""
        console = self._console
        if not console.is_terminal or console.is_dumb_terminal:
            return f"{before}{text}{after}" if text else ""
        # A terminal keeps the cursor in its last column after writing there: leave it free.
        room = console.width - 1
        wrapped = "".join([self._put(char, f"{before}{char}{after}", room) for char in text])
        self.rows += wrapped.count("\n")
        return wrapped

    def _put(self, char: str, piece: str, room: int) -> str:
        if char == "\n":
            self._next_line()
            return "\n"
        size = 8 - self._column % 8 if char == "\t" else get_character_cell_size(char)
        taken_back = ""
        if self._column + size > room and not char.isspace():
            if 0 < self._width < self._column and self._width + size <= room:
                taken_back = f"\033[{self._width}D\033[K\n{''.join(self._word)}"
                self._column = self._width
            else:
                taken_back = "\n"
                self._next_line()
        elif self._column + size > room:
            self._next_line()
            return "\n"
        self._column += size
        if char.isspace() or size > 1:  # scripts of wide characters break anywhere
            self._word = []
            self._width = 0
        else:
            self._word.append(piece)
            self._width += size
        return taken_back + piece

    def _next_line(self) -> None:
        self._column = 0
        self._word = []
        self._width = 0
