"""FedGuild: federated fine-tuning of mixture-of-experts language models.

Nine stages, each importing only from those before it: config, data, model, client, wire,
server, evaluation, costs, report. Methods sit after the server, engines after the methods, the
command line last. `experiment.run` is the whole flow in one function.
"""

__version__ = "0.2.0"
