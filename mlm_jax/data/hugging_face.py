"""Tokenizers in the files of a Hugging Face folder."""

import json
import pathlib
from collections.abc import Mapping, Sequence

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from mlm_jax.data.tokenizer import Tokenizer, read_vocabulary
from mlm_jax.errors import InputError
from mlm_jax.files import write_text

# As in `Tokenizer.special`.
ROLES = "pad_token", "unk_token", "cls_token", "sep_token", "mask_token"


def read_tokenizer(
    folder: pathlib.Path, settings: Mapping, *, lowercase: bool | None
) -> Tokenizer:
    """Returns the tokenizer of a folder: its `tokenizer.json`, or its `vocab.txt`.

    Args:
      folder: where the files are.
      settings: its `tokenizer_config.json`, or nothing.
      lowercase: for a `vocab.txt` whose settings do not say `do_lower_case`.

    Raises:
      InputError: where there is none, or where its special tokens are others than ours.
    """
    if (folder / "tokenizer.json").is_file():
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
    elif (folder / "vocab.txt").is_file():
        tokenizer = _from_vocabulary(folder / "vocab.txt", settings, lowercase)
    else:
        raise InputError(
            f"{folder} has no tokenizer.json and no vocab.txt. From other files, "
            "transformers makes one: AutoTokenizer.from_pretrained(DIR)"
            ".save_pretrained(DIR)"
        )
    for role, id_ in zip(ROLES, tokenizer.special, strict=True):
        token = settings.get(role)
        content = token.get("content") if isinstance(token, Mapping) else token
        if content is not None and content != tokenizer.piece(id_):
            raise InputError(
                f"{folder / 'tokenizer_config.json'}: {role} = {content!r}; this "
                f"vocabulary's is {tokenizer.piece(id_)!r}."
            )
    return tokenizer


def _from_vocabulary(path, settings, lowercase):
    """As transformers makes it of a BERT's `vocab.txt`. Unlike our own it does not
    compose accents, and strips them where case is lost unless told otherwise."""
    lowercase = settings.get("do_lower_case", lowercase)
    if lowercase is None:
        raise InputError(
            f"{path} does not say whether case is lost, nor does a "
            "tokenizer_config.json beside it: --lowercase or --nolowercase."
        )
    library = tokenizers.Tokenizer(
        models.WordPiece(read_vocabulary(path), unk_token="[UNK]")
    )
    library.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=lowercase,
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece(prefix="##")
    known = Tokenizer(library, name=str(path))
    library.add_special_tokens([known.piece(id_) for id_ in known.special])
    return Tokenizer(library, name=str(path))


def write_tokenizer(
    tokenizer: Tokenizer,
    folder: pathlib.Path,
    *,
    max_length: int,
    input_names: Sequence[str],
) -> None:
    """Writes `tokenizer.json` and `tokenizer_config.json`.

    Other libraries frame a text by what the file says, and read `[MASK]` in it: both
    are added where they are missing, so that they get the ids that we do.
    """
    path = folder / "tokenizer.json"
    tokenizer.save(path)
    library = tokenizers.Tokenizer.from_file(str(path))
    pieces = [tokenizer.piece(id_) for id_ in tokenizer.special]
    cls, sep = tokenizer.special.cls, tokenizer.special.sep
    if library.post_processor is None:
        first, last = tokenizer.piece(cls), tokenizer.piece(sep)
        library.post_processor = processors.TemplateProcessing(
            single=f"{first} $A {last}",
            pair=f"{first} $A {last} $B:1 {last}:1",
            special_tokens=[(first, cls), (last, sep)],
        )
        # As in `encode_with_masks`, the mask takes the space before it.
        mask = tokenizers.AddedToken(pieces[-1], lstrip=True, special=True)
        library.add_special_tokens([mask])
        write_text(path, library.to_str(pretty=True))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "model_input_names": list(input_names),
        "clean_up_tokenization_spaces": False,
    } | dict(zip(ROLES, pieces, strict=True))
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    write_text(folder / "tokenizer_config.json", text)
