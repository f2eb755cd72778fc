"""A config or argument that cannot work is refused by name, before any compilation."""

import os
import pathlib
import resource
import subprocess
import sys
import time

import ml_collections
import pytest

from configs import (
    austen,
    base,
    bert_base,
    bert_large,
    modernbert_base,
    roberta_base,
    tiny,
)
from mlm_jax import config, optim, schedules
from mlm_jax.corruption import replace, select, settings, units, weights
from mlm_jax.data import packing, tokenizer
from mlm_jax.errors import InputError
from mlm_jax.model import encoder, layers

ROOT = pathlib.Path(__file__).parents[1]

STEPS, WIDTH = tiny.get_config().optim.num_steps, tiny.get_config().model.width
# (override, what the one line must contain). B75 and more.
REFUSED = [
    ("corruption.rate=-0.5", ["config.corruption.rate = -0.5", "above 0"]),
    ("corruption.rate=nan", ["config.corruption.rate = nan"]),
    ("corruption.rate=1.5", ["config.corruption.rate = 1.5", "up to 1"]),
    ("corruption.random_frac=0.3", ["mask_frac", "random_frac = 1.1", "at most 1"]),
    ("corruption.mask_frac=(1.0)", ["config.corruption.mask_frac", "a number"]),
    ("corruption.count=exactly", ["'exactly'", "exact, stochastic, bernoulli"]),
    ("corruption.mask_rat=0.4", ["mask_rat does not exist", "corruption.mask_frac?"]),
    ("corruption.rat=0.4", ["did you mean config.corruption.rate?"]),
    ("corrupton.rate=0.4", ["did you mean config.corruption.rate?"]),
    ("rate=0.4", ["did you mean config.corruption.rate?"]),
    ("data.batchsize=8", ["did you mean config.data.batch_size?"]),
    ("learning_rate=1", ["did you mean config.optim.peak_learning_rate?"]),
    ("optim.num_steps=1e4", ["config.optim.num_steps = '1e4'", "an integer"]),
    ("optim.warmup_steps=1001", ["warmup_steps = 1001", f"num_steps = {STEPS}"]),
    ("data.batch_size=0", ["config.data.batch_size = 0", "1 or more"]),
    ("data.batch_size=ten", ["'ten'", "an integer"]),
    ("data.batch_ramp=(100,8)", ["config.data.batch_ramp", "such as ((1000, 64)"]),
    ("data.batch_ramp=((0,8),)", ["config.data.batch_ramp", "of 1 or more"]),
    ("data.row_length=70000", ["row_length = 70000", "65535"]),
    (
        "model.num_heads=3",
        [f"width = {WIDTH}", f"{WIDTH // 3 * 3} or {WIDTH // 3 * 3 + 3}"],
    ),
    ("model.dropout=1", ["config.model.dropout", "0 to 0.99"]),
    ("eval.rates=()", ["config.eval.rates", "such as (0.15, 0.4)"]),
    ("eval.rates=(0.15,0)", ["config.eval.rates = (0.15, 0)"]),
    ("eval.fill_mask=('no mask',)", ["config.eval.fill_mask", "[MASK]"]),
    ("tokenizer.lowercase=maybe", ["'maybe'", "true or false"]),
    ("optim=5", ["config.optim does not exist", "did you mean config.optim."]),
    ("parallel.mode=pmapp", ["'pmapp'", "pmap, shard_map, jit", "Did you mean pmap?"]),
    ("corruption.strategy=tokens", ["expected one of token, ", "Did you mean token?"]),
    ("corruption.count=stochastics", ["Did you mean stochastic?"]),
    ("data.packing=pack", ["Did you mean packed?"]),
    ("data.document=blankline", ["Did you mean blank_line?"]),
    ("tokenizer.kind=word_piece", ["Did you mean wordpiece?"]),
    ("optim.name=adam", ["Did you mean adamw?"]),
    ("optim.schedule=cosin", ["Did you mean cosine?"]),
    ("optim.on_nonfinite=skipp", ["Did you mean skip?"]),
    ("data.on_bad_text=ignore", ["'ignore'", "stop, skip, replace."]),
    ("optim.num_step=5", ["did you mean config.optim.num_steps?"]),
    ("checkpoint.kep=2", ["did you mean config.checkpoint.keep?"]),
    ("model.layers=2", ["did you mean config.model.num_layers?"]),
    ("seed=-1", ["config.seed = -1", "0 to 4294967295"]),
    ("seed=4294967296", ["config.seed = 4294967296"]),
    ("optim.peak_learning_rate=0", ["config.optim.peak_learning_rate", "above 0"]),
    ("optim.peak_learning_rate=nan", ["config.optim.peak_learning_rate = nan"]),
    ("optim.peak_learning_rate=inf", ["config.optim.peak_learning_rate = inf"]),
    ("optim.num_steps=0", ["config.optim.num_steps = 0", "1 or more"]),
    ("optim.warmup_steps=-1", ["config.optim.warmup_steps = -1", "0 or more"]),
    ("optim.weight_decay=-1", ["config.optim.weight_decay", "0 or more"]),
    ("optim.clip_norm=0", ["config.optim.clip_norm", "above 0"]),
    ("optim.b1=1", ["config.optim.b1", "below 1"]),
    ("optim.b2=-0.1", ["config.optim.b2 = -0.1"]),
    ("optim.eps=0", ["config.optim.eps"]),
    ("optim.max_skips=0", ["config.optim.max_skips = 0", "1 or more"]),
    ("checkpoint.keep=0", ["config.checkpoint.keep = 0", "1 or more"]),
    ("checkpoint.keep_every=-1", ["config.checkpoint.keep_every = -1", "0 or more"]),
    ("checkpoint.keep_best=maybe", ["'maybe'", "true or false"]),
    ("checkpoint.every_steps=0", ["config.checkpoint.every_steps = 0"]),
    ("log.every_steps=0", ["config.log.every_steps = 0"]),
    ("eval.every_steps=0", ["config.eval.every_steps = 0"]),
    ("eval.num_rows=-1", ["config.eval.num_rows = -1", "0 or more"]),
    ("eval.batch_size=0", ["config.eval.batch_size = 0"]),
    ("eval.seed=-1", ["config.eval.seed = -1"]),
    ("eval.random_frac=0.3", ["config.eval.mask_frac", "at most 1"]),
    ("model.num_layers=0", ["config.model.num_layers = 0"]),
    ("model.dropout=-0.1", ["config.model.dropout = -0.1"]),
    ("corruption.duplicates=0", ["config.corruption.duplicates = 0"]),
    ("tokenizer.vocab_size=3", ["config.tokenizer.vocab_size = 3", "16 or more"]),
    ("parallel.mesh.data=0", ["config.parallel.mesh.data = 0", "-1 for all"]),
    ("parallel.microbatches=0", ["config.parallel.microbatches = 0"]),
    ("data.validation_fraction=1", ["config.data.validation_fraction", "below 1"]),
    ("data.row_length=4", ["config.data.row_length = 4", "8 to 65535"]),
]


