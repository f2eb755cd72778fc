"""Documents as the row store reads them, and the config of a small store."""

from mlm_jax.data import sources


def documents(source, *, document, on_bad_text, data_dir, counts=None):
    """Yields the documents of one source, part by part."""
    found = sources.open_source(source, document=document, data_dir=data_dir)
    counts = sources.TextCounts() if counts is None else counts
    for part in sources.cut(found):
        yield from sources.read_part(
            found, part, on_bad_text=on_bad_text, counts=counts
        )


def data_config(folder, **changes):
    """Returns the data section for lines of text in `folder`, whose cache is there."""
    return {
        "source": f"files:{folder}/text.txt",
        "document": "line",
        "on_bad_text": "stop",
        "data_dir": None,
        "cache_dir": str(folder / "cache"),
        "row_length": 32,
        "packing": "packed",
        "validation_fraction": 0.1,
    } | changes
