"""`hfax serve`: serves a model with an OpenAI-compatible API."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfax.cli import model_options
from hfax.cli.compilation_bar import CompilationBar, ConsoleHandler
from hfax.cli.error_display import make_console, reporting
from hfax.cli.generation_options import kv_cache_dtype_option
from hfax.cli.model_options import ModelOptions
from hfax.cli.option_groups import expand
from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    from rich.console import Console

    from hfax.engine.config import EngineConfig
    from hfax.server.loading import Load, Loaded, OnStep
    from hfax.server.settings import Settings

EXAMPLES = """[bold]Examples[/bold]

  hfax serve demo
  hfax serve Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 4096 --api-key secret
  hfax serve ./folder --host 0.0.0.0 --port 80 --config server.yaml

Every option can also be set by an environment variable (HFAX_PORT for --port) or in the --config file (port: 80).
The command line overrides environment variables, which override the file."""

_PANEL, _ACCESS = "Engine", "Access control"
_COMPILING = ("hfax-compile", "hfax-background-compile")
"""How the names of threads that compile begin."""


def _read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Load options from a YAML file as defaults, so environment variables and the command line override them."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} is not a mapping of options to values.")
    known = {parameter.name for parameter in context.command.params if parameter.name is not None}
    options = {str(name).replace("-", "_"): value for name, value in found.items()}
    if unknown := sorted(set(options) - known - {"api_key"}):
        raise typer.BadParameter(f"{path} has unknown options: {', '.join(unknown)}.")
    context.default_map = {**(context.default_map or {}), **options}
    return path


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of the engine."""

    max_num_seqs: Annotated[
        int,
        typer.Option(help="Maximum concurrent sequences.", envvar="HFAX_MAX_NUM_SEQS", min=1, rich_help_panel=_PANEL),
    ] = 32
    max_num_queued_reqs: Annotated[
        int,
        typer.Option(
            help="Maximum waiting sequences.", envvar="HFAX_MAX_NUM_QUEUED_REQS", min=1, rich_help_panel=_PANEL
        ),
    ] = 512
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens of prompt plus output; default: the model's context, at most 8192.",
            envvar="HFAX_MAX_MODEL_LEN",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            help="Maximum tokens per step; longer prompts use chunked prefill.",
            envvar="HFAX_MAX_NUM_BATCHED_TOKENS",
            min=1,
            rich_help_panel=_PANEL,
        ),
    ] = 512
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens per KV-cache block; default: depends on the platform.",
            envvar="HFAX_BLOCK_SIZE",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="Number of KV-cache blocks; default: as many as fit in memory.",
            envvar="HFAX_NUM_BLOCKS",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Reuse the KV cache of shared prompt prefixes.",
            envvar="HFAX_ENABLE_PREFIX_CACHING",
            rich_help_panel=_PANEL,
        ),
    ] = True
    kv_cache_dtype: Annotated[str, kv_cache_dtype_option(_PANEL)] = "auto"
    batch_invariant: Annotated[
        bool,
        typer.Option(
            help="A request's tokens and log-probabilities do not depend on other requests, bit for bit; CPU only, slower prompts.",
            envvar="HFAX_BATCH_INVARIANT",
            rich_help_panel=_PANEL,
        ),
    ] = False

    def config(self) -> EngineConfig:
        """The engine's configuration."""
        from hfax.engine.config import EngineConfig

        fields = dataclasses.asdict(self)
        return EngineConfig(max_waiting=fields.pop("max_num_queued_reqs"), **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AccessOptions:
    """Options of who may use the server, and how much a request may send."""

    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="API key that requests must send; may be repeated. Prefer HFAX_API_KEY, hidden from process lists.",
            envvar="HFAX_API_KEY",
            show_envvar=False,
            rich_help_panel=_ACCESS,
        ),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Additional Host header value accepted on loopback; * for any.",
            envvar="HFAX_ALLOWED_HOST",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin allowed for cross-origin requests; * for any.",
            envvar="HFAX_ALLOWED_ORIGIN",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    allowed_image_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host that images may be fetched from; default: data: URLs only.",
            envvar="HFAX_ALLOWED_IMAGE_HOST",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            help="Address or network of a reverse proxy whose X-Forwarded-For counts; default: none.",
            envvar="HFAX_TRUSTED_PROXY",
            rich_help_panel=_ACCESS,
        ),
    ] = None
    max_body_mb: Annotated[
        float,
        typer.Option(
            help="Maximum size of a request body, in MB.", envvar="HFAX_MAX_BODY_MB", min=0.001, rich_help_panel=_ACCESS
        ),
    ] = 32
    max_host_memory_gb: Annotated[
        float | None,
        typer.Option(
            help="Refuse requests while the server's resident memory exceeds this, in GB; default: no limit.",
            envvar="HFAX_MAX_HOST_MEMORY_GB",
            min=0.001,
            rich_help_panel=_ACCESS,
            show_default=False,
        ),
    ] = None
    request_workers: Annotated[
        int,
        typer.Option(
            help="Worker processes that read requests.", envvar="HFAX_REQUEST_WORKERS", min=2, rich_help_panel=_ACCESS
        ),
    ] = 2
    request_cpu_s: Annotated[
        float,
        typer.Option(
            help="Processor time for reading a request, in seconds; four times as much with images.",
            envvar="HFAX_REQUEST_CPU_S",
            min=0.01,
            rich_help_panel=_ACCESS,
        ),
    ] = 1.0
    request_memory_mb: Annotated[
        float,
        typer.Option(
            help="Memory for reading a request, in MB.",
            envvar="HFAX_REQUEST_MEMORY_MB",
            min=64,
            rich_help_panel=_ACCESS,
        ),
    ] = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetryOptions:
    """Options of metrics, logs and traces."""

    metrics_prefix: Annotated[
        str, typer.Option(help="Metric name prefix: hfax or vllm.", envvar="HFAX_METRICS_PREFIX")
    ] = "hfax"
    health_port: Annotated[
        int | None,
        typer.Option(
            help="Also answer /health, /ready and /metrics on this port, without a key and whatever the other is doing; "
            "0 picks a free one.",
            envvar="HFAX_HEALTH_PORT",
            min=0,
            max=65535,
            show_default=False,
        ),
    ] = None
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="Write the access log as JSON lines.", envvar="HFAX_JSON_LOGS")
    ] = False
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(help="OTLP endpoint for OpenTelemetry traces.", envvar="HFAX_OTLP_ENDPOINT", show_default=False),
    ] = None


