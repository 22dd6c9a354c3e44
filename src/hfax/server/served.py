"""The served model's state and health, and the answers to requests; routes use only this."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

from hfax.engine.engine import Engine
from hfax.engine.outputs import OutputDelta
from hfax.engine.request import PreparedPrompt, Request
from hfax.engine.sampling_params import SamplingParams
from hfax.phases import PhaseEvent, listen
from hfax.progress import Meter
from hfax.server.embeddings import EmbeddingQueue
from hfax.server.failures import ApiError, unknown_model
from hfax.server.loading import DEFAULTS, Load, Loaded, make_reader
from hfax.server.memory import give_memory_back, resident_bytes
from hfax.server.metrics import Metrics
from hfax.server.protocol import Sampling
from hfax.server.settings import Settings
from hfax.server.tracing import Tracing
from hfax.server.workers import WorkerPool

logger = logging.getLogger(__name__)

_PATIENCE = 3
"""A step counts as hung after this many times the slowest step so far, and `step_timeout_s` at least."""
_LARGE_BODY = 64 << 10
_EXPENSIVE = (b'"json_schema"', b'"regex"', b'"image_url"', b'"tools"')
"""Bodies that are larger, or contain one of these, may need much processor time."""
_IMAGES_COST = 4
"""A request with images may take this many times the processor time of others."""


class LoadProgress:
    """How far loading is, from its phases."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._running: list[str] = []
        self._num_compiled = 0
        self._meter = Meter()

    def hear(self, event: PhaseEvent) -> None:
        """Take the start or end of a phase; from any thread. Names of checkpoints may be paths, which nobody is told."""
        what = f"{event.name} {event.detail}" if event.name in ("trace", "compile") else event.name
        if event.seconds is None:
            self._running.append(what)
            if event.name == "load":
                self._meter = event.meter
        else:
            with contextlib.suppress(ValueError):
                self._running.remove(what)
            self._num_compiled += event.name == "compile"

    def as_json(self) -> dict[str, Any]:
        """The innermost phase that runs, the number of programs compiled so far, and the seconds since the start; while weights are
        loaded, the bytes that are, those of all, and the seconds left."""
        phase = next(iter(self._running[-1:]), "")
        seconds = round(time.monotonic() - self._started, 1)
        found = {"phase": phase, "programs_compiled": self._num_compiled, "seconds": seconds}
        if phase != "load" or not self._meter.total:
            return found
        left = self._meter.seconds_left
        return {
            **found,
            "bytes_loaded": self._meter.done,
            "bytes_total": self._meter.total,
            "seconds_left": None if left is None else round(left, 1),
        }

    def __str__(self) -> str:
        found = self.as_json()
        phase = found["phase"] or "starting"
        phase += f" {self._meter}" if "bytes_total" in found else ""
        return f"{phase}, {found['programs_compiled']} programs compiled, {found['seconds']:.0f} s"


