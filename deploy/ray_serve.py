"""Replicas of a model behind one address, by Ray Serve.

    pip install 'hfax[cpu,ray]'
    serve run ray_serve:app model=demo max_replicas=2        # in this folder; or serve deploy ray_serve.yaml
    curl -s localhost:8000/generate -d '{"prompt": "Return a new list", "max_new_tokens": 20}'

Each replica holds the whole model, on the devices that its resources give it, and takes the requests that wait together as one
batch. Ray starts and stops replicas as requests come, and replaces those that die.
"""

import asyncio
import logging
from typing import Any

import fastapi
import pydantic
from ray import serve

logger = logging.getLogger("ray.serve")


class Settings(pydantic.BaseModel):
    """Arguments of the application: `serve run ray_serve:app name=value …`, or `args` in ray_serve.yaml.

    `resources` of a replica in Ray's terms: {"TPU": 4} for a host of four chips, {"GPU": 1}.
    """

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str = "demo"
    dtype: str = "auto"
    quantization: str | None = None
    parallelism: str | dict[str, int] | None = None
    min_replicas: int = 1
    max_replicas: int = 2
    target_ongoing_requests: float = 4
    batch_size: int = 8
    batch_wait_s: float = 0.01
    prompt_lengths: list[int] = [64]
    max_new_tokens: int = 256
    num_cpus: float = 1
    resources: dict[str, float] = {}


class Request(pydantic.BaseModel):
    """A text to continue. Options are those of `generate`, the model's own where they are left out."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prompt: str = pydantic.Field(min_length=1)
    max_new_tokens: int = pydantic.Field(64, ge=1)
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None


class Response(pydantic.BaseModel):
    """What was written after the prompt."""

    text: str
    tokens: int
    replica: str


api = fastapi.FastAPI(title="hfax")


@serve.deployment
@serve.ingress(api)
class Replica:
    """A model and its tokenizer."""

    def __init__(self, settings: Settings) -> None:
        from transformers import AutoTokenizer

        from hfax import AutoModelForTPU

        self.settings = settings
        self.model = AutoModelForTPU.from_pretrained(
            settings.model, dtype=settings.dtype, quantization=settings.quantization, parallelism=settings.parallelism
        )
        self.tokenizer = AutoTokenizer.from_pretrained(self.model.folder)
        # Serve sends no request before this is done; other options than these compile when they first come
        sizes = [1 << n for n in range((settings.batch_size - 1).bit_length() + 1)]
        for options in ({}, {"do_sample": False}):
            self.model.compile(
                sizes, settings.prompt_lengths, max_new_tokens=settings.max_new_tokens, progress=False, **options
            )
        self.name = serve.get_replica_context().replica_id.unique_id
        self.batched.set_max_batch_size(settings.batch_size)
        self.batched.set_batch_wait_timeout_s(settings.batch_wait_s)

    @api.post("/generate")
    async def generate(self, request: Request) -> Response:
        if request.max_new_tokens > self.settings.max_new_tokens:
            raise fastapi.HTTPException(400, f"max_new_tokens is at most {self.settings.max_new_tokens} here.")
        result = await self.batched(request)
        if isinstance(result, Exception):
            raise fastapi.HTTPException(400, str(result))
        return result

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.01)
    async def batched(self, requests: list[Request]) -> list[Response | Exception]:
        return await asyncio.to_thread(self.answer, requests)

    def answer(self, requests: list[Request]) -> list[Response | Exception]:
        """Each request's result; those with the same options are one batch of the model."""
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.model_dump_json(exclude={"prompt", "max_new_tokens"}), []).append(index)
        results: dict[int, Response | Exception] = {}
        for members in groups.values():
            results |= zip(members, self.write([requests[i] for i in members]), strict=True)
        return [results[index] for index in range(len(requests))]

    def write(self, requests: list[Request]) -> list[Response | Exception]:
        from hfax import HfaxError

        options: dict[str, Any] = requests[0].model_dump(exclude={"prompt", "max_new_tokens"}, exclude_none=True)
        try:
            inputs = self.tokenizer(
                [request.prompt for request in requests], padding=True, padding_side="left", return_tensors="np"
            )
            most = max(request.max_new_tokens for request in requests)
            sequences = self.model.generate(
                inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=most, **options
            )
        except HfaxError as error:
            # of several, one may be too long: each is tried alone
            return [error] if len(requests) == 1 else [self.write([request])[0] for request in requests]
        written = []
        for request, sequence in zip(requests, sequences, strict=True):
            tokens = sequence[inputs["input_ids"].shape[1] :][: request.max_new_tokens].tolist()
            ends = [i for i, token in enumerate(tokens) if token == self.tokenizer.eos_token_id]
            tokens = tokens[: ends[0]] if ends else tokens
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            written.append(Response(text=text, tokens=len(tokens), replica=self.name))
        return written


def app(settings: Settings) -> serve.Application:
    """What `serve run` and ray_serve.yaml start."""
    return Replica.options(
        max_ongoing_requests=4 * settings.batch_size,
        autoscaling_config={
            "min_replicas": settings.min_replicas,
            "max_replicas": settings.max_replicas,
            "target_ongoing_requests": settings.target_ongoing_requests,
        },
        ray_actor_options={"num_cpus": settings.num_cpus, "resources": settings.resources},
    ).bind(settings)
