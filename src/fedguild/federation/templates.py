"""Templates of the files that `fedguild federation init` writes."""

README = """# A federation of {clients} clients

`server/` belongs to whoever runs the server, `client-000/` and so on to one organisation each.

On one machine, each line in a terminal of its own:

    fedguild federation server server
    fedguild federation client client-000      # and the others
    fedguild federation run server

On several machines: give every organisation its folder and nothing else, keep `server/certificates/ca.key`
and every `node.key` where only their owner can read them, and let the clients reach {address}: by `host` and
`opens` in `server/server.yaml`, or through a proxy like `server/nginx.conf`.
Better still, every organisation removes the `node.key` in its folder, makes its own with
`fedguild federation key node.key` and sends only `node.pub`, which replaces the one in `server/nodes/` under the
client's name.

For secure aggregation (`federation.secure`) every organisation also needs the others' `node.pub`, as
`peers/client-000.pub` and so on in its folder: from them, not from the server.

In its `site.yaml` an organisation says where its data and its model are, and what it accepts.
{data}"""

OWN_DATA = """It puts its examples into its folder, as {file}.
"""
SHARED_DATA = """These sites share this machine's data and model: their folders `data` and `model` hold links to them.
"""

SERVER = """# The server of the federation; `fedguild federation server FOLDER` reads this.
run: run.yaml
# Where clients reach this machine. For clients on other machines: `host: 0.0.0.0` and `opens: fleet`, which opens the
# interface for registered clients and nothing else, or a proxy of your own in front of this port.
host: 127.0.0.1
port: {port}
# Always on 127.0.0.1: Flower's control and runtime interfaces, which ask nobody for a key.
control_port: {control_port}
wait_seconds: 600
# Whether this machine has the run's data and scores the global model on its held-out examples. false if only the
# clients have data: they then score their own models on their own examples.
server_evaluation: {server_evaluation}
"""

SITE = """# One client of the federation; `fedguild federation client FOLDER` reads it. It stays with its organisation.
client: {client}
server: {address}
ca_certificate: ca.pem
key: node.key
port: {port}
work: work

# What the server may ask for; the rest is refused, with the reason. The minima are those of the run as it was set up.
accept:
  requests: [train, score, deliver]
  methods: [{method}]
  min_steps: {min_steps}
  max_steps: {max_steps}
  min_batch: {min_batch}
  min_examples: 2
  # What an upload can reveal; `fedguild federation check FOLDER CONFIG` shows it for a run.
  optimizers: [{optimizers}]
  max_decay: {max_decay:g}
  max_rank: {max_rank}
  min_tokens_per_rank: {min_tokens_per_rank}
  min_length: {min_length}
  max_dropout: {max_dropout:g}
  min_scored: {min_scored}
  requests_per_round: 3
  requests_per_run: {requests_per_run}
  leave: ["*"]
  min_clients: {min_clients}{secure}

{model}

# The organisation's own examples: a file in this folder, or anywhere on its machine. With `shares` above 1 a source
# is partitioned as in a simulation, and `share` is this client's part.
{data}
"""

APP = """[project]
name = "guild"
version = "1.0.0"
description = "FedGuild's round loop as a Flower app"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedguild"

[tool.flwr.app.components]
serverapp = "fedguild.federation.server_app:app"
clientapp = "fedguild.federation.client_app:app"

[tool.flwr.app.config]
ticket = ""
round = -1
"""

CERTIFICATES = """#!/bin/sh
# An example authority, if there is none yet, and a server's certificate for the clients' name of it and this machine.
# `sh make.sh` here renews the certificate; SERVER_NAME=other.example.org sh make.sh makes it for another name.
# In production, use a certificate of your organisation's authority and give the clients that authority's instead.
set -eu
umask 077
name="${SERVER_NAME:-@HOST@}"
case "$name" in
  *[!0-9.]*) kind=DNS ;;
  *) kind=IP ;;
esac
if [ -f ca.key ] || [ -f ca.pem ]; then
  if ! [ -f ca.key ] || ! [ -f ca.pem ] ||
    [ "$(openssl pkey -in ca.key -pubout)" != "$(openssl x509 -in ca.pem -pubkey -noout)" ]; then
    echo "ca.key is not that of ca.pem: bring it here, or move both away to make another authority." >&2
    exit 1
  fi
else
  openssl ecparam -name prime256v1 -genkey -noout -out ca.key
  openssl req -x509 -new -key ca.key -sha256 -days 825 -subj "/CN=FedGuild example authority" -out ca.pem \\
    -addext "basicConstraints=critical,CA:TRUE" -addext "keyUsage=critical,keyCertSign,cRLSign"
fi
openssl ecparam -name prime256v1 -genkey -noout -out new.key
openssl req -new -key new.key -sha256 -subj "/CN=$name" -out new.csr
cat > new.ext <<END
basicConstraints=CA:FALSE
extendedKeyUsage=serverAuth
subjectAltName=$kind:$name,DNS:localhost,IP:127.0.0.1
END
openssl x509 -req -in new.csr -CA ca.pem -CAkey ca.key -CAcreateserial -sha256 -days 397 \\
  -extfile new.ext -out new.pem
mv new.key server.key
mv new.pem server.pem
chmod 644 ca.pem server.pem
rm -f new.csr new.ext
"""

NGINX = """# An example for nginx in front of the server, for a certificate or limits of your own. The server's port for
# clients serves /v1/fleet/ only, as does this; Flower's other interfaces are on another port of 127.0.0.1.
# On the same machine, nginx takes the clients' port, {port}: write `port: {behind}` in server.yaml.
server {{
    listen {port} ssl;
    server_name {host};
    ssl_certificate     certificates/server.pem;
    ssl_certificate_key certificates/server.key;
    client_max_body_size 64m;

    location /v1/fleet/ {{
        proxy_pass https://127.0.0.1:{behind};
        proxy_ssl_trusted_certificate certificates/ca.pem;
        proxy_ssl_verify on;
        proxy_ssl_name localhost;
        proxy_read_timeout 600s;
    }}
    location / {{
        return 403;
    }}
}}
"""
