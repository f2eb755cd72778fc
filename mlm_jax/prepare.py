"""Prepares the data of a config: data sets, tokenizer, packed rows.

    python -m mlm_jax.prepare --config=configs/bert_base.py --workers=32
    python -m mlm_jax.prepare --config=configs/bert_base.py --beam -- \\
        --runner=FlinkRunner --flink_master=host:8081

Training prepares what is not there, so that this is only needed for a large corpus: to
do it beforehand, on a machine without accelerators, or on many under Apache Beam (an
optional requirement: pip install 'mlm_jax[beam]'; whatever stands after `--` are its
pipeline options). Beam's workers must see `data.cache_dir` and the source's files.
However it is done, the rows are the same to the byte. A killed preparation is gone on
with by the same command.
"""

from absl import flags

from mlm_jax import command, config
from mlm_jax.data import rows, runners
from mlm_jax.errors import InputError

CONFIG = command.define_config()
WORKERS = flags.DEFINE_integer(
    "workers", None, "Processes that pack rows; by default one a core.", lower_bound=1
)
BEAM = flags.DEFINE_boolean("beam", False, "Pack rows under Apache Beam.")


def main(arguments):
    c = CONFIG.value
    config.check(c)
    if arguments and not BEAM.value:
        raise InputError(f"unexpected argument {arguments[0]!r}.")
    if BEAM.value and WORKERS.value:
        raise InputError(
            "--workers is not for --beam; Beam's own options say how many."
        )
    options, run = None, runners.in_processes(WORKERS.value)
    if BEAM.value:
        options = runners.beam_options(arguments)
        run = runners.under_beam(options)
    rows.prepare(c.data, config.tokenizer_of(c), run=run, beam_options=options)


if __name__ == "__main__":
    command.run(main, positional="Beam's pipeline options")
