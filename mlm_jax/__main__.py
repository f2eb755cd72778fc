"""Lists the commands."""

COMMANDS = """\
python -m mlm_jax.COMMAND [flags]     (--help explains each)

train      trains a masked language model, or resumes it
  python -m mlm_jax.train --config=configs/tiny.py --workdir=runs/tiny
prepare    prepares data beforehand, in processes or under Apache Beam
  python -m mlm_jax.prepare --config=configs/bert_base.py --workers=32
launch     submits training to SLURM
  python -m mlm_jax.launch --slurm --slurm_nodes=4 --config=configs/bert_base.py \\
      --workdir=runs/bert_base --config.parallel.mode=shard_map
fill_mask  fills the [MASK]s of a sentence with a trained model
  python -m mlm_jax.fill_mask --workdir=runs/tiny "The [MASK] was dark."
evaluate   evaluates runs under frozen masks: a matrix, calibration, bits per byte
  python -m mlm_jax.evaluate runs/a runs/b --rates=0.15,0.4 --output=exam.json
score      scores texts by their pseudo-log-likelihood
  python -m mlm_jax.score --workdir=runs/tiny sentences.txt --output=scores.jsonl
judge_pairs judges minimal pairs, such as BLiMP's
  python -m mlm_jax.judge_pairs --workdir=runs/tiny bundled:agreement
finetune   trains an encoder on a task: labels, numbers, tags, answers
  python -m mlm_jax.finetune --config=configs/finetune/glue.py:sst2 \\
      --from=runs/bert_base --workdir=runs/sst2
embed      turns texts into vectors
  python -m mlm_jax.embed --workdir=runs/tiny sentences.txt --output=vectors.npy
show_masks shows what a corruption policy hides, as text or as a page
  python -m mlm_jax.show_masks --config=configs/tiny.py --html=masks.html
walkthrough explains masked language modeling from nothing, in pictures
  python -m mlm_jax.walkthrough --html=walkthrough.html
mine_collocations  makes the list that PMI masking reads
  python -m mlm_jax.mine_collocations --config=configs/tiny.py --output=pmi.txt
diff_ledgers  finds the first step at which two runs hid different tokens
  python -m mlm_jax.diff_ledgers runs/a runs/b
import_hf  makes a run of a Hugging Face checkpoint
  python -m mlm_jax.import_hf --from=downloads/bert-base-uncased --workdir=runs/bert
export_hf  writes a run as a Hugging Face checkpoint
  python -m mlm_jax.export_hf --workdir=runs/bert --to=exported/bert
check      verifies a run's checkpoints, rows and logs
  python -m mlm_jax.check --workdir=runs/tiny
plan       tells what a step needs on a machine that is not there
  python -m mlm_jax.plan --config=configs/bert_base.py --topology=v5e:4x4
sweep      runs an experiment: every arm with every seed
  python -m mlm_jax.sweep experiments/mask_rate.py:small --workdir=runs/mask_rate
report     writes the report of an experiment: a page, Markdown, JSON, pictures
  python -m mlm_jax.report experiments/mask_rate.py:small --workdir=runs/mask_rate
benchmark  measures a training step, and its parts
  python -m mlm_jax.benchmark --preset=mini --breakdown"""

if __name__ == "__main__":
    print(COMMANDS)
