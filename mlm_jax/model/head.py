"""The masked-LM model: encoder, gather, head transform, and the tied output matrix."""

import flax.linen as nn
import jax.numpy as jnp

from mlm_jax.model.encoder import Encoder
from mlm_jax.model.layers import Dense, gelu, layer_norm


class Transform(nn.Module):
    """BERT's head before the output matrix: dense, GELU, LayerNorm."""

    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_NxD):
        x_NxD = Dense(x_NxD.shape[-1], self.dtype, name="dense")(x_NxD)
        return layer_norm("norm", self.dtype)(gelu(x_NxD))


class MaskedLM(nn.Module):
    """Everything up to the logits, which only the loss makes, a chunk at a time.

    Returns `hidden` float[B, M, D] at the positions `predict` int32[B, M], the output
    matrix `table` float32[V, D], which is the token embedding, and `bias` float32[V].
    The logits are `hidden @ table.T + bias`.
    """

    encoder: Encoder

    @nn.compact
    def __call__(self, tokens_BxL, segment_BxL, position_BxL, predict_BxM, keys_B=None):
        x_BxLxD = self.encoder(tokens_BxL, segment_BxL, position_BxL, keys_B)
        x_BxMxD = jnp.take_along_axis(x_BxLxD, predict_BxM[:, :, None], axis=1)
        width = x_BxLxD.shape[-1]
        transform = Transform(self.encoder.dtype, name="transform")
        hidden_NxD = transform(x_BxMxD.reshape(-1, width))
        bias_V = self.param("bias", nn.initializers.zeros, (self.encoder.vocab_size,))
        table_VxD = self.encoder.embed.embedding
        return hidden_NxD.reshape(x_BxMxD.shape), table_VxD, bias_V


def make_model(
    *,
    vocab_size,
    row_length,
    num_layers,
    width,
    num_heads,
    mlp_width,
    norm_position,
    position,
    dropout,
    attention_dropout,
    scan_unroll,
    remat,
    dtype,
    platform="cpu",
):
    """Returns the model of the config's `model` section, to run on `platform`."""
    encoder = Encoder(
        vocab_size=padded_vocab_size(vocab_size),
        max_length=row_length,
        num_layers=num_layers,
        width=width,
        num_heads=num_heads,
        mlp_width=mlp_width,
        norm_position=norm_position,
        position=position,
        dropout=dropout,
        attention_dropout=attention_dropout,
        scan_unroll=scan_unroll or default_scan_unroll(num_layers, platform),
        remat=remat,
        dtype=jnp.dtype(dtype),
    )
    return MaskedLM(encoder)


def default_scan_unroll(num_layers, platform):
    """All layers in one turn up to 12, as a scan's copies of parameters and of what the
    backward pass needs cost a CPU 7% of a step; deeper ones one at a time, since the
    time to compile grows with the layers of a turn. One at a time for a TPU, too: 12
    take XFACTOR times as long to compile (libtpu 0.0.52)."""
    return num_layers if num_layers <= 12 and platform != "tpu" else 1


def padded_vocab_size(vocab_size):
    """A multiple of 128, which is what TPU lanes and sharding want of V. The loss gives
    the columns past `vocab_size` probability exactly 0."""
    return -(-vocab_size // 128) * 128
