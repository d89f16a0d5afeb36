"""Assembly of a run from its config: data, method, backbone, clients and engine.

`data` reads and partitions the examples, `fitting` builds the method, `checks` and `method_checks` refuse what cannot
work, and `preparation` assembles an `experiment`; `engines` and `protection` are what its rounds run on.
"""

from fedguild.runs.setup.checks import require_examples, require_split
from fedguild.runs.setup.data import (
    PreparedData,
    Split,
    cut_of,
    data_sentences,
    dropped_of,
    encoded_texts,
    of_client,
    prepare_corpus,
    prepare_data,
)
from fedguild.runs.setup.engines import make_engine
from fedguild.runs.setup.experiment import Experiment, OwnScope, run_identity
from fedguild.runs.setup.fitting import budgets_of, fitted, method_of, method_record, tell_fitted
from fedguild.runs.setup.method_checks import check_config, check_fit
from fedguild.runs.setup.preparation import load_model, model_of, prepare, tokenizer_of
from fedguild.runs.setup.protection import aggregator_of, largest_value, server_filters, what_a_member_can_do

__all__ = [
    "Experiment",
    "OwnScope",
    "PreparedData",
    "Split",
    "aggregator_of",
    "budgets_of",
    "check_config",
    "check_fit",
    "cut_of",
    "data_sentences",
    "dropped_of",
    "encoded_texts",
    "fitted",
    "largest_value",
    "load_model",
    "make_engine",
    "method_of",
    "method_record",
    "model_of",
    "of_client",
    "prepare",
    "prepare_corpus",
    "prepare_data",
    "require_examples",
    "require_split",
    "run_identity",
    "server_filters",
    "tell_fitted",
    "tokenizer_of",
    "what_a_member_can_do",
]
