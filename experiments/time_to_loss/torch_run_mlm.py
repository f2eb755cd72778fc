"""Trains Hugging Face's BertForMaskedLM as its run_mlm.py example does, on our rows.

    python experiments/time_to_loss/torch_run_mlm.py --exam=exam.npz --output=hf.jsonl

Needs torch and transformers, in an environment of their own. What run_mlm does: new
masks for every batch, 15% of the tokens by Bernoulli draws, 80/10/10, replacements from
the whole vocabulary, logits at every position, dropout 0.1, AdamW. The size of the
model, the batch, the learning rate and its schedule are those of our config. The exam
is ours: its masks, its rows, a sum of losses over a count of predictions.

Writes a JSON object for each evaluation: step, seconds of training so far, loss.
"""

import argparse
import json
import math
import os
import time

import numpy as np
import torch
import transformers


def make_model(vocab_size, row_length, pad, options):
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=vocab_size,
            hidden_size=options.width,
            num_hidden_layers=options.num_layers,
            num_attention_heads=options.num_heads,
            intermediate_size=options.mlp_width,
            max_position_embeddings=row_length,
            pad_token_id=pad,
            attn_implementation="sdpa",
        )
    )


def corrupted(tokens, exam, generator):
    """Returns inputs and labels as DataCollatorForLanguageModeling makes them."""
    vocab_size = int(exam["vocab_size"])
    special = torch.tensor([int(exam[name]) for name in ("pad", "unk", "cls", "sep")])

    def draw(share):
        return torch.rand(tokens.shape, generator=generator) < share

    is_masked = draw(0.15) & ~torch.isin(tokens, special)
    labels = torch.where(is_masked, tokens, -100)
    is_replaced = is_masked & draw(0.8)
    inputs = torch.where(is_replaced, int(exam["mask"]), tokens)
    is_random = is_masked & ~is_replaced & draw(0.5)
    words = torch.randint(vocab_size, tokens.shape, generator=generator)
    return torch.where(is_random, words, inputs), labels


@torch.no_grad()
def evaluate(model, exam):
    """Returns the mean loss over the exam's predictions, in nats."""
    model.eval()
    total, count = 0.0, 0
    inputs, labels = (torch.from_numpy(exam[n]).long() for n in ("inputs", "labels"))
    for begin in range(0, len(inputs), 64):
        part = slice(begin, begin + 64)
        mask = (inputs[part] != int(exam["pad"])).long()
        logits = model(input_ids=inputs[part], attention_mask=mask).logits
        is_predicted = labels[part] != -100
        total += torch.nn.functional.cross_entropy(
            logits[is_predicted].double(), labels[part][is_predicted], reduction="sum"
        ).item()
        count += int(is_predicted.sum())
    model.train()
    return total / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--exam", required=True)
    parser.add_argument("--output", required=True)
    parser.add_argument("--num_layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--num_heads", type=int, default=2)
    parser.add_argument("--mlp_width", type=int, default=512)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--num_steps", type=int, default=3500)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--warmup_steps", type=int, default=100)
    parser.add_argument("--every_steps", type=int, default=250)
    parser.add_argument("--max_seconds", type=float, default=math.inf)
    options = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    exam = dict(np.load(options.exam))
    rows = torch.from_numpy(exam["train"]).long()
    model = make_model(
        int(exam["vocab_size"]), rows.shape[1], int(exam["pad"]), options
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate)
    schedule = transformers.get_linear_schedule_with_warmup(
        optimizer, options.warmup_steps, options.num_steps
    )
    generator = torch.Generator().manual_seed(0)
    seconds, order = 0.0, torch.empty(0, dtype=torch.long)
    with open(options.output, "w") as output:
        for step in range(options.num_steps + 1):
            is_over = step == options.num_steps or seconds > options.max_seconds
            if step % options.every_steps == 0 or is_over:
                line = {"step": step, "seconds": round(seconds, 1)}
                print(json.dumps(line | {"loss": evaluate(model, exam)}), file=output)
                output.flush()
            if is_over:
                return
            begin = time.perf_counter()
            if len(order) < options.batch_size:
                order = torch.cat(
                    [order, torch.randperm(len(rows), generator=generator)]
                )
            chosen, order = order[: options.batch_size], order[options.batch_size :]
            inputs, labels = corrupted(rows[chosen], exam, generator)
            mask = (inputs != int(exam["pad"])).long()
            loss = model(input_ids=inputs, attention_mask=mask, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            seconds += time.perf_counter() - begin


if __name__ == "__main__":
    main()
