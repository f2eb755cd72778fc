"""The documents of a source, as the row store reads them."""

from mlm_jax.data import sources


def documents(source, *, document, on_bad_text, data_dir, counts=None):
    """Yields the documents of one source, part by part."""
    found = sources.open_source(source, document=document, data_dir=data_dir)
    counts = sources.TextCounts() if counts is None else counts
    for part in sources.cut(found):
        yield from sources.read_part(
            found, part, on_bad_text=on_bad_text, counts=counts
        )
