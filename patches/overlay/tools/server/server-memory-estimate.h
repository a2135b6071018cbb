#pragma once

// llama-server --print-memory-json ARGS...: what a server with these arguments would take, told without taking it: the model and
// the contexts are made by the code that the server makes them with, but no weights are read and no buffers are allocated.
//
// stdout has one JSON object, all sizes are bytes:
//
//   "build":    the build's name
//   "n_ctx", "n_seq", "kv_unified": the geometry that would serve, after all rounding and fitting
//   "devices":  each with "name"; "is_host"; "model", of its weights (mapped from the file, or copied, as --load-mode has it);
//               "context", of the KV cache and on the host of what is kept for each of its cells; "compute"; "free", on the host
//               what the control groups of this process leave; "total"
//   "left_out": what was asked for and is not counted: "mmproj", "lora", "control_vector"
//
// Not counted either: the output buffer (4 bytes for each slot and word of the vocabulary), as in the answer to a reconfigure's
// dry run; what comes with use, bounded by --cache-ram, --page-ram-bytes and --ctx-checkpoints-bytes.
//
// What a server would not start with is refused in its words on stderr, with its exit code.

struct common_params;

// takes the word out of the arguments
bool server_memory_asked_for(int & argc, char ** argv);

// the process's exit code
int server_memory_print(common_params params);
