"""A training step of Hugging Face's BertForMaskedLM, to be measured in turn with ours.

    python experiments/speed/torch_step.py --preset=mini --head=full

Needs torch and transformers, in an environment of their own. `--head=full` is the model
as its users run it: logits at every position. `--head=gathered` is tuned by hand: the
encoder alone, then the head on the predicted positions. AdamW is torch's fused one.
Attention is `sdpa`, dropout 0.1 everywhere, float32 or autocast to bfloat16.

Prints a line when ready; then, for each number n on standard input, a list of the times
of n steps.
"""

import argparse
import json
import math
import os
import sys
import time

import torch
import transformers

PRESETS = {  # layers, width, heads, MLP width, vocabulary, rows, tokens in a row
    "tiny": (2, 128, 2, 512, 8192, 16, 128),
    "mini": (4, 256, 4, 1024, 30522, 32, 128),
    "small": (4, 512, 8, 2048, 30522, 16, 128),
    "base": (12, 768, 12, 3072, 30522, 8, 128),
}
MASK, IGNORED = 4, -100
NOT_DECAYED = ("bias", "LayerNorm.weight")


def make_batch(vocab_size, num_rows, row_length, rate, generator):
    """Returns inputs, labels, and what is predicted: ceil(rate x L) tokens a row."""
    shape = num_rows, row_length
    tokens = torch.randint(5, vocab_size, shape, generator=generator)
    order = torch.rand(shape, generator=generator).argsort(dim=1)
    is_predicted = torch.zeros(shape, dtype=torch.bool)
    is_predicted.scatter_(1, order[:, : math.ceil(rate * row_length)], True)
    inputs = torch.where(is_predicted, MASK, tokens)
    return inputs, torch.where(is_predicted, tokens, IGNORED), is_predicted


def full_loss(model, inputs, labels, is_predicted):
    attention_mask = torch.ones_like(inputs)
    return model(input_ids=inputs, attention_mask=attention_mask, labels=labels).loss


def gathered_loss(model, inputs, labels, is_predicted):
    hidden = model.bert(input_ids=inputs, attention_mask=torch.ones_like(inputs))[0]
    logits = model.cls(hidden[is_predicted])
    return torch.nn.functional.cross_entropy(logits.float(), labels[is_predicted])


HEADS = {"full": full_loss, "gathered": gathered_loss}


def make_step(options):
    layers, width, heads, mlp_width, vocab_size, num_rows, length = PRESETS[
        options.preset
    ]
    vocab_size = options.vocab_size or vocab_size
    config = transformers.BertConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=mlp_width,
        max_position_embeddings=max(512, length),
        attn_implementation="sdpa",
    )
    model = transformers.BertForMaskedLM(config).train()
    decayed, others = [], []
    for name, parameter in model.named_parameters():
        is_decayed = not any(part in name for part in NOT_DECAYED)
        (decayed if is_decayed else others).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": 0.01},
        {"params": others, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)
    loss_fn = HEADS[options.head]
    if options.compile:
        loss_fn = torch.compile(loss_fn)
    generator = torch.Generator().manual_seed(0)
    batch = make_batch(vocab_size, num_rows, length, 0.15, generator)

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=options.dtype == "bfloat16"):
            loss = loss_fn(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", choices=PRESETS, default="mini")
    parser.add_argument("--vocab_size", type=int)
    parser.add_argument("--head", choices=HEADS, default="full")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(os.cpu_count())
    torch.manual_seed(0)
    step = make_step(options)
    for _ in range(2):
        step()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        step()
        samples = []
        for _ in range(int(line)):
            begin = time.perf_counter()
            step()
            samples.append({"ms": (time.perf_counter() - begin) * 1e3})
        print(json.dumps(samples), flush=True)


if __name__ == "__main__":
    main()
