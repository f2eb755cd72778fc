"""A trial has the weights of its run, exact sums, and nothing of its company."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlm_jax import checkpoint, trained
from mlm_jax.errors import InputError, Preempted
from mlm_jax.finetuning import encoder, step
from mlm_jax.finetuning.trials import Track, Trial, batch_of, train_batches
from tests.finetuning import helpers
from tests.finetuning.helpers import Silence, make_config, make_trainer, train


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return helpers.make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def start(run):
    return trained.load(run)


def trainer_of(start, folder, together=1, **changes):
    changes = {"num_epochs": 2, "dropout": 0.3} | changes
    records = helpers.classification(20)
    return make_trainer(make_config(folder, records, **changes), start, together)


def test_b85_the_encoder_is_that_of_the_checkpoint_bit_for_bit(run, start, tmp_path):
    trainer, _ = trainer_of(start, tmp_path)
    _, state = checkpoint.restore_latest(run)
    params = trainer.init(3)
    loaded = checkpoint.digest(jax.device_get(params["encoder"]))
    assert loaded == checkpoint.digest(state["params"]["encoder"])
    assert set(params) == {"encoder", "pooler", "output"}
    assert "19 arrays" in trainer.describe() and "all those of step 5" in (
        trainer.describe()
    )


def test_random_weights_are_those_of_no_checkpoint(start, tmp_path):
    trainer, _ = trainer_of(start, tmp_path, weights="random")
    params = trainer.init(3)
    loaded = jax.tree.leaves(start.params["encoder"])
    assert not all(map(np.array_equal, jax.tree.leaves(params["encoder"]), loaded))
    assert "all new" in trainer.describe()


def broken(start, change):
    params = jax.tree.map(np.asarray, start.params)
    params["encoder"] = dict(params["encoder"])
    change(params["encoder"])
    return dataclasses.replace(start, params=params)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.pop("final_norm"), "final_norm/bias is missing; 2 of 19"),
        (lambda p: p.update(extra=np.zeros(3)), "extra is not expected; 1 of 20"),
        (
            lambda p: p.update(embed={"embedding": np.zeros((9, 16))}),
            r"embed/embedding is \(9, 16\) and would be \(128, 16\); 1 of 19",
        ),
        (lambda p: p.clear(), "is missing; 19 of 19"),
    ],
)
def test_b85_an_encoder_that_does_not_fit_is_refused(start, tmp_path, change, message):
    trainer, found = trainer_of(start, tmp_path)
    params = jax.eval_shape(trainer._init, 0)
    with pytest.raises(InputError, match=message):
        encoder.with_encoder(params, broken(start, change))


def test_b85_another_number_of_layers_is_refused(start, tmp_path_factory, tmp_path):
    """The stacked parameters of three layers do not go into two."""
    three = helpers.make_run(
        tmp_path_factory.mktemp("three"), **{"model.num_layers": 3}
    )
    trainer, _ = trainer_of(start, tmp_path)
    params = jax.eval_shape(trainer._init, 0)
    with pytest.raises(InputError, match="blocks/attention.* and would be"):
        encoder.with_encoder(params, trained.load(three))


def test_b84_a_regression_compares_each_number_with_its_own(start):
    """Predictions [B, 1] against targets [B]: 0, where a broadcast gives 4 / 3."""
    numbers = jnp.array([1.0, 2.0, 3.0])
    batch = {"target": numbers, "weight": jnp.ones(3)}
    loss, weight = step.sum_losses("regression", numbers[:, None], batch)
    assert (loss, weight) == (0, 3)
    loss, _ = step.sum_losses("regression", numbers[::-1, None], batch)
    assert loss == 8


def test_losses_against_float64():
    random = np.random.default_rng(0)
    outputs = random.normal(size=(3, 5, 4))
    target, weight = random.integers(4, size=(3, 5)), random.integers(2, size=(3, 5))
    batch = {"target": target, "weight": weight.astype(np.float32)}
    total = sum(
        np.log(np.exp(outputs[i, j]).sum()) - outputs[i, j, target[i, j]]
        for i, j in zip(*np.nonzero(weight), strict=True)
    )
    found, count = step.sum_losses("tagging", jnp.asarray(outputs), batch)
    assert found == pytest.approx(total, rel=1e-6) and count == weight.sum()

    segment = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]])
    places = np.array([[0, 2], [3, 4], [0, 0]])
    batch = {"target": places, "weight": np.float32([1, 1, 0]), "segment": segment}
    total = 0.0
    for i in range(2):
        real = outputs[i, segment[i] > 0, :2]
        for side in range(2):
            logits = real[:, side]
            log_sum = np.log(np.exp(logits).sum())
            total += (log_sum - logits[places[i, side]]) / 2
    found, count = step.sum_losses("spans", jnp.asarray(outputs[..., :2]), batch)
    assert found == pytest.approx(total, rel=1e-6) and count == 2


def test_an_epoch_has_each_row_once_in_an_order_of_its_own():
    columns = {"tokens": np.arange(10)[:, None], "example": np.arange(10)}
    columns["weight"] = np.ones(10, np.float32)

    def order(seed, epoch):
        batches = list(train_batches(columns, 4, seed, epoch))
        assert [len(b["tokens"]) for b in batches] == [4, 4, 4]
        weight = np.concatenate([b["weight"] for b in batches])
        assert weight.tolist() == [1] * 10 + [0] * 2
        return np.concatenate([b["tokens"][:, 0] for b in batches])[:10].tolist()

    found = [order(seed, epoch) for seed in (0, 1) for epoch in (1, 2)]
    assert all(sorted(some) == list(range(10)) for some in found)
    assert len(set(map(tuple, found))) == 4
    assert order(1, 2) == found[3]


def test_padding_of_a_batch_adds_nothing_to_an_update(start, tmp_path):
    """Twenty rows in a batch of 20, and with 12 fillers: the same parameters."""
    found = []
    for size in (20, 32):
        trainer, _ = trainer_of(start, tmp_path, batch_size=size, num_epochs=1)
        (outcome,) = train(trainer, Trial(1e-2, 0))
        found.append(outcome.params)
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-5)


@pytest.mark.parametrize("kind", ["classification", "tagging", "spans", "regression"])
def test_b70_batch_and_padding_change_no_score(start, tmp_path, kind):
    """B70, B71: the last batch counts, and the mean is over examples, not batches."""
    found = []
    for size, length in ((1, 16), (7, 32), (64, 24)):
        changes = {"batch_size": size, "task.row_length": length}
        changes |= {"num_epochs": 1, "task.kind": kind}
        records = helpers.classification(19)
        for n, record in enumerate(records):
            words = record["text"].split()[:8]
            record["text"], record["n"] = " ".join(words), float(n)
            record["tags"] = ["x" if n % 2 else "y" for n in range(len(words))]
            record["question"] = "a house"
            record["answers"] = {"text": [words[0]], "answer_start": [0]}
        label = {"tagging": "tags", "spans": "answers", "regression": "n"}
        changes["task.label"] = label.get(kind, "label")
        if kind == "spans":
            changes |= {"task.text": "question", "task.pair": "text"}
        trainer, _ = make_trainer(make_config(tmp_path, records, **changes), start)
        # The same head of random weights, large enough to decide something.
        params = jax.tree.map(lambda x: x * 3, trainer.init(1))
        found.append(trainer.evaluate(params, "validation"))
    for scores, predictions in found[1:]:
        assert scores == pytest.approx(found[0][0], rel=2e-5)
        if kind == "regression":
            assert predictions == pytest.approx(found[0][1], rel=1e-4)
        else:
            assert predictions == found[0][1]


def test_trials_together_give_what_each_gives_alone(start, tmp_path):
    """Three trials in four places; in turn they are the same bit for bit."""
    trials = [Trial(1e-2, 0), Trial(1e-2, 1), Trial(3e-3, 0)]
    alone, _ = trainer_of(start, tmp_path)
    singles = [train(alone, trial)[0] for trial in trials]
    again = train(alone, trials[1])[0]
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, singles[1].params))

    together, _ = trainer_of(start, tmp_path, together=4)
    for one, other in zip(singles, train(together, *trials), strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4),
            one.params,
            other.params,
        )
        for a, b in zip(one.facts["history"], other.facts["history"], strict=True):
            assert a["train_loss"] == pytest.approx(b["train_loss"], rel=1e-3)
    assert not jax.tree.all(
        jax.tree.map(np.array_equal, singles[0].params, singles[1].params)
    )


def test_asked_to_stop_it_stops_before_an_update(start, tmp_path):
    trainer, _ = trainer_of(start, tmp_path)

    class Stop:
        asked = "SIGTERM"

    with pytest.raises(Preempted, match="stopped by SIGTERM"):
        trainer.train([Trial(1e-2, 0)], Stop, Silence())


def test_the_best_epoch_is_kept_and_patience_ends():
    track = Track(Trial(1e-3, 0), "accuracy", patience=2)
    scores = [0.5, 0.7, 0.7, 0.6]
    for epoch, score in enumerate(scores, 1):
        assert not track.is_over
        track.add(epoch, 1.0, {"accuracy": score}, {"w": np.full(1, epoch)})
    assert track.is_over
    facts = track.facts()
    assert facts["best_epoch"] == 2 and facts["validation"] == {"accuracy": 0.7}
    assert track.params["w"] == 2 and facts["state"] == "finished"


def test_a_score_that_is_not_a_number_is_never_better():
    track = Track(Trial(1e-3, 0), "pearson", patience=3)
    for epoch, score in enumerate([math.nan, -0.2, math.nan], 1):
        track.add(epoch, 1.0, {"pearson": score}, {"w": np.zeros(1)})
    assert track.facts()["best_epoch"] == 2


def test_a_loss_that_is_not_finite_ends_a_trial():
    track = Track(Trial(1e-3, 0), "accuracy", patience=3)
    track.add(1, 0.5, {"accuracy": 0.9}, {"w": np.zeros(1)})
    track.add(2, math.nan, {"accuracy": 0.9}, {"w": np.zeros(1)})
    assert track.is_over and track.params is None
    assert track.facts()["state"] == "diverged"


def test_b81_a_row_longer_than_the_encoder_has_seen_is_refused(start, tmp_path):
    with pytest.raises(InputError, match="row_length = 33.* 32 tokens"):
        trainer_of(start, tmp_path, **{"task.row_length": 33})


def test_b81_a_text_that_is_too_long_is_cut_and_counted(start, tmp_path):
    records = helpers.classification(4)
    records[0]["text"] = "house " * 50
    trainer, found = make_trainer(make_config(tmp_path, records), start)
    assert found.row_length == 32 and found.rows["train"].num_cut == 1
    assert np.isfinite(trainer.evaluate(trainer.init(0), "train")[0]["loss"])


def test_batch_of_fills_up_with_nothing():
    columns = {"tokens": np.ones((3, 4), np.int32), "weight": np.ones(3, np.float32)}
    batch = batch_of(columns, np.array([2, 0]), 3, 5)
    assert batch["weight"].tolist() == [1, 1, 0] and batch["row"].tolist() == [2, 0, 0]
    assert batch["epoch"].tolist() == [5, 5, 5] and batch["tokens"][2].sum() == 0
