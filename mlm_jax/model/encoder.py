"""The encoder: embed, a scan over equal blocks, and for pre-LN a last norm.

Dimensions, here and everywhere:
    B rows in the batch     L tokens in a row        D width        F MLP hidden
    H heads                 K head size              V vocabulary   N = B x L
    M prediction slots      P replacement pool       S segments     T tokens of a text
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from mlm_jax.model.attention import SelfAttention, rotation, segment_mask
from mlm_jax.model.layers import MLP, PRODUCT, dropout, init_weights, layer_norm

# What the forward pass of a block leaves for the backward pass, which makes the rest
# anew: all, the results of products with weights, or only the block's input.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nn.Module):
    """Attention and MLP, each with its residual.

    The norm comes after the sum in a post-LN block (Devlin et al. 2019), before the
    sublayer in a pre-LN block (Xiong et al. 2020).
    """

    num_heads: int
    mlp_width: int
    norm_position: str
    dropout: float
    attention_dropout: float
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_NxD, keys_B, mask_Bx1xLxL, cos_sin):
        attention = SelfAttention(
            self.num_heads, self.attention_dropout, self.dtype, name="attention"
        )
        mlp = MLP(self.mlp_width, self.dtype, name="mlp")
        attention_norm = layer_norm("attention_norm", self.dtype)
        mlp_norm = layer_norm("mlp_norm", self.dtype)
        keys = (None, None, None) if keys_B is None else _split(keys_B, 3)

        if self.norm_position == "post":
            y_NxD = attention(x_NxD, mask_Bx1xLxL, cos_sin, keys[2])
            x_NxD = attention_norm(x_NxD + dropout(keys[0], y_NxD, self.dropout))
            y_NxD = mlp(x_NxD)
            x_NxD = mlp_norm(x_NxD + dropout(keys[1], y_NxD, self.dropout))
        else:
            y_NxD = attention(attention_norm(x_NxD), mask_Bx1xLxL, cos_sin, keys[2])
            x_NxD = x_NxD + dropout(keys[0], y_NxD, self.dropout)
            y_NxD = mlp(mlp_norm(x_NxD))
            x_NxD = x_NxD + dropout(keys[1], y_NxD, self.dropout)
        return x_NxD, None


class Encoder(nn.Module):
    """Tokens to contextual vectors.

    Positions are `learned` (a table, added to the tokens) or `rotary` (queries and keys
    are turned); they count from the start of a segment.

    `tokens`, `segment` and `position` are int32[B, L]; `keys_B` holds a dropout key for
    each row, or is None for no dropout. Returns float[B, L, D].
    """

    vocab_size: int
    max_length: int
    num_layers: int
    width: int
    num_heads: int
    mlp_width: int
    norm_position: str
    position: str
    dropout: float
    attention_dropout: float
    scan_unroll: int
    remat: str
    dtype: jnp.dtype

    def setup(self):
        block = Block
        if self.remat != "none":
            # Between two loops nothing can be shared; in one line of code, as a scan
            # unrolled to its end is, XLA would undo what is made anew.
            in_line = self.scan_unroll >= self.num_layers
            block = nn.remat(Block, prevent_cse=in_line, policy=REMAT[self.remat])
        self.embed = nn.Embed(
            self.vocab_size, self.width, embedding_init=init_weights, name="embed"
        )
        if self.position == "learned":
            self.position_embed = nn.Embed(
                self.max_length, self.width, embedding_init=init_weights
            )
        if self.norm_position == "post":
            self.embed_norm = layer_norm("embed_norm", self.dtype)
        else:
            self.final_norm = layer_norm("final_norm", self.dtype)
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
            norm_position=self.norm_position,
            dropout=self.dropout,
            attention_dropout=self.attention_dropout,
            dtype=self.dtype,
        )

    def __call__(self, tokens_BxL, segment_BxL, position_BxL, keys_B=None):
        x_BxLxD = self.embed(tokens_BxL)
        cos_sin = None
        if self.position == "learned":
            x_BxLxD = x_BxLxD + self.position_embed(position_BxL)
        else:
            cos_sin = rotation(position_BxL, self.width // self.num_heads)
        x_NxD = x_BxLxD.reshape(-1, self.width)
        if self.norm_position == "post":
            x_NxD = self.embed_norm(x_NxD)
        embed_keys, block_keys = None, None
        if keys_B is not None:
            site_keys = _split(keys_B, self.num_layers + 1)
            embed_keys, block_keys = site_keys[0], site_keys[1:]
        x_NxD = dropout(embed_keys, x_NxD, self.dropout).astype(self.dtype)
        mask_Bx1xLxL = segment_mask(segment_BxL)
        x_NxD, _ = self.blocks(x_NxD, block_keys, mask_Bx1xLxL, cos_sin)
        if self.norm_position == "pre":
            x_NxD = self.final_norm(x_NxD)
        return x_NxD.reshape(x_BxLxD.shape)


def _split(keys_B, num):
    """Returns key[num, B]: new keys for each row, independent of the other rows."""
    return jax.vmap(lambda key: jax.random.split(key, num), out_axes=1)(keys_B)
