"""The encoder: embed, a scan over equal blocks, and for pre-LN a last norm.

Layers that are not quite alike still are one scan: a flag of each layer, scanned with
its parameters, says how it differs.

Dimensions, here and everywhere:
    B rows in the batch     L tokens in a row        D width        F MLP hidden
    H heads                 K head size              V vocabulary   N = B x L
    M prediction slots      P replacement pool       S segments     T tokens of a text
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlm_jax.model.attention import SelfAttention, near_mask, rotation, segment_mask
from mlm_jax.model.layers import (
    MLP,
    PRODUCT,
    Parts,
    dropout,
    init_weights,
    make_parts,
)

# What the forward pass of a block leaves for the backward pass, which makes the rest
# anew: all, the results of products with weights, or only the block's input.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Layer(NamedTuple):
    """What a layer has of its own beside parameters: dropout keys of the rows, and
    flags, None where the layers do not differ in it."""

    keys_B: jax.Array | None
    is_global: jax.Array | None
    is_first: jax.Array | None


class Reach(NamedTuple):
    """Who sees whom, bool[B or 1, 1, L, L], and how far heads turn, None for learned
    positions."""

    mask: jax.Array
    cos_sin: tuple[jax.Array, jax.Array] | None


class Block(nn.Module):
    """Attention and MLP, each with its residual.

    The norm comes after the sum in a post-LN block (Devlin et al. 2019), before the
    sublayer in a pre-LN block (Xiong et al. 2020). `everywhere` is the reach of
    attention in a segment, and `near`, if there are layers that are not global, what
    limits it in those.
    """

    num_heads: int
    mlp_width: int
    is_gated: bool
    norm_position: str
    dropout: float
    attention_dropout: float
    parts: Parts

    @nn.compact
    def __call__(self, x_NxD, layer, everywhere, near):
        attention = SelfAttention(
            self.num_heads, self.attention_dropout, self.parts, name="attention"
        )
        mlp = MLP(self.mlp_width, self.is_gated, self.parts, name="mlp")
        attention_norm = self.parts.norm(name="attention_norm")
        mlp_norm = self.parts.norm(name="mlp_norm")
        keys = (None, None, None) if layer.keys_B is None else _split(layer.keys_B, 3)
        mask_Bx1xLxL, cos_sin = everywhere
        if near is not None:
            mask_Bx1xLxL &= layer.is_global | near.mask
            which = functools.partial(jnp.where, layer.is_global)
            cos_sin = jax.tree.map(which, cos_sin, near.cos_sin)

        if self.norm_position == "post":
            y_NxD = attention(x_NxD, mask_Bx1xLxL, cos_sin, keys[2])
            x_NxD = attention_norm(x_NxD + dropout(keys[0], y_NxD, self.dropout))
            y_NxD = mlp(x_NxD)
            x_NxD = mlp_norm(x_NxD + dropout(keys[1], y_NxD, self.dropout))
        else:
            normed_NxD = attention_norm(x_NxD)
            if layer.is_first is not None:
                normed_NxD = jnp.where(layer.is_first, x_NxD, normed_NxD)
            y_NxD = attention(normed_NxD, mask_Bx1xLxL, cos_sin, keys[2])
            x_NxD = x_NxD + dropout(keys[0], y_NxD, self.dropout)
            y_NxD = mlp(mlp_norm(x_NxD))
            x_NxD = x_NxD + dropout(keys[1], y_NxD, self.dropout)
        return x_NxD, None


class Encoder(nn.Module):
    """Tokens to contextual vectors.

    Positions are `learned` (a table, added to the tokens) or `rotary` (queries and keys
    are turned); they count from the start of a segment. Every `global_every`-th layer,
    the first among them, attends to its whole segment, the others to `window` tokens on
    either side, turned by a base of their own (as in ModernBERT, Warner et al. 2024).
    With both pre-LN and `embed_norm`, the norm of the embeddings is that of the first
    attention: layer 0 has the parameters of its own and does not use them.

    `tokens`, `segment` and `position` are int32[B, L]; `keys_B` holds a dropout key for
    each row, or is None for no dropout. `types`, int32[B, L] below `token_types`, tell
    the sentences of a pair apart; None is type 0 throughout. Returns float[B, L, D].
    """

    vocab_size: int
    max_length: int
    num_layers: int
    width: int
    num_heads: int
    mlp_width: int
    gated: bool
    activation: str
    bias: bool
    norm: str
    norm_position: str
    norm_epsilon: float
    norm_bias: bool
    embed_norm: bool
    token_types: int
    position: str
    rotary_base: float
    global_every: int
    window: int
    local_rotary_base: float
    dropout: float
    attention_dropout: float
    scan_unroll: int
    remat: str
    dtype: jnp.dtype

    @property
    def parts(self):
        return make_parts(
            norm=self.norm,
            norm_epsilon=self.norm_epsilon,
            norm_bias=self.norm_bias,
            bias=self.bias,
            activation=self.activation,
            dtype=self.dtype,
        )

    def setup(self):
        block = Block
        if self.remat != "none":
            # Between two loops nothing can be shared; in one line of code, as a scan
            # unrolled to its end is, XLA would undo what is made anew.
            in_line = self.scan_unroll >= self.num_layers
            block = nn.remat(Block, prevent_cse=in_line, policy=REMAT[self.remat])
        self.embed = _embed(self.vocab_size, self.width)
        if self.position == "learned":
            self.position_embed = _embed(self.max_length, self.width)
        if self.token_types:
            self.type_embed = _embed(self.token_types, self.width)
        if self.embed_norm:
            self.embedding_norm = self.parts.norm(name="embed_norm")
        if self.norm_position == "pre":
            self.final_norm = self.parts.norm()
        self.blocks = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast, nn.broadcast),
            length=self.num_layers,
            unroll=self.scan_unroll,
        )(
            num_heads=self.num_heads,
            mlp_width=self.mlp_width,
            is_gated=self.gated,
            norm_position=self.norm_position,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            parts=self.parts,
        )

    def __call__(
        self, tokens_BxL, segment_BxL, position_BxL, keys_B=None, types_BxL=None
    ):
        x_BxLxD = self.embed(tokens_BxL)
        if self.token_types:
            zero_BxL = jnp.zeros_like(tokens_BxL)
            types_BxL = zero_BxL if types_BxL is None else types_BxL
            x_BxLxD = x_BxLxD + self.type_embed(types_BxL)
        if self.position == "learned":
            x_BxLxD = x_BxLxD + self.position_embed(position_BxL)
        x_NxD = x_BxLxD.reshape(-1, self.width)
        if self.embed_norm:
            x_NxD = self.embedding_norm(x_NxD)
        embed_keys, block_keys = None, None
        if keys_B is not None:
            site_keys = _split(keys_B, self.num_layers + 1)
            embed_keys, block_keys = site_keys[0], site_keys[1:]
        x_NxD = dropout(embed_keys, x_NxD, self.dropout).astype(self.dtype)
        x_NxD, _ = self.blocks(
            x_NxD, self._layers(block_keys), *self._reaches(segment_BxL, position_BxL)
        )
        if self.norm_position == "pre":
            x_NxD = self.final_norm(x_NxD)
        return x_NxD.reshape(x_BxLxD.shape)

    def _layers(self, block_keys):
        number_N = jnp.arange(self.num_layers)
        is_first_N = number_N == 0
        has_norm_before = self.embed_norm and self.norm_position == "pre"
        return Layer(
            block_keys,
            number_N % self.global_every == 0 if self.global_every > 1 else None,
            is_first_N if has_norm_before else None,
        )

    def _reaches(self, segment_BxL, position_BxL):
        def cos_sin(base):
            if self.position == "learned":
                return None
            return rotation(position_BxL, self.width // self.num_heads, base)

        everywhere = Reach(segment_mask(segment_BxL), cos_sin(self.rotary_base))
        if self.global_every == 1:
            return everywhere, None
        near = near_mask(segment_BxL.shape[1], self.window)
        return everywhere, Reach(near, cos_sin(self.local_rotary_base))


def _embed(num_rows, width):
    return nn.Embed(num_rows, width, embedding_init=init_weights)


def _split(keys_B, num):
    """Returns key[num, B]: new keys for each row, independent of the other rows."""
    return jax.vmap(lambda key: jax.random.split(key, num), out_axes=1)(keys_B)