class Served:
    """The served model and its state: "loading", "ready", "degraded", "stopping"; or "hung", "dead", "failed".

    A degraded server refuses requests, since too many wait to be read; it answers those that it has.

    Args:
        settings: the server's settings.
        load: loads the model, in its own thread. Its argument is the engine's `on_step` callback.
    """

    def __init__(self, settings: Settings, load: Load) -> None:
        self.settings = settings
        self.created = int(time.time())
        self.metrics = Metrics(settings.metrics_prefix, settings.served_model_names[0])
        self.tracing = Tracing(settings.otlp_endpoint)
        self.failure: BaseException | None = None
        self.progress = LoadProgress()
        self._load = load
        self._loaded: Loaded | None = None
        self._is_stopping = False
        self.num_read = 0
        """Number of requests whose body was read, or refused."""
        self.embeddings = EmbeddingQueue(settings.max_embeddings_waiting)
        self.workers = WorkerPool(
            num_workers=settings.request_workers,
            memory_bytes=settings.request_memory_bytes,
            max_waiting=settings.max_waiting_reads,
        )

    def start(self) -> None:
        """Start loading the model."""
        threading.Thread(target=self._run_load, name="hfax-load", daemon=True).start()

    def _run_load(self) -> None:
        try:
            with listen(self.progress.hear):
                loaded = self._load(lambda seconds, tokens: self.metrics.iteration_tokens.observe(tokens))
            if loaded.engine is not None:
                self.metrics.follow(loaded.engine)
            self.workers.start(make_reader(loaded, self.settings.served_model_names, self.settings.image_hosts))
            self.metrics.follow_workers(self.workers)
            self._loaded = loaded
            logger.info("ready: %s", ", ".join(self.settings.served_model_names))
        except BaseException as error:
            self.failure = error
            logger.debug("loading failed", exc_info=True)

    @property
    def state(self) -> str:
        """ "loading", "ready", "degraded", "stopping", "hung", "dead" or "failed"."""
        if self.failure is not None:
            return "failed"
        if self._loaded is None:
            return "loading"
        engine = self._loaded.engine
        if engine is not None:
            if engine.core.failure is not None:
                return "dead"
            since = engine.core.busy_since
            # on a slow machine, a long step is not necessarily hung
            patience = max(self.settings.step_timeout_s, _PATIENCE * engine.core.slowest_step_s)
            if since is not None and time.monotonic() - since > patience:
                return "hung"
        if self._is_stopping:
            return "stopping"
        return "degraded" if self.workers.is_exhausted else "ready"

    def health(self) -> dict[str, Any]:
        """The state; while the model loads, how far that is; while programs are compiled beside requests, how many are left."""
        state = self.state
        if state == "loading":
            return {"status": state, **self.progress.as_json()}
        engine = None if self._loaded is None else self._loaded.engine
        left = engine.num_programs_left if engine is not None and state in ("ready", "degraded") else 0
        return {"status": state, **({"programs_left": left} if left else {})}

    def stop(self) -> None:
        """Stop accepting requests."""
        self._is_stopping = True

    def close(self) -> None:
        """Close the engine, flush traces, and stop measuring."""
        if self._loaded is not None and self._loaded.engine is not None:
            self._loaded.engine.close(timeout_s=5)
        self.workers.close()
        self.tracing.close()
        self.metrics.close()

    @property
    def loaded(self) -> Loaded:
        """The loaded model.

        Raises:
            ApiError: 503, the model is not ready.
        """
        state = self.state
        if state == "hung":
            raise ApiError(503, "The engine is hung.", code="engine_hung")
        if self._loaded is None or state not in ("ready", "degraded"):
            how_far = f": {self.progress}" if state == "loading" else ""
            raise ApiError(503, f"The model is {state}{how_far}.", code=f"model_{state}", headers={"Retry-After": "5"})
        return self._loaded

    @property
    def is_idle(self) -> bool:
        """Whether no request is read or computed."""
        engine = None if self._loaded is None else self._loaded.engine
        return not self.workers.num_busy and (engine is None or not engine.core.scheduler.has_work)

    def require_name(self, name: str) -> None:
        """Raise `ApiError` (404) unless `name` is the served model's; requests cannot load models."""
        if name not in self.settings.served_model_names:
            raise unknown_model(name, self.settings.served_model_names)

    def require_engine(self) -> Engine:
        """The engine.

        Raises:
            ApiError: 400, the model does not generate text.
        """
        engine = self.loaded.engine
        if engine is None:
            raise ApiError(400, "The model does not generate text; use /v1/embeddings.", param="model")
        return engine

    async def read(self, kind: str, data: bytes, client: str) -> Any:
        """Read a request's body in a worker process.

        Args:
            kind: the method of `RequestReader`.
            data: the body.
            client: whose request it is; clients are served in turns.

        Raises:
            ApiError: the body is invalid, or too expensive to read; or the server is not ready, or too busy.
        """
        _ = self.loaded
        self._check_memory()
        self.num_read += 1
        is_expensive = len(data) > _LARGE_BODY or any(name in data for name in _EXPENSIVE)
        cpu_s = self.settings.request_cpu_s * (_IMAGES_COST if b'"image_url"' in data else 1)
        return await self.workers.run(
            kind, data, client=client, is_expensive=is_expensive, cpu_s=cpu_s, what="Reading the request"
        )

    def _check_memory(self) -> None:
        most = self.settings.max_host_memory_bytes
        if most is not None and resident_bytes() > most:
            give_memory_back()
            if resident_bytes() > most:
                raise ApiError(
                    503, "The server has no memory left for requests. Retry later.", code="out_of_host_memory",
                    headers={"Retry-After": "1"},
                )  # fmt: skip

    def sampling_params(self, body: Sampling, **more: Any) -> SamplingParams:
        """Merge a request's options into the model's defaults."""
        given = {
            name: getattr(body, name)
            for name in (*DEFAULTS, "presence_penalty", "frequency_penalty", "min_tokens", "seed", "n")
        }
        if given["top_k"] == -1:
            given["top_k"] = 0
        options = self.loaded.defaults | {name: value for name, value in given.items() if value is not None}
        if options.get("seed") is not None:
            options["seed"] &= 0xFFFFFFFF
        stop = body.stop or ()
        try:
            bias = {int(token): value for token, value in (body.logit_bias or {}).items()}
        except ValueError:
            raise ApiError(400, "logit_bias keys must be token ids.", param="logit_bias") from None
        return SamplingParams(
            **{"temperature": 1.0, **options},
            logit_bias=bias,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            ignore_eos=body.ignore_eos,
            include_stop_str_in_output=body.include_stop_str_in_output,
            **{"skip_special_tokens": body.skip_special_tokens, **more},
        )


