"""The loss of each kind of task, and one update: pure functions of (state, batch)."""

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mlm_jax import keys, optim, schedules
from mlm_jax.keys import Purpose


@flax.struct.dataclass
class TaskState:
    """As `state.TrainState`, without what only masked language modeling needs."""

    step: jax.Array
    params: dict
    opt_state: tuple
    key: jax.Array
    hparams: dict


def init(model, seed, row_length):
    """Returns the parameters of a model, all random; the key is that of the seed."""
    row = jnp.zeros((1, row_length), jnp.int32)
    key = keys.purpose_key(jax.random.key(seed), Purpose.INIT)
    # As in `state.init_state`: apart, each layer's draws only take time to compile.
    scanned = model.clone(encoder=model.encoder.clone(scan_unroll=1))
    return scanned.init(key, row, row, row)["params"]


def make_state(params, seed, hparams, optimizer):
    """Returns the state before the first update, on the device."""
    hparams = jax.tree.map(jnp.asarray, hparams)
    params = jax.tree.map(jnp.asarray, params)
    opt_state = optimizer(hparams["learning_rate"], hparams).init(params)
    return TaskState(jnp.int32(0), params, opt_state, jax.random.key(seed), hparams)


def hparams(c, learning_rate, num_steps):
    """The numbers that an update traces."""
    names = "weight_decay", "clip_norm", "b1", "b2", "eps"
    return {name: jnp.float32(c.optim[name]) for name in names} | {
        "learning_rate": jnp.float32(learning_rate),
        "warmup_steps": jnp.float32(round(c.optim.warmup * num_steps)),
        "num_steps": jnp.float32(num_steps),
    }


def sum_losses(kind, outputs, batch):
    """Returns (sum of the losses, sum of their weights).

    Cross-entropy of a label, or of each tag; squared error of a number, in deviations
    of the training targets; cross-entropy over positions, mean of start and end.
    """
    losses = _LOSSES[kind](outputs, batch)
    return jnp.sum(losses * batch["weight"]), batch["weight"].sum()


def _label_loss(outputs, batch):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, batch["target"])


def _squared_error(outputs_Bx1, batch):
    return (outputs_Bx1[:, 0] - batch["target"]) ** 2


def _span_loss(outputs_BxLx2, batch):
    """Padding has no share; a finite number, since all of a filler row is padding."""
    is_token_BxLx1 = batch["segment"][:, :, None] > 0
    logits_BxLx2 = jnp.where(is_token_BxLx1, outputs_BxLx2, -1e30)
    losses_Bx2 = optax.softmax_cross_entropy_with_integer_labels(
        logits_BxLx2.transpose(0, 2, 1), batch["target"]
    )
    return losses_Bx2.mean(-1)


_LOSSES = {
    "classification": _label_loss,
    "tagging": _label_loss,
    "regression": _squared_error,
    "spans": _span_loss,
}


def make_update(model, kind, *, optimizer, schedule):
    """Returns `update(state, batch) -> (state, sums)`.

    The batch has the columns of `TaskRows`, and `epoch` and `row` int32[B], of which
    the dropout is a function.
    """

    def objective(params, batch, key):
        keys_B = keys.row_keys(
            keys.purpose_key(key, Purpose.DROPOUT), batch["epoch"], batch["row"]
        )
        outputs = forward(model, params, batch, keys_B)
        loss, weight = sum_losses(kind, outputs, batch)
        return loss, {"loss": loss, "weight": weight}

    def update(state, batch):
        grads, sums = jax.grad(objective, has_aux=True)(state.params, batch, state.key)
        weight = jnp.where(sums["weight"] > 0, sums["weight"], 1)
        norm = optax.tree.norm(grads) / weight
        factor = optim.clip_factor(norm, state.hparams["clip_norm"]) / weight
        grads = jax.tree.map(lambda g: g * factor, grads)
        scale = schedules.scale(
            state.step + 1,
            schedule=schedule,
            warmup_steps=state.hparams["warmup_steps"],
            num_steps=state.hparams["num_steps"],
            decay_begin=0,
        )
        transform = optimizer(state.hparams["learning_rate"] * scale, state.hparams)
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        state = state.replace(step=state.step + 1, params=params, opt_state=opt_state)
        return state, sums

    return update


def forward(model, params, batch, keys_B=None):
    columns = batch["tokens"], batch["segment"], batch["position"]
    return model.apply({"params": params}, *columns, keys_B)


def make_predict(model, kind):
    """Returns `predict(params, batch) -> (answers, loss sum, weight sum)`.

    Answers are the ids of the likeliest labels, int32[B] or [B, L], and for numbers and
    spans the outputs themselves, float32[B, 1] or [B, L, 2].
    """

    @jax.jit
    def predict(params, batch):
        outputs = forward(model, params, batch)
        loss, weight = sum_losses(kind, outputs, batch)
        if kind in ("classification", "tagging"):  # logits would be many
            outputs = outputs.argmax(-1)
        return outputs, loss, weight

    return predict
