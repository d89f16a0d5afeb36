"""The corpora: a file per dataset family; `registry` loads any by its name.

To add one, write a module with a `read(source, template, **options)` that yields the examples of one split, and declare
it with `SPEC = CorpusSpec(...)`. A module in this folder is named by its file, one of another package by its entry
point in the group `fedguild.corpora`.
"""

from fedguild.data.corpora.registry import CORPORA, checked_options, corpus_spec, load_corpus
from fedguild.data.corpora.source import HubDataset, Source
from fedguild.data.corpora.spec import CorpusSpec

__all__ = ["CORPORA", "CorpusSpec", "HubDataset", "Source", "checked_options", "corpus_spec", "load_corpus"]
