"""How much arithmetic a training step needs."""


def step_flops(
    *,
    num_layers,
    width,
    mlp_width,
    row_length,
    vocab_size,
    num_rows,
    predictions_per_row,
    gated=False,
    global_every=1,
    window=0,
):
    """Returns the floating-point operations of a training step's matrix products.

    A multiply and an add are two. For N = rows x L tokens and P predictions, forward:

        each layer    8 N D^2       query, key, value, output
                      4 N D F       the two layers of the MLP
                      4 N L D       scores, and the weighted sum of the values
        the head      2 P D^2       transform
                      2 P D V       logits

    and twice as much backward (as counted by Kaplan et al. 2020). A gated MLP has three
    layers, 6 N D F; where attention is not global, a token sees no more than 2 W + 1
    others instead of L. What an
    implementation does beyond that, such as logits where nothing is predicted, empty
    prediction slots, recomputation or softmax, does not count as work.
    """
    num_tokens = num_rows * row_length
    num_predictions = num_rows * predictions_per_row
    mlp = (6 if gated else 4) * width * mlp_width
    layers = num_layers * num_tokens * (8 * width**2 + mlp)
    num_global = -(-num_layers // global_every)
    seen = num_global * row_length
    seen += (num_layers - num_global) * min(row_length, 2 * window + 1)
    attention = num_tokens * 4 * seen * width
    head = num_predictions * (2 * width**2 + 2 * width * vocab_size)
    return 3 * (layers + attention + head)


def config_flops(c, slots):
    """Returns the same for a step of config `c`, with `slots` predictions in a row."""
    return step_flops(
        num_layers=c.model.num_layers,
        width=c.model.width,
        mlp_width=c.model.mlp_width,
        row_length=c.data.row_length,
        vocab_size=c.tokenizer.vocab_size,
        num_rows=c.data.batch_size * c.corruption.views,
        predictions_per_row=slots,
        gated=c.model.gated,
        global_every=c.model.global_every,
        window=c.model.window,
    )
