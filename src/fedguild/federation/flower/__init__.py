"""The `flower` engine: real clients over the network, with Flower as the transport.

On the server, `engine` sends a round's tasks and receives its deliveries, and `client_registry` knows which node is
which client. On a client's machine, an executor takes Flower's messages (`tasks`) and forwards each over `ipc` to a
long-lived trainer, which keeps the backbone.

`adapter`, `bundle`, `enrolment` and `tasks` are the only modules that import flwr, and the places to look at when a new
version of it comes out. `gateway` is what clients reach of Flower's server.
"""
