#pragma once

// The reconfigure logic: whether a new geometry can be taken, and the order in which every slot's state is carried into it.
//
// No JSON, no HTTP, no llama.h: all it needs of the engine is server_reconfigure_engine, so it is tested with a fake one.
// A change has two halves on the engine thread, with the build of the new contexts between them on any thread:
//
//   server_reconfigure_begin()  ->  engine.build()  ->  server_reconfigure_finish()
//
// Nothing that serves is touched before finish(), and finish() ends in the old geometry with every state or in the new
// geometry with every state.

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

    bool force   = false;
    bool dry_run = false;
};

// what the model and the launch options allow
struct server_geometry_limits {
    int64_t n_batch        = 0; // --batch-size: the output rows of one batch, one for each sequence at least
    int64_t n_seq_max      = 0; // the most sequences that libllama is built for
    int64_t n_ctx_train    = 0;
    int64_t n_ctx_slot_max = 0; // --kv-unified-per-slot, 0: no cap
    int64_t cell_bytes     = 0; // bookkeeping for each cell, resident from the start whatever is held
    int64_t memory_bytes   = 0; // host memory that can still be taken, 0: not known
};

// what a slot holds and what it needs
struct server_slot_load {
    int32_t id       = 0;
    int64_t n_tokens = 0; // held in its sequence now
    int64_t n_need   = 0; // the window it needs to go on as if nothing had happened

    bool waits_for_parent = false; // a child of an n > 1 completion whose prompt is still being processed
    bool has_media        = false;
};

enum server_reconfigure_outcome {
    SERVER_RECONFIGURE_OUTCOME_APPLIED,
    SERVER_RECONFIGURE_OUTCOME_UNCHANGED,
    SERVER_RECONFIGURE_OUTCOME_PLANNED,
    SERVER_RECONFIGURE_OUTCOME_REFUSED,
};

enum server_reconfigure_reason {
    SERVER_RECONFIGURE_REASON_NONE,
    SERVER_RECONFIGURE_REASON_INVALID_GEOMETRY,
    SERVER_RECONFIGURE_REASON_CACHE_TYPE_CHANGE,
    SERVER_RECONFIGURE_REASON_FAN_OUT_IN_PROGRESS,
    SERVER_RECONFIGURE_REASON_RECONFIGURE_IN_PROGRESS,
    SERVER_RECONFIGURE_REASON_PAGE_OUT_FAILED,
    SERVER_RECONFIGURE_REASON_CONTEXT_BUILD_FAILED,
    SERVER_RECONFIGURE_REASON_INSUFFICIENT_MEMORY,
    SERVER_RECONFIGURE_REASON_MEDIA_HELD,
};

const char * server_reconfigure_outcome_name(server_reconfigure_outcome outcome);
const char * server_reconfigure_reason_name (server_reconfigure_reason  reason);
int          server_reconfigure_reason_status(server_reconfigure_reason reason); // HTTP status

// the receipt of a change, or its refusal: everything is as it was then
struct server_reconfigure_result {
    server_reconfigure_outcome outcome = SERVER_RECONFIGURE_OUTCOME_REFUSED;

    // refused
    server_reconfigure_reason      reason = SERVER_RECONFIGURE_REASON_NONE;
    std::string                    message;
    std::map<std::string, int64_t> details;

    server_geometry previous;
    server_geometry geometry;

    // the time in which no token could be decoded, and its parts
    int64_t t_sync_us     = 0;
    int64_t t_page_out_us = 0;
    int64_t t_page_in_us  = 0;
    int64_t t_attach_us   = 0;
    int64_t t_swap_us     = 0;

    int64_t t_pause_us() const { return t_sync_us + t_page_out_us + t_page_in_us + t_attach_us + t_swap_us; }

    // beside decoding
    int64_t t_wait_us     = 0; // from the request to the safe point, the build and the prefault excluded
    int64_t t_build_us    = 0;
    int64_t t_prefault_us = 0;

    struct slot {
        int32_t id       = 0;
        int64_t n_tokens = 0;
    };
    std::vector<slot> slots; // those that hold something

    int64_t n_tokens_held = 0;
    int64_t n_bytes_held  = 0;

    std::map<std::string, int64_t> bytes_needed; // device -> bytes of the new contexts

    int64_t n_weight_loads = 0;
};

// a change that was begun: what finish() needs to know
struct server_reconfigure_plan {
    server_geometry_request request;
    server_geometry         previous;
    server_geometry         next;

    int64_t t_request_us = 0;
};

struct server_reconfigure_build {
    bool        ok = false;
    std::string error;

    std::map<std::string, int64_t> bytes_needed; // device -> bytes
    int64_t host_bytes_needed = 0;               // of them, in host memory

    int64_t t_us          = 0;
    int64_t t_prefault_us = 0; // after the build: memory that the states will be copied into was made resident
};

struct server_reconfigure_move {
    bool        ok = false;
    std::string error;

    int64_t n_bytes  = 0;
    int64_t t_out_us = 0;
    int64_t t_in_us  = 0;
};

// what the logic needs of the engine
struct server_reconfigure_engine {
    virtual ~server_reconfigure_engine() = default;

    virtual server_geometry               geometry() const = 0;
    virtual server_geometry_limits        limits()   const = 0;
    virtual std::vector<server_slot_load> slots()    const = 0; // all of them, by ascending id
    virtual int64_t                       time_us()  const = 0;
    virtual int64_t                       n_weight_loads() const = 0;

    // new contexts beside the ones that serve; may run on another thread while those decode
    virtual server_reconfigure_build build(const server_geometry & next) = 0;

    // wait for what is being computed and apply the memory work that is only queued; false: it could not be done
    virtual bool sync() = 0;

    // copy one slot's state from the serving contexts into the built ones; the serving ones keep it
    virtual server_reconfigure_move move(int32_t id_slot) = 0;

    // give the built contexts what belongs to running generations: samplers, speculative state
    virtual bool attach(std::string & error) = 0;

    // the built contexts serve from here on, the previous ones are let go
    virtual void commit(const server_geometry & next) noexcept = 0;

    // forget what was built
    virtual void discard() noexcept = 0;
};

// check a request against what serves now; `plan` is filled in when it returns true: build plan.next, then call finish()
// otherwise `result` is the answer: refused or unchanged
bool server_reconfigure_begin(
        const server_reconfigure_engine & engine,
        const server_geometry_request   & request,
              server_reconfigure_plan   & plan,
              server_reconfigure_result & result);

// carry every state into what was built and make it serve
server_reconfigure_result server_reconfigure_finish(
              server_reconfigure_engine & engine,
        const server_reconfigure_plan   & plan,
        const server_reconfigure_build  & build);
