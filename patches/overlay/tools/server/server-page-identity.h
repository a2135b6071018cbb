#pragma once

// What a state is good for, by content: the model, its draft and what else the values in a KV cache depend on. Never the
// geometry, and never a path: a file that was moved or touched is the same, one that was replaced under its name is another.

#include "server-page-codec.h"

#include "common.h"

#include <string>

// 16 hex digits of a GGUF file's content, of all its parts where it is split: its size, every key with its value, every tensor's
// name, type and shape, and a sample of every tensor's data; throws std::runtime_error where it cannot be read
std::string server_model_fingerprint(const std::string & path);

// by content, what was loaded; "none" where there is none
struct server_loaded_files {
    std::string model = "none";
    std::string draft = "none";
    std::string cvec  = "none"; // control vectors and their strength, one behind the other

    std::vector<std::string> lora; // as params.lora_adapters
};

// of the files that these parameters name; says in `error` what could not be read, such a file is like no other
server_loaded_files server_fingerprint_loaded(const common_params & params, bool has_draft_model, std::string & error);

// of a server with these parameters and files; adapters are a matter of each slot
// rope_factors: which set of the model's the size of the context selects
server_page_identity server_page_identity_of(const common_params & params, const server_loaded_files & files, bool has_draft, const std::string & rope_factors);
