"""The `flower` engine: real clients over the network, with Flower as the transport.

On the server, `engine` sends a round's tasks and receives its deliveries, and `client_registry` maps clients to nodes.
On a client's machine, an executor takes Flower's messages (`tasks`) and forwards each over `ipc` to a long-lived
trainer, which keeps the backbone loaded.

`adapter`, `bundle`, `enrolment` and `tasks` are the only modules that import flwr, so check these when a new version is
released. `gateway` is the part of Flower's server that clients can reach.
"""