class Answer:
    """The completions of one HTTP request: one or more prompts, each with `n` completions.

    Args:
        served: the served model.
        prompts: the request's prompts, all with the same sampling params.
        options: passed to `Engine.submit`.
    """

    def __init__(self, served: Served, prompts: list[PreparedPrompt], **options: Any) -> None:
        self._served = served
        self._params = prompts[0].params
        self.requests: list[Request] = []
        self._deltas: asyncio.Queue[tuple[int, OutputDelta]] = asyncio.Queue()
        self._started = time.perf_counter()
        self._span = served.tracing.start("llm_request", self._params, options.get("request_id", ""))
        engine = served.require_engine()
        loop = asyncio.get_running_loop()
        try:
            for index, prompt in enumerate(prompts):

                def hear(delta: OutputDelta, index: int = index) -> None:
                    loop.call_soon_threadsafe(self._deltas.put_nowait, (index, delta))

                self.requests.append(engine.submit(prompt, listener=hear, **options))
        except BaseException as error:
            self.close()
            self._span.fail(error)
            raise

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens of the whole request."""
        return sum(len(r.output.prompt_token_ids) for r in self.requests)

    @property
    def num_completion_tokens(self) -> int:
        """Tokens generated so far."""
        return sum(len(o.token_ids) for r in self.requests for o in r.output.outputs)

    @property
    def usage(self) -> dict[str, Any]:
        """Token usage in OpenAI's format."""
        prompt, text = self.num_prompt_tokens, self.num_completion_tokens
        cached = sum(r.output.num_cached_tokens for r in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": text,
            "total_tokens": prompt + text,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    async def deltas(self) -> AsyncIterator[tuple[int, OutputDelta] | None]:
        """Deltas with the index of their completion; None after `keep_alive_s` without one.

        Raises:
            Exception: the error of a failed completion.
        """
        metrics, keep_alive = self._served.metrics, self._served.settings.keep_alive_s
        left = len(self.requests) * self._params.n
        newest: dict[int, float] = {}
        try:
            while left:
                try:
                    index, delta = await asyncio.wait_for(self._deltas.get(), keep_alive)
                except TimeoutError:
                    yield None
                    continue
                now, place = time.perf_counter(), index * self._params.n + delta.index
                if delta.token_ids:
                    if place in newest:
                        metrics.inter_token_latency.observe(now - newest[place])
                    else:
                        metrics.time_to_first_token.observe(now - self._started)
                        self._span.event("first_token")
                    newest[place] = now
                if delta.finish_reason is not None:
                    left -= 1
                    self._count(self.requests[index], delta, now)
                    if (error := self.requests[index].error) is not None:
                        raise error
                yield place, delta
            self._span.finish(self.num_prompt_tokens, self.num_completion_tokens)
        except Exception as error:
            self._span.fail(error)
            raise
        finally:
            self.close()

    def _count(self, request: Request, delta: OutputDelta, now: float) -> None:
        metrics = self._served.metrics
        assert delta.finish_reason is not None
        metrics.finished(delta.finish_reason.value)
        metrics.e2e_latency.observe(now - self._started)
        size = len(request.output.outputs[delta.index].token_ids)
        metrics.text_size.observe(size)
        metrics.generation_tokens.inc(size)
        if delta.index == 0:
            metrics.prompt_size.observe(len(request.output.prompt_token_ids))
            metrics.prompt_tokens.inc(len(request.output.prompt_token_ids))

    def close(self) -> None:
        """Abort unfinished requests."""
        for request in self.requests:
            request.abort()
