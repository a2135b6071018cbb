#!/bin/sh
# A loop that tries one model with several contexts; only the first turn loads the weights.
set -eu
model=${1:-/models/model.gguf}
port=${2:-8080}

for n_ctx in 8192 16384 32768; do
    llamactl run -- llama-server --model "$model" -c "$n_ctx" --port "$port" 2>> llama-server.log &
    server=$!
    until curl -sfo /dev/null "http://127.0.0.1:$port/health"; do
        kill -0 "$server" 2> /dev/null || { wait "$server"; exit; }  # it has ended: with its exit code
        sleep 0.1
    done
    curl -sf "http://127.0.0.1:$port/props"
    echo
    kill "$server"
    wait "$server"
done
