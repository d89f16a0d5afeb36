"""Datasets, and their division into each client's training, validation and test examples.

`load_corpus` reads a dataset into examples (`corpora/`, with the templates of `prompts`),
`partition` distributes the training examples over the clients, `split_clients` splits every client's share
into three, and `batches` turns examples into token tensors.
"""

from fedguild.data.corpora import CORPORA, load_corpus
from fedguild.data.example import Corpus, Example
from fedguild.data.partition import SCHEMES, PartitionScheme, PartitionTable, as_parts, partition, partition_table
from fedguild.data.prompts import TEMPLATES, render
from fedguild.data.split import ClientData, pooled_test, split_clients

__all__ = [
    "CORPORA",
    "SCHEMES",
    "TEMPLATES",
    "ClientData",
    "Corpus",
    "Example",
    "PartitionScheme",
    "PartitionTable",
    "as_parts",
    "load_corpus",
    "partition",
    "partition_table",
    "pooled_test",
    "render",
    "split_clients",
]
