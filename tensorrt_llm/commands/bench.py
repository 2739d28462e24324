"""trtllm-bench: how fast one user gets tokens, beside a peer if wanted."""

import os
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tensorrt_llm.commands import options, output


@click.group()
def main() -> None:
    """Benchmarks of an engine."""


def _one_user(ctx: click.Context, option: click.Parameter, value: int) -> int:
    if value != 1:
        raise click.BadParameter(f"{value} is not supported; latency is measured for 1 user")
    return value


def _random_only(ctx: click.Context, option: click.Parameter, value: int) -> int:
    """Lengths belong to random prompts; `--dataset` is eager, so it is known here."""
    given = ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    if given and ctx.params["dataset"] is not None:
        raise click.BadParameter("a dataset has its own lengths")
    return value


@main.command(context_settings={"show_default": True})
@options.model
@click.option(
    "--peer",
    type=click.Choice(["transformers", "no-drafts"]),
    help="Measure this one as well: transformers' generate, or this engine without its drafts.",
)
@click.option(
    "--dataset",
    is_eager=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with prompt or input_ids, and output_tokens, in place of random prompts.",
)
@click.option(
    "--input_len",
    default=32,
    type=click.IntRange(min=1),
    callback=_random_only,
    help="Tokens of each random prompt.",
)
@click.option(
    "--output_len",
    default=448,
    type=click.IntRange(min=2),
    callback=_random_only,
    help="Tokens to generate after each.",
)
@click.option(
    "--num_requests",
    type=click.IntRange(min=1),
    help="Requests to measure.  [default: 10, or the whole dataset]",
)
@click.option("--warmup", default=2, type=click.IntRange(min=0), help="Requests before those.")
@click.option(
    "--concurrency", default=1, type=int, callback=_one_user, help="Users at the same time."
)
@options.tp_size
@click.option(
    "--num_threads",
    type=click.IntRange(min=1),
    help="CPU threads of a rank; the peer gets those of all ranks.  [default: the cores, shared]",
)
@options.config
@options.output_json
def latency(
    model: Path,
    peer: str | None,
    warmup: int,
    concurrency: int,
    tp_size: int,
    num_threads: int | None,
    config: Path | None,
    output_json: Path | None,
    **workload: Any,
) -> None:
    """Latency of one request at a time: greedy, eos ignored, streamed.

    Each request runs on the engine and then on the peer, so that a slow spell of the machine hits
    both. Numbers are medians unless they say otherwise.
    """
    # Late, so that --help and mistakes on the command line answer at once.
    from tensorrt_llm.commands.benchmark.latency import run_latency
    from tensorrt_llm.commands.benchmark.workload import Workload
    from tensorrt_llm.llmapi import llm_args_from_cli_and_yaml
    from tensorrt_llm.llmapi.checkpoint import Checkpoint

    with options.user_errors():
        requests = Workload(**workload).requests(Checkpoint.open(model))
        flags = {
            "model": str(model),
            "skip_tokenizer_init": True,
            "tensor_parallel_size": tp_size,
            "num_threads": num_threads or max(1, len(os.sched_getaffinity(0)) // tp_size),
            "max_batch_size": concurrency,
            "max_seq_len": max(request.total_tokens for request in requests),
        }
        report = run_latency(
            llm_args_from_cli_and_yaml(flags, config),
            requests,
            warmup=warmup,
            peer=peer,
            settings={**workload, "warmup": warmup, "concurrency": concurrency},
        )
    click.echo(report.as_text())
    output.write_json(output_json, report.as_dict())
