"""trtllm-bench: how fast one user gets tokens, beside transformers' `generate` if wanted."""

from pathlib import Path

import click

from tensorrt_llm.commands import options

# Together they cover the contexts around 64 and around 448 tokens.
DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 32, 448
DEFAULT_NUM_REQUESTS = 10
SEED = 0


@click.group()
def main() -> None:
    """Benchmarks of an engine."""


def _one_user(ctx: click.Context, option: click.Parameter, value: int) -> int:
    if value != 1:
        raise click.BadParameter(f"{value} is not supported; latency is measured for 1 user")
    return value


@main.command(context_settings={"show_default": True})
@options.model
@click.option("--peer", type=click.Choice(["transformers"]), help="Measure this one beside it.")
@click.option(
    "--input_len",
    type=click.IntRange(min=1),
    help=f"Tokens of each random prompt.  [default: {DEFAULT_INPUT_LEN}]",
)
@click.option(
    "--output_len",
    type=click.IntRange(min=2),
    help=f"Tokens to generate for each.  [default: {DEFAULT_OUTPUT_LEN}]",
)
@click.option(
    "--dataset",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="JSON lines with prompt or input_ids, and output_tokens, in place of random prompts.",
)
@click.option(
    "--num_requests",
    type=click.IntRange(min=1),
    help=f"Requests to measure.  [default: {DEFAULT_NUM_REQUESTS}, or all of the dataset]",
)
@click.option("--warmup", default=2, type=click.IntRange(min=0), help="Requests before those.")
@click.option("--concurrency", default=1, callback=_one_user, help="Users at the same time.")
@options.tp_size
@click.option(
    "--num_threads",
    type=click.IntRange(min=1),
    help="CPU threads of a rank; the peer gets those of all ranks.  [default: the cores]",
)
@options.config
@options.output_json
def latency(
    model: Path,
    peer: str | None,
    input_len: int | None,
    output_len: int | None,
    dataset: Path | None,
    num_requests: int | None,
    warmup: int,
    concurrency: int,
    tp_size: int,
    num_threads: int | None,
    config: Path | None,
    output_json: Path | None,
) -> None:
    """Latency of one request at a time: greedy, eos ignored, streamed.

    Each request runs on the engine and then on the peer, so that a slow spell of the machine hits
    both. Numbers are medians unless they say otherwise.
    """
    if dataset is not None and (input_len is not None or output_len is not None):
        raise click.UsageError("--dataset brings its own lengths; drop --input_len, --output_len")
    from tensorrt_llm.commands.benchmark import workload

    with options.user_errors():
        requests = workload.build(
            model,
            dataset,
            num_requests or (None if dataset else DEFAULT_NUM_REQUESTS),
            input_len or DEFAULT_INPUT_LEN,
            output_len or DEFAULT_OUTPUT_LEN,
            SEED,
        )
        args = options.llm_args(
            {
                "model": str(model),
                "skip_tokenizer_init": True,
                "tensor_parallel_size": tp_size,
                "num_threads": num_threads,
                "max_batch_size": concurrency,
                "max_seq_len": max(request.total_tokens for request in requests),
            },
            config,
        )
    # Late, so that --help and mistakes on the command line answer at once.
    from tensorrt_llm.commands.benchmark.latency import run_latency

    settings = {...}
