"""A running request's slot, pages and progress. Imports no torch.

RUNNING --suspend--> SUSPENDED     it waits for the next plan and keeps slot and pages
   |   <--next plan--    |
   |                     |
   +------retire---------+--> LEAVING     it gives them up once no step of it is in flight
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from strobe.kv.kept_states import SequenceStates
from strobe.kv.lease import Lease
from strobe.request import Request, Status
from strobe.step import Admission, PageWrite

if TYPE_CHECKING:
    from strobe.speculation.proposer import HostProposer


class Residence(Enum):
    """What becomes of a running request's slot and pages; see the module's docstring."""

    RUNNING = auto()
    SUSPENDED = auto()
    LEAVING = auto()


@dataclass(eq=False, slots=True)
class RunningRequest:
    """A running request's slot, pages and progress.

    start: lower bound of the positions with K/V once the steps in flight are done. prefill_end: its
    tokens at admission; it prefills these and then decodes. host_proposer, device_method: its
    drafter on the host or on the device, if any.
    """

    request: Request
    slot: int
    lease: Lease
    start: int
    prefill_end: int
    host_proposer: HostProposer | None = None
    device_method: str | None = None
    pages_sent: int = 0
    in_flight: int = 0
    states: SequenceStates | None = None
    """Of a target with recurrent layers: the states that are kept of it."""
    residence: Residence = Residence.RUNNING

    @property
    def is_decoding(self) -> bool:
        return self.start >= self.prefill_end

    @property
    def is_leaving(self) -> bool:
        """Whether its results are dropped, and its slot and pages released afterwards."""
        return self.residence is Residence.LEAVING

    def rewind(self, count: int, started: bool, length: int) -> None:
        """Return to the state before a step: `count` tokens, of which `length` positions have
        K/V."""
        request = self.request
        self.residence = Residence.RUNNING
        self.lease.length = length
        request.started = started
        request.status = Status.RUNNING
        request.finish_reason = None
        request.stop_reason = None
        request.error = None
        request.truncate(count)
        del request.page_keys[count // self.lease.pool.page_size :]

    def page_writes(self) -> list[PageWrite]:
        """Return the page-table entries that the device does not have yet, by page group."""
        if self.pages_sent == len(self.lease.tables[0]):
            return []
        writes: list[PageWrite] = []
        for group, table in enumerate(self.lease.tables):
            first = max(self.pages_sent, self.lease.first_held(group))
            writes.append(
                PageWrite(slot=self.slot, first=first, pages=tuple(table[first:]), group=group)
            )
        return writes

    def admission(self, length: int) -> Admission:
        """Return what the device needs to know of it. length: positions that have K/V."""
        request = self.request
        return Admission(
            slot=self.slot,
            length=length,
            tokens=tuple(request.tokens),
            num_prompt=request.num_prompt,
            sampling=request.sampling,
            seed=request.seed,
            sibling=request.sibling,
            stop_ids=request.stop_ids,
        )
