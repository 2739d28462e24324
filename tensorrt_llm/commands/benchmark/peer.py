"""transformers' `generate`, for comparison: in a process of its own, so that neither side slows
the other."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensorrt_llm.commands import transformers_model
from tensorrt_llm.commands.benchmark.engine import BenchError, Run
from tensorrt_llm.commands.benchmark.memory import peak_rss_bytes
from tensorrt_llm.commands.benchmark.timing import Arrival, RequestTiming
from tensorrt_llm.commands.benchmark.workload import BenchRequest

if TYPE_CHECKING:
    import torch


class TransformersPeer:
    """A process that answers requests with transformers' model of a checkpoint.

    Args:
        model: checkpoint directory.
        device: "cpu" or "cuda".
        dtype: torch's name of the weights' and activations' type.
        num_threads: CPU threads; None leaves torch's choice.

    Raises:
        BenchError: it cannot load the model.
    """

    def __init__(self, model: Path, device: str, dtype: str, num_threads: int | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, model, device, dtype, num_threads)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._receive()

    def run(self, request: BenchRequest) -> Run:
        self._connection.send(request)
        run: Run = self._receive()
        return run

    def peak_rss_bytes(self) -> int:
        return peak_rss_bytes(self._process.pid or 0)

    def close(self) -> None:
        self._connection.close()
        self._process.terminate()
        self._process.join()

    def _receive(self) -> Any:
        try:
            answer = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            raise BenchError(f"transformers' process ended with exit code {code}") from None
        if isinstance(answer, BenchError):
            raise answer
        return answer


def _serve(
    connection: Connection, model: Path, device: str, dtype: str, num_threads: int | None
) -> None:
    """The peer's process: says True once the model is loaded, then answers each request with a
    `Run`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the other side's to handle
    try:
        generate = _load(model, device, dtype, num_threads)
        connection.send(True)
        while True:
            connection.send(generate(connection.recv()))
    except EOFError:
        return  # the other side has closed
    except Exception as error:
        connection.send(BenchError(f"transformers failed: {type(error).__name__}: {error}"))


def _load(
    model: Path, device: str, dtype: str, num_threads: int | None
) -> Callable[[BenchRequest], Run]:
    loaded = transformers_model.load(model, device, dtype, num_threads)
    loaded.generation_config.eos_token_id = None  # every request has its full output length
    return lambda request: _generate(loaded, request)


def _generate(model: Any, request: BenchRequest) -> Run:
    import torch

    clock = _ArrivalClock()
    prompt = torch.tensor([request.prompt_token_ids], device=model.device)
    model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),  # else tokens that equal the pad id are masked
        max_new_tokens=request.output_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    return clock.run(request)


class _ArrivalClock:
    """The streamer interface of `generate`: notes when each token arrives."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._puts: list[tuple[float, torch.Tensor]] = []

    def put(self, value: "torch.Tensor") -> None:
        self._puts.append((time.perf_counter() - self._start, value))

    def end(self) -> None:
        """Nothing is held back here."""

    def run(self, request: BenchRequest) -> Run:
        tokens = self._puts[1:]  # the first put is the prompt
        arrivals = tuple(Arrival(seconds, value.numel()) for seconds, value in tokens)
        ids = [token for _, value in tokens for token in value.flatten().tolist()]
        return Run(RequestTiming(len(request.prompt_token_ids), arrivals), ids)
