"""`hfax serve`: a model behind the OpenAI API."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfax.cli import model_options
from hfax.cli.error_display import make_console, reporting
from hfax.errors import HfaxError, InvalidInputError, UnsupportedOptionError

if TYPE_CHECKING:
    from hfax.server.served import Loaded
    from hfax.server.settings import Settings

EXAMPLES = """[bold]Examples[/bold]

  hfax serve demo
  hfax serve Qwen/Qwen3-0.6B --dtype bfloat16 --max-model-len 4096 --api-key secret
  hfax serve ./folder --host 0.0.0.0 --port 80 --config server.yaml

Every option can also be set by a variable, HFAX_PORT for --port, or in the file of --config, port: 80.
The command line wins over variables, and those over the file."""

_PANEL, _ACCESS = "Engine", "Who may ask"


def _read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Options of a YAML file become defaults, so that variables and the command line win over it."""
    if path is None:
        return None
    import yaml

    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    found = {} if found is None else found
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} is no mapping of options to values.")
    known = {parameter.name for parameter in context.command.params if parameter.name is not None}
    options = {str(name).replace("-", "_"): value for name, value in found.items()}
    if unknown := sorted(set(options) - known - {"api_key"}):
        raise typer.BadParameter(f"{path} has no options {', '.join(unknown)}.")
    context.default_map = {**(context.default_map or {}), **options}
    return path


def serve(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL[@REVISION]", help="Hugging Face id, local folder, or demo.", envvar="HFAX_MODEL"),
    ],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", envvar="HFAX_HOST")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 takes a free one.", envvar="HFAX_PORT", min=0, max=65535)] = 8000,
    config: Annotated[
        Path | None,
        typer.Option(help="A YAML file of options.", envvar="HFAX_CONFIG", is_eager=True, callback=_read_file),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name to ask for; may be repeated.", envvar="HFAX_SERVED_MODEL_NAME")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A file to use instead of the model's own.", envvar="HFAX_CHAT_TEMPLATE")
    ] = None,
    max_num_seqs: Annotated[
        int, typer.Option(help="Texts at once.", envvar="HFAX_MAX_NUM_SEQS", min=1, rich_help_panel=_PANEL)
    ] = 32,
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Texts that may wait.", envvar="HFAX_MAX_NUM_QUEUED_REQS", min=1, rich_help_panel=_PANEL)
    ] = 512,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and text together; the model's context, at most 8192, if left out.",
            envvar="HFAX_MAX_MODEL_LEN",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int,
        typer.Option(
            help="Tokens of a step; longer prompts are read in parts.",
            envvar="HFAX_MAX_NUM_BATCHED_TOKENS",
            min=1,
            rich_help_panel=_PANEL,
        ),
    ] = 512,
    block_size: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a block of the KV cache; what fits the platform if left out.",
            envvar="HFAX_BLOCK_SIZE",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    num_blocks: Annotated[
        int | None,
        typer.Option(
            help="Blocks of the KV cache; what the memory holds if left out.",
            envvar="HFAX_NUM_BLOCKS",
            min=1,
            show_default=False,
            rich_help_panel=_PANEL,
        ),
    ] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            help="Compute equal beginnings of prompts once.",
            envvar="HFAX_ENABLE_PREFIX_CACHING",
            rich_help_panel=_PANEL,
        ),
    ] = True,
    step_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds after which a step counts as hung.",
            envvar="HFAX_STEP_TIMEOUT",
            min=0.1,
            rich_help_panel=_PANEL,
        ),
    ] = 8.0,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds for running requests after SIGTERM.", envvar="HFAX_DRAIN_TIMEOUT", min=0)
    ] = 60.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Key that requests must bring; may be repeated. HFAX_API_KEY does not show in process lists.",
            envvar="HFAX_API_KEY",
            show_envvar=False,
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Further name of a server on loopback; * for any.", envvar="HFAX_ALLOWED_HOST", rich_help_panel=_ACCESS
        ),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Site whose pages may ask; * for any.", envvar="HFAX_ALLOWED_ORIGIN", rich_help_panel=_ACCESS
        ),
    ] = None,
    allowed_image_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host that images may be fetched from; else they come as data: URLs.",
            envvar="HFAX_ALLOWED_IMAGE_HOST",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    max_body_mb: Annotated[
        float,
        typer.Option(help="Size of a request's body.", envvar="HFAX_MAX_BODY_MB", min=0.001, rich_help_panel=_ACCESS),
    ] = 32,
    metrics_prefix: Annotated[
        str, typer.Option(help="Of metrics' names: hfax or vllm.", envvar="HFAX_METRICS_PREFIX")
    ] = "hfax",
    json_logs: Annotated[
        bool, typer.Option("--json-logs", help="Access log as JSON lines.", envvar="HFAX_JSON_LOGS")
    ] = False,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Where OpenTelemetry traces go.", envvar="HFAX_OTLP_ENDPOINT", show_default=False)
    ] = None,
    dtype: model_options.DtypeOption = model_options.Dtype.AUTO,
    quantization: model_options.QuantizationOption = None,
    parallelism: model_options.ParallelismOption = None,
    token: model_options.TokenOption = None,
    trust_remote_code: model_options.TrustOption = False,
    local_files_only: model_options.LocalOption = False,
    verbose: model_options.VerboseOption = False,
) -> None:
    """Serve a model over HTTP: the OpenAI API, metrics, and a chat page at /."""
    with reporting(verbose):
        settings_type, run_server = _require_server()
        if metrics_prefix.rstrip(":") not in ("hfax", "vllm"):
            raise InvalidInputError(f"--metrics-prefix {metrics_prefix}.", "Dashboards know two.", "Use hfax or vllm.")
        name, revision = _split(model)
        settings = settings_type(
            model=name,
            served_model_names=tuple(served_model_name or (name,)),
            api_keys=_keys(api_key),
            host=host,
            port=port,
            allowed_hosts=tuple(allowed_host or ()),
            allowed_origins=tuple(allowed_origin or ()),
            max_body_bytes=int(max_body_mb * (1 << 20)),
            step_timeout_s=step_timeout,
            drain_timeout_s=drain_timeout,
            image_hosts=tuple(allowed_image_host or ()),
            metrics_prefix=metrics_prefix.rstrip(":") + ":",
            json_logs=json_logs,
            otlp_endpoint=otlp_endpoint,
        )
        options = model_options.ModelOptions(
            name=name,
            dtype=dtype,
            revision=revision,
            token=token,
            trust_remote_code=trust_remote_code,
            local_files_only=local_files_only,
            quantization=quantization,
            parallelism=parallelism,
        )
        engine = {
            "max_num_seqs": max_num_seqs,
            "max_waiting": max_num_queued_reqs,
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "num_blocks": num_blocks,
            "enable_prefix_caching": enable_prefix_caching,
        }
        _log_to_stderr()
        _run(settings, run_server, lambda on_step: _load(options, engine, chat_template, on_step))


