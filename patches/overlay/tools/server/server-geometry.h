#pragma once

// The geometry of a context: what was asked for, what the engine allows, and what libllama and the server make of it.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

struct server_geometry {
    int64_t n_ctx      = 0; // cells of the context, all sequences together
    int64_t n_seq      = 0; // slots
    int64_t n_ctx_seq  = 0; // cells that one sequence can use
    int64_t n_ctx_slot = 0; // tokens that a request can use: n_ctx_seq, capped by the training context and by the server's own cap

    bool kv_unified = false;

    std::string cache_type_k;
    std::string cache_type_v;
};

bool operator==(const server_geometry & a, const server_geometry & b);

// a field that is not set keeps its effective value
struct server_geometry_request {
    std::optional<int64_t>     n_ctx;
    std::optional<int64_t>     n_seq;
    std::optional<bool>        kv_unified;
    std::optional<std::string> cache_type_k;
    std::optional<std::string> cache_type_v;

    bool force   = false; // take a change that drops what is held
    bool dry_run = false;

    int64_t t_us = 0; // when it arrived
};

// what the model, the launch options and the machine allow
struct server_geometry_limits {
    int64_t n_batch        = 0; // --batch-size: the output rows of one batch, one for each sequence at least
    int64_t n_seq_max      = 0; // the most sequences that libllama is built for
    int64_t n_ctx_train    = 0;
    int64_t n_ctx_slot_max = 0; // --kv-unified-per-slot, 0: no cap
    int64_t n_ctx_rope     = 0; // above this n_ctx_seq the model turns with other rope factors, 0: it has one set

    std::vector<std::string> cache_types; // names that a KV cache can have

    int64_t cell_bytes        = 0; // bookkeeping for each cell, resident from the start whatever is held
    int64_t cell_bytes_kv     = 0; // what the serving contexts take for each cell, roughly
    int64_t cell_bytes_least  = 0; // bookkeeping and KV that every cell takes at least
    int64_t memory_bytes      = 0; // host memory that can still be taken, 0: not known
    int64_t reclaimable_bytes = 0; // host memory that letting the serving contexts go would give back at most

    int64_t page_bytes_left = INT64_MAX; // that pages can still take, which parked states are

    int64_t n_seq_waiting   = 0; // slots that a request needs which waits for them, the largest such number
    int64_t n_states_cached = 0; // states outside the slots that are made for the serving KV cache: the prompt cache
};

// a message for the person who asked, and the numbers in it by name
struct server_geometry_error {
    std::string message;

    std::map<std::string, int64_t> details;
};

// the effective values of a request; returns false and fills in `error` where they make no geometry
bool server_geometry_resolve(
        const server_geometry         & current,
        const server_geometry_limits  & limits,
        const server_geometry_request & request,
              server_geometry         & next,
              server_geometry_error   & error);
