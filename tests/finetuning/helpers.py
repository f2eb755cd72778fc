"""A small run to start from, and tasks that can be learned in seconds."""

import json

import jax
import numpy as np

from configs import tiny
from configs.finetune import base
from mlm_jax import checkpoint, config, optim, program, state
from mlm_jax.data.tokenizer import Tokenizer
from mlm_jax.finetuning import problem, settings
from mlm_jax.finetuning.progress import Log
from mlm_jax.finetuning.trials import Trainer

GOOD, BAD = ("fine", "lovely", "superb"), ("awful", "dreadful", "horrid")
REST = ("the", "house", "was", "seen", "by", "a", "very", "old", "friend", "of", "hers")
ROW_LENGTH = 32


class NoStop:
    asked = None


class Silence(Log):
    def __init__(self):
        pass

    def step(self, trials):
        pass

    def epoch(self, epoch, tracks):
        pass

    def end(self, trials):
        pass


def make_tokenizer():
    words = " ".join(GOOD + BAD + REST)
    return Tokenizer.train(
        [words] * 4,
        kind="wordpiece",
        vocab_size=160,
        lowercase=True,
        strip_accents=True,
    )


def make_run(workdir, **changes):
    """Writes a run as training leaves it, with random weights."""
    c = tiny.get_config().copy_and_resolve_references()
    fields = {
        "data.row_length": ROW_LENGTH,
        "model.num_layers": 1,
        "model.width": 16,
        "model.mlp_width": 32,
    } | changes
    c.update_from_flattened_dict(fields)
    tokenizer = make_tokenizer()
    model = program.model_of(c, tokenizer.vocab_size)
    made = jax.jit(
        lambda: state.init_state(
            jax.random.key(7),
            config.hparams(c),
            model=model,
            optimizer=optim.adamw,
            row_length=ROW_LENGTH,
        )
    )()
    with checkpoint.Checkpoints(workdir, keep=1) as checkpoints:
        checkpoints.save(5, made.replace(step=made.step + 5))
    tokenizer.save(workdir / "tokenizer.json")
    config.save(c, workdir)
    return workdir


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def make_config(folder, records, *, test=None, **changes):
    """Returns a config for a task of `records`, which are its validation as well."""
    c = base.get_config().copy_and_resolve_references()
    data = write(folder / "data.jsonl", records)
    fields = {
        "task.train": data,
        "task.validation": data,
        "task.test": test and write(folder / "test.jsonl", test),
        "seeds": (0,),
        "learning_rates": (1e-2,),
        "batch_size": 8,
        "dropout": 0.0,
        "num_epochs": 12,
        "patience": 12,
    } | changes
    with c.unlocked():
        for name, value in fields.items():
            *section, field = name.split(".")
            (c[section[0]] if section else c)[field] = value
    settings.check(c)
    return c


def make_trainer(c, start, together=1):
    found = problem.make(c, start.tokenizer, start.config.data.row_length)
    return Trainer(c, found, start, together), found


def train(trainer, *trials):
    return trainer.train(list(trials), NoStop, Silence())


def sentences(number, seed=0):
    """Returns (words, is good): each has one word that tells."""
    random = np.random.default_rng(seed)
    found = []
    for n in range(number):
        words = list(random.choice(REST, random.integers(3, 7)))
        place = random.integers(len(words))
        words[place] = str(random.choice((BAD, GOOD)[n % 2]))
        found.append((words, bool(n % 2)))
    return found


def classification(number=32, seed=0):
    return [
        {"text": " ".join(words), "label": "good" if good else "bad"}
        for words, good in sentences(number, seed)
    ]