def _require_server() -> tuple[type[Settings], Callable[..., BaseException | None]]:
    try:
        from hfax.server.run import run_server
        from hfax.server.settings import Settings
    except ImportError as error:
        raise UnsupportedOptionError(
            "The server's packages are missing.", str(error), "pip install 'hfax[serve]'"
        ) from error
    return Settings, run_server


def _run(settings: Settings, run_server: Callable[..., BaseException | None], load: Callable[..., Loaded]) -> None:
    console = make_console()

    def say(address: str) -> None:
        console.print(f"Listening on {address}, loading {settings.model}", soft_wrap=True)
        if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
            console.print(
                "Everybody who reaches this address may ask: there is no --api-key.", style="yellow", soft_wrap=True
            )

    try:
        failure = run_server(settings, load, say)
    except OSError as error:
        raise InvalidInputError(
            f"{settings.host}:{settings.port} cannot be listened on.", str(error), "Choose another --port."
        ) from error
    except SystemExit as stop:  # uvicorn's way to say that the port is taken
        raise InvalidInputError(
            f"{settings.host}:{settings.port} cannot be listened on.",
            "Another program has it.",
            "Choose another --port.",
        ) from stop
    if isinstance(failure, HfaxError):
        raise failure
    if failure is not None:
        console.print(f"The server failed: {type(failure).__name__}: {failure}", style="red", soft_wrap=True)
        raise typer.Exit(1)


def _load(
    options: model_options.ModelOptions,
    engine_options: dict[str, Any],
    template: Path | None,
    on_step: Callable[[float, int], None],
) -> Loaded:
    """The model, its programs made."""
    from hfax.engine.engine import EngineConfig
    from hfax.server.chat import ChatTemplate
    from hfax.server.embeddings import Embedder
    from hfax.server.served import Loaded, load_writer

    checkpoint = model_options.open_checkpoint(options)
    tokenizer = checkpoint.load_tokenizer()
    chat_template = _read_template(template)
    processor = _processor(checkpoint)
    if not _writes(checkpoint.config):
        embedder = Embedder(checkpoint.load_model("feature-extraction"), tokenizer, checkpoint.source.folder)
        embedder.warm_up()
        found = ChatTemplate(tokenizer, None, chat_template)
        return Loaded(
            tokenizer=tokenizer, template=found, engine=None, embedder=embedder, defaults={}, max_new_tokens=None
        )
    return load_writer(
        checkpoint.load_model(),
        tokenizer,
        EngineConfig(**engine_options),
        processor=processor,
        chat_template=chat_template,
        on_step=on_step,
    )


def _writes(config: Any) -> bool:
    """Whether the checkpoint's class writes text."""
    names = getattr(config, "architectures", None) or []
    return not names or any(n.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for n in names)


def _processor(checkpoint: model_options.Checkpoint) -> Any:
    """What makes inputs of images, if the model reads them."""
    if (
        not (checkpoint.source.folder / "preprocessor_config.json").is_file()
        and not (checkpoint.source.folder / "processor_config.json").is_file()
    ):
        return None
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(
        checkpoint.source.folder, trust_remote_code=checkpoint.options.trust_remote_code, local_files_only=True
    )


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidInputError(
            f"The chat template {path} cannot be read.", str(error), "Name a file of text."
        ) from error


def _split(model: str) -> tuple[str, str | None]:
    """MODEL@REVISION; a folder that has an @ in its name is a folder."""
    if "@" not in model or Path(model).exists():
        return model, None
    name, _, revision = model.rpartition("@")
    return name, revision


def _keys(given: list[str] | None) -> tuple[str, ...]:
    keys = tuple(given or ())
    if any(not key.strip() for key in keys):
        raise InvalidInputError("An --api-key is empty.", "Everybody would have it.", "Leave it out, or give one.")
    return keys


def _log_to_stderr() -> None:
    """The server's own log and the access log: lines on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in ("hfax.access", "hfax.server", "hfax.engine"):
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.propagate = False