@expand
def serve(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL[@REVISION]",
            help="Hugging Face id, folder, its URL (gs://, s3://), or demo.",
            envvar="HFAX_MODEL",
        ),
    ],
    *,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.", envvar="HFAX_HOST")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 picks a free one.", envvar="HFAX_PORT", min=0, max=65535)] = 8000,
    config: Annotated[
        Path | None,
        typer.Option(help="YAML file with options.", envvar="HFAX_CONFIG", is_eager=True, callback=_read_file),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Model name in the API; may be repeated.", envvar="HFAX_SERVED_MODEL_NAME")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Chat template file that replaces the model's.", envvar="HFAX_CHAT_TEMPLATE")
    ] = None,
    engine: EngineOptions,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds until a step counts as hung.",
            envvar="HFAX_STEP_TIMEOUT",
            min=0.1,
            rich_help_panel=_PANEL,
        ),
    ] = 8.0,
    drain_timeout: Annotated[
        float,
        typer.Option(help="Seconds for running requests to finish after SIGTERM.", envvar="HFAX_DRAIN_TIMEOUT", min=0),
    ] = 60.0,
    background_compilation: Annotated[
        bool,
        typer.Option(
            help="Answer requests as soon as the first programs are compiled, and compile those for other sizes meanwhile.",
            envvar="HFAX_BACKGROUND_COMPILATION",
            rich_help_panel=_PANEL,
        ),
    ] = True,
    access: AccessOptions,
    telemetry: TelemetryOptions,
    which: ModelOptions,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Serve a model over HTTP: OpenAI-compatible API, metrics, and a chat page at /."""
    with reporting(verbose):
        from hfax.load.source import reject_missing_path

        name, revision = _split(model, which.revision)
        reject_missing_path(name)
        settings_type, run_server = require_server()
        if telemetry.metrics_prefix.rstrip(":") not in ("hfax", "vllm"):
            raise InvalidInputError(
                f"--metrics-prefix {telemetry.metrics_prefix} is invalid.",
                "It must be hfax or vllm.",
                "Use one of them.",
            )
        settings = settings_type(
            model=name,
            served_model_names=tuple(served_model_name or (name,)),
            api_keys=_keys(access.api_key),
            host=host,
            port=port,
            health_port=telemetry.health_port,
            allowed_hosts=tuple(access.allowed_host or ()),
            allowed_origins=tuple(access.allowed_origin or ()),
            max_body_bytes=int(access.max_body_mb * (1 << 20)),
            max_host_memory_bytes=None
            if access.max_host_memory_gb is None
            else int(access.max_host_memory_gb * (1 << 30)),
            request_workers=access.request_workers,
            request_cpu_s=access.request_cpu_s,
            request_memory_bytes=int(access.request_memory_mb * (1 << 20)),
            step_timeout_s=step_timeout,
            drain_timeout_s=drain_timeout,
            trusted_proxies=tuple(access.trusted_proxy or ()),
            image_hosts=tuple(access.allowed_image_host or ()),
            metrics_prefix=telemetry.metrics_prefix.rstrip(":") + ":",
            json_logs=telemetry.json_logs,
            otlp_endpoint=telemetry.otlp_endpoint,
        )
        template = None if chat_template is None else _read_template(chat_template)
        which = dataclasses.replace(which, revision=revision)
        engine_config = engine.config()

        def load(on_step: OnStep) -> Loaded:
            from hfax.server.loading import load_checkpoint

            return load_checkpoint(
                which.open(name),
                engine_config,
                chat_template=template,
                on_step=on_step,
                in_background=background_compilation,
            )

        _run(settings, run_server, load)


def require_server() -> tuple[type[Settings], Callable[..., BaseException | None]]:
    """The server's settings and its main function.

    Raises:
        UnsupportedOptionError: its packages are not installed.
    """
    try:
        from hfax.server.run import run_server
        from hfax.server.settings import Settings
    except ImportError as error:
        raise UnsupportedOptionError(
            "The server's packages are not installed.", str(error), "Run: pip install 'hfax[serve]'"
        ) from error
    return Settings, run_server


def _run(settings: Settings, run_server: Callable[..., BaseException | None], load: Load) -> None:
    console = make_console()
    _log_to(console)
    bar = CompilationBar(console)

    def load_and_show(on_step: OnStep) -> Loaded:
        loaded = load(on_step)
        if loaded.engine is not None:
            bar.show(loaded.engine)
        return loaded

    def say(address: str, health: str | None) -> None:
        console.print(f"Listening on {address}, loading {settings.model}", soft_wrap=True)
        if health is not None:
            console.print(f"Health and metrics on {health}", soft_wrap=True)
        if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
            console.print(
                "Anyone who can reach this address can use the server: no --api-key is set.",
                style="yellow",
                soft_wrap=True,
            )

    try:
        with bar:
            failure = run_server(settings, load_and_show, say)
    except OSError as error:
        raise InvalidInputError(
            f"Cannot listen on {_ports(settings)}.", str(error), "Choose another --port."
        ) from error
    except SystemExit as stop:  # uvicorn exits if the port is in use
        raise InvalidInputError(
            f"Cannot listen on {_ports(settings)}.",
            "The port is in use by another program.",
            "Choose another --port.",
        ) from stop
    if isinstance(failure, HfaxError):
        raise failure
    if failure is not None:
        console.print(f"The server failed: {type(failure).__name__}: {failure}", style="red", soft_wrap=True)
        _leave_compilation(1)
        raise typer.Exit(1)
    _leave_compilation(0)


def _leave_compilation(code: int) -> None:
    """End the process now if programs are being compiled, which Python would wait for, maybe for minutes: nobody needs them."""
    if any(thread.name.startswith(_COMPILING) for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _ports(settings: Settings) -> str:
    health = f" or :{settings.health_port}" if settings.health_port else ""
    return f"{settings.host}:{settings.port}{health}"


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"The chat template {path} cannot be read.", str(error), "Pass a UTF-8 text file."
        ) from error


def _split(model: str, revision: str | None) -> tuple[str, str | None]:
    """Split MODEL@REVISION; an existing folder with @ in its name is not split."""
    if "@" not in model or Path(model).exists():
        return model, revision
    name, _, own = model.rpartition("@")
    if revision is not None and revision != own:
        raise InvalidInputError(
            f"{model} and --revision {revision} name two revisions.", "A model has one.", "Omit one of them."
        )
    return name, own


def _keys(given: list[str] | None) -> tuple[str, ...]:
    keys = tuple(given or ())
    if any(not key.strip() for key in keys):
        raise InvalidInputError(
            "An --api-key is empty.", "Any request would match it.", "Omit the option, or pass a non-empty key."
        )
    return keys


def _log_to(console: Console) -> None:
    """Send the server log and the access log to stderr, which is the console's."""
    handler = ConsoleHandler(console) if console.is_terminal else logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("hfax.access", "hfax.server", "hfax.engine"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
