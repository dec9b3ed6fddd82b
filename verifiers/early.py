"""Judge finished completions while others are still being generated."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from types import TracebackType

from .panel import Panel, PanelResult
from .verdict import Sample, Verdict

__all__ = ["EarlyJudging"]


class EarlyJudging:
    """Asks those verifiers early that wait on processes or the network; the others are asked at the end.

    A verifier says so by a class attribute ``background = True``. One that computes in Python would only take the
    interpreter from the sampler, and may need the main thread.

    Args:
        panel: to be asked about every sample once.

    >>> with EarlyJudging(Panel({"short": lambda samples: [len(s.completion) < 3 for s in samples]}, {})) as judging:
    ...     judging.submit([1], [Sample("q", "a")])
    ...     judging.finish([Sample("q", "abc"), Sample("q", "a")]).verdicts
    [{'short': Verdict(score=0.0, spans=())}, {'short': Verdict(score=1.0, spans=())}]
    """

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._early = {n: v for n, v in panel.verifiers.items() if getattr(v, "background", False) is True}
        self._lanes = {name: _Lane(Panel({name: v}, {}, panel.timeout_s)) for name, v in self._early.items()}
        self._asked: list[tuple[list[int], dict[str, Future[PanelResult]]]] = []

    def __enter__(self) -> EarlyJudging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for lane in self._lanes.values():
            lane.close()

    @property
    def wanted(self) -> bool:
        """Whether any verifier gains by it."""
        return bool(self._early)

    def submit(self, rows: Sequence[int], samples: Sequence[Sample]) -> None:
        """Hand over samples that are complete.

        Args:
            rows: their places among all samples; each place at most once.
            samples: as many.
        """
        if self._early and rows:
            self._asked.append((list(rows), {name: lane.ask(samples) for name, lane in self._lanes.items()}))

    def finish(self, samples: Sequence[Sample]) -> PanelResult:
        """What all verifiers say of all samples, those handed over before included."""
        handed_over = {row for rows, _ in self._asked for row in rows}
        rest = [row for row in range(len(samples)) if row not in handed_over]
        self.submit(rest, [samples[row] for row in rest])
        others = {n: v for n, v in self._panel.verifiers.items() if n not in self._early}
        told = Panel(others, {}, self._panel.timeout_s).judge(samples)
        verdicts: list[dict[str, Verdict]] = [{} for _ in samples]
        faulted: dict[str, list[int]] = {}
        first_error: dict[str, str] = {}
        seconds: dict[str, float] = {}
        for name in self._panel.verifiers:
            if name in others:
                parts = [(list(range(len(samples))), told)]
            else:
                parts = [(rows, futures[name].result()) for rows, futures in self._asked]
            seconds[name] = sum(part.seconds[name] for _, part in parts)
            faulted[name] = sorted(rows[place] for rows, part in parts for place in part.faulted[name])
            for rows, part in parts:
                for row, said in zip(rows, part.verdicts):
                    verdicts[row][name] = said[name]
            note = next((part.first_error[name] for _, part in parts if name in part.first_error), None)
            if note is not None:
                first_error[name] = note
        return PanelResult(verdicts, faulted, first_error, seconds)


class _Lane:
    """A thread that asks one verifier one batch after the other; nobody waits for it when the program ends."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._waiting: SimpleQueue[tuple[Future[PanelResult], list[Sample]] | None] = SimpleQueue()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self, samples: Sequence[Sample]) -> Future[PanelResult]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="verify", daemon=True)
            self._thread.start()
        future: Future[PanelResult] = Future()
        self._waiting.put((future, list(samples)))
        return future

    def close(self) -> None:
        """What has not begun is not asked any more."""
        self._closed.set()
        self._waiting.put(None)

    def _run(self) -> None:
        while (asked := self._waiting.get()) is not None and not self._closed.is_set():
            future, samples = asked
            try:
                future.set_result(self._panel.judge(samples))
            except BaseException as error:
                future.set_exception(error)
