"""The masked-LM model: encoder, gather, head transform, and the output matrix."""

import flax.linen as nn
import jax.numpy as jnp

from mlm_jax.errors import InputError
from mlm_jax.model.encoder import Encoder
from mlm_jax.model.layers import Parts, init_weights


class Transform(nn.Module):
    """BERT's head before the output matrix: dense, activation, norm."""

    parts: Parts

    @nn.compact
    def __call__(self, x_NxD):
        x_NxD = self.parts.dense(x_NxD.shape[-1], name="dense")(x_NxD)
        return self.parts.norm(name="norm")(self.parts.activation(x_NxD))


class MaskedLM(nn.Module):
    """Everything up to the logits, which only the loss makes, a chunk at a time.

    Returns `hidden` float[B, M, D] at the positions `predict` int32[B, M], the output
    matrix `table` float32[V, D], which is the token embedding where the model is
    `tied`, and `bias` float32[V], zeros if it has none. The logits are
    `hidden @ table.T + bias`.

    An encoder alone, without `head`, can be used as `model.encoder`; called as a
    whole, it raises InputError.
    """

    encoder: Encoder
    head: bool
    tied: bool
    decoder_bias: bool

    @nn.compact
    def __call__(self, tokens_BxL, segment_BxL, position_BxL, predict_BxM, keys_B=None):
        require_head(self)
        x_BxLxD = self.encoder(tokens_BxL, segment_BxL, position_BxL, keys_B)
        x_BxMxD = jnp.take_along_axis(x_BxLxD, predict_BxM[:, :, None], axis=1)
        vocab_size, width = self.encoder.vocab_size, self.encoder.width
        transform = Transform(self.encoder.parts, name="transform")
        hidden_NxD = transform(x_BxMxD.reshape(-1, width))
        table_VxD = self.encoder.embed.embedding
        if not self.tied:
            shape = vocab_size, width
            table_VxD = Table(shape, name="decoder")()
        bias_V = 0 * table_VxD[:, 0]  # of the devices that the table is of
        if self.decoder_bias:
            bias_V = self.param("bias", nn.initializers.zeros, (vocab_size,))
        return hidden_NxD.reshape(x_BxMxD.shape), table_VxD, bias_V


def require_head(model):
    """Raises InputError for an encoder alone."""
    if not model.head:
        raise InputError(
            "config.model.head = False: this model was imported without a head for "
            "masked tokens, so it cannot predict them nor be trained to; its encoder "
            "can be used, for embeddings and for fine-tuning."
        )


class Table(nn.Module):
    """An output matrix of its own."""

    shape: tuple[int, int]

    @nn.compact
    def __call__(self):
        return self.param("embedding", init_weights, self.shape)


def make_model(
    *,
    vocab_size,
    row_length,
    max_length,
    num_layers,
    norm_position,
    embed_norm,
    head,
    tied,
    decoder_bias,
    scan_unroll,
    dtype,
    platform="cpu",
    **encoder_fields,
):
    """Returns the model of the config's `model` section, to run on `platform`."""
    encoder = Encoder(
        vocab_size=padded_vocab_size(vocab_size),
        max_length=max_length or row_length,
        num_layers=num_layers,
        norm_position=norm_position,
        embed_norm=norm_position == "post" if embed_norm is None else embed_norm,
        scan_unroll=scan_unroll or default_scan_unroll(num_layers, platform),
        dtype=jnp.dtype(dtype),
        **encoder_fields,
    )
    return MaskedLM(encoder, head=head, tied=tied, decoder_bias=decoder_bias)


def default_scan_unroll(num_layers, platform):
    """All layers in one turn up to 12, as a scan's copies of parameters and of what the
    backward pass needs cost a CPU 7% of a step; deeper ones one at a time, since the
    time to compile grows with the layers of a turn. One at a time for a TPU, too: all
    of BERT-base's take more than 7 times as long to compile (libtpu 0.0.52)."""
    return num_layers if num_layers <= 12 and platform != "tpu" else 1


def padded_vocab_size(vocab_size):
    """A multiple of 128, which is what TPU lanes and sharding want of V. The loss gives
    the columns past `vocab_size` probability exactly 0."""
    return -(-vocab_size // 128) * 128
