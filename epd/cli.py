"""The `epd` command: serve, one stage, chat, bench, doctor.

Flags stay few on purpose: every key of the configuration is reachable as ``--set
section.key=value``, in a file, and from the environment (docs/operations.md). Heavy
modules are imported inside the commands, so that ``epd --help`` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from epd import __version__
from epd.bench import command as bench

if TYPE_CHECKING:
    from epd.config import Config

app = typer.Typer(
    name="epd",
    help="Serve vision-language models as three services: encode, prefill, decode.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Checkpoint = Annotated[
    str | None,
    typer.Argument(help="Folder of the model (transformers format).", show_default=False),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file; see docs/operations.md.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Any configuration key, e.g. kv.block_tokens=16."
    ),
]
Count = Annotated[
    int | None, typer.Option(min=0, help="Processes of this stage.", show_default="1")
]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"epd {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    checkpoint: Checkpoint = None,
    encode: Count = None,
    prefill: Count = None,
    decode: Count = None,
    stages: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STAGE[+STAGE...]",
            help="A worker process and the stages that it hosts; repeatable, in place of the "
            "counts. encode+prefill+decode is all in one process.",
        ),
    ] = None,
    http_port: Annotated[
        int | None, typer.Option(help="Port of the HTTP API; 0: any.", show_default="8000")
    ] = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Start gateway and stages as processes on this machine; Ctrl-C stops them all."""
    flags = {
        "serve.encode": encode,
        "serve.prefill": prefill,
        "serve.decode": decode,
        "serve.stages": tuple(stages) if stages else None,
        "gateway.http_port": http_port,
    }
    loaded = _configure(checkpoint, config, settings, flags)
    from epd.supervisor import run

    raise typer.Exit(run(loaded))


def _stage_command(role: str, text: str) -> None:
    def command(
        checkpoint: Checkpoint = None, config: ConfigFile = None, settings: Settings = None
    ) -> None:
        loaded = _configure(checkpoint, config, settings, {})
        from epd.host import run_stage

        raise typer.Exit(run_stage(role, loaded))

    app.command(name=role, help=text)(command)


_stage_command("encode", "Run one encode worker: pictures in, embeddings out.")
_stage_command("prefill", "Run one prefill worker: prompt in, KV cache and first token out.")
_stage_command("decode", "Run one decode worker: KV cache in, tokens out.")
_stage_command("gateway", "Run one gateway: the HTTP and gRPC front, without weights.")


@app.command()
def worker(
    stages: Annotated[str, typer.Option(metavar="STAGE[+STAGE...]", help="What it hosts.")],
    checkpoint: Checkpoint = None,
    config: ConfigFile = None,
    settings: Settings = None,
) -> None:
    """Run one worker of several stages, which share weights, KV cache and one thread."""
    loaded = _configure(checkpoint, config, settings, {})
    from epd.errors import EpdError
    from epd.host import run_stage, stages_of

    try:
        role = "+".join(stages_of(stages))
    except EpdError as error:
        raise _usage(error.message) from error
    raise typer.Exit(run_stage(role, loaded))


@app.command()
def chat(
    question: Annotated[
        str | None, typer.Argument(help="Ask this and leave; without it, a conversation.")
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Picture before the question; repeatable."),
    ] = None,
    url: Annotated[str, typer.Option(help="Base URL of the API.")] = "http://127.0.0.1:8000/v1",
    model: Annotated[str, typer.Option(help="Model id; empty: the one that is served.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer in tokens.")] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    api_key: Annotated[
        str, typer.Option(envvar="EPD_API_KEY", help="Where the gateway has gateway.api_keys.")
    ] = "",
) -> None:
    """Ask a running gateway from the terminal, with pictures."""
    from epd.chat import Client, converse

    client = Client(url, model, temperature=temperature, max_tokens=max_tokens, api_key=api_key)
    raise typer.Exit(converse(client, question, image or []))


app.add_typer(bench.app)


@app.command()
def doctor(
    checkpoint: Checkpoint = None, config: ConfigFile = None, settings: Settings = None
) -> None:
    """Say what is missing on this machine: libraries, Mooncake build, ports, memory, model."""
    from epd.doctor import diagnose

    raise typer.Exit(diagnose(lambda: _load(checkpoint, config, settings, {})))


def _configure(
    checkpoint: str | None, file: Path | None, settings: list[str] | None, flags: dict[str, Any]
) -> Config:
    from epd.errors import EpdError

    try:
        loaded = _load(checkpoint, file, settings, flags)
        if not loaded.model.path:
            raise _usage("which model? Give the folder of a checkpoint")
        if not Path(loaded.model.path, "config.json").is_file():
            raise _usage(f"{loaded.model.path}: not a checkpoint (no config.json in it)")
    except EpdError as error:
        raise _usage(error.message) from error
    return loaded


def _load(
    checkpoint: str | None, file: Path | None, settings: list[str] | None, flags: dict[str, Any]
) -> Config:
    """File, environment, --set, then the named flags."""
    from epd.config_sources import load_config
    from epd.errors import invalid

    values: dict[str, Any] = {}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise invalid(f"--set {setting}: write KEY=VALUE", "set")
        values[key.strip()] = value
    values |= {key: value for key, value in flags.items() if value is not None}
    if checkpoint is not None:
        values["model.path"] = str(Path(checkpoint).resolve())
    return load_config(file, values)


def _usage(reason: str) -> typer.Exit:
    typer.echo(f"epd: {reason}", err=True)
    return typer.Exit(2)


def main() -> None:
    """Entry point of the `epd` script and of ``python -m epd.cli``."""
    try:
        app()
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
