"""Who does the parts of a job: this process, several, or Apache Beam's workers.

A run applies a function to each item and yields the results, in any order, as far as
they come back here.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from mlm_jax.errors import InputError, MlmError

Run = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]


def in_processes(workers: int | None = None) -> Run:
    """Returns a run in that many processes, or one a core; in this one if one will do.

    An error in one of them is raised here and ends the others' work; so does the death
    of this process.
    """

    def run(task, items):
        number = min(workers or os.cpu_count() or 1, len(items))
        if number <= 1:
            yield from map(task, items)
            return
        # A process with JAX or the tokenizer's threads in it must not be forked.
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(number, spawn, _start_worker) as pool:
            futures = [pool.submit(task, item) for item in items]
            try:
                for future in as_completed(futures):
                    yield future.result()
            except BrokenProcessPool as error:
                raise MlmError(
                    "a process that packs rows was killed, perhaps for want of memory;"
                    " the same command goes on with the parts that are missing"
                ) from error
            finally:  # none may still write when this has ended
                pool.shutdown(cancel_futures=True)

    return run


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process a core already
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    threading.Thread(target=_die_after, args=(parent,), daemon=True).start()


def _die_after(process) -> None:
    process.join()
    os._exit(1)


def beam_options(arguments: Sequence[str]):
    """Returns Beam's pipeline options. Raises InputError where Beam is not there, or
    does not know one of them."""
    try:
        from apache_beam.options.pipeline_options import PipelineOptions
    except ImportError as error:
        raise InputError(
            f"Apache Beam is not there ({error}): pip install 'mlm_jax[beam]'"
        ) from error
    options = PipelineOptions(list(arguments))
    known = options.get_all_options()
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0]
        if not argument.startswith("--") or name.removeprefix("no_") not in known:
            raise InputError(f"Beam has no pipeline option {argument!r}")
    return options


def under_beam(options) -> Run:
    """Returns a run on Beam's workers, which must see the same files as this process.

    Results stay with the workers.
    """
    import apache_beam as beam

    def run(task, items):
        try:
            pipeline = beam.Pipeline(options=options)
        except ValueError as error:
            reason = str(error).split("\n")[0]
            raise InputError(f"Beam's pipeline options: {reason}") from error
        with pipeline:
            _ = (
                pipeline
                | "parts" >> beam.Create(list(items), reshuffle=False)
                | "spread" >> beam.Reshuffle()  # each wherever there is room
                | "pack" >> beam.Map(task)
            )
        return iter(())

    return run
