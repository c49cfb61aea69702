"""Tool formats whose calls begin at a marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from strobe.server.parsers.buffer import Buffer
from strobe.server.parsers.call_reader import CallReader
from strobe.server.parsers.call_text import CallMarkers, CallText
from strobe.server.parsers.parser import Tool
from strobe.server.parsers.segment import Parser


@dataclass(frozen=True, kw_only=True)
class MarkedCalls:
    """Base class of a `ToolFormat` whose calls begin at a marker, after any text. A format adds the
    reader of a call, and its grammar."""

    name: str
    markers: CallMarkers
    keep_special: bool = True  # some checkpoints have the markers as special tokens
    whole_answer: bool = False

    @property
    def openers(self) -> tuple[str, ...]:
        return (self.markers.opener,)

    @property
    def line_openers(self) -> tuple[str, ...]:
        return (self.markers.inner,) if self.markers.inner else ()

    def parser(
        self, tools: Sequence[Tool] = (), *, forced: bool = False, whole_calls: bool = False
    ) -> Parser:
        return CallText(
            self.markers,
            lambda buffer, opened: self.reader(buffer, tools, opened=opened),
            forced=forced,
            whole_calls=whole_calls,
        )

    def reader(self, buffer: Buffer, tools: Sequence[Tool], *, opened: bool) -> CallReader:
        """Return the reader of one call. opened: whether `markers.inner` has been read."""
        raise NotImplementedError
