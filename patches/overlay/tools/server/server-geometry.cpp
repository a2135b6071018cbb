#include "server-geometry.h"

#include <algorithm>
#include <utility>

// libllama rounds the cells of a sequence up to this
static constexpr int64_t N_CTX_PAD = 256;

// positions are int32, and the sum over all sequences is an int32 in libllama's parameters
static constexpr int64_t N_CTX_MAX = INT32_MAX - N_CTX_PAD;

bool operator==(const server_geometry & a, const server_geometry & b) {
    return a.n_ctx        == b.n_ctx        &&
           a.n_seq        == b.n_seq        &&
           a.n_ctx_seq    == b.n_ctx_seq    &&
           a.n_ctx_slot   == b.n_ctx_slot   &&
           a.kv_unified   == b.kv_unified   &&
           a.cache_type_k == b.cache_type_k &&
           a.cache_type_v == b.cache_type_v;
}

// the effective values that libllama and the server would make of n_ctx and n_seq
static void normalise(server_geometry & geometry, const server_geometry_limits & limits) {
    const auto pad = [](int64_t n) { return (n + N_CTX_PAD - 1) / N_CTX_PAD * N_CTX_PAD; };

    if (geometry.kv_unified) {
        geometry.n_ctx     = pad(geometry.n_ctx);
        geometry.n_ctx_seq = geometry.n_ctx;
    } else {
        geometry.n_ctx_seq = pad(pad(geometry.n_ctx) / geometry.n_seq);
        geometry.n_ctx     = geometry.n_ctx_seq * geometry.n_seq;
    }

    geometry.n_ctx_slot = std::min(geometry.n_ctx_seq, limits.n_ctx_train);
    if (limits.n_ctx_slot_max > 0) {
        geometry.n_ctx_slot = std::min(geometry.n_ctx_slot, limits.n_ctx_slot_max);
    }
}

bool server_geometry_resolve(
        const server_geometry         & current,
        const server_geometry_limits  & limits,
        const server_geometry_request & request,
              server_geometry         & next,
              server_geometry_error   & error) {
    const auto invalid = [&](const std::string & message, const std::map<std::string, int64_t> & details) {
        error = { message, details };
        return false;
    };

    next = current;
    next.n_ctx        = request.n_ctx       .value_or(current.n_ctx);
    next.n_seq        = request.n_seq       .value_or(current.n_seq);
    next.kv_unified   = request.kv_unified  .value_or(current.kv_unified);
    next.cache_type_k = request.cache_type_k.value_or(current.cache_type_k);
    next.cache_type_v = request.cache_type_v.value_or(current.cache_type_v);

    if (next.n_ctx < 1 || next.n_ctx > N_CTX_MAX) {
        return invalid("n_ctx has to be between 1 and " + std::to_string(N_CTX_MAX),
                {{"n_ctx", next.n_ctx}, {"n_ctx_min", 1}, {"n_ctx_max", N_CTX_MAX}});
    }
    if (next.n_seq < 1 || next.n_seq > limits.n_seq_max) {
        return invalid("n_seq has to be between 1 and " + std::to_string(limits.n_seq_max),
                {{"n_seq", next.n_seq}, {"n_seq_min", 1}, {"n_seq_max", limits.n_seq_max}});
    }
    normalise(next, limits);

    if (next.n_ctx > N_CTX_MAX) {
        return invalid("n_ctx rounded up to " + std::to_string(N_CTX_PAD) + " cells for each sequence is above the maximum",
                {{"n_ctx", next.n_ctx}, {"n_ctx_max", N_CTX_MAX}});
    }

    // libllama limits a batch to n_ctx and aborts if it cannot hold one output for each sequence
    const int64_t n_batch = std::min(limits.n_batch, next.n_ctx);
    if (next.n_seq > n_batch) {
        return invalid("n_seq is above n_batch, the most sequences that one batch can serve",
                {{"n_seq", next.n_seq}, {"n_batch", n_batch}});
    }

    std::string names;
    for (const auto & name : limits.cache_types) {
        names += (names.empty() ? "" : ", ") + name;
    }
    for (const auto & [field, name] : { std::make_pair("cache_type_k", next.cache_type_k), std::make_pair("cache_type_v", next.cache_type_v) }) {
        if (std::find(limits.cache_types.begin(), limits.cache_types.end(), name) == limits.cache_types.end()) {
            return invalid(std::string(field) + " has to be one of " + names + ", got '" + name.substr(0, 64) + "'", {});
        }
    }

    return true;
}
