"""Which tensor of theirs is which parameter of ours, by name, shape and layout.

Ours are a flat dict by path: a `kernel` is their `weight` transposed, and blocks have a
leading axis of layers. Theirs are one tensor a layer; `Wqkv` and the like are several
of ours on top of each other.
"""

import re
from typing import NamedTuple

import numpy as np

from mlm_jax.errors import InputError
from mlm_jax.interop.families import FAMILIES, unused_positions

LEAVES = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "bias": "bias",
}
# Found in checkpoints, and not part of a masked LM: the pooler and the head of
# next-sentence prediction, and buffers that older versions saved.
IGNORABLE = re.compile(
    r"(.*\.)?pooler\..*|cls\.seq_relationship\..*|.*\.(position_ids|token_type_ids)"
    r"|(embeddings\.)?position_ids"
)
VOCABULARY = "encoder/embed/embedding", "decoder/embedding", "bias"


class Part(NamedTuple):
    """Rows of a tensor that are a parameter's, or one layer of it."""

    path: str
    layer: int | None
    part: int
    num_parts: int


class Layout(NamedTuple):
    """What a checkpoint of one model looks like.

    `num_rows` is the size of their vocabulary, `vocab_size` how many of its entries are
    tokens. `is_bare` is of an encoder that was saved alone, without its prefix.
    """

    model_type: str
    num_rows: int
    vocab_size: int
    pad_id: int
    tied: bool
    is_bare: bool = False

    @property
    def family(self):
        return FAMILIES[self.model_type]

    def name(self, module):
        """Returns their name of a module of ours, with `{}` for its layer."""
        family = self.family
        if module == "" and not self.tied:  # the bias that counts is the decoder's
            module = "decoder"
        is_inner = module.startswith("encoder/") and not self.is_bare
        return (family.prefix if is_inner else "") + family.modules[module]

    def copies(self):
        """Returns {name: name of what it is a copy of} of tensors that need not be
        there. Of an untied head it is a bias that is not used."""
        decoder = self.family.modules["decoder"]
        bias = f"{self.family.modules['']}.bias"
        if not self.tied:
            return {bias: f"{decoder}.bias"} if bias != f"{decoder}.bias" else {}
        copies = {f"{decoder}.weight": f"{self.name('encoder/embed')}.weight"}
        return copies | ({f"{decoder}.bias": bias} if bias != f"{decoder}.bias" else {})

    def tensors(self, shapes):
        """Returns {name: (shape, its parts)} of a model with parameters of `shapes`,
        {path: shape}."""
        found: dict = {}
        for path, shape in shapes.items():
            module, _, leaf = path.rpartition("/")
            siblings = [
                ours
                for ours, theirs in self.family.modules.items()
                if theirs == self.family.modules[module] and "/blocks/" in ours
            ]
            number = max(len(siblings), 1)
            place = siblings.index(module) if number > 1 else 0
            has_layers = "/blocks/" in path
            for layer in range(shape[0]) if has_layers else (None,):
                if self._is_identity(path, layer):
                    continue
                name = f"{self.name(module)}.{LEAVES[leaf]}".format(layer)
                their_shape = self._shape(path, shape[1:] if has_layers else shape)
                their_shape = (number * their_shape[0], *their_shape[1:])
                parts = found.setdefault(name, (their_shape, []))[1]
                parts.append(Part(path, layer, place, number))
        return found

    def _is_identity(self, path, layer):
        """ModernBERT's first attention has no norm; we have one that is not used."""
        is_norm = "/attention_norm/" in path
        return self.model_type == "modernbert" and is_norm and layer == 0

    def _shape(self, path, shape):
        if path in VOCABULARY:
            return (self.num_rows, *shape[1:])
        if path == "encoder/position_embed/embedding":
            unused = unused_positions(self.model_type, self.pad_id)
            return (shape[0] + unused, *shape[1:])
        return shape[::-1] if path.endswith("/kernel") else shape

    def to_ours(self, path, tensor, shape):
        """Returns one parameter, or one layer of it, in float32."""
        tensor = np.asarray(tensor, np.float32)
        if path in VOCABULARY:
            tensor = tensor[: self.vocab_size]
            more = shape[0] - len(tensor)
            return np.pad(tensor, [(0, more)] + [(0, 0)] * (tensor.ndim - 1))
        if path == "encoder/position_embed/embedding":
            return tensor[unused_positions(self.model_type, self.pad_id) :]
        return tensor.T if path.endswith("/kernel") else tensor

    def to_theirs(self, path, array):
        """Returns the rows that are the parameter's, or one layer's of it."""
        if path in VOCABULARY:
            return array[: self.num_rows]
        if path == "encoder/position_embed/embedding":
            unused = unused_positions(self.model_type, self.pad_id)
            return np.pad(array, [(unused, 0), (0, 0)])
        return array.T if path.endswith("/kernel") else array


def check(found, expected, *, where, copies, ignored=()):
    """Raises InputError, naming tensors, unless a checkpoint is whole.

    Args:
      found: {name: shape} of what is there.
      expected: {name: (shape, parts)} of what has to be.
      where: the file, for the message.
      copies: {name: name} of tensors that may be there as copies of another one.
      ignored: beginnings of names that somebody says are not needed.

    Returns the names of what is there and not read, copies apart.
    """
    missing = [name for name in expected if name not in found]
    if missing:
        raise InputError(
            f"{where} lacks {_some(missing)}, of the {len(expected)} tensors that the "
            "model has."
        )
    for name, (shape, _) in expected.items():
        if tuple(found[name]) != tuple(shape):
            raise InputError(
                f"{where}: {name} is {tuple(found[name])}; by config.json it would be "
                f"{tuple(shape)}."
            )
    others = [name for name in found if name not in expected and name not in copies]
    left_out = [
        name
        for name in others
        if IGNORABLE.fullmatch(name) or name.startswith(tuple(ignored))
    ]
    unknown = [name for name in others if name not in left_out]
    if unknown:
        raise InputError(
            f"{where} has {_some(unknown)}, which this model has no place for. What is "
            f"not needed can be left out by name: --ignore={unknown[0]}"
        )
    return sorted(left_out)


def to_ours(layout, shapes, read):
    """Returns {path: float32 array} of `shapes`; `read(name)` returns a tensor."""
    # Norms that are not used are ones; the vocabulary's padding is zeros.
    params = {
        path: (np.ones if path.endswith("/scale") else np.zeros)(shape, np.float32)
        for path, shape in shapes.items()
    }
    for name, (_, parts) in layout.tensors(shapes).items():
        tensor = read(name)
        for path, layer, part, num_parts in parts:
            piece = np.split(tensor, num_parts)[part]
            target = params[path] if layer is None else params[path][layer]
            target[...] = layout.to_ours(path, piece, target.shape)
    return params


def to_theirs(layout, params):
    """Returns {name: contiguous array} of parameters {path: array}."""
    shapes = {path: array.shape for path, array in params.items()}
    tensors = {}
    for name, (shape, parts) in layout.tensors(shapes).items():
        pieces = []
        for path, layer, _, _ in sorted(parts, key=lambda part: part.part):
            array = params[path] if layer is None else params[path][layer]
            pieces.append(layout.to_theirs(path, array))
        # A transposed view would be written as what it is a view of.
        tensors[name] = np.ascontiguousarray(np.concatenate(pieces), np.float32)
        assert tensors[name].shape == tuple(shape), name
    return tensors


def _some(names):
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
