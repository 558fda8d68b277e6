"""The command line of `epd bench`. Heavy modules are imported when it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from epd.bench.campaign import Plan, Results

app = typer.Typer(
    name="bench",
    help="Measure OpenAI-compatible servers side by side, or each stage alone.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

_LOAD = "Load"
_REQUEST = "Requests"


@app.callback()
def load(
    context: typer.Context,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="Base URL with /v1; repeat to compare."),
    ] = None,
    model: Annotated[str, typer.Option(help="Model id; empty: the first that is served.")] = "",
    api_key: Annotated[str, typer.Option(envvar="EPD_BENCH_API_KEY")] = "none",
    pid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PID", help="A target's process, to count its CPU."),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=JSON", help="Fields for one target; null takes one out."),
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests in flight, e.g. 1,8.", rich_help_panel=_LOAD)
    ] = "",
    rate: Annotated[
        str, typer.Option(help="Poisson arrivals a second, e.g. 0.5,1,2.", rich_help_panel=_LOAD)
    ] = "",
    trace: Annotated[
        Path | None, typer.Option(help="Trace file (docs/benchmarks.md).", rich_help_panel=_LOAD)
    ] = None,
    speed: Annotated[
        str, typer.Option(help="How much faster the trace is played.", rich_help_panel=_LOAD)
    ] = "1",
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Of one round: 16, or a whole trace.", rich_help_panel=_LOAD),
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Kept; one more warms up.", rich_help_panel=_LOAD)
    ] = 3,
    timeout: Annotated[float, typer.Option(help="Of a request, s.", rich_help_panel=_LOAD)] = 300,
    fresh_connections: Annotated[
        bool, typer.Option(help="One for each request.", rich_help_panel=_LOAD)
    ] = False,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, help="Of the text.", rich_help_panel=_REQUEST)
    ] = 100,
    output_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_REQUEST)] = 32,
    image: Annotated[
        list[str] | None,
        typer.Option(metavar="WxH", help="A picture; repeatable.", rich_help_panel=_REQUEST),
    ] = None,
    image_pool: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Different pictures of each size; 0: all new. 0, or 8 a client of a trace.",
            rich_help_panel=_REQUEST,
        ),
    ] = None,
    zipf: Annotated[
        float, typer.Option(min=0, help="Of the pool's pictures.", rich_help_panel=_REQUEST)
    ] = 1.0,
    prefix_tokens: Annotated[
        int, typer.Option(min=0, help="Shared by all prompts.", rich_help_panel=_REQUEST)
    ] = 0,
    logprobs: Annotated[
        bool, typer.Option(help="An event a token, also without text.", rich_help_panel=_REQUEST)
    ] = False,
    ignore_eos: Annotated[bool, typer.Option(rich_help_panel=_REQUEST)] = True,
    timeline: Annotated[
        bool, typer.Option(help="Ask epd where the time went.", rich_help_panel=_REQUEST)
    ] = False,
    seed: int = 0,
    slo_ttft: Annotated[
        float | None, typer.Option(help="s; with --slo-tpot. Default: 5 x and 2 x unloaded.")
    ] = None,
    slo_tpot: Annotated[float | None, typer.Option(help="s a token.")] = None,
    json: Annotated[Path | None, typer.Option(help="Everything, with every request.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG; needs the extra bench.")] = None,
) -> None:
    """Drive one or more servers with the same load, in turn; print medians and ratios."""
    if context.invoked_subcommand:
        return
    flags = {k: v for k, v in locals().items() if k not in ("context", "api_key")}
    _exit_on_error(lambda: _run(flags, api_key))


def _run(flags: dict[str, Any], api_key: str) -> None:
    import asyncio

    from epd.bench import flags as parse
    from epd.bench import report

    flags = parse.with_defaults(flags)
    plan, trace = parse.plan(flags)
    named = parse.targets(flags["target"])
    for flag in ("json", "plot"):
        if flags[flag]:
            report.require_place(flags[flag], flag)
    if trace:
        typer.echo(f"trace {flags['trace']}: {trace}", err=True)
    results = asyncio.run(_measure(named, plan, flags, api_key))
    typer.echo("\n" + report.tables(results))
    if flags["json"]:
        workload = {k: str(v) if isinstance(v, Path) else v for k, v in flags.items()}
        report.write(flags["json"], report.document(results, named, workload))
    if flags["plot"]:
        from epd.bench.plot import draw

        draw(results.summaries(), flags["plot"])


async def _measure(
    named: Mapping[str, str], plan: Plan, flags: dict[str, Any], api_key: str
) -> Results:
    from epd.bench import flags as parse
    from epd.bench.campaign import connect, measure, session

    pids, extras = parse.pids(flags["pid"], named), parse.extras(flags["extra"], named)
    async with session(plan) as http:
        targets = [
            await connect(
                name, url, http, flags["model"], api_key, pids.get(name, ()), extras.get(name)
            )
            for name, url in named.items()
        ]
        return await measure(targets, plan, _tell)


def _tell(done: Any) -> None:
    failed = [record for record in done.records if not record.ok]
    number = f"round {done.number}" if done.number else "warm-up"
    typer.echo(
        f"{number:>8}  {done.target:<16} {done.load!s:<16} {len(done.records)} requests in"
        f" {done.wall_s:.1f} s",
        err=True,
    )
    if failed:
        first = failed[0]
        typer.echo(f"{len(failed)} failed, e.g. {first.error}: {first.detail}", err=True)


def _exit_on_error(run: Any) -> None:
    from epd.errors import EpdError

    try:
        run()
    except EpdError as error:
        typer.echo(f"epd bench: {error.message}", err=True)
        raise typer.Exit(2 if error.kind.value.startswith("invalid") else 1) from error


@app.command()
def ceiling(
    streams: Annotated[str, typer.Option(help="At once, e.g. 1,64.")] = "1,8,64",
    events: Annotated[int, typer.Option(min=1, help="Of one answer.")] = 512,
) -> None:
    """Say how many events a second this client can take, against a scripted server."""

    def run() -> None:
        from epd.bench.ceiling import run as measure
        from epd.bench.flags import whole_numbers

        for found in measure(tuple(whole_numbers(streams, "streams")), events):
            typer.echo(
                f"{found.streams:>4} streams: {found.events_s:,.0f} events/s,"
                f" {found.cpu_us:.1f} us of client CPU an event"
                f" ({1e6 / found.cpu_us:,.0f} events/s a core)"
            )

    _exit_on_error(run)


@app.command()
def stage(
    checkpoint: Annotated[str, typer.Argument(help="Folder of the model.")],
    only: Annotated[str, typer.Option(help="compute, handoff, transfer; with commas.")] = "",
    threads: Annotated[int, typer.Option(min=1)] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 9,
    context: Annotated[int, typer.Option(min=1, help="Tokens of decoding sequences.")] = 256,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill forward.")] = 512,
    side: Annotated[int, typer.Option(min=28, help="Of the picture, px.")] = 448,
    kernels_off: Annotated[bool, typer.Option(help="Without compiled kernels too.")] = False,
    pause: Annotated[
        float, typer.Option(min=0, help="Seconds of rest before each run of a transfer.")
    ] = 0.1,
    int8: Annotated[bool, typer.Option(help="With int8 weights too.")] = False,
    json: Annotated[Path | None, typer.Option()] = None,
) -> None:
    """Measure each stage alone beside its floor: memory, GEMM, sockets, Mooncake."""

    def run() -> None:
        # Before torch starts its threads, as a stage does.
        from epd.cpus import prepare_threads

        prepare_threads(threads)
        from epd.bench.report import require_place
        from epd.bench.stage import run as stages
        from epd.bench.stage.compute import Sizes
        from epd.errors import invalid

        parts = tuple(part for part in only.split(",") if part) or stages.PARTS
        if unknown := set(parts) - set(stages.PARTS):
            raise invalid(f"--only {', '.join(sorted(unknown))}: there is no such part", "only")
        if json:
            require_place(json, "json")
        sizes = Sizes(context, chunk, side)
        options = stages.Options(
            checkpoint, threads, rounds, parts, kernels_off, int8, pause, sizes
        )
        found = stages.run(options, typer.echo)
        if json:
            stages.save(json, found)

    _exit_on_error(run)