def command(*arguments, timeout=300):
    """Runs a command as a user does."""
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def parse(override, monkeypatch):
    """What `command.run` does before `main`, in this process."""
    from absl import flags

    from mlm_jax import command

    values = flags.FlagValues()
    argv = ["train", "--config=configs/tiny.py", f"--config.{override}"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(flags, "FLAGS", values)
    from ml_collections import config_flags

    config_flags.DEFINE_config_file("config", None, flag_values=values)
    command._parse(argv)
    config.check(values["config"].value)
    return values["config"].value


@pytest.mark.parametrize("override, parts", REFUSED)
def test_b75_impossible_values_are_refused(override, parts, monkeypatch):
    with pytest.raises(InputError) as caught:
        parse(override, monkeypatch)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize(
    "override, section, field, value",
    [
        ("corruption.rate=0.4", "corruption", "rate", 0.4),
        ("corruption.rate=1", "corruption", "rate", 1.0),
        ("eval.rates=(0.15,0.4)", "eval", "rates", (0.15, 0.4)),
        ("eval.rates=0.4", "eval", "rates", (0.4,)),
        ("tokenizer.lowercase=false", "tokenizer", "lowercase", False),
        ("parallel.microbatches=2", "parallel", "microbatches", 2),
    ],
)
def test_possible_values_are_taken(override, section, field, value, monkeypatch):
    taken = parse(override, monkeypatch)[section][field]
    if isinstance(taken, ml_collections.ConfigDict):
        taken = taken.to_dict()
    assert taken == value


def test_b73_an_optional_field_can_be_overridden(monkeypatch):
    assert parse("tokenizer.kind=bpe", monkeypatch).tokenizer.file is None
    assert parse("tokenizer.file=vocab.txt", monkeypatch).tokenizer.file == "vocab.txt"
    c = base.get_config()
    with pytest.raises(TypeError):
        c.tokenizer.file = 5
    c.tokenizer.file = "a"
    c.tokenizer.file = None
    with pytest.raises(TypeError):  # and back to None keeps the type
        c.tokenizer.file = 5


@pytest.mark.parametrize(
    "arguments, parts",
    [
        (["mlm_jax.train"], ["--config=FILE is missing"]),
        (["mlm_jax.train", "--config=configs/tiny.py"], ["--workdir=DIR is missing"]),
        (
            ["mlm_jax.train", "--config=configs/tny.py"],
            ["did you mean configs/tiny.py?"],
        ),
        (
            ["mlm_jax.train", "--config=configs/tiny.py", "--workdir=W", "more"],
            ["unexpected argument 'more'"],
        ),
        (
            ["mlm_jax.train", "--config=configs/tiny.py", "--config.seed=1"]
            + ["--config.seed=2"],
            ["config.seed is given twice"],
        ),
        (
            ["mlm_jax.train", "--config=configs/tiny.py", "--workdir=W"]
            + ["--allow_change=optim.peak_rate"],
            ["--allow_change=optim.peak_rate does not exist", "optim.peak_learning_r"],
        ),
        (
            ["mlm_jax.train", "--config=configs/tiny.py", "--workdir=W"]
            + ["--extend_to=10"],
            ["--extend_to=10; expected config.optim.num_steps = 400 or more"],
        ),
        (["mlm_jax.train", "--confg=configs/tiny.py"], ["--config=FILE is missing"]),
        (["mlm_jax.train", f"--config={'x' * 600}"], ["no such file"]),
        (["mlm_jax.fill_mask", "--workdir=nothing", "[MASK]"], ["nothing", "no run"]),
    ],
)
def test_wrong_commands_exit_2_with_one_line(arguments, parts):
    result = command(*arguments)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ")
    for part in parts:
        assert part in result.stderr


@pytest.mark.slow
def test_r16_every_impossible_value_on_the_command_line(tmp_path):
    arguments = ["--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
    walls, seconds = [], []
    for override, parts in REFUSED:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin = time.monotonic()
        result = command("mlm_jax.train", *arguments, f"--config.{override}")
        walls.append(time.monotonic() - begin)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        seconds.append(used)
        assert result.returncode == 2, override
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert result.stdout == ""
        for part in parts:
            assert part in result.stderr
    assert not (tmp_path / "run").exists()
    print(
        f"R16: {len(REFUSED)} of {len(REFUSED)} refused, at most {max(walls):.1f} s, "
        f"{max(seconds):.1f} s of computing"
    )
    assert max(seconds) < 5  # other processes do not count


def test_a_mistyped_field_on_the_command_line(tmp_path):
    arguments = ["--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
    result = command("mlm_jax.train", *arguments, "--config.corruption.rte=0.4")
    assert result.returncode == 2
    assert result.stderr == (
        "error: config.corruption.rte does not exist; "
        "did you mean config.corruption.rate?\n"
    )
    assert not (tmp_path / "run").exists()


def test_missing_file_and_small_corpus_leave_no_run(tmp_path):
    run = ["mlm_jax.train", "--config=configs/tiny.py", f"--workdir={tmp_path / 'run'}"]
    run.append(f"--config.data.cache_dir={tmp_path / 'cache'}")
    missing = command(*run, f"--config.data.source=files:{tmp_path}/nothing*.txt")
    assert missing.returncode == 2
    assert "nothing*.txt" in missing.stderr and missing.stderr.count("\n") == 1

    # B15: less than one row. The corrected source is not refused as another config.
    (tmp_path / "tiny.txt").write_text("One sentence of five words.\n")
    small = command(*run, f"--config.data.source=files:{tmp_path}/tiny.txt")
    assert small.returncode == 2
    assert "tiny.txt" in small.stderr and "too little" in small.stderr


def test_two_devices_that_do_not_divide_the_batch():
    c = tiny.get_config()
    assert config.check_devices(c, 8) == {"data": 8, "fsdp": 1, "tensor": 1}
    c.data.batch_ramp = ((5, 8), (5, 12))
    with pytest.raises(InputError, match="batch_ramp = 12; .* microbatches = 8"):
        config.check_devices(c, 8)
    c.data.batch_ramp = ()
    c.parallel.microbatches = 4
    with pytest.raises(InputError, match="devices x microbatches = 32, such as 32."):
        config.check_devices(c, 8)
    c.parallel.mesh.data = 9
    with pytest.raises(InputError, match="this process has 8 device"):
        config.check_devices(c, 8)


@pytest.mark.parametrize(
    "module", [base, tiny, austen, bert_base, bert_large, roberta_base, modernbert_base]
)
def test_every_config_passes_and_every_field_has_a_rule_or_is_free(module):
    c = module.get_config()
    config.check(c)
    assert c.is_locked
    free = {"init_from", "data.source", "data.data_dir", "data.cache_dir"}
    free |= {"tokenizer.file", "tokenizer.lowercase", "tokenizer.strip_accents"}
    free |= {"corruption.collocations", "eval.minimal_pairs"}
    assert config.flatten(c).keys() - config.RULES.keys() == free
    assert config.RULES.keys() <= config.flatten(c).keys()


@pytest.mark.parametrize(
    "field, registry",
    [
        ("corruption.strategy", units.STRATEGIES),
        ("corruption.span_lengths", settings.LENGTHS),
        ("corruption.schedule", settings.SCHEDULES),
        ("corruption.count", select.COUNTS),
        ("corruption.token_weights", weights.WEIGHTS),
        ("corruption.random_pool", replace.POOLS),
        ("model.activation", layers.ACTIVATIONS),
        ("model.remat", encoder.REMAT),
        ("optim.name", optim.OPTIMIZERS),
        ("optim.schedule", schedules.DECAYS),
        ("data.packing", packing.MODES),
        ("tokenizer.kind", tokenizer.KINDS),
    ],
)
def test_choices_are_those_of_the_code(field, registry):
    rule = config.RULES[field]
    assert all(map(rule.holds, registry))
    assert rule.allowed == f"one of {', '.join(registry)}"


def test_saved_config_comes_back(tmp_path):
    c = tiny.get_config()
    config.save(c, tmp_path)
    loaded = config.load(tmp_path)
    assert config.flatten(loaded) == config.flatten(c)
    old = config.flatten(loaded)
    assert config.check_unchanged(old, config.flatten(c)) == {}
    c.log.every_steps = 7
    changed = config.check_unchanged(old, config.flatten(c))
    assert changed == {"log.every_steps": (10, 7)}
    c.corruption.rate = 0.4
    with pytest.raises(InputError, match="corruption.rate: 0.3 -> 0.4. .*--allow_chan"):
        config.check_unchanged(old, config.flatten(c))
    allowed = config.check_unchanged(old, config.flatten(c), ["corruption.rate"])
    assert allowed == changed | {"corruption.rate": (0.3, 0.4)}
