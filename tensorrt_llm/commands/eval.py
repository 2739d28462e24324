"""trtllm-eval: how often a model is right, with transformers' figure beside it."""

from pathlib import Path

import click

from tensorrt_llm.commands import options, output


@click.command(context_settings={"show_default": True})
@options.model
@click.option(
    "--task",
    required=True,
    type=click.Choice(["glm_tiny"]),
    help="glm_tiny: the checkpoint's own held-out samples, exact match.",
)
@click.option(
    "--num_samples", type=click.IntRange(min=1), help="Take so many, evenly spread.  [default: all]"
)
@click.option("--peer/--no-peer", default=True, help="Ask transformers' generate the same.")
@options.tp_size
@options.config
@options.output_json
def main(
    model: Path,
    task: str,
    num_samples: int | None,
    peer: bool,
    tp_size: int,
    config: Path | None,
    output_json: Path | None,
) -> None:
    """Let a model answer by greedy decoding, and print how often it is right."""
    # Late, so that --help and mistakes on the command line answer at once.
    from tensorrt_llm.commands import evaluation
    from tensorrt_llm.llmapi import llm_args_from_cli_and_yaml

    with options.user_errors():
        samples = evaluation.read_samples(task, model, num_samples)
        flags = {"model": str(model), "tensor_parallel_size": tp_size}
        args = llm_args_from_cli_and_yaml(flags, config)
        answers = {"tensorrt_llm": evaluation.answers(args, samples)}
        if peer:
            answers["transformers"] = evaluation.peer_answers(args, samples)
    result = evaluation.Result(samples, answers)
    click.echo(result.as_text())
    settings = {
        "task": task,
        "llm_args": args.model_dump(mode="json", exclude_unset=True),
        **output.environment(),
    }
    output.write_json(output_json, {"settings": settings, **result.as_dict()})
