"""Stage 2 of 9: data, the corpora. A file per dataset family; `registry` loads any by its name.

To add one: write a file with a `read(source, template, **options)` that yields the examples of
one split, describe it in a `SPEC`, and add that to `registry.CORPORA`.
"""

from fedguild.data.corpora.registry import CORPORA, corpus_spec, load_corpus
from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec

__all__ = ["CORPORA", "CorpusSpec", "HubDataset", "Source", "corpus_spec", "load_corpus"]
