#pragma once

// llama-server --print-args-json ARGS...: what a command line means, without running it. Who plans a change of options asks
// this, instead of parsing them once more.
//
// stdout has one JSON object:
//
//   "build":   the build's name
//   "options": all that there are: "name", the spellings "args" and "args_neg", "env", the number of values "arity", and
//              "class", what a change of it concerns:
//                live     the geometry, which POST /reconfigure changes
//                context  the contexts, which a reconfigure builds anew; not changed live for now
//                server   what is not the model's
//                model    the weights, or anything that is not known to be less
//   "given":   what has a value, in the order in which it takes effect: "name"; "values" as they are taken ("4k" for a number is
//              "4", a flag that may be negated "1" or "0"); "source": "argv", or the name
//              of an environment variable, or the path of a config file. A secret's value is its SHA-256.
//
// A command line that llama-server does not take is refused in its words on stderr, with its exit code.

bool server_args_asked_for(int argc, char ** argv);

// the process's exit code
int server_args_print(int argc, char ** argv);
