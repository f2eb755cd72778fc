"""Other people's corruption policies, from their behaviour.

Configs take a name as their argument: --config=configs/tiny.py:roberta. What a preset
does not name is as in base.py.
"""

PRESETS = {
    # Devlin et al. 2019: ten static copies, an exact count, any token as replacement.
    "bert": {
        "rate": 0.15,
        "mask_frac": 0.8,
        "random_frac": 0.1,
        "count": "exact",
        "random_pool": "full_vocab",
        "dynamic": False,
        "duplicates": 10,
    },
    # Liu et al. 2019, as in fairseq: a new mask each epoch, int(p n + u) of them.
    "roberta": {
        "rate": 0.15,
        "mask_frac": 0.8,
        "random_frac": 0.1,
        "count": "stochastic",
        "random_pool": "non_special",
    },
    # Hugging Face's collator: each token on its own, short rows may have no target.
    "hf": {
        "rate": 0.15,
        "mask_frac": 0.8,
        "random_frac": 0.1,
        "count": "bernoulli",
        "min_predictions": 0,
        "random_pool": "full_vocab",
    },
    # Clark et al. 2020's generator: 85% [MASK], the rest unchanged. Their large models
    # take a rate of 25%. (Their positions may come twice; ours do not.)
    "electra": {
        "rate": 0.15,
        "mask_frac": 0.85,
        "random_frac": 0.0,
        "count": "exact",
    },
    # More masking early, less late (Ankner et al. 2024).
    "modern": {
        "rate": 0.3,
        "schedule": "linear",
        "final_rate": 0.15,
        "mask_frac": 0.8,
        "random_frac": 0.1,
        "count": "stochastic",
        "random_pool": "non_special",
    },
}


def apply(c, name):
    """Sets the corruption section of `c` to a preset; "" leaves it as it is."""
    if name and name not in PRESETS:
        raise ValueError(f"no preset {name!r}; expected {', '.join(PRESETS)}")
    c.corruption.update(PRESETS.get(name, {}))
    return c
