"""A reward model that a vLLM server keeps: the same verdicts, over HTTP."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, ClassVar, Literal

from ..verifiers import InputError, Sample, Verdict
from ..verifiers.chat_client import ChatError
from ..verifiers.endpoint import Endpoint
from ..verifiers.segmenters import Segmenter
from .encoding import Encoded
from .loading import source_of
from .reader import StepReader
from .score import check_aggregate, step_verdict
from .settings import segmenter_of

__all__ = ["RemoteStepRewardModel"]

_BUSY = (408, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class RemoteStepRewardModel:
    """A process reward model behind vLLM's ``/pooling`` route, task ``token_classify``.

    Start the server by ``vllm serve MODEL --runner pooling --pooler-config.task token_classify``. It is sent token ids
    and gives the classes' probabilities at every token, or, where it picks the tokens of a step tag itself, at every
    step. Only models with a head are served so. Where a request fails, that is told of its answers, which get no score.

    Args:
        path: folder of the model, or name on the hub; only its tokenizer and settings are read here.
        base_url: of the server, such as ``http://localhost:8000``.
        model: the name that the server knows it by; None: as ``path``.
        segmenter, aggregate, max_length, calibration, settings: as of
            :class:`~apportion.prm.score.StepRewardModel`.
        api_key_env: environment variable that holds the key; None for a server that needs none.
        batch_size: answers a request.
        concurrency: most requests at once.
        timeout_s: longest wait for a sign of life in one try, in seconds.
        retries: further tries where the server is out of reach, busy or broken, after pauses of 0.5 s, 1 s, 2 s, ...
    """

    background: ClassVar[bool] = True

    path: str
    base_url: str
    model: str | None = None
    segmenter: Segmenter | None = None
    aggregate: Literal["min", "prod", "mean", "last"] = "min"
    max_length: int | None = None
    calibration: bool = True
    settings: Mapping[str, Any] | None = field(default=None, hash=False)
    api_key_env: str | None = "OPENAI_API_KEY"
    batch_size: int = 16
    concurrency: int = 8
    timeout_s: float = 60.0
    retries: int = 3

    def __post_init__(self) -> None:
        source_of(self.path)
        check_aggregate(self.aggregate)
        if self.batch_size < 1:
            raise InputError(f"batch_size={self.batch_size}: give a number of answers from 1 on")
        self._endpoint()

    def __call__(self, samples: Sequence[Sample]) -> list[Verdict | ChatError]:
        reader, segmenter = self._reader, self._segmenter
        steps = [segmenter(sample.completion) for sample in samples]
        rows = [
            reader.encode(sample.prompt, sample.completion, own, sample.metadata, max_length=self.max_length)
            for sample, own in zip(samples, steps)
        ]
        asked = [place for place, row in enumerate(rows) if row.kept_steps]
        parts = [asked[start : start + self.batch_size] for start in range(0, len(asked), self.batch_size)]
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="prm") as pool:
            replies = list(pool.map(lambda part: self._score([rows[place] for place in part]), parts))
        verdicts: list[Verdict | ChatError] = [step_verdict(own, (), self.aggregate) for own in steps]
        for part, reply in zip(parts, replies):
            for number, place in enumerate(part):
                found = reply if isinstance(reply, ChatError) else reply[number]
                verdicts[place] = (
                    found if isinstance(found, ChatError) else step_verdict(steps[place], found, self.aggregate)
                )
        return verdicts

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def _score(self, rows: Sequence[Encoded]) -> list[tuple[float, ...] | ChatError] | ChatError:
        """Probabilities of each row's steps, or what went wrong with the row or with all of them."""
        body = {
            "model": self.model or self.path,
            "input": [list(row.input_ids) for row in rows],
            "task": "token_classify",
            "use_activation": True,
            "encoding_format": "float",
        }
        reply = _post(self._endpoint(), body)
        if isinstance(reply, ChatError):
            return reply
        try:
            found = {item["index"]: item["data"] for item in reply["data"]}
            return [self._probabilities(row, found[number]) for number, row in enumerate(rows)]
        except (TypeError, KeyError, ValueError, AttributeError, IndexError) as error:
            return ChatError(
                f"{self._endpoint().host}: no reply of the pooling route ({type(error).__name__}: {error})"
            )

    def _probabilities(self, row: Encoded, data: Sequence[Any]) -> tuple[float, ...] | ChatError:
        if len(data) == len(row.input_ids):
            data = [data[end] for end in row.step_ends]
        if len(data) != row.kept_steps:
            told = f"{len(data)} results for {len(row.input_ids)} tokens and {row.kept_steps} steps"
            return ChatError(f"{self._endpoint().host}: {told}; serve it with the task token_classify")
        # Of two classes the second is right; a model with one label gives its probability alone.
        chances = [float(classes[-1] if isinstance(classes, list) else classes) for classes in data]
        if not all(0 <= chance <= 1 for chance in chances):
            return ChatError(f"{self._endpoint().host}: a result is no probability; serve it with its activation")
        calibration = self._reader.settings.calibration
        return tuple(calibration(chances).tolist() if self.calibration and calibration is not None else chances)

    def _endpoint(self) -> Endpoint:
        return Endpoint(
            model=self.model,
            base_url=self.base_url,
            api_key_env=self.api_key_env,
            concurrency=self.concurrency,
            timeout_s=self.timeout_s,
            retries=self.retries,
        )

    @cached_property
    def _reader(self) -> StepReader:
        reader = StepReader.from_pretrained(self.path, self.settings)
        if reader.settings.style != "head":
            raise InputError(f"{self.path}: is read by two tokens, which no pooling server gives; use verifier=prm")
        return reader

    @cached_property
    def _segmenter(self) -> Segmenter:
        return segmenter_of(self._reader.settings.segmenter) if self.segmenter is None else self.segmenter


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would carry the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(endpoint: Endpoint, body: Mapping[str, Any]) -> Any:
    """The reply's JSON, or a ChatError once all tries are spent."""
    url = endpoint.url.rstrip("/").removesuffix("/v1") + "/pooling"
    headers = {"Content-Type": "application/json"}
    if endpoint.key():
        headers["Authorization"] = f"Bearer {endpoint.key()}"
    opener = urllib.request.build_opener(_NoRedirect)
    told = ""
    for attempt in range(endpoint.retries + 1):
        if attempt:
            time.sleep(min(8.0, 0.5 * 2 ** (attempt - 1)))
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with opener.open(request, timeout=endpoint.timeout_s) as response:
                return json.loads(response.read())
        except urllib.error.HTTPError as error:
            told = f"HTTP {error.code} {' '.join(error.read(300).decode(errors='replace').split())}"
            if error.code not in _BUSY:
                break
        except ValueError as error:
            told = f"a reply that is no JSON ({error})"
            break
        except (OSError, http.client.HTTPException) as error:
            told = f"{type(error).__name__}: {error}"
    return ChatError(endpoint.without_key(f"{endpoint.host}/pooling: {told}"))
