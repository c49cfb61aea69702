"""What steps cost on this device, measured before the first request and kept for the next start."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import reprlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from strobe.engine.engine import Engine
from strobe.request import Request
from strobe.sampling_params import SamplingParams
from strobe.speculation.adaptive import AdaptiveDraftPolicy, Choice
from strobe.speculation.costs import Costs, Work
from strobe.warmup.fixed_policy import FixedDraftPolicy

logger = logging.getLogger(__name__)

REPEATS = 4  # steps of each kind that are timed
SUSTAINED = 0.2  # seconds of such steps before, in which a GPU reaches the clock it can hold
SECONDS = {"cuda": 75.0, "cpu": 10.0}  # after which no further kind of step is measured
LONG = 4096  # positions of a long context
READERS = 16  # requests that read one each on a GPU, which fewer do not keep busy
FITS = 0.3  # relative error within which costs of an earlier start still hold,
FAR = 4.0  # and how many times as long, or as short, all steps may take
LOOKS = 5  # looks at that; other programs disturb some of them

MAX_FILE = 1 << 20  # bytes
MAX_ROWS = 1 << 30
MIN_MS, MAX_MS = 1e-6, 3.6e6  # of a step; an hour

_RATES = "request", "context", "context_row"
_ENDLESS = SamplingParams(
    temperature=0.0, max_tokens=None, ignore_eos=True, speculation={"method": "dflash"}
)


def adapt(engine: Engine) -> None:
    """Let an adaptive budget know its costs: those of an earlier start where they fit, else as
    measured now. The engine is left as if nothing had run."""
    budget = engine.scheduler.draft_policy
    if not isinstance(budget, AdaptiveDraftPolicy):
        return
    path, device = _path(engine), _device(engine)
    costs = None if path is None else _read(path, device)
    if costs is not None and not any(_fits(engine, budget, costs) for _ in range(LOOKS)):
        logger.info("Steps do not take what %s says: costs are measured anew.", path)
        costs = None
    if costs is None:
        began = time.perf_counter()
        costs = _measure(engine, budget)
        logger.info("costs of steps measured in %.1f s", time.perf_counter() - began)
        if costs is not None and path is not None:
            _write(path, costs, device)
    budget.costs = costs


def _device(engine: Engine) -> str:
    """What costs are of."""
    device = engine.resolved.device
    cuda = device.type == "cuda"
    return torch.cuda.get_device_name(device) if cuda else os.uname().machine


def _path(engine: Engine) -> Path | None:
    """Where costs are kept, by all that they depend on; None without a home directory."""
    resolved, device = engine.resolved, engine.resolved.device
    cuda = device.type == "cuda"
    key = {
        "device": _device(engine),
        "threads": None if cuda else (torch.get_num_threads(), os.cpu_count()),
        "versions": [version("strobe"), torch.__version__],
        "target": repr(resolved.target.decoder),
        "draft": repr(resolved.draft),
        "choice": repr(resolved.backends),
        "dtype": str(resolved.dtype),
        "limits": asdict(resolved.limits),
    }
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        logger.warning(
            "Costs of steps are not kept for the next start, since this user has no home "
            "directory; set HOME or XDG_CACHE_HOME."
        )
        return None
    return root / "strobe" / "costs" / f"{name}.json"


def _read(path: Path, device: str) -> Costs | None:
    """The costs in a file; None without one, and, with a warning, where it holds no such costs."""
    try:
        if not path.exists():
            return None
        if not path.is_file():
            raise ValueError("it is not a file")
        with path.open("rb") as file:
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            raise ValueError(f"it has more than {MAX_FILE} bytes")
        table: Any = json.loads(content)
        if not isinstance(table, dict):
            raise ValueError("it is not an object")
        if table.get("device") != device:
            of = str(table.get("device"))[:100]
            logger.warning("%s is of %s, not of %s: costs are measured anew.", path, of, device)
            return None
        draft, verify = _points(table, "draft"), _points(table, "verify")
        rates = [_number(name, table.get(name), 0.0) for name in _RATES]
        return Costs(draft, verify, *rates)
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("%s cannot be read (%s): costs are measured anew.", path, error)
        return None


def _points(table: dict[str, Any], name: str) -> dict[int, float]:
    """Milliseconds by rows. Raises ValueError."""
    points = table.get(name)
    if not isinstance(points, dict) or len(points) < 2:
        raise ValueError(f"{name} is {reprlib.repr(points)}, but must have at least two points")
    for rows in points:
        if not re.fullmatch("[1-9][0-9]{0,9}", rows) or int(rows) > MAX_ROWS:
            raise ValueError(f"{name} holds {reprlib.repr(rows)}, which is no number of rows")
    return {int(rows): _number(f"{name} {rows}", ms, MIN_MS) for rows, ms in points.items()}


def _number(name: str, ms: Any, least: float) -> float:
    """Milliseconds. Raises ValueError for what no step takes."""
    if isinstance(ms, bool) or not isinstance(ms, int | float) or not least <= ms <= MAX_MS:
        raise ValueError(f"{name} is {reprlib.repr(ms)}, but must be {least:g} to {MAX_MS:g}")
    return float(ms)


def _write(path: Path, costs: Costs, device: str) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            new.write_text(json.dumps({"device": device, **costs.as_dict()}, indent=1) + "\n")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("Costs of steps are not kept for the next start: %s", error)


class _Survey:
    """Steps of every kind, timed by what is queued for drafting and for verifying."""

    def __init__(self, engine: Engine, budget: AdaptiveDraftPolicy):
        self.engine, self.budget, self.forced = engine, budget, FixedDraftPolicy()
        self.requests: list[Request] = []
        self.marks: list[tuple[str, Any]] = []
        self.cuda = engine.resolved.device.type == "cuda"

    def __enter__(self) -> _Survey:
        self.engine.scheduler.draft_policy = self.forced
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        while self.engine.has_work:
            self.engine.step()
        self.engine.reset()
        self.engine.scheduler.draft_policy = self.budget

    def fill(self, count: int) -> None:
        """Step until so many requests decode, which have room for a few more steps."""
        room = self.engine.limits.max_model_len - 4 * self.engine.limits.lookahead
        for request in [r for r in self.requests if len(r.tokens) > room]:
            self.engine.finish(request, "abort")
        self.requests = [r for r in self.requests if r.finish_reason is None]
        while len(self.requests) < count:
            self.requests.append(self.engine.add([0], _ENDLESS))
        scheduler, limits = self.engine.scheduler, self.engine.limits
        rows = sum([request.num_prompt for request in self.requests])
        # At least so many of a prompt go into a step, beside others that decode already.
        least = (limits.max_mixed_tokens or limits.max_num_batched_tokens) // 2
        for _ in range(4 + 4 * count + rows // least):
            if not scheduler.waiting and all(record.is_decoding for record in scheduler.running):
                return
            self.engine.step()

    def time(self, count: int, choice: Choice) -> tuple[float, float, int]:
        """Median milliseconds of drafting and of verifying, and the rows of a step."""
        self.forced.choice = choice
        until = time.perf_counter() + SUSTAINED * self.cuda
        while time.perf_counter() < until:
            self.fill(count)
            self.engine.step()
        self.fill(count)
        for _ in range(self.engine.max_in_flight + self.cuda):
            self.engine.step()
        self.marks, self.engine.on_phase = [], self._mark
        for _ in range(REPEATS):
            self.engine.step()
        self.engine.on_phase = lambda name: None
        if self.cuda:
            torch.cuda.synchronize()
        at = {
            name: [t for n, t in self.marks if n == name] for name in ("start", "draft", "verify")
        }
        draft = median(map(self._between, at["start"], at["draft"]))
        return draft, median(map(self._between, at["draft"], at["verify"])), self.forced.rows

    def context(self, whole: Choice) -> tuple[float, float]:
        """Milliseconds for each position of a long context, and for it with each further row."""
        engine, pool = self.engine, self.engine.components.pool
        positions = (pool.capacity - 1) * engine.limits.page_size
        room = min(engine.limits.max_model_len, positions)
        # `fill` gives up what is close to the end, and steps before those that are timed add to it.
        size = min(LONG, room - (64 if self.cuda else 12) * engine.limits.lookahead)
        if size < LONG // 4:
            return 0.0, 0.0
        count = READERS if self.cuda else 1
        count = max(min(count, engine.limits.max_num_seqs, positions // (size + LONG // 8)), 1)
        short = [self.time(count, choice)[1] for choice in (Choice(), whole)]
        self.end()
        # Other tokens each, for no request is to find another's pages.
        self.requests = [engine.add([i] * size, _ENDLESS) for i in range(count)]
        long = [self.time(count, choice)[1] for choice in (Choice(), whole)]
        self.end()
        pairs = zip(short, long, strict=True)
        once, rows = [max(b - a, 0.0) / (count * size) for a, b in pairs]
        return once, max(rows - once, 0.0) / whole.most

    def end(self) -> None:
        for request in self.requests:
            self.engine.finish(request, "abort")
        self.requests = []

    def _mark(self, name: str) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, time.perf_counter()))

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) if self.cuda else 1e3 * (end - begin)


def _kinds(budget: AdaptiveDraftPolicy, count: int, graphs: bool) -> list[Choice]:
    """Plain steps, each width's longest drafts, and, where steps are padded to few numbers of rows,
    of the widest those between half and all."""
    found = [Choice(), *[Choice(width, most) for width, most in enumerate(budget.widths)]]
    whole = budget.widths[-1]
    if not graphs:
        return found
    for drafts, _ in budget.rows(count, count, whole):
        if count * whole // 2 < drafts < count * whole:
            found.append(Choice(len(budget.widths) - 1, whole, drafts))
    return found


def _counts(engine: Engine) -> list[int]:
    """Numbers of requests to measure with: what there are slots and pages for."""
    limits, pool = engine.limits, engine.components.pool
    pages = -(-(2 + 4 * limits.lookahead) // limits.page_size)
    most = min(limits.max_num_seqs, max((pool.capacity - 1) // pages, 1))
    powers = [2**i for i in range(most.bit_length()) if 2**i < most]
    return [*powers[:: 1 if engine.resolved.backends.graphs else 2], most]


def _measure(engine: Engine, budget: AdaptiveDraftPolicy) -> Costs | None:
    """None where even one request has no room."""
    deadline = time.perf_counter() + SECONDS[engine.resolved.device.type]
    drafts, verifies = dict[int, list[float]](), list[tuple[int, int, float]]()
    if engine.limits.max_model_len <= 5 * engine.limits.lookahead:
        return None
    with _Survey(engine, budget) as survey:
        context = survey.context(Choice(len(budget.widths) - 1, budget.widths[-1]))
        for count in _counts(engine):
            for choice in _kinds(budget, count, engine.resolved.backends.graphs):
                if time.perf_counter() > deadline and len({rows for rows, _, _ in verifies}) > 4:
                    break
                draft, verify, rows = survey.time(count, choice)
                verifies.append((rows, count, verify))
                if choice.most:
                    drafts.setdefault(count * budget.slots[choice.width], []).append(draft)
    by_rows, request = _by_rows(verifies)
    if min(len(drafts), len(by_rows)) < 2:
        return None
    by_draft = {n: median(ms) for n, ms in drafts.items()}
    return Costs(by_draft, by_rows, request, *context)


def _by_rows(found: Sequence[tuple[int, int, float]]) -> tuple[dict[int, float], float]:
    """Milliseconds by rows, and for each request beside, of steps of so many rows, requests and
    milliseconds: where equally many rows are of few requests and of many, these tell."""
    rows, requests, ms = np.array(found).T
    sizes = np.unique(rows)
    each = np.append(rows[:, None] == sizes, requests[:, None], 1).astype(np.float64)
    told = any(len(set(requests[rows == n])) > 1 for n in sizes)
    request = max(float(np.linalg.lstsq(each, ms, rcond=None)[0][-1]), 0.0) if told else 0.0
    if (request * requests >= ms).any():  # noise, since a step's rows take time, too
        request = 0.0
    rest = ms - request * requests
    return {int(n): float(np.median(rest[rows == n])) for n in sizes}, request


def _fits(engine: Engine, budget: AdaptiveDraftPolicy, costs: Costs) -> bool:
    """Whether a request's plain steps and those of a whole block take what the costs say, or both
    as many times as long, as on a busy machine; the pace is that many times."""
    found: list[float] = []
    with _Survey(engine, budget) as survey:
        for choice in (Choice(), Choice(len(budget.widths) - 1, budget.widths[-1])):
            draft, verify, rows = survey.time(1, choice)
            said = float(costs.ms(Work(budget.slots[-1] if choice.most else 0, rows)))
            found.append((draft * (choice.most > 0) + verify) / said)
    costs.pace = float(np.sqrt(np.prod(found)))
    return max(found) < (1 + FITS) * min(found) and 1 / FAR < costs.pace < FAR
